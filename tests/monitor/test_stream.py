"""The monitor: input, workers, saved states and files."""

import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant import use
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import save_predictions
from calibrant.monitor import Monitor
from tests.support.artifacts import write_state
from tests.support.simulate import drawn, drawn_pairs
from tests.support.streams import confidences, outcomes, same


def test_logits_probs_tensors_and_pairs(rng):
    logits, labels = drawn(rng, 900, 4)
    probs = torch.softmax(torch.from_numpy(logits), -1)
    first = Monitor(window=200).update(logits, labels)
    assert same(first, Monitor(window=200).update(torch.from_numpy(logits), labels.tolist()))
    assert same(first, Monitor(window=200).update(probs=probs, labels=labels))
    assert same(first, Monitor(window=200).observe(*cal.top_label(logits, labels)))


@pytest.mark.parametrize("form", ["log-odds", "logits", "by ids"])
def test_two_classes_are_watched_by_the_probability_of_class_1(rng, form):
    """A shift makes answers of one class too sure, those of the other not sure enough."""
    odds = rng.uniform(-3, 3, size=4000)
    labels = (odds - 0.7 + rng.logistic(size=4000) > 0).astype(int)
    scores = odds if form == "log-odds" else np.stack([0 * odds, odds], 1)
    watch = Monitor(window=1000)
    if form == "by ids":
        watch.predicted(range(4000), scores)
        watch.labelled(range(4000), labels)
    else:
        watch.update(scores, labels)
    assert same(watch, Monitor(window=1000).observe(*cal.metrics.positive_class(scores, labels)))
    answers = Monitor(window=1000).observe(*cal.top_label(scores, labels)).report()
    report = watch.report()
    assert (answers.alarm, report.alarm and report.alarm.examples) == (None, 1000)
    for seen, of_answers in zip(report.windows, answers.windows, strict=True):
        for key in ("accuracy", "confidence", "gap"):
            assert seen[key] == pytest.approx(of_answers[key])
    first = slice(1000)
    assert report.windows[0]["ece"] == pytest.approx(cal.ece(scores[first], labels[first]))
    assert "P(y = 1) is too high since window 1, most clearly where it is" in report.advice()
    assert "a model whose P(y = 1) stays calibrated within 2 points" in report.describe()
    assert "and y = 1 in" in str(report)
    again = Monitor.from_state(watch.state())
    assert again.report().to_dict() == report.to_dict()


def test_empty_batches():
    watch = Monitor()
    empty: list[Any] = [[], (), np.zeros(0), np.zeros(0, int), torch.zeros(0)]
    for nothing in empty:
        assert watch.observe(nothing, nothing) is watch
        assert watch.labelled([], nothing) == 0
        assert watch.update(np.zeros((0, 3)), nothing) is watch
        assert watch.update([], nothing) is watch
        watch.predicted([], [])
    assert (watch.seen, watch.windows) == (0, {})
    watch.update([[1.0, 0.0, 0.0]], [0])  # an empty list was not one of log-odds
    assert watch.labelled([], [], window=2) == 0
    assert [row["n"] for row in watch.report().windows] == [1, 0]
    with pytest.raises(ValueError, match="equal shapes"):
        watch.observe([], [1])
    with pytest.raises(ValueError, match="one label per id"):
        watch.labelled([], [1])


def test_masked_classes(rng):
    logits, labels = drawn(rng, 100, 4)
    logits[:, 3], labels = -np.inf, np.minimum(labels, 2)
    watch = Monitor()
    watch.predicted(range(100), logits)
    watch.labelled(range(100), labels)
    assert same(watch, Monitor().update(logits, labels))


def test_a_bad_reference():
    with pytest.raises(ValueError, match=r"confidence must be in \[0, 1\]"):
        Monitor(reference=([1.5], [1]))


