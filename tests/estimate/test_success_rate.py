"""Success rates are right on average, and their intervals hold, whatever the judge does."""

import math

import numpy as np
import pytest
from scipy.stats import t as student

from calibrant.estimate.success_rate import rate_difference, success_rate

quiet = pytest.mark.filterwarnings("ignore:all .* labels are", "ignore:the labelled answers")


def labelled(right, count):
    return np.where(np.arange(len(right)) < count, right, np.nan)


def judged(rng, n, rate, *, errors):
    """Labels, and votes of a judge that errs at rates among wrong and right answers."""
    right = rng.random(n) < rate
    wrong_vote = rng.random(n) < np.where(right, errors[1], errors[0])
    return right.astype(float), (right ^ wrong_vote).astype(float)


def test_it_is_prediction_powered_inference_with_the_best_tuning(rng):
    right, judge = judged(rng, 400, 0.7, errors=(0.3, 0.1))
    found = success_rate(judge, labelled(right, 60))
    y, f, others = right[:60], judge[:60], judge[60:]
    # PPI++ (Angelopoulos et al. 2023): the rectifier and its tuning, as in the paper
    tuning = np.cov(y, f)[0, 1] / ((1 + 60 / 340) * f.var(ddof=1))
    wanted = y.mean() + tuning * (others.mean() - f.mean())
    assert found.rate.value == pytest.approx(wanted, rel=1e-12)
    slope = np.cov(y, f)[0, 1] / f.var(ddof=1)
    assert found.slope == pytest.approx(slope)
    residual = y - y.mean() - slope * (f - f.mean())
    variance = residual @ residual / 58 / 60 + slope**2 * judge.var() / 400
    own = found.uncertainty.variance(found.rate.value, found.rate.value)
    assert own == pytest.approx(variance, rel=0.02)  # but for a covariance of order 1/N


@pytest.mark.parametrize("hits", [0, 3, 25, 47, 50])
@quiet
def test_without_a_useful_judge_the_interval_is_wilsons(hits):
    right = np.arange(50) < hits
    found = success_rate(np.ones(50), right.astype(float), level=0.8)
    share, z2 = hits / 50, student.ppf(0.9, 49) ** 2
    centre = (share + z2 / 100) / (1 + z2 / 50)
    # t replaces the normal quantile, and 49 the 50 of the variance
    reach = np.sqrt(z2 * (share * (1 - share) / 50 + z2 / 10000)) / (1 + z2 / 50)
    assert found.rate.value == pytest.approx(share)
    assert found.rate.low == pytest.approx(max(centre - reach, 0), abs=0.003)
    assert found.rate.high == pytest.approx(min(centre + reach, 1), abs=0.003)


def test_a_judge_without_errors_so_far_may_still_err(rng):
    right = rng.random(100_000) < 0.5
    found = success_rate(right, labelled(right, 40))
    quantile2 = student.ppf(0.95, 38) ** 2
    assert found.rate.high - found.rate.value == pytest.approx(
        quantile2 / (40 + quantile2), rel=0.1
    )


@quiet
@pytest.mark.parametrize(
    ("rate", "errors", "count"),
    [
        (0.5, (0.1, 0.1), 20),
        (0.5, (0.13, 0.0), 20),  # in its favour only
        (0.9, (0.7, 0.7), 50),  # says the contrary
        (0.98, (0.5, 0.5), 100),  # useless
        (0.05, (0.1, 0.1), 50),
    ],
)
def test_intervals_contain_the_rate_as_often_as_they_say(rate, errors, count):
    hits = 0
    for seed in range(150):
        right, judge = judged(np.random.default_rng([seed, 7]), 500, rate, errors=errors)
        found = success_rate(judge, labelled(right, count), level=0.9)
        hits += found.rate.low <= rate <= found.rate.high
    assert hits >= 126  # 135 are expected at least, with a standard deviation of 4


