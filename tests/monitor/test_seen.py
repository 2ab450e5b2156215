"""An example counts once, however often and in whatever form it is delivered."""

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant.data import save_predictions
from calibrant.monitor import Monitor
from calibrant.monitor.deliveries import _KeyedExamples
from calibrant.monitor.seen import _matched, _WindowOverlap
from tests.support.simulate import drawn
from tests.support.streams import same

DAYS, RUNS = 5, 4

FORMS = {
    "as it was": lambda rng, labels: [np.arange(len(labels))],
    "permuted": lambda rng, labels: [rng.permutation(len(labels))],
    "shards": lambda rng, labels: np.array_split(rng.permutation(len(labels)), 3),
    "labelled only": lambda rng, labels: [np.flatnonzero(labels >= 0)],
}
"""Places of the examples in each file of a run."""


def late_runs(rng, labels):
    """The labels as they are known in each run: each comes in any of the runs."""
    comes = rng.integers(RUNS, size=len(labels))
    return [np.where(comes <= run, labels, -100) for run in range(RUNS)]


def deliver(watch, rng, form, logits, labels, *, dtypes=(np.float32,), ids=None, window=None):
    """Deliver the examples of a day in several runs, each with the labels that are known."""
    for known in late_runs(rng, labels):
        for at in FORMS[form](rng, known):
            part, names = logits[at].astype(rng.choice(dtypes)), None if ids is None else ids[at]
            watch.update(part, known[at], ids=names, window=window)


def days(rng, n=200, classes=5):
    for day in range(DAYS):
        logits, labels = drawn(rng, n, max(2, classes))
        yield day, (logits[:, 1] if classes == 1 else logits).astype(np.float32), labels


# ------------------------------------------------------------------------------- labels that come


@pytest.mark.filterwarnings("ignore:.*is in the stream already")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("classes", [1, 2, 10])
def test_labels_count_once_in_the_window_of_their_example(rng, form, classes):
    watch, wanted = Monitor(), Monitor()
    for day, logits, labels in days(rng, classes=classes):
        deliver(watch, rng, form, logits, labels, window=day)
        wanted.update(logits, labels, window=day)
    assert same(watch, wanted)
    assert watch.report().counts["ignored"] == 0


@pytest.mark.filterwarnings("ignore:.*is in the stream already")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("classes", [1, 2, 10, 1000])
def test_labels_count_once_in_every_precision(rng, form, classes):
    watch, wanted = Monitor(), Monitor()
    for day, logits, labels in days(rng, classes=classes):
        dtypes = (np.float16, np.float32, np.float64)
        deliver(watch, rng, form, logits, labels, dtypes=dtypes, window=day)
        wanted.update(logits, labels, window=day)
    for key in ("count", "right"):
        found, expected = (
            [getattr(window, key).sum() for window in each.windows.values()]
            for each in (watch, wanted)
        )
        np.testing.assert_allclose(found, expected, atol=2)  # in half precision there are ties


@pytest.mark.filterwarnings("ignore:.*is in the stream already")
@pytest.mark.parametrize("form", FORMS)
def test_examples_with_ids_count_once_whatever_their_scores(rng, form):
    """A model with three outputs: nothing but ids tells its examples apart."""
    watch, wanted = Monitor(), Monitor()
    for day in range(DAYS):
        logits, labels = three_outputs(rng, 200)
        names = np.array([f"{day}-{i}" for i in range(200)])
        deliver(watch, rng, form, logits, labels, ids=names, window=day)
        wanted.observe(*cal.metrics.positive_class(logits, labels), window=day)
    assert same(watch, wanted)


def three_outputs(rng, n):
    logits = np.array([[1.5, 0.0], [0.0, 0.5], [0.0, 2.5]])[rng.integers(3, size=n)]
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


def several_outputs(rng, n, outputs):
    """Log-odds of a model with a number of different outputs, and labels."""
    logits = np.linspace(-3, 3, outputs, dtype=np.float32)[rng.integers(outputs, size=n)]
    return logits, (rng.random(n) < 1 / (1 + np.exp(-logits))).astype(int)


