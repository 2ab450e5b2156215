"""Streams, merges and ranks: the figures of all examples at once, however they arrive."""

import json
import pickle
import sys
from itertools import pairwise

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

import calibrant as cal
from tests.support.simulate import drawn
from tests.support.warm_scripts import Script, run_script

LOGITS, LABELS = drawn(np.random.default_rng(3), 400, 4, 1.5)
LABELS[::11] = -100
WEIGHT = np.random.default_rng(4).exponential(size=400)
GROUPS = np.arange(400) % 3

cuts = st.lists(st.integers(0, 400), max_size=12).map(lambda places: [0, *sorted(places), 400])
"""Where the rows are cut: batches of any size, empty ones among them."""


def batches(places):
    return [slice(a, b) for a, b in pairwise(places)]


def values(found):
    return {name: estimate.value for name, estimate in found.items()}


def whole(pairs, **options):
    found = values(cal.evaluate(LOGITS, LABELS, level=None, **options))
    return {n: v for n, v in found.items() if pairs or not cal.METRICS[n].needs_pairs}


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name in expected:
        assert found[name] == pytest.approx(expected[name], abs=1e-12, rel=0, nan_ok=True), name


# Batches


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("weigh", [False, True])
@settings(max_examples=25)
@given(places=cuts)
def test_any_batches_give_the_figures_of_the_whole(pairs, weigh, places):
    stream = cal.Accumulator(pairs=pairs, level=None)
    for rows in batches(places):
        weight = WEIGHT[rows] if weigh else None
        assert stream.update(LOGITS[rows], LABELS[rows], sample_weight=weight) is stream
    expected = whole(pairs, sample_weight=WEIGHT if weigh else None)
    assert_same(values(stream.compute()), expected)


@pytest.mark.parametrize("pairs", [False, True])
@settings(max_examples=25)
@given(places=cuts, random=st.randoms(use_true_random=False))
def test_merges_in_any_order_give_the_figures_of_the_whole(pairs, places, random):
    empty = cal.Accumulator(pairs=pairs, level=None)
    parts = [empty.like().update(LOGITS[r], LABELS[r]) for r in batches(places)]
    parts.append(empty.like())  # one that has seen nothing
    while len(parts) > 1:  # any tree of merges
        random.shuffle(parts)
        other = parts.pop()
        assert parts[0].merge(other) is parts[0]
    assert_same(values(parts[0].compute()), whole(pairs))
    assert parts[0].compute().n == (LABELS != -100).sum()


def test_a_merge_leaves_the_other_as_it_was():
    one = cal.Accumulator(pairs=True, level=None).update(LOGITS[:100], LABELS[:100])
    two = cal.Accumulator(pairs=True, level=None).update(
        LOGITS[100:], LABELS[100:], by=GROUPS[100:]
    )
    before = two.compute().to_dict()
    one.merge(two).update(LOGITS[:50], LABELS[:50], by=GROUPS[:50])
    assert two.compute().to_dict() == before


def test_a_result_may_be_taken_at_any_time():
    stream = cal.Accumulator(pairs=True, level=None)
    for stop in (100, 250, 400):
        stream.update(LOGITS[stop - 100 : stop], LABELS[stop - 100 : stop])
        assert stream.compute().n > 0
        assert values(stream.compute()) == values(stream.compute())
    once = cal.Accumulator(pairs=True, level=None)
    for stop in (100, 250, 400):
        once.update(LOGITS[stop - 100 : stop], LABELS[stop - 100 : stop])
    assert values(once.compute()) == values(stream.compute())


def test_batches_with_and_without_weights_mix():
    """No weight is a weight of one."""
    stream = cal.Accumulator(pairs=True, level=None)
    stream.update(LOGITS[:200], LABELS[:200]).update(
        LOGITS[200:], LABELS[200:], sample_weight=WEIGHT[200:]
    )
    weight = np.concatenate([np.ones(200), WEIGHT[200:]])
    assert_same(values(stream.compute()), whole(True, sample_weight=weight))


