"""Samples of lm-evaluation-harness, which ``lm_eval --log_samples`` writes.

A run leaves ``results_DATE.json`` and a file ``samples_TASK_DATE.jsonl`` for each task. Of multiple
choice the samples have the log-likelihood of every option; of written answers they have no
probabilities, but with ``repeats`` several texts; of log-likelihood tasks they have the
probability of the reference, which is no confidence in an answer of the model.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from scipy.special import log_softmax

from calibrant._core.checks import warn
from calibrant._core.messages import comma_separated, printable
from calibrant.llm.answers.rows import Item, Row, _converted, _parsed, _placed_rows
from calibrant.llm.heads.documents import BadDocument

_SAMPLES = re.compile(r"samples_(?P<task>.+)_(?P<date>\d{4}-\d\d-\d\dT[\d.:-]+)\.jsonl")
_SCORES: dict[str, tuple[str, Callable[[str], int]]] = {
    "acc": ("texts", lambda _: 1),
    "acc_norm": ("texts, per character", len),
    "acc_bytes": ("texts, per byte", lambda text: len(text.encode())),
}
"""Names of confidences, and what log-likelihoods of options are divided by, by the metric."""
_USUAL = ("acc", "exact_match")
"""Metrics that say if an answer is right, which are used if they are there."""


class _HarnessRun(NamedTuple):
    """What a file of samples does not say: the task, and from ``results_DATE.json`` the rest."""

    task: str = ""
    model: str = ""
    shots: int | None = None
    delimiter: str = " "
    """Text between the question and an option."""

    @classmethod
    def of(cls, file: Path) -> _HarnessRun:
        """Look beside a file of samples."""
        named = _SAMPLES.fullmatch(file.name)
        if named is None:
            return cls()
        task, beside = named["task"], file.with_name(f"results_{named['date']}.json")
        if not beside.is_file():
            return cls(task)
        about = _parsed(beside.read_bytes(), str(beside))
        if isinstance(about, BadDocument):
            raise about
        try:
            arguments = about.get("config", {}).get("model_args") or ""
            if not isinstance(arguments, str):
                arguments = json.dumps(arguments, sort_keys=True)
            model = str(arguments or about.get("model_name") or "")
            delimiter = about.get("configs", {}).get(task, {}).get("target_delimiter", " ")
            return cls(task, model, about.get("n-shot", {}).get(task), str(delimiter))
        except (AttributeError, TypeError) as error:
            raise ValueError(f"{beside} does not have the form of results ({error})") from error


def _sample_files(path: Path) -> list[Path]:
    """Return the files of samples of a folder, the newest of each task, or of ``results_*.json``.

    A file of samples stands for itself.
    """
    if path.is_file() and path.suffix == ".jsonl":
        return [path]
    folder, date = path, ""
    if path.is_file():
        folder, date = path.parent, path.stem.removeprefix("results_")
    newest: dict[str, Path] = {}
    for file in sorted(folder.rglob("samples_*.jsonl")):
        named = _SAMPLES.fullmatch(file.name)
        if named and date in ("", named["date"]):
            newest[f"{file.parent}/{named['task']}"] = file
    if not newest:
        raise ValueError(
            f"{path} has no files samples_TASK_DATE.jsonl: run lm_eval with --log_samples"
        )
    return list(newest.values())


def _answers(file: Path, outcome: str | None) -> Iterator[Item]:
    """Yield the answers of a file of samples; ``outcome`` is a metric, or metric and filter."""
    metric, _, wanted = (outcome or "").partition(",")
    run, filters = _HarnessRun.of(file), dict[str, None]()

    def of_one_filter() -> Iterator[Item]:
        # every filter of a task repeats all samples
        for place, sample in _placed_rows(file):
            if not isinstance(sample, BadDocument):
                filters.setdefault(str(sample.get("filter", "")))
                if str(sample.get("filter", "")) != (wanted or next(iter(filters))):
                    continue
            yield place, sample

    yield from _converted(of_one_filter(), lambda one, place: _answer(one, place, metric, run))
    if wanted and wanted not in filters:
        named = comma_separated(filters)
        raise ValueError(f"{file} has no filter {printable(wanted)!r}: it has {named}")
    if len(filters) > 1 and not wanted:
        first, *others = map(printable, filters)
        warn(
            f"{file.name} has answers of {len(filters)} filters, of which {first} is read: for "
            f"another name it after the metric, as in outcome={metric or 'exact_match'},{others[0]}"
        )


def _answer(sample: Mapping[str, Any], place: str, wanted: str, run: _HarnessRun) -> Row:
    metric, right = _outcome(sample, place, wanted)
    arguments = sample["arguments"]  # by gen_args_0, gen_args_1 ... gen_args_10
    asked = [arguments[n] for n in sorted(arguments, key=lambda n: int(n.rpartition("_")[2]))]
    doc, prompt = sample.get("doc"), asked[0]["arg_0"]
    question = doc.get("question") if isinstance(doc, Mapping) else None
    row: Row = {
        "id": f"{run.task}/{sample['doc_id']}",
        "question": question if isinstance(question, str) else str(prompt),
        "model": run.model,
        "prompt": "" if run.shots is None else f"{run.shots} shots",
        "kind": run.task,
        "correct": right,
    }
    replies = sample["filtered_resps"]
    if isinstance(replies[0], str):
        # the first text after the filter, and further ones, which the log has unfiltered
        (texts,) = sample["resps"]
        more = {"samples": texts[1:]} if len(texts) > 1 else {}
        return {**row, "answer": replies[0], **more}
    if len(asked) == 1:
        return {**row, "answer": str(sample["target"])}  # whose likelihood is no confidence
    return {**row, **_chosen(sample, asked, metric, run, place, right)}


def _outcome(sample: Mapping[str, Any], place: str, wanted: str) -> tuple[str, bool]:
    """Return the metric that says if the answer is right, by default a usual one, and its value."""
    names = list(sample.get("metrics") or ())
    if not wanted:
        usual = (name for name in (*_USUAL, *names) if sample.get(name) in (0, 1))
        wanted = next(usual, "")
        if not wanted:
            raise BadDocument(
                place, f"has no metric of 0 or 1 that says if the answer is right, of {names!r:.80}"
            )
    if sample.get(wanted) not in (0, 1):
        raise BadDocument(
            place,
            f"must have 0 or 1 as its {printable(wanted)}, got {sample.get(wanted)!r:.40}; its "
            f"metrics: {comma_separated(map(str, names))}",
        )
    return wanted, bool(sample[wanted])


def _chosen(
    sample: Mapping[str, Any],
    asked: Sequence[Mapping[str, Any]],
    metric: str,
    run: _HarnessRun,
    place: str,
    right: bool,
) -> Row:
    """Return the option that a metric takes as the answer, and its probability among all."""
    if metric not in _SCORES:
        known = comma_separated(_SCORES)
        raise BadDocument(
            place, f"has options, for which the outcome must be {known}, got {metric}"
        )
    # log-likelihoods, which the harness writes as texts
    likelihoods = np.array([float(reply[0]) for reply in sample["filtered_resps"]])
    if not np.isfinite(likelihoods).all():
        at = int(np.flatnonzero(~np.isfinite(likelihoods))[0])
        raise BadDocument(place, f"has a log-likelihood of {likelihoods[at]} for option {at}")
    if "acc_mutual_info" in sample.get("metrics", ()):
        # the second half are the options without the question
        likelihoods, asked = np.split(likelihoods, 2)[0], asked[: len(asked) // 2]
    texts = [str(one["arg_1"]).removeprefix(run.delimiter) for one in asked]
    source, length = _SCORES[metric]
    scores = likelihoods / np.array([length(text) for text in texts])
    logprobs, at, target = log_softmax(scores), int(scores.argmax()), str(sample["target"])
    label = int(target) if target.isdecimal() and int(target) < len(texts) else None
    if label is not None and (at == label) != right:
        raise BadDocument(
            place, f"has {metric} = {int(right)}, but its likelihoods choose option {at}"
        )
    return {
        "answer": texts[at].strip(),
        "confidence": math.exp(logprobs[at]),
        "source": source,
        "head": "none",
        "option_logits": logprobs.tolist(),
        "label": label,
    }
