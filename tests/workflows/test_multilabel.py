"""Tags in all workflows: files give what arrays and the plain definitions give."""

import numpy as np
import pytest
from scipy.special import expit

import calibrant as cal
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.calibrators.tags import PooledTags, TagIdentity, TagScaling
from calibrant.data import open_dataset
from calibrant.workflows.fit import fit_and_measure
from tests.support.simulate import drawn_tags

SLOPE, INTERCEPT = np.array([0.4, 0.6, 0.9]), np.array([-1.0, 0.5, 0.0])
pytestmark = pytest.mark.usefixtures("small_chunks")


def mean_nll(logits, labels):
    kept = labels != -100
    return float((np.logaddexp(0, logits[kept]) - labels[kept] * logits[kept]).mean())


@pytest.fixture
def arrays(rng):
    """Two splits; every tenth label is unknown, and its logit then NaN."""
    arrays = {}
    for name in ("val", "test"):
        logits, labels = drawn_tags(rng, 900, SLOPE, INTERCEPT)
        unknown = rng.random(labels.shape) < 0.1
        arrays[f"{name}_logits"] = np.where(unknown, np.nan, logits)
        arrays[f"{name}_labels"] = np.where(unknown, -100, labels)
        arrays[f"{name}_size"] = rng.uniform(0.1, 3, 900)
        arrays[f"{name}_patient"] = np.arange(900) // 9
    return arrays


@pytest.fixture
def file(arrays, tmp_path):
    np.savez(tmp_path / "tags.npz", **arrays)
    return tmp_path / "tags.npz"


def val(arrays):
    return arrays["val_logits"], arrays["val_labels"]


def test_fit_on_a_file_is_the_fit_on_its_arrays(file, arrays):
    fitted = cal.fit(file, estimand="multilabel")
    assert isinstance(fitted, TagScaling)
    expected = TagScaling().fit(*val(arrays))
    np.testing.assert_array_equal(fitted.slope_, expected.slope_)
    again = cal.fit(file, method=TagScaling())  # the calibrator knows
    np.testing.assert_array_equal(again.intercept_, expected.intercept_)
    weighted = cal.fit(file, method="pooled", estimand="multilabel", sample_weight="size")
    pooled = PooledTags().fit(*val(arrays), sample_weight=arrays["val_size"])
    np.testing.assert_array_equal(weighted.slope_, pooled.slope_)


def test_effect_is_that_of_every_label(file, arrays):
    fitted = TagScaling().fit(*val(arrays))
    changed = cal.effect(fitted, file, level=None)
    logits, labels = (arrays[f"test_{name}"] for name in ("logits", "labels"))
    line = fitted.slope_.double().numpy() * logits + fitted.intercept_.double().numpy()
    assert changed.before["nll"].value == pytest.approx(mean_nll(logits, labels), rel=1e-6)
    assert changed.after["nll"].value == pytest.approx(mean_nll(line, labels), rel=1e-6)
    assert changed.after["nll"].value < changed.before["nll"].value - 0.05
    assert changed.after.estimand == "multilabel"
    assert changed.argmax_changed == ((line > 0) != (logits > 0)).sum()  # NaN is neither
    weighted = cal.effect(fitted, file, sample_weight="size", level=None).after["nll"].value
    kept = labels != -100
    losses = np.logaddexp(0, line[kept]) - labels[kept] * line[kept]
    weight = np.broadcast_to(arrays["test_size"][:, None], kept.shape)[kept]
    assert weighted == pytest.approx(np.average(losses, weights=weight), rel=1e-6)
    with pytest.raises(ValueError, match='is for exclusive classes, got estimand="multilabel"'):
        cal.effect(TemperatureScaling(), file, estimand="multilabel")


def test_cross_fit_calibrates_each_row_by_the_other_folds(file, arrays):
    result = cal.cross_fit(
        file, estimand="multilabel", folds=3, groups="patient", split="val", level=None
    )
    logits, labels = val(arrays)
    assert all(len(set(result.folds[arrays["val_patient"] == p]) - {-1}) == 1 for p in range(100))
    line = np.zeros_like(logits)
    for i, one in enumerate(result.calibrators):
        rows = result.folds == i
        alone = TagScaling().fit(logits[~rows], labels[~rows])
        np.testing.assert_allclose(one.slope_, alone.slope_, rtol=1e-5)
        line[rows] = alone.slope_.numpy() * logits[rows] + alone.intercept_.numpy()
    assert result.effect.after["nll"].value == pytest.approx(mean_nll(line, labels), rel=1e-5)