def test_groups_of_a_stream_are_the_groups_of_the_whole():
    stream = cal.Accumulator(pairs=True, level=None)
    for rows in batches([0, 1, 2, 150, 400]):
        stream.update(LOGITS[rows], LABELS[rows], by=GROUPS[rows], sample_weight=WEIGHT[rows])
    found = stream.compute()
    assert set(found.by) == {"0", "1", "2"}
    for name, part in found.by.items():
        rows = int(name) == GROUPS
        expected = cal.evaluate(LOGITS[rows], LABELS[rows], sample_weight=WEIGHT[rows], level=None)
        assert_same(values(part), values(expected))


@pytest.mark.parametrize("estimand", ["binary", "multilabel"])
def test_other_estimands_stream_as_well(rng, estimand):
    logits = rng.normal(size=(90, 2))
    labels = rng.integers(0, 2, 90 if estimand == "binary" else (90, 2))
    stream = cal.Accumulator(pairs=True, level=None, estimand=estimand)
    for rows in batches([0, 10, 55, 90]):
        stream.update(logits[rows], labels[rows])
    expected = cal.evaluate(logits, labels, estimand=estimand, level=None)
    assert_same(values(stream.compute()), values(expected))
    assert stream.compute().classes == expected.classes == 2


def test_intervals_of_a_stream_are_those_of_the_whole():
    stream = cal.Accumulator(pairs=True)
    for rows in batches([0, 33, 200, 400]):
        stream.update(LOGITS[rows], LABELS[rows])
    found, expected = stream.compute(), cal.evaluate(LOGITS, LABELS)
    for name in expected:
        close = 1e-9 if name == "classwise_ece" else 1e-3
        np.testing.assert_allclose(found[name], expected[name], atol=close, err_msg=name)
    assert found.test is not None
    assert expected.test is not None
    assert found.test.p_value == pytest.approx(expected.test.p_value, abs=0.01)


@pytest.mark.parametrize("weigh", [False, True])
@pytest.mark.parametrize("classes", [2, 4, 30])
def test_the_class_wise_interval_does_not_depend_on_batches(rng, classes, weigh):
    """Nor on the order of the examples, nor on merging; rounded claims fall on edges of bins."""
    n = 300
    logits, labels = drawn(rng, n, classes, 1.5)
    softmax = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    probs = (1 + rng.multinomial(60 - classes, softmax)) / 60
    weight = rng.exponential(size=n) if weigh else None

    def stream(*parts):
        seen = cal.Accumulator(metrics=["classwise_ece"])
        for rows in parts:
            part = None if weight is None else weight[rows]
            seen.update(probs=probs[rows], labels=labels[rows], sample_weight=part)
        return seen

    expected = stream(np.arange(n)).compute()["classwise_ece"]
    others = [
        stream(*np.arange(n)[:, None]),
        stream(rng.permutation(n)),
        stream(np.arange(100, n)).merge(stream(np.arange(100))),
    ]
    for other in others:
        np.testing.assert_allclose(other.compute()["classwise_ece"], expected, atol=1e-9)


def test_threads_change_no_class_wise_interval(rng):
    data = drawn(rng, 75_000, 30, 1.5)  # enough numbers to be shared out among threads
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cal.Accumulator(metrics=["classwise_ece"]).update(*data).compute())
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        np.testing.assert_allclose(
            other["classwise_ece"], found[0]["classwise_ece"], rtol=1e-9, atol=1e-12
        )


