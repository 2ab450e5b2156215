"""The verb plot."""

from __future__ import annotations

from typing import Any

import click

from calibrant.cli import engine, shared


@click.command()
@click.argument("pred", nargs=-1, required=True)
@click.option("-o", "--out", required=True, metavar="OUT", help="A .pdf, .png or .svg file.")
@click.option(
    "--kind", default="reliability", show_default=True, metavar="NAME", help="As listed above."
)
@click.option("--split", metavar="NAME", help=shared.SPLIT.format("draw", "test"))
@click.option("--by", metavar="COLUMN", help="Draw each value of this column.")
@click.option(
    "--calibrator", "folder", metavar="DIR", help="Draw before and after this saved calibrator."
)
@click.option("--methods", metavar="NAMES", help="Of the kind compare, with commas between.")
@click.option(
    "--max-error",
    type=float,
    metavar="FRACTION",
    help="Of the kind threshold: mark the one that keeps the error at this level.",
)
@click.option(
    "--size",
    type=click.Choice(["column", "page", "talk"]),
    default="page",
    show_default=True,
    help="For a column of a paper (3.3 inches), a page, or slides.",
)
@click.option("--dark", is_flag=True, help="Light text on dark paper.")
@click.option("--title", default="", metavar="TEXT", help="Title above the figure.")
@shared.SAMPLE_WEIGHT
@shared.MULTILABEL
@shared.TOP_LABEL
@shared.BINS
@shared.LEVEL
@click.option("--seed", default=0, show_default=True, help="Of the draws behind the intervals.")
def plot(
    pred: tuple[str, ...],
    out: str,
    folder: str | None,
    methods: str | None,
    size: Any,
    dark: bool,
    title: str,
    estimand: Any,
    **options: Any,
) -> None:
    """Draw a figure of a prediction file, or of several side by side.

    PRED is a file as for "calibrant evaluate". The suffix of OUT chooses the format.

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
      calibrant plot predictions.npz --calibrator calibrator --size column -o effect.pdf
      calibrant plot model_a.npz model_b.npz --kind risk -o risk.svg
      calibrant plot predictions.npz --kind threshold --max-error 0.02 -o threshold.png
    """  # noqa: D301
    from calibrant.show.figures.files import check_suffix

    check_suffix(out)
    from calibrant.artifacts import load
    from calibrant.show.figures.from_data import draw_file

    written = shared.how_written(out)
    with engine.working():
        draw_file(
            *pred,
            out=out,
            size=size,
            dark=dark,
            title=title,
            calibrator=load(folder) if folder else None,
            methods=shared.names_in(methods),
            estimand=estimand or "auto",
            **options,
        )
    shared.say(written)