@pytest.mark.parametrize(
    ("call", "kind", "message"),
    [
        (lambda w: w.update([[1.0, 0.0]]), TypeError, "labels are missing"),
        (lambda w: w.update(labels=[0]), TypeError, "either logits or probs"),
        (lambda w: w.update([[1.0, 0.0]], [0], probs=[[1.0, 0.0]]), TypeError, "either logits or"),
        (lambda w: w.update([[1.0, 0.0]], [2]), ValueError, r"labels must be in \[0, 2\)"),
        (lambda w: w.update([[1.0, np.nan]], [0]), ValueError, "row 0 has NaN"),
        (lambda w: w.update([[1.0, 0.0]], [0, 1]), ValueError, "one row of logits is wanted"),
        (
            lambda w: w.update([[1.0, 0.0, 0.0]], [0], ids=["p"]),
            ValueError,
            "same classes: 2 so far, now 3",
        ),
        (lambda w: w.update([[1.0, 0.0]], [0]), ValueError, "by their ids, got logits: pass ids"),
        (lambda w: w.update([[1.0, 0.0]], [0], ids=["p", "q"]), ValueError, "one id per row"),
        (lambda w: w.update([[1.0, 0.0]] * 2, [0, 0], ids=[7, "7"]), ValueError, "must differ"),
        (lambda w: w.update([[1.0, 0.0]], [0], ids=[7.5]), TypeError, "whole numbers or text"),
        (lambda w: w.update([[1.0, 0.0]], [0], window=1.5), TypeError, "whole number or a date"),
        (lambda w: w.update([[1.0, 0.0]], [0], window=-3), ValueError, "is before the first"),
        (lambda w: w.observe([0.5], [2]), ValueError, "outcome must be 0 or 1"),
        (lambda w: w.predicted(["p"], [[1.0, np.inf]]), ValueError, r"row 0 has \+inf"),
        (lambda w: w.predicted(["p"], [[-np.inf, -np.inf]]), ValueError, "-inf in every class"),
        (lambda w: w.predicted(["p", "q"], [[1.0, 0.0]]), ValueError, "one row of logits for each"),
        (lambda w: w.predicted(["p"], [[[1.0, 0.0]]]), ValueError, "one row of logits for each"),
        (lambda w: w.predicted("p", [[1.0, 0.0]]), TypeError, "ids must be a list"),
        (lambda w: w.predicted([1.5], [[1.0, 0.0]]), TypeError, "ids must be whole numbers or"),
        (lambda w: w.predicted(["p"], [[1.0, 0.0, 2.0]]), ValueError, "same classes"),
        (lambda w: w.labelled(["waits"], [5]), ValueError, r"labels must be in \[0, 2\)"),
        (lambda w: w.labelled(["waits"], [0.0]), TypeError, "labels must be integers"),
        (lambda w: w.labelled(["waits"], [0, 1]), ValueError, "one label per id"),
        (lambda w: w.labelled(["waits"], [0], window=-3), ValueError, "is before the first"),
    ],
)
def test_bad_input_leaves_no_trace(call, kind, message):
    watch = Monitor().update([[2.0, 0.0], [0.0, 1.0]], [0, 0], ids=["first", "second"])
    watch.predicted(["waits"], [[1.0, 0.0]])
    before = json.dumps(watch.state())
    with pytest.raises(kind, match=message):
        call(watch)
    assert json.dumps(watch.state()) == before


# Alarms.


@pytest.mark.parametrize(("referenced", "limit"), [(False, 20), (True, 40)])
def test_a_reference_leaves_half_of_the_false_alarms_to_the_stream(referenced, limit):
    """At 5 % the limit of the e-value is 1 / 0.05, or 2 / 0.05 beside a reference."""
    known = (np.full(1000, 0.9), np.arange(1000) < 900) if referenced else None
    watch, seen = Monitor(window=1, reference=known), []
    while watch.alarm is None:
        seen.append(watch.e_value)
        watch.observe([0.9], [len(seen) % 2])  # right half of the time
    assert limit / 2 < max(seen) < limit <= watch.alarm.e_value


# Workers.


