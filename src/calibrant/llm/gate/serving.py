"""A gate in use: requests that ask for log-probabilities, and verdicts on what comes back.

The client of OpenAI (``openai_client``) and LiteLLM (``litellm_callback``) share this. Their
objects are read by ``model_dump``, and get the verdict as an attribute ``calibrant``.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any, Literal

from calibrant._core.messages import comma_separated
from calibrant.llm.answers.confidence import AGGREGATORS
from calibrant.llm.answers.logs.completions import (
    _asked_in,
    _completion,
    _question_of,
    _request_source,
)
from calibrant.llm.answers.rows import WRONG_FORM, Row
from calibrant.llm.answers.signal_calibrator import SignalCalibrator
from calibrant.llm.gate.gate import DECISIONS, Gate, Verdict
from calibrant.llm.gate.watch import GateWatch, WatchFile
from calibrant.llm.heads.documents import BadDocument

Form = Literal["chat", "completions", "responses"]
"""Kinds of requests: ``chat.completions``, ``completions`` and ``responses`` of OpenAI."""

LOG = logging.getLogger(__name__)
KIND_HEADER = "x-calibrant-kind"
"""Header of a request with the kind of its question."""
_PERIOD = 5.0
"""Seconds between two updates of the state."""
_OUTPUT_LOGPROBS = "message.output_text.logprobs"


class LiveGate:
    """A gate in use, for confidences that can be computed from log-probabilities of tokens.

    ``state`` is the file of the drift watch. A thread adds the verdicts every few seconds, and
    reads whether the guarantee was withdrawn meanwhile, by grades that another process added. A
    withdrawn guarantee stays so while the process runs.
    """

    def __init__(self, gate: Gate, state: str | os.PathLike[str] | None = None) -> None:
        fitted = gate.calibrator
        if isinstance(fitted, SignalCalibrator):
            needed = [name for name in fitted.names_ if name not in AGGREGATORS]
        else:
            known = fitted.source_
            needed = [] if known.aggregate else [known.confidence or "other confidences"]
        if needed:
            raise ValueError(
                f"this gate is for {comma_separated(needed)}, which no service returns: fit a gate "
                "on token_probs, or use calibrant llm gate check"
            )
        self.gate = gate
        self.file = None if state is None else WatchFile(state, gate)
        self.withdrawn = "" if self.file is None else self.file.withdrawn()
        self._notes: list[tuple[str, float]] = []
        self._lock, self._closed = threading.Lock(), threading.Event()

        def keep_state() -> None:
            while not self._closed.wait(_PERIOD):
                self.flush()

        if self.file is not None:
            threading.Thread(target=keep_state, daemon=True).start()
            atexit.register(self.close)

    def note(self, key: str, confidence: float) -> None:
        """Remember a judged answer for the drift watch."""
        if self.file is not None:
            with self._lock:
                self._notes.append((key, confidence))

    def flush(self) -> None:
        """Add the notes to the file, and read whether the guarantee still holds."""
        if self.file is None:
            return
        with self._lock:
            notes, self._notes = self._notes, []

        def add(watch: GateWatch) -> str:
            watch.note([confidence for _, confidence in notes], [key for key, _ in notes])
            return watch.withdrawn

        try:
            self.withdrawn = self.withdrawn or self.file.update(add)
        except (OSError, ValueError) as error:  # a full disk must not lose the notes
            LOG.error("%s", error)
            self.withdrawn = self.withdrawn or self.file.withdrawn()
            with self._lock:
                self._notes = [*notes, *self._notes]

    def close(self) -> None:
        """Add the last notes, and end the thread."""
        if not self._closed.is_set():
            self._closed.set()
            self.flush()


class Call:
    """A request, as ``sent`` with log-probabilities asked for, and the verdict on its response.

    ``verdict`` is that of the whole response, for JSON; with several choices also that on each.
    """

    def __init__(
        self, live: LiveGate, request: Mapping[str, Any], form: Form, headers: Mapping[str, str]
    ) -> None:
        kind = next((v for name, v in headers.items() if name.lower() == KIND_HEADER), "")
        self.live, self.request, self.form, self.kind = live, dict(request), form, kind
        # whether the request asks for log-probabilities, so that they are left in the response
        wanted, include = self.request.get("logprobs"), list(self.request.get("include") or ())
        if form == "responses":
            self.shows, more = _OUTPUT_LOGPROBS in include, [*include, _OUTPUT_LOGPROBS]
            self.sent = {**self.request, "include": include if self.shows else more}
        else:
            self.shows = bool(wanted) or (form == "completions" and type(wanted) is int)
            asked = {} if self.shows else {"logprobs": True if form == "chat" else 1}
            self.sent = {**self.request, **asked}
        self.verdict: dict[str, Any] | None = None
        self._body: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}
        self._last: Any = None
        self._problem = ""  # of a chunk, whose answer is then for a person

    def finish(self, response: Any) -> Any:
        """Return a whole response with its verdict."""
        body = response.model_dump(warnings=False)
        choices = body.get("choices")
        numbers = range(len(choices)) if isinstance(choices, list) else range(1)
        self._judge(body, numbers if self.form != "responses" else range(1))
        response.calibrant = self.verdict
        if not self.shows:
            _hide(response)
        return response

    def chunk(self, chunk: Any) -> Any:
        """Return a chunk of a stream; the one that ends the last answer has the verdict."""
        if self.form == "responses":
            if chunk.type in ("response.completed", "response.incomplete"):
                self.finish(chunk.response)
            elif not self.shows and getattr(chunk, "logprobs", None):
                chunk.logprobs = []
            return chunk
        try:
            self._add(chunk.model_dump(warnings=False))
        except WRONG_FORM as error:
            self._problem = f"a chunk has another form than OpenAI's ({error})"
        if not self.shows:
            _hide(chunk)
        ended = [one for one in self._choices.values() if one["finish_reason"]]
        asked = self.request.get("n")
        wanted = max(asked, 1) if isinstance(asked, int) else 1
        if self.verdict is None and len(ended) >= wanted:
            self._judge_stream(self._problem)
            chunk.calibrant = self.verdict
        self._last = chunk
        return chunk

    def rest(self) -> list[Any]:
        """Return a last chunk for a stream that broke or has no end, with the verdict."""
        if self.verdict is not None or self._last is None:
            return []
        self._judge_stream(self._problem or "the answer was cut off before its end")
        last = self._last.model_copy(deep=True)
        for choice in last.choices:
            if getattr(choice, "delta", None) is not None:
                choice.delta.content = None
            if getattr(choice, "text", None):
                choice.text = ""
        last.calibrant = self.verdict
        return [last]

    def _add(self, content: Mapping[str, Any]) -> None:
        """Add what a chunk brings to the choices of the whole response."""
        for name in ("id", "model"):
            self._body[name] = self._body.get(name) or content.get(name)
        for place, part in enumerate(content.get("choices") or ()):
            said, number = part.get("delta") or {}, part.get("index")
            whole = self._choices.setdefault(
                number if isinstance(number, int) else place,
                {"message": {"content": ""}, "logprobs": {"content": []}, "finish_reason": None},
            )
            message, shown = whole["message"], part.get("logprobs") or {}
            message["content"] += said.get("content") or part.get("text") or ""
            for name in ("tool_calls", "function_call", "refusal"):
                message[name] = message.get(name) or said.get(name)
            whole["finish_reason"] = part.get("finish_reason") or whole["finish_reason"]
            tokens = zip(shown.get("tokens") or (), shown.get("token_logprobs") or (), strict=False)
            whole["logprobs"]["content"] += shown.get("content") or [
                {"token": token, "logprob": value} for token, value in tokens
            ]

    def _judge_stream(self, problem: str) -> None:
        numbers = sorted(self._choices)
        body = {**self._body, "choices": [self._choices[number] for number in numbers]}
        self._judge(body, range(len(numbers)), problem)

    def _judge(self, body: Mapping[str, Any], numbers: range, problem: str = "") -> None:
        """Set the verdict, the most careful one of the choices, and note the first of these."""
        verdicts = [self._of_choice(body, number, problem) for number in numbers]
        if not verdicts:
            self.verdict = Verdict.unknown(problem or "the service returned no answer").to_dict()
            return
        self.verdict = max(verdicts, key=lambda one: DECISIONS.index(one.verdict)).to_dict()
        if len(verdicts) > 1:
            each = [{"index": i, **one.to_dict()} for i, one in enumerate(verdicts)]
            self.verdict["choices"] = each
        # other choices, and later turns, depend on the first
        first, live = verdicts[0], self.live
        independent = live.gate.terms.unit == "answer" or self._turn() == 1
        if first.calibrated is not None and independent:
            live.note(str(body.get("id") or ""), first.calibrated)

    def _of_choice(self, body: Mapping[str, Any], number: int, problem: str) -> Verdict:
        if self.request.get("echo"):
            problem = "the answer begins with the prompt (echo)"
        if problem:
            return Verdict.unknown(problem)
        try:
            answer = _completion(body, "it", number)
            question = _question_of(_asked_in(self.request))
            row: Row = {"question": question, "kind": self.kind, "turn": self._turn()}
            row |= {**_request_source(self.request), **answer}
        except BadDocument as error:
            return Verdict.unknown(str(error))
        except WRONG_FORM as error:
            return Verdict.unknown(f"the response has another form than OpenAI's ({error})")
        if row["answer"].strip() and "token_probs" not in row:
            return Verdict.unknown("the service returned no log-probabilities")
        return self.live.gate.check_one(row, self.live.withdrawn)

    def _turn(self) -> int:
        """Return the number of the answer in its conversation, from 1."""
        asked = _asked_in(self.request)
        said = [one for one in asked if isinstance(one, Mapping)] if isinstance(asked, list) else []
        earlier = bool(self.request.get("previous_response_id") or self.request.get("conversation"))
        answered = [one for one in said if one.get("role") == "assistant"]
        return 1 + int(earlier) + len(answered)


def _chunks_with_verdict(stream: Any, call: Call) -> Iterator[Any]:
    """Yield the chunks of a stream as they come, one of them with the verdict.

    A stream that breaks ends with the verdict "person", before its error.
    """
    try:
        for chunk in stream:
            yield call.chunk(chunk)
    except Exception:  # whatever ends a connection
        yield from call.rest()
        raise
    yield from call.rest()


async def _async_chunks_with_verdict(stream: Any, call: Call) -> AsyncIterator[Any]:
    """:func:`_chunks_with_verdict` of an asynchronous stream."""
    try:
        async for chunk in stream:
            yield call.chunk(chunk)
    except Exception:
        for last in call.rest():
            yield last
        raise
    for last in call.rest():
        yield last


def _hide(response: Any) -> None:
    """Take log-probabilities out of a response or a chunk."""
    for choice in getattr(response, "choices", None) or ():
        if getattr(choice, "logprobs", None) is not None:
            choice.logprobs = None
    for message in getattr(response, "output", None) or ():
        for part in getattr(message, "content", None) or ():
            if getattr(part, "logprobs", None):
                part.logprobs = []
