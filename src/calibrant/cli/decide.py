"""The verb decide."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from calibrant.cli import engine, shared
from calibrant.cli.shared import FILE, _option, _verb

if TYPE_CHECKING:
    from calibrant.workflows.decide import AppliedRule, FittedRule
    from calibrant.workflows.decide_by_group import GroupRules

SOURCE = "This holds for new examples from the same source as those of the fit"
UNSEEN = " The calibrator must not have seen the examples of the fit."


@_verb()
@click.argument("pred", type=FILE)
@_option(
    "--max-error",
    **shared.FRACTION,
    help="Find a threshold: at most this share of the accepted answers is wrong.",
)
@_option("--precision", **shared.FRACTION, help="Smallest share of positives among the flagged.")
@_option("--recall", **shared.FRACTION, help="Smallest share of positives that are flagged.")
@_option("--max-fpr", **shared.FRACTION, help="Largest share of negatives that are flagged.")
@_option(
    "--cost",
    metavar="TN,FP,FN,TP",
    callback=lambda _, __, text: _costs(text),
    help="Costs of the four decisions; the cheapest threshold that keeps the limits is taken, if "
    "there are any.",
)
@_option(
    "--positive",
    metavar="CLASS",
    help="Class to flag, by name or number.  [default: 1 of two, the second]",
)
@_option(
    "--certainty", default=0.95, metavar="FRACTION", help="Probability that the limits are kept."
)
@_option(
    "--coverage",
    **shared.FRACTION,
    help="Find sets of classes that hold the true one in at least this share of cases.",
)
@_option("--by", metavar="COLUMN", help="Find a threshold for each group in this column.")
@_option("--by-class", is_flag=True, help="Make --coverage hold for each class.")
@_option("--rule", "saved", type=FILE, metavar="DIR", help="Apply a rule that --save wrote.")
@shared.CALIBRATOR
@_option(
    "--fit-split",
    metavar="NAME",
    help="Split to fit the rule on.  [default: val; with --calibrator half of test]",
)
@_option("--split", metavar="NAME", help="Split to check it on.  [default: test, or what is left]")
@_option("--save", "target", type=FILE, metavar="DIR", help="Folder to save the rule in.")
@_option(
    "-o", "--out", type=FILE, metavar="FILE", help="Write decisions; the suffix chooses the format."
)
@shared.AS_JSON
@engine._reads_predictions(engine=False, skip_bad=False)
def decide(
    pred: str,
    coverage: float | None,
    saved: str | None,
    folder: str | None,
    by: str | None,
    split: str | None,
    target: str | None,
    out: str | None,
    form: str | None,
    source: engine.InputFiles,
    **options: Any,
) -> int:
    """Accept answers, flag a class or form sets, with a guarantee.

    The rule is fitted on one split of PRED, a file as for "calibrant evaluate", and checked on
    another; a file with only one set of examples is cut at random into two halves. With --rule a
    saved one is applied, and labels are not needed. The file of --out has a decision for each
    example: .npz, .safetensors or .parquet as from "calibrant apply", or .csv with names of
    classes.

    \b
    Examples:
      calibrant decide predictions.npz --max-error 0.05
      calibrant decide predictions.npz --recall 0.95 --max-fpr 0.2
      calibrant decide predictions.npz --cost 0,1,5,0
      calibrant decide predictions.npz --recall 0.95 --by site
      calibrant decide predictions.npz --coverage 0.9 --save rule
      calibrant decide new.npz --rule rule -o decisions.csv

    \b
    Exit status: 0 done, 2 could not run, or too few examples for the guarantee:
    no answer is accepted, or every set holds all classes. Nothing is written
    then.
    """  # noqa: D301
    from calibrant.artifacts import load, save
    from calibrant.decide import DecisionRule
    from calibrant.workflows.decide import apply_rule, decide as workflow

    limits = ("max_error", "precision", "recall", "max_fpr", "cost")
    limited = any(options[name] is not None for name in limits)
    if [limited, coverage is not None, saved is not None].count(True) != 1:
        raise click.UsageError(
            "name one of --max-error, --coverage, --rule, or limits of a class (--precision, "
            "--recall, --max-fpr, --cost)"
        )
    if by and (not limited or target or out):
        raise click.UsageError(
            "--by finds thresholds and prints them: leave out --coverage, --rule, --save and -o; "
            "to apply thresholds by group, take calibrant.decide.thresholds in Python"
        )
    if options["by_class"] and coverage is None:
        raise click.UsageError("--by-class is for --coverage")
    if saved and (folder or target or options["fit_split"] or split):
        raise click.UsageError(
            "a saved --rule has its calibrator, and decides about all splits: leave out "
            "--calibrator, --save, --fit-split and --split"
        )
    options |= {"coverage": coverage, "test_split": split}
    if (positive := options["positive"]) is not None and positive.isdecimal():
        options["positive"] = int(positive)
    if by:
        return _decide_by_group(pred, by, folder, form, source, options)
    written = [shared._how_written(name) for name in (target, out) if name]
    with source.working():
        data = source.open(pred)
        result: AppliedRule | FittedRule
        if saved:
            rule = load(saved, DecisionRule)
            if rule.decides_nothing:
                raise ValueError(f"{saved}: {rule.instruction()} Fit a rule on more examples")
            result = apply_rule(rule, data, out)
        else:
            result = workflow(data, calibrator=load(folder) if folder else None, **options)
            if out and not result.rule.decides_nothing:
                apply_rule(result.rule, data, out)
    decides_nothing = result.rule.decides_nothing
    if decides_nothing:
        written = ["nothing is written"] if written else []
        target = out = None
    if target:
        save(result.rule, target)
    about: dict[str, Any] = {"saved": target or saved, "decisions": out}
    shared._show_result(form, result, show=lambda: _print_result(result, pred), **about)
    for line in written:
        shared.say(line)
    return 2 if decides_nothing else 0


def _decide_by_group(
    pred: str,
    by: str,
    folder: str | None,
    form: str | None,
    source: engine.InputFiles,
    options: dict[str, Any],
) -> int:
    from calibrant.artifacts import load
    from calibrant.workflows.decide_by_group import decide_by_group

    unused = ("coverage", "by_class")
    options = {k: v for k, v in options.items() if k not in unused and v is not None}
    with source.working():
        calibrator = load(folder) if folder else None
        result = decide_by_group(source.open(pred), by=by, calibrator=calibrator, **options)
    shared._show_result(form, result, show=lambda: _print_groups(result, pred))
    return 2 if any(one.rule.decides_nothing for one in result.rules.values()) else 0


def _print_groups(result: GroupRules, title: str) -> None:
    console, rules = shared._new_console(), result.rules
    first = next(iter(rules.values())).rule
    shared.write(console, title, "bold")
    for name, one in rules.items():
        colour = shared.COLOURS["bad" if one.rule.decides_nothing else "good"]
        shared.write(console, f"{name}: {one.rule.instruction()}", colour)
    if promise := result.promise():
        shared.write(console, promise, "bold")
        shared.write(console, f"{SOURCE}.{UNSEEN if first.calibrator else ''}")
    console.print()
    rows = [(name, *one.rule.cells(one.checked)) for name, one in rules.items()]
    checked = next(iter(rules.values())).checked_on
    console.print(shared._text_table((f"checked on: {checked}", *first.headings), rows))
    shared.write(console, result.verdict())


def _costs(text: str | None) -> list[list[float]] | None:
    """Return the matrix of --cost."""
    if text is None:
        return None
    try:
        a, b, c, d = map(float, text.split(","))
    except ValueError:
        raise click.BadParameter(f"want four numbers with commas, got {text!r}") from None
    return [[a, b], [c, d]]


def _print_result(result: FittedRule | AppliedRule, title: str) -> None:
    console, rule = shared._new_console(), result.rule
    shared.write(console, title, "bold")
    colour = shared.COLOURS["bad" if rule.decides_nothing else "good"]
    shared.write(console, rule.instruction(), colour)
    if promise := rule.promise():
        shared.write(console, promise, "bold")
        cells = "subgroup" if getattr(rule.guarantee, "by", None) else "class or subgroup"
        condition = f"{SOURCE}, and for all of them together, not for each {cells}."
        shared.write(console, condition + (UNSEEN if rule.calibrator else ""))
    shared.write(console, rule.describe(), "dim")
    console.print()
    rows = [(name or "unnamed split", *rule.cells(t)) for name, t in result.tallies.items()]
    console.print(shared._text_table(("", *rule.headings), rows))
    shared.write(console, result.verdict())