def test_a_good_judge_makes_the_interval_narrow_and_is_worth_labels(rng):
    right, judge = judged(rng, 20_000, 0.6, errors=(0.05, 0.05))
    found = success_rate(judge, labelled(right, 300))
    alone = found.labels_alone
    assert alone.value == pytest.approx(right[:300].mean())
    assert 2 * found.half_width < 0.6 * (alone.high - alone.low)
    correlation = np.corrcoef(right[:300], judge[:300])[0, 1]
    wanted = 300 / (1 - correlation**2 + correlation**2 * 300 / 20_000)
    assert found.worth == pytest.approx(wanted, rel=0.1)


def test_known_probabilities_remove_the_bias_of_chosen_labels():
    values, plain = [], []
    for seed in range(60):
        rng = np.random.default_rng(seed)
        right, judge = judged(rng, 2000, 0.6, errors=(0.3, 0.2))
        # wrong answers are labelled more often, as when complaints are looked at
        chance = np.where(right == 1, 0.05, 0.2)
        human = np.where(rng.random(2000) < chance, right, np.nan)
        values.append(success_rate(judge, human, probability=chance).rate)
        with pytest.warns(UserWarning, match="do not look drawn at random"):
            plain.append(success_rate(judge, human).rate.value)
    assert np.mean([each.value for each in values]) == pytest.approx(0.6, abs=0.02)
    assert np.mean(plain) < 0.5
    assert sum(each.low <= 0.6 <= each.high for each in values) >= 48


def test_strata_are_weighted_by_their_size_and_estimated_apart():
    strata = np.repeat(["easy", "hard"], [900, 100])
    human = np.full(1000, np.nan)
    human[:4], human[900:908] = [1, 1, 1, 0], [0, 0, 1, 0, 0, 0, 0, 1]
    found = success_rate(np.zeros(1000), human, strata=strata)
    assert found.rate.value == pytest.approx(0.9 * 0.75 + 0.1 * 0.25)
    within = 0.9**2 * 0.75 / 3 / 4 + 0.1**2 * 1.5 / 7 / 8
    between = (0.9 * 0.75**2 + 0.1 * 0.25**2 - found.rate.value**2) / 1000  # sizes are random, too
    own = found.uncertainty
    assert own.residual == pytest.approx(within)
    assert own.predicted == pytest.approx(between)


def test_answers_to_one_question_count_as_little_as_they_tell(rng):
    right, judge = judged(rng, 300, 0.6, errors=(0.2, 0.2))
    once = success_rate(judge, labelled(right, 100))
    five = np.repeat(np.arange(300), 5)
    human = np.repeat(labelled(right, 100), 5)
    again = success_rate(np.repeat(judge, 5), human, groups=five)
    assert again.rate.value == pytest.approx(once.rate.value)
    assert again.half_width == pytest.approx(once.half_width, rel=0.03)
    assert success_rate(np.repeat(judge, 5), human).half_width < 0.6 * once.half_width


def test_the_scale_of_the_scores_does_not_matter(rng):
    right, judge = judged(rng, 500, 0.6, errors=(0.2, 0.2))
    human = labelled(right, 100)
    once, scaled = success_rate(judge, human), success_rate(1 + 9 * judge, human)
    np.testing.assert_allclose(scaled.rate, once.rate)


def test_grades_between_0_and_1_have_narrower_intervals(rng):
    grades = np.clip(rng.normal(0.6, 0.1, size=200), 0, 1)
    found = success_rate(np.zeros(200), labelled(grades, 50))
    reach = student.ppf(0.95, 49) * grades[:50].std(ddof=1) / math.sqrt(50)
    assert found.half_width == pytest.approx(reach, rel=0.03)


