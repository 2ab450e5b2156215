"""The choice among methods: by held-out likelihood, on the examples of the fit alone."""

import numpy as np
import pytest
from scipy.special import log_softmax

import calibrant as cal
from calibrant._core.checks import IGNORED
from calibrant.calibrators.records import records_of
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data.files import as_dataset
from calibrant.workflows import choice as choosing
from calibrant.workflows.choice import choose
from calibrant.workflows.fit import _fit_whole, _fits_from_table
from tests.support.calibrators import Shift
from tests.support.simulate import drawn, preferring

MADE = {name: CALIBRATORS[name] for name in ("none", "ts", "vector", "beta", "sms")}


class Fragile(TemperatureScaling):
    """Cannot be fitted on fewer than 500 examples."""

    def _fit_records(self, records):
        if len(records) < 500:
            raise ValueError("too few")
        super()._fit_records(records)


class Named(Shift):
    """A map of given size that changes nothing: every two are tied."""

    keeps_argmax = True

    def __init__(self, count):
        super().__init__()
        self.count = count

    def size(self, classes):
        return self.count

    def _transform(self, logits, top, features):
        return logits


def chosen(methods, logits, labels, *, sample_weight=None, **options):
    """Fit methods and choose one of them."""
    columns = {"logits": logits, "labels": labels}
    split = as_dataset(columns, sample_weight=sample_weight).split("")
    made = {name: MADE[name]() for name in methods} if isinstance(methods, list) else methods
    fitted = {name: _fit_whole(one, split) for name, one in made.items()}
    from_table = any(_fits_from_table(one, split) for one in made.values())
    return choose(fitted, split, records_of(split) if from_table else None, **options)


def biased(rng, rows=1500):
    """Predictions that prefer class 0 whatever the input."""
    logits, labels = drawn(rng, rows, 4)
    return preferring(logits), labels


def test_losses_are_those_of_fits_on_the_other_folds(rng):
    """For a method that is fitted from records, and one that reads the logits."""
    logits, labels = drawn(rng, 400, 3, 2.0)
    labels[::7] = IGNORED
    split = as_dataset({"logits": logits, "labels": labels}).split("")
    judge = choosing._CrossValidation(split, records_of(split), None, 0)
    assert set(judge.fold[labels == IGNORED]) == {-1}
    for kind in (TemperatureScaling, CALIBRATORS["vector"]):
        found, expected = judge.held_out(kind()), np.full(400, np.nan)
        for i in range(5):
            out = judge.fold == i
            fitted = kind().fit(logits[~out], labels[~out])
            logs = log_softmax(fitted.transform(logits[out]), -1)
            expected[out] = -logs[np.arange(out.sum()), labels[out]]
        assert found is not None
        kept = labels != IGNORED
        np.testing.assert_allclose(found.nll, expected[kept], atol=1e-4)


@pytest.mark.parametrize(("temperature", "best"), [(1.0, "none"), (2.5, "ts")])
def test_what_the_data_need_is_chosen(rng, temperature, best):
    choices = [chosen(["beta", "ts", "none"], *drawn(rng, 500, 4, temperature)) for _ in range(12)]
    right = [found for found in choices if found.method == best]
    assert len(right) >= 9
    start = "Leave the logits as they are (" if best == "none" else f"Use {best} ("
    for found in right:
        assert found.advice.startswith(start + "cross-validated on the examples of the fit: ")


def test_ties_go_to_the_simplest(rng):
    methods = {"large": Named(9), "small": Named(2), "middle": Named(5)}
    assert chosen(methods, *drawn(rng, 300, 4)).method == "small"


