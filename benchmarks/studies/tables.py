"""Tables of the documentation from the rows of the studies.

    python benchmarks/studies/tables.py docs/data

Reads the rows of the studies in a folder (``real_models.csv``, ``smart_claims.csv``,
``smart_networks.csv``, ``training.csv``, ``gate.csv``) and writes the tables beside them.
"""

import statistics
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from rows import MISSING, Rows, read, shown, write_tables

Row = dict[str, str]
Key = TypeVar("Key", bound=Hashable)

STUDENT = {2: 6.314, 3: 2.920, 4: 2.353, 5: 2.132}
"""95 % quantiles of Student's t by the number of splits: ends of a 90 % interval."""
METHODS = (
    *("none", "ts", "ets", "vector", "matrix", "dirichlet", "cts", "pts", "smart"),
    *("sigmoid", "beta", "histogram", "histogram_ovr", "isotonic", "isotonic_ovr"),
    *("bbq", "scaling_binning", "spline", "odds", "blend", "auto"),
)
PAPER = ("none", "ts", "pts", "cts", "spline", "gc", "procal", "fc", "smart", "auto")
"""Columns of table 1 of the SMART paper, and what ``auto`` takes."""
KEEPING = ("none", "ts", "pts", "smart", "odds", "blend", "auto")
MAPS = ("ts", "sigmoid", "beta", "histogram", "isotonic", "bbq", "scaling_binning", "spline")
CHANGING = ("ts", "vector", "matrix", "dirichlet", "cts", "histogram_ovr", "isotonic_ovr", "auto")
LEFT_OUT = ("text_banking77_minilm", "imagenet1000_efficientnet_lite0_upscaled")
"""Files that are not among the fifteen of the mean."""


def main(folder: str) -> None:
    write_tables(Path(folder), tables(Path(folder)))


def tables(folder: Path) -> dict[str, list[Sequence[str]]]:
    names = ("real_models", "smart_claims", "training", "gate", "papers_training")
    models, claims, training, gate, papers = (read(folder / f"{name}.csv") for name in names)
    return {
        "table_training_resnet18": trained(training, "resnet18"),
        "table_training_resnet50": trained(training, "resnet50"),
        "table_training_after": trained_after(training),
        "table_training_papers": beside_papers(training, papers),
        "table_gate": by_epoch(gate),
        "table_paper": by_file(models, "ece", 100, 2, PAPER),
        "table_ece": by_file(models, "ece", 100, 2, KEEPING),
        "table_ece_maps": by_file(models, "ece", 100, 2, MAPS),
        "table_ece_changing": by_file(models, "ece", 100, 2, CHANGING),
        "table_nll": by_file(models, "nll", 1, 3, KEEPING),
        "table_methods": by_method(models),
        "table_variants": claimed(claims, "variant", "method", "SMART and others"),
        "table_objectives": claimed(claims, "objective", "setting", "objective"),
        "table_indicators": claimed(claims, "indicator", "setting", "indicator"),
        "table_smart_networks": of_networks(read(folder / "smart_networks.csv")),
        "table_samples": crossed(claims, "samples", lambda row: row["setting"], "samples"),
        "table_shift": crossed(claims, "shift", severity, "severity"),
    }


def own(rows: Rows) -> Rows:
    """Rows of the split that came with the model."""
    return [row for row in rows if row["split"] == "0"]


def grouped(rows: Iterable[dict[str, str]], key: Callable[[Row], Key]) -> dict[Key, Rows]:
    found: dict[Key, Rows] = defaultdict(list)
    for row in rows:
        found[key(row)].append(row)
    return found


def mean(rows: Rows, figure: str) -> float:
    return statistics.fmean(float(row[figure]) for row in rows)


def with_interval(rows: Rows, figure: str, scale: float, digits: int) -> str:
    """Mean over the splits, and half the width of its 90 % interval."""
    values = [scale * float(row[figure]) for row in rows]
    shown = f"{statistics.fmean(values):.{digits}f}"
    if len(values) not in STUDENT:
        return shown
    half = STUDENT[len(values)] * statistics.stdev(values) / len(values) ** 0.5
    return f"{shown}±{half:.{digits}f}"