def test_labels_needed_are_as_many_as_it_takes(rng):
    right, judge = judged(rng, 5000, 0.7, errors=(0.1, 0.1))
    first = success_rate(judge, labelled(right, 200))
    needed = first.labels_needed(0.02)
    assert needed is not None
    assert 400 < needed < 1200
    assert success_rate(judge, labelled(right, needed)).half_width == pytest.approx(0.02, rel=0.15)
    assert first.labels_needed(0.2) == 200
    assert first.labels_needed(0.001) is None
    assert first.answers_needed(0.001) == pytest.approx(0.7 * 0.3 * 1.645**2 / 1e-6, rel=0.1)
    with pytest.raises(ValueError, match="half_width must be between 0 and"):
        first.labels_needed(2)


def test_with_few_labels_the_judge_is_not_used(rng):
    right, judge = judged(rng, 500, 0.5, errors=(0.0, 0.0))
    assert success_rate(judge, labelled(right, 9)).slope == 0
    assert success_rate(judge, labelled(right, 10)).slope == pytest.approx(1)


def test_labels_that_are_all_equal_say_nothing_about_the_judge(rng):
    with pytest.warns(UserWarning, match="all 30 labels are 1: they say nothing about the judge"):
        found = success_rate(rng.random(100), labelled(np.ones(100), 30))
    assert found.rate.value == found.rate.high == 1
    assert 0.88 < found.rate.low < 0.94


@quiet
@pytest.mark.parametrize("shared", [True, False])
def test_differences_of_systems_use_common_questions(shared):
    hits, widths, alone = 0, 0.0, 0.0
    for seed in range(100):
        rng = np.random.default_rng([seed, 3])
        ease = rng.normal(size=600)
        other = ease if shared else rng.normal(size=600)
        both = [each + bonus > 0 for each, bonus in ((ease, 0.3), (other, 0.5))]
        votes = [np.where(rng.random(600) < 0.9, each, ~each) for each in both]
        rates = [success_rate(v, labelled(y, 150)) for v, y in zip(votes, both, strict=True)]
        found = rate_difference(*rates, questions=(np.arange(600), np.arange(600)))
        hits += found.low <= 0.0735 <= found.high  # Phi(0.5) - Phi(0.3)
        widths += found.high - found.low
        plain = rate_difference(*rates)
        alone += plain.high - plain.low
        assert found.value == plain.value == rates[1].rate.value - rates[0].rate.value
    assert hits >= 84
    assert (widths < 0.8 * alone) == shared


def test_differences_need_comparable_rates(rng):
    right = rng.random(50) < 0.5
    one = success_rate(right, right.astype(float))
    other = success_rate(right, right.astype(float), level=0.8)
    with pytest.raises(ValueError, match="the levels must be equal"):
        rate_difference(one, other)
    with pytest.raises(ValueError, match="questions must have one for each of 50 answers"):
        rate_difference(one, one, questions=(np.arange(50), np.arange(49)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"human": np.full(20, np.nan)}, "two answers or more must have a human label, got 0"),
        ({"human": np.full(20, 3.0)}, "human must be 0 or 1, or a grade in between, got 3"),
        ({"human": np.zeros(19)}, "human must have a value for each of 20 answers"),
        ({"judge": np.full(20, np.nan)}, "judge must not hold NaN"),
        ({"probability": np.zeros(20)}, "probability must be above 0 and at most 1"),
        ({"probability": np.ones(3)}, "probability must have a value for each of 20"),
        ({"strata": np.arange(20)}, "each of 20 strata needs two labelled answers or more, got 1"),
        ({"strata": np.ones(3)}, "strata must have a value for each of 20"),
        ({"groups": np.ones(3)}, "groups must have a value for each of 20"),
        ({"strata": np.ones(20), "probability": np.ones(20)}, "probability or strata, not both"),
        ({"level": 1.0}, "level must be"),
    ],
)
def test_bad_input_is_refused(options, message):
    data = {"judge": np.arange(20) / 20, "human": (np.arange(20) % 2).astype(float)}
    with pytest.raises(ValueError, match=message):
        success_rate(**{**data, **options})
