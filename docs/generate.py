"""Pages that are made from the code, and notebooks that are made from pages."""

import inspect
import json
import re
import shutil
from importlib import import_module
from itertools import groupby
from pathlib import Path
from textwrap import indent
from typing import get_origin

TITLES = {
    "metrics": "Measure",
    "calibrators": "Calibrators",
    "workflows": "Workflows",
    "show": "Show and report",
    "artifacts": "Save and load",
    "decide": "Decide",
    "deploy": "Deploy",
    "monitor": "Monitor",
    "estimate": "Estimate without labels",
    "slices": "Subgroups",
    "losses": "Train: losses",
    "data": "Prediction files",
    "_core": "Helpers",
}
"""Sections of the API page by package, in order; other packages follow under their own name."""
SUBMODULES = ("llm", "show.report", "show.figures", "integrations")
"""Packages and modules without names on top."""
MORE = {
    "calibrators": (
        *("learned_curves.margin_bounds", "learned_curves.margin_change"),
        "learned_curves.margin_temperature",
        *("maccal.Epoch", "maccal.KeepRate", "maccal.MaskedClassifier"),
        *("maccal.masked_step", "maccal.replace_head"),
        *("learned_curves.learned_map", "learned_curves.LearnedMap"),
    ),
    "workflows": (
        *("comparison.Comparison", "comparison.Row", "fit.CrossFit", "effect.Effect"),
        *("choice.MethodChoice", "choice.choose", "fit.Fit", "retrain.retrain"),
        *("loss_split.loss_split", "loss_split.LossTerms"),
        *("decide.decide", "decide.apply_rule", "decide.FittedRule", "decide.AppliedRule"),
    ),
    "decide": ("conformal_sets.SetSizes", "rules.Tally"),
    "monitor": ("monitor_report.Alarm", "monitor_report.Drift", "stream_windows.WindowEstimate"),
    "estimate": (
        *("performance.PerformanceEstimator", "performance_estimate.PerformanceEstimate"),
        *("sampling.choose_labels", "sampling.LabelSample"),
        *("success_rate.RateEstimate", "success_rate.rate_difference"),
        *("judges.agreement", "judges.position_bias", "judges.length_bias"),
    ),
    "slices": (
        *("result.Off", "result.Slice"),
        "result.Slices",
        "groups.measure_groups",
        "groups.Groups",
        "groups.Group",
    ),
    "show": ("answer_report.save_answer_report", "answer_report.answer_lines", "llm.shaded_answer"),
    "show.figures": ("from_data.figure", "from_data.draw_file"),
    "show.report": ("report.Provenance", "model.Subject", "model.Part"),
    "llm": (
        *("answers.choices.ask_choices", "answers.choices.ask_true"),
        *("answers.choices.choice_logits_from_likelihoods", "answers.questions.verdict_prompt"),
        *("answers.choices.choice_logits_from_top", "answers.choices.ask_texts_each"),
        *("answers.grading.grade_questions", "answers.grading.read_question_set"),
        *("answers.rows.Source", "answers.calibrator.fit_answers"),
        "answers.calibrator.AnswerMap",
        *("gate.gate.Verdict", "gate.gate.Terms", "gate.gate.Band"),
        "gate.watch.judge_rows",
        *("answers.signal_calibrator.fit_signals", "answers.signal_calibrator.SignalFit"),
        "answers.signals.agreement",
        *("answers.signals.clusters", "answers.signals.semantic_entropy"),
        "answers.asking.draw_answers",
        *("answers.signals.by_entailment", "answers.signals.by_embedding"),
        "answers.signals.top_token_confidence",
        "answers.logs.study.AnswerStudy",
        *("answers.fields.field_rows", "answers.questions.short_prompt"),
        "answers.requesting.RequestPlan",
        *("answers.requesting.Asked", "answers.requesting.read_asked"),
        *("answers.requesting.request_answers", "answers.requesting.cost_of"),
        "models.services.service_for",
        *("heads.official.read_official", "heads.tables.TokenTable"),
        *("answers.choices.option_bias", "answers.choices.OptionBias"),
    ),
    "integrations": (
        *("lightning.CalibrationCallback", "huggingface.CalibrationMetrics"),
        *("huggingface.CalibrationCallback", "tensorboard.log_calibration"),
        *("tensorboard.interval_charts", "wandb.log_calibration", "mlflow.log_calibration"),
        *("mlflow.calibration_metric", "mlflow.calibration_scorer", "logged.scalars"),
        "lm_eval.with_calibration",
    ),
}
"""Names inside the modules of a package that the API page has as well, since guides use them."""