def test_workers_add_up(rng):
    base = Monitor(first=1)
    workers, whole = [base.like() for _ in range(3)], base.like()
    for k in range(1, 6):
        for i, worker in enumerate(workers):
            if (i, k) == (1, 3):
                continue  # a worker may miss a window
            pairs = drawn_pairs(rng, 30 + 10 * i, 0.1)
            worker.observe(*pairs, window=k)
            whole.observe(*pairs, window=k)
    a, b, c = workers
    totals = [
        base.like().merge(a).merge(b).merge(c),
        base.like().merge(c).merge(base.like().merge(b).merge(a)),
        base.like().merge(base.like().merge(a).merge(c)).merge(b),
    ]
    assert all(same(whole, total) for total in totals)


def test_alarm_of_a_worker_is_not_merged(rng):
    c = confidences(rng, 1000)
    bad = Monitor().observe(c, outcomes(rng, c - 0.3))
    assert bad.alarm is not None
    c = confidences(rng, 100_000)
    total = Monitor(window=100_000).observe(c, outcomes(rng, c))
    total.merge(bad)
    assert total.alarm is None
    assert total.seen == 101_000


def test_merge_of_pending_and_counts():
    one, two = Monitor(pending=3), Monitor(pending=3)
    row = [[1.0, 0.0]]
    one.predicted(["a", "b"], row * 2)
    two.predicted(["b", "c", "d"], row * 3)
    one.labelled(["unheard"], [0])
    two.labelled(["unheard", "of"], [0, 1])
    one.update(row, [-100], ids=[1])
    two.update(row, [-100], ids=[2])
    counts = one.merge(two).report().counts
    counted = {"pending": 3, "dropped": 1, "repeated": 1, "unknown": 3, "ignored": 2}
    assert {key: number for key, number in counts.items() if number} == counted
    assert one.labelled(["a", "b", "c", "d"], [0, 0, 0, 0]) == 3  # a was the oldest
    with pytest.raises(ValueError, match="same classes: 2 so far"):
        Monitor().merge(two).update([[1.0, 0.0, 0.0]], [0], ids=["e"])


def test_merge_with_summed_up_windows(rng):
    late, early = Monitor(first=1, keep=3), Monitor(first=1)
    whole = Monitor(first=1)
    for k in (2, 4, 6, 5, 3, 1):
        pairs = drawn_pairs(rng, 20)
        (early if k % 2 else late).observe(*pairs, window=k)
        whole.observe(*pairs, window=k)
    late.merge(early)
    assert sorted(late.windows) == [4, 5, 6]
    assert late.e_value == pytest.approx(whole.e_value, rel=1e-9)


def test_merge_of_different_settings():
    for other in (Monitor(bins=10), Monitor(tolerance=0.01), Monitor(false_alarms=0.01)):
        with pytest.raises(ValueError, match="settings must agree"):
            Monitor().merge(other)


# Calibrator.


def test_logits_are_calibrated(rng):
    logits, labels = drawn(rng, 3000, 5, 2.0)
    calibrator = TemperatureScaling().fit(logits[:1500], labels[:1500])
    watch = Monitor(calibrator).update(logits[1500:], labels[1500:])
    probs = calibrator.predict_proba(logits[1500:])
    plain = Monitor().observe(probs.max(-1), probs.argmax(-1) == labels[1500:])
    assert same(watch, plain)
    late = Monitor(calibrator)
    late.predicted(range(1500), logits[1500:])
    late.labelled(range(1500), labels[1500:])
    assert same(late, plain)
    assert Monitor().update(logits[1500:], labels[1500:]).alarm is not None
    assert watch.alarm is None


def test_ignored_examples_with_a_calibrator(rng):
    logits, labels = drawn(rng, 400, 3)
    calibrator = TemperatureScaling().fit(logits, labels)
    spoilt, marked = logits.copy(), labels.copy()
    spoilt[::4], marked[::4] = np.nan, -100
    kept = np.arange(400) % 4 > 0
    wanted = Monitor(calibrator).update(logits[kept], labels[kept])
    found = Monitor(calibrator).update(spoilt.reshape(20, 20, 3), marked.reshape(20, 20))
    assert same(wanted, found)
    assert same(wanted, Monitor(calibrator).update(torch.from_numpy(spoilt), marked))
    assert found.report().counts["ignored"] == 100


