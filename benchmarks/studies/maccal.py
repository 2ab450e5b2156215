"""MaC-Cal on the features of a real network, against its rivals, and its choices one by one.

    python benchmarks/studies/maccal.py DATA > docs/data/maccal.csv

DATA is a folder with predictions.npz (val and test with features, the last layer) and train (shards
with train_features). Another network: ``--predictions FILE --train SHARDS --others FILE...``; the
further splits with features, of predictions and others, are measured too. ``--ood NAME...`` names
those whose images are of none of the classes: for them the AUROC of the confidence against test.
Temperatures and SMART are fitted on val, which is also what MaC-Cal holds out. One row for each
run, calibrator after it, and split, written when the run ends. A run takes about ten seconds on one
core; ``--workers`` are processes.

    python benchmarks/studies/maccal.py --tables docs/data

makes the tables of the documentation, table_maccal_*.csv, from maccal.csv, maccal_mixup.csv and
maccal_resnet50.csv in that folder.
"""

import argparse
import csv
import os
import statistics
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch
from rows import Rows, chosen, read, shown, write_tables
from torch.nn import functional as F

import calibrant as cal
from calibrant.calibrators.maccal import MaCCal
from calibrant.calibrators.maccal.masked import masked_step

FIGURES = ("accuracy", "ece", "ada_ece", "nll", "brier", "auroc")
COLUMNS = (
    *("study", "method", "setting", "seed", "inference", "after", "split", "n"),
    *FIGURES,
    *("confidence", "ood_auroc", "keep", "seconds"),
)
AFTER = {"none": cal.calibrators.Identity, "ts": cal.TemperatureScaling, "smart": cal.SMART}
SWEPT = 2
"""Seeds of the sweeps."""


class Variant(MaCCal):
    """MaC-Cal with parts left out, one by one."""

    mask_forward = mask_update = True

    def _learn(self, run, batch, random):
        masks = run.classifier.draw(random)
        loss, logits = self._loss(
            run.classifier, batch, masks if self.mask_forward else None, random
        )
        run.optimiser.zero_grad()
        loss.backward()
        if self.mask_update:
            masked_step(run.optimiser, run.classifier, masks)
        else:
            run.optimiser.step()
        return loss, logits

    def _loss(self, classifier, batch, masks, random):
        full = classifier.keep_.new_ones(())
        logits = classifier(batch.features, masks or (full, full))
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        return (losses * batch.weight).sum() / batch.weight.sum(), logits


class ForwardOnly(Variant):
    """Masks in the forward pass alone: DropConnect."""

    mask_update = False


class UpdateOnly(Variant):
    mask_forward = False


class NoMasks(Variant):
    """Weights that are only multiplied by q in the end."""

    mask_forward = mask_update = False


class Watching(MaCCal):
    """The controller uses held-out predictions under one mask."""

    def _learn(self, run, batch, random):
        self._random = random
        return super()._learn(run, batch, random)

    def _watch(self, classifier, watched):
        def masked(features):
            return classifier(features, classifier.draw(self._random))

        return super()._watch(masked, watched)


class Dropout(NoMasks):
    """Half of the features and of the hidden units are dropped."""

    def _loss(self, classifier, batch, masks, random):
        first, second = classifier.first, classifier.second
        inputs = dropped(batch.features, random)
        hidden = dropped(F.relu(F.linear(inputs, first.weight, first.bias)), random)
        logits = F.linear(hidden, second.weight, second.bias)
        return F.cross_entropy(logits, batch.labels), logits