SKLEARN = """## scikit-learn

```{eval-rst}
.. autoclass:: calibrant.deploy.sklearn.CalibratedClassifier
   :members: fit, predict, predict_proba

.. autoclass:: calibrant.deploy.sklearn_thresholds.ThresholdClassifier
   :members: fit, predict, predict_proba
```
"""
"""Without the methods that scikit-learn adds, whose texts refer to its own documentation."""


def write(folder: Path) -> None:
    """Write all pages under the folder of the documentation."""
    (folder / "_generated").mkdir(exist_ok=True)
    for make in (methods, properties, tag_methods, metrics, losses, findings):
        (folder / "_generated" / f"{make.__name__}.md").write_text(make(), encoding="utf-8")
    (folder / "api").mkdir(exist_ok=True)
    for name, text in api_pages().items():
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "cli.md").write_text(command_line(), encoding="utf-8")
    shutil.copy(folder.parent / "CHANGELOG.md", folder / "changelog.md")
    for page in (folder / "quickstart.md", *folder.glob("tutorial_*.md")):
        notebook = folder / "_generated" / f"{page.stem}.ipynb"
        notebook.write_text(notebook_of(page.read_text("utf-8")), encoding="utf-8")


# ------------------------------------------------------------------------------------------ tables


def methods() -> str:
    """Table of the calibrators: name, class and summary."""
    from calibrant.calibrators.registry import CALIBRATORS

    cells = ((f"`{n}`", _link(kind), kind.summary) for n, kind in CALIBRATORS.items())
    return table(("name", "class", "what it does"), cells)


def _link(kind: type) -> str:
    """Link to the page of a calibrator."""
    import calibrant

    place = "" if kind.__name__ in calibrant.__all__ else "calibrators."
    return f"{{class}}`~calibrant.{place}{kind.__name__}`"


def tag_methods() -> str:
    """Table of the calibrators of tags: name, class, summary and number of parameters."""
    from calibrant.calibrators.registry import TAG_CALIBRATORS

    rows = (
        (f"`{n}`", _link(kind), kind.summary, formula(kind().size))
        for n, kind in TAG_CALIBRATORS.items()
    )
    return table(("name", "class", "what it does", "parameters of K tags"), rows)


def properties() -> str:
    """Table of the guarantees and needs of the calibrators."""
    from calibrant.calibrators.registry import CALIBRATORS

    headings = (
        *("name", "parameters", "predicted class kept", "order of classes kept"),
        *("masked classes", "reads", "needs"),
    )
    rows = []
    for name, kind in CALIBRATORS.items():
        one = kind()
        promises = (one.keeps_argmax, one.monotone, one.accepts_masked)
        needs = ["features"] * one.needs_features + ["head"] * one.needs_head
        needs += ["two classes"] * one.two_classes_only
        rows.append(
            (
                *(f"`{name}`", "those of its choice" if name == "auto" else formula(one.size)),
                *("yes" if promise else "no" for promise in promises),
                *("chunks" if one.fits_records else "whole", ", ".join(needs)),
            )
        )
    return table(headings, rows)


def metrics() -> str:
    """Table of the metrics: name, definition, whether a stream must keep pairs, and reference."""
    from calibrant.metrics.registry import METRICS

    rows = (
        (f"`{name}`", markdown(m.summary), "yes" if m.needs_pairs else "", m.reference)
        for name, m in METRICS.items()
    )
    return table(("name", "definition", "needs all pairs", "reference"), rows)


