"""How often a monitor raises a false alarm, and how soon it notices a drift.

    python benchmarks/studies/monitor.py DATA... > docs/data/monitor.csv
    python benchmarks/studies/monitor.py --tables docs/data

DATA are folders with ``predictions.npz`` (val and test) and ``shift.npz`` (the test images under
corruptions); without them only the simulations run. The second form writes the tables of
``docs/guarantees.md``. ``--streams`` and ``--only`` make it shorter; whole, it takes half an hour.

Simulated confidences are those of a classifier of moderate skill, 84 % on average. A row says, in
percent of the streams, how many raised an alarm before there was a drift (``false``) and how many
after it (``found``), and the median and 90 % quantile of the labelled examples that this took;
streams without an alarm count as infinitely late. Where examples are delivered more than once,
``counted`` is the number of labels that counted, in percent of the labels that there are.
"""

import argparse
import csv
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rows import MISSING, Rows, Table, chosen, read, write_tables
from scipy.special import expit, logit, logsumexp

import calibrant as cal
from calibrant.monitor import Monitor
from calibrant.monitor.e_process import TILTS, _bin_ranges, _range_sums

Array = NDArray[np.float64]
Truth = Callable[[Array, int], Array]
"""Probability of being right, given the confidence and the number of the window."""
Draw = Callable[[np.random.Generator, int], Array]
"""Confidences of that many examples."""
Row = dict[str, object]

COLUMNS = (
    *("study", "data", "setting", "tolerance", "window", "streams"),
    *("false", "found", "delay", "delay_90", "counted"),
)
WINDOW, WINDOWS = 500, 100

CALIBRATED: dict[str, tuple[float, Truth]] = {
    "calibrated": (0.0, lambda c, k: c),
    "calibrated, tolerance": (0.02, lambda c, k: c),
    "2 points over": (0.02, lambda c, k: c - 0.02),
    "2 points under": (0.02, lambda c, k: c + 0.02),
    "2 points over or under by turns": (0.02, lambda c, k: c + 0.02 * (-1) ** k),
    "2 points over above 80 %, under below": (
        0.02,
        lambda c, k: c + np.where(c > 0.8, -0.02, 0.02),
    ),
}
DRIFTS: dict[str, Callable[[Array], Array]] = {
    "3 points over": lambda c: c - 0.03,
    "5 points over": lambda c: c - 0.05,
    "10 points over": lambda c: c - 0.1,
    "5 points under": lambda c: c + 0.05,
    "temperature 1.25": lambda c: expit(logit(c) / 1.25),
    "temperature 1.5": lambda c: expit(logit(c) / 1.5),
    "temperature 0.7": lambda c: expit(logit(c) / 0.7),
    "8 points over above 90 %": lambda c: np.where(c > 0.9, c - 0.08, c),
    "10 points over below 70 %": lambda c: np.where(c < 0.7, c - 0.1, c),
    "5 points over above 80 %, 8 under below": lambda c: np.where(c > 0.8, c - 0.05, c + 0.08),
}
"""What the accuracy becomes at each confidence."""


def claims(rng: np.random.Generator, n: int) -> Array:
    return np.minimum(expit(rng.gamma(2.0, 1.6, n) - 0.5), 1 - 1e-9)


def sure_claims(rng: np.random.Generator, n: int) -> Array:
    """Those of a model that is nearly always sure."""
    return np.minimum(expit(rng.normal(6.0, 2.0, n)), 1 - 1e-9)


def split_claims(rng: np.random.Generator, n: int) -> Array:
    """Most of 80 to 93 %, and 3 % of them below 50 %."""
    sure = rng.random(n) < 0.97
    return np.where(sure, rng.uniform(0.8, 0.93, n), rng.uniform(0.2, 0.5, n))


def right(rng: np.random.Generator, truth: Array) -> NDArray[np.bool_]:
    return rng.random(truth.size) < truth


def stream(
    watch: Monitor, rng: np.random.Generator, truth: Truth, windows: int, draw: Draw = claims
) -> float:
    """Examples until the alarm; inf without one."""
    for k in range(windows):
        confidence = draw(rng, watch.window)
        watch.observe(confidence, right(rng, truth(confidence, k)))
        if watch.alarm:
            return watch.alarm.examples
    return math.inf


