"""Calibrators of tags: known lines, the definition of the posterior mode, and every guarantee."""

import re
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.special import expit

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.artifacts import kind_of
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS, TAG_CALIBRATORS, make_calibrator
from calibrant.calibrators.tags import _PRIOR_SPREAD, PooledTags, TagIdentity, TagScaling
from calibrant.decide import PriorCorrection
from calibrant.deploy import export, fold_into_linear
from calibrant.monitor import Monitor
from tests.support.simulate import drawn_tags

SLOPE, INTERCEPT = np.array([0.4, 0.6, 0.9, 1.3]), np.array([-1.0, 0.5, 0.0, -2.0])


def tagged(rng, n, slope=SLOPE, intercept=INTERCEPT, means=0.0):
    return drawn_tags(rng, n, slope, intercept, means)


def loss(logits, labels):
    """Mean log loss of all cells."""
    return float(np.mean(np.logaddexp(0, logits) - labels * logits))


def line_loss(line, logits, labels):
    return loss(line[0] * logits + line[1], labels)


@pytest.fixture(scope="module")
def data():
    return tagged(np.random.default_rng(7), 1500)


@pytest.fixture(scope="module", params=list(TAG_CALIBRATORS))
def fitted(request, data):
    return TAG_CALIBRATORS[request.param]().fit(*data)


# ------------------------------------------------------------------------------------ the lines


def test_lines_of_many_labels_are_the_truth(rng):
    fitted = TagScaling().fit(*tagged(rng, 200_000))
    np.testing.assert_allclose(fitted.slope_, SLOPE, atol=0.03)
    np.testing.assert_allclose(fitted.intercept_, INTERCEPT, atol=0.03)


def test_lines_of_many_labels_are_those_of_platt(rng):
    logits, labels = tagged(rng, 20_000, means=np.array([0.0, -2.0, 3.0, 0.0]))
    fitted = TagScaling().fit(logits, labels)
    platt = [CALIBRATORS["sigmoid"]().fit(x, y) for x, y in zip(logits.T, labels.T, strict=True)]
    np.testing.assert_allclose(fitted.slope_, [float(p.slope_) for p in platt], atol=0.02)
    np.testing.assert_allclose(fitted.intercept_, [float(p.offset_) for p in platt], atol=0.06)


def test_lines_are_modes_of_their_posterior(rng):
    """Each maximises likelihood times prior, searched without the library, given the prior."""
    logits, labels = tagged(rng, 120, means=np.array([-1.0, 0.0, 0.0, 1.0]))
    fitted = TagScaling().fit(logits, labels)
    solution = fitted.solution_
    assert solution is not None
    assert solution.converged
    assert 1 < solution.steps < 50
    pool = np.array([np.log(float(fitted.pool_[0])), float(fitted.pool_[1])])
    slopes, centres = fitted.slope_.double().numpy(), logits.mean(0)
    shifts = fitted.intercept_.double().numpy() - (1 - slopes) * centres
    off = np.stack([np.log(slopes), shifts], -1) - pool
    # gradients of the likelihood are those of one normal prior: information @ off = -gradient
    tilt = slopes * (logits - centres)
    wrong = expit(tilt + centres + shifts) - labels
    gradient = np.stack([(wrong * tilt).sum(0), wrong.sum(0)], -1)
    precision, *_ = np.linalg.lstsq(off, -gradient, rcond=None)
    np.testing.assert_allclose(off @ precision, -gradient, atol=1e-3)
    np.testing.assert_allclose(precision, precision.T, rtol=0.01)
    covariance = np.linalg.inv(precision)
    np.testing.assert_allclose(np.sqrt(np.diag(covariance)), fitted.spread_, rtol=0.01)
    # the prior maximises the marginal likelihood of normal approximations at the modes
    weight = expit(tilt + centres + shifts)
    weight = weight * (1 - weight)
    information = np.array(
        [
            [[(w * t * t).sum(), (w * t).sum()], [(w * t).sum(), w.sum()]]
            for w, t in zip(weight.T, tilt.T, strict=True)
        ]
    )
    modes = off + pool
    seen = modes - np.linalg.solve(information, gradient[..., None])[..., 0]

    def marginal(values):
        root = np.array([[np.exp(values[2]), 0], [values[3], np.exp(values[4])]])
        spread = root @ root.T
        value = values[0] ** 2 / 2 + values[1] ** 2 / 18
        value += np.linalg.slogdet(spread)[1] + _PRIOR_SPREAD**2 * np.trace(np.linalg.inv(spread))
        for one, there in zip(information, seen, strict=True):
            total, d = spread + np.linalg.inv(one), there - values[:2]
            value += (np.linalg.slogdet(total)[1] + d @ np.linalg.solve(total, d)) / 2
        return value

    start = np.array([*pool, np.log(_PRIOR_SPREAD), 0.0, np.log(_PRIOR_SPREAD)])
    best = minimize(marginal, start, method="Nelder-Mead", options={"maxiter": 5000, "xatol": 1e-6})
    root = np.array([[np.exp(best.x[2]), 0], [best.x[3], np.exp(best.x[4])]])
    np.testing.assert_allclose(best.x[:2], pool, atol=0.01)
    np.testing.assert_allclose(root @ root.T, covariance, atol=0.01)


