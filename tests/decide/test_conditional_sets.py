"""Sets with coverage by class, by group and after a change of the inputs, and without gaps."""

import math
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant as cal
from calibrant.decide import ConformalSets, DecisionRule, conformal
from tests.support.simulate import drawn


def draw(n, seed=0, shift=0.0):
    """Rows of two groups; the second has labels of half the sharpness, so its sets are larger."""
    rng = np.random.default_rng(seed)
    hard = rng.random(n) < 0.3 + shift
    logits = 2 * rng.normal(size=(n, 4)) - [0, 0, 0, 1]
    labels = (logits * np.where(hard, 0.5, 1.0)[:, None] + rng.gumbel(size=logits.shape)).argmax(-1)
    return logits, labels, np.where(hard, "hard", "easy")


# Of crepes 0.9.1: ConformalClassifier on hinge scores, without smoothing. A class is in the set if
# its p-value is above 0.1; each class, or group, is a bin. The bits of the sets (200, 4).
CREPES = {
    None: (
        "7f68a8fb7d678f3b3eaa6ecda696cc9c64bb8757266638aa1485fcb44a699293248fd29772664ea7"
        "5cd5658d236ac8614a3e21a8e2959891a9249b29cb22681e836a2c27cdc4cb4861159a26a37d2669"
        "c7aea68fccee7a88344ce1624ece88996e7a8bc6"
    ),
    "class": (
        "7b6828337d67af333eb27ecda6966c9d24bb8757266738aa14877cb44a619293248fd297726646a7"
        "5cd5658d237b48616a3e21b9e2959891a9249329cb22681e836a2827cdc4c34863159a26a37d266b"
        "c7aa268fecee7288366ce16246cf8899727a8bc6"
    ),
    "group": (
        "7f68a8fb7d678f3b3eaa6ecda696cc9c64bb8757266638aa1485fcb44a699293248fd29772664ea7"
        "5cd5658d237ac8616a3e21a8e2959891a9249b29cb22681e836a2c27cdc4cb4861159a26a37d266b"
        "c7aea68fccee7a88344ce1624ece88996e7a8bc6"
    ),
}


@pytest.mark.parametrize("by", CREPES)
def test_sets_by_class_and_group_are_those_of_crepes(by):
    """Those of MAPIE 1.6.0 with the score lac are the same as the first."""
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(400, 4)) - [0, 0, 0, 1]
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
    group = np.where(np.arange(400) % 3 == 0, "a", "b")
    wanted: Any = group[:200] if by == "group" else by
    fitted = conformal(logits[:200], labels[:200], score="lac", by=wanted)
    sets = fitted.sets(logits[200:], group=group[200:] if by == "group" else None)
    assert np.packbits(sets).tobytes().hex() == CREPES[by]


@pytest.mark.parametrize("score", ["lac", "aps", "raps", "ordered"])
def test_each_class_and_group_is_covered(score):
    """On average over draws; without limits of their own, the hard group is covered less."""
    found: dict[str, list[list[float]]] = {"all": [], "class": [], "group": []}
    for seed in range(25):
        logits, labels, group = draw(2200, seed)
        held, new = slice(1200), slice(1200, 2200)
        truth = labels[new]
        for kind, rows in found.items():
            by = {"all": None, "class": "class", "group": group[held]}[kind]
            fitted = conformal(logits[held], labels[held], coverage=0.8, score=score, by=by)
            given = {"group": group[new]} if kind == "group" else {}
            covered = fitted.sets(logits[new], **given)[np.arange(1000), truth]
            cells = [covered[truth == k].mean() for k in range(4)]
            rows.append(cells + [covered[group[new] == name].mean() for name in ("easy", "hard")])
    means = {kind: np.mean(rows, 0) for kind, rows in found.items()}
    assert means["class"][:4] == pytest.approx(0.8, abs=0.03)
    assert means["group"][4:] == pytest.approx(0.8, abs=0.02)
    assert means["all"][5] < 0.78


def test_weights_bring_back_the_coverage_after_a_change_of_the_inputs():
    """Hard rows become twice as frequent; the weights are the ratio of their frequencies."""
    plain, weighted = [], []
    for seed in range(15):
        logits, labels, group = draw(1000, seed)
        new, truth, now = draw(2000, 100 + seed, shift=0.4)
        ratios = {"hard": 0.7 / 0.3, "easy": 0.3 / 0.7}
        ratio, given = (np.vectorize(ratios.get)(x) for x in (group, now))
        fitted = conformal(logits, labels, coverage=0.8, score="lac", weight=5 * ratio)
        sets = fitted.sets(new, weight=5 * given)
        weighted.append(sets[np.arange(2000), truth].mean())
        unweighted = conformal(logits, labels, coverage=0.8, score="lac").sets(new)
        plain.append(unweighted[np.arange(2000), truth].mean())
    assert np.mean(weighted) == pytest.approx(0.8, abs=0.012)
    assert np.mean(plain) < 0.78


