"""Calibration of tokens: other implementations, and intervals by counting how often they hold.

Tokens are drawn in documents that share their luck, so that the truth is known and tokens of one
document are far from independent.
"""

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

import calibrant as cal
from calibrant.metrics import clustered as module, gaps
from calibrant.metrics.clustered import evaluate_tokens, paired_gain
from calibrant.metrics.ranking import auroc_with_error


def drawn_tokens(rng, documents, tokens, gap=0.0, luck=0.25):
    """Claims in (0.3, 0.7); each document is right by ``luck`` more often, or less, than others.

    On average over documents a claim p comes true with p - gap.
    """
    size = rng.integers(tokens // 2, 2 * tokens, documents)
    number = np.repeat(np.arange(documents), size)
    claimed = rng.uniform(0.3, 0.7, number.size)
    chance = claimed - gap + luck * rng.choice([-1, 1], documents)[number]
    return claimed, rng.random(number.size) < chance, number


@pytest.fixture
def tokens(rng):
    return drawn_tokens(rng, 80, 15, 0.05)


def test_values_equal_the_metrics(tokens, rng):
    claimed, right, number = tokens
    loss = rng.exponential(size=claimed.size)
    found = evaluate_tokens(claimed, right, number, nll=loss)
    assert found["ece"].value == pytest.approx(cal.ece(confidence=claimed, outcome=right))
    assert found["auroc"].value == pytest.approx(cal.auroc(confidence=claimed, outcome=right))
    assert found["accuracy"].value == pytest.approx(right.mean())
    assert found["brier"].value == pytest.approx(
        np.mean([(p - y) ** 2 for p, y in zip(*tokens[:2], strict=True)])
    )
    assert found["nll"].value == pytest.approx(loss.mean())
    assert found["debiased_ece"].value <= found["ece"].value
    assert found.n == claimed.size
    assert found.documents == 80
    assert "tokens of 80 documents" in str(found)
    for e in found.values():
        assert e.low <= e.value <= e.high
    ten = evaluate_tokens(claimed, right, number, bins=10)
    assert ten["ece"].value == pytest.approx(cal.ece(confidence=claimed, outcome=right, bins=10))
    assert "nll" not in ten


def test_order_and_names_of_documents_do_not_matter(tokens, rng):
    claimed, right, number = tokens
    found = evaluate_tokens(claimed, right, number, replicates=50)
    order = rng.permutation(claimed.size)
    names = np.array([f"text {i:03}" for i in number])
    again = evaluate_tokens(
        torch.tensor(claimed[order]), torch.tensor(right[order]), names[order], replicates=50
    )
    for name in found:
        np.testing.assert_allclose(found[name], again[name], atol=1e-9)


def test_influence_equals_leaving_out_documents(tokens):
    claimed, right, number = tokens
    index = np.minimum((claimed * 5).astype(int), 4)
    scores = {"accuracy": right.astype(float), "brier": (claimed - right) ** 2}
    influence = module._influence(claimed, number, np.linspace(0, 1, 6), scores)
    found = influence[:, [0, *range(2, 7)]]  # accuracy and gaps, without the Brier score

    def figures(kept):
        off = (claimed - right)[kept]
        bins = [off[index[kept] == b].sum() / off.size for b in range(5)]
        return np.array([right[kept].mean(), *bins])

    all_of_them = figures(np.ones(number.size, bool))
    without = np.array([figures(number != d) for d in range(80)])
    np.testing.assert_allclose(found, np.sqrt(79 / 80) * (all_of_them - without), atol=1e-12)
    drawn = gaps._group_noise(found, 20_000, seed=0)
    np.testing.assert_allclose(np.cov(drawn.T), found.T @ found, atol=0.03 * (found**2).sum())


def test_chunks_of_replicates_do_not_matter(tokens, monkeypatch):
    whole = evaluate_tokens(*tokens, replicates=60)
    monkeypatch.setattr(gaps, "_MAX_DRAWS", 1000)  # a dozen replicates at a time
    for name, estimate in evaluate_tokens(*tokens, replicates=60).items():
        np.testing.assert_allclose(estimate, whole[name], rtol=1e-9)


def test_repeated_tokens_do_not_narrow_intervals(tokens):
    one = evaluate_tokens(*tokens, replicates=200)
    several = evaluate_tokens(*(np.repeat(x, 7) for x in tokens), replicates=200)
    for name in one:
        # the steps of the search for the ends, and whole numbers of tokens
        np.testing.assert_allclose(one[name], several[name], rtol=0.02, atol=1e-3)


def test_curves_have_no_intervals_that_take_tokens_for_independent(tokens):
    evaluation = evaluate_tokens(*tokens)
    assert evaluation.level == 0.9
    assert evaluation.risk_coverage is not None
    for curve in (evaluation.reliability(), evaluation.risk_coverage):
        assert np.isnan([*curve.low, *curve.high, curve.level]).all()
    assert evaluation.reliability().ece == evaluation["ece"]
    assert "interval at each point" not in evaluation._repr_html_()


def test_auroc_of_single_tokens_has_the_error_of_delong(rng):
    claimed = rng.random(400)
    right = rng.random(400) < claimed
    found = module._clustered_auroc(claimed.round(2), right.astype(float), np.arange(400))
    wanted = auroc_with_error(claimed.round(2), right.astype(float), None)
    assert found.value == pytest.approx(wanted.value)
    assert found.deviation == pytest.approx(wanted.deviation, rel=0.01)
    two = module._clustered_auroc(claimed, right.astype(float), np.arange(400) % 2)
    assert 0 < two.deviation < 0.5


def test_undefined_intervals_are_left_out(tokens):
    claimed, right, number = tokens
    for found in (
        evaluate_tokens(claimed, right, np.zeros_like(number)),
        evaluate_tokens(claimed, right, number, level=None),
    ):
        assert found["ece"].value == pytest.approx(cal.ece(confidence=claimed, outcome=right))
        assert all(math.isnan(e.low) and math.isnan(e.high) for e in found.values())
        assert found.level is None
    giant = evaluate_tokens(claimed, right, np.where(number < 75, 0, number))
    assert giant.level is None  # one document holds nearly all
    perfect = evaluate_tokens(claimed, np.ones_like(right), number)
    assert math.isnan(perfect["auroc"].value)
    assert math.isnan(perfect["accuracy"].low)
    assert perfect["ece"].low > 0


def test_bad_tokens_are_refused(tokens):
    claimed, right, number = tokens
    with pytest.raises(ValueError, match=r"documents must have \d+ entries"):
        evaluate_tokens(claimed, right, number[:-1])
    with pytest.raises(ValueError, match="nll must be finite"):
        evaluate_tokens(claimed, right, number, nll=np.full(claimed.size, np.inf))
    with pytest.raises(ValueError, match="nll must be finite"):
        evaluate_tokens(claimed, right, number, nll=[1.0])
    with pytest.raises(ValueError, match="level"):
        evaluate_tokens(claimed, right, number, level=1.5)
    with pytest.raises(ValueError, match="confidence must be in"):
        evaluate_tokens(claimed + 1, right, number)


TIMES = 120


LEAST = int(binom.ppf(1e-3, TIMES, 0.9))
"""Intervals of 90 % hold less often once in a thousand runs."""


@pytest.mark.parametrize("gap", [0.0, 0.08])
def test_intervals_cover_with_correlated_tokens(rng, gap):
    claimed, right, _ = drawn_tokens(rng, 40_000, 20, gap)
    truth = {
        "ece": gap,
        "accuracy": 0.5 - gap,
        "brier": float(((claimed - right) ** 2).mean()),
        "auroc": cal.auroc(confidence=claimed, outcome=right),
    }
    held = dict.fromkeys(truth, 0)
    naive = dict.fromkeys(("accuracy", "ece"), 0)
    for time in range(TIMES):
        claimed, right, number = drawn_tokens(rng, 100, 20, gap)
        found = evaluate_tokens(claimed, right, number, replicates=300)
        for name, value in truth.items():
            held[name] += found[name].low <= value <= found[name].high
        if time % 3 or not gap:
            continue
        # every token a document of its own: the intervals of independent tokens
        alone = evaluate_tokens(claimed, right, np.arange(claimed.size), replicates=60)
        for name in naive:
            naive[name] += alone[name].low <= truth[name] <= alone[name].high
    assert min(held.values()) >= LEAST, held
    assert max(naive.values()) < 0.75 * TIMES / 3, naive


@pytest.mark.parametrize("sizes", [[1500] + 30 * [50], 40 * [0], 5 * [2000]])
def test_intervals_cover_with_unequal_or_few_documents(rng, sizes):
    """One that holds half of the tokens, lengths with a heavy tail, and five."""
    held, times = dict.fromkeys(("ece", "accuracy"), 0), 60
    for _ in range(times):
        drawn = np.clip(30 * rng.pareto(1.1, len(sizes)), 5, 3000).astype(int)
        size = np.array(sizes) if sizes[0] else drawn
        number = np.repeat(np.arange(size.size), size)
        claimed = rng.uniform(0.25, 0.75, number.size)
        luck = rng.uniform(-0.15, 0.15, size.size)[number]
        right = rng.random(number.size) < claimed - 0.08 + luck
        found = evaluate_tokens(claimed, right, number, replicates=200)
        for name, truth in (("ece", 0.08), ("accuracy", 0.42)):
            held[name] += found[name].low <= truth <= found[name].high
    assert min(held.values()) >= binom.ppf(1e-3, times, 0.85), held


def test_interval_excludes_zero_if_miscalibrated(rng):
    claimed, right, number = drawn_tokens(rng, 400, 20, 0.1)
    found = evaluate_tokens(claimed, right, number)["ece"]
    assert 0.05 < found.low < 0.1 < found.high < 0.15


def test_paired_gain_against_the_bootstrap():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 200)
    documents = np.repeat(np.arange(200), sizes)
    shared = rng.normal(size=200)[documents]
    before = rng.normal(size=len(documents)) + shared + 0.3
    after = rng.normal(size=len(documents))
    weight = rng.uniform(0.5, 2, len(documents))
    gain = paired_gain(before, after, documents, weight)
    assert gain.mean == pytest.approx(np.average(before - after, weights=weight))
    total = np.bincount(documents, weight * (before - after))
    mass = np.bincount(documents, weight)
    drawn = rng.integers(0, 200, (2000, 200))
    means = total[drawn].sum(1) / mass[drawn].sum(1)
    assert gain.error == pytest.approx(means.std(), rel=0.1)
    assert paired_gain(before[:1], after[:1], documents[:1], weight[:1]).error == math.inf