def test_a_pooled_line_is_platts_of_all_labels(data):
    logits, labels = data
    fitted = PooledTags().fit(logits, labels)
    platt = CALIBRATORS["sigmoid"]().fit(logits.reshape(-1), labels.reshape(-1))
    np.testing.assert_allclose(fitted.slope_, np.full(4, float(platt.slope_)), atol=2e-3)
    np.testing.assert_allclose(fitted.intercept_, np.full(4, float(platt.offset_)), atol=2e-3)


def test_nothing_changes_without_a_method(data):
    logits, labels = data
    np.testing.assert_array_equal(TagIdentity().fit(logits, labels).transform(logits), logits)


def test_rare_tags_lean_on_the_others(rng):
    """With 40 labels of 14 tags, partial pooling beats lines of their own and one line."""
    gains = []
    for _ in range(10):
        slope = np.exp(rng.normal(-0.5, 0.3, 14))
        intercept = rng.normal(-1, 0.5, 14)
        train, test = tagged(rng, 40, slope, intercept), tagged(rng, 4000, slope, intercept)
        pooled = loss(PooledTags().fit(*train).transform(test[0]), test[1])
        own = []
        for x, y, new in zip(train[0].T, train[1].T, test[0].T, strict=True):
            line = minimize(line_loss, [1.0, 0.0], (x, y)).x
            own.append(np.clip(line[0] * new + line[1], -20, 20))
        ours = loss(TagScaling().fit(*train).transform(test[0]), test[1])
        gains.append((pooled - ours, loss(np.stack(own, -1), test[1]) - ours))
    assert (np.mean(gains, 0) > 0.005).all()


def test_the_spread_among_tags_is_estimated(rng):
    alike = TagScaling().fit(*tagged(rng, 2000, np.full(30, 0.5), np.full(30, -1.0)))
    assert float(alike.spread_.max()) < 0.08
    slope = np.exp(rng.normal(-0.5, 0.4, 30))
    apart = TagScaling().fit(*tagged(rng, 2000, slope, rng.normal(-1, 0.8, 30)))
    np.testing.assert_allclose(apart.spread_, [0.4, 0.8], rtol=0.35)
    assert float(apart.pool_[0]) == pytest.approx(np.exp(-0.5), rel=0.2)


class InParts:
    """All examples of a fit, some rows at a time."""

    classes = 4

    def __init__(self, logits, labels, weight):
        rows = np.array_split(np.arange(len(labels)), 3)
        self.parts = [examples(logits[r], labels[r], weight[r], "multilabel") for r in rows]

    def sums(self, task):
        return [np.sum(column, axis=0) for column in zip(*map(task, self.parts), strict=True)]


