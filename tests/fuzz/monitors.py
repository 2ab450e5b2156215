"""Monitors: sums do not depend on batches or the order of merges; edited states are refused."""

import copy
import json
import math
from typing import Any

import numpy as np

from calibrant.artifacts.objects import _json_tensor, artifact_of, restored
from calibrant.monitor import Monitor
from tests.fuzz import damage
from tests.fuzz.metrics import random_confidences


def check(rng: np.random.Generator) -> None:
    """Make a small stream; edit its state, or cut it into workers."""
    if rng.random() < 0.5:
        check_state(rng, random_monitor(rng))
    else:
        check_merge(rng)


def random_options(rng: np.random.Generator) -> dict[str, Any]:
    options: dict[str, Any] = {
        "window": int(rng.choice([1, 5, 50])),
        "bins": int(rng.choice([1, 4, 15])),
        "tolerance": float(rng.choice([0.0, 0.02, 0.3])),
        "keep": int(rng.choice([1, 3, 1000])),
        "pending": int(rng.choice([1, 4, 1000])),
    }
    if rng.random() < 0.3:
        options["reference"] = random_pairs(rng, 30)
    return options


def random_pairs(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    confidence = random_confidences(rng, n)
    return confidence, rng.random(n) < rng.choice([0.0, 0.5, 1.0, 2.0]) * confidence


def random_monitor(rng: np.random.Generator) -> Monitor:
    watch = Monitor(**random_options(rng))
    for _ in range(int(rng.integers(0, 4))):
        n = int(rng.integers(0, 20))
        watch.observe(*random_pairs(rng, n))
        ids = rng.integers(0, 9, size=n).tolist()
        watch.predicted(ids, rng.normal(size=(n, 3)))
        watch.labelled(ids[::2], rng.integers(3, size=len(ids[::2])))
    return watch


# ------------------------------------------------------------------------------------------ states


def check_state(rng: np.random.Generator, watch: Monitor) -> None:
    """A state comes back as it was; an edited one is refused, or is the state of a monitor."""
    state = json.loads(json.dumps(watch.state()))
    artifact = artifact_of(watch)
    assert artifact.tensors["state"].tolist() == _json_tensor(watch.state()).tolist()
    assert restored(artifact).state() == watch.state()
    changed = copy.deepcopy(state)
    for _ in range(int(rng.integers(1, 3))):
        changed = damage.edited(rng, changed)
    try:
        found = restored(artifact._replace(tensors={"state": _json_tensor(changed)}))
    except ValueError:
        return
    again = found.state()
    assert restored(artifact._replace(tensors={"state": _json_tensor(again)})).state() == again
    report = found.report()
    json.dumps(report.to_dict())
    assert str(report)
    if found._form() == watch._form():
        found.like().merge(watch.like())
    found.observe([0.9, 0.2], [1, 0])
    assert found.seen >= 2


# ----------------------------------------------------------------------------------------- merging


def check_merge(rng: np.random.Generator) -> None:
    """Windows that several workers saw in any order are those that one saw."""
    options = random_options(rng) | {"keep": 1000, "first": 1}
    options.pop("pending")
    whole = Monitor(**options)
    workers = [whole.like() for _ in range(int(rng.integers(1, 4)))]
    for _ in range(int(rng.integers(1, 6))):
        n, number = int(rng.integers(0, 12)), int(rng.integers(1, 5))
        confidence, outcome = random_pairs(rng, n)
        whole.observe(confidence, outcome, window=number)
        cut = int(rng.integers(0, n + 1))
        for part in (slice(0, cut), slice(cut, n)):
            worker = workers[rng.integers(len(workers))]
            worker.observe(confidence[part], outcome[part], window=number)
    merged = whole.like()
    for i in rng.permutation(len(workers)):
        merged.merge(workers[i])
    assert merged.seen == whole.seen
    for number, window in whole.windows.items():
        if window.n:
            other = merged.windows[number]
            np.testing.assert_array_equal(other.count, window.count)
            np.testing.assert_array_equal(other.right, window.right)
            np.testing.assert_allclose(other.claimed, window.claimed, rtol=1e-9, atol=1e-12)
    assert math.isclose(merged.e_value, whole.e_value, rel_tol=1e-6), (
        merged.e_value,
        whole.e_value,
    )
    check_figures(whole)


def check_figures(watch: Monitor) -> None:
    """The e-value is at least what is still at stake, and the report has the counts."""
    report = watch.report()
    assert report.n == sum(row["n"] for row in report.windows)
    last = max(watch.windows) - 1 + 1
    assert watch.e_value >= 1 / (last + 1) - 1e-12