def test_paired_gain_of_unequal_documents():
    rng = np.random.default_rng(1)
    lengths = np.array([1, 2, 500, 30, 4, 2000])
    documents = np.repeat(np.arange(6), lengths)
    change = rng.normal(size=6)[documents] + rng.normal(size=lengths.sum())
    weight = rng.uniform(0.5, 2, lengths.sum())
    gain = paired_gain(change, np.zeros_like(change), documents, weight)
    without = [
        np.average(change[documents != one], weights=weight[documents != one]) for one in range(6)
    ]
    wanted = math.sqrt(5 / 6 * sum((mean - gain.mean) ** 2 for mean in without))
    assert gain.error == pytest.approx(wanted)
    # one document that holds everything says nothing about others
    weight[documents != 5] = 0
    assert paired_gain(change, np.zeros_like(change), documents, weight).error == math.inf


def test_paired_gain_seldom_finds_what_is_not_there():
    rng = np.random.default_rng(2)
    found, times = 0, 3000
    for _ in range(times):
        mass = rng.lognormal(3, 2, 20)
        gain = paired_gain(rng.normal(size=20), np.zeros(20), np.arange(20), mass)
        found += gain.mean > gain.error
    assert found / times < 0.23  # 0.16 with many documents, 0.165 with 20 of one length
