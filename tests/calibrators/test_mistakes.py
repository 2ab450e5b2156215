"""Facts about the data of a fit: told by every door, once, and only where they are facts."""

import warnings

import numpy as np
import pytest
import torch
from scipy.special import softmax

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant.calibrators import CALIBRATORS, TAG_CALIBRATORS, fit_inputs
from calibrant.calibrators.fit_inputs import _figures_of, mistake_of, told
from tests.support.simulate import drawn


def weighted_model(n, seed=0):
    """Logits as after training with class weights: a rare class gets far more than its share."""
    rng = np.random.default_rng(seed)
    truth = rng.normal(size=(n, 4)) - 3 * np.eye(4)[0]
    labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    return truth + 2 * np.eye(4)[0], labels


def doors(logits, labels, **options):
    """Fits of one method by name, in every way that there is."""
    data = {"logits": logits, "labels": labels}
    return {
        "the calibrator": lambda: CALIBRATORS["ts"]().fit(logits, labels),
        "arrays of tensors": lambda: CALIBRATORS["ts"]().fit(torch.tensor(logits), labels),
        "whole": lambda: cal.fit(data, method="beta"),
        "the table": lambda: cal.fit(data, method="ts"),
        "auto": lambda: cal.fit(data, method=cal.Auto(candidates=("none", "ts"))),
        "cross_fit, whole": lambda: cal.cross_fit(data, method="beta", level=None),
        "cross_fit, the table": lambda: cal.cross_fit(data, method="ts", level=None),
        "compare": lambda: cal.compare(data, methods=["none", "ts", "beta"], level=None),
    }


DOORS = list(doors(np.zeros((1, 2)), np.zeros(1)))


def said_by(call):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call()
    return [str(one.message) for one in caught], result


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("mistake", ["training set", "shuffled", "counted from one"])
def test_mistakes_are_told_once_by_every_door(mistake, door):
    logits, labels = drawn(np.random.default_rng(0), 600, 5, 0.3)
    labels = {
        "training set": logits.argmax(-1),
        "shuffled": np.random.default_rng(1).permutation(labels),
        "counted from one": (labels + 1) % 5,
    }[mistake]
    said, _ = said_by(doors(logits, labels)[door])
    right = mistake == "training set"
    message = "all predictions are right, at" if right else "no better than that of guessing ("
    assert len(said) == 1, said
    assert message in said[0]


@pytest.mark.parametrize("door", DOORS)
def test_sound_data_are_not_suspected(door):
    for seed in range(3):
        logits, labels = drawn(np.random.default_rng(seed), 600, 5, 1.5)
        said, _ = said_by(doors(logits, labels)[door])
        assert said == []


@pytest.mark.parametrize("door", DOORS)
def test_classes_that_are_far_off_are_told_once(door):
    said, result = said_by(doors(*weighted_model(3000))[door])
    if door == "compare":
        assert said == []
        said = [line for line in result.remarks() if "keeps predictions" in line]
        assert set(said) <= set(result.to_dict()["remarks"])
    assert len(said) == 1
    assert "the mean probability of class 0 is " in said[0]
    assert "vector, dirichlet or sms" in said[0]


def test_the_class_and_its_figures_are_those_of_the_data():
    logits, labels = weighted_model(3000)
    (said,), fitted = said_by(lambda: CALIBRATORS["ts"]().fit(logits, labels))
    claimed, happened = fitted.predict_proba(logits)[:, 0].mean(), (labels == 0).mean()
    assert f"class 0 is {100 * claimed:.1f} % where {100 * happened:.1f} %" in said
    weight = np.where(labels == 0, 4.0, 1.0)  # as if it were as frequent as the model says
    assert said_by(lambda: CALIBRATORS["ts"]().fit(logits, labels, sample_weight=weight))[0] == []
    for method in ("vector", "sms"):
        assert said_by(lambda name=method: CALIBRATORS[name]().fit(logits, labels))[0] == []
    simple = cal.Auto(candidates=("none", "ts"), folds=2)
    (gain,), _ = said_by(lambda: simple.fit(logits, labels))
    assert "; sms, which may change the predicted class, would gain: accuracy" in gain
    assert said_by(lambda: cal.Auto(folds=2).fit(logits, labels))[0] == []