@pytest.mark.parametrize("kind", TAG_CALIBRATORS.values())
def test_passes_over_all_examples_refine_a_fit_on_some(data, kind):
    logits, labels = data[0], data[1].copy()
    labels[300:, 1] = labels[:, 2] = -100  # one tag has labels among the first only, one none
    rare = r"TagScaling: 1 of 4 tags have no label 0 or no label 1 \(2\): they lean on"
    told = partial(pytest.warns, UserWarning, match=rare) if kind is TagScaling else nullcontext
    weight = 7 * np.random.default_rng(0).exponential(size=1500)
    with told():
        whole = kind().fit(logits, labels, sample_weight=weight)
        fitted = kind().fit(logits[:500], labels[:500])
    with told():
        fitted.refine(InParts(logits, labels, weight))
    np.testing.assert_allclose(fitted.slope_, whole.slope_, rtol=1e-4)
    np.testing.assert_allclose(fitted.intercept_, whole.intercept_, atol=1e-4)
    assert fitted.solution_.converged


# --------------------------------------------------------------------------------- the guarantees


def test_probabilities_are_sigmoids_of_rising_lines(fitted, data):
    logits = data[0]
    probs = fitted.predict_proba(logits)
    assert isinstance(probs, np.ndarray)
    assert (fitted.slope_ > 0).all()
    line = fitted.slope_.numpy() * logits + fitted.intercept_.numpy()
    np.testing.assert_allclose(probs, expit(line), atol=1e-6)
    np.testing.assert_allclose(fitted.transform(logits), line, atol=1e-6)
    found = fitted.predict(logits)
    assert found.dtype == bool
    np.testing.assert_array_equal(found, line > 0)
    tensor = torch.from_numpy(logits)
    torch.testing.assert_close(fitted.log_probs(tensor).exp(), torch.from_numpy(probs))


def test_the_order_of_examples_is_kept_for_each_tag(fitted):
    logits = torch.linspace(-30, 30, 2001)[:, None].expand(-1, 4)
    assert (fitted(logits).diff(dim=0) > 0).all()


def test_a_row_does_not_depend_on_its_batch(fitted, data):
    whole = fitted.transform(data[0])
    for i in (0, 700, 1499):
        np.testing.assert_array_equal(fitted.transform(data[0][i]), whole[i])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_results_are_single_precision_or_wider(fitted, data, dtype):
    logits = torch.from_numpy(data[0]).to(dtype)
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    assert fitted(logits).dtype == fitted.predict_proba(logits).dtype == wanted


def test_ignored_labels_and_zero_weights_are_cells_left_out(rng, data):
    logits, labels = data
    hidden = rng.random(labels.shape) < 0.3
    weight = np.where(hidden, 0.0, 1.0)
    spoiled = np.where(hidden, np.nan, logits)  # what is ignored may be anything
    one = TagScaling().fit(spoiled, np.where(hidden, -100, labels))
    other = TagScaling().fit(spoiled, labels, sample_weight=weight)
    np.testing.assert_array_equal(one.transform(logits), other.transform(logits))
    few = np.where(hidden, 1 - labels, labels)
    third = TagScaling().fit(logits, np.where(hidden, -100, few))
    np.testing.assert_array_equal(one.transform(logits), third.transform(logits))
    assert np.abs(one.transform(logits) - TagScaling().fit(*data).transform(logits)).max() > 0.01


@pytest.mark.parametrize("kind", [PooledTags, TagScaling])
def test_weights_are_repeats_of_rows_and_their_scale_is_nothing(data, kind):
    logits, labels = data
    weight = np.where(np.arange(1500) < 500, 2.0, 1.0)
    again = kind().fit(*(np.concatenate([x, x[:500]]) for x in data))
    weighted = kind().fit(logits, labels, sample_weight=weight)
    np.testing.assert_allclose(
        weighted.predict_proba(logits), again.predict_proba(logits), atol=5e-3
    )
    scaled = kind().fit(logits, labels, sample_weight=1e-3 * weight)
    np.testing.assert_allclose(
        scaled.predict_proba(logits), weighted.predict_proba(logits), atol=1e-6
    )
    plain = kind().fit(logits, labels)
    assert np.abs(plain.predict_proba(logits) - weighted.predict_proba(logits)).max() > 1e-3


def test_leading_dimensions_are_rows(fitted, data):
    logits, labels = (x.reshape(30, 50, 4) for x in data)
    again = type(fitted)().fit(logits, labels)
    np.testing.assert_array_equal(again.transform(logits).reshape(-1, 4), fitted.transform(data[0]))