def by_file(
    models: Rows, figure: str, scale: float, digits: int, methods: Sequence[str]
) -> list[Sequence[str]]:
    table: list[Sequence[str]] = [("model", *methods)]
    for name, rows in grouped(models, lambda row: row["file"]).items():
        found = grouped(rows, lambda row: row["method"])
        cells = [
            with_interval(found[method], figure, scale, digits) if found[method] else MISSING
            for method in methods
        ]
        table.append((name.replace("_", " "), *cells))
    return table


def by_method(models: Rows) -> list[Sequence[str]]:
    """Means over the fifteen files, of their own split and of all splits."""
    fifteen = [row for row in models if row["file"] not in LEFT_OUT]
    files = len({row["file"] for row in fifteen})
    table: list[Sequence[str]] = [
        (
            *("method", "ECE %", "NLL", "ECE %, five splits", "NLL, five splits", "AUROC"),
            *("changed %", "fit s"),
        )
    ]
    for method in METHODS:
        rows = [row for row in fifteen if row["method"] == method]
        first = own(rows)
        if len(first) < files:
            continue
        several = len(rows) > len(first)
        changed = statistics.fmean(float(row["changed"]) / int(row["measured"]) for row in first)
        table.append(
            (
                method,
                f"{100 * mean(first, 'ece'):.2f}",
                f"{mean(first, 'nll'):.4f}",
                f"{100 * mean(rows, 'ece'):.2f}" if several else MISSING,
                f"{mean(rows, 'nll'):.4f}" if several else MISSING,
                f"{mean(first, 'auroc'):.4f}",
                f"{100 * changed:.2f}",
                f"{statistics.median(float(row['seconds']) for row in first):.2g}",
            )
        )
    return table


def claimed(claims: Rows, study: str, key: str, title: str) -> list[Sequence[str]]:
    """Means over the fifteen files."""
    rows = [row for row in claims if row["study"] == study and row["file"] not in LEFT_OUT]
    table: list[Sequence[str]] = [(title, "ECE %", "NLL", "AUROC of confidence")]
    for name, part in grouped(rows, lambda row: row[key]).items():
        figures = f"{100 * mean(part, 'ece'):.2f}", f"{mean(part, 'nll'):.4f}"
        table.append((name, *figures, f"{mean(part, 'auroc'):.4f}"))
    return table


def of_networks(rows: Rows) -> list[Sequence[str]]:
    """ECE on the networks of the SMART paper: its figures beside the best and the mean seed."""
    table: list[Sequence[str]] = [
        (
            *("network", "raw, paper", "raw", "SMART, paper", "`smart_paper`, best seed"),
            *("`smart_paper`, mean", "`smart`, mean", "`ts`"),
        )
    ]
    columns: list[list[float]] = []
    for name, part in grouped(rows, lambda row: row["file"]).items():
        found = {
            method: [100 * float(row["ece"]) for row in some]
            for method, some in grouped(part, lambda row: row["method"]).items()
        }
        means = {method: statistics.fmean(values) for method, values in found.items()}
        figures = [means["paper, none"], means["none"], means["paper, smart"]]
        figures += [min(found["smart_paper"]), means["smart_paper"], means["smart"], means["ts"]]
        columns.append(figures)
        _, loss, data, network = name.split("_", 3)
        table.append((f"{data}, {network}, {loss}", *(f"{x:.2f}" for x in figures)))
    average = [statistics.fmean(column) for column in zip(*columns, strict=True)]
    return [*table, ("mean", *(f"{x:.2f}" for x in average))]


def crossed(
    claims: Rows, study: str, setting: Callable[[Row], str], title: str
) -> list[Sequence[str]]:
    """ECE of each method in each setting."""
    rows = [row for row in claims if row["study"] == study]
    methods = list(dict.fromkeys(row["method"] for row in rows))
    table: list[Sequence[str]] = [(title, *methods)]
    for name, part in grouped(rows, setting).items():
        found = grouped(part, lambda row: row["method"])
        table.append((name, *(f"{100 * mean(found[method], 'ece'):.2f}" for method in methods)))
    return table


