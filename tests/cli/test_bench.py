"""calibrant bench train, bench rows, bench arena and bench arena-view."""

import re
from pathlib import Path

import numpy as np
import pytest

from calibrant.bench.arena import small_suite
from calibrant.bench.train import results
from calibrant.bench.train.images.image_set import hold_out
from calibrant.bench.train.images.read import read_images
from calibrant.bench.train.recipe import Recipe
from calibrant.cli import cli
from calibrant.data import open_dataset
from tests.support.predictions import predictions, splits
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
        (
            ("--loss", "ls", "--set", "beta=1"),
            "error: ls has no option 'beta': its options",
        ),
        (("--loss", "ls", "--set", "alpha=x"), "error: alpha must be a number, at least 0 and "),
        (("--loss", "mmce", "--set", "twice=maybe"), "error: twice must be True or False, got 'm"),
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


@pytest.fixture
def predictions_folder(tmp_path, monkeypatch):
    """Work in a folder with two tasks in data/, and a file that is none."""
    monkeypatch.chdir(tmp_path)
    Path("data").mkdir()
    for seed, name in ((1, "a"), (3, "b")):
        both = splits(val=predictions(seed=seed), test=predictions(seed=seed + 1))
        np.savez(f"data/{name}.npz", **both)
    np.savez("data/plain.npz", **predictions(seed=5))


def test_arena_measures_tasks_and_shows_views(run, predictions_folder):
    words = ("bench", "arena", "data", "--workers", 1, "--methods", "none,TS,vector")
    code, out, err = run(*words, "--seed", "0 1")
    assert code == 0, err
    assert "left out: " in err
    assert "plain.npz has no split 'val'" in err
    table = [line.split() for line in out.splitlines()]
    assert table[0] == ["Mean", "nll"]
    assert {line[0] for line in table[2:5]} == {"none", "ts", "vector"}
    first = Path("arena.csv").read_text()
    assert len(read_rows(first)) == 2 * 2 * 3

    code, _, _ = run(*words)
    assert (code, Path("arena.csv").read_text()) == (0, first)
    for view, heading in (("wins", "Win rates"), ("ranks", "Mean ranks"), ("elo", "Elo ratings")):
        code, out, err = run("bench", "arena-view", "arena.csv", "--view", view)
        assert (code, err) == (0, "")
        assert out.splitlines()[0] == f"{heading} in nll"
        assert "2 tasks of 2 data sets" in " ".join(out.split())

    some = ("--suites", "data-multiclass", "--methods", "ts,none", "--metric", "brier")
    code, out, err = run("bench", "arena-view", "arena.csv", *some, "-o", "wins.md")
    assert (code, out, err) == (0, "", "wrote wins.md\n")
    assert len(Path("wins.md").read_text().splitlines()) == 6

    code, out, err = run("bench", "arena-view", "arena.csv", "--view", "calarena", "-o", "results")
    assert code == 0
    files = {path.name for path in Path("results/data-multiclass").iterdir()}
    assert files == {"none.csv", "ts.csv", "vector.csv"}


def test_arena_has_a_suite_of_its_own(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = small_suite.small_suite()
    monkeypatch.setattr(small_suite, "small_suite", lambda: whole[:2])
    code, out, err = run("bench", "arena", "--methods", "none ts", "--workers", 1, "-o", "r.csv")
    assert code == 0, err
    assert "small (2)" in out
    assert "the rows are in r.csv" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("arena", "nowhere"), "nowhere does not exist"),
        (("arena", "data", "--seed", "x"), "--seed must be whole numbers, got x"),
        (("arena", "data", "--methods", "tss"), "unknown method 'tss': did you mean ts"),
        (("arena", "data", "--methods", "nothing:Here"), "No module named 'nothing'"),
        (("arena-view", "none.csv"), "none.csv has no rows: calibrant bench arena writes them"),
    ],
)
def test_bad_calls_of_the_arena_exit_with_2(run, predictions_folder, words, message):
    code, out, err = run("bench", *words)
    assert (code, out) == (2, "")
    assert message in err
    assert "bug" not in err