def test_state_config_and_artifact_carry_the_fit(fitted, data, tmp_path):
    again = type(fitted)(**fitted.config())
    again.load_state_dict(fitted.state_dict())
    np.testing.assert_array_equal(again.transform(data[0]), fitted.transform(data[0]))
    assert kind_of(fitted) == f"multilabel_{fitted.name}"
    cal.save(fitted, tmp_path / "saved")
    loaded = cal.load(tmp_path / "saved", type(fitted))
    np.testing.assert_array_equal(loaded.transform(data[0]), fitted.transform(data[0]))


@pytest.mark.parametrize("kind", TAG_CALIBRATORS.values())
def test_one_tag_is_a_column(rng, tmp_path, kind):
    logits, labels = tagged(rng, 500, SLOPE[:1], INTERCEPT[:1])
    fitted = kind().fit(logits, labels)
    cal.save(fitted, tmp_path / "saved")
    assert cal.load(tmp_path / "saved").predict_proba(logits).shape == (500, 1)
    assert not fitted.one_logit
    with pytest.raises(ValueError, match=r"fitted for 1 tags: logits must be \(..., 1\)"):
        fitted.transform(logits[:, 0])
    export(fitted, tmp_path / "one.pt2", probabilities=True)


def test_descriptions(data):
    fitted = TagScaling().fit(*data)
    assert re.match(
        r"TagScaling for 4 tags: 8 parameters, slopes from 0.\d+ to 1.\d+$", fitted.describe()
    )
    assert set(fitted.learned()) == {"slope", "intercept", "pool", "spread"}
    assert TagScaling().describe() == "TagScaling, not fitted"
    assert [TAG_CALIBRATORS[name]().size(5) for name in TAG_CALIBRATORS] == [0, 2, 10]


def test_exported_and_folded(fitted, data, tmp_path):
    logits = torch.from_numpy(data[0][:20]).float()
    assert export(fitted, tmp_path / "tags.pt2", probabilities=True) < 1e-5
    again = torch.export.load(tmp_path / "tags.pt2").module()
    torch.testing.assert_close(again(logits), fitted.predict_proba(logits))
    layer = torch.nn.Linear(3, 4)
    inputs = torch.randn(20, 3)
    torch.testing.assert_close(fold_into_linear(fitted, layer)(inputs), fitted(layer(inputs)))
    single = TagScaling().fit(data[0][:, :1], data[1][:, :1])
    layer = torch.nn.Linear(3, 1)
    torch.testing.assert_close(fold_into_linear(single, layer)(inputs), single(layer(inputs)))


# ------------------------------------------------------------------------------- hard data


def test_tags_without_positives_or_labels(rng):
    logits, labels = tagged(rng, 300)
    labels[:, 1], labels[:, 3] = 0, -100
    message = r"TagScaling: 2 of 4 tags have no label 0 or no label 1 \(1, 3\): they lean on"
    with pytest.warns(UserWarning, match=message):
        fitted = TagScaling().fit(logits, labels)
    slope, shift = fitted.pool_
    assert float(fitted.slope_[3]) == pytest.approx(float(slope), rel=1e-4)  # the common line
    centre = np.mean([logits[:, i].mean() for i in (0, 1, 2)])
    line = float(fitted.intercept_[3] + fitted.slope_[3] * centre - centre)
    assert line == pytest.approx(float(shift), abs=1e-4)
    assert fitted.predict_proba(logits)[:, 1].mean() < labels[:, [0, 2]].mean() / 2


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [PooledTags, TagScaling])
@pytest.mark.parametrize("case", ["zeros", "ones", "separable", "reversed", "huge", "tiny", "one"])
def test_data_without_an_optimum_end_within_bounds(rng, kind, case):
    logits = 3 * rng.normal(size=(1 if case == "one" else 200, 3))
    labels = {"zeros": np.zeros, "ones": np.ones}.get(case, np.zeros)(logits.shape).astype(int)
    if case in ("separable", "reversed"):
        labels = (logits > 0 if case == "separable" else logits < 0).astype(int)
    if case in ("huge", "tiny"):
        labels = (rng.random(logits.shape) < expit(logits)).astype(int)
        logits = logits * (1e4 if case == "huge" else 1e-4)
    fitted = kind().fit(logits, labels)
    assert 0.05 - 1e-6 <= float(fitted.slope_.min()) <= float(fitted.slope_.max()) <= 20 + 1e-6
    assert torch.isfinite(fitted.intercept_).all()
    if case not in ("reversed", "huge"):  # which no rising line helps, or none within bounds
        assert loss(fitted.transform(logits), labels) <= loss(logits, labels) + 1e-3


