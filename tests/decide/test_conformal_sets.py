"""Prediction sets cover as guaranteed, whatever the precision, the batch or the ties."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from scipy.stats import kstest

from calibrant.decide import conformal_sets
from calibrant.decide.conformal_sets import ConformalSets, conformal
from calibrant.decide.priors import shift_prior
from tests.support.definitions import slow_score
from tests.support.markup import check_inert
from tests.support.simulate import drawn

SCORES = ["lac", "aps", "raps"]


def probabilities(rng, n, classes=8, temperature=1.0):
    logits, labels = drawn(rng, n, classes, temperature)
    return softmax(logits, -1), labels


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(("digits", "classes"), [(16, 8), (1, 8), (16, 40)])  # 40: many ranks
def test_sets_are_those_of_the_definition(score, digits, classes):
    rng = np.random.default_rng(1)
    probs, labels = probabilities(rng, 60, classes)
    if digits == 1:  # with many ties
        probs = rng.multinomial(10, probs) / 10
    parts = conformal_sets._uniform(probs, 5)
    scores = [slow_score(*each) for each in zip(probs, labels, itertools.repeat(score), parts)]
    limit = sorted(scores)[math.ceil(61 * 0.8) - 1]
    fitted = conformal(probs=probs, labels=labels, coverage=0.8, score=score, seed=5)
    assert fitted.limit == pytest.approx(limit, rel=1e-5)
    expected = [
        [slow_score(row, k, score, part) <= limit + 1e-5 * abs(limit) for k in range(classes)]
        for row, part in zip(probs, parts, strict=True)
    ]
    assert fitted.sets(probs=probs).tolist() == expected


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize(
    ("n", "coverage", "temperature"), [(19, 0.9, 1.0), (60, 0.8, 3.0), (9, 0.9, 0.5)]
)
def test_coverage_is_what_was_asked_for(score, n, coverage, temperature):
    rng, times, covered = np.random.default_rng(11), 800, []
    for seed in range(times):
        probs, labels = probabilities(rng, n + 20, temperature=temperature)
        fitted = conformal(
            probs=probs[:n], labels=labels[:n], coverage=coverage, score=score, seed=seed
        )
        sets = fitted.sets(probs=probs[n:])
        covered.append(sets[np.arange(20), labels[n:]].mean())
    slack = 4 * np.std(covered) / math.sqrt(times)
    exact = math.ceil((n + 1) * coverage - 1e-9) / (n + 1)
    assert coverage <= exact <= coverage + 1 / (n + 1)
    assert abs(np.mean(covered) - exact) <= slack
    assert slack < 0.02


def test_sizes_are_ordered_as_the_scores_promise(rng):
    difficulty = rng.uniform(1, 6, size=(20_000, 1))
    logits = difficulty * rng.normal(size=(20_000, 50))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    probs = softmax(logits, -1)
    sizes = {}
    for score in SCORES:
        fitted = conformal(probs=probs[:10_000], labels=labels[:10_000], score=score)  # type: ignore[arg-type]
        sizes[score] = fitted.sets(probs=probs[10_000:]).sum(-1)
    assert sizes["lac"].mean() < sizes["aps"].mean()
    assert sizes["raps"].mean() < sizes["aps"].mean()
    assert sizes["raps"].max() < sizes["aps"].max()


@pytest.mark.parametrize(
    ("n", "coverage", "rank"), [(9, 0.9, 9), (99, 0.55, 55), (99, 0.95, 95), (10, 0.5, 6)]
)
def test_the_rank_of_the_limit_is_exact(n, coverage, rank):
    scores = np.random.default_rng(0).permutation(n) + 1.0
    assert conformal_sets._limit(scores, coverage) == rank


@pytest.mark.parametrize("score", SCORES)
def test_too_few_examples_give_every_class(rng, score):
    probs, labels = probabilities(rng, 8)
    with pytest.warns(
        UserWarning, match=r"8 examples cannot show a coverage of 0\.9.*9 examples"
    ) as caught:
        fitted = conformal(probs=probs, labels=labels, score=score)
    assert caught[0].filename == __file__
    assert fitted.limit == math.inf
    assert fitted.sets(probs=probs).all()


@pytest.mark.parametrize("score", SCORES)
def test_a_row_has_its_set_in_whatever_batch_it_comes(rng, score):
    probs, labels = probabilities(rng, 300)
    fitted = conformal(probs=probs, labels=labels, score=score)
    whole = fitted.sets(probs=probs)
    alone = np.concatenate([fitted.sets(probs=row[None]) for row in probs])
    assert np.array_equal(whole, alone)
    assert np.array_equal(fitted.sets(probs=probs[::-1]), whole[::-1])
    assert np.array_equal(fitted.sets(probs=probs.reshape(30, 10, 8)), whole.reshape(30, 10, 8))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
def test_the_random_part_is_uniform(rng, dtype):
    rows = softmax(rng.normal(size=(20_000, 5)), -1).astype(dtype).astype(float)
    first, second = conformal_sets._uniform(rows, 0), conformal_sets._uniform(rows, 1)
    rows[:, [0, 1]] = rows[:, [1, 0]]
    for part in (first, second):
        assert kstest(part, "uniform").pvalue > 1e-4
    for other in (second, conformal_sets._uniform(rows, 0)):
        assert abs(np.corrcoef(first, other)[0, 1]) < 0.04
    assert abs(np.corrcoef(first, rows.max(-1))[0, 1]) < 0.04


def few_rows(rng, n):
    """Probabilities of a calibrator that gives five different ones, and events."""
    p = rng.choice([0.55, 0.7, 0.8, 0.9, 0.95], n, p=[0.05, 0.05, 0.3, 0.3, 0.3])
    return np.stack([1 - p, p], -1), (rng.random(n) < p).astype(int)


def binned_rows(rng, n):
    """Of ten classes one has a probability of four, the rest is shared evenly."""
    p, top = rng.choice([0.5, 0.7, 0.85, 0.95], n), rng.integers(10, size=n)
    probs = np.repeat((1 - p)[:, None] / 9, 10, 1)
    probs[np.arange(n), top] = p
    return probs, (np.cumsum(probs, -1) < rng.random((n, 1))).sum(-1).clip(max=9)


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("draw", [few_rows, binned_rows])
@pytest.mark.parametrize(
    ("fitted_in", "used_in"),
    [
        ("float64", "float32"),
        ("float64", "float16"),
        ("float32", "float64"),
        ("float16", "float64"),
        ("float64", "other last digits"),
    ],
)
def test_rounding_takes_no_coverage_where_many_rows_are_alike(score, draw, fitted_in, used_in):
    covered = np.empty((3, 40))
    for seed, sample in np.ndindex(covered.shape):  # for each seed: what one lacks another may have
        rng = np.random.default_rng(sample)
        probs, labels = draw(rng, 1000)
        fitted = conformal(
            probs=probs[:500].astype(fitted_in),
            labels=labels[:500],
            coverage=0.9,
            score=score,
            seed=seed,
        )
        if used_in == "other last digits":
            new = probs[500:] * (1 + 1e-15 * rng.integers(-3, 4, (500, 1)))
        else:
            new = probs[500:].astype(used_in)
        covered[seed, sample] = fitted.sets(probs=new)[np.arange(500), labels[500:]].mean()
    assert (covered.mean(1) >= 0.9 - 4 * covered.std(1) / math.sqrt(40)).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("sharp", [20, 50])
def test_very_sure_probabilities_have_small_sets(score, sharp):
    """Those of the true class, where the model is wrong, are below 1e-17: 1 - p is 1."""
    covered, sizes = [], []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        logits = 2.5 * rng.normal(size=(2000, 10))
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
        logs = log_softmax(sharp * logits, -1)
        fitted = conformal(probs=np.exp(logs[:1000]), labels=labels[:1000], score=score, seed=seed)
        sets = fitted.sets(probs=np.exp(logs[1000:]))
        covered.append(sets[np.arange(1000), labels[1000:]].mean())
        sizes.append(sets.sum(-1).mean())
        if score == "lac":
            limit = np.sort(-logs[np.arange(1000), labels[:1000]])[math.ceil(1001 * 0.9) - 1]
            assert np.array_equal(sets, -logs[1000:] <= limit + 1e-5)
    assert np.mean(covered) == pytest.approx(0.9, abs=0.0015 + 4 * np.std(covered) / math.sqrt(20))
    assert np.mean(sizes) < 3


@pytest.mark.parametrize("score", SCORES)
def test_probabilities_too_small_for_float32_take_no_coverage(score):
    rng = np.random.default_rng(3)
    logits = 2.5 * rng.normal(size=(8000, 10))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    probs = softmax(60 * logits, -1)
    assert (probs[np.arange(8000), labels].astype(np.float32) == 0).mean() > 0.1
    fitted = conformal(probs=probs[:4000], labels=labels[:4000], score=score)
    sets = fitted.sets(probs=probs[4000:].astype(np.float32))
    assert sets[np.arange(4000), labels[4000:]].mean() > 0.88
    two = softmax(20 * logits[:, :2], -1)  # of P(y = 1) what is left to one, below 6e-8
    events = (logits[:, 1] + rng.logistic(size=8000) > logits[:, 0]).astype(int)
    fitted = conformal(probs=two[:4000], labels=events[:4000], coverage=0.97, score=score)
    sets = fitted.sets(probs=two[4000:, 1].astype(np.float32))
    assert sets[np.arange(4000), events[4000:]].mean() > 0.96


def test_a_limit_of_low_precision_serves_a_higher_one():
    probs = np.repeat([[0.3, 0.7]], 20, 0)  # 0.3 is a little more in float16
    fitted = conformal(probs=probs.astype(np.float16), labels=np.arange(20) % 2, score="lac")
    assert fitted.sets(probs=probs).all()


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_zeros_have_the_random_part_that_they_had(score, dtype):
    events = np.arange(100) % 2
    one = np.where(np.arange(100) < 80, events, 1 - events).astype(dtype)  # 80 of 100 are right
    for probs, seed in itertools.product((one, np.eye(2, dtype=dtype)[one.astype(int)]), range(5)):
        fitted = conformal(probs=probs, labels=events, coverage=0.7, score=score, seed=seed)
        assert fitted.sets(probs=probs)[np.arange(100), events].mean() >= 0.7


@pytest.mark.parametrize("sharp", [5, 10])
def test_rows_of_a_sure_model_do_not_share_their_random_part(sharp):
    rng = np.random.default_rng(0)
    logits = sharp * (rng.normal(size=(2000, 10)) + 5 * np.eye(10)[rng.integers(10, size=2000)])
    probs = softmax(logits, -1)
    assert np.median(probs.max(-1)) > 1 - 1e-6
    assert len(np.unique(conformal_sets._uniform(probs, 0))) > 1900
    assert kstest(conformal_sets._uniform(probs, 0), "uniform").pvalue > 1e-4


@pytest.mark.parametrize("score", SCORES)
def test_the_mean_size_is_that_of_the_sets_of_its_examples(score, rng):
    logits, labels = drawn(rng, 500, 6)
    labels[:50] = -100
    fitted = conformal(logits, labels, score=score, coverage=0.95)
    size = fitted.sets(logits)[50:].sum() / 450
    assert 1 < size < 6
    assert fitted.mean_size == pytest.approx(size, abs=1e-12)
    with pytest.raises(ValueError, match="nothing to measure"):
        fitted.sizes(logits[:50], labels[:50])
    assert f"mean size {size:.2f}" in repr(fitted)
    assert ["mean set size", f"{size:.2f} classes"] in check_inert(fitted._repr_html_()).tables[0]


def test_no_set_is_empty_if_so_wished(rng):
    probs, labels = probabilities(rng, 400, classes=3)
    probs = shift_prior(
        probs=probs**4 / (probs**4).sum(-1, keepdims=True),
        old_prior=[1 / 3] * 3,
        new_prior=[1 / 3] * 3,
    )
    fitted = conformal(probs=probs, labels=labels, coverage=0.3, score="lac")
    plain, filled = fitted.sets(probs=probs), fitted.sets(probs=probs, nonempty=True)
    empty = ~plain.any(-1)
    assert empty.any()
    assert np.array_equal(plain[~empty], filled[~empty])
    assert (filled[empty].sum(-1) == 1).all()
    assert (filled[empty].argmax(-1) == probs[empty].argmax(-1)).all()


def test_sets_of_tensors_are_tensors(rng):
    probs, labels = probabilities(rng, 100)
    given = torch.tensor(probs)
    fitted = conformal(probs=given, labels=torch.tensor(labels))
    assert fitted == conformal(probs=probs, labels=labels)
    sets = fitted.sets(probs=given)
    assert sets.dtype == torch.bool
    assert np.array_equal(sets.numpy(), fitted.sets(probs=probs))
    assert fitted.sets(probs=given.float()).shape == (100, 8)


def test_one_probability_stands_for_two_classes(rng):
    probs, labels = probabilities(rng, 200, classes=2)
    assert conformal(probs=probs[:, 1], labels=labels).classes == 2
    assert np.array_equal(
        conformal(probs=probs[:, 1], labels=labels, score="lac").sets(probs=probs[:, 1]),
        conformal(
            probs=np.stack([1 - probs[:, 1], probs[:, 1]], -1), labels=labels, score="lac"
        ).sets(probs=probs),
    )


def test_ignored_examples_do_not_count(rng):
    probs, labels = probabilities(rng, 300)
    some = np.where(np.arange(300) % 3 == 0, -100, labels)
    assert conformal(probs=probs, labels=some) == conformal(
        probs=probs[some >= 0], labels=labels[some >= 0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"coverage": 90}, "coverage must be between 0 and 1, got 90"),
        ({"score": "best"}, "score must be one of .*, got 'best'"),
    ],
)
def test_conformal_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        conformal(probs=[[0.5, 0.5]], labels=[0], **options)


@pytest.mark.parametrize("score", SCORES)
def test_logits_have_the_sets_of_their_probabilities(rng, score):
    logits, labels = drawn(rng, 400, 6)
    probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    of_logits, of_probs = (
        conformal(logits, labels, score=score),
        conformal(probs=probs, labels=labels, score=score),
    )
    assert of_logits.limit == pytest.approx(of_probs.limit, rel=1e-9)
    assert np.array_equal(of_logits.sets(logits), of_probs.sets(probs=probs))
    sets = of_logits.sets(torch.tensor(logits).float())
    assert isinstance(sets, torch.Tensor)
    assert np.array_equal(sets, of_logits.sets(logits))


def test_sets_refuse_another_number_of_classes(rng):
    probs, labels = probabilities(rng, 100)
    fitted = conformal(probs=probs, labels=labels)
    with pytest.raises(ValueError, match="conformal had 8 classes, got 3"):
        fitted.sets(probs=[[0.2, 0.3, 0.5]])


@pytest.mark.parametrize("limit", [math.nan, "0.5", []])
def test_a_state_without_a_limit_is_refused(rng, limit):
    probs, labels = probabilities(rng, 60)
    state = conformal(probs=probs, labels=labels).state()
    with pytest.raises(ValueError, match="limit must be a number or None"):
        ConformalSets.from_state({**state, "limit": limit})
