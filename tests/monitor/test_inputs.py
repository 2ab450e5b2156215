"""Labels that come after their predictions."""

import numpy as np
import torch

from calibrant.monitor import Monitor
from tests.support.simulate import drawn
from tests.support.streams import same


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