def test_weighted_limits_are_those_of_the_definition():
    logits, labels, _ = draw(80)
    rng = np.random.default_rng(1)
    ratio, given = rng.exponential(size=80), rng.exponential(size=30)
    given[0] = 1000.0  # so much weight that no score is large enough
    fitted = conformal(logits, labels, coverage=0.8, score="lac", weight=ratio)
    probs = softmax(logits, -1)
    own = -probs[np.arange(80), labels]
    new = draw(30, seed=2)[0]
    made = fitted.sets(new, weight=given)
    for row, w, members in zip(softmax(new, -1), given, made, strict=True):
        total = ratio.sum() + w
        for k in range(4):
            # share of the weights of scores that are strictly below: in the set unless 80 % are
            below = ratio[own < -row[k] - 1e-9].sum() / total
            assert members[k] == (below < 0.8)
    assert made[0].all()
    ones = conformal(logits, labels, coverage=0.8, score="lac", weight=np.ones(80))
    plain = conformal(logits, labels, coverage=0.8, score="lac")
    assert ones.limit == pytest.approx(plain.limit)
    assert (ones.sets(new, weight=np.ones(30)) == plain.sets(new)).all()
    assert ones.mean_size == pytest.approx(plain.mean_size)


@pytest.mark.parametrize("classes", [2, 5, 9])
def test_ordered_sets_have_no_gap_and_grow_by_the_larger_neighbour(classes, rng):
    logits, labels = drawn(rng, 1500, classes)
    fitted = conformal(logits[:700], labels[:700], coverage=0.8, score="ordered")
    sets = fitted.sets(logits[700:], nonempty=True)
    assert (np.abs(np.diff(sets, axis=-1, prepend=0, append=0)).sum(-1) == 2).all()
    for row, members in zip(softmax(logits[700:], -1), sets, strict=True):
        low = high = int(row.argmax())
        while high - low + 1 < members.sum():
            down = row[low - 1] if low else -1.0
            up = row[high + 1] if high + 1 < classes else -1.0
            low, high = (low - 1, high) if down >= up else (low, high + 1)
        assert np.flatnonzero(members).tolist() == list(range(low, high + 1))
    covered = fitted.sets(logits[700:])[np.arange(800), labels[700:]].mean()
    assert covered == pytest.approx(0.8, abs=0.06)
    plain = conformal(logits[:700], labels[:700], coverage=0.8, score="aps")
    assert plain.mean_size <= fitted.mean_size + 0.1


def test_the_mean_size_is_that_of_the_examples_of_the_fit():
    logits, labels, group = draw(500)
    ones = {"weight": np.ones(500)}
    cases: list[Any] = [({"by": "class"}, {}), ({"by": group}, {"group": group}), (ones, ones)]
    for options, given in cases:
        fitted = conformal(logits, labels, **options)
        assert fitted.mean_size == fitted.sets(logits, **given).sum(-1).mean()
        sizes = fitted.sizes(logits, labels, **given)
        assert (sizes.size * sizes.share).sum() == pytest.approx(fitted.mean_size)


def test_a_class_with_few_examples_is_in_every_set():
    logits, labels, _ = draw(300)
    few = np.flatnonzero(labels == 3)[5:]
    labels[few] = -100
    with pytest.warns(UserWarning, match=r"1 classes or groups, 3 \(5\), cannot show .*: use at"):
        fitted = conformal(logits, labels, by="class")
    sets = fitted.sets(logits)
    assert sets[:, 3].all()
    assert not sets[:, 0].all()
    assert fitted.limits["3"] == math.inf
    rule = DecisionRule(fitted, 4)
    assert not rule.decides_nothing
    assert rule.promise().endswith("for each class.")


@pytest.mark.parametrize("kind", ["class", "group", "weight"])
def test_conditional_sets_are_saved_whole(kind, tmp_path):
    logits, labels, group = draw(300)
    ones = {"weight": np.ones(300)}
    options: Any = {"class": {"by": "class"}, "group": {"by": group}}.get(kind, ones)
    fitted = conformal(logits, labels, **options)
    cal.save(fitted, tmp_path / "sets")
    again = cal.load(tmp_path / "sets", ConformalSets)
    assert again == fitted
    given = {"class": {}, "group": {"group": group}}.get(kind, ones)
    tensor = again.sets(torch.from_numpy(logits), **given)
    assert isinstance(tensor, torch.Tensor)
    assert (tensor.numpy() == fitted.sets(logits, **given)).all()
    assert len(fitted.to_frame()) == {"class": 4, "group": 2, "weight": 1}[kind]
    assert "for each" in fitted.promise() or kind == "weight"


