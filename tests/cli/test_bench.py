"""calibrant bench train and bench rows."""

import re
from pathlib import Path

import numpy as np
import pytest

from calibrant.bench.train import results
from calibrant.bench.train.images.image_set import hold_out
from calibrant.bench.train.images.read import read_images
from calibrant.bench.train.recipe import Recipe
from calibrant.cli import cli
from calibrant.data import open_dataset
from tests.support.training import read_rows

SHORT = ("--network", "tiny", "--epochs", 1, "--batch", 256, "--device", "cpu")


def test_defaults_depend_on_the_data(monkeypatch):
    runs = []

    def train(_, recipe, folder, *, name, ood, held_out, **rest):
        runs.append((recipe, name, ood[0], held_out))
        return []

    digits = read_images()
    monkeypatch.setattr(results, "train", train)
    monkeypatch.setattr("calibrant.bench.train.images.read.read_images", lambda path=None: digits)
    cli.main(["bench", "train", "--seed", "0 4"], standalone_mode=False)
    losses = ["ce", "ls", "mbls", "acls", "focal", "fedlas_ls", "fedlas_mbls"]
    assert [(r.loss, r.seed) for r, *_ in runs] == [(x, s) for s in (0, 4) for x in losses]
    assert {(r.network, r.epochs, r.augment, *rest) for r, *rest in runs} == {
        ("tiny", 30, False, "digits", "shuffled", 0.3)
    }
    runs.clear()
    cli.main(["bench", "train", "some.tar", "--loss", "ce"], standalone_mode=False)
    assert runs == [(Recipe(), "some.tar", "shuffled", 0.1)]


def test_results_are_printed_stored_and_measured_again(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, out, err = run("bench", "train", "--loss", "ce,LS", *SHORT, "-o", "all")
    assert code == 0, err
    table = out.split("\n")
    assert table[0].split()[:3] == ["loss", "after", "accuracy"]
    expected = [[loss, after] for loss in ("ce", "ls") for after in ("none", "ts", "smart")]
    assert [line.split()[:2] for line in table[1:7]] == expected
    assert f"{Path('all/tiny-ce-0')}: ECE " in err
    first = Path("all/results.csv").read_text()
    rows = read_rows(first)
    assert [[row["loss"], row["after"]] for row in rows] == expected
    assert {row["ood"] for row in rows} == {"shuffled"}
    stored = open_dataset("all/tiny-ce-0/predictions.npz").split("val").read("labels")
    np.testing.assert_array_equal(stored, hold_out(read_images(), 0.3).val.labels)

    code, out, _ = run("bench", "rows", "all/tiny-ce-0", "all/tiny-ls-0")
    assert (code, out) == (0, first)

    # the same run with other out-of-distribution images replaces its rows
    code, *_ = run("bench", "train", "--loss", "ce", *SHORT, "-o", "all", "--ood", "uniform")
    again = read_rows(Path("all/results.csv").read_text())
    assert (code, len(again)) == (0, 6)
    assert [row["ood"] for row in again] == ["uniform"] * 3 + ["shuffled"] * 3
    assert again[3:] == rows[3:]
    for row, before in zip(again[:3], rows[:3], strict=True):
        same = set(row) - {"ood", "ood_auroc"}
        assert {name: row[name] for name in same} == {name: before[name] for name in same}

    code, _, err = run("bench", "train", "--loss", "ce", *SHORT, "-o", "all", "--rate", 0.2)
    assert code == 2
    assert "has a run with another rate (0.1)" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--loss", "ce ls", "--set", "alpha=0.1"), "--set is for one loss"),
        (("--set", "alpha=0.1"), "--set is for one loss"),
        (("--loss", "ls", "--set", "alpha"), "--set wants KEY=VALUE, got alpha"),
        (("--loss", "ls", "--set", "beta=1"), "error: options of the loss ls: .*beta"),
        (("--loss", "hinge"), "unknown loss 'hinge': choose from ce, brier, .*fedlas_mbls"),
        (("--loss", ","), "name a loss with --loss"),
        (("--seed", "x"), "--seed must be whole numbers, got x"),
        (("--loss", "ce", "--network", "vgg"), "unknown network 'vgg': choose from resnet18"),
        (("--loss", "ce", "--ood", "nowhere"), "nowhere does not exist"),
        (("nowhere.tar", "--loss", "ce"), "nowhere.tar does not exist"),
        (("--loss", "ce", "--epochs", 1, "--rate", 1e30), "error: the loss became nan in epoch 1"),
    ],
)
def test_bad_calls_exit_with_2(run, tmp_path, words, message):
    code, out, err = run("bench", "train", *words, "-o", tmp_path)
    assert (code, out) == (2, "")
    assert re.search(message, err), err
    assert "bug" not in err
