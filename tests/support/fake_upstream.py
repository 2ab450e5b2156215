"""A server in the manner of OpenAI's, whose answers the last message chooses.

What a test wants to see of a request is kept in ``Upstream.seen``.
"""

import asyncio
import json
import math
from typing import Any

from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

MODEL = "fake-model"
SURE, UNSURE = [-0.01, -0.02], [-0.9, -1.4]
WORDS = ["Li", "ma"]


class Upstream:
    """The application, and the requests that it has seen."""

    def __init__(self):
        self.seen = []
        self.open_streams = 0

    def app(self, port=0):
        post: Any = {"methods": ["POST"]}
        return Starlette(
            routes=[
                Route("/v1/chat/completions", self.chat, **post),
                Route("/v1/completions", self.complete, **post),
                Route("/v1/responses", self.respond, **post),
                Route("/v1/models", self.models),
                Route("/v1/models/{name}", self.models),
            ]
        )

    async def models(self, request):
        self.seen.append((dict(request.headers), None))
        one = {"id": MODEL, "object": "model", "created": 1, "owned_by": "tests"}
        if "name" in request.path_params:
            return JSONResponse(one)
        return JSONResponse({"object": "list", "data": [one]})

    async def chat(self, request):
        content = await request.json()
        self.seen.append((dict(request.headers), content))
        said = content["messages"][-1]["content"]
        if (failure := await self._failure(said)) is not None:
            return failure
        n = content.get("n") or 1
        wanted = bool(content.get("logprobs"))
        choices = [_chat_choice(said, i, wanted) for i in range(n)]
        if content.get("stream"):
            return StreamingResponse(
                self._events(said, choices, content), media_type="text/event-stream"
            )
        usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
        body = {**_about("chat.completion"), "choices": choices, "usage": usage}
        return Response(json.dumps(body), media_type="application/json")

    async def complete(self, request):
        content = await request.json()
        self.seen.append((dict(request.headers), content))
        logprobs = None
        if content.get("logprobs") is not None:
            values = SURE if content["prompt"] == "sure" else UNSURE
            logprobs = {"tokens": WORDS, "token_logprobs": values, "top_logprobs": None}
        choice = {"index": 0, "text": "Lima", "logprobs": logprobs, "finish_reason": "stop"}
        if content.get("stream"):

            async def events():
                yield _event({**_about("text_completion"), "choices": [choice]})
                yield b"data: [DONE]\n\n"

            return StreamingResponse(events(), media_type="text/event-stream")
        return JSONResponse({**_about("text_completion"), "choices": [choice]})

    async def respond(self, request):
        content = await request.json()
        self.seen.append((dict(request.headers), content))
        said = content["input"]
        wanted = "message.output_text.logprobs" in (content.get("include") or ())
        tokens = [
            {"token": word, "logprob": value, "bytes": list(word.encode()), "top_logprobs": []}
            for word, value in zip(WORDS, SURE if said != "unsure" else UNSURE, strict=True)
        ]
        part: dict[str, object] = {"type": "output_text", "text": "".join(WORDS), "annotations": []}
        part["logprobs"] = tokens if wanted else []
        message = {"type": "message", "id": "m-1", "role": "assistant", "status": "completed"}
        body = {
            **{"id": "r-2", "object": "response", "created_at": 1, "model": MODEL},
            **{"output": [{**message, "content": [part]}], "parallel_tool_calls": False},
            **{"tools": [], "tool_choice": "auto", "status": "completed"},
        }
        if said == "length":
            body |= {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
        if not content.get("stream"):
            return JSONResponse(body)
        place = {"item_id": "m-1", "output_index": 0, "content_index": 0}

        async def events():
            for i, token in enumerate(tokens):
                shown = [{"token": token["token"], "logprob": token["logprob"], "top_logprobs": []}]
                delta = {"type": "response.output_text.delta", "delta": token["token"], **place}
                yield _event({**delta, "sequence_number": i, "logprobs": shown if wanted else []})
            kind = f"response.{body['status']}"
            yield _event({"type": kind, "sequence_number": 2, "response": body})

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _failure(self, said):
        if said.startswith("status "):
            number = int(said.split()[1])
            body = {"error": {"message": "it went wrong", "type": "t", "param": None, "code": "c"}}
            return JSONResponse(body, number, {"retry-after": "7", "x-request-id": "r1"})
        if said == "slow":
            await asyncio.sleep(5)
        if said == "no json":
            return Response("<html>", media_type="text/html")
        return None

    async def _events(self, said, choices, content):
        self.open_streams += 1
        try:
            yield b": keep-alive\n\n"
            for choice in choices:
                for chunk in _chunks(choice):
                    if said == "sure, no end" and chunk["finish_reason"]:
                        return
                    yield _event({**_about("chat.completion.chunk"), "choices": [chunk]})
                    if said == "cut":
                        await asyncio.sleep(0.3)  # the chunk arrives
                        raise RuntimeError("the upstream breaks")
                    if said == "no end":
                        return
                    while said == "endless":
                        await asyncio.sleep(0.1)
                        yield b": keep-alive\n\n"
            if (content.get("stream_options") or {}).get("include_usage"):
                usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
                yield _event({**_about("chat.completion.chunk"), "choices": [], "usage": usage})
            yield b"data: [DO"
            yield b"NE]\n\n"
        finally:
            self.open_streams -= 1


def _about(kind):
    return {"id": "r-1", "object": kind, "created": 1, "model": MODEL}


def _chat_choice(said, index, wanted):
    values = SURE if said.startswith("sure") or (said == "mixed" and index == 0) else UNSURE
    message: Any = {"role": "assistant", "content": "".join(WORDS)}
    if said == "nan":
        values = [math.nan, -0.1]
    if said == "lies":
        values = [3.0, -0.1]
    if said == "tool":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        message |= {"content": None, "tool_calls": [call]}
    if said == "refusal":
        message |= {"content": None, "refusal": "No."}
    if said == "empty":
        message["content"] = ""
    tokens: Any = [
        {"token": word, "logprob": value, "bytes": None, "top_logprobs": []}
        for word, value in zip(WORDS, values, strict=True)
    ]
    shown = {"content": tokens} if wanted and said != "without" else None
    if said == "partial" and shown:  # the rest has no log-probabilities
        shown = {"content": tokens[:1]}
    if said == "garbled" and shown:
        shown = {"content": [tokens[0], {**tokens[1], "token": "mb"}]}
    if said == "huge" and shown:
        shown = {"content": [{**tokens[0], "logprob": 10**400}, tokens[1]]}
    finish = {"tool": "tool_calls", "length": "length", "filtered": "content_filter"}.get(
        said, "stop"
    )
    return {"index": index, "message": message, "logprobs": shown, "finish_reason": finish}


def _chunks(choice):
    """Chunks of a choice: the role, each token, and the end."""
    index, message = choice["index"], choice["message"]
    yield {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
    tokens = (choice["logprobs"] or {}).get("content")
    for i, word in enumerate(WORDS if message["content"] else []):
        logprobs = None if tokens is None else {"content": tokens[i : i + 1]}
        delta = {"content": word}
        yield {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
    if "tool_calls" in message:
        calls = [{"index": 0, **call} for call in message["tool_calls"]]
        yield {"index": index, "delta": {"tool_calls": calls}, "finish_reason": None}
    if "refusal" in message:
        yield {"index": index, "delta": {"refusal": message["refusal"]}, "finish_reason": None}
    yield {"index": index, "delta": {}, "finish_reason": choice["finish_reason"]}


def _event(content):
    return f"data: {json.dumps(content)}\n\n".encode()
