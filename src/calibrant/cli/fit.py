"""The verbs fit and apply."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from calibrant.cli.shared import (
    AS_JSON,
    SET,
    TOGETHER,
    WEIGHT,
    how_written,
    interval_heading,
    method_options,
    new_console,
    progress_bar,
    say,
    until_closed,
    warn_of_stored_probs,
)

if TYPE_CHECKING:
    from rich.table import Table

    from calibrant.calibrators.base import Calibrator
    from calibrant.workflows.cross_fit import CrossFit
    from calibrant.workflows.effect import Effect
    from calibrant.workflows.fit import Fit

METRICS = ("accuracy", "ece", "nll", "brier")


@click.command()
@click.argument("pred")
@click.option("--method", default="auto", show_default=True, metavar="NAME", help="What to fit.")
@click.option(
    "--split", metavar="NAME", help="Split to fit on.  [default: val, else the plain arrays]"
)
@SET
@click.option(
    "--cross-fit",
    "folds",
    type=click.IntRange(2),
    is_flag=False,
    flag_value=5,
    metavar="[K]",
    help="Fit on all examples of a file without a val set, and measure out of K folds.  [K: 5]",
)
@WEIGHT
@TOGETHER
@click.option("--seed", default=0, show_default=True, help="Of the folds.")
@click.option(
    "--train", metavar="FILE", help="Features of the training set, for maccal.  [default: PRED]"
)
@AS_JSON
@click.option("-o", "--out", required=True, metavar="DIR", help="Folder to save in.")
def fit(
    pred: str,
    method: str,
    split: str | None,
    options: tuple[str, ...],
    folds: int | None,
    weight_by: str | None,
    group_by: str | None,
    seed: int,
    train: str | None,
    as_json: bool,
    out: str,
) -> None:
    """Fit a calibrator on a prediction file and save it in a folder.

    PRED is a file as for "calibrant evaluate". The fit uses its val split or, where there is
    none, the arrays without a name in front; never the test split, unless you name it. The method
    maccal retrains the last layer: it learns from the train split, which may be in another file.

    \b
    Examples:
      calibrant fit predictions.npz -o calibrator
      calibrant fit predictions.npz --method ts --set objective=brier -o calibrator
      calibrant fit one_set.npz --method ts --cross-fit 10 -o calibrator
      calibrant fit predictions.npz --method maccal --train train.npz -o head
    """  # noqa: D301
    from calibrant.artifacts import save
    from calibrant.workflows.cross_fit import cross_fit
    from calibrant.workflows.fit import fit_and_measure

    method, chosen = method.lower(), method_options(options)
    given: dict[str, Any] = {"options": chosen, "sample_weight": weight_by, "groups": group_by}
    if folds:
        given |= {"folds": folds, "seed": seed}
    found: Fit | CrossFit
    if method == "maccal":
        if folds or split or weight_by or group_by:
            raise click.UsageError(
                "maccal learns from the train split and is measured on val: leave out "
                "--cross-fit, --split, --weight-by and --group-by"
            )
        found = _retrained(pred, train, chosen)
    elif train:
        raise click.UsageError(f"--train is for the method maccal, got {method}")
    else:
        with progress_bar() as progress:
            found = (cross_fit if folds else fit_and_measure)(
                pred, method, split=split, metrics=METRICS, progress=progress, **given
            )
    warn_of_stored_probs(pred, found.split)
    written = how_written(out, "saved in")
    save(found.calibrator, out)
    with until_closed():
        if as_json:
            about = {"method": method, "options": chosen, "folds": folds, "saved": out}
            click.echo(json.dumps({**about, **_fit_dict(found)}, indent=2))
        else:
            _print_fit(found, f"{method} on {pred}", folds)
    say(f"{written}; to use it: calibrant apply {out} {pred} -o OUT")


def _retrained(pred: str, train: str | None, options: dict[str, Any]) -> Fit:
    """A head trained on the train split, with its effect on the val split."""
    from calibrant.data import open_predictions
    from calibrant.workflows.effect import effect_file
    from calibrant.workflows.fit import Fit
    from calibrant.workflows.retrain import retrain

    val = open_predictions(pred).split("val")
    if "features" not in val.keys:
        raise ValueError(
            f"{pred} has no val_features, the inputs of the last layer for the val split: save "
            "them too, since maccal is controlled and measured by them"
        )
    with progress_bar("epochs") as progress:
        head = retrain(pred, train=train, options=options, progress=progress)
    return Fit(head, effect_file(head, pred, split="val", metrics=METRICS, level=None), "val")


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
    from calibrant.workflows.apply import apply_file

    written = how_written(out)
    with progress_bar() as progress:
        apply_file(load(folder), pred, out, progress=progress)
    say(f"{written}; to measure it: calibrant evaluate {out}")


def _in_use(calibrator: Calibrator) -> Calibrator:
    """The method itself where another one chose it."""
    chosen: Calibrator | None = getattr(calibrator, "chosen", None)
    return calibrator if chosen is None else chosen


def _temperatures(calibrator: Calibrator, effect: Effect) -> tuple[float, float] | None:
    """The lowest and the highest temperature of an example; None for methods without."""
    from calibrant.calibrators.scaling import TemperatureScaling

    if effect.temperatures is None and isinstance(calibrator, TemperatureScaling):
        one = float(calibrator.temperature_)  # chosen by auto, which as such has none
        return one, one
    return effect.temperatures


def _learned(calibrator: Calibrator) -> dict[str, Any]:
    """Learned values that are few enough to be read, by name."""
    values = {name.rstrip("_"): v for name, v in calibrator.named_buffers()}
    few = {name: v.tolist() for name, v in values.items() if v.numel() <= 5}
    return {name: v for name, v in few.items() if not name.endswith("classes")}


def _fit_dict(found: Fit | CrossFit) -> dict[str, Any]:
    calibrator, effect = _in_use(found.calibrator), found.effect
    low, high = _temperatures(calibrator, effect) or (None, None)
    return {
        "split": found.split or None,
        "n": effect.before.n,
        "classes": effect.before.classes,
        "parameters": calibrator.size(effect.before.classes),
        "learned": _learned(calibrator),
        "temperature": {"low": low, "high": high},
        "argmax_changed": effect.argmax_changed,
        "before": effect.before.to_dict()["metrics"],
        "after": effect.after.to_dict()["metrics"],
    }


def _print_fit(found: Fit | CrossFit, title: str, folds: int | None) -> None:
    console = new_console()
    where = f", {found.split} split" if found.split else ""
    console.print(title + where, style="bold", soft_wrap=True)
    for line in _fit_lines(found.calibrator, found.effect):
        console.print(line, soft_wrap=True)
    console.print()
    if _unchanged(found.effect):
        console.print(_unchanged_line(found.effect, folds), soft_wrap=True)
        return
    console.print(_effect_table(found.effect, folds))
    if folds:
        console.print(f"Each example was calibrated by a fit on the other {folds - 1} folds.")
    else:
        console.print("The fit has seen these examples: expect slightly worse figures on others.")


def _fit_lines(calibrator: Calibrator, effect: Effect) -> Iterator[str]:
    """What was learned, in words."""
    if reasons := getattr(calibrator, "reasons", ""):
        yield reasons
    size = calibrator.size(effect.before.classes)
    counted = f"{size:,} parameter{'' if size == 1 else 's'}"
    yield f"{effect.before.n:,} examples, {effect.before.classes} classes; {counted}"
    from calibrant.calibrators.scaling import TemperatureScaling

    method = _in_use(calibrator)
    temperature = dict(method.named_buffers()).get("temperature_")
    if temperature is not None and temperature.numel() > 1:
        yield f"temperatures from {float(temperature.min()):.4g} to {float(temperature.max()):.4g}"
    elif temperature is not None and (
        # of others, 1 means that they have none in use
        float(temperature) != 1 or isinstance(method, TemperatureScaling)
    ):
        yield f"temperature {float(temperature):.4g}"
    elif effect.temperatures is not None:
        low, high = (f"{one:.4g}" for one in effect.temperatures)
        yield f"temperatures from {low} to {high}"
    if effect.argmax_changed:
        yield f"the predicted class of {effect.argmax_changed:,} examples changes"


def _unchanged(effect: Effect) -> bool:
    """Whether a table would show the same figures twice."""
    return effect.before.table() == effect.after.table() and not effect.argmax_changed


def _unchanged_line(effect: Effect, folds: int | None) -> str:
    figures = ", ".join(f"{title} {value}" for title, value, _ in effect.before.table())
    where = f"Out of {folds} folds n" if folds else "N"
    return f"{where}othing changes: {figures} before and after."


def _effect_table(effect: Effect, folds: int | None) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    table.add_column(f"out of {folds} folds" if folds else "on the data of the fit")
    for heading in ("before", "after"):
        table.add_column(heading, justify="right", style="bold" if heading == "after" else "")
        if folds:
            table.add_column(interval_heading(effect.before), justify="right")
    for before, after in zip(effect.before.table(), effect.after.table(), strict=True):
        cells = (*before[1:], *after[1:]) if folds else (before[1], after[1])
        table.add_row(before[0], *cells)
    return table