def test_calibrator_with_features(rng, tmp_path, run):
    features = rng.normal(size=(900, 4))
    logits, labels = drawn(rng, 900, 3)
    groups = cal.calibrators.GroupCalibration(partitions=2).fit(logits, labels, features=features)
    probs = groups.predict_proba(logits, features)
    expected = Monitor().update(probs=probs, labels=labels).report()
    found = Monitor(groups).update(logits, labels, features=features).report()
    assert found.n == 900
    assert found.to_dict()["windows"][0]["confidence"] == pytest.approx(
        expected.to_dict()["windows"][0]["confidence"], rel=1e-5
    )
    waiting = Monitor(groups)
    waiting.predicted(range(900), logits, features=features)
    assert waiting.labelled(range(900), labels) == 900
    path = tmp_path / "day.npz"
    save_predictions(path, {"logits": logits, "labels": labels, "features": features})
    cal.save(groups, tmp_path / "groups")
    from_file = Monitor(groups).update_file(path).report()
    assert from_file.n == 900
    code, _, err = run("monitor", str(path), "--calibrator", str(tmp_path / "groups"))
    assert code == 0, err
    with pytest.raises(ValueError, match="needs features"):
        Monitor(groups).update(logits, labels)


# State.


def test_saved_state_continues(rng, tmp_path):
    logits, labels = drawn(rng, 600, 4, 1.4)
    reference = drawn_pairs(rng, 500)
    whole, saved = (
        Monitor(window=50, tolerance=0.01, keep=4, bins=12, reference=reference) for _ in range(2)
    )
    for watch in (whole, saved):
        watch.update(logits[:300], labels[:300], ids=range(2, 302))
        watch.predicted([1, "1", "x"], logits[:3])
    cal.save(saved, tmp_path / "state.json")
    saved = pickle.loads(pickle.dumps(cal.load(tmp_path / "state.json")))
    assert saved.report().to_dict() == whole.report().to_dict()
    for watch in (whole, saved):
        watch.labelled(["1", "y"], labels[1:3])
        watch.update(logits[300:], labels[300:], ids=range(302, 602))
    assert saved.report().to_dict() == whole.report().to_dict()
    assert saved._form() == whole._form()
    assert saved.state() == whole.state()