def test_a_gain_within_noise_is_none(rng):
    """The lowest mean by a hair does not win over fewer parameters, a clear one does."""
    judge = object.__new__(choosing._CrossValidation)
    judge.share, judge.row = np.full(400, 1 / 400), np.arange(400)
    noise = rng.normal(size=400)
    noise -= noise.mean()
    error = np.sqrt((noise**2).sum()) / 400

    def held_out(nll, size):
        return choosing._HeldOut(nll, np.ones(400, bool), size)

    for gain, name in ((0.9, "plain"), (1.1, "rich")):
        known = {
            "rich": held_out(np.zeros(400), 9),
            "plain": held_out(noise + gain * error, 0),
        }
        assert judge.simplest(known) == ("rich", name)


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_predictions_are_kept_unless_they_may_change_and_the_gain_is_told(rng):
    data = biased(rng)
    kept, better, free = (
        chosen(["none", "ts", "sms"], *data, keep_argmax=keep) for keep in (True, "auto", False)
    )
    assert kept.method in ("none", "ts")
    (remark,) = kept.remarks
    assert remark.startswith("sms, which may change the predicted class, would gain: accuracy ")
    before, after = (float(x) for x in remark.split("accuracy ")[1].split(" %")[0].split(" -> "))
    assert before == pytest.approx(100 * (data[0].argmax(1) == data[1]).mean(), abs=0.01)
    assert after > before + 5
    assert (free.method, free.remarks) == ("sms", ())
    assert better.method == "sms"  # since the accuracy clearly rises
    alone = chosen({"a": Shift(), "b": Shift()}, *data)  # no other is there
    assert alone.method == "a"


@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_two_classes_may_change(rng):
    z = 2 * rng.normal(size=1500)
    labels = (rng.random(1500) < 1 / (1 + np.exp(2 - z))).astype(int)
    methods = {"ts": TemperatureScaling(), "sigmoid": CALIBRATORS["sigmoid"]()}
    assert chosen(methods, z, labels).method == "sigmoid"
    methods = {"ts": TemperatureScaling(), "sigmoid": CALIBRATORS["sigmoid"]()}
    assert chosen(methods, z, labels, keep_argmax=True).method == "ts"


def test_weights_count(rng):
    """Half of the examples need a temperature, the others do not."""
    one, other = drawn(rng, 1000, 4, 1.0), drawn(rng, 1000, 4, 3.0)
    data = [np.concatenate(part) for part in zip(one, other, strict=True)]
    for heavy, best in ((slice(1000), "none"), (slice(1000, None), "ts")):
        weight = np.full(2000, 1e-6)
        weight[heavy] = 1.0
        assert chosen(["none", "ts"], *data, sample_weight=weight).method == best


@pytest.mark.filterwarnings("ignore:.*keeps predictions", "ignore:sms, which may change")
def test_auto_has_chosen_already(rng, monkeypatch):
    monkeypatch.setattr(choosing, "_CrossValidation", None)
    data = drawn(rng, 600, 4, 2.5)
    auto = cal.Auto(candidates=["none", "ts"])
    found = chosen({"none": MADE["none"](), "auto": auto}, *data)
    assert found.method == "auto"
    assert found.advice == f"Use auto ({choosing.HOW}: {auto.reasons_.splitlines()[0]})."
    same = cal.Auto(candidates=["none"])
    found = chosen({"auto": same}, *data)
    assert found.advice.startswith("Leave the logits as they are, as auto does (")


def test_a_method_that_fails_in_a_fold_is_no_choice(rng):
    data = drawn(rng, 600, 4, 2.5)
    assert chosen({"none": MADE["none"](), "fragile": Fragile()}, *data).method == "none"
    both = {"one": Fragile(), "other": Fragile()}
    assert chosen(both, *data).method is None


def test_little_to_choose_from(rng):
    data = drawn(rng, 600, 4, 2.5)
    assert chosen({}, *data).advice == "No method could be fitted and measured."
    assert chosen(["ts"], *data).advice == "No other method was measured beside ts."
    few = chosen({"a": Shift(), "b": Shift()}, *(part[:3] for part in data))
    assert few.method is None
    assert few.advice.startswith("Too little data to choose a method: folds must be")


@pytest.mark.parametrize("shape", [(600,), (60, 10)])
def test_a_sample_of_rows_decides_about_many_examples(rng, monkeypatch, shape):
    monkeypatch.setattr(choosing, "MAX_EXAMPLES", 200)
    logits, labels = drawn(rng, 600, 4, 2.5)
    labels[::6] = IGNORED
    columns = {"logits": logits.reshape(*shape, 4), "labels": labels.reshape(shape)}
    split = as_dataset(columns).split("")
    some, again, other = (choosing._sampled(split, seed) for seed in (0, 0, 1))
    assert 180 < (some != IGNORED).sum() <= 200
    np.testing.assert_array_equal(some, again)
    assert (some != other).any()
    kept = some != IGNORED
    np.testing.assert_array_equal(some[kept], columns["labels"][kept])
    assert chosen(["none", "ts"], *columns.values()).method == "ts"