def test_two_classes_have_remedies_of_their_own():
    rng = np.random.default_rng(0)
    odds = 2 * rng.normal(size=2000)
    labels = (rng.random(2000) < 1 / (1 + np.exp(2 - odds))).astype(int)
    for logits in (odds, np.stack([np.zeros(2000), odds], -1)):
        (said,), _ = said_by(lambda z=logits: CALIBRATORS["ts"]().fit(z, labels))
        assert said.endswith("such as auto or sigmoid")
        assert said_by(lambda z=logits: CALIBRATORS["sigmoid"]().fit(z, labels))[0] == []
    (said,), _ = said_by(lambda: CALIBRATORS["ts"]().fit(odds, 1 - labels))
    assert "P(y = 1) is higher where y = 0" in said


def test_a_calibrated_model_is_rarely_said_to_be_off():
    """A hundred sets of small and of even classes, at a level of one in a thousand."""
    said = []
    for seed in range(100):
        rng = np.random.default_rng(seed)
        logits = rng.normal(size=(300, 4)) - [0.0, 0.0, 1.0, 2.0 * (seed % 2)]
        labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)
        said += said_by(lambda z=logits, y=labels: CALIBRATORS["ts"]().fit(z, y))[0]
    assert len(said) <= 1


def test_figures_are_those_by_hand():
    rng = np.random.default_rng(0)
    logits, labels, weight = (
        2 * rng.normal(size=(200, 3)),
        rng.integers(3, size=200),
        rng.random(200),
    )
    found = _figures_of(examples(logits, labels, weight))
    probs, share = softmax(logits, -1), weight / weight.sum()
    assert found.n == pytest.approx(weight.sum() ** 2 / (weight**2).sum())
    assert found.accuracy == pytest.approx(share @ (logits.argmax(-1) == labels))
    assert found.confidence == pytest.approx(share @ probs.max(-1))
    shares = [share[labels == k].sum() for k in range(3)]
    assert found.chance == pytest.approx(max((share @ probs) @ shares, 1 / 3))
    assert found.ranks is None
    ranks = _figures_of(examples(logits[:, 0], (labels > 0).astype(int), weight)).ranks
    assert ranks is not None
    assert ranks.positive == pytest.approx(share[labels > 0].sum())


def test_rows_without_a_softmax_are_left_to_the_fit():
    logits, labels = drawn(np.random.default_rng(0), 300, 4)
    logits[7] = np.nan
    with pytest.raises(ValueError, match="row 7 has NaN"):
        CALIBRATORS["ts"]().fit(logits, labels)


def test_few_examples_show_no_mistake():
    logits, labels = drawn(np.random.default_rng(0), 90, 4, 0.3)
    assert mistake_of(examples(logits, logits.argmax(-1))) == ""
    assert mistake_of(examples(logits, np.roll(labels, 1))) == ""


@pytest.mark.parametrize("method", ["ts", "sigmoid", "beta", "vector", "isotonic"])
def test_labels_of_one_class_are_told_once(method):
    logits, labels = drawn(np.random.default_rng(0), 300, 4)
    labels = np.where(np.arange(300) % 3 == 0, -100, 0)
    said, _ = said_by(lambda: CALIBRATORS[method]().fit(logits, labels))
    assert said == [
        "all 200 labels are 0: what is learned of one class may be wrong for the others"
    ]
    said, _ = said_by(lambda: TAG_CALIBRATORS["tags"]().fit(logits, np.ones_like(logits, int)))
    assert said == [said[0]]
    assert said[0].startswith("all 1,200 labels are 1: ")


def test_large_data_are_sampled_evenly(monkeypatch):
    monkeypatch.setattr(fit_inputs, "_MAX_EXAMPLES", 100)
    monkeypatch.setattr(fit_inputs, "ENOUGH", 50)
    logits, labels = drawn(np.random.default_rng(0), 1000, 4, 0.3)
    order = np.argsort(labels, kind="stable")
    some, rows = fit_inputs._looked_at(examples(logits[order], labels[order]))
    assert len(rows) == 100
    found = _figures_of(some)
    assert found.n == pytest.approx(100)
    assert found.accuracy == pytest.approx((logits.argmax(-1) == labels).mean(), abs=0.15)


def test_many_classes_leave_enough_examples():
    logits, labels = drawn(np.random.default_rng(0), 201, 3000, 0.3, scale=8.0)
    assert "no better than that of guessing" in mistake_of(examples(logits, np.roll(labels, 1)))


def test_who_has_told_is_not_told_again():
    logits, _ = drawn(np.random.default_rng(0), 300, 4)
    with told("a mistake"):
        CALIBRATORS["ts"]().fit(logits, logits.argmax(-1))  # a warning would be an error
    with told(), pytest.warns(UserWarning, match="no best temperature"):
        CALIBRATORS["ts"]().fit(logits, logits.argmax(-1))