def test_state_knows_its_calibrator(rng, tmp_path):
    logits, labels = drawn(rng, 500, 3, 1.5)
    fitted = TemperatureScaling().fit(logits, labels)
    path = tmp_path / "state.json"
    cal.save(Monitor(fitted).update(logits, labels), path)
    again = cal.load(path).resume(fitted).update(*drawn(rng, 500, 3, 1.5))
    assert again.seen == 1000
    alone = cal.load(path)
    assert alone.report().n == 500
    alone.observe([0.5], [1])
    with pytest.raises(ValueError, match="this stream is of TemperatureScaling"):
        alone.update(logits, labels)
    with pytest.raises(ValueError, match="this stream is of TemperatureScaling"):
        alone.predicted([1], logits[:1])
    other = TemperatureScaling().fit(2 * logits, labels)
    with pytest.raises(ValueError, match="begin a new stream after a new fit, in another state"):
        cal.load(path).resume(other)
    with pytest.raises(ValueError, match="collected with no calibrator"):
        Monitor().resume(fitted)
    with pytest.raises(ValueError, match="settings must agree"):
        Monitor(fitted).merge(Monitor(other))


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: state.update(more=1),
        lambda state: state.pop("windows"),
        lambda state: state["settings"].update(unknown=1),
        lambda state: state["settings"].update(bins=3),
        lambda state: state["windows"][0].update(count=[1, 2]),
        lambda state: state["windows"][0].update(bins=[99]),
        lambda state: state.update(alarm={"window": "1"}),
        lambda state: state.update(seen=[1]),
        lambda state: state["seen"].update(by="nothing", windows=[[1, "", ""]]),
        lambda state: state["seen"].update(by="logits", windows=[[1, "AAAAAAAAAAA=", ""]]),
        lambda state: state["seen"].update(by="logits", windows=[[1, "AAAAAAAAAAA=", "AAAA/w=="]]),
        lambda state: state["seen"].update(by="logits", windows=[["1", "", ""]]),
        lambda state: state["seen"].update(by="logits", windows=[[1, "?", "AAAAAA=="]]),
        lambda state: state.update(waiting=[["a", 10**400, 1]]),
        lambda state: state.update(waiting=[["a", 1.5, 1]]),
        lambda state: state.update(waiting=[["a", 0.5, -1]]),
        lambda state: state["windows"][0].update(number=-3),
        lambda state: state["windows"][0].update(number=10**30),
        lambda state: state["windows"][0]["right"].__setitem__(0, 1000),
        lambda state: state["windows"][0]["count"].__setitem__(0, -5),
        lambda state: state["windows"][0]["claimed"].__setitem__(0, "inf"),
        lambda state: state["windows"][0]["cumulant"][0].__setitem__(0, "inf"),
        lambda state: state["folded"].update(position=2),
        lambda state: state["folded"].update(position=-2),
        lambda state: state["folded"].update(n=-2),
        lambda state: (
            state["settings"].update(first=None),
            state["folded"].update(position=2, n=9, logs=[[0.0] * 120] * 14),
        ),
        lambda state: state["known"][0].__setitem__(0, "inf"),
        lambda state: state["counts"].update(ignored=-1),
        lambda state: state.update(classes=-1),
        lambda state: state.update(dated=True, windows=[{**state["windows"][0], "number": 10**9}]),
        lambda state: state.update(alarm={"window": 1, "examples": 3, "e_value": 30.0}),
        lambda state: state.update(alarm={"window": "1", "examples": "3", "e_value": 30.0}),
        lambda state: state.update(
            windows=[], alarm={"window": "1", "examples": 3, "e_value": 30.0}
        ),
        lambda state: state["counts"].update(late=-1),
    ],
)
def test_damaged_state(rng, tmp_path, damage):
    state = Monitor(window=5).observe(*drawn_pairs(rng, 20)).state()
    damage(state)
    path = tmp_path / "state.json"
    write_state(path, "monitor", state)
    with pytest.raises(ValueError, match="not the state of a Monitor"):
        cal.load(path)


# Files.


def test_file_is_a_window(rng, tmp_path, monkeypatch, small_blocks):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 40)
    logits, labels = drawn(rng, 180, 4)
    labels[[5, 95]] = -100
    first, last = slice(90), slice(90, 180)
    save_predictions(tmp_path / "a.npz", {"logits": logits[first], "labels": labels[first]})
    splits = {"test_logits": logits[last], "test_labels": labels[last]}
    save_predictions(tmp_path / "b.npz", splits)
    done = []
    with use(progress=lambda *at: done.append(at)):
        watch = Monitor().update_file(tmp_path / "a.npz")
    with ThreadPoolExecutor(1) as pool, use(executor=pool):
        watch.update_file(tmp_path / "b.npz", split="test", name="b")
    wanted = Monitor()
    for k, part in enumerate((first, last), 1):
        wanted.update(logits[part], labels[part], window=k)
    assert same(watch, wanted)
    assert done[-1] == (90, 90)
    found = watch.report()
    assert [row["window"] for row in found.windows] == [str(tmp_path / "a.npz"), "b"]
    assert found.counts["ignored"] == 2


def day_file(rng, path):
    logits, labels = drawn(rng, 90, 4)
    save_predictions(path, {"logits": logits, "labels": labels})
    return path


def test_repeated_file(rng, tmp_path):
    logits, labels = drawn(rng, 90, 4)
    path = tmp_path / "today.npz"
    save_predictions(path, {"logits": logits, "labels": labels})
    watch = Monitor().update_file(path)
    with pytest.warns(UserWarning, match=r"today\.npz is in the stream already"):
        watch.update_file(path)
    assert watch.seen == 90
    save_predictions(path, {"logits": 2 * logits, "labels": labels})  # the next day
    watch.update_file(path)
    assert (watch.seen, sorted(watch.windows)) == (180, [1, 2])


