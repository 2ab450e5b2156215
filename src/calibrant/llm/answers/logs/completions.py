"""Chat completions and responses of OpenAI's interface, which many services share.

A line of a log is the body of a response, or has it inside: as ``response.body`` in the output of
OpenAI's batches, or as ``response`` beside ``request`` in logs of one's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from calibrant.llm.answers.logprobs import token_material
from calibrant.llm.answers.rows import WRONG_FORM, Row, json_digest
from calibrant.llm.heads.documents import BadDocument

_KEPT = ("correct", "kind", "truth", "stated", "signals", "samples", "prompt", "head", "sampling")
"""Values of a line that an answer takes over as they are."""
_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "logit_bias", "stop"),
    *("response_format", "reasoning_effort", "text", "reasoning"),  # the last two of responses
)
"""Fields of a request that change how tokens are drawn, or where the answer ends.

``max_tokens`` is none of them: an answer that it cuts is handed to a person in any case."""


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
    answer = _completion(body, place)
    kept = {name: line[name] for name in _KEPT if name in line}
    if outcome is not None and outcome in line:
        kept["correct"] = line[outcome]
    names = line.get("custom_id"), line.get("id"), body.get("id")
    named = next((str(name) for name in names if name not in (None, "")), "")
    about = _request_source(request) if request else {"prompt": "chat", "head": "none"}
    question = line.get("question") or _question_of(_asked_in(request) or line.get("messages"))
    return {"id": named, "question": str(question), **about, **answer, **kept}


def _asked_in(request: Mapping[str, Any]) -> Any:
    """Return the messages or the text that a request sends."""
    return request.get("messages") or request.get("input") or request.get("prompt")


def _request_source(request: Mapping[str, Any]) -> Row:
    """Return what a request tells of the source of the confidence in its answer."""
    asked = _asked_in(request)
    said = [one for one in asked if isinstance(one, Mapping)] if isinstance(asked, list) else []
    system = [_text_of(m.get("content")) for m in said if m.get("role") in ("system", "developer")]
    system += [str(request["instructions"])] if request.get("instructions") else []
    drawn = {name: request[name] for name in _SAMPLING if request.get(name) is not None}
    sampling = ", ".join(f"{name}={value}" for name, value in drawn.items())
    return {
        "prompt": "plain" if "prompt" in request else _chat_form("\n".join(system)),
        "head": "none",
        "sampling": sampling or "default",
    }


def _chat_form(system: str) -> str:
    """Return the form of a chat, with the digest of its system message if it has one."""
    return f"chat, system {json_digest(system, 8)}" if system else "chat"


def _completion(body: Any, place: str, number: int = 0) -> Row:
    """Return answer, model and token probabilities of a completion or response.

    ``number`` is that of the choice. Tool calls, refusals, filtered answers and bodies of another
    form raise BadDocument.
    """
    try:
        return _content(body, place, number)
    except BadDocument:
        raise
    except WRONG_FORM as error:
        told = f"{type(error).__name__}: {error}"
        raise BadDocument(place, f"has another form than OpenAI's ({told:.120})") from error


def _content(body: Any, place: str, number: int) -> Row:
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
    choice = choices[number]
    message, reason = choice.get("message") or {}, choice.get("finish_reason")
    if message.get("tool_calls") or message.get("function_call"):
        raise BadDocument(place, "is a tool call, not an answer")
    if message.get("refusal"):
        raise BadDocument(place, f"is a refusal: {message['refusal']!r:.80}")
    if reason == "content_filter":
        raise BadDocument(place, "lacks a part that a content filter removed")
    text = message.get("content") if "text" not in choice else choice["text"]
    if text is None:
        raise BadDocument(place, f"has no text: {reason or message!r:.80}")
    row: Row = {"answer": _text_of(text), **model}
    if reason == "length":
        row["truncated"] = True
    return {**row, **token_material(choice.get("logprobs"), place)}


def _output(body: Mapping[str, Any], place: str) -> Row:
    """Texts and tokens of the messages of a response, after any reasoning."""
    kinds = [one.get("type") for one in body["output"]]
    if any(str(kind).endswith("_call") for kind in kinds):
        raise BadDocument(place, "is a tool call, not an answer")
    messages = [one for one in body["output"] if one.get("type") == "message"]
    parts = [part for one in messages for part in one.get("content") or ()]
    refusals = [part.get("refusal") for part in parts if part.get("type") == "refusal"]
    if refusals:
        raise BadDocument(place, f"is a refusal: {refusals[0]!r:.80}")
    texts = [part for part in parts if part.get("type") == "output_text"]
    if not texts:
        raise BadDocument(place, f"has no text: its status is {body.get('status')!r:.40}")
    tokens = [token for part in texts for token in part.get("logprobs") or ()]
    row: Row = {"answer": "".join(part["text"] for part in texts)}
    if body.get("status") == "incomplete":
        row["truncated"] = True
    return {**row, **token_material(tokens, place)}


def _text_of(content: Any) -> str:
    """Return the text of a message, whose content is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(p.get("text") or "") for p in parts if isinstance(p, Mapping))


def _question_of(messages: Any) -> str:
    """Return the last thing that a user said in a chat, or the text itself."""
    if not isinstance(messages, list):
        return _text_of(messages)
    said = [one for one in messages if isinstance(one, Mapping) and one.get("role") == "user"]
    return _text_of(said[-1].get("content")) if said else ""
