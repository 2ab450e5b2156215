"""Plants one fault at a time in a copy of the code, and sees whether the tests notice it.

Each entry of FAULTS is a slip that could happen: a dropped weight, a wrong side of a bin edge, a
check that is gone. Its snippet is looked for in all of ``src``, and its tests are chosen by words
in their paths, so that the list outlives moved and renamed modules. The working tree is only read.

    python benchmarks/plant_faults.py                        # all of them, about an hour
    python benchmarks/plant_faults.py --package decide       # those of one package
    python benchmarks/plant_faults.py --only bin-edge-side --root /tmp/other_checkout

A fault is *caught* if a test fails, and has *survived* if none does. It is *stale* if its snippet
is not there exactly once, or if no test file has one of its words: then the entry, and not the
code, is to be corrected. It is *red* if the test that failed does so without the fault, too. Slow
tests run only where the quick ones see nothing. The exit code is 1 unless every fault was caught.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import queue
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

COPIED = (
    *("src", "tests", "docs", "benchmarks", "examples"),
    *("README.md", "pyproject.toml", "conftest.py"),
)
LIMIT = 1200
"""Seconds after which a run of the tests is ended."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header")
QUICK, SLOW = ("-m", "not slow"), ("-m", "slow")
FAILED, NONE_CHOSEN = (1, 2), 5
"""Exit codes of pytest."""
CAUGHT, SURVIVED, STALE, ENDLESS, RED = "caught", "survived", "stale", "endless", "red"


@dataclass(frozen=True)
class Fault:
    """One slip: where ``old`` stands, ``new`` is put.

    ``old`` may be several wordings, of which the first that stands there exactly once is replaced,
    if need be only ``within`` functions or classes of that name; ``new`` may have one for each of
    them. ``tests`` are parts of paths below the folder of the tests: ``/test_a.py`` stands for the
    file right there, ``test_a`` for any of that name, ``a/test_`` for all in a folder.
    """

    name: str
    package: str
    old: str | tuple[str, ...]
    new: str | tuple[str, ...]
    tests: tuple[str, ...]
    within: str | tuple[str, ...] = ()

    def wordings(self) -> list[tuple[str, str]]:
        """Pairs of old and new."""
        old = listed(self.old)
        new = listed(self.new)
        return list(zip(old, new * len(old) if len(new) == 1 else new, strict=True))


def listed(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


@dataclass(frozen=True)
class Place:
    """A file, relative to its root, and the text of it with the fault in it."""

    file: str
    line: int
    text: str


@dataclass(frozen=True)
class Outcome:
    name: str
    package: str
    status: str
    seconds: float
    where: str
    told: str
    """The first test that failed, or why the entry is stale."""


def find(fault: Fault, root: Path) -> Place | str:
    """Where the fault goes; a reason if that is not one place."""
    names, counts = listed(fault.within), []
    for old, new in fault.wordings():
        found = [place for path in sources(root) for place in places(path, old, new, names, root)]
        if len(found) == 1:
            return found[0]
        counts.append(len(found))
    where = f" within {' or '.join(names)}" if names else ""
    return f"the snippet occurs {' or '.join(map(str, counts))} times{where}"


def sources(root: Path) -> list[Path]:
    return sorted((root / "src").rglob("*.py"))


def places(path: Path, old: str, new: str, names: tuple[str, ...], root: Path) -> Iterator[Place]:
    """Each place of a file where ``old`` stands, within functions or classes of these names."""
    text = path.read_text("utf-8")
    if old not in text:
        return
    allowed = spans(text, names) if names else [range(len(text))]
    for match in re.finditer(re.escape(old), text):
        if any(match.start() in span for span in allowed):
            changed = text[: match.start()] + new + text[match.end() :]
            line = text.count("\n", 0, match.start()) + 1
            yield Place(str(path.relative_to(root)), line, changed)


def spans(text: str, names: tuple[str, ...]) -> list[range]:
    """Characters of the functions and classes of these names."""
    ends = [0]
    for line in text.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    return [
        range(ends[node.lineno - 1], ends[node.end_lineno or node.lineno])
        for node in found
        if node.name in names
    ]


def tests_of(fault: Fault, root: Path) -> list[str]:
    """Test files whose path has one of the words, in the order of the words."""
    folder = root / "tests"
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("test_*.py"))]
    named = (file for word in fault.tests for file in files if has_word(file, word))
    return [f"tests/{file}" for file in dict.fromkeys(named)]


def has_word(file: str, word: str) -> bool:
    return f"/{file}".startswith(word) if word.startswith("/") else word in file


@contextmanager
def copied(root: Path) -> Iterator[Path]:
    """A folder with what the tests need of a working tree."""
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        for name in COPIED:
            source, target = root / name, Path(folder) / name
            if source.is_dir():
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
            elif source.exists():
                shutil.copy2(source, target)
        yield Path(folder)


@contextmanager
def planted(place: Place, copy: Path) -> Iterator[None]:
    """The fault in a copy, until the block ends."""
    path = copy / place.file
    before = path.read_bytes()
    path.write_text(place.text, "utf-8")
    try:
        yield
    finally:
        path.write_bytes(before)


def environment(copy: Path) -> dict[str, str]:
    """What the tests see: the copy first, and no bytecode, which a change in it might outlive."""
    usual = {"OMP_WAIT_POLICY": "PASSIVE", "OPENBLAS_NUM_THREADS": "1"}
    ours = {"PYTHONPATH": str(copy / "src"), "PYTHONDONTWRITEBYTECODE": "1"}
    return {**usual, **os.environ, **ours}


def check_copy(copy: Path) -> None:
    """See that the tests will import the copy, and not what is installed."""
    code = "import calibrant; print(calibrant.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=copy,
        env=environment(copy),
        capture_output=True,
        text=True,
        check=True,
    )
    if not Path(done.stdout.strip()).is_relative_to(copy):
        raise SystemExit(f"the tests would see {done.stdout.strip()}, not the copy in {copy}")


def run_tests(copy: Path, *arguments: str) -> tuple[str, str]:
    """Whether the tests fail, and which first."""
    try:
        done = pytest(copy, "-x", *arguments)
    except subprocess.TimeoutExpired:
        return ENDLESS, f"no end within {LIMIT} s"
    if done.returncode in (0, NONE_CHOSEN):
        return SURVIVED, ""
    if done.returncode in FAILED:
        return CAUGHT, first_failure(done.stdout)
    return STALE, f"pytest ended with {done.returncode}: {(done.stdout + done.stderr)[-200:]}"


def pytest(copy: Path, *arguments: str, limit: float = LIMIT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PYTEST, *arguments],
        cwd=copy,
        env=environment(copy),
        capture_output=True,
        text=True,
        errors="replace",  # failures may show what no terminal takes
        timeout=limit,
    )


def first_failure(printed: str) -> str:
    found = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - .*)?$", printed, re.MULTILINE)
    return found[1] if found else printed.strip().splitlines()[-1]


def tried(fault: Fault, copy: Path, thorough: bool) -> Outcome:
    start = time.perf_counter()
    where, status, told = attempt(fault, copy, thorough)
    seconds = round(time.perf_counter() - start, 1)
    return Outcome(fault.name, fault.package, status, seconds, where, told)


def attempt(fault: Fault, copy: Path, thorough: bool) -> tuple[str, str, str]:
    """Place, status and what was told of a fault."""
    place, files = find(fault, copy), tests_of(fault, copy)
    if isinstance(place, str):
        return "", STALE, place
    where = f"{place.file}:{place.line}"
    try:
        ast.parse(place.text)
    except SyntaxError as problem:
        return where, STALE, f"the replacement is no Python: {problem}"
    if not files:
        return where, STALE, f"no test file has one of {', '.join(fault.tests)} in its path"
    with planted(place, copy):
        status, told = run_tests(copy, *QUICK, place.file, *files)
        if status == SURVIVED:
            status, told = run_tests(copy, *SLOW, *files)
        if status == SURVIVED and thorough:
            status, told = run_tests(copy, *QUICK, "tests")
    return where, status, told


def try_all(faults: list[Fault], root: Path, jobs: int, thorough: bool) -> Iterator[Outcome]:
    """Outcomes in the order of the faults, as soon as they are there."""
    with ExitStack() as stack:
        copies: queue.SimpleQueue[Path] = queue.SimpleQueue()
        for _ in range(jobs):
            copies.put(stack.enter_context(copied(root)))
        first = copies.get()
        check_copy(first)
        copies.put(first)

        def work(fault: Fault) -> Outcome:
            copy = copies.get()
            try:
                return tried(fault, copy, thorough)
            finally:
                copies.put(copy)

        yield from stack.enter_context(ThreadPoolExecutor(jobs)).map(work, faults)


def checked(outcomes: list[Outcome], root: Path) -> list[Outcome]:
    """The outcomes, where a test that fails without any fault as well has caught nothing."""
    tests = sorted({outcome.told for outcome in outcomes if outcome.status == CAUGHT})
    if not tests:
        return outcomes
    with copied(root) as copy:
        done = pytest(copy, *tests, limit=10 * LIMIT).stdout
    red = {test for test in tests if re.search(rf"^(FAILED|ERROR) {re.escape(test)}", done, re.M)}
    return [replace(one, status=RED) if one.told in red else one for one in outcomes]


def chosen(names: list[str] | None, package: str | None) -> list[Fault]:
    """Those asked for; all of them unless names or a package are given."""
    known, packages = {fault.name for fault in FAULTS}, {fault.package for fault in FAULTS}
    unknown = sorted({*(names or known)} - known) + sorted({package or min(packages)} - packages)
    if unknown:
        raise SystemExit(f"there is no fault or package {', '.join(unknown)}: see FAULTS")
    return [
        fault
        for fault in FAULTS
        if (not names or fault.name in names) and package in (None, fault.package)
    ]


def line(outcome: Outcome) -> str:
    front = f"{outcome.name:<34} {outcome.package:<11} {outcome.status:<8} {outcome.seconds:6.1f} s"
    return f"{front}  {outcome.told or outcome.where}"


