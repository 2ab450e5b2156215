"""Ask a service all questions, and append each finished answer to a file."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from calibrant._core.atomic_files import locked
from calibrant._core.engines import Progress
from calibrant._core.messages import printable
from calibrant.llm.answers.lines import CUT_OFF, Row, placed_rows
from calibrant.llm.answers.plans import Asked, RequestPlan, answer_row
from calibrant.llm.heads.documents import BadDocument
from calibrant.llm.models.services import Service, ServiceError, without_key

MOST_FAILURES = 10
"""Questions in a row without an answer, after which no more are asked."""


class Cost(NamedTuple):
    """What is left to do, before it starts.

    Attributes
    ----------
    finished, questions : int
        Questions with an answer in the file, and all of them.
    requests : int
        That are left.
    tokens_in, tokens_out : int
        Tokens that are sent, by the number of bytes, and received at most.
    """

    finished: int
    questions: int
    requests: int
    tokens_in: int
    tokens_out: int

    def price(self, price_in: float, price_out: float) -> float:
        """Return the price, from prices of a million tokens.

        >>> Cost(0, 1, 1, 2_000_000, 1_000_000).price(0.5, 2)
        3.0
        """
        return (self.tokens_in * price_in + self.tokens_out * price_out) / 1e6

    def describe(self) -> str:
        """Return the numbers in words."""
        return (
            f"{self.questions:,} questions, {self.finished:,} of them finished: "
            f"{self.requests:,} requests, about {self.tokens_in:,} tokens in and at most "
            f"{self.tokens_out:,} out"
        )


def cost_of(questions: Sequence[Asked], plan: RequestPlan, out: str | os.PathLike[str]) -> Cost:
    """Estimate what it takes to finish the questions that ``out`` has no answer to."""
    left = _left(questions, plan, Path(out))
    tokens = [plan.tokens(asked) for asked in left]
    return Cost(
        len(questions) - len(left),
        len(questions),
        len(left) * plan.requests,
        sum(sent for sent, _ in tokens),
        sum(received for _, received in tokens),
    )


def collect_answers(
    questions: Sequence[Asked],
    service: Service,
    plan: RequestPlan,
    out: str | os.PathLike[str],
    *,
    concurrency: int = 4,
    progress: Progress | None = None,
) -> int:
    """Ask a service all questions, and append each finished answer to a file of JSON lines.

    A run that was stopped or killed goes on where it was: questions with an answer in the file, by
    the same plan, are not asked again.

    Parameters
    ----------
    questions : sequence of Asked
        From :func:`~calibrant.llm.answers.plans.read_asked`.
    service : callable
        From :func:`~calibrant.llm.models.services.service_for`, or a function of messages and
        fields that returns the body of a chat completion. It is called in several threads.
    plan : RequestPlan
    out : path
        ``.jsonl``.
    concurrency : int
        Questions that are asked at a time.
    progress : callable, optional
        Called with (questions finished, all).

    Returns
    -------
    int
        Number of new answers.

    Raises
    ------
    ValueError
        If questions are left without an answer, or the service refuses all of them; finished
        answers are in the file.

    Examples
    --------
    >>> import tempfile
    >>> def service(messages, fields):
    ...     return {"choices": [{"message": {"content": "Lima"}}]}
    >>> asked = [Asked([{"role": "user", "content": "Capital of Peru?"}], ("Lima",))]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     plan, out = RequestPlan("mine", logprobs=False), f"{folder}/answers.jsonl"
    ...     collect_answers(asked, service, plan, out), collect_answers(asked, service, plan, out)
    (1, 0)
    """
    target = Path(out)
    if target.suffix != ".jsonl":
        raise ValueError(f"{target} must be .jsonl, got the suffix {target.suffix!r}")
    with _alone(target), _threads(concurrency) as pool:
        left = _left(questions, plan, target)
        done = len(questions) - len(left)
        _mend(target)

        tasks = {pool.submit(answer_row, plan, asked, service): asked for asked in left}
        with target.open("a", encoding="utf-8") as stream:
            results = _Results(stream)
            for number, task in enumerate(as_completed(tasks), start=1):
                results.add(task)
                if progress is not None:
                    progress(done + number, len(questions))
    if results.failures:
        raise ValueError(results.told(f"{len(results.failures):,} of {len(left):,} failed"))
    return len(left)


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Hold the lock of the file."""
    try:
        with locked(target, wait=False):
            yield
    except BlockingIOError as error:
        raise ValueError(f"another process writes {target}: wait for it") from error


@contextmanager
def _threads(concurrency: int) -> Iterator[ThreadPoolExecutor]:
    """Yield a pool that ends without what is left if an error occurs."""
    pool = ThreadPoolExecutor(concurrency)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


@dataclass
class _Results:
    """Writes answers as they come, and counts questions that have none."""

    stream: IO[str]
    failures: list[str] = field(default_factory=list)
    in_a_row: int = 0

    def add(self, task: Future[Row]) -> None:
        """Write an answer; raise if there is no use in going on."""
        try:
            row = task.result()
        except (ServiceError, BadDocument) as error:
            self.failures.append(without_key(printable(str(error))))
            self.in_a_row += 1
            if getattr(error, "is_final", False) or self.in_a_row == MOST_FAILURES:
                raise ValueError(self.told("stopped")) from None
            return
        self.in_a_row = 0
        self.stream.write(json.dumps(row) + "\n")
        self.stream.flush()

    def told(self, what: str) -> str:
        """Return the error about questions without an answer."""
        return (
            f"{what}: {self.failures[-1]}; {len(self.failures):,} questions have no answer, those "
            f"finished are in {self.stream.name}: the same command asks the others"
        )


def _left(questions: Sequence[Asked], plan: RequestPlan, target: Path) -> list[Asked]:
    """Return the questions without an answer; raise if the file has those of another plan."""
    finished = set()
    for place, row in placed_rows(target) if target.exists() else ():
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


def _mend(target: Path) -> None:
    """Remove the end of a line that a killed process did not finish."""
    if target.exists():
        with target.open("rb+") as stream:
            content = stream.read()
            stream.truncate(content.rfind(b"\n") + 1)