def variant(row: dict[str, str]) -> str:
    """Name of a loss, with its alpha where that was chosen."""
    chosen = [option for option in row["options"].split() if option.startswith("alpha=")]
    return ", ".join((row["loss"], *chosen))


def trained(training: Rows, network: str) -> list[Sequence[str]]:
    """Figures of each loss as it is, and of cross-entropy with a temperature after it."""
    table: list[Sequence[str]] = [
        ("loss", "seeds", "accuracy", "ECE", "AECE", "O-ECE", "U-ECE", "NLL", "OOD AUROC")
    ]
    rows = [row for row in training if row["network"] == network]
    for loss, part in grouped(rows, variant).items():
        after = grouped(part, lambda row: row["after"])
        for calibrator in ("none", "ts") if loss == "ce" else ("none",):
            found = after[calibrator]
            name = loss if calibrator == "none" else f"{loss} + {calibrator}"
            figures = ("accuracy", "ece", "ada_ece", "over_ece", "under_ece")
            cells = [shown(found, figure, 100, 2) for figure in figures]
            cells += [shown(found, "nll", 1, 3), shown(found, "ood_auroc", 100, 1)]
            table.append((name, str(len(found)), *cells))
    return table


def trained_after(training: Rows) -> list[Sequence[str]]:
    """ECE and NLL of each loss, and of calibrators after it."""
    table: list[Sequence[str]] = [
        ("network", "loss", "ECE", "ECE, ts", "ECE, smart", "NLL", "NLL, ts", "NLL, smart")
    ]
    for (network, loss), part in grouped(
        training, lambda row: (row["network"], variant(row))
    ).items():
        after = grouped(part, lambda row: row["after"])
        eces = [shown(after[name], "ece", 100, 2) for name in ("none", "ts", "smart")]
        nlls = [shown(after[name], "nll", 1, 3) for name in ("none", "ts", "smart")]
        table.append((network, loss, *eces, *nlls))
    return table


def beside_papers(training: Rows, papers: Rows) -> list[Sequence[str]]:
    """ECE here and in the papers, all on CIFAR-10; theirs with ResNet-50 and 350 epochs."""
    table: list[Sequence[str]] = [
        (
            *("loss", "ResNet-18", "ResNet-50", "FeDLaS paper", "SMART paper"),
            *("ResNet-18 + smart", "ResNet-50 + smart", "SMART paper + smart"),
        )
    ]
    for paper in papers:

        def ours(network: str, after: str, loss: str = paper["loss"]) -> str:
            wanted = network, loss, after
            found = [r for r in training if (r["network"], variant(r), r["after"]) == wanted]
            return shown(found, "ece", 100, 2)

        table.append(
            (
                paper["loss"],
                *(ours(network, "none") for network in ("resnet18", "resnet50")),
                *(paper[column] or MISSING for column in ("fedlas_ece", "smart_ece")),
                *(ours(network, "smart") for network in ("resnet18", "resnet50")),
                paper["smart_ece_after_smart"] or MISSING,
            )
        )
    return table


def by_epoch(gate: Rows) -> list[Sequence[str]]:
    """What the gate of FeDLaS does in some epochs, means over the seeds."""
    table: list[Sequence[str]] = [
        ("network", "loss", "epoch", "gate +1, %", "flips, %", "smoothing lowered, %", "mean ratio")
    ]
    kept = [row for row in gate if row["epoch"] in ("1", "2", "10", "25", "30", "45", "60")]
    for (network, loss, epoch), part in grouped(
        kept, lambda row: (row["network"], row["loss"], row["epoch"])
    ).items():
        figures = ("gate_positive", "gate_flips", "smoothing_lowered")
        shown = [f"{100 * mean(part, figure):.1f}" for figure in figures]
        cells = [cell.replace("nan", MISSING) for cell in shown]
        table.append((network, loss, epoch, *cells, f"{mean(part, 'smoothing_ratio'):.2f}"))
    return table


def severity(row: Row) -> str:
    return row["setting"].rpartition("_")[2]


if __name__ == "__main__":
    main(sys.argv[1])