def test_what_is_in_both_monitors_is_not_counted_twice(rng, tmp_path):
    today, yesterday = (day_file(rng, tmp_path / name) for name in ("today.npz", "yesterday.npz"))
    watch = Monitor().update_file(yesterday)
    worker = watch.like().update_file(today)
    with pytest.raises(ValueError, match="cannot be merged into itself"):
        watch.merge(watch)
    watch.merge(worker)
    seen = watch.seen
    for other in (worker, watch.like().update_file(yesterday)):
        with pytest.raises(ValueError, match="90 examples are in both monitors"):
            watch.merge(other)
    assert watch.seen == seen


def test_repeated_file_of_a_summed_up_window(rng, tmp_path):
    files = [day_file(rng, tmp_path / f"{day}.npz") for day in range(5)]
    watch, state = Monitor(keep=2), tmp_path / "state.json"
    for file in files:
        watch.update_file(file)
    before = watch.e_value
    for file in files:
        cal.save(watch, state)
        watch = cal.load(state)
        with pytest.warns(UserWarning, match="is in the stream already"):
            watch.update_file(file)
    assert (watch.seen, watch.e_value) == (450, before)
    day_file(rng, files[0])  # the same name, another day
    assert watch.update_file(files[0]).seen == 540


def test_repeated_file_of_a_shared_window(rng, tmp_path):
    file = day_file(rng, tmp_path / "a.npz")
    watch = Monitor().update_file(file).observe([0.9], [1])
    total = watch.like().merge(watch)
    for seen in (watch, total):
        with pytest.warns(UserWarning, match="is in the stream already"):
            assert seen.update_file(file).seen == 91


def test_files_with_equal_counts(tmp_path):
    file, watch = tmp_path / "today.npz", Monitor()
    for day, odds in enumerate((3.3, 3.3001, 3.3002), 1):
        save_predictions(file, {"logits": [[odds, 0.0], [0.0, odds]], "labels": [0, 0]})
        assert watch.update_file(file).seen == 2 * day
    names = [row["window"] for row in watch.report().windows]
    assert names == [str(file), f"{file} (2)", f"{file} (3)"]
    with pytest.warns(UserWarning, match="is in the stream already"):
        watch.update_file(file)


def test_files_with_the_same_sums(tmp_path):
    """Confidences and outcomes agree, but these are other examples."""
    watch = Monitor()
    for day, logits in enumerate(([[3.0, 0.0]], [[4.0, 1.0]]), 1):
        save_predictions(tmp_path / f"{day}.npz", {"logits": logits, "labels": [0]})
        assert watch.update_file(tmp_path / f"{day}.npz").seen == day


def test_file_without_labels(rng, tmp_path):
    save_predictions(tmp_path / "a.npz", {"logits": np.zeros((3, 2)), "labels": [-100] * 3})
    with pytest.warns(UserWarning, match="has no labelled examples"):
        watch = Monitor().update_file(tmp_path / "a.npz")
    assert [row["n"] for row in watch.report().windows] == [0]


def test_refused_file_leaves_no_trace(rng, tmp_path, monkeypatch):
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 40)
    logits, labels = drawn(rng, 90, 4)
    logits[80] = np.nan
    save_predictions(tmp_path / "bad.npz", {"logits": logits, "labels": labels})
    watch = Monitor()
    with pytest.raises(ValueError, match=r"bad\.npz, counting from row 80: .* row 0 has NaN"):
        watch.update_file(tmp_path / "bad.npz")
    assert (watch.seen, watch.windows) == (0, {})
    watch.update(*drawn(rng, 10, 7))


def test_windows_have_no_more_examples_than_numpy_counts():
    with pytest.raises(ValueError, match=r"window must be .*, which has more than 64 bits"):
        Monitor(window=2**63)