def losses() -> str:
    """Table of the losses: name, definition, options and reference."""
    from calibrant.losses import LOSSES

    rows = (
        (f"`{name}`", markdown(loss.summary), options(loss), loss.reference)
        for name, loss in LOSSES.items()
    )
    return table(("name", "definition", "options", "reference"), rows)


def findings() -> str:
    """The findings of reports: what each means, and what to do about it."""
    from calibrant.show.report import CHECKS

    return "\n".join(
        f"({code.lower()})=\n### {code}: {check.title}\n\n{check.meaning}\n\n"
        f"**What to do:** {check.fix}\n"
        for code, check in sorted(CHECKS.items())
    )


def options(loss) -> str:
    """Options of a loss with their defaults; required ones come without."""
    wanted = inspect.signature(loss.documented).parameters.values()
    wanted = [p for p in wanted if p.name not in ("logits", "labels", "base")]
    shown = [p.name if p.default is p.empty else f"{p.name}={p.default}" for p in wanted]
    weight = getattr(loss.make, "keywords", {}).get("weight")  # of a statistic of the batch
    if weight is not None:
        shown = [f"weight={weight}", "base", *shown]
    return code(shown)


def markdown(text: str) -> str:
    r"""Turn formulas and literals of a docstring into Markdown.

    >>> markdown(r"Cross-entropy, :math:`-\\log p_y`, of ``logits``.")
    'Cross-entropy, $-\\\\log p_y$, of `logits`.'
    """
    return re.sub(r":math:`([^`]*)`", r"$\1$", text).replace("``", "`")


def formula(size) -> str:
    """The number of parameters as a polynomial of the number of classes K.

    >>> formula(lambda k: k * k + k), formula(lambda k: 10 * k + 1), formula(lambda k: 0)
    ('K² + K', '10K + 1', '0')
    """
    low, middle, high = (size(classes) for classes in (10, 20, 30))
    square = (high - 2 * middle + low) // 200
    linear = (middle - low) // 10 - 30 * square
    constant = low - 10 * linear - 100 * square
    terms = [
        f"{factor if factor > 1 else ''}{power}"
        for factor, power in ((square, "K²"), (linear, "K"))
        if factor
    ]
    return " + ".join([*terms, *([str(constant)] if constant or not terms else [])])


def table(headings, rows) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(names) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)


# ------------------------------------------------------------------------ command line, notebooks


def command_line() -> str:
    """The page with the help of every command, by section."""
    from calibrant.cli import SECTIONS, cli

    page = ["# Command line\n", f"```text\n{help_of(cli, 'calibrant')}\n```\n"]
    for title, names in SECTIONS.items():
        page.append(f"## {title}\n")
        for name in names:
            page += [*commands(cli.commands[name], f"calibrant {name}")]
    return "\n".join(page)


def commands(command, path: str):
    """Help of a command and, if it is a group, of those in it."""
    inner = getattr(command, "commands", {})
    yield f"### {path}\n\n```text\n{help_of(command, path)}\n```\n"
    for name, each in inner.items():
        yield from commands(each, f"{path} {name}")


def help_of(command, path: str) -> str:
    """The help of a command, as a terminal of 80 columns shows it."""
    settings = {"terminal_width": 80, "help_option_names": ["-h", "--help"]}
    context = command.context_class(command, info_name=path, **settings)
    return command.get_help(context)


def notebook_of(page: str) -> str:
    """A page as a notebook: its text, its Python, and its commands behind an exclamation mark."""
    cells = []
    for i, part in enumerate(re.split(r"```(python|bash|text)\n(.*?)```\n", page, flags=re.DOTALL)):
        kind = ("markdown", "language", "code")[i % 3]
        if kind == "language":
            language = part
            continue
        if kind == "code":
            if language == "text":
                continue  # the notebook shows its own output
            if language == "bash":
                part = re.sub(r"(?m)^(?=\w)", "!", part)
        else:
            part = re.sub(r"\{\w+\}`([^`<]*?)(?: <[^>]*>)?`", r"`\1`", part)  # roles of Sphinx
            part = re.sub(
                r"```\w+\n(.*?)```\n", lambda code: indent(code[1], "    "), part, flags=re.DOTALL
            )
        if part.strip():
            source = part.strip().splitlines(keepends=True)
            cell = {"cell_type": kind, "id": f"cell-{i}", "metadata": {}, "source": source}
            cells.append(
                cell | ({"outputs": [], "execution_count": None} if kind == "code" else {})
            )
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    page = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(page, indent=1, ensure_ascii=False)


