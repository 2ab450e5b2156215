"""Put questions to a service, and make a row of each answer with signals of its confidence."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from calibrant._core.atomic_files import locked
from calibrant._core.engines import report
from calibrant._core.messages import printable
from calibrant.llm.answers.logs.completions import (
    _chat_form,
    _completion,
    _question_of,
    _request_source,
)
from calibrant.llm.answers.questions import (
    Question,
    _contains_reference,
    exact_match,
    read_questions,
    verdict_prompt,
)
from calibrant.llm.answers.rows import CUT_OFF, Row, _placed_rows, json_digest, usable
from calibrant.llm.heads.documents import BadDocument
from calibrant.llm.models.services import FINAL, Service, ServiceError, _without_key

_MAX_FAILURES = 10
"""Questions in a row without an answer, after which no more are asked."""
CONFIDENCE_REQUEST = (
    "After the answer, write on a last line of its own how likely it is that your answer is "
    "correct, in percent, as in\nConfidence: 70%"
)
"""Request for a stated confidence, below the question."""
_STATEMENT = re.compile(r"\n[^\w\n]*(?:confidence|probability)\b[^\n]*\s*\Z", re.IGNORECASE)
_MAX_TOP = 20
"""Top tokens that are requested for P(True), the most that OpenAI returns."""
_PER_TOKEN, _PER_REQUEST = 4, 8
"""Bytes of a token, about, and tokens that a request takes besides its texts."""

_REFERENCES = ("references", "reference", "answers", "answer")
"""Names that right answers go by."""

_Grading = Literal["contains", "exact", "none"]
_GRADES: dict[str, Callable[[str, Sequence[str]], bool]] = {
    "contains": _contains_reference,
    "exact": exact_match,
}
"""Functions that compare an answer with references."""


class Asked(NamedTuple):
    """A question for a service.

    Attributes
    ----------
    messages : list of dict
        The chat, with the question last.
    references : tuple of str
        Right answers; empty if they are unknown.
    id, kind : str
    """

    messages: list[dict[str, Any]]
    references: tuple[str, ...] = ()
    id: str = ""
    kind: str = ""

    @property
    def question(self) -> str:
        """Text of the question."""
        return _question_of(self.messages)


def read_asked(file: str | os.PathLike[str]) -> list[Asked]:
    """Read questions: ``.jsonl`` or ``.csv`` with a question to a line, or ``.txt``.

    A line has ``question``, or ``messages`` of a chat in ``.jsonl``; and optionally ``references``
    (a list of right answers, or one), ``id`` and ``kind``. A text file has a question, its answer
    and an empty line. Repeated questions are read once.
    """
    path = Path(file)
    if path.suffix == ".txt":
        asked = [Asked([_said(one.text)], one.references) for one in read_questions(path)]
    elif path.suffix in (".jsonl", ".csv"):
        asked = [_asked(row, place) for place, row in usable(_placed_rows(path))]
    else:
        raise ValueError(f"{path} must be .jsonl, .csv or .txt, got the suffix {path.suffix!r}")
    if not asked:
        raise ValueError(f"{path} has no questions")
    distinct: dict[str, Asked] = {}
    for one in asked:
        distinct.setdefault(str(one.messages), one)
    return list(distinct.values())


def _said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def _asked(row: Row, place: str) -> Asked:
    messages, question = row.get("messages"), row.get("question")
    if isinstance(messages, list) and messages and all(isinstance(m, Mapping) for m in messages):
        chat = [dict(one) for one in messages]
    elif isinstance(question, str) and question.strip():
        chat = [_said(question)]
    else:
        raise ValueError(f"{place} must have a question or messages, got {', '.join(row)}")
    named = (row.get(name) for name in _REFERENCES)
    right: Any = next((one for one in named if one not in (None, "", [])), [])
    listed = right if isinstance(right, list) else [right]
    if not all(isinstance(one, (str, int, float)) for one in listed):
        raise ValueError(f"{place} must have texts or numbers as its references, got {right!r:.60}")
    about = (str(row[name]) if row.get(name) is not None else "" for name in ("id", "kind"))
    return Asked(chat, tuple(map(str, listed)), *about)


@dataclass(frozen=True)
class RequestPlan:
    """Requests for each question: an answer, and signals of the confidence in it.

    Parameters
    ----------
    model, system : str
        Name of the model, and first message of every chat.
    logprobs : bool
        Request the log-probabilities of the tokens of the answer.
    samples : int
        Further answers, drawn at temperature 1, for their agreement.
    stated, p_true : bool
        Ask the model to state its confidence on a last line; ask in a second chat if the answer is
        true, for the probability of True against False.
    max_tokens : int
        Largest length of an answer.
    grade : {"contains", "exact", "none"}
        An answer is right if it contains a reference, or equals one; or leave that to others.
    fields : dict
        Fields of the requests, such as ``{"seed": 1}``; None leaves out one that is there.
    """

    model: str
    logprobs: bool = True
    samples: int = 0
    stated: bool = False
    p_true: bool = False
    max_tokens: int = 256
    system: str = ""
    grade: _Grading = "contains"
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def digest(self) -> str:
        """Hash of everything that changes answers."""
        content = {name: value for name, value in asdict(self).items() if name != "grade"}
        return json_digest(content, 8)

    @property
    def prompt(self) -> str:
        """Form of the prompt, which is part of the source of a confidence."""
        return _chat_form(self.system) + (", stated confidence" if self.stated else "")

    @property
    def requests(self) -> int:
        """Number of requests for each question."""
        return 1 + self.samples + self.p_true

    def key(self, asked: Asked) -> str:
        """Return what tells finished questions from others: hashes of the plan and the chat."""
        return f"{self.digest}-{json_digest(asked.messages)}"

    def messages(self, asked: Asked) -> list[dict[str, Any]]:
        """Return the chat about a question."""
        first = [{"role": "system", "content": self.system}] if self.system else []
        *before, last = asked.messages
        if self.stated:
            last = {**last, "content": f"{_question_of([last])}\n\n{CONFIDENCE_REQUEST}"}
        return [*first, *before, last]

    def tokens(self, asked: Asked) -> tuple[int, int]:
        """Estimate the tokens of all requests about a question: sent, and at most received."""
        chat = sum(len(json.dumps(one).encode()) for one in self.messages(asked))
        sent = (chat // _PER_TOKEN + _PER_REQUEST) * self.requests
        return sent, self.max_tokens * (1 + self.samples) + self.p_true


def _answer_row(plan: RequestPlan, asked: Asked, service: Service) -> Row:
    """Ask a service everything about a question, and return the row of its answer."""
    messages, place = plan.messages(asked), f"the response to {asked.question!r:.60}"
    greedy = {"temperature": 0, "max_tokens": plan.max_tokens}
    shown = {"logprobs": True} if plan.logprobs else {}
    first = _completion(service(messages, _fields(plan, {**greedy, **shown})), place)
    if plan.logprobs and "token_probs" not in first:
        raise BadDocument(place, "has no logprobs: leave --logprobs out, or ask another service")
    if plan.stated:
        first = _without_statement(first)
    row: Row = {
        "id": asked.id,
        "key": plan.key(asked),
        "question": asked.question,
        **first,
        "prompt": plan.prompt,
        "model": plan.model,
        "head": "none",
        "sampling": _request_source(_fields(plan, greedy))["sampling"],
        "kind": asked.kind,
    }
    if plan.samples:
        drawn = _fields(plan, {**greedy, "temperature": 1})
        replies = [_completion(service(messages, drawn), place) for _ in range(plan.samples)]
        texts = map(_without_statement, replies) if plan.stated else replies
        row["samples"] = [str(reply["answer"]) for reply in texts]
    if plan.p_true:
        row |= _verdict(plan, asked, row, service, place)
    if asked.references and plan.grade != "none":
        row["correct"] = _GRADES[plan.grade](row["answer"], asked.references)
    return row


def _fields(plan: RequestPlan, usual: Mapping[str, Any]) -> dict[str, Any]:
    together = {**usual, **plan.fields}
    return {name: value for name, value in together.items() if value is not None}


def _without_statement(reply: Row) -> Row:
    r"""Move the last line, which states a confidence, from the answer to ``stated``.

    Its tokens leave the answer with it. Without such a line ``stated`` is None.
    """
    text = reply["answer"]
    found = _STATEMENT.search("\n" + text)
    if found is None:
        return {**reply, "stated": None}
    answer = text[: max(found.start() - 1, 0)]
    row: Row = {**reply, "answer": answer.rstrip(), "stated": found[0].strip()}
    if "tokens" in reply:  # those that begin within the answer, and at least one
        starts = np.cumsum([0, *map(len, reply["tokens"][:-1])])
        kept = max(int(np.count_nonzero(starts < len(answer))), 1)
        lists = ("tokens", "token_probs", "top_logprobs")
        row |= {name: reply[name][:kept] for name in lists if name in reply}
    return row


def _verdict(plan: RequestPlan, asked: Asked, row: Row, service: Service, place: str) -> Row:
    """Return P(True) as a signal; as the confidence if there are no token probabilities."""
    prompt = verdict_prompt(Question(asked.question, ()), row["answer"])
    fields = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": _MAX_TOP}
    reply = _completion(service([_said(prompt)], _fields(plan, fields)), place)
    shown = reply.get("top_logprobs") or []
    if not shown:
        raise BadDocument(place, "has no top_logprobs, which P(True) needs: leave --p-true out")
    chance = _p_true_of(shown[0])
    signals: Row = {"signals": {"p_true": chance}}
    if "token_probs" in row or chance is None:
        return signals
    return {**signals, "confidence": chance, "source": "p_true"}


def _p_true_of(shown: Mapping[str, float]) -> float | None:
    """Return the share of True against False among the top tokens; None if neither is there.

    If one is not there, it counts as the least likely of these tokens, or as the rest if that is
    less.
    """
    sums, chances = {"true": 0.0, "false": 0.0}, []
    for token, logprob in shown.items():
        word = token.strip(" \n\"'*.").lower()
        if math.isfinite(logprob):
            chances.append(math.exp(min(logprob, 0.0)))
            if word in sums:
                sums[word] += chances[-1]
    if not any(sums.values()):
        return None
    missing = max(min(*chances, 1 - sum(chances)), 0.0)
    true, false = (found or missing for found in sums.values())
    return true / (true + false)


def cost_of(
    questions: Sequence[Asked],
    plan: RequestPlan,
    out: str | os.PathLike[str],
    prices: tuple[float, float] | None = None,
) -> str:
    """Say what it takes to finish the questions that ``out`` has no answer to.

    ``prices`` are those of a million tokens sent and received.
    """
    left = _left(questions, plan, Path(out))
    sent, received = (sum(each) for each in zip((0, 0), *map(plan.tokens, left), strict=True))
    said = (
        f"{len(questions):,} questions, {len(questions) - len(left):,} of them finished: "
        f"{len(left) * plan.requests:,} requests, about {sent:,} tokens in and at most "
        f"{received:,} out"
    )
    if prices is None:
        return said
    return f"{said}; at most {(sent * prices[0] + received * prices[1]) / 1e6:.2f}"


def request_answers(
    questions: Sequence[Asked],
    service: Service,
    plan: RequestPlan,
    out: str | os.PathLike[str],
    *,
    concurrency: int = 4,
) -> int:
    """Ask a service all questions, and append each finished answer to a file of JSON lines.

    A run that was stopped or killed goes on where it was: questions with an answer in the file, by
    the same plan, are not asked again.

    Parameters
    ----------
    questions : sequence of Asked
        From :func:`~calibrant.llm.answers.requesting.read_asked`.
    service : callable
        From :func:`~calibrant.llm.models.services.service_for`, or a function of messages and
        fields that returns the body of a chat completion. Several threads call it.
    plan : RequestPlan
    out : path
        ``.jsonl``.
    concurrency : int
        Questions that are asked at a time. The callback of :func:`calibrant.use` is told the
        questions finished, and all.

    Returns
    -------
    int
        Number of new answers. Questions that are left without one are an error.
    """
    target = Path(out)
    if target.suffix != ".jsonl":
        raise ValueError(f"{target} must be .jsonl, got the suffix {target.suffix!r}")
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(target, wait=False))
        except BlockingIOError as error:
            raise ValueError(f"another process writes {target}: wait for it") from error
        left = _left(questions, plan, target)
        done, failures, in_a_row = len(questions) - len(left), list[str](), 0
        if target.exists():  # a killed process may not have finished the last line
            with target.open("rb+") as file:
                file.truncate(file.read().rfind(b"\n") + 1)

        def told(what: str) -> ValueError:
            return ValueError(
                f"{what}: {failures[-1]}; {len(failures):,} questions have no answer, those "
                f"finished are in {target}: the same command asks the others"
            )

        pool = ThreadPoolExecutor(concurrency)
        stack.callback(pool.shutdown, cancel_futures=True)
        tasks = [pool.submit(_answer_row, plan, asked, service) for asked in left]
        stream = stack.enter_context(target.open("a", encoding="utf-8"))
        for number, task in enumerate(as_completed(tasks), start=1):
            try:
                stream.write(json.dumps(task.result()) + "\n")
                stream.flush()
                in_a_row = 0
            except (ServiceError, BadDocument) as error:
                failures.append(_without_key(printable(str(error))))
                in_a_row += 1
                if getattr(error, "status", None) in FINAL or in_a_row == _MAX_FAILURES:
                    raise told("stopped") from None
            report(done + number, len(questions))
    if failures:
        raise told(f"{len(failures):,} of {len(left):,} failed")
    return len(left)


def _left(questions: Sequence[Asked], plan: RequestPlan, target: Path) -> list[Asked]:
    """Return the questions without an answer; raise if the file has those of another plan."""
    finished = set()
    for place, row in _placed_rows(target) if target.exists() else ():
        if isinstance(row, BadDocument):
            if row.reason == CUT_OFF:
                continue
            raise row
        key = str(row.get("key"))
        if not key.startswith(f"{plan.digest}-"):
            raise ValueError(
                f"{place} has an answer that was asked for with other options: use another file"
            )
        finished.add(key)
    return [asked for asked in questions if plan.key(asked) not in finished]