def row(study: str, data: str, setting: str, watch: Monitor, taken: list[float], start: int) -> Row:
    """Shares of false and right alarms, and delays counted from the start of the drift."""
    late = np.array(taken) - start
    true = late[late > 0]
    median, most = np.quantile(true, [0.5, 0.9], method="higher") if true.size else [np.inf] * 2
    return {
        **{"study": study, "data": data, "setting": setting, "tolerance": watch.tolerance},
        **{"window": watch.window, "streams": late.size, "false": percent(late <= 0)},
        "found": percent(np.isfinite(true)) if start < math.inf else "",
        "delay": shown(median),
        "delay_90": shown(most),
    }


def percent(hits: NDArray[np.bool_]) -> str:
    return f"{100 * hits.mean():.1f}" if hits.size else ""


def shown(delay: float) -> str:
    return f"{delay:.0f}" if math.isfinite(delay) else ""


def false_alarms(streams: int) -> Iterator[Row]:
    """Streams without drift: every alarm is a false one."""
    for name, (tolerance, truth) in CALIBRATED.items():
        taken = []
        for seed in range(streams):
            watch = Monitor(window=WINDOW, tolerance=tolerance)
            taken.append(stream(watch, np.random.default_rng([1, seed]), truth, WINDOWS))
        yield null_row("false alarms", name, watch, taken)
    yield from with_reference(streams)
    yield every_window(max(1, streams // 10))


def null_row(study: str, name: str, watch: Monitor, taken: list[float]) -> Row:
    found = row(study, "simulated", name, watch, taken, 0)
    return {**found, "false": percent(np.isfinite(taken)), "found": "", "delay": "", "delay_90": ""}


def with_reference(streams: int) -> Iterator[Row]:
    """A model that was never calibrated and does not change, with a reference of it."""

    def tempered(c: Array, temperature: float = 1.5) -> Array:
        return expit(logit(c) / temperature)

    def lower(c: Array) -> Array:
        return c - 0.07

    def odd(c: Array) -> Array:
        return np.where(c > 0.6, c - 0.25, c)

    cases: dict[str, tuple[float, Callable[[Array], Array], float, int, Draw]] = {
        "temperature 1.5 from the start, reference": (0.02, tempered, 0.0, 5000, claims),
        "7 points over from the start, reference": (0.0, lower, 0.0, 5000, claims),
        "7 points over from the start, 2 more, reference": (0.02, lower, 0.02, 5000, claims),
        "temperature 2.5 from the start, nearly always sure, reference of 1000": (
            0.02,
            lambda c: tempered(c, 2.5),
            0.0,
            1000,
            sure_claims,
        ),
        "25 points over above 60 % from the start, reference of 1000": (
            0.02,
            odd,
            0.0,
            1000,
            split_claims,
        ),
    }
    for name, (tolerance, curve, more, size, draw) in cases.items():
        taken = []
        for seed in range(streams):
            rng = np.random.default_rng([2, seed])
            confidence = draw(rng, size)
            known = confidence, right(rng, curve(confidence))
            watch = Monitor(window=WINDOW, tolerance=tolerance, reference=known)
            truth = lambda c, k, curve=curve, more=more: curve(c) - more  # noqa: E731
            taken.append(stream(watch, rng, truth, WINDOWS, draw))
        yield null_row("false alarms", name, watch, taken)


def every_window(streams: int) -> Row:
    """What is done without a monitor: a test at 5 % in each window."""
    taken = []
    for seed in range(streams):
        rng = np.random.default_rng([1, seed])
        hits = math.inf
        for k in range(WINDOWS):
            confidence = claims(rng, WINDOW)
            if (
                cal.metrics.calibration_test(
                    confidence=confidence, outcome=right(rng, confidence)
                ).p_value
                < 0.05
            ):
                hits = (k + 1) * WINDOW
                break
        taken.append(hits)
    name = "calibrated, a test at 5 % in every window"
    return null_row("false alarms", name, Monitor(window=WINDOW, tolerance=0.0), taken)


def delays(streams: int) -> Iterator[Row]:
    """A drift that begins at once, or after 25,000 examples."""
    for name, drift in DRIFTS.items():
        for begins in (0, WINDOWS // 2):
            yield delay_row(name, drift, begins, WINDOW, streams)
    for window in (100, 2500):
        begins = WINDOWS // 2 * WINDOW // window
        yield delay_row("5 points over", DRIFTS["5 points over"], begins, window, streams)
    for name in ("5 points over", "temperature 1.5"):
        yield one_beginning(name, DRIFTS[name], WINDOWS // 2, streams)


def delay_row(
    name: str, drift: Callable[[Array], Array], begins: int, window: int, streams: int
) -> Row:
    def truth(c: Array, k: int) -> Array:
        return c if k < begins else drift(c)

    taken = []
    for seed in range(streams):
        watch = Monitor(window=window)
        rng = np.random.default_rng([3, seed])
        taken.append(stream(watch, rng, truth, begins + WINDOWS * WINDOW // window))
    return row(
        "delay", "simulated", f"{name}, after {begins * window}", watch, taken, begins * window
    )


def one_beginning(name: str, drift: Callable[[Array], Array], begins: int, streams: int) -> Row:
    """The same bets with all of the stake on a drift from the first window on."""
    taken = []
    for seed in range(streams):
        watch, rng = Monitor(window=WINDOW), np.random.default_rng([3, seed])
        sums, hit = np.zeros((TILTS.size, watch.bins)), math.inf
        for k in range(begins + WINDOWS):
            c = claims(rng, WINDOW)
            pairs = cal.metrics.Pairs(c, right(rng, c if k < begins else drift(c)))
            sums += watch.tolerated.window(pairs).log_factors()
            if logsumexp(_range_sums(sums) + _bin_ranges(watch.bins).log_stake) >= math.log(20):
                hit = (k + 1) * WINDOW
                break
        taken.append(hit)
    start = begins * WINDOW
    return row("delay", "simulated", f"{name}, after {start}, one beginning", watch, taken, start)


DAYS, DAILY, DRIFT_DAY, LABEL_DAYS = 30, 200, 15, 7.0


class Day(NamedTuple):
    """Log-odds and labels of a day, and the time at which each label comes, in days from it."""

    number: int
    logits: Array
    labels: NDArray[np.int64]
    comes: Array

    def known(self, time: float) -> NDArray[np.int64]:
        """The labels that have come by then; -100 for the others."""
        return np.where(self.comes <= time, self.labels, -100)


def each_run(
    watch: Monitor, rng: np.random.Generator, days: list[Day], runs: int, cut: int
) -> None:
    """Deliver the file of today in each run of the day, with the labels that have come.

    ``cut`` 0 is the file as it was, 1 the file in another order, and more as many shards, of which
    every second is in double precision.
    """
    day = days[-1]
    for run in range(runs):
        order = rng.permutation(DAILY) if cut else np.arange(DAILY)
        for shard, at in enumerate(np.array_split(order, max(1, cut))):
            logits = day.logits[at].astype(np.float64 if shard % 2 else np.float32)
            watch.update(logits, day.known((run + 1) / runs)[at], window=day.number)


def counted_again(
    watch: Monitor, rng: np.random.Generator, days: list[Day], runs: int, cut: int
) -> None:
    """Count every label of a file in every run, as if it came for the first time."""
    day = days[-1]
    confidence = expit(np.abs(day.logits))
    for run in range(runs):
        known = day.known((run + 1) / runs) >= 0
        watch.observe(confidence[known], ((day.logits > 0) == day.labels)[known])


def each_night(
    watch: Monitor, rng: np.random.Generator, days: list[Day], runs: int, cut: int
) -> None:
    """Deliver today's predictions without labels, and a file of the labels that came since."""
    today = days[-1].number
    watch.update(days[-1].logits, np.full(DAILY, -100), window=today)
    came = [
        (day, np.flatnonzero(np.ceil(LABEL_DAYS * day.comes) == today - day.number)) for day in days
    ]
    logits, labels = (
        np.concatenate([getattr(day, name)[at] for day, at in came])
        for name in ("logits", "labels")
    )
    order = rng.permutation(labels.size)
    watch.update(logits[order], labels[order], window=today)


def log_odds(rng: np.random.Generator) -> Array:
    return (2 * rng.normal(size=DAILY)).astype(np.float32)


def leaves(rng: np.random.Generator) -> Array:
    """Those of a tree of 20 leaves."""
    return np.linspace(-3, 3, 20, dtype=np.float32)[rng.integers(20, size=DAILY)]


DELIVERIES = {
    "counted again": (counted_again, 0, log_odds),
    "the same file": (each_run, 0, log_odds),
    "in another order": (each_run, 1, log_odds),
    "in two shards, one in float64": (each_run, 2, log_odds),
    "a tree of 20 leaves, in another order": (each_run, 1, leaves),
    "labels of many days in a file every night": (each_night, 0, log_odds),
}
"""How the examples of a day are delivered, in how many shards, and their log-odds."""
RUNS = {
    "counted again": (1, 2, 4, 8),
    "the same file": (1, 2, 4, 8),
    "in another order": (8,),
    "in two shards, one in float64": (4,),
    "a tree of 20 leaves, in another order": (4,),
    "labels of many days in a file every night": (1,),
}


def deliveries(streams: int) -> Iterator[Row]:
    """Examples that come again while their labels come; no tolerance, which is the hardest."""
    for name, numbers in RUNS.items():
        for runs in numbers:
            yield delivery_row(name, runs, False, streams)
            if runs in (1, 4) and name != "counted again":
                yield delivery_row(name, runs, True, streams // 2)


def delivery_row(name: str, runs: int, drifts: bool, streams: int) -> Row:
    deliver, cut, draw = DELIVERIES[name]
    taken, counted, there, start = [], 0, 0, DRIFT_DAY * DAILY
    for seed in range(streams):
        rng, order = np.random.default_rng([5, seed]), np.random.default_rng([6, seed])
        watch, days = Monitor(tolerance=0.0), []
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*is in the stream already")
            for number in range(1, DAYS + 1):
                if number == DRIFT_DAY + 1:
                    before = watch.seen  # where labels come later, fewer than there are
                logits = draw(rng)
                truth = logits / 2 if drifts and number > DRIFT_DAY else logits
                labels = (rng.random(DAILY) < expit(truth)).astype(np.int64)
                days.append(Day(number, logits, labels, rng.random(DAILY)))
                deliver(watch, order, days, runs, cut)
        taken.append(watch.alarm.examples - before + start if watch.alarm else math.inf)
        counted += watch.seen
        there += sum(labels_there(name, day) for day in days)
    title = f"{name}; {runs}"
    found = null_row("deliveries", title, watch, taken)
    if drifts:
        title = f"{title}; drift"
        found = row("deliveries", "simulated", title, watch, taken, start)
    return {**found, "window": DAILY, "counted": f"{100 * counted / there:.2f}"}


def labels_there(name: str, day: Day) -> int:
    """The labels of a day that have come by the end."""
    if DELIVERIES[name][0] is not each_night:
        return DAILY
    return int(np.sum(np.ceil(LABEL_DAYS * day.comes) <= DAYS - day.number))


def real(folder: str, orders: int) -> Iterator[Row]:
    """Clean test images, then other images of the test set corrupted, in random order."""
    clean, shifted = (cal.open_dataset(Path(folder) / f) for f in FILES)
    fit, test = ([clean.split(s).read(k) for k in ("logits", "labels")] for s in ("val", "test"))
    for method in ("ts", "smart", "none"):
        fitted = cal.CALIBRATORS[method]().fit(*fit)
        known = cal.top_label(*fit) if method == "none" else None
        title = f"{method}, reference" if known else method
        before = cal.top_label(fitted.transform(test[0]), test[1])
        name = Path(folder).name
        for tolerance in (0.0, 0.01, 0.02):
            make = lambda t=tolerance: Monitor(window=250, tolerance=t, reference=known)  # noqa: B023, E731
            yield clean_row(name, title, make, before, orders)
        for split in shifted.splits:
            logits, labels = (shifted.split(split).read(k) for k in ("logits", "labels"))
            after = cal.top_label(fitted.transform(logits), labels)
            setting = (
                f"{title}; {split}; ECE {100 * cal.ece(confidence=after[0], outcome=after[1]):.1f}"
            )
            yield shift_row(name, setting, known, before, after, orders)


FILES = ("predictions.npz", "shift.npz")


def clean_row(
    name: str, title: str, make: Callable[[], Monitor], before: cal.metrics.Pairs, orders: int
) -> Row:
    taken = []
    for seed in range(orders):
        order = np.random.default_rng([4, seed]).permutation(before.outcome.size)
        watch = make().observe(before.confidence[order], before.outcome[order])
        taken.append(watch.alarm.examples if watch.alarm else math.inf)
    return {**null_row("real", f"{title}; clean", watch, taken), "data": name}


def shift_row(
    name: str,
    setting: str,
    known: cal.metrics.Pairs | None,
    before: cal.metrics.Pairs,
    after: cal.metrics.Pairs,
    orders: int,
) -> Row:
    taken, half = [], before.outcome.size // 2
    for seed in range(orders):
        order = np.random.default_rng([4, seed]).permutation(before.outcome.size)
        watch = Monitor(window=250, reference=known)
        for pairs, part in ((before, order[:half]), (after, order[half:])):
            watch.observe(pairs.confidence[part], pairs.outcome[part])
        taken.append(watch.alarm.examples if watch.alarm else math.inf)
    return row("real", name, setting, watch, taken, half)


DELAY = ("setting", "window", "false", "found", "delay", "delay_90")
"""Columns of the table of delays."""


def tables(folder: Path) -> dict[str, Table]:
    """The tables of the documentation, from the rows of the study."""
    rows = read(folder / "monitor.csv")
    real = chosen(rows, study="real")
    clean = [r for r in real if r["setting"].endswith("clean")]
    return {
        "table_monitor_false": [
            ("truth", "tolerance, points", "false alarms, %"),
            *((r["setting"], points(r), r["false"]) for r in chosen(rows, study="false alarms")),
        ],
        "table_monitor_deliveries": [
            ("delivery", "runs a day", "false alarms, %", "labels counted, %", "median delay"),
            *delivered(chosen(rows, study="deliveries")),
        ],
        "table_monitor_delay": [
            ("drift", "window", "false, %", "found, %", "median delay", "90 % quantile"),
            *(tuple(r[key] or MISSING for key in DELAY) for r in chosen(rows, study="delay")),
        ],
        "table_monitor_clean": [
            ("model", "calibrator", "tolerance, points", "alarms on clean images, % of orders"),
            *(
                (name_of(r), r["setting"].removesuffix("; clean"), points(r), r["false"])
                for r in clean
            ),
        ],
        "table_monitor_shift": list(
            shifts([r for r in chosen(rows, study="real") if r not in clean])
        ),
    }


def points(row: dict[str, str]) -> str:
    return f"{100 * float(row['tolerance']):g}"


def name_of(row: dict[str, str]) -> str:
    return row["data"].replace("_", " ")


def delivered(rows: Rows) -> Iterator[tuple[str, ...]]:
    """A row for each way of delivery: false alarms with standard errors, labels, and delays."""
    found = {r["setting"]: r for r in rows}
    for setting, calm in found.items():
        if setting.endswith("drift"):
            continue
        false, drift = float(calm["false"]), found.get(f"{setting}; drift")
        error = math.sqrt(false * (100 - false) / int(calm["streams"]))
        delay = f"{drift['delay']} ({drift['found']} %)" if drift else MISSING
        yield *setting.split("; "), f"{false} ({error:.1f})", calm["counted"], delay


def shifts(rows: Rows) -> Iterator[tuple[str, ...]]:
    """A row for each corruption: ECE and delay of each method."""
    found: dict[tuple[str, str], dict[str, tuple[str, str]]] = {}
    for r in rows:
        title, split, error = r["setting"].split("; ")
        cells = error.removeprefix("ECE "), f"{r['delay'] or MISSING} ({r['found']} %)"
        found.setdefault((name_of(r), split.replace("_", " ")), {})[title] = cells
    titles = next(iter(found.values()))
    yield "model", "corruption", *chain(*((f"{title}: ECE %", "delay") for title in titles))
    for names, by_title in found.items():
        yield *names, *chain(*by_title.values())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="*")
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--only", nargs="+", choices=("false", "delay", "deliveries", "real"))
    parser.add_argument("--tables", type=Path, metavar="FOLDER")
    given = parser.parse_args()
    if given.tables:
        write_tables(given.tables, tables(given.tables))
        return
    out = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
    out.writeheader()
    parts = {
        "false": [false_alarms(given.streams)],
        "delay": [delays(max(1, given.streams // 5))],
        "deliveries": [deliveries(max(2, given.streams // 10))],
        "real": [real(folder, max(1, given.streams // 25)) for folder in given.data],
    }
    for part in given.only or parts:
        for found in chain(*parts[part]):
            out.writerow(found)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
