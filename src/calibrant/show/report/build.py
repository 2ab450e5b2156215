"""Make a report of prediction files, arrays or data frames."""

from __future__ import annotations

import os
import platform
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from calibrant._core.checks import Values
from calibrant._core.chunks import EstimandChoice
from calibrant._core.class_names import is_frame
from calibrant._core.engines import current_work, silently, use
from calibrant.calibrators.auto import KeepArgmax
from calibrant.calibrators.registry import find_calibrator
from calibrant.data.dataset import IN_MEMORY, Dataset
from calibrant.data.files import Data, as_dataset, is_data
from calibrant.show.report.measure import _find_subgroups, _try_methods, measure, usual_methods
from calibrant.show.report.model import Subject
from calibrant.show.report.report import Provenance, Report
from calibrant.workflows.evaluate import AUTO

PREFER = ("test", "", "val")
"""Splits to measure, if none is named."""
LEVEL = 0.9
"""Level that a command need not repeat."""
NAMED_IN_PYTHON = {
    "keep_argmax": ("auto",),
    "estimand": ("auto", "multilabel"),
    "bins": (15,),
    "seed": (0,),
}
"""Options with the values that the command line has; it cannot name others."""

Several: TypeAlias = "Sequence[str | os.PathLike[str]] | Mapping[str, Data]"


def report(
    data: Data | Several | Values | None = None,
    labels: Values | None = None,
    *,
    probs: Values | None = None,
    split: str | Sequence[str] | None = None,
    fit_split: str | None = None,
    by: Values | str | None = None,
    sample_weight: Values | str | None = None,
    methods: str | Sequence[str] | None = None,
    keep_argmax: KeepArgmax = "auto",
    estimand: EstimandChoice = "auto",
    bins: int = 15,
    level: float | None = 0.9,
    seed: int = 0,
    title: str | None = None,
) -> Report:
    """Report on predictions: can their confidence be trusted, where not, and what helps.

    Parameters
    ----------
    data : logits, path, Dataset, mapping or data frame, or several of them
        Logits ``(..., classes)`` or ``(n,)``, as for :func:`calibrant.evaluate`; or a prediction
        file, a folder, a glob, or arrays by their keys in a file. A sequence of paths or datasets,
        or a mapping from names to any of these, gives a comparison: of models, days or shifts.
    labels : (...) integers
        With logits or ``probs``; -100 is ignored.
    probs : (..., classes) or (n,), optional
        Probabilities in place of logits.
    split : str or sequence of str, optional
        Split to measure: test, else the unnamed split, else val, by default. Several are compared.
    fit_split : str, optional
        Split to fit methods on: val, else the unnamed split, by default. In a single split each
        example is measured with fits on the others, as in :func:`calibrant.compare`.
    by, sample_weight : str or array, optional
        Subgroups to report on, and weights of the examples, as in :func:`calibrant.evaluate`.
        Subgroups of all other columns are searched by :func:`calibrant.find_slices`; "auto" forms
        them of the predictions as well.
    methods : sequence of str, optional
        Names from ``CALIBRATORS`` to try as a remedy: a few quick ones by default, none if it is
        empty.
    keep_argmax : "auto" or bool
        Whether to advise only methods that keep the predicted class, as in
        :func:`calibrant.compare`.
    estimand, bins, level, seed
        As in :func:`calibrant.evaluate`.
    title : str, optional

    Returns
    -------
    Report
        With ``verdict``, ``findings``, ``to_html()``, ``to_markdown()``, ``to_json()`` and
        ``save(path)``. It holds sums and figures, no examples.

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> honest = 2 * rng.normal(size=(4000, 5))
    >>> labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    >>> result = report(3 * honest, labels, methods=["none", "ts"])
    >>> result.verdict.answer, result.findings[0].code
    ('No', 'CAL001')
    """
    options: dict[str, Any] = {"fit_split": fit_split, "estimand": estimand, "bins": bins}
    options |= {"level": level, "seed": seed, "keep_argmax": keep_argmax}
    options["methods"] = _names(methods, estimand)
    tags = estimand == "multilabel"
    named = {
        name: as_dataset(
            each, labels, probs=probs, by=by, sample_weight=sample_weight, multilabel=tags
        )
        for name, each in _named(data, labels).items()
    }
    sets = _sets(named, split)
    progress = _Steps(len(sets))
    one, *others = [_subject(name, *each, options, progress) for name, each in sets.items()]
    first = one.name, one.evaluation["ece"]
    return Report(
        title or f"Calibration of {one.name if not others else f'{len(sets)} sets of predictions'}",
        [one, *(replace(other, first=first) for other in others)],
        _provenance(sets, {"split": split, **options, "by": by, "sample_weight": sample_weight}),
    )


def _names(methods: str | Sequence[str] | None, estimand: EstimandChoice) -> list[str] | None:
    """Return the names of methods as they are listed; an error for unknown ones."""
    if methods is None:
        return None
    return [
        find_calibrator(name, estimand)[0]
        for name in ([methods] if isinstance(methods, str) else methods)
    ]


