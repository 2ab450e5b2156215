"""The verbs fit and apply."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import shared

if TYPE_CHECKING:
    from rich.table import Table

    from calibrant.workflows.effect import Effect
    from calibrant.workflows.fit import Fit

METRICS = ("accuracy", "ece", "nll", "brier")


@click.command()
@click.argument("pred")
@click.option("--method", default="auto", show_default=True, metavar="NAME", help="What to fit.")
@click.option(
    "--split", metavar="NAME", help="Split to fit on.  [default: val, else the plain arrays]"
)
@shared.SET
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
    "--train", metavar="FILE", help="Features of the training set, for maccal.  [default: PRED]"
)
@shared.AS_JSON
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder to save in.")
def fit(
    pred: str,
    method: str,
    options: tuple[str, ...],
    folds: int | None,
    seed: int,
    train: str | None,
    as_json: bool,
    out: str,
    **columns: str | None,
) -> None:
    """Fit a calibrator on a prediction file and save it in a folder.

    PRED is a file as for "calibrant evaluate". The fit uses its val split or, if there is none,
    the arrays without a name in front; never the test split, unless you name it. The method
    maccal retrains the last layer: it learns from the train split, which may be in another file.

    \b
    Examples:
      calibrant fit predictions.npz -o calibrator
      calibrant fit predictions.npz --method ts --set objective=brier -o calibrator
      calibrant fit one_set.npz --method ts --cross-fit 10 -o calibrator
      calibrant fit predictions.npz --method maccal --train train.npz -o classifier
    """  # noqa: D301
    from calibrant.artifacts import save
    from calibrant.calibrators.registry import calibrator_name
    from calibrant.workflows.fit import cross_fit, fit_and_measure
    from calibrant.workflows.retrain import retrain_and_measure

    given: dict[str, Any] = {**columns, **({"folds": folds, "seed": seed} if folds else {})}
    chosen = shared.method_options(options)
    if method.lower() == "maccal":
        if any(given.values()):
            raise click.UsageError(
                "maccal learns from the train split and is measured on val: leave out "
                "--cross-fit, --split, --sample-weight and --groups"
            )
        name = "maccal"
        with shared.progress_bar("epochs") as progress:
            fitted = retrain_and_measure(
                pred, train=train, options=chosen, metrics=METRICS, progress=progress
            )
    elif train:
        raise click.UsageError(f"--train is for the method maccal, got {method}")
    else:
        name, workflow = calibrator_name(method), cross_fit if folds else fit_and_measure
        with shared.progress_bar() as progress:
            fitted = workflow(
                pred, name, options=chosen, metrics=METRICS, progress=progress, **given
            )
    written = shared.how_written(out, "saved in")
    save(fitted.artifact, out)
    with shared.until_closed():
        if as_json:
            about = {"method": name, "options": chosen, "folds": folds, "saved": out}
            click.echo(json.dumps({**about, **fitted.to_dict()}, indent=2))
        else:
            _print_fit(fitted, f"{name} on {pred}", folds)
    shared.say(f"{written}; to use it: calibrant apply {out} {pred} -o OUT")


@click.command()
@click.argument("folder", metavar="DIR")
@click.argument("pred")
@click.option(
    "-o", "--out", required=True, metavar="OUT", help="File to write, as the suffix says."
)
def apply(folder: str, pred: str, out: str) -> None:
    """Calibrate a prediction file with a saved calibrator.

    Every split of PRED is calibrated; labels and other arrays are kept. OUT is one .npz,
    .safetensors or .parquet file, also for a folder or glob of shards.

    \b
    Examples:
      calibrant apply calibrator predictions.npz -o calibrated.npz
      calibrant apply calibrator 'shards/*.npz' -o calibrated.safetensors
    """  # noqa: D301
    from calibrant.artifacts import load
    from calibrant.workflows import apply as workflow

    written = shared.how_written(out)
    with shared.progress_bar() as progress:
        workflow.apply(load(folder), pred, out, progress=progress)
    shared.say(f"{written}; to measure it: calibrant evaluate {out}")


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
    console.print(_effect_table(fitted.effect, folds))
    if folds:
        console.print(f"Each example was calibrated by a fit on the other {folds - 1} folds.")
    else:
        console.print("The fit has seen these examples: expect slightly worse figures on others.")


def _effect_table(effect: Effect, folds: int | None) -> Table:
    both = list(zip(effect.before.table(), effect.after.table(), strict=True))
    if not folds:
        rows = [(before[0], before[1], after[1]) for before, after in both]
        return shared.text_table(("on the data of the fit", "before", "after"), rows, bold=[2])
    heading = shared.interval_heading(effect.before)
    headings = (f"out of {folds} folds", "before", heading, "after", heading)
    return shared.text_table(headings, [(*before, *after[1:]) for before, after in both], bold=[3])
