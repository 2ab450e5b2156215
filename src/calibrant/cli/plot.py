"""The verb plot."""

from __future__ import annotations

from typing import Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb


@_verb()
@click.argument("pred", nargs=-1, required=True, type=FILE)
@_option(
    "--kind", default="reliability", metavar="NAME", help="Kind of figure, from the list above."
)
@_option(
    "-o",
    "--out",
    type=FILE,
    metavar="FILE",
    help="A .pdf, .png or .svg file.  [default: KIND.png]",
)
@shared._split_option("draw")
@_option("--by", metavar="COLUMN", help="Draw each value of this column.")
@_option(
    "--calibrator",
    "folder",
    type=FILE,
    metavar="DIR",
    help="Draw before and after this saved calibrator.",
)
@_option("--methods", metavar="NAME,...", help="Methods of --kind compare.")
@_option(
    "--max-error",
    **shared.FRACTION,
    help="With --kind threshold, mark the threshold that keeps this error.",
)
@_option(
    "--size",
    type=click.Choice(["column", "page", "talk"]),
    default="page",
    help="Width: a column of a paper (3.3 inches), a page, or a slide.",
)
@_option("--dark", is_flag=True, help="Light text on a dark background.")
@shared.LEVEL
@shared.SAMPLE_WEIGHT
@shared.MULTILABEL
@engine._reads_predictions(engine=False, skip_bad=False)
def plot(
    pred: tuple[str, ...],
    kind: str,
    out: str | None,
    folder: str | None,
    methods: str | None,
    estimand: Any,
    source: engine.InputFiles,
    **options: Any,
) -> None:
    """Draw a figure of a prediction file, or of several side by side.

    PRED is a file as for "calibrant evaluate". The suffix of --out chooses the format.

    \b
    Kinds of figures:
      reliability  accuracy per bin of confidence, with the ECE and its interval
      smooth       the same without bins, with a band
      histogram    confidence of right and of wrong answers
      margins      reliability by the margin of the top two logits
      classes      reliability of the nine worst classes, or tags
      risk         error among the most confident answers
      threshold    share of the answers, and error, at every threshold
      compare      methods with their intervals, as by calibrant compare
      effect       reliability before and after a calibrator
      map          what a calibrator has learned

    Several files and subgroups are drawn as reliability, smooth, histogram or risk. With
    --calibrator, margins, classes and threshold are of the calibrated predictions.

    \b
    Examples:
      calibrant plot predictions.npz -o reliability.pdf
      calibrant plot predictions.npz --calibrator calibrator -o effect.pdf
      calibrant plot model_a.npz model_b.npz --kind risk -o risk.svg
      calibrant plot predictions.npz --kind threshold --max-error 0.02
    """  # noqa: D301
    from calibrant.show.figures.look import check_suffix

    out = out or f"{kind}.png"
    check_suffix(out)
    from calibrant.artifacts import load
    from calibrant.show.figures.from_data import draw_file

    options |= {"calibrator": load(folder) if folder else None, "kind": kind}
    options |= {"methods": shared._names_in(methods), "estimand": estimand or "auto"}
    written = shared._how_written(out)
    with source.working():
        draw_file(*map(source.open, pred), out=out, **options)
    shared.say(written)
