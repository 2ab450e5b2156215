"""Thresholds keep limits on precision, recall, false alarms and costs."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, softmax
from scipy.stats import beta, binom

import calibrant as cal
from calibrant.decide import DecisionRule, Threshold, threshold, thresholds
from calibrant.decide.rules import Tally
from calibrant.decide.threshold_search import hoeffding_bentkus, threshold_grid
from tests.support.simulate import drawn, drawn_tags

COSTS = [[0.0, 1.0], [8.0, 0.5]]


def events(rng, n, shift=-1.5, slope=1.0):
    """Log-odds, of which ``slope`` is the calibrated multiple, and labels."""
    logits = shift + 2 * rng.normal(size=n)
    return logits, (rng.random(n) < expit(slope * logits)).astype(int)


def confusion(claimed, truth, at):
    flagged = claimed >= at
    return [int((flagged == f)[truth == y].sum()) for y in (0, 1) for f in (False, True)]


def passes(name, limit, counts, level):
    """The exact test of one limit, by sums of probabilities."""
    tn, fp, fn, tp = counts
    trials, failed, share = {
        "recall": (fn + tp, fn, 1 - limit),
        "max_fnr": (fn + tp, fn, limit),
        "max_fpr": (tn + fp, fp, limit),
    }[name]
    chances = [
        math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(failed + 1)
    ]
    return trials > 0 and math.fsum(chances) <= level


@pytest.mark.parametrize(
    "limits",
    [{"recall": 0.8}, {"max_fnr": 0.2}, {"max_fpr": 0.3}, {"recall": 0.7, "max_fpr": 0.6}],
)
def test_limits_that_only_get_worse_are_tested_until_the_first_failure(rng, limits):
    """At every score as the threshold, so that no fixed grid loses anything."""
    logits, labels = events(rng, 150)
    claimed = expit(logits)
    found = threshold(logits, labels, **limits)
    level = 0.05 / len(limits)
    kept = []
    for at in [0.0, *claimed]:
        counts = confusion(claimed, labels, at)
        if all(passes(name, limit, counts, level) for name, limit in limits.items()):
            kept.append(at)
    best = max(kept) if set(limits) <= {"recall", "max_fnr"} else min(kept)
    # halfway to the next lower score: the decisions are the same
    assert confusion(claimed, labels, found.threshold) == confusion(claimed, labels, best)
    assert found.threshold <= best


def test_a_recall_of_continuous_scores_is_that_of_an_order_statistic(rng):
    """The coverage of an order statistic of the positives has a beta distribution (Wilks 1941)."""
    logits, labels = events(rng, 400)
    positives = np.sort(expit(logits[labels == 1]))
    m = len(positives)
    lost = max(k for k in range(m) if beta.cdf(0.1, k + 1, m - k) >= 0.95)
    found = threshold(logits, labels, recall=0.9)
    assert (positives >= found.threshold).sum() == m - lost


@pytest.mark.parametrize("certainty", [0.8, 0.95])
@pytest.mark.parametrize(
    "limits",
    [
        {"precision": 0.6},
        {"recall": 0.85},
        {"max_fpr": 0.15},
        {"precision": 0.45, "recall": 0.6},
        {"max_cost": 0.9, "cost": COSTS},
        {"recall": 0.8, "cost": COSTS},
    ],
    ids=str,
)
def test_limits_are_broken_as_seldom_as_promised(limits, certainty):
    """In a population of 40 scores, which are over-confident, so that all rates are known."""
    grid = np.linspace(-4, 4, 40)
    chance, rng, broken, times = expit(0.5 * grid), np.random.default_rng(5), 0, 150
    for _ in range(times):
        at = rng.integers(40, size=250)
        labels = (rng.random(250) < chance[at]).astype(int)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = threshold(grid[at], labels, **limits, certainty=certainty)
        flagged = expit(grid) >= found.threshold
        fp, tp = (1 - chance)[flagged].sum(), chance[flagged].sum()
        tn, fn = (1 - chance)[~flagged].sum(), chance[~flagged].sum()
        rates = {
            "precision": tp / (tp + fp) if flagged.any() else 1.0,
            "recall": tp / (tp + fn),
            "max_fpr": -fp / (fp + tn),
            "max_cost": -(np.array([tn, fp, fn, tp]) @ np.ravel(COSTS)) / 40,
        }
        signed = {k: -v if k.startswith("max") else v for k, v in limits.items() if k != "cost"}
        wrong = any(rates[name] < value - 1e-12 for name, value in signed.items())
        broken += wrong and found.threshold < math.inf
    assert broken <= binom.ppf(0.9999, times, 1 - certainty)


def test_precision_of_pairs_is_the_error_of_answers(rng):
    """The same test of the same event; the grid reaches further down, to rare events."""
    claimed = rng.uniform(0.5, 1, 3000)
    right = rng.random(3000) < claimed
    error = threshold(confidence=claimed, outcome=right, max_error=0.2)
    precision = threshold(confidence=claimed, outcome=right, precision=0.8)
    assert precision.threshold == pytest.approx(error.threshold)
    assert precision.limits[0].found == pytest.approx(1 - error.error)
    assert precision.limits[0].bound == pytest.approx(1 - error.bound, abs=1e-3)
    grid, shares = threshold_grid(0.2, 14)
    assert len(grid) == len(shares)
    assert grid[-2] < 1e-6


def test_the_cheapest_threshold_that_keeps_a_limit_is_taken(rng):
    logits, labels = events(rng, 2000)
    claimed = expit(logits)

    def cost(at):
        return np.dot(confusion(claimed, labels, at), np.ravel(COSTS)) / 2000

    found = threshold(logits, labels, recall=0.6, cost=COSTS)
    free = threshold(logits, labels, recall=0.6)
    candidates = [at for at in claimed if at <= free.threshold]
    assert cost(found.threshold) == pytest.approx(min(map(cost, candidates)))
    assert cost(found.threshold) < cost(free.threshold)
    capped = threshold(logits, labels, max_cost=1.3, cost=COSTS)
    assert capped.limits[0].found == pytest.approx(cost(capped.threshold))
    assert capped.limits[0].found < capped.limits[0].bound <= 1.3
    scaled = np.array([capped.limits[0].bound / 8])
    losses = np.array([2000 * capped.limits[0].found / 8])
    level = hoeffding_bentkus(np.array([2000]), losses, float(scaled[0]))
    assert 0 < level[0] < 0.05


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_a_cost_without_a_limit_has_the_cheapest_threshold(dtype, rng):
    logits, labels = events(rng, 150)
    claimed = expit(logits).astype(dtype)
    probs = np.stack([1 - claimed, claimed], -1)
    found = threshold(probs=probs, labels=labels, cost=COSTS)

    def cost(at):
        return np.dot(confusion(claimed, labels, at), np.ravel(COSTS)) / 150

    least = min(cost(at) for at in [0, *claimed, 1])
    assert cost(found.threshold) == pytest.approx(least)
    assert found.limits[0].found == pytest.approx(least)
    assert found.coverage == pytest.approx((claimed >= found.threshold).mean())
    assert found.promise() == ""
    assert "certainty" not in repr(found)
    assert "without a guarantee" in found._repr_html_()
    again = Threshold.from_state(found.state())
    assert again.state() == found.state()
    assert again.limits[0].limit == math.inf
    rule = DecisionRule(found, 2)
    tally = rule.tally(rule.decide(probs=probs), labels)
    assert rule.figures(tally)["cost"] == pytest.approx(least)
    assert (rule.verdict(tally), rule.p_value(tally), rule.decides_nothing) == ("", 1.0, False)
    by = np.arange(150) % 2
    each = thresholds(probs=probs, labels=labels, by=by, cost=COSTS)
    assert each[1].limits == threshold(probs=probs[1::2], labels=labels[1::2], cost=COSTS).limits


@pytest.mark.parametrize("slope", [1.0, 0.5])
def test_the_cheapest_threshold_costs_little_more_than_the_best(slope):
    """In a population of known cost; the best for calibrated probabilities is 1 / (1 + 5)."""
    rng, costs, paid = np.random.default_rng(0), np.array([[0, 1], [5, 0]]), []
    logits = -1.5 + 2 * rng.normal(size=20_000)
    chance = expit(slope * logits)

    def cost(at):
        return np.where(expit(logits) >= at, 1 - chance, 5 * chance).mean()

    best = expit(np.log(1 / 5) / slope)
    for _ in range(200):
        rows = rng.integers(20_000, size=150)
        labels = (rng.random(150) < chance[rows]).astype(int)
        paid.append(cost(threshold(logits[rows], labels, cost=costs).threshold))
    assert cost(best) <= min(paid)
    assert np.mean(paid) < 1.06 * cost(best)
    if slope < 1:
        assert cost(1 / 6) > 1.2 * cost(best)


def test_a_cost_that_is_not_shown_falls_back_to_the_cheapest_threshold(rng):
    """Flagging nobody costs the most here."""
    logits, labels = events(rng, 150, shift=0.0)
    free = threshold(logits, labels, cost=COSTS)
    with pytest.warns(
        UserWarning, match=r"so the threshold is the cheapest in these, 0\.\d+; about .* more l"
    ):
        found = threshold(logits, labels, max_cost=1.2 * free.limits[0].found, cost=COSTS)
    grid = threshold_grid(7.5 / 8.5, 14)[0]
    costs = [np.dot(confusion(expit(logits), labels, at), np.ravel(COSTS)) for at in grid]
    assert 150 * found.limits[0].found == pytest.approx(min(costs))
    assert found.more_labels > 0
    assert math.isnan(found.limits[0].bound)
    assert found.promise() == ""
    rule = DecisionRule(found, 2)
    assert "the cheapest in the fit, but the limits are not shown" in rule.instruction()
    tally = rule.tally(rule.decide(logits), 1 - labels)
    assert (rule.verdict(tally), rule.decides_nothing) == ("", True)


def test_the_other_limits_are_kept_where_a_cost_is_not_shown(rng):
    logits, labels = events(rng, 600)
    cheap: Any = {"max_cost": 0.01, "cost": COSTS}
    with pytest.warns(UserWarning, match="no threshold keeps the recall at 0.9 and the cost at"):
        found = threshold(logits, labels, recall=0.9, **cheap)
    assert found.limits[0].found > 0.9
    assert found.coverage < 1
    with pytest.warns(UserWarning, match="so no example is flagged"):
        none = threshold(logits, labels, max_fpr=0.0001, **cheap)
    assert none.threshold == math.inf


def test_one_class_is_found_against_the_rest(rng):
    logits, labels = drawn(rng, 3000, 4)
    found = threshold(logits, labels, positive=2, recall=0.8)
    rest = np.delete(logits, 2, 1)
    odds = logits[:, 2] - np.logaddexp.reduce(rest, axis=1)
    assert found.threshold == pytest.approx(
        threshold(odds, (labels == 2).astype(int), recall=0.8).threshold
    )
    each = thresholds(logits, labels, recall=0.8, together=False)
    assert list(each) == [0, 1, 2, 3]
    assert each[2] == found
    strict = thresholds(probs=softmax(logits, -1), labels=labels, recall=0.8)
    assert strict[2].certainty == pytest.approx(1 - 0.05 / 4)
    assert strict[2].threshold <= found.threshold


def test_tags_and_groups_have_thresholds_of_their_own(rng):
    logits, tags = drawn_tags(rng, 1500, np.ones(3), np.array([0.0, -1.0, 1.0]))
    tags[::5, 1] = -100
    found = thresholds(logits, tags, max_fnr=0.2, together=False)
    for k, one in found.items():
        assert one == threshold(logits[:, k], tags[:, k], max_fnr=0.2)
    assert found[1].n == 1200
    group = np.array(["a", "b", "b"])[rng.integers(3, size=1500)]
    by = thresholds(logits[:, 0], tags[:, 0], by=group, max_fpr=0.3, certainty=0.9)
    for name, one in by.items():
        rows = group == name
        alone = threshold(logits[rows, 0], tags[rows, 0], max_fpr=0.3, certainty=0.95)
        assert one == pytest.approx(alone) if one is alone else one.threshold == alone.threshold


def test_tags_have_a_threshold_in_each_group(rng):
    logits = 2 * rng.normal(size=(900, 2))
    tags = (logits + rng.logistic(size=logits.shape) > 0).astype(int)
    site = np.array(["north", "south", "west"])[np.arange(900) % 3]
    found = thresholds(logits, tags, by=site, recall=0.7, certainty=0.94)
    assert list(found) == [(name, tag) for name in ("north", "south", "west") for tag in (0, 1)]
    for (name, tag), one in found.items():
        rows = site == name
        assert one == threshold(logits[rows, tag], tags[rows, tag], recall=0.7, certainty=0.99)


@pytest.mark.parametrize(
    ("limits", "nothing"),
    [({"recall": 0.95}, 0.0), ({"max_fpr": 0.05}, math.inf), ({"precision": 0.97}, math.inf)],
)
def test_what_is_not_reachable_says_how_many_labels_are_missing(limits, nothing):
    """The number is about enough, if the further examples are like the first."""
    rng = np.random.default_rng(3)
    logits, labels = events(rng, 45, slope=2.0)
    with pytest.warns(UserWarning, match=r"no threshold keeps .* more labels are needed") as caught:
        found = threshold(logits, labels, **limits)
    assert caught[0].filename == __file__
    assert found.threshold == nothing
    assert f"about {found.more_labels:,.0f} more labels" in found.needs()
    times = (45 + found.more_labels) / 45
    more = int(np.ceil(times * 1.3))
    again = threshold(np.tile(logits, more), np.tile(labels, more), **limits)
    assert again.more_labels == 0
    assert 0 < again.coverage < 1
    fewer = int(times * 0.7)
    if fewer > 1:
        with pytest.warns(UserWarning, match="no threshold keeps"):
            threshold(np.tile(logits, fewer), np.tile(labels, fewer), **limits)


def test_what_no_number_of_labels_would_show_says_so(rng):
    logits, labels = rng.normal(size=500), rng.integers(2, size=500)  # they know nothing
    with pytest.warns(UserWarning, match="more labels like these will not help: calibrate or imp"):
        found = threshold(logits, labels, recall=0.9, precision=0.9)
    assert (found.threshold, found.more_labels) == (math.inf, math.inf)
    assert found.promise() == ""
    assert Threshold.from_state(found.state()).state() == found.state()


def test_a_threshold_says_what_it_promises(rng):
    logits, labels = events(rng, 2000)
    found = threshold(logits, labels, recall=0.7, max_fpr=0.4, cost=COSTS)
    assert found.promise() == (
        "With 95 % certainty, at least 70 % of the positive ones are found and at most 40 % of "
        "the negative ones are flagged."
    )
    assert "recall=0.7, max_fpr=0.4, certainty=0.95" in repr(found)
    assert Threshold.from_state(found.state()) == found
    frame = found.to_frame()
    assert frame["name"].tolist() == ["recall", "fpr"]
    with pytest.raises(AttributeError, match="not about answers"):
        _ = found.max_error
    with pytest.raises(TypeError, match="flags a class"):
        found.plot(logits, labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "name a limit, one of max_error, precision, recall"),
        ({"recall": 0.9, "max_frp": 0.1}, "threshold takes no max_frp=: name a limit"),
        ({"recall": 0.9, "sample_weight": [1, 2]}, "takes no sample_weight"),
        ({"recall": 0.9, "positive": 2}, r"positive must be a class in \[0, 2\), got 2"),
        ({"max_error": 0.1, "recall": 0.9}, "max_error is about accepted answers"),
        ({"recall": 1.0}, "recall must be between 0 and 1"),
        ({"max_cost": 1.0}, "max_cost= needs the costs of decisions"),
        ({"max_cost": 8.0, "cost": COSTS}, "max_cost must be above 0 and below 8, the least and l"),
        ({"recall": 0.9, "cost": [1, 2]}, r"cost must be \[\[true negative"),
        ({"recall": 0.9, "cost": [[1, 0], [1, 0]]}, "mistakes must cost more"),
    ],
)
def test_wishes_that_make_no_sense_are_refused(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        threshold([0.0, 1.0], [0, 1], **options)
    with pytest.raises((TypeError, ValueError), match=message):
        thresholds([0.0, 1.0], [0, 1], by=[0, 0], **options)


def test_log_odds_find_either_class(rng):
    logits, labels = events(rng, 500)
    found = threshold(logits, labels, positive=0, recall=0.8)
    assert found.threshold == pytest.approx(threshold(-logits, 1 - labels, recall=0.8).threshold)


def test_the_class_to_find_must_be_named():
    with pytest.raises(TypeError, match="of 3 classes, name the one to find"):
        threshold(np.eye(3), [0, 1, 2], recall=0.9)
    with pytest.raises(ValueError, match="positive must be a class in"):
        threshold(np.eye(3), [0, 1, 2], recall=0.9, positive=3)
    with pytest.raises(TypeError, match="labels are missing"):
        thresholds(np.eye(3), recall=0.9)
    with pytest.raises(TypeError, match=r"thresholds are those of classes or tags"):
        thresholds([0.0, 1.0], [0, 1], recall=0.9)
    with pytest.raises(ValueError, match="by must have one value per example"):
        thresholds([0.0, 1.0], [0, 1], by=["a"], recall=0.9)


@pytest.mark.parametrize("options", [{"positive": 2, "recall": 0.8}, {"max_error": 0.4}])
def test_images_have_their_classes_where_class_dim_says(options, rng):
    logits, labels = drawn(rng, 3000, 4)
    images = np.moveaxis(logits.reshape(30, 10, 10, 4), -1, 1)
    marked = np.where(np.arange(3000) % 7 == 0, 255, labels)
    flat = np.where(marked == 255, -100, labels)
    seen: Any = {"class_dim": 1, "ignore_index": 255}
    found = threshold(images, marked.reshape(30, 10, 10), **seen, **options)
    assert found == threshold(logits, flat, **options)
    by = np.arange(30) % 2  # one group for each image
    each = thresholds(images, marked.reshape(30, 10, 10), by=by, **seen, **options)
    assert each == thresholds(logits, flat, by=np.repeat(by, 100), **options)


def test_data_frames_name_the_class_to_find(rng):
    pandas = pytest.importorskip("pandas")
    logits, labels = drawn(rng, 2000, 3)
    names = np.array(["cat", "dog", "owl"])
    frame, named = pandas.DataFrame(logits, columns=names), names[labels]
    assert threshold(frame, named, positive="dog", recall=0.8) == threshold(
        logits, labels, positive=1, recall=0.8
    )._replace(positive="dog")
    each = thresholds(logits, labels, recall=0.8)
    assert thresholds(frame, named, recall=0.8) == {
        k: one._replace(positive=names[k]) for k, one in each.items()
    }
    by = pandas.Series(["a", None] * 1000)
    parts = thresholds(frame, named, by=by, positive="owl", recall=0.8)
    assert parts["a"] == threshold(
        logits[::2], labels[::2], positive=2, recall=0.8, certainty=parts["a"].certainty
    )._replace(positive="owl")
    with pytest.raises(ValueError, match="positive must be a class, one of cat, dog, owl, got 'o'"):
        threshold(frame, named, positive="o", recall=0.8)


@pytest.mark.parametrize("names", [["no", "yes"], ["yes", "no"]])
def test_the_class_that_is_found_has_its_name_in_any_order(names, rng):
    """The second column is found by default, and named; by its name a class is always the same."""
    from calibrant.workflows.decide import decide

    pandas = pytest.importorskip("pandas")
    logits, labels = events(rng, 2000)
    named = np.where(labels == 1, "yes", "no")
    frame = pandas.DataFrame({"no": expit(-logits), "yes": expit(logits)})[names]
    limits: dict[str, Any] = {"recall": 0.7, "max_fpr": 0.9}
    found = threshold(probs=frame, labels=named, **limits)
    assert found.promise() == (
        f"With 95 % certainty, at least 70 % of the examples of class {names[1]} are found and at "
        f"most 90 % of the examples of other classes are flagged as {names[1]}."
    )
    assert f"% as {names[1]}, recall" in repr(found)
    yes = threshold(probs=frame, labels=named, positive="yes", **limits)
    assert yes == threshold(logits, labels, **limits)._replace(positive="yes")
    assert Threshold.from_state(yes.state()) == yes
    rule = DecisionRule(yes, 2, class_names=names)
    assert names[rule.positive or 0] == "yes"
    flagged = rule.decide(probs=frame)["flagged"]
    assert (flagged == (frame["yes"].to_numpy() >= yes.threshold)).all()
    with pytest.raises(ValueError, match="the threshold is of class yes, got no"):
        DecisionRule(yes, 2, class_names=names, positive=names.index("no"))
    table = frame.add_prefix("prob_").assign(label=named)
    assert (
        f"of the examples of class {names[1]} are found" in decide(table, recall=0.7).rule.promise()
    )
    precise = decide(table, precision=0.5, positive="yes").rule
    assert precise.promise().endswith(
        "at least 50 % of those above the threshold are of class yes."
    )
    assert precise.guarantee.state()["positive"] == "yes"


def test_only_a_cost_may_have_no_limit():
    state = threshold([0.0, 1.0, 2.0], [0, 1, 1], cost=COSTS).state()
    with pytest.raises(ValueError, match="only a cost may have no limit"):
        Threshold.from_state(state | {"limits": [state["limits"][0] | {"name": "recall"}]})


def test_groups_may_be_unknown_but_need_labels(rng):
    """A group of NaN is a group, too."""
    logits, labels = events(rng, 900)
    by = np.array([1.0, np.nan, 3.0])[np.arange(900) % 3]
    found = thresholds(logits, labels, by=by, recall=0.7, together=False)
    assert len(found) == 3
    assert [one for one in found.values()][2] == threshold(logits[1::3], labels[1::3], recall=0.7)
    with pytest.raises(ValueError, match=r"group 3\.0 has no labelled examples: leave it out"):
        thresholds(logits, np.where(by == 3, -100, labels), by=by, recall=0.7)


def test_a_warning_names_the_group_that_has_too_few_examples(rng):
    logits, labels = events(rng, 900)
    by = np.where(np.arange(900) < 3, "few", "many")
    with pytest.warns(UserWarning, match=r"97\.5 % certainty on 3 examples of group few") as caught:
        found = thresholds(logits, labels, by=by, recall=0.8)
    assert [caught[0].filename, len(caught)] == [__file__, 1]
    assert found["few"].threshold == 0.0
    with pytest.warns(UserWarning, match="label positive and negative ones, or relax"):
        threshold(logits, np.zeros(900, int), recall=0.8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "limit", [{"max_fpr": 0.2}, {"recall": 0.8}, {"precision": 0.9}, {"max_error": 0.1}], ids=str
)
def test_probs_of_any_dtype_reach_the_threshold_as_tested(limit, dtype, rng):
    """PyTorch rounds the threshold to the dtype of the probabilities it is compared with."""
    for _ in range(20):
        event = rng.beta(2, 0.3, size=600)
        labels = torch.from_numpy((rng.random(600) < event).astype(int))
        probs = torch.from_numpy(np.stack([1 - event, event], -1)).to(dtype)
        found = threshold(probs=probs, labels=labels, **limit)
        decides = probs.max(-1).values if "max_error" in limit else probs[:, 1]
        assert int((decides >= found.threshold).sum()) == round(600 * found.coverage)


def test_a_rule_flags_counts_and_judges(rng):
    logits, labels = drawn(rng, 3000, 3)
    found = threshold(logits[:1500], labels[:1500], positive=1, recall=0.8, precision=0.5)
    rule = DecisionRule(found, 3, class_names=["cat", "dog", "owl"], positive=1)
    made = rule.decide(logits[1500:])
    probs = softmax(logits[1500:], -1)
    assert (made["flagged"] == (probs[:, 1] >= found.threshold)).all()
    assert (made["predicted"] == probs.argmax(-1)).all()
    known = labels[1500:].copy()
    known[::9] = -100
    tn, fp, fn, tp = confusion(probs[known >= 0, 1], (known == 1)[known >= 0], found.threshold)
    tally = rule.tally(made, known)
    assert tally == Tally(1500, int(made["flagged"].sum()), fp + tp, fp, tn + fp + fn + tp, fn)
    figures = rule.figures(tally)
    assert figures["recall"] == pytest.approx(tp / (tp + fn))
    assert figures["precision"] == pytest.approx(tp / (tp + fp))
    chances = binom.sf(fn - 1, tp + fn, 0.2), binom.sf(fp - 1, tp + fp, 0.5)
    assert rule.p_value(tally) == pytest.approx(min(1, 2 * min(chances)))
    assert "agree with the guarantee" in rule.verdict(tally)
    assert "contradict" in rule.verdict(Tally(100, 10, 10, 1, 100, 60))
    assert rule.instruction().startswith("Flag an example as dog if the probability")
    assert rule.headings == ("examples", "flagged", "precision", "recall")
    assert len(rule.cells(tally)) == 4
    with pytest.raises((TypeError, ValueError), match="positive must"):
        DecisionRule(found, 3, positive=3)
    with pytest.raises(TypeError, match="positive= is for thresholds that find a class"):
        DecisionRule(threshold(logits, labels, max_error=0.5), 3, positive=1)


def test_labels_contradict_a_recall_also_if_nothing_is_flagged(rng):
    logits, labels = events(rng, 2000)
    rule = DecisionRule(threshold(logits, labels, recall=0.8), 2)
    tally = rule.tally(rule.decide(np.full(200, -9.0)), np.ones(200, int))
    assert tally.judged == 0
    assert "The labels of 200 examples contradict the guarantee" in rule.verdict(tally)


def test_what_is_not_guaranteed_is_not_contradicted(rng):
    logits, labels = events(rng, 200)
    with pytest.warns(UserWarning, match="so no example is flagged"):
        found = threshold(logits, labels, recall=0.9, max_fpr=0.01)
    assert "flags none" in repr(found)
    assert "Nothing is flagged: " in found._repr_html_()
    rule = DecisionRule(found, 2)
    tally = rule.tally(rule.decide(logits), labels)
    assert (rule.p_value(tally), rule.verdict(tally)) == (1.0, "")


def test_costs_are_judged_by_a_bound(rng):
    logits, labels = events(rng, 4000)
    found = threshold(logits[:2000], labels[:2000], max_cost=1.2, cost=COSTS)
    rule = DecisionRule(found, 2)
    tally = rule.tally(rule.decide(logits[2000:]), labels[2000:])
    mean = np.dot(confusion(expit(logits[2000:]), labels[2000:], found.threshold), np.ravel(COSTS))
    assert rule.figures(tally)["cost"] == pytest.approx(mean / 2000)
    assert rule.p_value(tally) > 0.05
    assert rule.p_value(Tally(100, 0, 0, 0, 100, 90)) < 1e-6


def test_limits_of_a_file_are_kept_in_a_saved_rule(tmp_path, rng):
    from calibrant.workflows.decide import apply_rule, decide

    logits, labels = drawn(rng, 3000, 3)
    data: dict[str, Any] = {"logits": logits, "labels": labels}
    data["class_names"] = ["cat", "dog", "owl"]
    result = decide(data, recall=0.8, positive="dog")
    assert result.rule.positive == 1
    cal.save(result.rule, tmp_path / "rule")
    again = cal.load(tmp_path / "rule", DecisionRule)
    assert again.guarantee == result.rule.guarantee
    apply_rule(again, data, tmp_path / "out.csv")
    header = (tmp_path / "out.csv").read_text().splitlines()[0]
    assert header.split(",") == ["split", "row", "predicted", "confidence", "flagged", "label"]
    with pytest.raises(ValueError, match="one of cat, dog, owl, got 'cow'"):
        decide(data, recall=0.8, positive="cow")
