"""Record what calibrant computes, and compare two records: a refactoring must change no number.

    python benchmarks/unchanged.py record before.json --data /path/to/data
    python benchmarks/unchanged.py record after.json --data /path/to/data
    python benchmarks/unchanged.py compare before.json after.json

Without --data, only the sample that comes with the package is used. Everything goes through the
command line and ``calibrant.load``, so that the same script runs on code before and after its
modules are renamed: to record another checkout, put its ``src`` first in PYTHONPATH.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import hashlib
import io
import json
import math
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch

import calibrant
from calibrant.calibrators.registry import PARTS
from calibrant.cli import main as command_line

FOLDERS = (
    *("cifar10_resnet50", "cifar10_resnet18", "tinyimagenet_resnet18", "cifar100_wideresnet16x4"),
    *("zoo", "choices", "tabular", "multilabel"),
)
MULTILABEL = "multilabel"
"""The folder whose labels are 0 or 1 for each tag: evaluated, never fitted on."""
WITH_FEATURES = "cifar10_resnet18/predictions"
EVERY_METHOD = (
    *("sample", "made/masked", "made/probs", "made/plain", WITH_FEATURES, "zoo/text_20news"),
    *("zoo/cifar10_resnet50_focal", "choices/mmlu_qwen_7b", "choices/vlm_oodcv_monkey"),
    *("tabular/leaf_id_flavia_network", "tabular/oj_logistic_balanced", "tabular/mroz_forest"),
    *("tabular/chile_boosting", "tabular/default_bayes"),
)
"""Files on which every method is compared, fitted and applied; on others, a few are compared."""
WITH_INTERVALS = ("sample", "zoo/text_20news", "tabular/oj_logistic_balanced", "made/plain")
"""Files whose comparison has intervals, which take most of its time."""
FAST = ("none", "ts", "smart", "auto", "isotonic", "beta")
FASTEST = ("none", "ts", "smart")
"""For files with more than ``MANY`` classes, and for a quick record."""
MANY = 200
NEED_FEATURES = ("gc", "procal", "fc", "maccal")
QUICK_FILES = ("sample", "tabular/oj_logistic_balanced", "tabular/chile_boosting", "made/plain")
UNLABELLED = -100
TOLERANCE = 1e-12
LISTED = 40
"""Differences that are printed of each kind."""


# What is recorded.


@dataclass
class Record:
    """Everything that was computed, each under a name that tells where it comes from."""

    about: dict[str, Any]
    figures: dict[str, float | None] = field(default_factory=dict)
    words: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, dict[str, Any]] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add_figures(self, name: str, found: Any) -> None:
        """Add the leaves of a nested dictionary: numbers as figures, the rest as words."""
        if isinstance(found, dict):
            for key, value in found.items():
                self.add_figures(f"{name}/{key}", value)
        elif found is None or (isinstance(found, (int, float)) and not isinstance(found, bool)):
            self.figures[name] = found
        else:
            self.words[name] = found


class Answer(NamedTuple):
    """What a command wrote, and its exit code."""

    code: int
    out: str
    err: str

    def failure(self) -> str:
        """The kind of failure, without its message, which may be worded anew."""
        lines = self.err.splitlines()
        if any(line.startswith("Traceback") for line in lines):
            return "bug"
        return "usage" if any(line.startswith("Usage:") for line in lines) else "error"


def record(out: Path, data: Path | None, quick: bool) -> None:
    """Write down everything, after each file again, so that a stopped run leaves something."""
    torch.set_num_threads(1)  # sums depend on how rows are shared among threads
    kept, started = Record(about()), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        found = [*made_files(Path(folder)), *given_files(data)]
        for case in found:
            if quick and case.name not in QUICK_FILES:
                continue
            before = time.perf_counter()
            record_case(kept, case, quick)
            kept.about["seconds"] = time.perf_counter() - started
            out.write_text(json.dumps(asdict(kept), indent=1) + "\n")
            taken = time.perf_counter() - before
            print(f"{case.name}: {taken:.1f} s", file=sys.stderr, flush=True)
    print(f"{count(kept)} in {kept.about['seconds']:.0f} s, in {out}")


def about() -> dict[str, Any]:
    return {
        "calibrant": str(Path(calibrant.__file__).parent),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "torch": torch.__version__,
    }


def count(kept: Record) -> str:
    parts = ("figures", "words", "tensors", "outputs")
    return ", ".join(f"{len(getattr(kept, part))} {part}" for part in parts)


# Files.


class Case(NamedTuple):
    """A prediction file, its name in the record, and options of the commands that get it."""

    name: str
    path: Path
    evaluate: tuple[str, ...] = ()
    compare: tuple[str, ...] = ()
    fit: tuple[str, ...] = ()


def given_files(data: Path | None) -> Iterator[Case]:
    yield Case("sample", Path(calibrant.sample_path()))
    for folder in FOLDERS if data is not None else ():
        for path in sorted((data / folder).glob("*.npz")):
            options = ("--multilabel",) if folder == MULTILABEL else ()
            yield Case(f"{folder}/{path.stem}", path, options)


def made_files(folder: Path) -> Iterator[Case]:
    """Files of other shapes, made from the sample: masked classes, probabilities, one set."""
    with np.load(calibrant.sample_path()) as arrays:
        sample = {key: arrays[key] for key in arrays if key.endswith(("logits", "labels"))}
    masked, probs = dict(sample), dict(sample)
    for split in ("val", "test"):
        logits, labels = sample[f"{split}_logits"], sample[f"{split}_labels"]
        masked[f"{split}_logits"] = with_masks(logits, labels)
        probs[f"{split}_probs"] = softmax(probs.pop(f"{split}_logits"))
    yield Case("made/masked", saved(folder / "masked.npz", masked))
    yield Case("made/probs", saved(folder / "probs.npz", probs))
    weighted = ("--sample-weight", "importance")
    columns = (*weighted, "--groups", "group")
    plain = saved(folder / "plain.npz", one_set(sample["val_logits"], sample["val_labels"], 2000))
    yield Case(
        *("made/plain", plain, (*weighted, "--by", "group")),
        *(columns, (*columns, "--cross-fit", "3")),
    )


def with_masks(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Two classes less in every third row, never that of the label."""
    found, rows = logits.copy(), np.arange(0, len(logits), 3)
    for step in (1, 2):
        found[rows, (labels[rows] + step) % logits.shape[-1]] = -np.inf
    return found


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits.astype(np.float64) - logits.max(-1, keepdims=True))
    return powers / powers.sum(-1, keepdims=True)


