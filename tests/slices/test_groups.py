"""Known groups side by side: slow definitions of rates, intervals that hold together, forms."""

import json

import numpy as np
import pytest

import calibrant as cal
from calibrant import show
from calibrant.slices import measure_groups


@pytest.fixture
def two_classes(rng):
    site = rng.choice(["A", "B", "C"], 5000, p=[0.6, 0.3, 0.1])
    logits = 2 * rng.normal(size=5000)
    truth = 1 / (1 + np.exp(-(logits - (site == "B"))))
    return site, logits, (rng.uniform(size=5000) < truth).astype(int)


def test_figures_are_those_of_a_slow_definition(two_classes, rng):
    site, logits, labels = two_classes
    weight = rng.uniform(0.5, 2, 5000)
    result = measure_groups(logits, labels, by=site, sample_weight=weight)
    assert list(result.before) == ["A", "B", "C"]
    for value, group in result.before.items():
        mask = site == value
        p, y, w = 1 / (1 + np.exp(-logits[mask])), labels[mask], weight[mask]
        chosen = p >= 0.5
        expected = {
            "n": mask.sum(),
            "share": w.sum() / weight.sum(),
            "claimed": np.average(p, weights=w),
            "observed": np.average(y, weights=w),
            "accuracy": np.average(chosen == y, weights=w),
            "selected": np.average(chosen, weights=w),
            "true_positive_rate": np.average(chosen[y == 1], weights=w[y == 1]),
            "false_positive_rate": np.average(chosen[y == 0], weights=w[y == 0]),
        }
        for name, figure in expected.items():
            assert getattr(group, name) == pytest.approx(figure), name
    assert result.before["B"].gap.low > 0.05
    rates = [group.true_positive_rate for group in result.before.values()]
    assert result.differences()[""]["true_positive_rate"] == pytest.approx(max(rates) - min(rates))


def test_before_and_after_a_calibrator(two_classes):
    site, logits, labels = two_classes
    calibrator = cal.CALIBRATORS["sigmoid"]().fit(logits, labels)
    result = measure_groups(logits, labels, by=site, calibrator=calibrator)
    after = measure_groups(calibrator.transform(logits), labels, by=site)
    for value, group in result.after.items():
        assert group.gap == pytest.approx(after.before[value].gap, abs=1e-6)
    assert "1 of 3, before (largest gap" in result.verdict()
    assert "A after" in str(result)
    assert len(result.to_frame()) == 6
    plain = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert set(plain["differences"]) == {"before", "after"}
    assert result.to_latex().count(r"\begin{tabular}") == 2
    assert "Groups of group" in result._repr_html_()


def test_more_classes_and_ranges_of_numbers(rng):
    logits = 3 * rng.normal(size=(4000, 5))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    data = {"logits": logits, "labels": labels, "age": rng.uniform(20, 80, 4000)}
    result = measure_groups(data, by="age")
    assert len(result.before) == 8
    assert next(iter(result.before)).startswith("age < ")
    assert len(list(show.box(result).tables())) == 1
    assert np.isnan(result.before[next(iter(result.before))].selected)


def test_intervals_hold_together():
    missed = 0
    for seed in range(80):
        rng = np.random.default_rng(seed)
        site, probs = rng.integers(0, 8, 400), rng.beta(0.5, 3, 400)
        labels = (rng.uniform(size=400) < probs).astype(int)
        groups = measure_groups(probs=probs, labels=labels, by=site).before
        missed += any(g.gap.low > 0 or g.gap.high < 0 for g in groups.values())
    assert missed <= 15  # of 80, where 8 are allowed on average; more with probability 0.7 %


def test_bad_input_is_refused(two_classes):
    site, logits, labels = two_classes
    data = {"logits": logits, "labels": labels, "site": site, "constant": np.ones(5000)}
    with pytest.raises(ValueError, match="unknown column 'sit': did you mean site"):
        measure_groups(data, by="sit")
    with pytest.raises(ValueError, match="constant has no different values"):
        measure_groups(data, by="constant")


def test_certain_claims_and_ties(rng):
    """Claims of exactly 1 may all be wrong; at 0.5 all figures mean the same decision."""
    site = np.array(list("ABCDE"))[np.arange(1000) % 5]
    probs = np.where(site == "A", 1.0, rng.uniform(0.1, 0.9, 1000).round(1))
    labels = np.where(site == "A", 0, rng.integers(0, 2, 1000))
    groups = measure_groups(probs=probs, labels=labels, by=site).before
    assert groups["A"].gap.low > 0.95
    assert groups["A"].gap.high <= 1
    for value, group in groups.items():
        right = (probs >= 0.5) == (labels == 1)
        assert group.accuracy == pytest.approx(right[site == value].mean())


def test_names_and_forms_of_groups(rng):
    probs, labels = rng.uniform(size=300), rng.integers(0, 2, 300)
    code = np.array([1000001.0, 1000002.0, np.nan])[np.arange(300) % 3]
    groups = measure_groups(probs=probs, labels=labels, by=code).before
    assert list(groups) == ["1000001", "1000002", "group is missing"]
    with pytest.raises(TypeError, match="arrays have no columns, got by='site'"):
        measure_groups(probs=probs, labels=labels, by="site")
    with pytest.raises(ValueError, match=r"rename the column 'P\(1\)'"):
        measure_groups({"probs": probs, "labels": labels, "P(1)": code}, by="P(1)")
