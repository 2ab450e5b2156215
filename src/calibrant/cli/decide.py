"""The verb decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared

if TYPE_CHECKING:
    from calibrant.workflows.decide import AppliedRule, FittedRule

CONDITION = (
    "This holds for new examples from the same source as those of the fit, and for all of them "
    "together, not for each class or subgroup."
)
UNSEEN = " The calibrator must not have seen the examples of the fit."


@click.command()
@click.argument("pred")
@click.option(
    "--max-error",
    type=float,
    metavar="FRACTION",
    help="Find a threshold: at most this share of the accepted answers is wrong.",
)
@click.option(
    "--level",
    default=0.95,
    show_default=True,
    metavar="FRACTION",
    help="Certainty of --max-error.",
)
@click.option(
    "--coverage",
    type=float,
    metavar="FRACTION",
    help="Find sets of classes that hold the true one in at least this share of cases.",
)
@click.option(
    "--score",
    type=click.Choice(["lac", "aps", "raps"]),
    default="aps",
    show_default=True,
    help="Of sets: smallest, as large as the example is hard, or for many classes.",
)
@click.option("--rule", "saved", metavar="DIR", help="Apply a rule that --save wrote.")
@click.option("--calibrator", "folder", metavar="DIR", help="Apply this saved calibrator first.")
@click.option(
    "--fit-split",
    metavar="NAME",
    help="Split to fit the rule on.  [default: val; with --calibrator half of test]",
)
@click.option(
    "--test-split", metavar="NAME", help="Split to check it on.  [default: test, or what is left]"
)
@click.option("--seed", default=0, show_default=True, help="Of the halves and of sets.")
@click.option("--save", "target", metavar="DIR", help="Folder to save the rule in.")
@click.option(
    "-o", "--out", metavar="OUT", help="Write decisions to this file, as the suffix says."
)
@shared.AS_JSON
def decide(
    pred: str,
    max_error: float | None,
    coverage: float | None,
    saved: str | None,
    folder: str | None,
    target: str | None,
    out: str | None,
    form: str | None,
    **options: Any,
) -> int:
    """Decide which answers to accept, or which classes to keep, with a guarantee.

    The rule is fitted on one split of PRED, a file as for "calibrant evaluate", and checked on
    another; a file with only one set of examples is cut at random into two halves. With --rule a
    saved one is applied, and labels are not needed. OUT has a decision for each example: .npz,
    .safetensors or .parquet as from "calibrant apply", or .csv with names of classes.

    \b
    Examples:
      calibrant decide predictions.npz --max-error 0.05
      calibrant decide predictions.npz --coverage 0.9 --calibrator calibrator --save rule
      calibrant decide new.npz --rule rule -o decisions.csv

    \b
    Exit status: 0 done, 2 could not run, or too few examples for the promise: no answer is
    accepted, or every set holds all classes. Nothing is written then.
    """  # noqa: D301
    from calibrant.artifacts import load, save
    from calibrant.decide import DecisionRule
    from calibrant.workflows import decide as workflow

    if [max_error, coverage, saved].count(None) != 2:
        raise click.UsageError("name one of --max-error, --coverage and --rule")
    if saved and (folder or target or options["fit_split"] or options["test_split"]):
        raise click.UsageError(
            "a saved --rule has its calibrator, and decides about all splits: leave out "
            "--calibrator, --save, --fit-split and --test-split"
        )
    written = [shared.how_written(name) for name in (target, out) if name]
    result: FittedRule | AppliedRule
    with engine.working():
        if saved is not None:
            rule = load(saved, DecisionRule)
            if rule.decides_nothing:
                raise ValueError(f"{saved}: {rule.instruction()} Fit a rule on more examples")
            result = workflow.apply_rule(rule, pred, out)
        else:
            calibrator = load(folder) if folder else None
            asked = {"max_error": max_error, "coverage": coverage, **options}
            result = workflow.decide(pred, calibrator=calibrator, **asked)
            if result.rule.decides_nothing:
                written = ["nothing is written"] if written else []
                target = out = None
            if out:
                workflow.apply_rule(result.rule, pred, out)
    if target:
        save(result.rule, target)
    with shared.until_closed():
        if form == "json":
            about = {"saved": target or saved, "decisions": out}
            shared.write_json({**about, **result.to_dict()})
        else:
            _print_result(result, pred)
    for line in written:
        shared.say(line)
    return 2 if result.rule.decides_nothing else 0


def _print_result(result: FittedRule | AppliedRule, title: str) -> None:
    console, rule = shared.new_console(), result.rule
    console.print(title, style="bold", soft_wrap=True)
    console.print(rule.describe(), style="dim", soft_wrap=True)
    console.print(rule.instruction(), soft_wrap=True)
    if promise := rule.promise():
        console.print(promise, style="bold", soft_wrap=True)
        console.print(CONDITION + (UNSEEN if rule.calibrator else ""), soft_wrap=True)
    console.print()
    rows = [(name or "plain arrays", *rule.cells(t)) for name, t in result.tallies.items()]
    console.print(shared.text_table(("", *rule.headings), rows))
    if verdict := result.verdict():
        console.print(verdict, soft_wrap=True)
