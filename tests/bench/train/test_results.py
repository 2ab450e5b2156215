"""Results of a run: predictions, description, and figures by hand."""

import json

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant
from calibrant.bench.train import results, trainer as training
from calibrant.bench.train.images.image_set import hold_out, make_image_set
from calibrant.bench.train.networks import NETWORKS
from calibrant.bench.train.recipe import Recipe
from calibrant.data import open_dataset
from tests.support.prediction_files import arrays_in
from tests.support.training import CLASSES, noisy_images, short_recipe, standardised_by_hand

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


def test_run_file_describes_the_run(completed, images, tmp_path):
    folder, _, _, recipe = completed
    run = json.loads((folder / "run.json").read_text())
    assert (run["data"], run["ood"], run["digest"]) == ("mine", "odd", images.fingerprint)
    assert Recipe(**run["recipe"]) == recipe
    with pytest.raises(FileNotFoundError, match="has no completed run"):
        results.result_rows(tmp_path)


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
