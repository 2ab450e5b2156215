"""The verbs fit, apply and export."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb

if TYPE_CHECKING:
    from calibrant.workflows.fit import Fit

METRICS = ("accuracy", "ece", "nll", "brier")


@_verb()
@click.argument("pred", type=FILE)
@_option(
    "--method",
    default="auto",
    metavar="NAME",
    help="Method to fit; 'calibrant methods' lists them.",
)
@shared.SET
@_option("-o", "--out", type=FILE, default="calibrator", metavar="DIR", help="Folder to save in.")
@_option(
    "--fit-split",
    "split",
    metavar="NAME",
    help="Split to fit on.  [default: val, else the unnamed split]",
)
@_option(
    "--cross-fit",
    "folds",
    type=click.IntRange(2),
    is_flag=False,
    flag_value=5,
    metavar="[K]",
    help="For a file without a val split: fit on all examples, and measure each one out of "
    "fold.  [K: 5]",
)
@shared.METADATA
@_option(
    "--train",
    type=FILE,
    metavar="FILE",
    help="File whose train split maccal learns from; it may be PRED.",
)
@shared.SAMPLE_WEIGHT
@shared.GROUPS
@shared.MULTILABEL
@shared.AS_JSON
@engine._reads_predictions(cache=True)
def fit(
    pred: str,
    method: str,
    options: tuple[str, ...],
    out: str,
    folds: int | None,
    columns: str | None,
    train: str | None,
    estimand: str | None,
    form: str | None,
    source: engine.InputFiles,
    **selection: Any,
) -> None:
    """Fit a calibrator on a prediction file and save it in a folder.

    PRED is a file as for "calibrant evaluate". The fit uses its val split or, if there is none, the
    arrays without a prefix; never the test split, unless you name it. With --train the method
    maccal retrains the last layer on the features of a training set, and val controls its
    confidence.

    \b
    Examples:
      calibrant fit predictions.npz
      calibrant fit predictions.npz --method ts --set objective=brier
      calibrant fit scores.csv --labels truth --probs p_cat,p_dog
      calibrant fit one_set.npz --method ts --cross-fit 10
      calibrant fit mmlu.npz --set keep_argmax=no
      calibrant fit patients.csv --method multicalibration --columns age,site
      calibrant fit predictions.npz --method maccal --train train.npz
    """  # noqa: D301
    from calibrant._core.options import options_of, parse_options
    from calibrant.artifacts import save
    from calibrant.calibrators.registry import find_calibrator
    from calibrant.workflows.fit import cross_fit, fit_and_measure
    from calibrant.workflows.retrain import retrain_and_measure

    name, kind = find_calibrator(method, estimand or "auto")  # type: ignore[arg-type]
    known = options_of(kind)
    try:
        chosen = parse_options(name, known, shared._named_texts(options))
    except click.UsageError as problem:
        has = f"the options {', '.join(known)}" if known else "no options"
        raise click.UsageError(f"{problem.message}; {name} has {has}") from None
    if columns:
        chosen["columns"] = shared._names_in(columns)
    common: dict[str, Any] = {"options": chosen, "estimand": estimand or "auto"}
    common["metrics"] = METRICS
    if train:
        _check_train(name, folds, selection, source)
    with source.working("epochs" if train else "examples"):
        data = source.open(pred, estimand)
        if train:
            fitted = retrain_and_measure(data, train=source.open(train), **common)
        elif folds:
            fitted = cross_fit(data, method=name, folds=folds, **common, **selection)
        else:
            fitted = fit_and_measure(data, method=name, **common, **selection)
    written = shared._how_written(out, "saved in")
    save(fitted.calibrator, out)
    title = f"{name} on {pred}"
    about: dict[str, Any] = {
        "method": name,
        "options": chosen,
        "folds": folds,
        "saved": out,
        "skipped": dict(data.skipped),
    }
    shared._show_result(form, fitted, show=lambda: _print_fit(fitted, title, folds), **about)
    shared._say_next(f"{written}; to use it", "apply", out, pred, *data.named.words)


def _check_train(
    name: str, folds: int | None, selection: dict[str, str | None], source: engine.InputFiles
) -> None:
    """Refuse options that do not go with --train."""
    if name != "maccal":
        raise click.UsageError(f"--train is for the method maccal, got {name}")
    if folds or any(selection.values()) or source.at_scale:
        raise click.UsageError(
            "with --train, maccal learns from the train split and is measured on val: leave "
            "out --cross-fit, --fit-split, --sample-weight and --groups, and options for shards"
        )


@_verb()
@click.argument("folder", metavar="DIR", type=FILE)
@click.argument("pred", type=FILE)
@_option(
    "-o",
    "--out",
    type=FILE,
    metavar="OUT",
    help="File to write; the suffix chooses the format. Without a suffix, a folder with a file "
    "per shard.  [default: calibrated, with the suffix of PRED]",
)
@engine._reads_predictions()
def apply(folder: str, pred: str, out: str | None, source: engine.InputFiles) -> None:
    """Calibrate a prediction file with a saved calibrator.

    Every split of PRED is calibrated; labels and other arrays are kept. OUT is one .npz,
    .safetensors, .parquet or .csv file, also for a folder or glob of shards; or a folder, for
    shards of the same names. After an interruption, repeat the command: it writes the shards that
    are missing, or whose input has changed.

    \b
    Examples:
      calibrant apply calibrator predictions.npz
      calibrant apply calibrator 'shards/*.npz' -o calibrated.safetensors
      calibrant apply calibrator shards --workers 8 -o calibrated
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.data.files import TABLES
    from calibrant.data.formats import is_remote
    from calibrant.workflows import apply as workflow
    from calibrant.workflows.apply import apply_shards

    out = out or _usual_target(pred)
    into_folder = is_remote(out) or not Path(out).suffix or Path(out).is_dir()
    if not into_folder and source.workers is not None:
        raise click.UsageError(
            f"--workers writes a file for each shard: {out} must be a folder, which has no suffix"
        )
    calibrator = load(folder)
    how = ["--multilabel"] if getattr(calibrator, "multilabel", False) else []
    written = shared._how_written(out)
    with source.working():
        data = source.open(pred, "multilabel" if how else None)
        if into_folder:
            shards = apply_shards(calibrator, data, out)
            written = f"{shards.describe()} in {out}"
        else:
            workflow.apply(calibrator, data, out)
    keeps_names = data.table_names and Path(out).suffix in ("", *TABLES)
    how += data.named.words if keeps_names else []
    if any("labels" in data.split(name).keys for name in data.splits):
        shared._say_next(f"{written}; to measure it", "evaluate", out, *how)
    else:
        shared.say(written)