def test_a_worthless_tag_among_good_ones(rng):
    logits, labels = tagged(rng, 2000)
    labels[:, 2] = (rng.random(2000) < expit(-logits[:, 2])).astype(int)
    fitted = TagScaling().fit(logits, labels)
    assert fitted.solution_ is not None
    assert fitted.solution_.converged
    assert float(fitted.slope_[2]) < 0.15
    np.testing.assert_allclose(fitted.slope_[[0, 1, 3]], SLOPE[[0, 1, 3]], atol=0.2)


# ------------------------------------------------------------------------------- refusals


def test_wrong_inputs_are_refused(data):
    logits, labels = data
    fitted = TagScaling().fit(logits, labels)
    with pytest.raises(ValueError, match=r"fitted for 4 tags.*got \(1500, 3\)|fitted for 4"):
        fitted.transform(logits[:, :3])
    for value in (np.nan, np.inf, -np.inf):
        bad = logits.copy()
        bad[5, 2] = value
        message = f"logits of tags must be finite, row 5 has {value} for tag 2: clip it, or"
        with pytest.raises(ValueError, match=message):
            TagScaling().fit(bad, labels)
        with pytest.raises(ValueError, match=message):
            fitted.predict_proba(bad)
    with pytest.raises(ValueError, match="logits and labels must have the same shape"):
        TagScaling().fit(logits, labels[:, 0])
    with pytest.raises(ValueError, match=r"multilabel logits must be \(..., tags\)"):
        TagScaling().fit(logits[:, 0], labels[:, 0])
    with pytest.raises(ValueError, match=r"labels must be in \[0, 2\)"):
        TagScaling().fit(logits, labels + 1)
    with pytest.raises(ValueError, match="nothing to measure"):
        TagScaling().fit(logits, np.full_like(labels, -100))
    with pytest.raises(RuntimeError, match="this TagScaling is not fitted"):
        TagScaling().predict_proba(logits)


def test_tags_and_classes_are_told_apart():
    assert not set(TAG_CALIBRATORS) - {"none"} & set(CALIBRATORS)
    assert all(kind.multilabel and kind.summary for kind in TAG_CALIBRATORS.values())
    assert TAG_CALIBRATORS.name("auto") == "tags"
    assert isinstance(make_calibrator("auto", estimand="multilabel"), TagScaling)
    ts: Calibrator = CALIBRATORS["ts"]()
    assert ts.estimand_for("binary") == "binary"
    assert TagScaling().estimand_for("auto") == "multilabel"
    with pytest.raises(ValueError, match='is for exclusive classes, got estimand="multilabel"'):
        make_calibrator(ts, estimand="multilabel")
    with pytest.raises(ValueError, match='TagScaling is for tags, got estimand="top_label"'):
        make_calibrator(TagScaling(), estimand="top_label")
    with pytest.raises(ValueError, match="unknown multi-label method 'ts'"):
        make_calibrator("ts", estimand="multilabel")
    for user in (PriorCorrection, Monitor):
        with pytest.raises(ValueError, match=f"{user.__name__} needs a calibrator for exclusive"):
            user(TagScaling())


def test_only_ratios_of_weights_matter_without_the_public_fit(rng):
    logits, weight = rng.normal(size=(300, 3)), rng.uniform(0.5, 2, (300, 3))
    labels = (rng.uniform(size=(300, 3)) < 1 / (1 + np.exp(1 - logits))).astype(int)
    probs = [
        TagScaling()
        .fit_examples(examples(logits, labels, factor * weight, "multilabel"))
        .predict_proba(logits)
        for factor in (1, 1000)
    ]
    np.testing.assert_allclose(probs[0], probs[1], atol=1e-6)
