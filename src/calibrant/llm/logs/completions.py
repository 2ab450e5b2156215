"""Chat completions and responses of OpenAI's interface, which many services share.

A line of a log is the body of a response, or has it inside: as ``response.body`` in the output of
OpenAI's batches, or as ``response`` beside ``request`` in logs of one's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from calibrant.llm.answers.graded import Row
from calibrant.llm.heads.documents import BadDocument
from calibrant.llm.logs.lines import (
    Item,
    converted,
    json_lines,
    question_of,
    text_of,
    token_material,
)

KEPT = ("correct", "kind", "stated", "signals", "samples", "prompt", "head")
"""Values of a line that an answer takes over as they are."""


def read_completions(file: Path, outcome: str | None) -> Iterator[Item]:
    """Yield the answers of a log; ``outcome`` is the key beside the response that grades it."""
    return converted(json_lines(file), lambda line, place: _answer(line, place, outcome))


def _answer(line: Mapping[str, Any], place: str, outcome: str | None) -> Row:
    response = line.get("response", line)
    if line.get("error"):
        raise BadDocument(place, f"is a request that failed: {line['error']!r:.100}")
    request = line.get("request") or line.get("body") or {}
    body = response
    if isinstance(response, Mapping) and "body" in response:
        if response.get("status_code") not in (None, 200):
            raise BadDocument(place, f"has a response with status {response['status_code']}")
        body = response["body"]
    answer = completion(body, place)
    kept = {name: line[name] for name in KEPT if name in line}
    if outcome is not None and outcome in line:
        kept["correct"] = line[outcome]
    named = line.get("custom_id") or line.get("id") or body.get("id")
    asked = request.get("messages") or request.get("input") or line.get("messages")
    return {
        "id": str(named or ""),
        "question": str(line.get("question") or question_of(asked)),
        "prompt": "chat",
        "head": "none",
        **answer,
        **kept,
    }


def completion(body: Any, place: str) -> Row:
    """Return answer, model and token probabilities of a chat completion or response.

    >>> body = {"model": "m", "choices": [{"message": {"content": "Lima"}}]}
    >>> completion(body, "the response")
    {'answer': 'Lima', 'model': 'm'}
    """
    if not isinstance(body, Mapping):
        raise BadDocument(place, f"is not a chat completion, got {body!r:.60}")
    if body.get("error"):
        raise BadDocument(place, f"is an error of the service: {body['error']!r:.100}")
    model = {"model": str(body["model"])} if body.get("model") else {}
    if "output" in body:
        return {**_output(body, place), **model}
    choices = body.get("choices")
    if not isinstance(choices, list) or not choices:
        raise BadDocument(place, f"has no choices: it has the keys {', '.join(map(str, body))}")
    message, reason = choices[0].get("message") or {}, choices[0].get("finish_reason")
    if message.get("content") is None:
        raise BadDocument(
            place, f"has no text: {message.get('refusal') or reason or message!r:.80}"
        )
    row: Row = {"answer": text_of(message["content"]), **model}
    if reason == "length":
        row["truncated"] = True
    return {**row, **token_material(choices[0].get("logprobs"), place)}


def _output(body: Mapping[str, Any], place: str) -> Row:
    """Texts and tokens of the messages of a response, after any reasoning."""
    messages = [one for one in body["output"] if one.get("type") == "message"]
    parts = [part for one in messages for part in one.get("content") or ()]
    texts = [part for part in parts if part.get("type") == "output_text"]
    if not texts:
        raise BadDocument(place, f"has no text: its status is {body.get('status')!r:.40}")
    tokens = [token for part in texts for token in part.get("logprobs") or ()]
    return {"answer": "".join(part["text"] for part in texts), **token_material(tokens, place)}
