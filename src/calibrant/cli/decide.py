"""The verb decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, option, verb

if TYPE_CHECKING:
    from calibrant.data.dataset import Dataset
    from calibrant.workflows.decide import AppliedRule, FittedRule

CONDITION = (
    "This holds for new examples from the same source as those of the fit, and for all of them "
    "together, not for each class or subgroup."
)
UNSEEN = " The calibrator must not have seen the examples of the fit."


@verb()
@click.argument("pred", type=FILE)
@option(
    "--max-error",
    **shared.FRACTION,
    help="Find a threshold: at most this share of the accepted answers is wrong.",
)
@option(
    "--certainty", default=0.95, metavar="FRACTION", help="Probability that --max-error is kept."
)
@option(
    "--coverage",
    **shared.FRACTION,
    help="Find sets of classes that hold the true one in at least this share of cases.",
)
@option("--rule", "saved", type=FILE, metavar="DIR", help="Apply a rule that --save wrote.")
@shared.CALIBRATOR
@option(
    "--fit-split",
    metavar="NAME",
    help="Split to fit the rule on.  [default: val; with --calibrator half of test]",
)
@option("--split", metavar="NAME", help="Split to check it on.  [default: test, or what is left]")
@option("--save", "target", type=FILE, metavar="DIR", help="Folder to save the rule in.")
@option("-o", "--out", type=FILE, metavar="FILE", help="Write decisions, as the suffix says.")
@shared.AS_JSON
@engine.reads_predictions(engine=False, skip_bad=False)
def decide(
    pred: str,
    max_error: float | None,
    coverage: float | None,
    saved: str | None,
    folder: str | None,
    split: str | None,
    target: str | None,
    out: str | None,
    form: str | None,
    source: engine.InputFiles,
    **options: Any,
) -> int:
    """Accept answers, or form sets of classes, with a guarantee.

    The rule is fitted on one split of PRED, a file as for "calibrant evaluate", and checked on
    another; a file with only one set of examples is cut at random into two halves. With --rule a
    saved one is applied, and labels are not needed. The file of --out has a decision for each
    example: .npz, .safetensors or .parquet as from "calibrant apply", or .csv with names of
    classes.

    \b
    Examples:
      calibrant decide predictions.npz --max-error 0.05
      calibrant decide predictions.npz --coverage 0.9 --save rule
      calibrant decide new.npz --rule rule -o decisions.csv

    \b
    Exit status: 0 done, 2 could not run, or too few examples for the guarantee:
    no answer is accepted, or every set holds all classes. Nothing is written
    then.
    """  # noqa: D301
    if [max_error, coverage, saved].count(None) != 2:
        raise click.UsageError("name one of --max-error, --coverage and --rule")
    if saved and (folder or target or options["fit_split"] or split):
        raise click.UsageError(
            "a saved --rule has its calibrator, and decides about all splits: leave out "
            "--calibrator, --save, --fit-split and --split"
        )
    options |= {"max_error": max_error, "coverage": coverage, "test_split": split}
    written = [shared.how_written(name) for name in (target, out) if name]
    with source.working():
        data = source.open(pred)
        result = _applied(data, saved, out) if saved else _fitted(data, folder, out, options)
    decides_nothing = result.rule.decides_nothing
    if decides_nothing:
        written = ["nothing is written"] if written else []
        target = out = None
    if target:
        from calibrant.artifacts import save

        save(result.rule, target)
    about: dict[str, Any] = {"saved": target or saved, "decisions": out}
    shared.show_result(form, result, show=lambda: _print_result(result, pred), **about)
    for line in written:
        shared.say(line)
    return 2 if decides_nothing else 0


def _applied(data: Dataset, saved: str, out: str | None) -> AppliedRule:
    """Apply a saved rule, and write the decisions."""
    from calibrant.artifacts import load
    from calibrant.decide import DecisionRule
    from calibrant.workflows.decide import apply_rule

    rule = load(saved, DecisionRule)
    if rule.decides_nothing:
        raise ValueError(f"{saved}: {rule.instruction()} Fit a rule on more examples")
    return apply_rule(rule, data, out)


def _fitted(
    data: Dataset, folder: str | None, out: str | None, options: dict[str, Any]
) -> FittedRule:
    """Fit a rule, and write the decisions of one that decides anything."""
    from calibrant.artifacts import load
    from calibrant.workflows.decide import apply_rule, decide as workflow

    result = workflow(data, calibrator=load(folder) if folder else None, **options)
    if out and not result.rule.decides_nothing:
        apply_rule(result.rule, data, out)
    return result


def _print_result(result: FittedRule | AppliedRule, title: str) -> None:
    console, rule = shared.new_console(), result.rule
    shared.write(console, title, "bold")
    colour = shared.COLOURS["bad" if rule.decides_nothing else "good"]
    shared.write(console, rule.instruction(), colour)
    if promise := rule.promise():
        shared.write(console, promise, "bold")
        shared.write(console, CONDITION + (UNSEEN if rule.calibrator else ""))
    shared.write(console, rule.describe(), "dim")
    console.print()
    rows = [(name or "plain arrays", *rule.cells(t)) for name, t in result.tallies.items()]
    console.print(shared.text_table(("", *rule.headings), rows))
    shared.write(console, result.verdict())