def _named(data: Any, labels: Values | None) -> dict[str, Any]:
    """Return sets of predictions by name; a single one has the stem of its file."""
    if labels is not None:
        return {"predictions": data}
    if isinstance(data, Mapping) and _is_several(data):
        return {str(name): each for name, each in data.items()}
    if isinstance(data, (list, tuple)):
        if not data or not all(isinstance(each, (str, os.PathLike, Dataset)) for each in data):
            raise TypeError(
                "a sequence must have paths of prediction files: pass arrays as "
                "{'logits': logits, 'labels': labels}, and several by name, {'monday': ...}"
            )
        paths = [each.path if isinstance(each, Dataset) else os.fspath(each) for each in data]
        return dict(zip(_distinct(paths), data, strict=True))
    path = data.path if isinstance(data, Dataset) else data
    if not isinstance(path, (str, os.PathLike)) or path == IN_MEMORY:
        return {"predictions": data}
    typed = Path(path)  # as it was typed, and without folders that others do not have
    return {typed.stem if typed.is_absolute() else str(typed.with_suffix("")): data}


def _is_several(data: Mapping[Any, Any]) -> bool:
    values = list(data.values())
    if any(str(key) == "labels" or str(key).endswith("_labels") for key in data):
        return False
    return bool(values) and all(is_data(value) or is_frame(value) for value in values)


def _distinct(paths: Sequence[str]) -> list[str]:
    """Return the stems of paths, or the paths where stems repeat; twice the same is refused."""
    stems = [Path(path).stem or path for path in paths]
    names = stems if len(set(stems)) == len(stems) else list(paths)
    if len(set(names)) < len(names):
        raise ValueError(f"a file is named twice: {max(paths, key=paths.count)}; name each once")
    return names


def _sets(
    named: Mapping[str, Dataset], split: str | Sequence[str] | None
) -> dict[str, tuple[Dataset, str]]:
    """Return a dataset and the name of a split for each set of predictions."""
    wanted = [split] if split is None or isinstance(split, str) else list(split)
    if not wanted:
        raise ValueError("split must name at least one split; leave it out for the usual one")
    result: dict[str, tuple[Dataset, str]] = {}
    for name, dataset in named.items():
        for each in wanted:
            chosen = dataset.split(each, PREFER).name
            words = chosen or "unnamed split"
            both = f"{name}, {words}" if len(named) > 1 else words
            result[name if len(wanted) == 1 else both] = (dataset, chosen)
    return result


class _Steps:
    """Progress over all sets: one step to measure, and one for each method."""

    def __init__(self, sets: int) -> None:
        self.progress, self.sets = current_work().progress, sets
        self.done, self.total = 0, sets

    def expect(self, methods: int) -> None:
        """Know how many steps each set takes."""
        self.total = self.sets * (1 + methods)

    def step(self, count: int = 1) -> None:
        """Report steps that are done."""
        self.done += count
        if self.progress is not None:
            self.progress(min(self.done, self.total), self.total)


def _subject(
    name: str,
    dataset: Dataset,
    split: str,
    options: Mapping[str, Any],
    steps: _Steps,
) -> Subject:
    figures = {key: options[key] for key in ("estimand", "bins", "level", "seed")}
    chosen, searched = dataset.split(split), dataset.by == AUTO
    if searched and AUTO not in chosen.keys:
        dataset = replace(dataset, by=None)
        chosen = replace(chosen, dataset=dataset)
    methods = options["methods"]
    if methods is None:
        methods = usual_methods(options["estimand"], chosen.classes)
    steps.expect(len(methods))
    with silently():
        subject = measure(chosen, name, **figures)
        found = _find_subgroups(chosen, figures["level"], figures["seed"], searched)
    subject = replace(subject, slices=found)
    steps.step()
    if not methods:
        return replace(subject, remedy_error="none were named")
    named = {key: options[key] for key in ("fit_split", "keep_argmax")}
    try:
        with use(progress=lambda done, _: steps.step(int(done > 0))):  # a step for each method
            remedy = _try_methods(dataset, methods=methods, split=split, **named, **figures)
    except ValueError as problem:  # a split that is too small to be cut, for instance
        return replace(subject, remedy_error=str(problem))
    return replace(subject, remedy=remedy)


def _provenance(sets: Mapping[str, tuple[Dataset, str]], options: Mapping[str, Any]) -> Provenance:
    from calibrant import __version__

    simple = (str, int, float, list, tuple, type(None))
    shown = {k: v if isinstance(v, simple) else "an array" for k, v in options.items()}
    return Provenance(
        calibrant=__version__,
        python=platform.python_version(),
        numpy=np.__version__,
        torch=torch.__version__,
        created=datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        command=_command(sets, shown),
        options=shown,
    )


def _command(sets: Mapping[str, tuple[Dataset, str]], options: Mapping[str, Any]) -> str:
    """Return the command line that makes this report again; empty where there is none.

    Arrays have none, nor have options that stand in Python alone.
    """
    paths = dict.fromkeys(dataset.path for dataset, _ in sets.values())
    alike = all(options[name] in values for name, values in NAMED_IN_PYTHON.items())
    if IN_MEMORY in paths or not alike:
        return ""
    words = ["calibrant", "report", *paths, *next(iter(sets.values()))[0].named.words]
    for name in ("split", "fit_split", "by", "sample_weight", "methods"):
        value = options[name]
        if value not in (None, ""):
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            words += [f"--{name.replace('_', '-')}", text]
    words += ["--level", str(options["level"] or 0)] if options["level"] != LEVEL else []
    words += ["--multilabel"] if options["estimand"] == "multilabel" else []
    words += ["--skip-bad"] if any(dataset.skipped for dataset, _ in sets.values()) else []
    return shlex.join(words)