@pytest.mark.parametrize("outputs", [2, 12, 100, 1000])
def test_equal_scores_of_other_examples_count(rng, outputs):
    """Whole deliveries are recognised even where scores recur, and new ones are not left out."""
    watch, wanted = Monitor(), Monitor()
    for day in range(30):
        n = 150 + day  # other sizes: with two outputs, equal ones would be equal by chance
        logits, labels = several_outputs(rng, n, outputs)
        deliver(watch, rng, "permuted", logits, labels, window=day)
        wanted.observe(*cal.metrics.positive_class(logits, labels), window=day)
    assert same(watch, wanted)
    assert watch.report().counts["alike"] > 0


@pytest.mark.parametrize("n", [10, 100, 1000])
def test_files_of_the_last_week(rng, n):
    week, wanted = Monitor(), Monitor()
    logits, labels = drawn(rng, 12 * n, 4)
    for day in range(12):
        part, today = slice(max(0, day - 6) * n, (day + 1) * n), slice(day * n, (day + 1) * n)
        week.update(logits[part], labels[part], window=day)
        wanted.update(logits[today], labels[today], window=day)
    assert same(week, wanted)


def test_labels_of_many_days_that_come_in_one_delivery(rng):
    """Predictions come at once, and every night the labels that came since, a few of each day."""
    watch, wanted = Monitor(first=0), Monitor(first=0)
    batches = [drawn(rng, 200, 4) for _ in range(20)]
    comes = [rng.permutation(200) * 20 // 200 for _ in batches]  # ten every night
    for night in range(40):
        if night < 20:
            watch.update(batches[night][0], np.full(200, -100), window=night)
        parts = [(*batches[k], comes[k] == night - k) for k in range(20)]
        logits, labels = (np.concatenate([part[i][part[2]] for part in parts]) for i in (0, 1))
        if len(labels):
            watch.update(logits, labels, window=night)
    for day, (logits, labels) in enumerate(batches):
        wanted.update(logits, labels, window=day)
        with pytest.warns(UserWarning, match="is in the stream already"):
            watch.update(logits, labels, window=day)
    assert same(watch, wanted)


def test_single_deliveries_of_equal_scores_count(rng):
    """Were they left out, no scores would recur among those that were seen, and so on."""
    watch = Monitor(window=500)
    logits, labels = several_outputs(rng, 1000, 1000)
    for at in range(1000):
        watch.update(logits[at : at + 1], labels[at : at + 1])
    assert watch.seen == 1000


def test_a_batch_that_is_tried_again(rng):
    logits, labels = drawn(rng, 5000, 4)
    watch = Monitor(window=1000).update(logits, labels)
    for at in (slice(700, 720), slice(990, 995), slice(1000, 5000, 7)):
        with pytest.warns(UserWarning, match="this batch is in the stream already"):
            watch.update(logits[at], labels[at])
    assert watch.seen == 5000


def test_more_examples_among_those_that_were_delivered(rng):
    """Nearly all scores recur within a delivery, and the delivery comes again with ten others."""
    watch = Monitor()
    for day in range(5):
        logits, labels = several_outputs(rng, 1010, 400)
        watch.update(logits[:1000], labels[:1000], window=day)
        order = rng.permutation(1010)
        watch.update(logits[order], labels[order], window=day)
    assert watch.seen == 5 * 1010


def test_of_equal_scores_as_many_count_as_there_are_labels(rng):
    """Labels may be corrected, or withdrawn; the slow definition counts them for each score."""
    for _ in range(50):
        keys = rng.integers(5, size=30).astype(np.uint64)
        before, after = (rng.integers(-1, 3, size=30) for _ in range(2))
        before[before < 0], after[after < 0] = -100, -100
        order = rng.permutation(30)
        here, there = _matched(keys[order], after[order], keys, before)
        assert sorted(here) == sorted(there) == list(range(30))
        np.testing.assert_array_equal(keys[order][here], keys[there])
        late = (after[order][here] >= 0) & (before[there] < 0)
        for key in range(5):
            labelled, counted = ((x[keys == key] >= 0).sum() for x in (after, before))
            assert late[keys[there] == key].sum() == max(0, labelled - counted)


def test_another_label_of_an_example_that_counted_is_left_out(rng):
    logits, labels = drawn(rng, 60, 3)
    watch = Monitor().update(logits, labels)
    before = watch.e_value
    with pytest.warns(UserWarning, match="is in the stream already"):
        watch.update(logits, (labels + 1) % 3)
    assert (watch.seen, watch.e_value, watch.report().counts["again"]) == (60, before, 60)


def test_labels_of_ids_count_once_through_every_door(rng):
    logits, labels = drawn(rng, 40, 3)
    watch = Monitor()
    for _ in range(2):
        watch.predicted(range(40), logits)
        watch.labelled(range(20), labels[:20])
    assert (watch.seen, watch.report().counts["again"]) == (20, 20)
    assert watch.labelled([3], labels[3:4]) == 0
    watch.update(logits, labels, ids=range(40))
    assert watch.seen == 40
    assert watch.labelled([30], labels[30:31]) == 0
    confidence, outcome = cal.top_label(logits, labels)
    watch.observe(confidence, outcome, ids=range(40))
    assert watch.seen == 40
    assert watch.observe(confidence, outcome, ids=range(40, 80)).seen == 80


# ------------------------------------------------------------------------------------ by chance


@pytest.mark.parametrize("outputs", [30, 300, 3000, 30_000])
@pytest.mark.parametrize("size", [50, 200, 1000])
def test_independent_deliveries_are_rarely_taken_for_the_same(rng, outputs, size):
    """The share of pairs that are linked by mistake is at most the doubt, also after a drift."""
    doubt, pairs = 0.05, 200
    chances = rng.dirichlet(np.full(outputs, 0.5), size=2)  # of two days
    hits = 0
    for _ in range(pairs):
        one, other = (
            _KeyedExamples(
                "logits", rng.choice(outputs, n, p=p).astype(np.uint64) << 32, np.zeros(n, int)
            )
            for n, p in zip((200, size), chances, strict=True)
        )
        hits += _WindowOverlap(1, one.exact, other.exact).is_link(doubt)
    assert hits <= doubt * pairs + 3 * np.sqrt(doubt * pairs)


@pytest.mark.filterwarnings("ignore:.*is in the stream already")
def test_false_alarms_of_labels_that_arrive_in_many_runs(rng):
    """Counted in each run, nine of ten of these streams have an alarm."""
    alarms, streams = 0, 25
    for _ in range(streams):
        watch = Monitor(tolerance=0.0)
        for day in range(20):
            logits, labels = drawn(rng, 100, 5)
            deliver(watch, rng, "permuted", logits, labels, window=day)
        assert watch.seen == 2000
        alarms += watch.alarm is not None
    assert alarms <= 5  # of 25 at 5 %: more have a probability of 0.1 %


@pytest.mark.filterwarnings("ignore:.*is in the stream already")
def test_a_drift_is_found_as_soon_with_labels_that_come_late(rng):
    late, at_once = Monitor(), Monitor()
    for day in range(20):
        logits, labels = drawn(rng, 200, 5, 1.0 if day < 10 else 2.5)
        logits = logits.astype(np.float32)
        deliver(late, rng, "shards", logits, labels, window=day)
        at_once.update(logits, labels, window=day)
    assert at_once.alarm is not None
    assert late.alarm is not None
    assert late.alarm.window == at_once.alarm.window
    assert same(late, at_once)


# ----------------------------------------------------------------------------- states and limits


def test_a_saved_state_recognises_examples(rng, tmp_path):
    logits, labels = drawn(rng, 300, 4)
    half = np.where(np.arange(300) < 150, labels, -100)
    cal.save(Monitor().update(logits, half), tmp_path / "state.json")
    watch = cal.load(tmp_path / "state.json").update(logits[::-1], labels[::-1])
    assert same(watch, Monitor().update(logits, labels))
    assert watch.report().counts == {**Monitor().report().counts, "late": 150, "again": 150}


def test_workers_with_the_same_examples_are_refused(rng):
    logits, labels = drawn(rng, 300, 4)
    unlabelled, half = np.full(300, -100), np.where(np.arange(300) < 150, labels, -100)
    one = Monitor(first=1).update(logits, unlabelled, window=1)
    two = one.like().update(logits, half, window=1)
    total = one.like().merge(one).merge(two)
    assert total.seen == 150
    before = total.state()
    with pytest.raises(ValueError, match="150 examples are in both monitors"):
        total.merge(two)
    assert total.state() == before
    assert same(total.update(logits, labels), Monitor(first=1).update(logits, labels, window=1))


def test_the_oldest_windows_are_forgotten(rng):
    logits, labels = drawn(rng, 1000, 4)
    watch = Monitor(window=100, remember=300).update(logits, labels)
    with pytest.warns(UserWarning, match="is in the stream already"):
        watch.update(logits[700:], labels[700:])
    assert watch.seen == 1000
    assert watch.update(logits[:100], labels[:100]).seen == 1100  # not known any more
    small = Monitor(remember=1).update(logits, labels)
    with pytest.warns(UserWarning, match="is in the stream already"):
        small.update(logits, labels, window=2)  # the last window is never forgotten
    assert small.seen == 1000


def test_labels_of_a_window_that_was_summed_up_are_lost(rng):
    watch = Monitor(keep=2)
    batches = [drawn(rng, 50, 3) for _ in range(5)]
    for day, (logits, labels) in enumerate(batches):
        watch.update(logits, np.where(np.arange(50) < 20, labels, -100), window=day)
    for logits, labels in batches:
        watch.update(logits, labels)
    assert watch.seen == 5 * 20 + 2 * 30
    counts = watch.report().counts
    assert (counts["lost"], counts["late"], counts["ignored"]) == (90, 60, 0)
    with pytest.warns(UserWarning, match="is in the stream already"):  # for good
        watch.update(*batches[0])


def test_scores_of_another_kind_are_refused(rng):
    logits, labels = drawn(rng, 50, 3)
    watch = Monitor().update(logits, labels)
    before = watch.state()
    with pytest.raises(ValueError, match="by their logits, got probs: pass logits again, or begin"):
        watch.update(probs=torch.softmax(torch.from_numpy(logits), -1), labels=labels)
    with pytest.raises(ValueError, match="by their logits, got ids"):
        watch.predicted(["a"], logits[:1])
    with pytest.raises(ValueError, match="by their logits, got ids"):
        watch.merge(watch.like().update(logits, labels, ids=range(50)))
    assert watch.state() == before
    assert watch.observe([0.5], [1]).seen == 51  # pairs are not recognised anyway


# ------------------------------------------------------------------------------------------ files


def save_day(path, logits, labels, **columns):
    save_predictions(path, {"logits": logits, "labels": labels, **columns})
    return path


def test_a_file_that_is_filled_in(rng, tmp_path):
    logits, labels = drawn(rng, 90, 4)
    half = np.where(np.arange(90) < 40, labels, -100)
    watch = Monitor().update_file(save_day(tmp_path / "a.npz", logits, half))
    watch.update_file(save_day(tmp_path / "b.npz", *drawn(rng, 30, 4)))
    order = rng.permutation(90)
    watch.update_file(save_day(tmp_path / "c.npz", logits[order], labels[order]))
    names = [(row["window"], row["n"]) for row in watch.report().windows]
    assert names == [(str(tmp_path / "a.npz"), 90), (str(tmp_path / "b.npz"), 30)]
    assert "labels that came later and joined their examples: 50" in watch.report().remarks()


def test_shards_of_a_file_and_files_of_probs(rng, tmp_path):
    logits, labels = drawn(rng, 90, 4)
    probs = torch.softmax(torch.from_numpy(logits), -1).numpy()
    columns = [
        {"probs": probs[part].astype(dtype), "labels": labels[part]}
        for part, dtype in (
            (slice(90), "float32"),
            (slice(60), "float16"),
            (slice(60, 90), "float32"),
        )
    ]
    watch = Monitor()
    for i, arrays in enumerate(columns):
        save_predictions(tmp_path / f"{i}.npz", arrays)
    watch.update_file(tmp_path / "0.npz")
    for i in (1, 2):
        with pytest.warns(UserWarning, match=rf"{i}\.npz is in the stream already"):
            watch.update_file(tmp_path / f"{i}.npz")
    assert watch.seen == 90


def test_ids_of_files_are_the_same_as_whole_numbers_and_with_a_point(rng, tmp_path):
    """A table with a missing value, in whatever row, has 7.0 for 7."""
    logits, labels = drawn(rng, 60, 3, 2.0)
    numbers = np.arange(60)
    file = save_day(tmp_path / "today.npz", logits, labels, order_id=numbers)
    watch = Monitor().update_file(file, ids="order_id")
    for ids in (numbers.astype(float), numbers.astype(str), numbers.astype(float).astype(str)):
        file = save_day(tmp_path / "today.npz", logits, labels, order_id=ids)
        with pytest.warns(UserWarning, match="is in the stream already"):
            watch.update_file(file, ids="order_id")
    assert watch.seen == 60
    versions = np.array([f"{i}.0.0" for i in range(60)])
    file = save_day(tmp_path / "today.npz", logits, labels, order_id=versions)
    assert watch.update_file(file, ids="order_id").seen == 120


@pytest.mark.parametrize("missing", [np.nan, "", "None"])
def test_missing_ids_are_refused(missing, rng, tmp_path):
    logits, labels = drawn(rng, 60, 3, 2.0)
    ids = np.arange(60).astype(type(missing))
    ids[31] = missing
    file = save_day(tmp_path / "today.npz", logits, labels, order_id=ids)
    with pytest.raises(ValueError, match=r"today.npz: ids must be of every row, .* row 31 is mi"):
        Monitor().update_file(file, ids="order_id")


def test_ids_of_a_file(rng, tmp_path):
    logits, labels = three_outputs(rng, 60)
    half = np.where(np.arange(60) < 40, labels, -100)
    watch = Monitor()
    for day in (1, 2):  # the same scores of other examples
        ids = np.array([f"{day}-{i}" for i in range(60)])
        file = save_day(tmp_path / "today.npz", logits, half, order_id=ids)
        watch.update_file(file, ids="order_id")
    assert watch.seen == 80
    watch.update_file(save_day(file, logits[30:], labels[30:], order_id=ids[30:]), ids="order_id")
    assert [row["n"] for row in watch.report().windows] == [40, 60]
    with pytest.raises(ValueError, match="has no number in this split"):
        watch.update_file(file, ids="number")
    save_day(file, logits, labels, order_id=np.zeros(60, int))
    with pytest.raises(ValueError, match=r"today.npz: ids must differ .* but example 1 has that"):
        watch.update_file(file, ids="order_id")


# ----------------------------------------------------------------------- probabilities as logits


def test_probabilities_in_place_of_logits_are_named_once(rng):
    probs = rng.dirichlet(np.ones(4), size=80)
    labels = rng.integers(4, size=80)
    watch = Monitor()
    with pytest.warns(UserWarning, match="look like probabilities: .* pass them as probs="):
        watch.update(probs[:40], labels[:40])
    watch.update(probs[40:], labels[40:])  # without a warning, which would be an error
    with pytest.warns(UserWarning, match="look like probabilities"):
        Monitor().predicted(range(80), probs)
    assert Monitor().update(probs=probs, labels=labels).seen == 80
    assert Monitor().update(np.log(probs), labels).seen == 80