def test_a_stream_of_probabilities_in_the_place_of_logits_warns_once(rng):
    probs, labels = rng.dirichlet(np.ones(3), 40), rng.integers(3, size=40)
    stream = cal.Accumulator(level=None)
    by = np.arange(20) % 2
    with pytest.warns(UserWarning, match=r"logits look like prob.* pass them as probs=") as told:
        stream.update(probs[:20], labels[:20], by=by)
    stream.update(probs[20:], labels[20:], by=by)  # warnings are errors in tests
    assert [warning.filename for warning in told] == [__file__]
    assert stream.compute().n == 40
    cal.Accumulator().update(probs=probs, labels=labels)
    cal.Accumulator(estimand="multilabel").update(probs, rng.integers(2, size=(40, 3)))


def test_like_makes_an_empty_one_of_the_same_form():
    one = cal.Accumulator(
        bins=7, estimand="binary", pairs=True, metrics=["ks", "ece"], level=0.5, seed=3
    ).update(np.zeros(5), [0, 1, 0, 1, 1])
    other = one.like()
    with pytest.raises(ValueError, match="nothing to measure"):
        other.compute()
    found = other.update(np.zeros(5), [0, 1, 0, 1, 1]).compute()
    assert found.to_dict() == one.compute().to_dict()
    assert list(found) == ["ks", "ece"]
    assert found.bins.count.size == 7
    assert other.seed == 3