def dropped(values: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    kept = torch.rand(values.shape, generator=random, device=values.device) < 0.5
    return 2 * values * kept


class Mixup(NoMasks):
    """Mixes pairs of features and their labels, with shares that are uniform in (0, 1)."""

    def _loss(self, classifier, batch, masks, random):
        other = torch.randperm(len(batch.labels), generator=random, device=random.device)
        share = torch.rand((), generator=random, device=random.device)
        mixed = share * batch.features + (1 - share) * batch.features[other]
        one = torch.ones((), device=random.device)
        logits = classifier(mixed, (one, one))
        losses = (F.cross_entropy(logits, batch.labels[i]) for i in (slice(None), other))
        first, second = losses
        return share * first + (1 - share) * second, logits


class Run(NamedTuple):
    """What is trained: a class and its options, and what the control looks at."""

    study: str
    method: str
    setting: str
    seed: int
    kind: type[MaCCal]
    options: dict[str, Any]
    control: str


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("data", nargs="?", type=Path)
    parser.add_argument("--predictions", type=Path)
    parser.add_argument("--train", type=Path)
    parser.add_argument("--others", type=Path, nargs="*", default=[])
    parser.add_argument("--ood", nargs="*", default=[])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--studies", nargs="*", help="of rivals gamma bottleneck keep masks ...")
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.tables is not None:
        write_tables(given.tables, tables(given.tables))
        return
    if given.data is not None:
        given.predictions, given.train = given.data / "predictions.npz", given.data / "train"
    elif given.predictions is None or given.train is None:
        parser.error("give DATA, or --predictions and --train")
    out = csv.writer(sys.stdout)
    out.writerow(COLUMNS)
    for rows in results(given):
        out.writerows(rows)
        sys.stdout.flush()


def results(given: argparse.Namespace) -> Iterator[list[list[Any]]]:
    wanted = [r for r in runs(given.seeds) if not given.studies or r.study in given.studies]
    context = get_context("spawn")  # a fork would share the state of the GPU
    with ProcessPoolExecutor(given.workers, context, prepare, (given,)) as pool:
        yield pool.submit(original).result()
        ends = [pool.submit(measured, run, given.epochs) for run in wanted]
        for done, end in enumerate(as_completed(ends), 1):
            print(f"{done} of {len(ends)}", file=sys.stderr)
            yield end.compute()


def runs(seeds: int) -> Iterator[Run]:
    fixed: dict[str, Any] = {"keep": 1.0, "step": 0.0}
    rivals: dict[str, tuple[type[MaCCal], dict[str, Any], str]] = {
        "maccal, held out": (MaCCal, {}, "val"),
        "maccal, held out, 16 masks": (MaCCal, {"samples": 16}, "val"),
        "maccal, training set": (MaCCal, {}, "train"),
        "maccal, slice": (MaCCal, {}, "slice"),
        "plain": (NoMasks, fixed, "train"),
        "dropout": (Dropout, fixed, "train"),
        "dropconnect": (ForwardOnly, {"keep": 0.5, "step": 0.0}, "train"),
        "mixup": (Mixup, fixed, "train"),
    }
    for seed in range(seeds):
        for method, (kind, options, control) in rivals.items():
            yield Run("rivals", method, "", seed, kind, options, control)
    for seed in range(min(SWEPT, seeds)):
        for run in sweeps():
            yield run._replace(seed=seed)


def sweeps() -> Iterator[Run]:
    held: dict[str, tuple[Any, ...]] = {
        "bottleneck": (16, 64, 512),
        "keep": (0.5, 1.0),
        "gamma": (0.98, 1.02),
        "epochs": (10, 40),
        "step": (1.0, 16.0),
        "decay": (1e-4,),
    }
    for name, values in held.items():
        for value in values:
            yield Run(name, "maccal, held out", f"{value:g}", 0, MaCCal, {name: value}, "val")
    for name, values in {"gamma": (0.9, 0.925, 0.975, 1.0), "epochs": (10, 40)}.items():
        for value in values:
            options = {name: value}
            yield Run(name, "maccal, training set", f"{value:g}", 0, MaCCal, options, "train")
    parts = {"forward": ForwardOnly, "update": UpdateOnly, "neither": NoMasks}
    for setting, kind in parts.items():
        yield Run("masks", "controlled", setting, 0, kind, {}, "val")
    for setting, kind in {"both": MaCCal, **parts}.items():
        fixed = {"keep": 0.5, "step": 0.0}
        yield Run("masks", "q = 0.5", setting, 0, kind, fixed, "val")
    yield Run("watched", "maccal, held out", "masked", 0, Watching, {}, "val")
    yield Run("watched", "maccal, training set", "unmasked", 0, MaCCal, {"gamma": 0.95}, "itself")


# --------------------------------------------------------------------------------- in a process


class Part(NamedTuple):
    features: torch.Tensor
    labels: torch.Tensor


class Data(NamedTuple):
    """Everything that the runs share."""

    parts: dict[str, Part]
    ood: list[str]
    weight: torch.Tensor
    bias: torch.Tensor
    device: str

    @property
    def asked(self) -> dict[str, Part]:
        """What predictions are wanted for."""
        return {name: part for name, part in self.parts.items() if name != "train"}


DATA: list[Data] = []


def prepare(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # some settings are meant to fail
    files = [cal.open_dataset(path) for path in (given.predictions, given.train, *given.others)]
    parts = {}
    for file in files:
        for name in file.splits:
            split = file.split(name)
            if "features" in split.keys and "labels" in split.keys:
                features = torch.from_numpy(np.array(split.read("features"), np.float32))
                labels = torch.from_numpy(np.array(split.read("labels"), np.int64))
                parts[name] = Part(features.to(given.device), labels)
    layer = files[0].head
    assert layer is not None
    weight, bias = (torch.from_numpy(np.array(a, np.float32)).to(given.device) for a in layer)
    DATA[:] = [Data(parts, given.ood, weight, bias, given.device)]


def original() -> list[list[Any]]:
    data = DATA[0]
    logits = {n: F.linear(p.features, data.weight, data.bias) for n, p in data.asked.items()}
    return rows_of(("rivals", "original", "", 0, "original"), logits, "", 0.0)


def measured(run: Run, epochs: int) -> list[list[Any]]:
    data = DATA[0]
    start = time.perf_counter()
    module = run.kind(**{"epochs": epochs, "seed": run.seed, **run.options}).to(data.device)
    train, val = data.parts["train"], data.parts["val"]
    held_out: Any = {"val": val, "slice": 0.1, "itself": train, "train": None}[run.control]
    module.fit(*train, held_out=held_out)
    seconds, keep = time.perf_counter() - start, float(module.classifier.keep_)
    about = (run.study, run.method, run.setting, run.seed)
    found = []
    for inference in inferences(run):
        module.classifier.keep_.fill_(1.0 if inference == "unscaled" else keep)
        module.classifier.samples = 16 if inference == "16 masks" else 0
        logits = {name: logits_of(module, part) for name, part in data.asked.items()}
        found += rows_of((*about, inference), logits, f"{keep:.4f}", seconds)
    return found


def inferences(run: Run) -> tuple[str, ...]:
    """How the head is used after training; its own way comes first."""
    if run.options.get("samples"):
        return ("16 masks",)
    if run.method in ("plain", "dropout", "mixup") or run.study not in ("rivals", "masks"):
        return ("expected",)
    return ("expected", "unscaled", "16 masks")


@torch.no_grad()
def logits_of(module: MaCCal, part: Part) -> torch.Tensor:
    return torch.cat([module.classifier(block) for block in part.features.split(4096)])


def rows_of(
    about: tuple[Any, ...], logits: dict[str, torch.Tensor], keep: str, seconds: float
) -> list[list[Any]]:
    data, found = DATA[0], []
    answers = {name: values.double().cpu() for name, values in logits.items()}
    study, *_, inference = about
    for after, kind in AFTER.items():
        if after == "smart" and (study != "rivals" or inference == "unscaled"):
            continue
        calibrator = kind().fit(answers["val"], data.parts["val"].labels)
        probs = {name: calibrator.predict_proba(values) for name, values in answers.items()}
        for name in sorted(probs, key=lambda name: name != "test"):
            if name == "val":
                continue
            figures = figures_of(probs, name)
            found.append([*about, after, name, len(probs[name]), *figures, keep, f"{seconds:.1f}"])
    return found


def figures_of(probs: dict[str, torch.Tensor], name: str) -> list[str]:
    """Figures of a split; where no class is right there is only the AUROC against test."""
    data = DATA[0]
    confidence = probs[name].amax(-1)
    if name in data.ood:
        ood = cal.metrics.ood_auroc(probs["test"].amax(-1), confidence)
        return [*[""] * len(FIGURES), f"{confidence.mean():.6f}", f"{ood:.6f}"]
    labels = data.parts[name].labels
    found = cal.evaluate(probs=probs[name], labels=labels, metrics=FIGURES, level=None)
    return [f"{found[figure].value:.6f}" for figure in FIGURES] + [f"{confidence.mean():.6f}", ""]


# -------------------------------------------------------------------------------------- tables


def tables(folder: Path) -> dict[str, list[tuple[str, ...]]]:
    names = ("maccal", "maccal_mixup", "maccal_resnet50")
    small, mixed, large = (read(folder / f"{name}.csv") for name in names)
    tested = chosen(small, split="test")
    return {
        "table_maccal_rivals": rivals(tested),
        "table_maccal_sweeps": swept(tested),
        "table_maccal_masks": masks(tested),
        "table_maccal_mixup": rivals(chosen(mixed, split="test")),
        "table_maccal_resnet50": rivals(chosen(large, split="test")),
        "table_maccal_shift": shifted(large),
    }


def figures(rows: Rows) -> tuple[str, ...]:
    return shown(rows, "ece", 100), shown(rows, "nll", digits=4)


def rivals(rows: Rows) -> list[tuple[str, ...]]:
    """Every method in its own manner of inference, alone and with a calibrator after it."""
    given = chosen(rows, study="rivals")
    heading = ("head", "accuracy %", "ECE %", "AdaECE %", "NLL", "ECE %, ts", "NLL, ts")
    table: list[tuple[str, ...]] = [(*heading, "ECE %, smart", "NLL, smart", "q", "s")]
    for method in dict.fromkeys(row["method"] for row in given):
        own = chosen(given, method=method)
        own = [row for row in own if row["inference"] == own[0]["inference"]]
        alone, ts, smart = (chosen(own, after=after) for after in AFTER)
        ece, nll = figures(alone)
        table.append(
            (
                *(method, shown(alone, "accuracy", 100), ece, shown(alone, "ada_ece", 100), nll),
                *(*figures(ts), *figures(smart), shown(alone, "keep")),
                f"{statistics.median(float(row['seconds']) for row in alone):.0f}",
            )
        )
    return table


def shifted(rows: Rows) -> list[tuple[str, ...]]:
    """Means over five corruptions by severity, and the AUROC of images of no class."""
    foreign = list(dict.fromkeys(row["split"] for row in rows if row["ood_auroc"]))
    severities = ("1", "3", "5")
    table: list[tuple[str, ...]] = [
        (
            *("head", "after", *(f"ECE %, severity {n}" for n in severities), "NLL, severity 5"),
            *(f"AUROC %, {name}" for name in foreign),
        )
    ]
    for method in dict.fromkeys(row["method"] for row in rows):
        own = chosen(rows, method=method)
        own = [row for row in own if row["inference"] == own[0]["inference"]]
        for after in ("none", "ts"):
            same = chosen(own, after=after)
            parts = {n: [row for row in same if row["split"].endswith(f"_{n}")] for n in severities}
            errors = (f"{100 * mean(parts[n], 'ece'):.1f}" for n in severities)
            aurocs = (shown(chosen(same, split=name), "ood_auroc", 100, 1) for name in foreign)
            table.append((method, after, *errors, f"{mean(parts['5'], 'nll'):.2f}", *aurocs))
    return table


def mean(rows: Rows, figure: str) -> float:
    return statistics.fmean(float(row[figure]) for row in rows)


def swept(rows: Rows) -> list[tuple[str, ...]]:
    """One option changed at a time."""
    rows = chosen(rows, inference="expected")
    table: list[tuple[str, ...]] = [
        ("option", "control", "value", "accuracy %", "ECE %", "NLL", "NLL, ts", "q")
    ]
    changed = [row for row in rows if row["study"] not in ("rivals", "masks")]
    seeds = {row["seed"] for row in changed}
    compared = {row["method"] for row in changed}
    defaults = [row for row in chosen(rows, study="rivals") if row["seed"] in seeds]
    defaults = [{**row, "study": "(defaults)"} for row in defaults if row["method"] in compared]
    found = [*defaults, *changed]
    for about in dict.fromkeys((row["study"], row["method"], row["setting"]) for row in found):
        same = chosen(found, **dict(zip(("study", "method", "setting"), about, strict=True)))
        alone, ts = (chosen(same, after=after) for after in ("none", "ts"))
        option, method, value = about
        accuracy, nll = shown(alone, "accuracy", 100), figures(ts)[1]
        told = option, method.removeprefix("maccal, "), value
        table.append((*told, accuracy, *figures(alone), nll, shown(alone, "keep")))
    return [table[0], *sorted(table[1:], key=lambda row: (row[:2], order(row[2])))]


def order(value: str) -> tuple[float, str]:
    """Numbers by their size, words after them."""
    try:
        return float(value), ""
    except ValueError:
        return float("inf"), value


def masks(rows: Rows) -> list[tuple[str, ...]]:
    """Masks in the forward pass and in the update, and how the weights are used afterwards."""
    found = chosen(rows, study="masks")
    seeds = {row["seed"] for row in found}
    default = chosen(rows, study="rivals", method="maccal, held out")
    found += [
        {**row, "method": "controlled", "setting": "both"}
        for row in default
        if row["seed"] in seeds
    ]
    ways = ("expected", "unscaled", "16 masks")
    table: list[tuple[str, ...]] = [
        (
            *("control", "masks in", "q", *(f"ECE %, {way}" for way in ways)),
            *("NLL, expected", "NLL, expected, ts", "NLL, 16 masks, ts"),
        )
    ]
    for method in ("controlled", "q = 0.5"):
        for setting in ("both", "forward", "update", "neither"):
            same = chosen(found, method=method, setting=setting)
            alone = {way: chosen(same, inference=way, after="none") for way in ways}
            ts = {way: chosen(same, inference=way, after="ts") for way in ways}
            errors = (figures(alone[way])[0] for way in ways)
            nll = figures(alone["expected"])[1]
            after = (figures(ts[way])[1] for way in ("expected", "16 masks"))
            table.append((method, setting, shown(alone["expected"], "keep"), *errors, nll, *after))
    return table


if __name__ == "__main__":
    main()
