"""The verbs fit, apply and export."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    from calibrant.workflows.fit import Fit

METRICS = ("accuracy", "ece", "nll", "brier")
METHOD = "Method to fit; calibrant compare tries all of them."


@click.command()
@click.argument("pred")
@click.option("--method", default="auto", show_default=True, metavar="NAME", help=METHOD)
@click.option("--split", metavar="NAME", help=shared.SPLIT.format("fit on", "val"))
@shared.SET
@shared.COLUMNS
@shared.CHOICES
@click.option(
    "--cross-fit",
    "folds",
    type=click.IntRange(2),
    is_flag=False,
    flag_value=5,
    metavar="[K]",
    help="Fit on all examples of a file without a val set, and measure out of K folds.  [K: 5]",
)
@shared.SAMPLE_WEIGHT
@shared.GROUPS
@click.option("--seed", default=0, show_default=True, help="Seed of the folds.")
@click.option(
    "--train", metavar="FILE", help="Let maccal learn from the train split of a file, or of PRED."
)
@shared.MULTILABEL
@shared.TOP_LABEL
@shared.AS_JSON
@engine.engine_options
@engine.SKIP_BAD
@engine.CACHE
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder to save in.")
def fit(
    pred: str,
    method: str,
    options: tuple[str, ...],
    columns: str | None,
    choices: bool,
    folds: int | None,
    seed: int,
    train: str | None,
    estimand: str | None,
    form: str | None,
    workers: int | None,
    dask: str | None,
    skip_bad: bool,
    cache: str | None,
    out: str,
    **selection: str | None,
) -> None:
    """Fit a calibrator on a prediction file and save it in a folder.

    PRED is a file as for "calibrant evaluate". The fit uses its val split or, if there is none,
    the arrays without a name in front; never the test split, unless you name it. With --train
    the method maccal retrains the last layer on the features of a training set, and val controls
    how sure it is.

    \b
    Examples:
      calibrant fit predictions.npz -o calibrator
      calibrant fit predictions.npz --method ts --set objective=brier -o calibrator
      calibrant fit mmlu.npz --choices -o calibrator
      calibrant fit one_set.npz --method ts --cross-fit 10 -o calibrator
      calibrant fit tags.npz --multilabel -o calibrator
      calibrant fit patients.csv --method multicalibration --columns age,site -o calibrator
      calibrant fit predictions.npz --method maccal --train train.npz -o classifier
    """  # noqa: D301
    from calibrant._core.options import options_of, parse_options
    from calibrant.artifacts import save
    from calibrant.calibrators.registry import find_calibrator
    from calibrant.workflows.fit import cross_fit, fit_and_measure
    from calibrant.workflows.retrain import retrain_and_measure

    selected: dict[str, Any] = {**selection, **({"folds": folds, "seed": seed} if folds else {})}
    measured: Any = estimand or "auto"
    name, kind = find_calibrator(method, measured)
    if train and name != "maccal":
        raise click.UsageError(f"--train is for the method maccal, got {method}")
    if choices and (name != "auto" or estimand == "multilabel"):
        got = "--multilabel" if estimand == "multilabel" else method
        raise click.UsageError(f"--choices is for the method auto, got {got}: leave it out")
    chosen: dict[str, Any] = {"keep_argmax": False} if choices else {}
    chosen |= parse_options(name, options_of(kind), shared.named_texts(options))
    if columns:
        chosen["columns"] = shared.names_in(columns)
    common: dict[str, Any] = {"options": chosen, "metrics": METRICS, "estimand": measured}
    skipped: dict[str, str] = {}
    if train:
        at_scale = workers is not None or dask is not None or skip_bad or cache
        if any(selected.values()) or at_scale:
            raise click.UsageError(
                "with --train, maccal learns from the train split and is measured on val: leave "
                "out --cross-fit, --split, --sample-weight and --groups, and options for shards"
            )
        with engine.working(unit="epochs"):
            fitted = retrain_and_measure(pred, train=train, **common)
    else:
        workflow = cross_fit if folds else fit_and_measure
        with engine.working(workers, dask):
            data = engine.opened(pred, skip_bad, estimand, cache)
            skipped.update(data.skipped)
            fitted = workflow(data, method=name, **common, **selected)
    written = shared.how_written(out, "saved in")
    save(fitted.calibrator, out)
    with shared.until_closed():
        if form == "json":
            about = {"method": name, "options": chosen, "folds": folds, "saved": out}
            shared.write_json({**about, **fitted.to_dict(), "skipped": skipped})
        else:
            _print_fit(fitted, f"{name} on {pred}", folds)
    shared.say(f"{written}; to use it: calibrant apply {out} {pred} -o OUT")


@click.command()
@click.argument("folder", metavar="DIR")
@click.argument("pred")
@engine.engine_options
@engine.SKIP_BAD
@click.option(
    "-o",
    "--out",
    required=True,
    metavar="OUT",
    help="File to write, as the suffix says; without a suffix, a folder with a file per shard.",
)
def apply(
    folder: str, pred: str, workers: int | None, dask: str | None, skip_bad: bool, out: str
) -> None:
    """Calibrate a prediction file with a saved calibrator.

    Every split of PRED is calibrated; labels and other arrays are kept. OUT is one .npz,
    .safetensors, .parquet or .csv file, also for a folder or glob of shards; or a folder, for
    shards of the same names. After an interruption the same command goes on with the shards that
    are not there yet, or whose input has changed.

    \b
    Examples:
      calibrant apply calibrator predictions.npz -o calibrated.npz
      calibrant apply calibrator 'shards/*.npz' -o calibrated.safetensors
      calibrant apply calibrator shards --workers 8 -o calibrated
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.data.storage import is_remote
    from calibrant.workflows import apply as workflow
    from calibrant.workflows.apply_shards import apply_shards

    into_folder = is_remote(out) or not Path(out).suffix or Path(out).is_dir()
    if not into_folder and (workers is not None or dask is not None):
        raise click.UsageError(
            f"--workers and --dask write a file for each shard: {out} must be a folder, which has "
            "no suffix"
        )
    calibrator = load(folder)
    how = " --multilabel" if getattr(calibrator, "multilabel", False) else ""
    written = shared.how_written(out)
    with engine.working(workers, dask):
        data = engine.opened(pred, skip_bad, "multilabel" if how else None)
        if into_folder:
            shards = apply_shards(calibrator, data, out)
            written = f"{shards.describe()} in {out}"
        else:
            workflow.apply(calibrator, data, out)
    shared.say(f"{written}; to measure it: calibrant evaluate {out}{how}")