def test_a_stream_beyond_the_integers_of_float32_gives_the_error_of_its_start():
    """Every figure of an accumulator merged with itself 30 times is that of the first batch."""
    probs = np.array([[0.7, 0.3], [0.9, 0.1]])[np.arange(1000) % 2]
    labels = np.where(np.arange(1000) // 2 % 10 < np.array([5, 7])[np.arange(1000) % 2], 0, 1)
    stream = cal.Accumulator(level=None).update(np.log(probs), labels)
    start = {name: found.value for name, found in stream.compute().items()}
    assert start["ece"] == pytest.approx(0.2, abs=1e-12)
    for _ in range(30):
        other = stream.like().merge(stream)
        stream.merge(other)
    found = stream.compute()
    assert found.n == 1000 * 2**30
    for name, value in start.items():
        assert found[name].value == pytest.approx(value, abs=1e-12), name


# Memory


def test_classwise_errors_of_too_many_classes_are_left_out(monkeypatch):
    monkeypatch.setattr("calibrant.metrics.accumulator.MOST_CELLS", 4 * 15 - 1)
    stream = cal.Accumulator(level=None).update(LOGITS, LABELS)
    with pytest.warns(UserWarning, match=r"^classwise_ece is left out: 4 classes are too many"):
        found = stream.compute()
    assert np.isnan(found["classwise_ece"].value)
    others = cal.Accumulator(level=None, metrics=["ece", "nll"]).update(LOGITS, LABELS)
    assert dict(others.compute()) == {name: found[name] for name in ("ece", "nll")}  # quietly
    monkeypatch.setattr("calibrant.metrics.classwise.MOST_CELLS", 4 * 15)
    assert cal.classwise_ece(LOGITS, LABELS) > 0  # just few enough


def held(stream):
    return len(pickle.dumps(stream))


def test_without_pairs_a_stream_holds_the_same_after_any_number_of_examples():
    stream = cal.Accumulator(level=None).update(LOGITS, LABELS)
    before = held(stream)
    for _ in range(20):
        stream.update(LOGITS, LABELS)
    assert held(stream) == before


@pytest.mark.parametrize(("weight", "size"), [(None, 9), (WEIGHT, 17)])
def test_with_pairs_a_stream_holds_the_bytes_it_says_per_example(weight, size):
    stream = cal.Accumulator(pairs=True, level=None).update(LOGITS, LABELS, sample_weight=weight)
    before = held(stream)
    for _ in range(10):
        stream.update(LOGITS, LABELS, sample_weight=weight)
    labelled = 10 * (LABELS != -100).sum()
    assert (held(stream) - before) / labelled == pytest.approx(size, rel=0.1)


MANY = """
import ctypes, resource, sys
import numpy as np
import calibrant as cal

M_MMAP_THRESHOLD = -3  # of malloc.h: what is freed goes back at once
ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 16)
batch = 500_000
odds = np.full(batch, np.log(9.0))  # each claims 0.9, and 7 of 10 are right
labels = (np.arange(batch) % 10 < 7).astype(np.int64)
stream = cal.Accumulator(metrics=["ece", "accuracy", "nll"], level=0.9, estimand=sys.argv[1])
peak = []
for turn in range(10):
    stream.update(odds, labels)
    peak.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
found = stream.compute()
growth = (peak[-1] - peak[1]) * 1024
print(found.n, repr(found["ece"].value), repr(found["accuracy"].value), growth)
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="ru_maxrss is in KiB on Linux")
@pytest.mark.parametrize("estimand", ["binary"])
def test_five_million_examples_give_the_exact_error_in_flat_memory(estimand):
    done = run_script(MANY, estimand)
    assert done.returncode == 0, done.stderr
    n, ece, accuracy, growth = done.stdout.split()
    assert int(n) == 5_000_000
    assert float(ece) == pytest.approx(0.2, abs=1e-9)
    assert float(accuracy) == pytest.approx(0.7, abs=1e-12)
    assert int(growth) < 4e6  # the pairs of eight batches are 36 MB


# Ranks

RANK = """
import json, pickle, sys
import numpy as np
import torch.distributed as dist
import calibrant as cal

folder, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
with np.load(f"{folder}/data.npz") as data:
    logits, labels, weight, groups = (data[k] for k in ("logits", "labels", "weight", "groups"))
mine = slice(0, 130) if rank == 0 else slice(130, 400)
found = {}

def finish(name, stream):
    again = stream.all_reduce()
    assert again is stream
    found[name] = stream.compute().to_dict()
    found[name]["counted"] = int(stream.bins.count.sum())

stream = cal.Accumulator(level=None)
for rows in np.array_split(np.arange(400)[mine], 3):
    stream.update(logits[rows], labels[rows])
finish("sums", stream)

stream = cal.Accumulator(pairs=True).update(logits[mine], labels[mine])
finish("pairs", stream)

gathered = []
gather = dist.all_gather_object

def counting(ranks, mine, *rest):
    gathered.append(len(pickle.dumps(mine)))
    return gather(ranks, mine, *rest)

dist.all_gather_object = counting
many = np.tile(logits[mine], 50)
finish("many classes", cal.Accumulator().update(many, labels[mine]))
found["gathered bytes"] = sum(gathered)
dist.all_gather_object = gather

stream = cal.Accumulator(pairs=True, level=None)
finish("everything", stream.update(
    logits[mine], labels[mine], sample_weight=weight[mine], by=groups[mine]))

for idle in (0, 1):
    stream = cal.Accumulator(pairs=True, level=None)
    if rank != idle:
        stream.update(logits, labels, by=groups)
    finish(f"rank {idle} idle", stream)

stream = cal.Accumulator(metrics=["ece"], level=None)
finish("no class-wise sums", stream.update(logits[mine], labels[mine]))

stream = cal.Accumulator(level=None).update(logits[mine, : 3 + rank] * 0, labels[mine] * 0)
try:
    stream.all_reduce()
except ValueError as problem:
    found["different classes"] = str(problem)

stream = cal.Accumulator(level=None, bins=10 + rank).update(logits[mine], labels[mine])
try:
    stream.all_reduce()
except ValueError as problem:
    found["different form"] = str(problem)

with open(f"{folder}/{rank}.json", "w") as out:
    json.dump(found, out)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Results of two gloo processes that saw a part of the rows each."""
    folder = tmp_path_factory.mktemp("ranks")
    np.savez(folder / "data.npz", logits=LOGITS, labels=LABELS, weight=WEIGHT, groups=GROUPS)
    running = [Script(RANK, folder, rank) for rank in "01"]
    for done in [script.result() for script in running]:
        assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in (0, 1)]


def figures(found):
    return {name: e["value"] for name, e in found["metrics"].items()}


@pytest.mark.slow
def test_every_rank_has_the_same_result(ranks):
    one, two = (
        {k: v for k, v in found.items() if not k.startswith("different")} for found in ranks
    )
    assert one == two


@pytest.mark.slow
def test_ranks_add_up_to_the_whole(ranks):
    found = ranks[0]["sums"]
    assert found["n"] == found["counted"] == (LABELS != -100).sum()
    assert_same(figures(found), whole(False))


@pytest.mark.slow
def test_pairs_of_ranks_are_the_pairs_of_the_whole(ranks):
    found, expected = ranks[1]["pairs"], cal.evaluate(LOGITS, LABELS)
    assert_same(figures(found), values(expected))
    assert expected.test is not None
    assert found["test"]["p_value"] == pytest.approx(expected.test.p_value, abs=0.01)
    for name, estimate in expected.items():
        close = 1e-9 if name == "classwise_ece" else 1e-3
        ends = found["metrics"][name]
        assert ends["low"] == pytest.approx(estimate.low, abs=close), name
        assert ends["high"] == pytest.approx(estimate.high, abs=close), name


@pytest.mark.slow
def test_weights_and_groups_of_ranks_are_those_of_the_whole(ranks):
    found = ranks[0]["everything"]
    expected = cal.evaluate(LOGITS, LABELS, sample_weight=WEIGHT, by=GROUPS, level=None)
    assert_same(figures(found), values(expected))
    assert list(found["by"]) == list(expected.by)
    for name, part in expected.by.items():
        assert found["by"][name]["n"] == part.n
        assert_same(figures(found["by"][name]), values(part))


@pytest.mark.slow
@pytest.mark.parametrize("idle", [0, 1])
def test_a_rank_without_data_changes_nothing(ranks, idle):
    found = ranks[0][f"rank {idle} idle"]
    expected = cal.evaluate(LOGITS, LABELS, by=GROUPS, level=None)
    assert (found["n"], found["classes"]) == (expected.n, 4)
    assert_same(figures(found), values(expected))
    for name, part in expected.by.items():
        assert_same(figures(found["by"][name]), values(part))


@pytest.mark.slow
def test_ranks_without_class_wise_sums_add_up(ranks):
    assert_same(figures(ranks[0]["no class-wise sums"]), {"ece": whole(False)["ece"]})


@pytest.mark.slow
def test_sums_of_ranks_are_added_not_gathered(ranks):
    expected = cal.evaluate(np.tile(LOGITS, 50), LABELS, level=None)
    found = figures(ranks[0]["many classes"])
    assert_same(found, {name: values(expected)[name] for name in found})
    # the sums of 200 classes, with those of their intervals, are 2.4 MB
    assert all(found["gathered bytes"] < 10_000 for found in ranks)


@pytest.mark.slow
def test_ranks_of_different_classes_all_say_so(ranks):
    for found in ranks:
        assert "every batch must have the same classes" in found["different classes"]


@pytest.mark.slow
def test_ranks_of_different_form_all_say_so(ranks):
    for found in ranks:
        assert "must have the same form" in found["different form"]


def test_pairs_are_kept_in_the_order_of_arrival(rng):
    logits, labels = rng.normal(size=(30, 3)), rng.integers(0, 3, 30)
    stream = cal.Accumulator(pairs=True, metrics=["accuracy"], level=None)
    for rows in (slice(0, 10), slice(10, 30)):
        stream.update(logits[rows], labels[rows])
    confidence, outcome, weight = stream.kept_pairs()
    expected = cal.top_label(logits, labels)
    np.testing.assert_array_equal(confidence, expected.confidence)
    np.testing.assert_array_equal(outcome, expected.outcome)
    assert weight is None
    with pytest.raises(ValueError, match="pairs=True"):
        cal.Accumulator().kept_pairs()