def summary(outcomes: list[Outcome]) -> str:
    counts = Counter(outcome.status for outcome in outcomes)
    each = ", ".join(f"{counts[status]} {status}" for status in sorted(counts))
    total = sum(outcome.seconds for outcome in outcomes)
    return f"{len(outcomes)} faults: {each}; {total / 60:.1f} minutes of tests"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    here = Path(__file__).resolve().parents[1]
    parser.add_argument("--root", type=Path, default=here, metavar="DIR", help="Checkout to try.")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="Faults to plant.")
    parser.add_argument("--package", metavar="NAME", help="Plant those of one package.")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="Faults at a time.")
    parser.add_argument(
        "--thorough", action="store_true", help="Try survivors against all quick tests."
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the outcomes there too.")
    return parser.parse_args()


def main() -> int:
    given = parsed()
    faults, root = chosen(given.only, given.package), given.root.resolve()
    outcomes = []
    for outcome in try_all(faults, root, given.jobs, given.thorough):
        outcomes.append(outcome)
        print(line(outcome), flush=True)
    outcomes = checked(outcomes, root)
    for outcome in outcomes:
        if outcome.status in (SURVIVED, RED):
            print(f"{outcome.status}: {outcome.name}, {outcome.where}")
    print(summary(outcomes))
    if given.json:
        given.json.write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    return int(any(outcome.status != CAUGHT for outcome in outcomes))


FAULTS = (
    # What everything stands on: bins, checks, the walk over rows, solvers, the partition table.
    Fault(
        "bin-edge-side",
        "core",
        'np.searchsorted(edges, confidence, side="left") - 1',
        'np.searchsorted(edges, confidence, side="right") - 1',
        ("/test_binning.py", "core/test_binning", "metrics/test_binned"),
    ),
    Fault(
        "equal-mass-weights-unsorted",
        "core",
        "if weight is None else weight[order])",
        "if weight is None else weight)",
        ("/test_binning.py", "core/test_binning", "metrics/test_binned"),
        within="equal_mass_edges",
    ),
    Fault(
        "spread-with-plain-weights",
        "core",
        "total((weights * (confidence - outcome)) ** 2)",
        "total(weights * (confidence - outcome) ** 2)",
        ("/test_binning.py", "core/test_binning", "metrics/test_binned", "test_intervals"),
    ),
    Fault(
        "label-beyond-last-class",
        "core",
        "((labels < 0) | (labels >= classes)) & (labels != IGNORED)",
        "((labels < 0) | (labels > classes)) & (labels != IGNORED)",
        ("test_checks",),
    ),
    Fault(
        "level-up-to-one",
        "core",
        "if not 0 < level <= 0.99:",
        "if not 0 < level <= 1:",
        ("test_checks", "test_intervals"),
    ),
    Fault(
        "zero-weight-still-there",
        "core",
        "flat = np.where(weights > 0, targets.reshape(-1), IGNORED)",
        "flat = targets.reshape(-1)",
        ("/test_common.py", "metrics/test_common", "test_checks"),
    ),
    Fault(
        "probs-sum-tolerance",
        "core",
        "tolerance = max(1e-4, 4 * eps)",
        "tolerance = max(1e-2, 4 * eps)",
        ("test_checks", "/test_decide.py", "decide/test_conformal"),
    ),
    Fault(
        "weights-beside-ignored-labels",
        "core",
        ("torch.from_numpy(given.weight[number])", "torch.from_numpy(examples.weight[number])"),
        (
            "torch.from_numpy(given.weight[first : first + len(block)])",
            "torch.from_numpy(examples.weight[first : first + len(chunk)])",
        ),
        ("/test_rows.py", "metrics/test_reductions", "test_partition", "core/test_logpartition"),
    ),
    Fault(
        "slice-starts-too-early",
        "core",
        "rows[max(0, start - at) : stop - at]",
        "rows[: stop - at]",
        ("core/test_chunks",),
    ),
    Fault(
        "adam-uncorrected-square",
        "core",
        "math.sqrt(1 - 0.999**step) / (1 - 0.9**step)",
        "(1 - 0.999**step) / (1 - 0.9**step)",
        ("solve",),
    ),
    Fault(
        "bracket-without-left-cell",
        "core",
        "left, right = grid[max(best - 1, 0)]",
        "left, right = grid[best]",
        ("solve",),
    ),
    Fault(
        "inner-deadline-outlasts-outer",
        "core",
        "min(ends, _DEADLINE.get())",
        "ends",
        ("solve",),
    ),
    Fault(
        "probabilities-through-logarithms",
        "metrics",
        "stated = examples.stated(chunk.number)",
        "stated = None",
        ("metrics/test_reductions",),
    ),
    Fault(
        "subgroups-through-logarithms",
        "metrics",
        'domain, scores = "probs", examples.probs',
        'domain, scores = "logits", examples.logits',
        ("metrics/test_reductions",),
    ),
    Fault(
        "autocast-rounds-predictions",
        "calibrators",
        "if rounds():",
        "if False:",
        ("calibrators/test_common",),
    ),
    Fault(
        "autocast-rounds-fits",
        "_core",
        "stack.enter_context(torch.autocast(kind, enabled=False))",
        "stack.enter_context(torch.autocast(kind, enabled=True))",
        ("calibrators/test_common",),
    ),
    Fault(
        "half-rounds-learned-values",
        "calibrators",
        "return result if result.dtype == value.dtype else value.to(result.device)",
        "return result",
        ("calibrators/test_common",),
    ),
    Fault(
        "huge-negative-numbers-are-logits",
        "_core",
        "if _spread(chunk) >= (gap := mask_gap(values)):",
        "if _spread(chunk) == (gap := mask_gap(values)):",
        ("core/test_chunks", "calibrators/test_common"),
    ),
    Fault(
        "masks-of-half-precision-are-logits",
        "_core",
        "min(MASKED_GAP, float(checks.float_info(logits).max) / 2)",
        "MASKED_GAP",
        ("core/test_chunks", "calibrators/test_common"),
    ),
    Fault(
        "corrections-without-proof",
        "calibrators",
        "return self.gain > CLEAR * self.error",
        "return self.gain > 0",
        ("test_multicalibration",),
    ),
    Fault(
        "held-out-examples-are-seen",
        "calibrators",
        "weight[part] = 0",
        "weight[part] *= 1",
        ("test_multicalibration",),
    ),
    Fault(
        "stale-prediction-of-trees",
        "calibrators",
        "self.codes[-1] = last.codes(self.predictions.odds(self.correction))",
        "self.codes[-1] = last.codes(self.predictions.odds(0 * self.correction))",
        ("test_multicalibration",),
    ),
    Fault(
        "missing-numbers-go-left",
        "calibrators",
        "(high > missing).astype(np.int64)",
        "(high < 0).astype(np.int64)",
        ("test_multicalibration",),
    ),
    Fault(
        "groups-of-corrections-ignored",
        "calibrators",
        "off = np.bincount(np.unique(groups, return_inverse=True)[1].reshape(-1), off)",
        "off = off + 0",
        ("test_multicalibration",),
    ),
    Fault(
        "leaves-without-penalty",
        "calibrators",
        "step = -totals[:outputs] / (totals[outputs:-1] + self.penalty)",
        "step = -totals[:outputs] / (totals[outputs:-1] + 1e-9)",
        ("test_multicalibration",),
    ),
    Fault(
        "metadata-of-all-rows",
        "calibrators",
        "return feature_rows({name: columns[name] for name in self.input_columns}, rows)",
        "return {name: columns[name] for name in self.input_columns}",
        ("test_metadata",),
    ),
    Fault(
        "masks-only-in-fits",
        "calibrators",
        "return with_masks(wide, mask_gap(logits))",
        "return wide",
        ("calibrators/test_common",),
    ),
    Fault(
        "masked-classes-possible",
        "core",
        "possible -= masked.sum(-1)",
        "possible -= 0",
        ("test_partition", "core/test_logpartition"),
    ),
    Fault(
        "leading-gaps-of-groups-only",
        "core",
        "torch.cat([candidates, values[:, 16 * groups :]], -1)",
        "candidates",
        ("test_partition", "core/test_logpartition"),
    ),
    Fault(
        "stale-polynomials",
        "core",
        "np.flatnonzero(first != self.first)",
        "np.flatnonzero(first > self.first)",
        ("test_partition", "core/test_logpartition"),
    ),
    Fault(
        "slope-of-rest-for-partition",
        "core",
        "Curve(value, share * slope)",
        "Curve(value, slope)",
        ("test_partition", "core/test_logpartition"),
    ),
    Fault(
        "hook-hears-other-threads",
        "core",
        "if threading.get_ident() == here:",
        "if here:",
        ("/test_deploy.py", "deploy/test_attach", "deploy/test_collect"),
    ),
    # Prediction files.
    Fault(
        "killed-worker-loses-its-shard",
        "_core",
        "for call in calls[i + len(waiting) : i + ahead]:",
        "for call in calls[i + len(waiting) + failures : i + ahead + failures]:",
        ("core/test_engines",),
    ),
    Fault(
        "blame-while-others-run",
        "_core",
        "ahead = 1 if failures else AHEAD * self.workers + 1",
        "ahead = len(calls)",
        ("core/test_engines",),
    ),
    Fault(
        "sample-by-chunk",
        "_core",
        "rows = np.arange(first, first + count, dtype=np.uint64)",
        "rows = np.arange(count, dtype=np.uint64)",
        ("workflows/test_large",),
    ),
    Fault(
        "halves-overlap",
        "workflows",
        "Sample(0.5, seed, start=0.5)",
        "Sample(0.5, seed)",
        ("workflows/test_large",),
    ),
    Fault(
        "records-of-all-rows-compared",
        "workflows",
        "return is_large(split) or _rows(split) > records.MOST",
        "return is_large(split)",
        ("workflows/test_large",),
    ),
    Fault(
        "patience-of-all-looks-together",
        "_core",
        "seen = time.monotonic()\n            elif",
        "pass\n            elif",
        ("core/test_cluster",),
    ),
    Fault(
        "bad-window-ends-the-monitor",
        "cli",
        "if bad == len(paths):",
        "if bad:",
        ("workflows/test_shards",),
    ),
    Fault(
        "reference-of-the-last-shard",
        "monitor",
        "total = sum(work, start=Bins.empty(uniform_edges(bins)))",
        "*_, total = work",
        ("monitor/test_reference",),
    ),
    Fault(
        "bad-shard-counted-in-part",
        "workflows",
        "return _without(dataset, skipped)",
        "return dataset",
        ("workflows/test_shards",),
        within="open_good_shards",
    ),
    Fault(
        "changed-input-kept",
        "workflows",
        "_place(c.path): c.fingerprint for",
        "_place(c.path): None for",
        ("workflows/test_apply_shards",),
    ),
    Fault(
        "half-written-output-kept",
        "workflows",
        'whole = self.out.stamp(self.name) == known["output"]',
        "whole = True",
        ("workflows/test_apply_shards",),
    ),
    Fault(
        "every-rank-takes-every-shard",
        "deploy",
        "jobs[rank::ranks]",
        "jobs",
        ("deploy/test_collect_shards",),
    ),
    Fault(
        "layer-not-in-the-receipt",
        "deploy",
        "json.dumps([self.fingerprint, self.inputs, self.labels, self.last_layer])",
        "json.dumps([self.fingerprint, self.inputs, self.labels])",
        ("deploy/test_collect_shards",),
    ),
    Fault(
        "worker-with-other-weights",
        "deploy",
        "if model.fingerprint != self.fingerprint:",
        "if not model.fingerprint:",
        ("deploy/test_collect_shards",),
    ),
    Fault(
        "threads-load-models-of-their-own",
        "deploy",
        "    with _LOADING:  # new weights",
        "    with RLock():  # new weights",
        ("deploy/test_collect_shards",),
    ),
    Fault(
        "promised-estimates-crossed-out",
        "display",
        "if not finite(window.value) or finite(window.low):",
        "if not finite(window.value):",
        ("display/test_svg",),
    ),
    Fault(
        "withdrawn-estimates-not-drawn",
        "plots",
        "withdrawn = {i: share for i, share in shares.items() if math.isnan(share.low)}",
        "withdrawn = {}",
        ("plots/test_drift",),
    ),
    Fault(
        "missing-whole-numbers-become-any-number",
        "data",
        "if not np.can_cast(chunk.dtype, whole.dtype):",
        "if False:",
        ("data/test_formats",),
    ),
    Fault(
        "missing-probabilities-are-read",
        "data",
        "reader.optional &= {*layout.others}",
        "reader.optional &= {*headers}",
        ("data/test_formats",),
    ),
    Fault(
        "threads-share-their-place-in-a-file",
        "data",
        "stream, threading.Lock(), threading.local()",
        "stream, threading.Lock(), threading.Event()",
        ("data/test_formats",),
    ),
    Fault(
        "luck-beyond-all-draws-proves-no-error",
        "metrics",
        "shown = max(observed, luckiest) + slack",
        "shown = observed + slack",
        ("metrics/test_intervals",),
    ),
    Fault(
        "losses-below-zero",
        "metrics",
        "return Estimate(value, max(low, 0.0), high)",
        "return Estimate(value, low, high)",
        ("metrics/test_intervals",),
    ),
    Fault(
        "one-token-shown-is-certain",
        "llm",
        "true, false = (found or missing for found in sums.values())",
        "true, false = sums.values()",
        ("llm/endpoints/test_plans",),
    ),
    Fault(
        "text-labels-by-first-appearance",
        "deploy",
        "ClassNumbers(names or [str(i) for i in range(classes)])(values)",
        "np.unique(values, return_inverse=True)[1]",
        ("deploy/test_collect_shards",),
    ),
    Fault(
        "missing-scores-take-those-of-others",
        "deploy",
        "places = pa.array(np.cumsum(valid) - 1, mask=~valid)",
        "places = pa.array(np.arange(len(valid)) % valid.sum())",
        ("deploy/test_dataframes",),
    ),
    Fault(
        "features-of-rows-without-scores",
        "deploy",
        "inputs = feature_rows(features, slice(start, start + rows))",
        "inputs = feature_rows(features, np.arange(len(chunk))[::-1])",
        ("deploy/test_dataframes",),
    ),
    Fault(
        "table-of-a-changed-shard",
        "data",
        "return [path, column.key, list(column.fingerprint or ())]",
        "return [path, column.key]",
        ("workflows/test_large",),
    ),
    Fault(
        "changed-object-not-noticed",
        "data",
        'return 0, int(files.info(place)["size"]), int(files.ukey(place), 16)',
        'return 0, int(files.info(place)["size"]), 0',
        ("data/test_storage",),
    ),
    Fault(
        "last-shard-alone-is-summed",
        "workflows",
        "return [a + b for a, b in zip(total, more, strict=True)]",
        "return list(more)",
        ("workflows/test_large",),
    ),
    Fault(
        "changes-of-one-shard-only",
        "workflows",
        "self.changed += other.changed",
        "self.changed = other.changed",
        ("workflows/test_shards",),
    ),
    Fault(
        "shards-in-text-order",
        "data",
        " if i % 2 else ",
        " if i % 2 > 1 else ",
        ("/test_data.py", "data/test_formats", "data/test_files", "data/test_dataset"),
    ),
    Fault(
        "truncated-array-accepted",
        "data",
        "if size < needed and not dtype.hasobject:",
        "if size < 0 and not dtype.hasobject:",
        ("/test_data.py", "data/test_formats", "data/test_files", "data/test_dataset"),
    ),
    Fault(
        "checksum-not-reached",
        "data",
        ".read(1)",
        ".read(0)",
        ("/test_data.py", "data/test_formats", "data/test_files", "data/test_dataset"),
    ),
    Fault(
        "ragged-parquet-rows-accepted",
        "data",
        "if (lengths != header.shape[1]).any():",
        "if False:",
        ("/test_data.py", "data/test_formats", "data/test_files", "data/test_dataset"),
    ),
    Fault(
        "file-written-in-place",
        "data",
        "os.replace(temporary, target)",
        "target.write_bytes(temporary.read_bytes())",
        ("/test_data.py", "data/test_formats", "data/test_files", "data/test_dataset"),
        within="replacing",
    ),
    Fault(
        "fortran-order-ignored",
        "data",
        "if fortran:",
        "if False:",
        ("/test_data.py", "data/test_formats", "data/test_files", "data/test_dataset"),
    ),
    Fault(
        "labels-without-scores-skipped",
        "data",
        "if orphaned or not (splits or head_columns(arrays) or CLASS_NAMES in arrays):",
        "if not (splits or head_columns(arrays) or CLASS_NAMES in arrays):",
        ("data/test_dataset",),
    ),
    Fault(
        "file-of-no-use-skipped",
        "data",
        "if orphaned or not (splits or head_columns(arrays) or CLASS_NAMES in arrays):",
        "if orphaned:",
        ("data/test_dataset",),
    ),
    Fault(
        "folder-in-place-of-a-shard-skipped",
        "data",
        "(p for p in paths if p.suffix.lower() in formats)",
        "(p for p in paths if p.suffix in formats and p.is_file())",
        ("data/test_dataset",),
    ),
    Fault(
        "missing-shard-of-a-series",
        "data",
        "if not storage.exists(shard):",
        "if False:",
        ("data/test_dataset",),
    ),
    Fault(
        "single-values-not-copied",
        "workflows",
        "if (column.path, column.key) not in known and key not in (",
        "if column.shape and (column.path, column.key) not in known and key not in (",
        ("workflows/test_apply",),
    ),
    Fault(
        "first-of-differing-values-copied",
        "workflows",
        "if read_all([column]).tobytes() != values.tobytes():",
        "if False:",
        ("workflows/test_apply",),
    ),
    Fault(
        "parquet-types-as-text",
        "workflows",
        "if (values := joined(stored)) is not None:",
        "if (values := joined(stored)) is not None and columns[0].exact:",
        ("workflows/test_apply",),
    ),
    Fault(
        "dates-copied-as-text",
        "workflows",
        "if not all(column.exact for column in columns):",
        "if False:",
        ("workflows/test_apply",),
    ),
    Fault(
        "text-cut-at-nul",
        "data",
        'if values.dtype.kind in "US":',
        "if False:",
        ("workflows/test_apply",),
    ),
    Fault(
        "trailing-nul-lost",
        "data",
        "header.exact and flat.tolist() != texts:",
        "False:",
        ("workflows/test_apply",),
    ),
    Fault(
        "csv-missing-value-passes",
        "data",
        'if np.isnan(values).any() or "_" in "".join(fields):',
        'if "_" in "".join(fields):',
        ("data/test_csv_files",),
    ),
    Fault(
        "csv-underscore-in-a-number",
        "data",
        'if np.isnan(values).any() or "_" in "".join(fields):',
        "if np.isnan(values).any():",
        ("data/test_csv_files",),
    ),
    Fault(
        "csv-longer-line-read",
        "data",
        "if len(row) != width:",
        "if len(row) < width:",
        ("data/test_csv_files",),
    ),
    Fault(
        "csv-endless-line-held",
        "data",
        "if len(line) == LONGEST_LINE:",
        "if False:",
        ("data/test_csv_files",),
    ),
    Fault(
        "csv-quotes-repaired",
        "data",
        "delimiter=self._delimiter, strict=True",
        "delimiter=self._delimiter",
        ("data/test_csv_files",),
    ),
    Fault(
        "csv-replaced-while-read",
        "data",
        "if fingerprint(self.path, stream) != self.fingerprint:",
        "if False:",
        ("data/test_csv_files",),
    ),
    Fault(
        "classes-in-the-order-of-text",
        "data",
        "return sorted(names, key=int) if numbers else names",
        "return sorted(names) if numbers else names",
        ("data/test_tables",),
    ),
    Fault(
        "rows-of-all-splits",
        "data",
        "yield values if layout.split is None else values[self._splits(batch) == split]",
        "yield values",
        ("data/test_tables",),
    ),
    Fault(
        "numbers-of-classes-are-labels",
        "_core",
        "numbered = {int(name): i for i, name in enumerate(names)} or {0: 0, 1: 1}",
        "numbered = {i: i for i in range(len(names) or 2)}",
        ("core/test_class_names",),
    ),
    Fault(
        "label-of-no-class-ignored",
        "_core",
        "if number not in self._numbered:",
        "if number > len(self._numbered):",
        ("core/test_class_names",),
    ),
    Fault(
        "order-of-labels-unchecked",
        "_core",
        "if not first.equals(second) and first.sort_values().equals(second.sort_values()):",
        "if False:",
        ("core/test_class_names",),
    ),
    Fault(
        "further-columns-as-classes",
        "_core",
        "if len(parts) < len(names) or len({part.domain for part in parts}) > 1:",
        "if False:",
        ("core/test_class_names",),
    ),
    Fault(
        "classes-of-shards-in-any-order",
        "data",
        "if names[-1] != names[0]:",
        "if False:",
        ("data/test_tables",),
    ),
    Fault(
        "pickle-of-torch-run",
        "data",
        "weights_only=True, mmap=True",
        "weights_only=False, mmap=True",
        ("data/test_torch_files",),
    ),
    Fault(
        "repeated-bytes-read",
        "data",
        "if tensor.numel() * tensor.element_size() > stored:",
        "if False:",
        ("data/test_torch_files",),
    ),
    Fault(
        "split-of-arrays-ignored",
        "workflows",
        "_check_arrays(split, by=by, sample_weight=sample_weight)",
        "_check_arrays(None, by=by, sample_weight=sample_weight)",
        ("workflows/test_evaluate",),
    ),
    Fault(
        "shuffled-labels-unnoticed",
        "metrics",
        "if accuracy <= guessing + noise and confidence >= accuracy + 0.2:",
        "if False:",
        ("metrics/test_hints",),
    ),
    Fault(
        "constant-probability-suspected",
        "metrics",
        " <= 0.1 and _spread(bins) >= 0.15:",
        " <= 0.1:",
        ("metrics/test_hints",),
    ),
    Fault(
        "bins-without-limit",
        "_core",
        "if bins > MOST_BINS:",
        "if False:",
        ("workflows/test_evaluate",),
    ),
    Fault(
        "state-not-locked",
        "monitor",
        "locked(Path(state).resolve()) if state is not None and files else nullcontext(),",
        "nullcontext(),",
        ("cli/test_monitor",),
    ),
    Fault(
        "lock-not-taken",
        "core",
        "fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        ("core/test_atomic_files",),
    ),
    Fault(
        "file-known-by-its-name",
        "monitor",
        "return early or content in self._files",
        "return early or content + window.name in self._files",
        ("monitor/test_stream", "cli/test_monitor"),
    ),
    Fault(
        "file-known-by-its-sums",
        "monitor",
        "logits.update(np.ascontiguousarray(chunk.logits).data)",
        "pass",
        ("monitor/test_stream",),
    ),
    Fault(
        "class-wise-tables-of-any-size",
        "metrics",
        "if self._all and classes * bins > MOST_CELLS:",
        "if False:",
        ("workflows/test_evaluate",),
    ),
    Fault(
        "raw-text-in-tables",
        "cli",
        "super().render_str(printable(text), **options)",
        "super().render_str(text, **options)",
        ("cli/test_hostile",),
    ),
    Fault(
        "raw-text-in-messages",
        "cli",
        "click.echo(printable(text), err=True)",
        "click.echo(text, err=True)",
        ("cli/test_hostile",),
    ),
    Fault(
        "raw-text-in-usage-errors",
        "cli",
        "problem.message = printable(problem.message)  # type: ignore[misc]",
        "pass",
        ("cli/test_hostile",),
    ),
    Fault(
        "raw-file-names-in-errors",
        "data",
        'raise kind(printable(f"{where}: {problem}")) from problem',
        'raise kind(f"{where}: {problem}") from problem',
        ("cli/test_hostile",),
    ),
    Fault(
        "halves-of-characters-in-states",
        "monitor",
        """name = printable(name or (f"{chosen.path}, {chosen.name}" if split else chosen.path))""",
        """name = name or (f"{chosen.path}, {chosen.name}" if split else chosen.path)""",
        ("cli/test_hostile",),
    ),
    Fault(
        "exit-code-lost-with-the-reader-of-messages",
        "cli",
        "    except OSError:\n        _discard(sys.stderr)",
        "    except ZeroDivisionError:\n        _discard(sys.stderr)",
        ("cli/test_main",),
    ),
    Fault(
        "figures-cut-on-narrow-terminals",
        "cli",
        "console.width = max(console.width, NARROWEST)",
        "pass",
        ("cli/test_main",),
    ),
    Fault(
        "ascii-streams-break-off",
        "cli",
        'sys.stdout.reconfigure(errors="backslashreplace")',
        "pass",
        ("cli/test_main",),
    ),
    Fault(
        "package-unknown-to-type-checkers",
        "core",
        "        retrain as retrain,\n",
        "",
        ("/test_package",),
    ),
    Fault(
        "one-hot-labels-without-remedy",
        "core",
        'elif "float" in kind and array.ndim > 1 and bool((array.sum(-1) == 1).all()):',
        "elif False:",
        ("core/test_checks",),
    ),
    Fault(
        "every-large-label-counts-from-one",
        "core",
        "from_one = known.min() == 1 and known.max() == classes",
        "from_one = True",
        ("core/test_checks",),
    ),
    Fault(
        "predictions-taken-for-an-artifact",
        "artifacts",
        "if formats.holds_predictions(content):",
        "if False:",
        ("artifacts/test_refusals",),
    ),
    Fault(
        "progress-of-last-block-only",
        "shards",
        "done += count",
        "done = count",
        ("/test_files.py", "data/test_shards", "workflows/test_evaluate"),
        within="report",
    ),
    Fault(
        "threads-of-workers-unbounded",
        "shards",
        "if os.getpid() != home:",
        "if os.getpid() == home:",
        ("core/test_engines",),
    ),
    # Metrics.
    Fault(
        "two-classes-by-top-label",
        "metrics",
        'return "binary" if classes == 2 else "top_label"',
        'return "binary" if classes == 1 else "top_label"',
        ("metrics/test_two_classes",),
    ),
    Fault(
        "two-classes-ranked-by-event",
        "metrics",
        "answers = Pairs(reduced.top, reduced.correct) if ranked else None",
        "answers = None",
        ("metrics/test_two_classes",),
    ),
    Fault(
        "answers-of-two-classes-by-event",
        "metrics",
        'return pairs_from(logits, labels, estimand="top_label", **data)',
        "return pairs_from(logits, labels, **data)",
        ("metrics/test_two_classes",),
    ),
    Fault(
        "verdict-at-other-side",
        "metrics",
        "if p < 0.05:",
        "if p > 0.05:",
        ("/test_common.py", "metrics/test_evaluation", "metrics/test_common"),
    ),
    Fault(
        "ks-one-sided",
        "metrics",
        (
            "np.abs(np.cumsum(residual)).max()",
            "running(residuals(pairs_from(logits, labels, **data))[1])",
        ),
        (
            "np.cumsum(residual).max()",
            "np.cumsum(residuals(pairs_from(logits, labels, **data))[1]).max()",
        ),
        ("test_peers", "/test_common.py", "metrics/test_smooth"),
    ),
    Fault(
        "smooth-ece-wider-kernel",
        "metrics",
        "frequency = (np.pi * np.arange(cells)) ** 2 / 2",
        "frequency = (np.pi * np.arange(cells)) ** 2",
        ("test_peers", "/test_common.py", "metrics/test_smooth"),
    ),
    Fault(
        "residuals-unsorted",
        "metrics",
        (
            'order = np.argsort(claimed, kind="stable")',
            'order = np.argsort(pairs.confidence, kind="stable")',
        ),
        ("order = np.arange(claimed.size)", "order = np.arange(pairs.confidence.size)"),
        ("test_peers", "/test_common.py", "metrics/test_smooth"),
        within="residuals",
    ),
    Fault(
        "operators-in-place-stay-imprecise",
        "deploy",
        '.split(".")[0].rstrip("_")',
        '.split(".")[0]',
        ("deploy/test_export.py",),
    ),
    Fault(
        "smooth-ece-compared-at-half-the-width",
        "metrics",
        "(np.array([bound])) - bound",
        "(np.array([bound / 2])) - bound",
        ("metrics/test_smooth",),
    ),
    Fault(
        "smce-compared-without-signs",
        "metrics",
        "np.abs(residual.sum(-1)) - bound",
        "np.abs(residual).sum(-1) - bound",
        ("metrics/test_smooth",),
    ),
    Fault(
        "upper-end-without-constant-gaps",
        "metrics",
        "return bool(excess(each.gaps(scale)[None], least)[0] > 0)",
        "return bool(excess(each.gaps(scale)[None], 2 * least)[0] > 0)",
        ("metrics/test_intervals",),
    ),
    Fault(
        "smce-half-rise",
        "metrics",
        "rise[rank] = 2 * step",
        "rise[rank] = step",
        ("test_peers", "/test_common.py", "metrics/test_smooth"),
    ),
    Fault(
        "one-sided-normal-interval",
        "metrics",
        "reach = float(ndtri((1 + level) / 2)) * deviation",
        "reach = float(ndtri(level)) * deviation",
        ("intervals",),
        within="mean_interval",
    ),
    Fault(
        "wilson-without-square",
        "metrics",
        "z2 / (4 * count**2)",
        "z2 / (4 * count)",
        ("intervals",),
    ),
    Fault(
        "test-without-plus-one",
        "metrics",
        "(1 + reached) / (1 + replicates)",
        "reached / replicates",
        ("intervals",),
    ),
    Fault(
        "interval-with-one-tail",
        "metrics",
        "rarely = max(share(calibrated <= shown) * alpha / 2, fewest)",
        "rarely = max(share(calibrated <= shown) * alpha * 2, fewest)",
        ("intervals",),
    ),
    Fault(
        "draws-begin-anew-with-each-run",
        "metrics",
        "hits = draws.rng.binomial(trials, right)",
        "hits = np.random.default_rng(self.seed).binomial(trials, right)",
        ("intervals",),
    ),
    Fault(
        "bin-without-errors-has-no-noise",
        "metrics",
        "likely = (accuracy * size + 0.5) / (size + 1)",
        "likely = accuracy",
        ("intervals",),
    ),
    Fault(
        "merge-forgets-own-scores",
        "metrics",
        "self.moments += other.moments",
        "self.moments = other.moments",
        ("/test_stream.py", "metrics/test_accumulator"),
    ),
    Fault(
        "groups-without-weights",
        "metrics",
        "part = None if weights is None else weights[where]",
        "part = None",
        ("/test_stream.py", "metrics/test_accumulator"),
    ),
    Fault(
        "merge-forgets-floored",
        "metrics",
        "self.floored += other.floored",
        "self.floored += 0",
        ("/test_files.py", "metrics/test_accumulator", "workflows/test_evaluate"),
        within="Accumulator",
    ),
    Fault(
        "classwise-labels-unweighted",
        "metrics",
        "self.observed[:, 0].index_add_(0, labels, weights)",
        "self.observed[:, 0].index_add_(0, labels, torch.ones_like(weights))",
        ("/test_common.py", "metrics/test_common", "metrics/test_binned", "test_peers"),
    ),
    Fault(
        "weights-are-counts",
        "calibrators",
        "check_examples(logits, labels, sample_weight, estimand).scale_free()",
        "check_examples(logits, labels, sample_weight, estimand)",
        ("calibrators/test_common",),
    ),
    Fault(
        "weights-of-records-are-counts",
        "calibrators",
        "self._fit_records(records.scale_free())",
        "self._fit_records(records)",
        ("calibrators/test_top_label",),
    ),
    Fault(
        "subgroups-counted-by-batch",
        "metrics",
        "_check_subgroups({*known, *map(str, names)})",
        "_check_subgroups({*map(str, names)})",
        ("metrics/test_evaluation",),
    ),
    Fault(
        "probabilities-as-logits-without-a-word",
        "metrics",
        "checks.warn_of_probs(examples.logits, remedy)",
        "pass",
        ("metrics/test_reductions",),
    ),
    Fault(
        "zeros-of-other-classes-are-told-of",
        "metrics",
        "return int((probs[np.arange(len(probs)), examples.labels[labelled]] <= 0).sum())",
        "return int((probs <= 0).sum())",
        ("metrics/test_reductions",),
    ),
    Fault(
        "default-dtype-of-the-caller",
        "_core",
        "torch.set_default_dtype(torch.float32)",
        "pass",
        ("calibrators/test_common",),
    ),
    Fault(
        "errors-of-numpy-for-underflow",
        "metrics",
        'checks.warnings_at_caller()(np.errstate(under="ignore")(function))',
        "checks.warnings_at_caller()(function)",
        ("metrics/test_common",),
    ),
    Fault(
        "parquet-without-checksums",
        "data",
        ", write_page_checksum=True",
        "",
        ("data/test_formats",),
    ),
    Fault(
        "checksums-of-parquet-not-compared",
        "data",
        "page_checksum_verification=True",
        "page_checksum_verification=False",
        ("data/test_formats",),
    ),
    Fault(
        "one-window-for-all-confidences",
        "metrics",
        "zip(grid, widths, strict=True)",
        "zip(grid, np.full(grid.size, 0.3), strict=True)",
        ("metrics/test_curves",),
    ),
    Fault(
        "local-means-for-parabolas",
        "metrics",
        "distance[:, None] ** np.arange(3)",
        "distance[:, None] ** np.arange(1)",
        ("metrics/test_curves",),
    ),
    Fault(
        "classes-vary-apart",
        "metrics",
        "common @ self.covariance @ common + bend",
        "bend",
        ("metrics/test_intervals",),
    ),
    Fault(
        "two-classes-vary-apart",
        "metrics",
        " + bend @ squared @ bend / 2",
        "",
        ("metrics/test_intervals",),
    ),
    Fault(
        "lower-ends-too-high",
        "metrics",
        "lambda share: share >= tail)",
        "lambda share: share >= 4 * tail)",
        ("metrics/test_intervals",),
    ),
    Fault(
        "class-wise-error-at-its-upper-end",
        "metrics",
        "max(cells.error(high), value + reach)",
        "max(cells.error(high), value)",
        ("metrics/test_intervals",),
    ),
    Fault(
        "class-wise-interval-by-batches",
        "metrics",
        "self.products += flat.T @ flat",
        "self.products.copy_(flat.T @ flat)",
        ("metrics/test_accumulator",),
    ),
    Fault(
        "prevalence-is-mean",
        "metrics",
        'counted if average == "mean" else counted * self.labelled',
        "counted",
        ("test_peers", "/test_traps.py", "metrics/test_binned"),
    ),
    Fault(
        "ties-count-fully",
        "metrics",
        "np.cumsum(per_group) - per_group / 2",
        "np.cumsum(per_group) - per_group",
        ("test_peers", "metrics/test_ranking"),
    ),
    Fault(
        "fpr95-strict-threshold",
        "metrics",
        "(strange >= threshold).mean()",
        "(strange > threshold).mean()",
        ("test_peers", "metrics/test_ranking"),
    ),
    Fault(
        "later-rows-summed-forwards",
        "metrics",
        "np.cumsum(values[::-1])[::-1]",
        "np.cumsum(values)",
        ("test_intervals", "metrics/test_ranking"),
    ),
    Fault(
        "risk-unweighted",
        "metrics",
        "np.cumsum(np.bincount(group, mass * (1 - happened)))",
        "np.cumsum(np.bincount(group, 1 - happened))",
        ("/test_curves.py", "metrics/test_curves", "metrics/test_ranking"),
    ),
    Fault(
        "beta-quantile-without-one",
        "metrics",
        "betaincinv(hits, size - hits + 1, tail)",
        "betaincinv(hits, size - hits, tail)",
        ("/test_curves.py", "metrics/test_curves"),
    ),
    Fault(
        "margin-groups-unsorted",
        "metrics",
        'np.argsort(margin, kind="stable")\n',
        "np.arange(margin.size)\n",
        ("/test_curves.py", "metrics/test_curves"),
    ),
    Fault(
        "rounding-of-any-size",
        "core",
        "min(rows.shape[-1] * unit / 2, MOST_ROUNDING)",
        "rows.shape[-1] * unit / 2",
        ("core/test_checks",),
    ),
    Fault(
        "features-in-order-of-columns",
        "data",
        "[str(i) for i in range(len(features))]",
        "list(features)",
        ("data/test_tables",),
    ),
    Fault(
        "stream-silent-about-probabilities",
        "metrics",
        "first = not self.moments.count",
        "first = False",
        ("metrics/test_accumulator",),
    ),
    Fault(
        "band-of-one-example",
        "metrics",
        "worth = 1 / (weights**2 @ variance)",
        "worth = 1 / (weights @ variance)",
        ("/test_curves.py", "metrics/test_curves"),
    ),
    Fault(
        "deviation-sign",
        "metrics",
        "second - 2 * mean * first + mean**2 * zeroth",
        "second - 2 * mean * first - mean**2 * zeroth",
        ("test_intervals", "metrics/test_scores"),
    ),
    Fault(
        "mce-count-strict",
        "metrics",
        "filled.count >= max(least, 1)",
        "filled.count > max(least, 1)",
        ("/test_traps.py", "test_peers", "metrics/test_binned", "metrics/test_gaps"),
    ),
    Fault(
        "gap-deviation-own-squares",
        "metrics",
        "gap**2 * filled.squares.sum()",
        "gap**2 * filled.squares",
        ("/test_binning.py", "metrics/test_gaps", "metrics/test_binned", "test_intervals"),
    ),
    Fault(
        "weights-of-file-dropped",
        "metrics",
        (
            'columns |= {"weight": task.weight} if task.weight else {}',
            'columns, rows = (chosen.domain, "labels", "sample_weight", "by"), chosen.chunk_rows',
        ),
        ("columns |= {}", 'columns, rows = (chosen.domain, "labels", "by"), chosen.chunk_rows'),
        ("/test_files.py", "workflows/test_evaluate"),
    ),
    # Losses.
    Fault(
        "smoothing-keeps-whole-loss",
        "losses",
        "(1 - alpha) * -batch.own - alpha",
        "-batch.own - alpha",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "margin-penalty-summed",
        "losses",
        "(gap - margin).clamp(min=0).mean(-1)",
        "(gap - margin).clamp(min=0).sum(-1)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "acls-top-not-detached",
        "losses",
        "best.detach()[:, None]",
        "best[:, None]",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "ecp-sign",
        "losses",
        "-batch.own - weight * entropy(batch.log_probs)",
        "-batch.own + weight * entropy(batch.log_probs)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "cpc-pairs-once",
        "losses",
        "(2 * max((classes - 1) * (classes - 2), 1))",
        "max((classes - 1) * (classes - 2), 1)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "flsd-gammas-swapped",
        "losses",
        "< 0.2, 5.0, 3.0)",
        "< 0.2, 3.0, 5.0)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "dual-focal-own-class-below",
        "losses",
        "lower = log_probs < own[:, None]",
        "lower = log_probs <= own[:, None]",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "adafocal-gamma-unbounded",
        "losses",
        "flipped, moved).clamp(*self.LIMITS)",
        "flipped, moved)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "brier-loss-mean",
        "losses",
        "(probs - target).square().sum(-1)",
        "(probs - target).square().mean(-1)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "ignored-in-mean",
        "losses",
        "(values * self.mask).sum() / self.mask.sum().clamp(min=1)",
        "(values * self.mask).mean()",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "fedlas-slow-start",
        "losses",
        "torch.where(self.started_ > 0, self.theta, 1.0) * (count > 0)",
        "self.theta * (count > 0)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "mmce-gaussian-kernel",
        "losses",
        "(confidence[:, None] - confidence).abs() / width",
        "(confidence[:, None] - confidence).square() / width",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "mdca-abs-per-sample",
        "losses",
        "(share @ (batch.log_probs.exp() - target)).abs().mean()",
        "(share @ (batch.log_probs.exp() - target).abs()).mean()",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "soft-bins-narrow",
        "losses",
        "- centres).square() / (2 * sigma**2)).softmax(-1)",
        "- centres).square() / sigma**2).softmax(-1)",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "avuc-certain-above",
        "losses",
        "doubt.detach() <= threshold",
        "doubt.detach() >= threshold",
        ("test_losses", "/losses/"),
    ),
    Fault(
        "crl-pairs-with-ignored",
        "losses",
        "pairs = batch.mask * batch.mask.roll(-1)",
        "pairs = batch.mask",
        ("test_losses", "/losses/"),
    ),
    # Calibrators.
    Fault(
        "folds-not-stratified",
        "calibrators",
        "np.lexsort((rng.random(len(labels)), labels))",
        "rng.permutation(len(labels))",
        ("test_auto", "/test_fit_files.py", "workflows/test_fit"),
    ),
    Fault(
        "groups-over-folds",
        "calibrators",
        "(rng.permutation(len(names)) % count)[member]",
        "rng.integers(count, size=len(member))",
        ("test_auto", "/test_fit_files.py", "workflows/test_fit"),
    ),
    Fault(
        "folds-seed-ignored",
        "calibrators",
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng(0)",
        ("test_auto", "/test_fit_files.py", "workflows/test_fit"),
        within="folds",
    ),
    Fault(
        "platt-offset-of-centred-odds",
        "calibrators",
        "x=np.array([slope, level - slope * centre])",
        "x=np.array([slope, level])",
        ("test_smooth_maps", "test_confidence_maps"),
    ),
    Fault(
        "top-class-only-tied",
        "calibrators",
        "-2 * torch.finfo(wide.dtype).eps",
        "0.0",
        (
            "/test_binning_calibrators.py",
            "/test_calibrators.py",
            "calibrators/test_binning",
            "calibrators/test_common",
        ),
    ),
    Fault(
        "few-samples-limit",
        "calibrators",
        "    if effective < enough:",
        "    if effective <= enough:",
        ("calibrators/test_data_checks",),
    ),
    Fault(
        "auto-without-doubt",
        "calibrators",
        "count * loss / DOUBT",
        "count * loss",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-parameters-are-free",
        "calibrators",
        " + size * PER_PARAMETER",
        "",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-keeps-small-weights",
        "calibrators",
        "share[share < LEAST] = 0",
        "share[share < 0] = 0",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-acts-within-noise",
        "calibrators",
        "gain <= NOISE * error",
        "gain <= 0",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-with-too-few-examples",
        "calibrators",
        "len(self.records) >= enough",
        "len(self.records) >= 0",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-judged-on-what-it-saw",
        "calibrators",
        "unseen.predictions(seen.fitted(",
        "unseen.predictions(unseen.fitted(",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-folds-by-class",
        "calibrators",
        "strata = np.zeros(len(some.records), dtype=np.int64)",
        "strata = some.records.labels",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-sample-is-the-first",
        "calibrators",
        "permutation(len(self.records))[:most]",
        "permutation(most)",
        ("calibrators/test_auto",),
    ),
    Fault(
        "auto-other-predictions-not-told",
        "calibrators",
        "if more < CLEAR * error and lower < CLEAR * its_error:",
        "if True:",
        ("calibrators/test_auto",),
    ),
    Fault(
        "average-of-equal-weights",
        "calibrators",
        "shares = self.weights_.log()",
        "shares = 0 * self.weights_",
        ("calibrators/test_average",),
    ),
    Fault(
        "averaged-records-of-equal-weights",
        "calibrators",
        " - np.log(share)[:, None]",
        " + np.log(len(share))",
        ("calibrators/test_average",),
    ),
    Fault(
        "rest-without-gaps",
        "calibrators",
        "others = self.gaps._calibrated(self.matrix._calibrated(logits))",
        "others = self.matrix._calibrated(logits)",
        ("calibrators/test_top_and_rest",),
    ),
    Fault(
        "rest-always-a-matrix",
        "calibrators",
        "if classes**2 <= count else",
        "if classes <= count else",
        ("calibrators/test_top_and_rest",),
    ),
    Fault(
        "parts-shared-whatever-their-options",
        "calibrators",
        "type(known) is type(new) and known.config() == new.config()",
        "type(known) is type(new)",
        ("calibrators/test_top_and_rest",),
    ),
    Fault(
        "structured-without-uniform-share",
        "calibrators",
        "uniform_=1 / (count + 1)",
        "uniform_=1e-9",
        ("calibrators/test_structured",),
    ),
    Fault(
        "structured-penalty-of-a-class",
        "calibrators",
        "of_class = classes**2 / count",
        "of_class = classes / count",
        ("calibrators/test_structured",),
    ),
    Fault(
        "structured-unmasks",
        "calibrators",
        "torch.where(torch.isneginf(logits), logits, result)",
        "result",
        ("calibrators/test_structured",),
    ),
    Fault(
        "gaps-below-the-label",
        "calibrators",
        "above = ordered[:, :-1] >",
        "above = ordered[:, :-1] >=",
        ("calibrators/test_rank_gaps",),
    ),
    Fault(
        "gap-penalty-doubled",
        "calibrators",
        "penalty, own_gap = 1 / data.total_weight",
        "penalty, own_gap = 2 / data.total_weight",
        ("calibrators/test_rank_gaps",),
    ),
    Fault(
        "gaps-may-turn-around",
        "calibrators",
        "lowest=-1 / scale, ",
        "",
        ("calibrators/test_rank_gaps",),
    ),
    Fault(
        "beta-map-swapped",
        "calibrators",
        "b * softplus(odds) - a * softplus(-odds) + m",
        "a * softplus(odds) - b * softplus(-odds) + m",
        ("test_smooth_maps", "test_confidence_maps"),
    ),
    Fault(
        "spline-without-least",
        "calibrators",
        "least_=0.5 / len(odds)",
        "least_=1e-9",
        ("test_smooth_maps", "test_confidence_maps"),
    ),
    Fault(
        "odds-knots-to-the-end",
        "calibrators",
        "np.arange(1, self.knots + 1) / (self.knots + 1)",
        "np.arange(self.knots) / (self.knots + 1)",
        ("/test_odds.py", "calibrators/test_top_label"),
    ),
    Fault(
        "blend-without-margin",
        "calibrators",
        "return (by_margin + self.odds._odds(logits, top)) / 2",
        "return self.odds._odds(logits, top)",
        ("/test_odds.py", "calibrators/test_top_label"),
    ),
    Fault(
        "groups-of-one-half",
        "calibrators",
        "zip((halves, halves[::-1]), counts, strict=True)",
        "zip((halves, halves), counts, strict=True)",
        ("test_features",),
    ),
    Fault(
        "prior-scales-with-weights",
        "calibrators",
        "PRIOR * weight.mean() * weight / weight.sum()",
        "PRIOR * weight / weight.sum()",
        ("test_features",),
    ),
    Fault(
        "own-neighbour",
        "calibrators",
        "gaps[known, here[known]] = torch.inf",
        "gaps[known, here[known]] += 0",
        ("test_features",),
    ),
    Fault(
        "density-width-of-one-dimension",
        "calibrators",
        "count ** (-1 / 6)",
        "count ** (-1 / 5)",
        ("test_features",),
    ),
    Fault(
        "clipped-from-above-only",
        "calibrators",
        "features.clamp(-clip, clip) - features",
        "features.clamp(max=clip) - features",
        ("test_features",),
    ),
    Fault(
        "clipping-may-cost-accuracy",
        "calibrators",
        "least = (1 - self.max_accuracy_loss) * none.accuracy",
        "least = 0.0",
        ("test_features",),
    ),
    Fault(
        "brier-gradient",
        "calibrators",
        "squares * (slope2 - 2 * slope)",
        "squares * (slope2 - slope)",
        ("/test_objectives.py", "calibrators/test_objectives"),
    ),
    Fault(
        "charbonnier-gradient",
        "calibrators",
        "(moved / sigma**2 + at_pull)",
        "(moved / sigma**2)",
        ("/test_objectives.py", "calibrators/test_objectives"),
    ),
    Fault(
        "gridded-gradient-without-parts",
        "calibrators",
        "GRID * np.diff(by_mass) + by_total[:-1]",
        "GRID * np.diff(by_mass)",
        ("/test_objectives.py", "calibrators/test_objectives"),
    ),
    Fault(
        "joined-points-swapped",
        "calibrators",
        "np.stack([1 - share, share], 1)",
        "np.stack([share, 1 - share], 1)",
        ("calibrators/test_network",),
    ),
    Fault(
        "zero-weight-rows-of-file-fitted",
        "calibrators",
        (
            "np.where(weight.reshape(labels.shape) > 0, labels, IGNORED)",
            "np.where(weight > 0, labels, IGNORED)",
        ),
        "labels",
        ("/test_fit_files.py", "workflows/test_fit", "data/test_dataset"),
    ),
    Fault(
        "network-extrapolates",
        "calibrators",
        "x = (inputs.clamp(low, high) - mean) / deviation",
        "x = (inputs - mean) / deviation",
        ("/test_smart.py", "calibrators/test_network"),
    ),
    Fault(
        "network-seed-ignored",
        "calibrators",
        "rng = np.random.default_rng(seed)",
        "rng = np.random.default_rng(0)",
        ("/test_smart.py", "calibrators/test_network"),
        within="_initial",
    ),
    Fault(
        "temperature-bound-of-all-classes",
        "calibrators",
        "np.log((classes - 1) / odds)",
        "np.log(classes / odds)",
        ("/test_smart.py", "calibrators/test_smart"),
    ),
    Fault(
        "before-and-after-swapped",
        "calibrators",
        (
            "Effect(self.before.result(), self.after.result()",
            "Effect(self.before.compute(), self.after.compute()",
        ),
        (
            "Effect(self.after.result(), self.before.result()",
            "Effect(self.after.compute(), self.before.compute()",
        ),
        ("/test_fit_files.py", "workflows/test_effect", "workflows/test_fit"),
    ),
    Fault(
        "input-file-overwritten",
        "calibrators",
        "if place in inputs or inside:",
        "if inside:",
        ("/test_fit_files.py", "workflows/test_apply"),
    ),
    Fault(
        "class-search-may-cost-accuracy",
        "calibrators",
        "q.ece if q.accuracy >= now.accuracy - LEAST else math.inf",
        "q.ece",
        ("test_class_temperatures",),
    ),
    Fault(
        "cross-fit-on-own-fold",
        "calibrators",
        "seen = (of_label >= 0) & (of_label != left_out)",
        "seen = of_label == left_out",
        ("/test_fit_files.py", "workflows/test_fit"),
    ),
    Fault(
        "step-closed-on-other-side",
        "calibrators",
        "flat[ahead] < values",
        "flat[ahead] <= values",
        (
            "/test_pieces.py",
            "calibrators/test_piecewise",
            "/test_binning_calibrators.py",
            "calibrators/test_histogram",
        ),
    ),
    Fault(
        "newton-unweighted",
        "calibrators",
        "chunk.weight.to(mean)",
        "chunk.weight.to(mean) ** 0",
        ("test_scaling",),
    ),
    Fault(
        "ensemble-over-masked-classes",
        "calibrators",
        "np.stack([tempered, raw, 1 / records.possible], axis=1)",
        "np.stack([tempered, raw, np.full(len(raw), 1 / records.classes)], axis=1)",
        ("test_scaling",),
    ),
    Fault(
        "penalty-chosen-on-seen-fold",
        "calibrators",
        "(without=without))",
        "())",
        ("test_affine",),
    ),
    Fault(
        "penalty-half-in-gradient",
        "calibrators",
        "scale * (gradient + 2 * away)",
        "scale * (gradient + away)",
        ("test_affine",),
    ),
    Fault(
        "isotonic-side-of-marks",
        "calibrators",
        'np.searchsorted(hit_odds, odds, side="right")',
        'np.searchsorted(hit_odds, odds, side="left")',
        ("test_isotonic",),
    ),
    Fault(
        "isotonic-others-unweighted",
        "calibrators",
        ".weight.numpy(), ",
        ".weight.numpy() ** 0, ",
        ("test_isotonic",),
    ),
    Fault(
        "class-one-map-not-turned-back",
        "calibrators",
        "return side * self._map(side * odds)",
        "return self._map(side * odds)",
        ("calibrators/test_binary",),
    ),
    Fault(
        "venn-abers-weights-not-relative",
        "calibrators",
        "weight, single = weight / weight.mean(), ",
        "weight, single = weight, ",
        ("calibrators/test_binary",),
    ),
    Fault(
        "bbq-prior-not-shared",
        "calibrators",
        "strength = STRENGTH / len(ends)",
        "strength = STRENGTH",
        ("/test_binning_calibrators.py", "calibrators/test_binning"),
    ),
    Fault(
        "histogram-edge-slack-down",
        "calibrators",
        "logit(uniform_edges(bins)[1:-1]) + SLACK",
        "logit(uniform_edges(bins)[1:-1]) - SLACK",
        ("/test_binning_calibrators.py", "calibrators/test_histogram"),
    ),
    Fault(
        "change-of-confidence-sign",
        "calibrators",
        "change = (after - before).cpu()",
        "change = (before - after).cpu()",
        ("test_margin_curves",),
    ),
    Fault(
        "ties-all-on-top",
        "calibrators",
        "own = np.where(records.correct, 0.0, own)",
        "own = np.where(records.own_gap == 0, 0.0, own)",
        ("test_top_label",),
    ),
    # Decisions.
    Fault(
        "binomial-without-the-last",
        "decide",
        "binom.cdf(wrong, accepted, max_error)",
        "binom.cdf(wrong - 1, accepted, max_error)",
        ("/test_decide.py", "decide/test_thresholds"),
    ),
    Fault(
        "level-carried-past-a-failure",
        "decide",
        "carried = levels[i] if passed[i] else 0.0",
        "carried = levels[i]",
        ("/test_decide.py", "decide/test_thresholds"),
    ),
    Fault(
        "accepted-without-ties",
        "decide",
        'np.searchsorted(-claimed[order], -grid, side="right")',
        'np.searchsorted(-claimed[order], -grid, side="left")',
        ("/test_decide.py", "decide/test_thresholds"),
    ),
    Fault(
        "conformal-without-plus-one",
        "decide",
        "math.ceil((n + 1) * coverage - 1e-9)",
        "math.ceil(n * coverage - 1e-9)",
        ("/test_decide.py", "decide/test_conformal"),
    ),
    Fault(
        "raps-rank-from-zero",
        "decide",
        "np.maximum(np.arange(1, rows.shape[-1] + 1) - FREE_RANKS, 0)",
        "np.maximum(np.arange(rows.shape[-1]) - FREE_RANKS, 0)",
        ("/test_decide.py", "decide/test_conformal"),
    ),
    Fault(
        "conformal-seed-ignored",
        "decide",
        "np.random.default_rng(seed).integers(2**63",
        "np.random.default_rng(0).integers(2**63",
        ("/test_decide.py", "decide/test_conformal"),
    ),
    Fault(
        "prior-estimate-unregularised",
        "decide",
        "added = len(old) * old",
        "added = 0 * old",
        ("/test_decide.py", "decide/test_priors"),
    ),
    Fault(
        "old-prior-unweighted",
        "decide",
        "np.bincount(labels[labels != checks.IGNORED], weight, minlength=examples.classes)",
        "np.bincount(labels[labels != checks.IGNORED], minlength=examples.classes)",
        ("/test_decide.py", "decide/test_priors"),
    ),
    Fault(
        "limit-in-half-precision",
        "decide",
        "float(checks.float_info(scores).eps)  # a NumPy number",
        "checks.float_info(scores).eps  # a NumPy number",
        ("decide/test_rules",),
    ),
    Fault(
        "check-of-sets-as-if-their-coverage-was-exact",
        "decide",
        "betabinom.sf(tally.wrong - 1, tally.judged, n + 1 - rank, rank)",
        "binom.sf(tally.wrong - 1, tally.judged, 1 - self.guarantee.coverage)",
        ("decide/test_rules",),
    ),
    Fault(
        "rule-fitted-where-the-calibrator-was",
        "workflows",
        '        fit_split = test_split = test_split or "test"',
        "        pass",
        ("workflows/test_decide",),
    ),
    Fault(
        "halves-of-a-rule-stratified",
        "workflows",
        "fit_and_test(dataset, fit_split, test_split, seed, stratified=False)",
        "fit_and_test(dataset, fit_split, test_split, seed)",
        ("workflows/test_decide",),
    ),
    Fault(
        "decisions-of-chunks-overwrite-one-another",
        "workflows",
        "        self.done = end\n",
        "",
        ("workflows/test_decide",),
    ),
    Fault(
        "brackets-after-a-line-break-of-latex",
        "_core",
        '    "[": "{[}",',
        '    "[": "[",',
        ("core/test_tables",),
    ),
    Fault(
        "best-figures-not-bold",
        "_core",
        'return rf"\\textbf{{{text}}}" if cell.startswith("*") else text',
        "return text",
        ("core/test_tables",),
    ),
    Fault(
        "folder-in-use-removed",
        "_core",
        'max(p.stat().st_mtime for p in (path, *path.glob("*")))',
        "path.stat().st_mtime",
        ("workflows/test_apply",),
    ),
    Fault(
        "inclusion-counts-the-labelled-example",
        "estimate",
        "1 / batch.inclusion - 1 if batch.selected",
        "1 / batch.inclusion if batch.selected",
        ("estimate/test_performance",),
    ),
    Fault(
        "shift-size-with-its-noise",
        "estimate",
        ".sum()) - freedom * (1 / n + 1 / m)",
        ".sum())",
        ("estimate/test_watch",),
    ),
    Fault(
        "known-labels-drawn-anew",
        "estimate",
        "(RUN, trials.size)) + known",
        "(RUN, trials.size))",
        ("estimate/test_strata", "estimate/test_performance"),
    ),
    Fault(
        "reference-adjusts-nothing",
        "estimate",
        "1 - (1 - probs * down[..., at]) * up[..., at]",
        "1 - (1 - probs) * up[..., at]",
        ("estimate/test_strata", "estimate/test_performance"),
    ),
    Fault(
        "alarm-keeps-the-promise",
        "monitor",
        "estimate = WindowEstimate(estimate.value, math.nan, math.nan, WITHDRAWN)",
        "estimate = WindowEstimate(*estimate[:3], estimate.promise)",
        ("monitor/test_estimates",),
    ),
    Fault(
        "budget-by-size-alone",
        "estimate",
        "products = size * deviation",
        "products = size * 1.0",
        ("estimate/test_sampling",),
    ),
    Fault(
        "files-of-both-monitors-counted-twice",
        "monitor",
        "if both := self._files.keys() & other._files.keys():",
        "if both := set():",
        ("monitor/test_stream",),
    ),
    # Models in use.
    Fault(
        "trace-of-one-block",
        "calibrators",
        "whole = torch.compiler.is_compiling() or tracing",
        "whole = torch.compiler.is_compiling()",
        ("deploy/test_trace",),
    ),
    Fault(
        "predictions-in-training-mode",
        "deploy",
        "with evaluating(self), torch.no_grad():",
        "with torch.no_grad():",
        ("deploy/test_attach",),
    ),
    Fault(
        "batches-of-predictions-overlap",
        "deploy",
        "part = value[start : start + batch_size]",
        "part = value[start : start + batch_size + 1]",
        ("deploy/test_attach",),
    ),
    Fault(
        "centred-along-wrong-axis",
        "deploy",
        "weight, bias = weight - weight.mean(0), bias - bias.mean()",
        "weight, bias = weight - weight.mean(1, keepdim=True), bias - bias.mean()",
        ("/test_deploy.py", "deploy/test_fold"),
    ),
    Fault(
        "collected-in-training-mode",
        "deploy",
        (
            "with evaluating(model), torch.no_grad():\n        found = [_outcome(",
            "with evaluating(model), torch.no_grad():\n        batches = [_outputs(",
        ),
        (
            "with torch.no_grad():\n        found = [_outcome(",
            "with torch.no_grad():\n        batches = [_outputs(",
        ),
        ("/test_deploy.py", "deploy/test_collect"),
    ),
    Fault(
        "foreign-card-overwritten",
        "deploy",
        'if path.exists() and OURS not in path.read_text("utf-8"):',
        "if False:",
        ("/test_deploy.py", "deploy/test_attach"),
    ),
    Fault(
        "log1p-without-correction",
        "export",
        "up.log() * (x / torch.where(exact, 1, rounded))",
        "up.log()",
        ("/test_export.py", "deploy/test_export"),
    ),
    Fault(
        "export-checked-from-above",
        "export",
        (
            "torch.maximum(low - claimed, claimed - high)",
            "torch.maximum(low - probs, probs - high)",
        ),
        ("claimed - high", "probs - high"),
        ("deploy/test_export", "/test_export.py"),
    ),
    Fault(
        "classes-in-sorted-order",
        "sklearn",
        "order[np.searchsorted(classes, values, sorter=order)]",
        "np.searchsorted(classes, values, sorter=order)",
        ("test_sklearn",),
    ),
    Fault(
        "weights-in-order-of-rows",
        "sklearn",
        ("sample_weight[scored.rows]", "sample_weight[scores.rows]"),
        "sample_weight",
        ("test_sklearn",),
    ),
    Fault(
        "floor-not-halved",
        "sklearn",
        "float(logits[np.isfinite(logits)].min()) - math.log(2)",
        "float(logits[np.isfinite(logits)].min())",
        ("test_sklearn",),
    ),
    Fault(
        "tags-known-to-every-fold",
        "sklearn",
        "np.tile(y_train.min(0) < y_train.max(0), (len(logits), 1))",
        "np.ones(y[test].shape, bool)",
        ("test_sklearn_tags",),
    ),
    Fault(
        "absence-for-presence",
        "sklearn",
        "list(seen).index(1)",
        "list(seen).index(0)",
        ("test_sklearn_tags",),
    ),
    Fault(
        "ensemble-weights-of-other-rows",
        "sklearn",
        "v[test][known] for name, v in beside.items()",
        "v[: len(known)] for name, v in beside.items()",
        ("test_sklearn_tags",),
    ),
    Fault(
        "members-that-lack-a-class-out-of-place",
        "sklearn",
        "probs[:, at] += one.predict_proba(X) / len(members)",
        "probs[:, -len(at) :] += one.predict_proba(X) / len(members)",
        ("test_sklearn_tags",),
    ),
    # Tags.
    Fault(
        "tags-not-drawn-together",
        "calibrators",
        "scatter / (SEEN + len(evidence))",
        "100 * scatter / (SEEN + len(evidence))",
        ("calibrators/test_tags",),
    ),
    Fault(
        "posterior-without-its-width",
        "calibrators",
        "off.T @ off + covariance.sum(0)",
        "off.T @ off",
        ("calibrators/test_tags",),
    ),
    Fault(
        "line-about-another-centre",
        "calibrators",
        "centre + theta[:, 1] - slope * centre",
        "theta[:, 1] - slope * centre",
        ("calibrators/test_tags",),
    ),
    Fault(
        "unknown-labels-count",
        "calibrators",
        "weight = np.where(labelled, 1.0, 0.0)",
        "weight = np.ones(labels.shape)",
        ("calibrators/test_tags",),
    ),
    Fault(
        "weights-of-tags-by-their-size",
        "calibrators",
        "weight=cells.weight * ((cells.weight > 0).sum() / cells.weight.sum())",
        "weight=cells.weight",
        ("calibrators/test_tags",),
    ),
    Fault(
        "softmax-of-tags",
        "calibrators",
        "probs: Tensor = self(scores).sigmoid()",
        "probs: Tensor = self(scores).softmax(-1)",
        ("calibrators/test_tags",),
    ),
    Fault(
        "probs-of-tags-as-classes",
        "data",
        "tags=self.dataset.multilabel",
        "tags=False",
        ("workflows/test_multilabel",),
    ),
    Fault(
        "applied-tags-sum-to-one",
        "workflows",
        "each = wide.ndim == 1 or calibrator.multilabel",
        "each = wide.ndim == 1",
        ("workflows/test_multilabel",),
    ),
    Fault(
        "unknown-labels-of-tags-measured",
        "workflows",
        "(changed & kept[rows]).sum()",
        "changed.sum()",
        ("workflows/test_multilabel",),
    ),
    # Heads that are trained again.
    Fault(
        "keep-rate-above-one",
        "heads",
        "min(max(self.keep + change, self.least), 1.0)",
        "max(self.keep + change, self.least)",
        ("/test_heads.py", "retrain/test_"),
    ),
    Fault(
        "masked-weights-move",
        "heads",
        "weight.copy_(torch.where(mask > 0, weight, old))",
        "weight.copy_(torch.where(mask > 0, old, weight))",
        ("/test_heads.py", "retrain/test_"),
    ),
    Fault(
        "weights-whole-after-training",
        "heads",
        "first, second = masks or (self.keep_, self.keep_)",
        "first, second = masks or (self.keep_ / self.keep_, self.keep_ / self.keep_)",
        ("/test_heads.py", "retrain/test_"),
    ),
    Fault(
        "checkpoint-of-other-data",
        "heads",
        ('if state["mark"] != self.mark:', 'if state.get("fingerprint") != self.fingerprint:'),
        "if False:",
        ("/test_heads.py", "retrain/test_"),
    ),
    Fault(
        "held-out-seed-ignored",
        "heads",
        "np.random.default_rng(seed)",
        "np.random.default_rng(0)",
        ("/test_heads.py", "retrain/test_"),
        within=("share_of", "stratified_share"),
    ),
    # The monitor.
    Fault(
        "stake-of-joining-bets",
        "monitor",
        "((self.position + 1) * (position + 1))",
        "((self.position + 1) * position)",
        ("/test_monitor.py", "monitor/test_e_process", "monitor/test_stream"),
    ),
    Fault(
        "evidence-before-stays-cached",
        "monitor",
        "if self._before is not None and number < self._before[0]:",
        "if False:",
        ("/test_monitor.py", "monitor/test_e_process", "monitor/test_stream"),
    ),
    Fault(
        "bets-against-the-wrong-bound",
        "monitor",
        "(high if tilt > 0 else low)",
        "(low if tilt > 0 else high)",
        (
            "/test_monitor.py",
            "monitor/test_e_process",
            "monitor/test_stream",
        ),
    ),
    Fault(
        "direction-swapped",
        "monitor",
        '"over" if TILTS[tilt] < 0 else "under"',
        '"over" if TILTS[tilt] > 0 else "under"',
        ("/test_monitor.py", "monitor/test_report"),
    ),
    Fault(
        "reference-bins-not-corrected",
        "monitor",
        "tail = level / (2 * np.count_nonzero(n))",
        "tail = level / 2",
        (
            "/test_monitor.py",
            "monitor/test_e_process",
            "monitor/test_stream",
        ),
    ),
    Fault(
        "alarm-spends-whole-level",
        "monitor",
        " < -math.log(self.level):",
        " < -math.log(self.false_alarms):",
        ("/test_monitor.py", "monitor/test_stream", "monitor/test_report"),
    ),
    Fault(
        "first-windows-shown",
        "monitor",
        "self.windows[-SHOWN:]",
        "self.windows[:SHOWN]",
        ("/test_monitor.py", "monitor/test_"),
    ),
    Fault(
        "newest-prediction-dropped",
        "monitor",
        (
            "del self._waiting[next(iter(self._waiting))]",
            "del self.waiting[next(iter(self.waiting))]",
        ),
        (
            "del self._waiting[next(reversed(self._waiting))]",
            "del self.waiting[next(reversed(self.waiting))]",
        ),
        ("/test_monitor.py", "monitor/test_predictions", "monitor/test_pending"),
    ),
    # Language models.
    Fault(
        "places-one-too-late",
        "llm",
        "np.where(starts > 0, rows[starts - 1] + 1, 0)",
        "np.where(starts > 0, rows[starts - 1], 0)",
        ("/test_llm_tables.py", "llm/tokens/test_tables"),
    ),
    Fault(
        "token-in-shard-before",
        "llm",
        'home = np.searchsorted(self._ends, numbers, side="right")',
        'home = np.searchsorted(self._ends, numbers, side="left")',
        ("/test_llm_tables.py", "llm/tokens/test_tables"),
    ),
    Fault(
        "table-counted-twice",
        "llm",
        "if header in headers[:number]:",
        "if False:",
        ("/test_llm_tables.py", "llm/tokens/test_tables"),
    ),
    Fault(
        "two-writers-of-a-table",
        "llm",
        "stack.enter_context(locked(folder / HEADER, wait=False))",
        "pass",
        ("llm/tokens/test_collect",),
    ),
    Fault(
        "shard-without-all-rows",
        "llm",
        "if not self.written.all():",
        "if False:",
        ("llm/tokens/test_writing",),
    ),
    Fault(
        "rows-never-written-are-read",
        "llm",
        "(records.possible > 0).all()",
        "(records.possible >= 0).all()",
        ("llm/tokens/test_tables",),
    ),
    Fault(
        "random-weights-are-used",
        "llm",
        'wrong = sorted([*report["missing_keys"], *(',
        "wrong = sorted([*(",
        ("llm/test_loading",),
    ),
    Fault(
        "code-of-a-model-is-run",
        "llm",
        "dtype=precision,\n            trust_remote_code=trust_remote_code,",
        "dtype=precision,\n            trust_remote_code=None,",
        ("llm/test_loading",),
    ),
    Fault(
        "gguf-without-its-first-token",
        "llm",
        "tokenizer.add_bos_token = True",
        "pass",
        ("llm/test_loading",),
    ),
    Fault(
        "gguf-chat-without-its-first-token",
        "llm",
        "if tokenizer.chat_template and not _renders_start(tokenizer):",
        "if False:",
        ("llm/test_loading",),
    ),
    Fault(
        "half-characters-are-tokenized",
        "llm",
        "half = SURROGATE.search(text) if isinstance(text, str) else None",
        "half = None",
        ("llm/tokens/test_documents",),
    ),
    Fault(
        "words-are-always-apart",
        "llm",
        "return known is not None and not any(map(ACROSS_WORDS.search, known))",
        "return known is not None",
        ("llm/tokens/test_documents",),
    ),
    Fault(
        "long-text-ends-too-early",
        "llm",
        "if len(_bare_ids(self.tokenizer, start)) > self.length:",
        "if True:",
        ("llm/tokens/test_documents",),
    ),
    Fault(
        "limit-reads-the-whole-file",
        "llm",
        "for place, row in islice(self._rows(), limit):",
        "for place, row in list(self._rows())[:limit]:",
        ("llm/tokens/test_reading",),
    ),
    Fault(
        "collect-ignores-new-weights",
        "llm",
        "total.update(digest(model).encode())",
        'total.update(b"")',
        ("/test_llm_tables.py", "llm/tokens/test_collect"),
    ),
    Fault(
        "prompt-counts-as-answer",
        "llm",
        "labels = [IGNORED] * len(before) + after",
        "labels = before + after",
        ("/test_llm_tables.py", "llm/tokens/test_documents"),
    ),
    Fault(
        "batch-one-too-large",
        "llm",
        "(number - start + 1) * longest > size",
        "(number - start) * longest > size",
        ("/test_llm_tables.py", "llm/tokens/test_documents"),
    ),
    Fault(
        "trains-on-what-judges",
        "llm",
        "(order >= stop, (order >= ",
        "(order >= 0, (order >= ",
        ("/test_llm_heads.py", "llm/heads/test_fit.py"),
    ),
    Fault(
        "head-kept-within-noise",
        "llm",
        "gain.mean > gain.error)",
        "gain.mean > 0)",
        ("/test_llm_heads.py", "llm/heads/test_fit.py"),
    ),
    Fault(
        "head-seed-ignored",
        "llm",
        "torch.default_generator.manual_seed(",
        "torch.default_generator.manual_seed(0 * ",
        ("/test_llm_heads.py", "llm/heads/test_fit.py"),
    ),
    Fault(
        "selective-weights-swapped",
        "llm",
        "np.where(records.correct, 1 - alpha, alpha)",
        "np.where(records.correct, alpha, 1 - alpha)",
        ("/test_llm_heads.py", "llm/heads/test_objectives"),
    ),
    Fault(
        "beams-not-reordered",
        "llm",
        "self.keys, self.values = self.keys[rows], self.values[rows]",
        "pass",
        ("/test_llm_attach.py", "llm/heads/test_attach"),
    ),
    Fault(
        "sharpness-uncapped",
        "llm",
        "[..., 0].clamp(max=math.log(self.cap))",
        "[..., 0]",
        ("/test_llm_heads.py", "llm/heads/test_modules", "llm/heads/test_official"),
    ),
    Fault(
        "logits-scaled-twice",
        "llm",
        "if call.scaled is not None and call.scaled() is output:",
        "if False:",
        ("/test_llm_attach.py", "llm/heads/test_attach"),
    ),
    Fault(
        "end-token-not-written",
        "llm",
        "(ended.cumsum(1) - ended) == 0",
        "ended.cumsum(1) == 0",
        ("/test_llm_attach.py", "llm/heads/test_generation"),
    ),
    Fault(
        "tokens-of-answers-unsorted",
        "llm",
        'order = np.argsort(layout, kind="stable")',
        "order = np.arange(len(layout))",
        ("/test_llm_answers.py", "llm/answers/test_confidence"),
    ),
    Fault(
        "abstains-at-the-threshold",
        "llm",
        (" < self.threshold_.threshold", "np.asarray(values < limit.threshold)"),
        (" <= self.threshold_.threshold", "np.asarray(values <= limit.threshold)"),
        ("/test_llm_answers.py", "llm/answers/test_calibrator"),
    ),
    Fault(
        "spellings-of-a-choice-not-summed",
        "llm",
        ("np.logaddexp(found[i, at], value)", "np.logaddexp(logs[i, at], value)"),
        "value",
        ("/test_llm_answers.py", "llm/answers/test_choices"),
    ),
    Fault(
        "turns-taken-for-independent",
        "llm",
        'if unit == "answer":\n        pairs =',
        "if unit:\n        pairs =",
        ("llm/gate/test_promises",),
    ),
    Fault(
        "bentkus-without-its-factor",
        "llm",
        "math.e * binomial_p_values(accepted, up, max_error)",
        "binomial_p_values(accepted, up, max_error)",
        ("llm/gate/test_promises",),
    ),
    Fault(
        "wrong-turns-below-the-threshold-ignored",
        "llm",
        "_at_least(_highest(answers.where(~answers.correct)), grid)",
        "_at_least(_highest(answers), grid)",
        ("llm/gate/test_promises",),
    ),
    Fault(
        "kinds-without-bonferroni",
        "llm",
        "level = 1 - (1 - terms.level) / tests",
        "level = terms.level",
        ("llm/gate/test_fitting",),
    ),
    Fault(
        "map-and-threshold-share-answers",
        "llm",
        "first = answers.where(parts == 0).answers(aggregate)",
        "first = answers.answers(aggregate)",
        ("llm/gate/test_fitting",),
    ),
    Fault(
        "verified-among-those-that-decided",
        "llm",
        "member & (parts == 2) & (scored.confidence < accept.threshold)",
        "member & (parts == 1) & (scored.confidence < accept.threshold)",
        ("llm/gate/test_fitting",),
    ),
    Fault(
        "withdrawn-promise-kept",
        "llm",
        "if withdrawn or band is None:",
        "if band is None:",
        ("llm/gate/test_gate", "llm/gate/test_proxy"),
    ),
    Fault(
        "same-cut-of-every-answer",
        "llm",
        "at = (first + np.arange(len(confidence))) % CUTS",
        "at = np.full(len(confidence), CUTS // 2)",
        ("llm/gate/test_watch",),
    ),
    Fault(
        "log-probabilities-left-in",
        "llm",
        "shown = content if asked.wants_logprobs else without_logprobs(content)",
        "shown = content",
        ("llm/gate/test_proxy",),
    ),
    Fault(
        "cut-streams-judged",
        "llm",
        'problem = problem or (CUT if self.collected.cut() else "")',
        "problem = problem",
        ("llm/gate/test_proxy",),
    ),
    Fault(
        "token-of-the-gate-not-compared",
        "llm",
        'return "" if right else "the request lacks',
        'return "" if right or given else "the request lacks',
        ("llm/gate/test_proxy",),
    ),
    Fault(
        "partition-bound-too-low",
        "llm",
        "high = np.maximum(_equal_tail(most",
        "high = np.minimum(_equal_tail(most",
        ("/test_llm_answers.py", "llm/answers/test_topk"),
    ),
    Fault(
        "k-of-service-ignored",
        "llm",
        "surely = shown if k is None else np.minimum(shown, k)",
        "surely = shown",
        ("/test_llm_answers.py", "llm/answers/test_topk"),
    ),
    Fault(
        "jackknife-over-all-tokens",
        "llm",
        "/ (whole - tokens)",
        "/ whole",
        ("/test_llm_evaluate.py", "llm/tokens/test_evaluate"),
    ),
    Fault(
        "student-one-sided",
        "llm",
        "stdtrit(documents - 1, (1 + level) / 2)",
        "stdtrit(documents - 1, level)",
        ("/test_llm_evaluate.py", "llm/tokens/test_evaluate"),
    ),
    Fault(
        "daca-of-disagreements",
        "llm",
        "agree = ours.argmax(-1) == theirs.argmax(-1)",
        "agree = ours.argmax(-1) > -1",
        ("/test_llm_heads.py", "llm/heads/test_daca"),
    ),
    Fault(
        "empty-answer-matches",
        "llm",
        ("return bool(said) and any(", "return bool(text) and any("),
        "return any(",
        ("/test_llm_answers.py", "llm/answers/test_questions"),
    ),
    Fault(
        "head-weights-unchecked",
        "llm",
        'if hashlib.sha256(content).hexdigest() != header["weights_sha256"]:',
        "if False:",
        ("/test_llm_heads.py", "artifacts/test_"),
    ),
    Fault(
        "empty-marks-agree",
        "llm",
        '{other.digest, other.half} - {""}:',
        "{other.digest, other.half}:",
        ("/test_llm_tables.py", "llm/test_fingerprint"),
    ),
    # Artifacts.
    Fault(
        "weights-of-another-save",
        "io",
        (
            'if hashlib.sha256(weights).hexdigest() != header["weights_sha256"]:',
            'if metadata["sha256"] != _digest(metadata["config"], metadata["extra"], tensors):',
        ),
        "if False:",
        ("/test_io.py", "artifacts/test_"),
    ),
    Fault(
        "other-dtypes-loaded",
        "io",
        ("if value.dtype != wanted[name].dtype:", "if value.dtype != dtype:"),
        "if False:",
        ("/test_io.py", "artifacts/test_"),
    ),
    Fault(
        "nan-weights-saved",
        "io",
        (
            "if not torch.isfinite(value).all():\n            raise ValueError(\n"
            '                f"{name} of this {type(module).',
            "if not torch.isfinite(value).all():",
        ),
        (
            "if False:\n            raise ValueError(\n"
            '                f"{name} of this {type(module).',
            "if False:",
        ),
        ("/test_io.py", "artifacts/test_"),
    ),
    # Training benchmarks.
    Fault(
        "rate-falls-an-epoch-late",
        "bench",
        "sum(epoch >= ",
        "sum(epoch > ",
        ("/test_bench.py", "bench/train/test_recipe"),
    ),
    Fault(
        "shift-never-to-the-end",
        "bench",
        "torch.randint(0, 2 * shift + 1, (count, 1)",
        "torch.randint(0, 2 * shift, (count, 1)",
        ("/test_bench.py", "bench/train/test_trainer"),
    ),
    Fault(
        "best-epoch-is-last-of-equals",
        "bench",
        "if accuracy > self.best:",
        "if accuracy >= self.best:",
        ("/test_bench.py", "bench/train/test_trainer"),
    ),
    Fault(
        "calibrated-on-test",
        "bench",
        '.fit(val.read("logits"), val.read("labels"))',
        '.fit(test.read("logits"), test.read("labels"))',
        ("/test_bench.py", "bench/train/test_results"),
    ),
    Fault(
        "coarse-labels",
        "bench",
        "[:, labels - 1]",
        "[:, 0]",
        ("/test_images.py", "images/test_read"),
    ),
    Fault(
        "bytes-cut-not-rounded",
        "bench",
        "(pixels * 255).round().clamp(0, 255)",
        "(pixels * 255).clamp(0, 255)",
        ("/test_images.py", "images/test_shifts"),
    ),
    # Pairs of many examples.
    Fault(
        "pooled-by-labelled-examples",
        "metrics",
        "self._kept.add(pairs, answers, kept, targets.size)",
        "self._kept.add(pairs, answers, kept, pairs.outcome.size)",
        ("metrics/test_pooled",),
    ),
    Fault(
        "bootstrap-ignores-weights",
        "metrics",
        "* (weight / np.where(mean > 0, mean, 1.0))",
        "* (weight.sum() / mean.sum())",
        ("metrics/test_pooled",),
    ),
    Fault(
        "pooled-counts-in-the-wrong-bin",
        "metrics",
        "bin_index(self.bins.edges[1:], edges)",
        "bin_index(self.bins.edges[:-1], edges)",
        ("metrics/test_pooled",),
    ),
    Fault(
        "collected-entries-forgotten",
        "metrics",
        "        classwise.settle()\n    # what",
        "        pass\n    # what",
        ("metrics/test_binned", "metrics/test_common"),
    ),
    # The arena.
    Fault(
        "tie-is-no-win",
        "bench",
        "np.asarray((one < other) + 0.5 * (one == other))",
        "np.asarray((one < other) + 0.0)",
        ("arena/test_statistics",),
    ),
    Fault(
        "bootstrap-over-tasks",
        "bench",
        "np.unique(datasets, return_inverse=True)\n    won",
        "np.unique(range(len(values)), return_inverse=True)\n    won",
        ("arena/test_statistics",),
    ),
    Fault(
        "critical-difference-of-tasks",
        "bench",
        "ranks = stats.rankdata(blocks, axis=1)",
        "ranks = stats.rankdata(values, axis=1)",
        ("arena/test_statistics",),
    ),
    Fault(
        "ranks-without-correction-for-ties",
        "bench",
        "spread = (ranks**2).sum() - count * methods * (methods + 1) ** 2 / 4",
        "spread = count * methods * (methods**2 - 1) / 12",
        ("arena/test_statistics",),
    ),
    Fault(
        "rating-without-virtual-tie",
        "bench",
        "won = beaten + 0.5\n",
        "won = beaten + 1e-9\n",
        ("arena/test_statistics",),
    ),
    Fault(
        "temperature-of-log-odds",
        "bench",
        'if self.method == "temperature" and probs.shape[1] > 2:',
        "if False:",
        ("arena/test_peers",),
    ),
    Fault(
        "ece-of-the-top-of-two",
        "bench",
        "(positive_class if binary else top_label)",
        "(top_label if binary else top_label)",
        ("arena/test_results",),
    ),
    Fault(
        "methods-fitted-on-test",
        "bench",
        "entrant.fit(predictions)",
        "entrant.fit(Predictions(predictions.test, predictions.test))",
        ("arena/test_results",),
    ),
    Fault(
        "seeds-keep-the-split",
        "bench",
        "task.read().redrawn(seed)",
        "task.read().redrawn(0)",
        ("arena/test_results",),
    ),
    Fault(
        "rows-forget-the-data",
        "bench",
        "names = self.task.suite, self.task.name, self.fingerprint, str(self.seed)",
        'names = self.task.suite, self.task.name, "", str(self.seed)',
        ("arena/test_results",),
    ),
    Fault(
        "torn-row-stays",
        "bench",
        "        cut_torn_line(target)\n",
        "        pass\n",
        ("arena/test_results",),
    ),
    Fault(
        "rows-of-old-data-count",
        "bench",
        'if latest[r["suite"], r["task"]] == r["fingerprint"]]',
        "]",
        ("arena/test_views",),
    ),
    Fault(
        "failure-does-not-lose",
        "bench",
        "else failed)",
        "else 0.0)",
        ("arena/test_views",),
    ),
    Fault(
        "draw-without-classes",
        "bench",
        "order = np.lexsort((random, labels))",
        "order = np.argsort(random)",
        ("arena/test_tasks",),
    ),
    Fault(
        "ignored-labels-stay",
        "bench",
        "rows = np.flatnonzero(flat != IGNORED)",
        "rows = np.arange(len(flat))",
        ("arena/test_tasks",),
    ),
    # The command.
    Fault(
        "limit-not-allowed-itself",
        "cli",
        '["ece"].value <= max_ece:',
        '["ece"].value < max_ece:',
        ("/test_cli.py", "cli/test_evaluate"),
    ),
    Fault(
        "nothing-measured-is-fine",
        "cli",
        ".measured else 2",
        ".measured else 0",
        ("/test_cli_fit.py", "cli/test_compare"),
    ),
    Fault(
        "alarm-without-exit-code",
        "cli",
        "return int(fail and report.alarm is not None)",
        "return 0",
        ("/test_monitor.py", "cli/test_monitor"),
    ),
    Fault(
        "failures-exit-with-one",
        "cli",
        "code: Any = 2",
        "code: Any = 1",
        ("/test_cli.py", "cli/test_main", "cli/test_evaluate"),
    ),
    Fault(
        "solved-questions-asked",
        "cli",
        "drawn[shots:], drawn[:shots]",
        "drawn, drawn[:shots]",
        ("/test_llm_cli.py", "cli/test_llm", "llm/test_workflows"),
    ),
    Fault(
        "windows-in-text-order",
        "cli",
        "matches = sorted(storage.matches(place), key=natural_order)",
        "matches = sorted(storage.matches(place))",
        ("/test_monitor.py", "cli/test_monitor"),
    ),
    Fault(
        "roc-auc-of-confidence",
        "metrics",
        "lambda s: _auroc_estimate(s, s.pairs)",
        "lambda s: _auroc_estimate(s, s.answers)",
        ("metrics/test_two_classes",),
    ),
    Fault(
        "roc-auc-of-several-classes",
        "metrics",
        'METRICS[name].two_classes_only and kind != "binary"',
        'METRICS[name].two_classes_only and kind == "binary"',
        ("metrics/test_two_classes",),
    ),
    Fault(
        "auto-never-reads-whole",
        "workflows",
        "logits = calibrator.uses_logits and ",
        "logits = calibrator.needs_head and ",
        ("workflows/test_fit",),
    ),
    Fault(
        "limit-of-rows",
        "workflows",
        "split.rows * math.prod(split.shape) <= WHOLE",
        "split.rows <= WHOLE",
        ("workflows/test_fit",),
    ),
    # Comparison and plots.
    Fault(
        "same-half-twice",
        "comparison",
        ", IGNORED) for i in (0, 1))",
        ", IGNORED) for i in (0, 0))",
        ("/test_compare.py", "workflows/test_compare"),
    ),
    Fault(
        "least-is-always-best",
        "comparison",
        "sign = -1 if METRICS[metric].higher_is_better else 1",
        "sign = 1",
        ("/test_compare.py", "workflows/test_compare"),
    ),
    Fault(
        "choice-may-change-predictions",
        "comparison",
        "[name for name in known if fitted[name].keeps_argmax] if keep else []",
        "list(known) if keep else []",
        ("workflows/test_choice",),
    ),
    Fault(
        "choice-without-noise",
        "comparison",
        "if worse <= error:",
        "if worse <= 0:",
        ("workflows/test_choice",),
    ),
    Fault(
        "choice-by-fits-that-saw-the-example",
        "comparison",
        "seen = (of_label >= 0) & (of_label != left_out)",
        "seen = of_label >= 0",
        ("workflows/test_choice",),
    ),
    Fault(
        "choice-without-weights",
        "comparison",
        "kept = weight[labels != IGNORED]",
        "kept = np.ones(int((labels != IGNORED).sum()))",
        ("workflows/test_choice",),
    ),
    Fault(
        "compare-chooses-on-test",
        "comparison",
        """        fitted,
        splits[0],
        bench.records,
""",
        """        fitted,
        splits[1],
        splits[1].records(),
""",
        ("workflows/test_compare",),
    ),
    Fault(
        "options-of-questions-stay",
        "cli",
        'chosen = {"keep_argmax": False, **chosen}',
        'chosen = {"keep_argmax": True, **chosen}',
        ("cli/test_fit",),
    ),
    Fault(
        "questions-calibrated-by-their-own-answers",
        "llm",
        "for i, calibrator in enumerate(fitted.calibrators):",
        "for i, calibrator in enumerate([fitted.calibrator] * FOLDS):",
        ("llm/test_workflows",),
    ),
    Fault(
        "answers-cut-at-the-first-line",
        "llm",
        "broken = limit.one_line and _breaks(",
        "broken = _breaks(",
        ("llm/answers/test_asking",),
    ),
    Fault(
        "generation-goes-on-after-the-line",
        "llm",
        "_line_breaks(tokenizer, longest) if limit.one_line else None",
        "None",
        ("llm/answers/test_asking",),
    ),
    Fault(
        "long-prompts-found-late",
        "llm",
        "    check_lengths(model, tokenizer, asked, confidence=confidence, **lengths)\n",
        "",
        ("llm/answers/test_grading",),
    ),
    Fault(
        "short-answers-not-one-line",
        "llm",
        '"one_line": not chat}',
        '"one_line": chat}',
        ("llm/answers/test_grading",),
    ),
    Fault(
        "cut-gguf-file-not-noticed",
        "llm",
        "if values + last >= file.stat().st_size:",
        "if last > file.stat().st_size:",
        ("llm/test_loading",),
    ),
    Fault(
        "text-of-a-token-id-ignored",
        "llm",
        '_field(value, "decoded_token") or str(token)',
        "str(token)",
        ("llm/answers/test_topk",),
    ),
    Fault(
        "likelihood-of-a-choice-per-token",
        "llm",
        "rows.gather(-1, chosen[:, None]).double().sum()",
        "rows.gather(-1, chosen[:, None]).double().mean()",
        ("llm/answers/test_likelihoods",),
    ),
    Fault(
        "sources-of-a-file-mixed",
        "llm",
        "if source != sources[0]:",
        "if False:",
        ("llm/answers/test_graded",),
    ),
    Fault(
        "map-applied-to-another-source",
        "llm",
        "calibrator.source_.check(source)",
        "source",
        ("llm/test_workflows",),
    ),
    Fault(
        "map-measured-on-its-own-answers",
        "llm",
        "_fitted(graded, stage, folds != fold)",
        "_fitted(graded, stage, folds >= 0)",
        ("llm/test_workflows",),
    ),
    Fault(
        "head-of-answers-not-recorded",
        "llm",
        '"none" if fitted is None else head_digest(fitted)',
        '"none"',
        ("llm/answers/test_grading",),
    ),
    Fault(
        "choice-of-the-best-signal-leaks",
        "llm",
        "fit_combined(values[train], correct[train], groups[train], stage)",
        "fit_combined(values, correct, groups, stage)",
        ("llm/answers/test_combining",),
    ),
    Fault(
        "missing-signals-not-filled-in",
        "llm",
        "if not lacks.any() or lacks.all():",
        "if lacks.any() or lacks.all():",
        ("llm/answers/test_combining",),
    ),
    Fault(
        "combination-always-kept",
        "llm",
        "bool(together.mean() < min(alone.mean(), each.min()))",
        "True",
        ("llm/answers/test_signal_calibrator",),
    ),
    Fault(
        "signals-of-another-model",
        "llm",
        'self.source_.check(source._replace(confidence=""))',
        "source",
        ("llm/answers/test_signal_calibrator",),
    ),
    Fault(
        "chance-to-be-wrong-read",
        "llm",
        "if INVERTED.search(text):",
        "if False:",
        ("llm/answers/test_stated",),
    ),
    Fault(
        "range-read-as-a-number",
        "llm",
        "if BOUND.search(text):",
        "if False:",
        ("llm/answers/test_stated",),
    ),
    Fault(
        "clusters-compare-with-the-last",
        "llm",
        "if same(texts[cluster[0]], text):",
        "if same(texts[cluster[-1]], text):",
        ("llm/answers/test_samples",),
    ),
    Fault(
        "hidden-tokens-have-no-entropy",
        "llm",
        "return known + packed, known + equal",
        "return known, known + equal",
        ("llm/answers/test_scores",),
    ),
    Fault(
        "stored-signals-replaced",
        "llm",
        "return {**dict.fromkeys(stored), **found, **given}, {",
        "return {**dict.fromkeys(stored), **given, **found}, {",
        ("llm/answers/test_signals",),
    ),
    Fault(
        "answers-always-kept",
        "llm",
        "auto = Auto(keep_argmax=keep_predictions)",
        "auto = Auto(keep_argmax=True)",
        ("llm/test_workflows",),
    ),
    Fault(
        "parquet-rows-not-counted",
        "data",
        "if count != declared:",
        "if count > declared:",
        ("data/test_formats",),
    ),
    Fault(
        "list-size-by-type",
        "data",
        "if first is None or not first.num_rows:",
        "if True:",
        ("data/test_formats", "data/test_dataset"),
    ),
    Fault(
        "elements-without-bytes",
        "data",
        "math.prod(shape) * max(1, dtype.itemsize)",
        "math.prod(shape) * dtype.itemsize",
        ("data/test_formats",),
    ),
    Fault(
        "stride-of-a-single-value",
        "artifacts",
        "t.detach().cpu().clone(memory_format=usual)",
        "t.detach().cpu().clone()",
        ("artifacts/test_round_trip", "fuzz/test_"),
    ),
    Fault(
        "state-sums-unchecked",
        "monitor",
        "window._check()",
        "pass",
        ("monitor/test_stream", "fuzz/test_"),
    ),
    Fault(
        "clipping-zero-features",
        "calibrators",
        "if not len(coarse):  # features that are all zero",
        "if False:",
        ("calibrators/test_features",),
    ),
    Fault(
        "gap-bar-upside-down",
        "plots",
        "height=claimed - accuracy,",
        "height=accuracy - claimed,",
        ("plots/test_reliability",),
    ),
    Fault(
        "shares-scaled-apart",
        "plots",
        "peak = float(np.nanmax(share)) if most is None else most",
        "peak = float(np.nanmax(share))",
        ("plots/test_reliability",),
    ),
    Fault(
        "name-starts-a-formula",
        "plots",
        'escaped = cut.replace("$", r"\\$")',
        "escaped = cut",
        ("plots/test_look", "plots/test_reliability"),
    ),
    Fault(
        "figure-written-in-place",
        "plots",
        "with replacing(Path(out)) as temporary,",
        "temporary = Path(out)\n    with",
        ("plots/test_look",),
    ),
    Fault(
        "change-not-in-points",
        "plots",
        "100 * curve.change",
        "curve.change",
        ("calibrators/test_margin_curves",),
    ),
    Fault(
        "best-order-of-accuracy",
        "plots",
        "np.maximum(kept - (100 - whole), 0) / kept * 100",
        "np.maximum(kept - whole, 0) / kept * 100",
        ("plots/test_selective",),
    ),
    Fault(
        "threshold-one-answer-short",
        "plots",
        "(curve.threshold >= limit.threshold)",
        "(curve.threshold > limit.threshold + 1e-2)",
        ("plots/test_selective",),
    ),
    Fault(
        "forest-in-fractions",
        "plots",
        "100.0 if percent else 1.0",
        "1.0",
        ("plots/test_comparison",),
    ),
    Fault(
        "figure-takes-unlabelled-rows",
        "workflows",
        "kept &= checks.as_weight(weight, labels.shape).reshape(labels.shape) > 0",
        "pass",
        ("workflows/test_figure",),
        within="_counted",
    ),
    Fault(
        "map-of-the-mean-margin",
        "calibrators",
        "odds + math.log(classes - 1)",
        "odds",
        ("plots/test_maps",),
    ),
    Fault(
        "report-gap-upside-down",
        "reports",
        "return self.confidence - self.accuracy",
        "return self.accuracy - self.confidence",
        ("reports/test_findings", "reports/test_model"),
    ),
    Fault(
        "report-tests-not-adjusted",
        "reports",
        "running = max(running, min(1.0, (len(p_values) - rank) * p_values[i]))",
        "running = p_values[i]",
        ("reports/test_model", "reports/test_findings"),
    ),
    Fault(
        "report-one-tail",
        "reports",
        "return min(1.0, 2 * min(at_least, at_most))",
        "return min(at_least, at_most)",
        ("reports/test_model",),
    ),
    Fault(
        "report-thresholds-uncalibrated",
        "reports",
        "return self.remedy.coverage if self.remedy and self.remedy.coverage else self.coverage",
        "return self.coverage",
        ("reports/test_measure",),
    ),
    Fault(
        "report-markdown-unescaped",
        "reports",
        "for raw, safe in _ENTITIES.items():",
        "for raw, safe in ():",
        ("reports/test_forms",),
    ),
    Fault(
        "report-average-hides-ranges",
        "reports",
        'return "warn" if low >= SMALL or worst_range(subject) else "good"',
        'return "warn" if low >= SMALL else "good"',
        ("reports/test_findings",),
    ),
    Fault(
        "report-script-blocked",
        "reports",
        "script-src 'sha256-{digest}'",
        "script-src 'none'",
        ("reports/test_in_browser",),
    ),
    Fault(
        "report-gate-on-uncalibrated-file",
        "reports",
        "file, evaluation = CALIBRATED, remedy.after",
        "evaluation = remedy.after",
        ("reports/test_build",),
    ),
    Fault(
        "report-thresholds-rounded-to-one",
        "reports",
        "max(4, 2 - math.floor(math.log10(distance)))",
        "4",
        ("reports/test_forms",),
    ),
    # The page.
    Fault(
        "page-for-any-host",
        "ui",
        "if not self.is_own(host):",
        "if False:",
        ("ui/test_guard",),
    ),
    Fault(
        "page-for-names-of-others",
        "ui",
        "return not is_loopback(host) and _is_address(name)",
        "return not is_loopback(host)",
        ("ui/test_guard",),
    ),
    Fault(
        "page-for-neighbouring-ports",
        "ui",
        'site in (None, "same-origin")',
        'site != "cross-site"',
        ("ui/test_guard",),
    ),
    Fault(
        "page-without-token",
        "ui",
        'if not self._is_token(headers.get(TOKEN_HEADER, "")):',
        "if False:",
        ("ui/test_guard",),
    ),
    Fault(
        "page-and-cookies-of-neighbours",
        "ui",
        'if key == name), "")',
        'if key), "")',
        ("ui/test_guard",),
    ),
    Fault(
        "report-without-sandbox",
        "ui",
        'headers={"content-security-policy": REPORT_POLICY}',
        "headers={}",
        ("ui/test_app",),
    ),
    Fault(
        "upload-without-end",
        "ui",
        "if size > self.limit:",
        "if False:",
        ("ui/test_uploads",),
    ),
    Fault(
        "upload-leaves-its-rest",
        "ui",
        "            shutil.rmtree(upload.folder)\n            raise",
        "            raise",
        ("ui/test_uploads",),
    ),
    Fault(
        "job-that-was-stopped-goes-on",
        "ui",
        "elif kind not in LAST:",
        "elif False:",
        ("ui/test_jobs",),
    ),
    Fault(
        "arrays-of-any-size",
        "ui",
        "if size > memory:",
        "if False:",
        ("ui/test_tasks",),
    ),
    Fault(
        "page-drops-the-split",
        "ui",
        "split=choices.fit_split,",
        "",
        ("ui/test_tasks",),
        within="_fit",
    ),
    # Charts and boxes of notebooks and reports.
    Fault(
        "markup-in-chart-text",
        "display",
        'return element("text", escaped(content), x=x, y=y, **attributes)',
        'return element("text", str(content), x=x, y=y, **attributes)',
        ("display/test_svg",),
    ),
    Fault(
        "markup-in-table-cell",
        "display",
        "c if isinstance(c, Html) else escaped(c) for c in content",
        "str(c) for c in content",
        ("display/test_html", "display/test_results"),
    ),
    Fault(
        "undefined-bins-drawn",
        "display",
        "if finite(*values[:2])",
        "if True",
        ("display/test_svg",),
    ),
    Fault(
        "gap-from-zero",
        "display",
        "sorted((self.accuracy, self.confidence))",
        "sorted((0.0, self.confidence))",
        ("display/test_svg",),
    ),
    Fault(
        "linear-drift",
        "display",
        "(0, max(len(names) - 1, 1)), span, log=log)",
        "(0, max(len(names) - 1, 1)), span)",
        ("display/test_svg",),
    ),
    Fault(
        "sure-tokens-shaded",
        "display",
        "round(STRONGEST * (1 - prob))",
        "round(STRONGEST * prob)",
        ("display/test_tokens",),
    ),
    Fault(
        "style-reaches-the-page",
        "display",
        ".cal.cal table{border-collapse",
        "table{border-collapse",
        ("display/test_html",),
    ),
    Fault(
        "before-shown-as-after",
        "display",
        "return [headings, *((*before, *after[1:]) for before, after in pairs)]",
        "return [headings, *((*before, *before[1:]) for before, after in pairs)]",
        ("display/test_results", "workflows/test_effect"),
    ),
    Fault(
        "temperature-missing-from-line",
        "display",
        'alone or float(values["temperature_"]) != 1',
        "False",
        ("display/test_results",),
    ),
    # Trackers and trainers.
    Fault(
        "ends-of-intervals-swapped",
        "integrations",
        'f"{name}_low": low, f"{name}_high": high}',
        'f"{name}_low": high, f"{name}_high": low}',
        ("integrations/test_logged",),
    ),
    Fault(
        "repeated-examples-counted",
        "integrations",
        "* sampler.num_replicas + sampler.rank >= len(",
        "* sampler.num_replicas + sampler.rank > len(",
        ("integrations/test_stream",),
    ),
    Fault(
        "flat-tokens-taken-for-examples",
        "integrations",
        "if len(targets) != min(",
        "if len(targets) < min(",
        ("integrations/test_stream",),
    ),
    Fault(
        "sanity-check-logged",
        "integrations",
        """        if not trainer.sanity_checking:
            self._finish(""",
        """        if True:
            self._finish(""",
        ("integrations/test_lightning",),
    ),
    Fault(
        "weights-of-lightning-dropped",
        "integrations",
        'known = ("logits", "probs", "labels", "sample_weight", "by")',
        'known = ("logits", "probs", "labels", "by")',
        ("integrations/test_lightning",),
    ),
    Fault(
        "next-token-not-shifted",
        "integrations",
        "logits, labels = logits[:, :-1], labels[:, 1:]",
        "logits, labels = logits[:, 1:], labels[:, 1:]",
        ("integrations/test_huggingface",),
    ),
    Fault(
        "batches-of-the-last-evaluation-kept",
        "integrations",
        "stream, self._stream = self._stream, self._stream.like()",
        "stream = self._stream",
        ("integrations/test_huggingface",),
    ),
    Fault(
        "bins-of-empty-rows",
        "integrations",
        "for row in rows if row[2]]",
        "for row in rows]",
        ("integrations/test_logged", "integrations/test_wandb"),
    ),
    Fault(
        "step-of-mlflow-dropped",
        "integrations",
        "mlflow.log_metrics(scalars(evaluation, prefix), step=step)",
        "mlflow.log_metrics(scalars(evaluation, prefix))",
        ("integrations/test_mlflow",),
    ),
    Fault(
        "predicted-classes-as-probabilities",
        "integrations",
        'if probs.dtype.kind != "f":',
        'if probs.dtype.kind not in "fi":',
        ("integrations/test_mlflow",),
    ),
    Fault(
        "wrong-answers-of-confidence-0-are-right",
        "integrations",
        "outcome = ~np.signbit(values)",
        "outcome = values >= 0",
        ("integrations/test_mlflow",),
    ),
    Fault(
        "residuals-not-rounded",
        "integrations",
        "return np.round(np.where(outcome, 1 - values, -values), DIGITS), outcome",
        "return np.where(outcome, 1 - values, -values), outcome",
        ("integrations/test_mlflow",),
    ),
    Fault(
        "chosen-labels-not-weighted",
        "llm",
        "weight[known] = 1 / used",
        "weight[known] = 1.0",
        ("judges/test_rates",),
    ),
    Fault(
        "unseen-errors-of-a-judge-forgotten",
        "llm",
        "return min(max(seen, unseen), most) + self.predicted",
        "return min(max(seen, 0.0), most) + self.predicted",
        ("judges/test_rates",),
    ),
    Fault(
        "systems-compared-without-common-questions",
        "llm",
        "return float(a @ b) / size if size else 0.0",
        "return 0.0",
        ("judges/test_rates",),
    ),
    Fault(
        "wins-of-the-second-answer-counted",
        "llm",
        "first = (wins + 1 - swapped) / 2",
        "first = (wins + swapped) / 2",
        ("judges/test_biases",),
    ),
    Fault(
        "options-averaged-by-letter",
        "llm",
        "total[:, list(order)] += log_softmax(shown, axis=-1)",
        "total += log_softmax(shown, axis=-1)",
        ("answers/test_option_bias",),
    ),
    Fault(
        "claims-of-an-answer-split-over-folds",
        "llm",
        "folds = (np.random.default_rng(0).permutation(names.size) % FOLDS)[number]",
        "folds = np.random.default_rng(0).permutation(number.size) % FOLDS",
        ("claims/test_maps",),
    ),
    Fault(
        "tokens-at-the-end-of-a-claim-lost",
        "llm",
        "inside = (owner >= 0) & (ends[:, 0] < span[1]) & (ends[:, 1] > span[0])",
        "inside = (owner >= 0) & (ends[:, 1] <= span[1]) & (ends[:, 0] >= span[0])",
        ("claims/test_spans",),
    ),
    Fault(
        "streamed-logits-before-the-head",
        "llm",
        "stack.callback(inner.register_forward_hook(self._listen).remove)",
        "stack.callback(inner.register_forward_hook(self._listen, prepend=True).remove)",
        ("answers/test_streaming",),
    ),
    # Logs and services.
    Fault(
        "options-not-divided-by-length",
        "llm",
        "scores = likelihoods / np.array([length(text) for text in texts])",
        "scores = likelihoods",
        ("llm/logs/test_harness",),
    ),
    Fault(
        "every-filter-of-a-task-is-read",
        "llm",
        'if str(sample.get("filter", "")) != (wanted or next(iter(filters))):',
        "if False:",
        ("llm/logs/test_harness",),
    ),
    Fault(
        "no-answer-counts-as-right",
        "llm",
        'GRADES = {"C": True, "I": False, "N": False}',
        'GRADES = {"C": True, "I": False, "N": True}',
        ("llm/logs/test_inspect",),
    ),
    Fault(
        "logprob-of-nan-accepted",
        "llm",
        "if not value <= 1e-6:  # NaN too",
        "if value > 1e-6:",
        ("llm/logs/test_reading", "llm/endpoints/test_collecting"),
    ),
    Fault(
        "threshold-on-the-half-of-the-map",
        "llm",
        "_threshold(calibrator, _chosen(answers, held_out), max_error, level)",
        "_threshold(calibrator, _chosen(answers, ~held_out), max_error, level)",
        ("llm/logs/test_study",),
    ),
    Fault(
        "half-of-the-answers-not-of-the-questions",
        "llm",
        "return np.asarray(order[groups] % 2 == 1)",
        "return np.random.default_rng(seed).permutation(len(groups)) % 2 == 1",
        ("llm/logs/test_study",),
    ),
    Fault(
        "key-in-the-errors-of-a-service",
        "llm",
        'return text.replace(key, "***") if key else text',
        "return text",
        ("llm/endpoints/test_collecting",),
    ),
    Fault(
        "retry-after-ignored",
        "llm",
        "if error.retry_after is not None:",
        "if False:",
        ("llm/endpoints/test_collecting",),
    ),
    Fault(
        "finished-questions-asked-again",
        "llm",
        "if plan.key(asked) not in finished]",
        "]",
        ("llm/endpoints/test_collecting",),
    ),
    Fault(
        "tokens-of-the-statement-kept",
        "llm",
        "row |= {name: reply[name][:kept] for name in TOKEN_LISTS if name in reply}",
        "pass",
        ("llm/endpoints/test_",),
    ),
    Fault(
        "harness-averages-the-wrong-labels",
        "integrations",
        "right = task.doc_to_choice(doc).index(right)",
        "right = 0",
        ("integrations/test_lm_eval",),
    ),
    Fault(
        "kinds-measured-where-the-map-was-fitted",
        "reports",
        "(names == name) & study.held_out)",
        "(names == name))",
        ("reports/test_answers",),
    ),
    # Subgroups.
    Fault(
        "cut-belongs-to-the-bin-below",
        "data",
        'codes = np.searchsorted(self.cuts, numbers, side="right")',
        'codes = np.searchsorted(self.cuts, numbers, side="left")',
        ("data/test_metadata",),
    ),
    Fault(
        "missing-values-have-no-code",
        "data",
        "np.where(missing, self.size - 1, codes)",
        "np.where(missing, 0, codes)",
        ("data/test_metadata",),
    ),
    Fault(
        "identifiers-form-subgroups",
        "data",
        "if counts[i] >= fewest and not",
        "if not",
        ("data/test_metadata",),
    ),
    Fault(
        "subgroups-not-corrected-for-the-search",
        "slices",
        "return float(np.quantile(largest, level))",
        "return float(np.quantile(np.abs(noise / noise.std()), level))",
        ("slices/test_search",),
    ),
    Fault(
        "critical-value-of-one-estimand",
        "slices",
        "signs = [np.ones_like(scale), outcomes.sign][: len(tables.estimands)]",
        "signs = [np.ones_like(scale)]",
        ("slices/test_search",),
    ),
    Fault(
        "scatter-of-residuals-forgotten",
        "slices",
        "        _alike(happened, scatter, weight, otherwise=np.full_like(weight, np.inf)),",
        "        np.full_like(weight, np.inf),",
        ("slices/test_search",),
    ),
    Fault(
        "weights-of-gaps-not-squared",
        "slices",
        "square * variance, square * residual**2",
        "weight * variance, weight * residual**2",
        ("slices/test_search",),
    ),
    Fault(
        "confidence-of-class-0-not-flipped",
        "slices",
        "np.where(flipped, 1 - self.happened, self.happened)",
        "np.where(flipped, self.happened, self.happened)",
        ("slices/test_",),
    ),
    Fault(
        "overlaps-without-sign",
        "slices",
        "inside[:, flipped] *= outcomes.sign[:, None]",
        "pass",
        ("slices/test_selection",),
    ),
    Fault(
        "explained-subgroups-named-too",
        "slices",
        "left = score - part @ solved[:, 0]",
        "left = score",
        ("slices/test_selection",),
    ),
    Fault(
        "small-subgroups-searched",
        "slices",
        "fits = (sums[0] >= min_size) & (sums[0] < everyone) if chosen",
        "fits = (sums[0] > 0) & (sums[0] < everyone) if chosen",
        ("slices/test_find", "slices/test_search"),
    ),
    Fault(
        "groups-not-corrected-for-their-number",
        "slices",
        "(1 - level) / (2 * used.size)",
        "(1 - level) / 2",
        ("slices/test_groups",),
    ),
    Fault(
        "false-positives-among-all",
        "slices",
        '"false_positive_rate": _share(weight - events),',
        '"false_positive_rate": _share(weight),',
        ("slices/test_groups",),
    ),
    Fault(
        "found-subgroups-measured-where-found",
        "workflows",
        "for start in (0.0, 0.5)]",
        "for start in (0.0, 0.0)]",
        ("workflows/test_evaluate",),
    ),
    Fault(
        "calibrator-not-applied-before-the-search",
        "slices",
        "if self.calibrator is not None:",
        "if False:",
        ("slices/test_find", "slices/test_groups"),
        within="Reading",
    ),
    Fault(
        "subgroups-of-the-last-shard-alone",
        "workflows",
        "total.by.setdefault(name, total.like()).merge(part)",
        "total.by[name] = part",
        ("workflows/test_evaluate",),
    ),
    Fault(
        "certain-claims-leave-no-room",
        "slices",
        "possible = np.clip(claimed, CERTAIN, 1 - CERTAIN)",
        "possible = claimed",
        ("slices/test_find", "slices/test_groups"),
    ),
)


if __name__ == "__main__":
    sys.exit(main())