@click.command()
@click.argument("folder", metavar="DIR")
@click.option(
    "-o", "--out", required=True, metavar="FILE", help="File to write, .onnx or .pt2 (torch)."
)
@click.option("--tokens", is_flag=True, help="Logits are (batch, tokens, classes).")
@click.option("--probabilities", is_flag=True, help="Give probabilities instead of logits.")
@click.option("--opset", type=int, metavar="VERSION", help="Of the ONNX operators.  [default: 20]")
def export(folder: str, out: str, tokens: bool, probabilities: bool, opset: int | None) -> None:
    """Write a saved calibrator as a file that runs without calibrant.

    DIR is a folder that "calibrant fit" wrote. The input of the file is "logits" and its output
    "calibrated", or "probs" with --probabilities. It is tried on many inputs first, and not
    written where it gives other probabilities than the calibrator.

    \b
    Examples:
      calibrant export calibrator -o calibrator.onnx
      calibrant export calibrator -o calibrator.pt2 --tokens
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.deploy import EXPORTS

    suffix = Path(out).suffix
    if suffix not in EXPORTS:
        raise ValueError(f"cannot write {out}: the suffix must be one of {', '.join(EXPORTS)}")
    if opset is not None and suffix != ".onnx":
        raise click.UsageError(f"--opset is for .onnx files, got {out}")
    options: dict[str, Any] = {"tokens": tokens, "probabilities": probabilities}
    options |= {} if opset is None else {"opset": opset}
    written = shared.how_written(out)
    difference = EXPORTS[suffix](load(folder), out, **options)
    remark = (
        f"where tried, its probabilities differ from the calibrator's by up to {difference:.0e}"
    )
    shared.say(f"{written}; {remark}")


def _print_fit(fitted: Fit, title: str, folds: int | None) -> None:
    console = shared.new_console()
    where = f", {fitted.split} split" if fitted.split else ""
    console.print(title + where, style="bold", soft_wrap=True)
    for line in fitted.describe():
        console.print(line, soft_wrap=True)
    console.print()
    before, after, argmax_changed, _ = fitted.effect
    if before.table() == after.table() and not argmax_changed:
        figures = ", ".join(f"{title} {value}" for title, value, _ in before.table())
        where = f"Out of {folds} folds n" if folds else "N"
        console.print(f"{where}othing changes: {figures} before and after.", soft_wrap=True)
        return
    of = f", {before.probability}" if before.probability else ""
    both = list(zip(before.table(), after.table(), strict=True))
    if folds:
        heading = before.interval_heading
        headings = [f"out of {folds} folds{of}", "before", heading, "after", heading]
        rows = [[*one, *other[1:]] for one, other in both]
        remark = f"Each example was calibrated by a fit on the other {folds - 1} folds."
    else:
        headings = [f"on the data of the fit{of}", "before", "after"]
        rows = [[*one[:2], other[1]] for one, other in both]
        remark = "The fit has seen these examples: expect slightly worse figures on others."
    console.print(shared.text_table(headings, rows, bold=[3 if folds else 2]))
    console.print(remark)