# ---------------------------------------------------------------------------------------- API page


def api_pages() -> dict[str, str]:
    """Pages of public names: that of the names on top by package, and one for each package."""
    import calibrant

    page = ["# Python interface\n", "Each section has names of `import calibrant`.\n"]
    tables = [name for name in calibrant.__all__ if isinstance(getattr(calibrant, name), dict)]
    page.append(f"Tables from name to class or function: {code(tables)}.\n")
    names = sorted((n for n in calibrant.__all__ if n not in tables), key=_place)
    pages = {}
    for package, group in groupby(names, key=_package):
        top = [name for name in group if name != "CalibratedClassifier"]
        page.append(section(TITLES.get(package, package), "calibrant", top))
        pages |= package_page(package, top)
    for package in SUBMODULES:
        pages |= package_page(package, [])
    links = "".join(f"{name}\n" for name in pages)
    page += [SKLEARN, "## Packages\n", f"```{{toctree}}\n:maxdepth: 1\n\n{links}```\n"]
    return {"api": "\n".join(page), **pages}


def package_page(package: str, top) -> dict[str, str]:
    """A page with the names of a package that are not on top, in a table and in full; or none."""
    module = f"calibrant.{package}"
    exported = [] if package == "_core" else public(module)
    names = [name for name in (*exported, *MORE.get(package, ())) if name not in top]
    names = [name for name in names if not _is_alias(module, name)]
    listed = "".join(f"   {name}\n" for name in names)
    start = f"```{{eval-rst}}\n.. currentmodule:: {module}\n.. autosummary::\n\n{listed}"
    lines = [f"# {module}\n", start]
    for name in names:
        kind, members = ("class", "   :members:\n") if _is_class(module, name) else ("function", "")
        lines.append(f".. auto{kind}:: {module}.{name}\n{members}")
    return {f"api/{package}": "\n".join([*lines, "```\n"])} if names else {}


def _is_class(module: str, name: str) -> bool:
    return inspect.isclass(_object(module, name))


def _is_alias(module: str, name: str) -> bool:
    """Return True for the alias of a type, which has no documentation of its own."""
    return get_origin(_object(module, name)) is not None


def _object(module: str, name: str) -> object:
    *inner, name = name.split(".")
    return getattr(import_module(".".join([module, *inner])), name)


def _package(name: str) -> str:
    import calibrant

    return getattr(calibrant, name).__module__.split(".")[1]


def _place(name: str):
    """By section, and calibrators in the order of their table."""
    import calibrant
    from calibrant.calibrators.registry import CALIBRATORS

    package, kinds = _package(name), list(CALIBRATORS.values())
    value, titles = getattr(calibrant, name), list(TITLES)
    rank = titles.index(package) if package in titles else len(titles)
    return rank, package, kinds.index(value) if value in kinds else len(kinds), name


def section(title: str, module: str, names) -> str:
    """A heading and a list of names with a page each."""
    lines = "".join(f"   {name}\n" for name in names)
    heading = f"## {title}\n\n" if title else ""
    return (
        f"{heading}```{{eval-rst}}\n.. currentmodule:: {module}\n"
        f".. autosummary::\n   :toctree: api/_generated\n\n{lines}```\n"
    )


def public(name: str):
    """Functions and classes that a module exports: those of ``__all__``, or else its own.

    A package without ``__all__`` exports what it imports from calibrant.
    """
    module = import_module(name)
    home = "calibrant" if hasattr(module, "__path__") else name
    exported = getattr(module, "__all__", None) or [
        key
        for key, value in vars(module).items()
        if not key.startswith("_") and getattr(value, "__module__", "").startswith(home)
    ]
    return [key for key in exported if callable(getattr(module, key))]