def test_description_and_json_of_a_fit(file, arrays):
    result = fit_and_measure(file, estimand="multilabel", metrics=["nll"])
    count = (arrays["val_labels"] != -100).sum()
    first, second = result.describe()
    assert first.startswith(f"{count:,} labels; TagScaling for 3 tags: 6 parameters")
    assert second == f"the prediction of {result.effect.argmax_changed:,} labels changes"
    about = result.to_dict()
    assert (about["n"], about["classes"], about["parameters"]) == (count, 3, 6)
    assert about["estimand"] == "multilabel"


def test_apply_keeps_the_domain(rng, tmp_path):
    logits, labels = drawn_tags(rng, 500, SLOPE, INTERCEPT)
    fitted = TagScaling().fit(logits, labels)
    cal.save(fitted, tmp_path / "saved")
    np.savez(tmp_path / "logits.npz", logits=logits, labels=labels)
    np.savez(tmp_path / "probs.npz", probs=expit(logits), labels=labels)
    for name in ("logits", "probs"):
        cal.apply(cal.load(tmp_path / "saved"), tmp_path / f"{name}.npz", tmp_path / "out.npz")
        split = open_dataset(tmp_path / "out.npz").split()
        assert split.domain == name
        line = fitted.transform(logits)
        expected = line if name == "logits" else expit(line)
        np.testing.assert_allclose(split.read(name), expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(split.labels, labels)
    again = cal.fit(tmp_path / "probs.npz", estimand="multilabel")  # rows need not sum to one
    np.testing.assert_allclose(again.slope_, fitted.slope_, rtol=1e-4)
    zero = np.where(logits > 5, 0.0, expit(logits))
    with pytest.warns(UserWarning, match="probabilities are 0 and have no logarithm"):
        cal.fit({"probs": zero, "labels": np.where(logits > 5, 0, labels)}, estimand="multilabel")
    narrow = {"logits": logits[:, :2], "labels": labels[:, :2]}
    with pytest.raises(ValueError, match=r"fitted for 3"):
        cal.apply(fitted, narrow, tmp_path / "out.npz")


def test_logits_that_sum_to_one_are_not_told_of(rng):
    logits = rng.dirichlet(np.ones(3), 200)
    labels = (rng.random((200, 3)) < expit(logits)).astype(int)
    cal.fit({"logits": logits, "labels": labels}, method="pooled", estimand="multilabel")
    cal.compare(
        {"logits": logits, "labels": labels}, methods="pooled", estimand="multilabel", level=None
    )


def test_compare_measures_methods_for_tags(file, arrays):
    comparison = cal.compare(file, estimand="multilabel", level=None)
    assert [row.method for row in comparison.rows] == ["none", "pooled", "tags"]
    assert [row.error for row in comparison.rows] == [None] * 3
    logits, labels = (arrays[f"test_{name}"] for name in ("logits", "labels"))
    for row, kind in zip(comparison.rows, (TagIdentity, PooledTags, TagScaling), strict=True):
        alone = kind().fit(*val(arrays))
        line = alone.slope_.numpy() * logits + alone.intercept_.numpy()
        assert row.evaluation is not None
        assert row.evaluation["nll"].value == pytest.approx(mean_nll(line, labels), rel=1e-5)
    count = tuple(int((arrays[f"{name}_labels"] != -100).sum()) for name in ("val", "test"))
    assert (comparison.n_fit, comparison.n_test, comparison.classes) == (*count, 3)
    assert comparison.describe().startswith(f"3 tags; fitted on {count[0]:,} labels (val split)")
    assert comparison["tags"].argmax_changed  # which is no reason against it
    assert comparison.choice() == "tags"
    assert "those that keep" not in comparison.advice()


def test_compare_cross_fits_one_split(arrays):
    data = {"logits": arrays["val_logits"], "labels": arrays["val_labels"]}
    comparison = cal.compare(data, methods={"mine": TagScaling()}, level=None)
    assert comparison.estimand == "multilabel"  # the calibrator knows
    assert comparison.n_fit == comparison.n_test == (arrays["val_labels"] != -100).sum()
    with pytest.raises(ValueError, match="unknown multi-label method 'ts'"):
        cal.compare(data, methods="ts", estimand="multilabel")
    with pytest.raises(ValueError, match="TemperatureScaling is for exclusive classes"):
        cal.compare(data, methods={"a": TemperatureScaling(), "b": TagScaling()})