def one_set(logits: np.ndarray, labels: np.ndarray, size: int) -> dict[str, np.ndarray]:
    """Plain arrays with weights and groups, and some rows without a label."""
    rows = np.arange(size)
    return {
        "logits": logits[:size].astype(np.float32),
        "labels": np.where(rows % 20 == 7, UNLABELLED, labels[:size]),
        "importance": 0.5 + rows % 7 / 4,
        "group": rows // 3 % 5,
    }


def saved(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


def record_case(kept: Record, case: Case, quick: bool) -> None:
    with np.load(case.path) as arrays:
        keys = {key: arrays[key].shape for key in arrays}
    splits = sorted(key.removesuffix("labels") for key in keys if key.endswith("labels"))
    everything = case.name in EVERY_METHOD
    fitted = "val_" in splits or "" in splits
    usual = [s for s in splits if everything or s != "val_"]
    record_evaluations(kept, case, usual)
    if not fitted or case.name.startswith(f"{MULTILABEL}/"):
        return
    methods = methods_for(everything, keys)
    record_comparison(kept, case, FASTEST if quick else methods)
    if everything:
        for method in methods:
            record_fit(kept, case, method)
    if case.name == WITH_FEATURES:
        record_fit(kept, case, "maccal", "--train", str(case.path.parent / "train"))


def methods_for(everything: bool, keys: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
    methods = (*calibrant.CALIBRATORS, *PARTS) if everything else FAST
    if max(keys.get("val_logits", ())[1:], default=0) > MANY:
        methods = FASTEST
    return tuple(m for m in methods if m not in NEED_FEATURES or "val_features" in keys)


# Commands.


def run(*arguments: str) -> Answer:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        redirect_stdout(out),
        redirect_stderr(err),
        mock.patch.object(sys, "argv", ["calibrant", *arguments]),
        mock.patch.object(warnings, "showwarning", warnings.showwarning),  # main replaces it
    ):
        try:
            command_line()
            code: Any = 0
        except SystemExit as stopped:
            code = stopped.code or 0
    return Answer(int(code), out.getvalue(), err.getvalue())


def answer_of(kept: Record, name: str, *arguments: str) -> dict[str, Any] | None:
    """What a command says in JSON; None where it failed, which is written down."""
    answer = run(*arguments, "--json")
    kept.words[f"{name}/exit"] = answer.code
    if answer.code:
        kept.words[f"{name}/failure"] = answer.failure()
        return None
    found: dict[str, Any] = json.loads(answer.out)
    return found


def record_evaluations(kept: Record, case: Case, splits: list[str]) -> None:
    for split in splits:
        named = ["--split", split.removesuffix("_")] if split else []
        title = f"evaluate/{case.name}/{split.removesuffix('_')}"
        record_evaluation(kept, title, str(case.path), *named, *case.evaluate)


def record_evaluation(kept: Record, title: str, *arguments: str) -> None:
    found = answer_of(kept, title, "evaluate", *arguments)
    if found is not None:
        found["groups"] = found.pop("by", {})  # as records of earlier releases call it
        shown = ("n", "classes", "level", "metrics", "test", "groups")
        kept.add_figures(title, {key: found[key] for key in shown if key in found})


def record_comparison(kept: Record, case: Case, methods: tuple[str, ...]) -> None:
    title = f"compare/{case.name}"
    wanted = ["--methods", ",".join(methods), "--time-limit", "0", *case.compare]
    wanted += [] if case.name in WITH_INTERVALS else ["--level", "0"]
    found = answer_of(kept, title, "compare", str(case.path), *wanted)
    if found is None:
        return
    shown = ("n_fit", "n_test", "classes", "choice")
    kept.add_figures(title, {key: found[key] for key in shown if key in found})
    for row in found["rows"]:
        kept.words[f"{title}/{row['method']}/failed"] = row["error"] is not None
        figures = {**row["metrics"], "argmax_changed": row["argmax_changed"]}
        kept.add_figures(f"{title}/{row['method']}", figures)


def record_fit(kept: Record, case: Case, method: str, *options: str) -> None:
    """Fit a method, and write down what it learned and what it makes of the file."""
    title = f"fit/{case.name}/{method}"
    with tempfile.TemporaryDirectory() as folder:
        fitted, applied = f"{folder}/fitted", f"{folder}/applied.npz"
        arguments = ["fit", str(case.path), "--method", method, *case.fit, *options]
        found = answer_of(kept, title, *arguments, "-o", fitted)
        if found is None:
            return
        shown = ("n", "classes", "parameters", "temperature", "argmax_changed", "before", "after")
        kept.add_figures(title, {key: found[key] for key in shown if key in found})
        module = calibrant.load(fitted)
        for key, value in module.state_dict().items():
            if hasattr(value, "numpy"):  # not what was chosen, in words
                kept.tensors[f"{title}/{steady(key)}"] = fingerprint(value.numpy())
        record_probabilities(kept, title, module, case.path)
        code = run("apply", fitted, str(case.path), "-o", applied).code
        kept.words[f"{title}/apply/exit"] = code
        if not code:
            record_applied(kept, title, Path(applied))


def record_probabilities(kept: Record, title: str, module: Any, path: Path) -> None:
    """Of the test split or the plain arrays, with features where the file has them."""
    with np.load(path) as arrays:
        split = "test_" if "test_labels" in arrays else ""
        given = [arrays[split + key] for key in ("logits", "features") if split + key in arrays]
    if not given:  # a file of probabilities, which only apply takes
        return
    try:
        kept.outputs[f"{title}/predict_proba"] = fingerprint(module.predict_proba(*given))
    except Exception as problem:
        kept.words[f"{title}/predict_proba/failure"] = type(problem).__name__


def record_applied(kept: Record, title: str, path: Path) -> None:
    with np.load(path) as arrays:
        for key in arrays:
            if key.endswith(("logits", "probs")):
                kept.outputs[f"{title}/applied/{key}"] = fingerprint(arrays[key])


def steady(key: str) -> str:
    """Name of a tensor in records of every release."""
    former = {"chosen_": "chosen", "classifier": "head"}
    return ".".join(former.get(part, part) for part in key.split("."))


def fingerprint(values: np.ndarray) -> dict[str, Any]:
    """Hash of an array; its size and sum tell how far apart two that differ are."""
    content = np.ascontiguousarray(values)
    head = f"{content.dtype.str} {values.shape} ".encode()
    total = float(np.abs(values, dtype=np.float64).sum()) if values.dtype.kind in "fiu" else 0.0
    return {
        "sha256": hashlib.sha256(head + content.tobytes()).hexdigest(),
        "kind": head.decode().strip(),
        "sum": total,
    }


# Two records.


class Part(NamedTuple):
    """One kind of entry in both records."""

    kind: str
    compared: int
    differing: list[str]
    largest: float
    gone: list[str]
    new: list[str]

    @property
    def failed(self) -> bool:
        # tensors may be renamed, added or dropped as long as the outputs stay
        return bool(self.differing) or (self.kind != "tensors" and bool(self.gone))


def compare(before: Path, after: Path) -> int:
    """Print what differs; 1 if anything does."""
    old, new = (json.loads(path.read_text()) for path in (before, after))
    for key in sorted({*old["about"], *new["about"]} - {"calibrant", "seconds"}):
        if old["about"].get(key) != new["about"].get(key):
            print(f"note: {key} {old['about'].get(key)} before, {new['about'].get(key)} after")
    kinds = {"figures": figure_gap, "words": word_gap, "tensors": hash_gap, "outputs": hash_gap}
    parts = [compared(kind, old[kind], new[kind], gap) for kind, gap in kinds.items()]
    print_summary(parts)
    for part in parts:
        print_entries(f"{part.kind} that differ", part.differing)
        print_entries(f"{part.kind} only in {before}", part.gone)
        print_entries(f"{part.kind} only in {after}", part.new)
    failed = any(part.failed for part in parts)
    print("something differs" if failed else "nothing differs")
    return int(failed)


def compared(kind: str, old: dict[str, Any], new: dict[str, Any], gap: Any) -> Part:
    both = [name for name in old if name in new]
    gaps = {name: gap(old[name], new[name]) for name in both}
    differing = [
        f"{name}: {shown(old[name])} before, {shown(new[name])} after"
        for name in sorted(both, key=lambda name: -gaps[name])
        if gaps[name] > TOLERANCE
    ]
    gone, added = ([n for n in a if n not in b] for a, b in ((old, new), (new, old)))
    return Part(kind, len(both), differing, max(gaps.values(), default=0.0), gone, added)


def figure_gap(a: float | None, b: float | None) -> float:
    """The absolute or the relative difference, whichever is less."""
    if a is None or b is None or math.isnan(a) or math.isnan(b):
        return 0.0 if a is b or (a != a and b != b) else math.inf
    apart = abs(a - b)
    return min(apart, apart / max(abs(a), abs(b), TOLERANCE))


def word_gap(a: Any, b: Any) -> float:
    return 0.0 if a == b else math.inf


def hash_gap(a: dict[str, Any], b: dict[str, Any]) -> float:
    """None where the hashes are the same; else the relative difference of the sums, or more."""
    if a["sha256"] == b["sha256"]:
        return 0.0
    return max(figure_gap(a["sum"], b["sum"]), 2 * TOLERANCE)


def shown(entry: Any) -> str:
    if isinstance(entry, dict):
        return f"{entry['sha256'][:12]} ({entry['kind']}, sum {entry['sum']!r})"
    return repr(entry)


def print_summary(parts: list[Part]) -> None:
    print(f"{'':<10}{'compared':>10}{'differing':>11}{'largest':>10}{'gone':>7}{'new':>7}")
    for part in parts:
        numbers = f"{part.compared:>10}{len(part.differing):>11}{part.largest:>10.2g}"
        print(f"{part.kind:<10}{numbers}{len(part.gone):>7}{len(part.new):>7}")


def print_entries(title: str, entries: list[str]) -> None:
    if not entries:
        return
    print(f"\n{title}: {len(entries)}")
    for line in entries[:LISTED]:
        print(f"  {line}")
    if len(entries) > LISTED:
        print(f"  and {len(entries) - LISTED} more")


def arguments() -> argparse.ArgumentParser:
    summary = (__doc__ or "").splitlines()[0]
    parser = argparse.ArgumentParser(description=summary)
    verbs = parser.add_subparsers(dest="verb")
    recording = verbs.add_parser("record", help="write down what this calibrant computes")
    recording.add_argument("out", type=Path, metavar="OUT.json")
    recording.add_argument("--data", type=Path, metavar="FOLDER", help="folder of prediction files")
    recording.add_argument(
        "--quick",
        action="store_true",
        help="four files, for a minute; compare it with another quick one",
    )
    comparing = verbs.add_parser("compare", help="exit with 1 if two records differ")
    comparing.add_argument("before", type=Path, metavar="BEFORE.json")
    comparing.add_argument("after", type=Path, metavar="AFTER.json")
    return parser


def main() -> int:
    parser = arguments()
    given = parser.parse_args()
    if given.verb == "record":
        record(given.out, given.data, given.quick)
        return 0
    if given.verb == "compare":
        return compare(given.before, given.after)
    parser.print_help()
    return 0


if __name__ == "__main__":
    sys.exit(main())
