"""Results of a run: predictions, description, and figures by hand."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant
from benchmarks.train import __main__ as command, results, trainer as training
from benchmarks.train.images import hold_out, make_image_set, read_images
from benchmarks.train.networks import NETWORKS
from benchmarks.train.recipe import Recipe
from calibrant.data import open_dataset
from tests.support.prediction_files import arrays_in
from tests.support.training import (
    CLASSES,
    noisy_images,
    read_rows,
    short_recipe,
    standardised_by_hand,
)

# networks of a few steps
pytestmark = pytest.mark.filterwarnings("ignore:.*keeps predictions")


@pytest.fixture(scope="module")
def images():
    """Enough images for calibrators, a fifth with wrong labels."""
    train, test = noisy_images(5, 640), noisy_images(6, 120)
    for split in (train, test):
        split.labels[::5] = np.roll(split.labels[::5], 1)
    return make_image_set(train, test)


@pytest.fixture(scope="module")
def completed(images, tmp_path_factory):
    """A run whose second epoch was the best: folder, rows, out-of-distribution images, recipe."""
    folder = tmp_path_factory.mktemp("run") / "deeper" / "run"
    foreign = noisy_images(7, 40).images[:, :, ::-1].copy()
    recipe = short_recipe(loss="fedlas_ls", epochs=3, batch=32)
    accuracies = iter([0.5, 0.9, 0.1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(training, "_accuracy", lambda _: next(accuracies))
        rows = results.train(
            images, recipe, folder, name="mine", held_out=0.5, ood=("odd", foreign), device="cpu"
        )
    return folder, rows, foreign, recipe


def test_predictions_are_those_of_the_best_network(completed, images):
    folder, _, foreign, _ = completed
    assert set(open_dataset(folder / "predictions.npz").splits) == {"val", "test", "ood"}
    arrays = arrays_in(folder / "predictions.npz")
    splits = hold_out(images, 0.5)
    network = NETWORKS["tiny"](classes=CLASSES, channels=3).eval()
    network.load_state_dict(torch.load(folder / "best.pt", weights_only=True))
    inputs = {"val": splits.val.images, "test": images.test.images, "ood": foreign}
    for name, pixels in inputs.items():
        standardised = standardised_by_hand(pixels, splits.train.images)
        logits, features = arrays[f"{name}_logits"], arrays[f"{name}_features"]
        assert features.dtype == np.float16
        with torch.no_grad():
            expected_logits, expected = network(standardised)
            np.testing.assert_allclose(logits, expected_logits, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose(features, expected, rtol=2e-3, atol=1e-3)
        again = features.astype(np.float64) @ arrays["head_weight"].T + arrays["head_bias"]
        np.testing.assert_allclose(logits, again, rtol=5e-3, atol=5e-3)
    np.testing.assert_array_equal(arrays["val_labels"], splits.val.labels)
    np.testing.assert_array_equal(arrays["test_labels"], images.test.labels)
    assert set(arrays["ood_labels"].tolist()) == {-100}


def test_run_file_describes_the_run(completed, images):
    folder, _, _, recipe = completed
    run = json.loads((folder / "run.json").read_text())
    assert (run["data"], run["ood"], run["digest"]) == ("mine", "odd", images.fingerprint)
    assert Recipe(**run["recipe"]) == recipe


def ordered_pairs(inside, outside):
    """Share of pairs in which the first has the higher confidence; half for ties."""
    lead = inside[:, None] - outside[None]
    return ((lead > 0) + 0.5 * (lead == 0)).mean()


def figures_by_hand(probs, labels):
    confidence, right = probs.max(1), probs.argmax(1) == labels
    number = np.ceil(15 * confidence)  # of the bin
    gap, count = confidence - right, len(labels)
    gaps = [gap[number == bin_].sum() / count for bin_ in range(1, 16)]
    equal = [some.sum() / count for some in np.array_split(gap[confidence.argsort()], 15)]
    return {
        "accuracy": right.mean(),
        "ece": np.abs(gaps).sum(),
        "ada_ece": np.abs(equal).sum(),
        "over_ece": np.maximum(gaps, 0).sum(),
        "under_ece": -np.minimum(gaps, 0).sum(),
        "nll": -np.log(probs[np.arange(len(labels)), labels]).mean(),
        "brier": ((probs - np.eye(CLASSES)[labels]) ** 2).sum(1).mean(),
        "auroc": ordered_pairs(confidence[right], confidence[~right]),
    }


def test_rows_are_figures_of_the_stored_logits(completed, images):
    folder, rows, *_ = completed
    arrays = arrays_in(folder / "predictions.npz")
    fit_on, labels = (arrays["val_logits"], arrays["val_labels"]), arrays["test_labels"]
    calibrators = {"ts": calibrant.TemperatureScaling(), "smart": calibrant.SMART()}
    assert [row["after"] for row in rows] == ["none", *calibrators]
    for row in rows:
        logits, odd = arrays["test_logits"], arrays["ood_logits"]
        if row["after"] != "none":
            fitted = calibrators[row["after"]].fit(*fit_on)
            logits, odd = fitted(torch.tensor(logits)), fitted(torch.tensor(odd)).numpy()
        probs, foreign = (softmax(np.asarray(x, np.float64), 1) for x in (logits, odd))
        for name, expected in figures_by_hand(probs, labels).items():
            assert float(row[name]) == pytest.approx(expected, abs=2e-6), (row["after"], name)
        expected = ordered_pairs(probs.max(1), foreign.max(1))
        assert float(row["ood_auroc"]) == pytest.approx(expected, abs=1e-3)
        assert row["digest"] == images.fingerprint[:16]
        assert (row["data"], row["loss"], row["options"]) == ("mine", "fedlas_ls", "theta=0.95")
        assert list(row) == list(results.COLUMNS)
    assert rows[0]["accuracy"] == rows[1]["accuracy"]
    assert rows[0]["nll"] != rows[1]["nll"] != rows[2]["nll"]
    assert results.result_rows(folder) == rows


def test_out_of_distribution_images_are_optional(images, tmp_path):
    rows = results.train(images, short_recipe(batch=64), tmp_path, held_out=0.5, device="cpu")
    assert {(row["ood"], row["ood_auroc"]) for row in rows} == {("", "")}
    assert open_dataset(tmp_path / "predictions.npz").splits == ["val", "test"]
    assert [line[-1] for line in results.summary(rows)] == ["OOD AUROC", "-", "-", "-"]


def test_summary_is_in_percent(completed):
    _, rows, *_ = completed
    heading, *lines = results.summary(rows)
    for row, line in zip(rows, lines, strict=True):
        cells = dict(zip(heading, line, strict=True))
        assert (cells["loss"], cells["after"]) == (row["loss"], row["after"])
        assert float(cells["ECE"]) == pytest.approx(100 * float(row["ece"]), abs=0.005)
        assert float(cells["O-ECE"]) == pytest.approx(100 * float(row["over_ece"]), abs=0.005)
        assert float(cells["NLL"]) == pytest.approx(float(row["nll"]), abs=0.0005)
        assert float(cells["OOD AUROC"]) == pytest.approx(100 * float(row["ood_auroc"]), abs=0.05)


# The command.

SHORT = ("--network", "tiny", "--epochs", "1", "--batch", "256", "--device", "cpu")


def test_defaults_depend_on_the_data(monkeypatch):
    runs = []

    def train(_, recipe, folder, *, name, ood, held_out, **rest):
        runs.append((recipe, name, ood[0], held_out))
        return []

    digits = read_images()
    monkeypatch.setattr(command, "train", train)
    monkeypatch.setattr(command, "read_images", lambda path=None: digits)
    command.main(["--seeds", "0", "4"])
    losses = ["ce", "ls", "mbls", "acls", "focal", "fedlas_ls", "fedlas_mbls"]
    assert [(r.loss, r.seed) for r, *_ in runs] == [(x, s) for s in (0, 4) for x in losses]
    assert {(r.network, r.epochs, r.augment, *rest) for r, *rest in runs} == {
        ("tiny", 30, False, "digits", "shuffled", 0.3)
    }
    runs.clear()
    command.main(["some.tar", "--loss", "ce"])
    assert runs == [(Recipe(), "some.tar", "shuffled", 0.1)]


def test_results_are_printed_and_stored(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command.main(["--loss", "ce", "LS", *SHORT, "-o", "all"])
    out, err = capsys.readouterr()
    table = out.split("\n")
    assert table[0].split()[:3] == ["loss", "after", "accuracy"]
    expected = [[loss, after] for loss in ("ce", "ls") for after in ("none", "ts", "smart")]
    assert [line.split()[:2] for line in table[1:7]] == expected
    assert f"{Path('all/tiny-ce-0')}: ECE " in err
    rows = read_rows(Path("all/results.csv").read_text())
    assert [[row["loss"], row["after"]] for row in rows] == expected
    assert {row["ood"] for row in rows} == {"shuffled"}
    stored = open_dataset("all/tiny-ce-0/predictions.npz").split("val").read("labels")
    np.testing.assert_array_equal(stored, hold_out(read_images(), 0.3).val.labels)

    # the same run with other out-of-distribution images replaces its rows
    command.main(["--loss", "ce", *SHORT, "-o", "all", "--ood", "uniform"])
    again = read_rows(Path("all/results.csv").read_text())
    assert [row["ood"] for row in again] == ["uniform"] * 3 + ["shuffled"] * 3
    assert again[3:] == rows[3:]
    for row, before in zip(again[:3], rows[:3], strict=True):
        same = set(row) - {"ood", "ood_auroc"}
        assert {name: row[name] for name in same} == {name: before[name] for name in same}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--loss ce ls --set alpha=0.1", "--set is for one loss"),
        ("--loss ls --set beta=1", "ls has no option 'beta': its options"),
        ("--loss ls --set alpha=x", "alpha must be a number, at least 0 and "),
        ("--loss hinge", "invalid name value: 'hinge'"),
        ("--loss ce --network vgg", "unknown network 'vgg': choose from resnet18"),
        ("--loss ce --ood nowhere", "nowhere does not exist"),
        ("nowhere.tar --loss ce", "nowhere.tar does not exist"),
    ],
)
def test_bad_calls_are_refused(tmp_path, capsys, words, message):
    with pytest.raises((SystemExit, ValueError, TypeError, OSError)) as raised:
        command.main([*words.split(), "-o", str(tmp_path)])
    assert re.search(message, str(raised.value) + capsys.readouterr().err)