def _usual_target(pred: str) -> str:
    """Return a file for a file, in its format if that can be written, and a folder for shards."""
    from calibrant.data.files import TABLES
    from calibrant.data.formats import is_remote

    if is_remote(pred) or glob.has_magic(pred) or Path(pred).is_dir():
        target = "calibrated"
    else:
        suffix = Path(pred).suffix
        target = f"calibrated{suffix if suffix in ('.safetensors', *TABLES) else '.npz'}"
    if Path(target).resolve() == Path(pred).resolve():
        raise click.UsageError(f"{pred} would be replaced: name another file with -o")
    return target


@_verb()
@click.argument("folder", metavar="DIR", type=FILE)
@_option(
    "-o",
    "--out",
    type=FILE,
    metavar="FILE",
    help="File to write, .onnx or .pt2 (torch).  [default: DIR.onnx]",
)
@_option("--tokens", is_flag=True, help="Logits are (batch, tokens, classes).")
@_option("--probabilities", is_flag=True, help="Output probabilities instead of logits.")
@_option(
    "--opset", type=int, metavar="VERSION", help="Version of the ONNX operators.  [default: 20]"
)
def export(folder: str, out: str | None, **options: Any) -> None:
    """Write a saved calibrator as a file that runs without calibrant.

    DIR is a folder that "calibrant fit" wrote. The input of the file is "logits" and its output
    "calibrated", or "probs" with --probabilities. It is tested on many inputs first, and not
    written if its probabilities differ from the calibrator's.

    \b
    Examples:
      calibrant export calibrator
      calibrant export calibrator -o calibrator.pt2 --tokens
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.deploy.exports import export

    out = out or f"{Path(folder)}.onnx"
    written = shared._how_written(out)
    difference = export(load(folder), out, **options)
    remark = (
        f"where tried, its probabilities differ from the calibrator's by up to {difference:.0e}"
    )
    shared.say(f"{written}; {remark}")


def _print_fit(fitted: Fit, title: str, folds: int | None) -> None:
    """Print what came of a fit, then what was learned, then the figures."""
    console = shared._new_console()
    where = f", {fitted.split} split" if fitted.split else ""
    console.print(title + where, style="bold", soft_wrap=True)
    effect = fitted.effect
    before, after = effect.before, effect.after
    same = before.table() == after.table() and not effect.argmax_changed
    if same:
        figures = ", ".join(f"{title} {value}" for title, value, _ in before.table())
        where = f"Out of {folds} folds n" if folds else "N"
        shared.write(console, f"{where}othing changes: {figures} before and after.", "bold")
    else:
        where = f"Out of {folds} folds" if folds else "On the data of the fit"
        kind = "good" if effect.improves else "warn"
        said = effect.headline().replace("→", "to")
        shared.write(console, f"{where}: {said}.", shared.COLOURS[kind])
    for line in fitted.describe():
        shared.write(console, line)
    if same:
        return
    console.print()
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
        remark = "Measured on fitting data; expect slightly worse figures on other examples."
    console.print(shared._text_table(headings, rows, bold=[3 if folds else 2]))
    shared.write(console, remark, "dim")