def test_limits_of_classes_go_with_the_columns_of_a_data_frame():
    pandas = pytest.importorskip("pandas")
    logits, labels, _ = draw(600)
    names = np.array(["cat", "dog", "owl", "pig"])
    frame = pandas.DataFrame(logits, columns=names)
    fitted = conformal(frame, names[labels], score="lac", by="class")
    assert list(fitted.limits) == list(names)
    wanted = conformal(logits, labels, score="lac", by="class").sets(logits)
    assert (fitted.sets(logits) == wanted).all()
    turned = ["pig", "cat", "owl", "dog"]
    assert (fitted.sets(frame[turned]) == wanted[:, [3, 0, 2, 1]]).all()
    with pytest.raises(ValueError, match="the data frame has other classes"):
        fitted.sets(frame.rename(columns={"cat": "cow"}))


def test_groups_and_weights_may_be_one_for_each_row_of_tokens():
    logits, labels, _ = draw(600)
    tokens, truth, by = logits.reshape(60, 10, 4), labels.reshape(60, 10), np.arange(60) % 2
    flat = conformal(logits, labels, by=np.repeat(by, 10))
    fitted = conformal(tokens, truth, by=by)
    assert fitted == flat
    assert (
        fitted.sets(tokens, group=by).reshape(600, 4) == flat.sets(logits, group=np.repeat(by, 10))
    ).all()
    assert conformal(tokens, truth, weight=1.0 + by) == conformal(
        logits, labels, weight=1.0 + np.repeat(by, 10)
    )


def test_a_rule_refuses_sets_that_need_more_than_probabilities():
    logits, labels, group = draw(300)
    for options in ({"by": group}, {"weight": np.ones(300)}):
        with pytest.raises(TypeError, match="a rule has no groups or weights of the rows"):
            DecisionRule(conformal(logits, labels, **options), 4)


def test_few_examples_with_weights_are_told():
    logits, labels, _ = draw(5)
    with pytest.warns(UserWarning, match="5 examples cannot show a coverage of 0.9") as caught:
        fitted = conformal(logits, labels, weight=np.ones(5))
    assert caught[0].filename == __file__
    assert fitted.limit == math.inf
    with pytest.warns(UserWarning, match="5 examples cannot show"):
        rule = DecisionRule(conformal(logits, labels), 4)
    assert "all classes: 4 more labels are needed for others" in rule.instruction()
    with pytest.raises(ValueError, match="weight must not be 0 for all labelled examples"):
        conformal(logits, labels, weight=np.zeros(5))


def test_what_makes_no_conditional_sets_is_refused():
    logits, labels, group = draw(300)
    by_group = conformal(logits, labels, by=group)
    with pytest.raises(TypeError, match="group= is missing"):
        by_group.sets(logits)
    with pytest.raises(ValueError, match=r"no limit for the group new; known are easy, hard"):
        by_group.sets(logits, group=np.full(300, "new"))
    with pytest.raises(ValueError, match=r"group must have one value per example .* \(300,\)"):
        by_group.sets(logits, group=group[:5])
    with pytest.raises(TypeError, match="weight= is for other sets"):
        by_group.sets(logits, group=group, weight=np.ones(300))
    with pytest.raises(TypeError, match="pass by= or weight=, not both"):
        conformal(logits, labels, by="class", weight=np.ones(300))
    with pytest.raises(ValueError, match='by must be "class", or the group'):
        conformal(logits, labels, by="site")
    with pytest.raises(ValueError, match="by must have one value per example"):
        conformal(logits, labels, by=group[:9])
    with pytest.raises(ValueError, match="weight must be ratios of densities"):
        conformal(logits, labels, weight=-np.ones(300))
    with pytest.raises(ValueError, match="weight must have one value per example"):
        conformal(logits, labels, weight=np.ones(3))
    state = by_group.state()
    for change in ({"by": "sites"}, {"limits": {"a": "b"}}, {"weighted": [[1.0], []]}):
        with pytest.raises(ValueError, match="must"):
            ConformalSets.from_state({**state, **change})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert by_group.sets(logits, group=group).shape == (300, 4)
