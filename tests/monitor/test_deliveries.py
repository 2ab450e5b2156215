"""Keys of examples, the same in whatever form they come, and labels after their predictions."""

import numpy as np
import pytest
import torch

from calibrant.monitor import Monitor
from calibrant.monitor.deliveries import _id_keys, _KeyedExamples, _score_keys
from tests.support.simulate import drawn
from tests.support.streams import same


def test_keys_of_scores_do_not_depend_on_their_form(rng):
    logits = rng.normal(size=(500, 7)).astype(np.float32)
    keys = _score_keys(logits)
    for form in (logits.astype(np.float64), torch.from_numpy(logits), logits.reshape(50, 10, 7)):
        np.testing.assert_array_equal(_score_keys(form), keys)
    order = rng.permutation(500)
    np.testing.assert_array_equal(_score_keys(logits[order]), keys[order])
    np.testing.assert_array_equal(_score_keys(logits[:, 0]), _score_keys(logits[:, :1]))
    np.testing.assert_array_equal(_score_keys(np.array([0.0])), _score_keys(np.array([-0.0])))
    masked = np.where(logits > 1, -np.inf, logits)
    assert len(np.unique(_score_keys(masked))) == 500


def test_other_scores_have_other_keys(rng):
    """Of n different rows, about n^2 / 2^33 pairs share 32 bits by chance."""
    n = 100_000
    for columns in (1, 2, 10):
        logits = rng.normal(size=(n, columns))
        logits[: n // 2] = logits[n // 2 :]
        logits[: n // 2, -1] += 1e-6  # more than the precision of single floats around 1
        different = len(np.unique(logits.astype(np.float32), axis=0))
        assert different - len(np.unique(_score_keys(logits) >> np.uint64(32))) < 12
    assert _score_keys(np.array([[1.0, 2.0]])) != _score_keys(np.array([[2.0, 1.0]]))


@pytest.mark.parametrize("columns", [1, 2, 10, 1000])
def test_half_precision_is_compared_with_single(rng, columns):
    logits = 5 * rng.normal(size=(400, columns))
    stored = _KeyedExamples("logits", _score_keys(logits.astype(np.float16)), np.zeros(400, int))
    full = _KeyedExamples("logits", _score_keys(logits.astype(np.float32)), np.zeros(400, int))
    assert len(stored.half) == 400
    assert len(stored.single) == 0
    assert len(full.half) < 4  # only numbers that need no rounding
    # rounded to single and then to half precision, some numbers differ
    assert (stored.half.keys == score_keys_in_half(logits)).mean() > 0.97


def score_keys_in_half(logits):
    """Keys of the same scores delivered in single precision, as they are compared with halves."""
    examples = _KeyedExamples("logits", _score_keys(logits), np.zeros(len(logits), int))
    keys = np.zeros(len(logits), np.uint64)
    for view in (examples.single, examples.half):
        keys[view.places] = view.keys
    return keys


def test_keys_of_ids():
    keys = _id_keys(["a", "b", 7], (3,))
    assert len(set(keys.tolist())) == 3
    np.testing.assert_array_equal(_id_keys(np.array(["b", "7"]), (2,)), keys[1:])
    tokens = _id_keys(["a", "b"], (2, 5))
    assert len(set(tokens.tolist())) == 10
    np.testing.assert_array_equal(tokens[::5], keys[:2])
    with pytest.raises(ValueError, match=r"one id per row is wanted, got 2 for labels of shape"):
        _id_keys(["a", "b"], (3,))
    with pytest.raises(TypeError, match="whole numbers or text"):
        _id_keys([1.5], (1,))  # type: ignore[list-item]


def test_late_labels_equal_known_labels(rng):
    logits, labels = drawn(rng, 700, 5, 2.0)
    at_hand = Monitor(window=100).update(logits, labels)
    late = Monitor(window=100)
    for start in range(0, 700, 70):
        late.predicted(np.arange(start, start + 70), logits[start : start + 70])
    for start in range(0, 700, 35):
        ids = torch.arange(start, start + 35)
        assert late.labelled(ids, torch.from_numpy(labels[start : start + 35])) == 35
    assert same(at_hand, late)
    assert late.report().counts["pending"] == 0


def test_one_logit(rng):
    logits = rng.normal(size=300)
    labels = rng.integers(2, size=300)
    watch = Monitor()
    watch.predicted(range(300), logits)
    watch.labelled(range(300), labels)
    assert same(watch, Monitor().update(logits, labels))


def test_unmatched_ids_are_counted():
    watch = Monitor(pending=3)
    logits = [[2.0, 0.0], [0.0, 2.0]]
    watch.predicted(["a", "b"], logits)
    watch.predicted(["b", 3], logits)  # b again: class 0 now
    watch.predicted(["c", "d"], logits)  # a and then b are dropped
    assert watch.labelled(["a", "zzz", 3], [0, 0, 1]) == 1
    assert watch.labelled([3, "c"], [1, -100]) == 0
    found = watch.report()
    counted = {"pending": 1, "dropped": 2, "repeated": 1, "unknown": 3, "ignored": 1}
    assert {key: number for key, number in found.counts.items() if number} == counted
    assert found.n == 1
    told = "\n".join(found.remarks())
    for words in ("label came (pending sets how many may wait): 2", "is not waiting: 3"):
        assert words in told


def test_last_of_repeated_predictions_counts():
    watch = Monitor()
    watch.predicted(["a", "a"], [[2.0, 0.0], [0.0, 4.0]])
    watch.labelled(["a"], [1])
    assert same(watch, Monitor().update([[0.0, 4.0]], [1]))
    assert watch.report().counts["repeated"] == 1


def test_oldest_predictions_are_dropped():
    watch = Monitor(pending=10)
    watch.predicted(range(25), np.tile([2.0, 0.0, 0.0], (25, 1)))
    assert watch.report().counts["pending"] == 10
    assert watch.report().counts["dropped"] == 15
    assert watch.labelled(range(25), np.zeros(25, int)) == 10
