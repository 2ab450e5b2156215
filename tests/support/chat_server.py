"""A server with the interface of OpenAI that lies as it is told to, on a port of this machine."""

import asyncio
import json
import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from tests.support.local_server import local_server  # needs uvicorn

CHANCES = {"Lima": 0.8, ".": 0.5}
"""Probabilities of the tokens of the usual answer."""


def completion(text="Lima.", tokens=None, **more):
    """The body of a chat completion, with logprobs unless there are no tokens."""
    tokens = CHANCES if tokens is None else tokens
    content = [
        {
            "token": token,
            "logprob": math.log(chance) if chance == chance else math.nan,
            "bytes": None,
            "top_logprobs": [
                {"token": token, "logprob": math.log(0.5)},
                {"token": "other", "logprob": math.log(0.2)},
            ],
        }
        for token, chance in tokens.items()
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": text},
        "logprobs": {"content": content} if content else None,
        "finish_reason": "stop",
    }
    body = {"id": "c", "object": "chat.completion", "created": 0, "model": "tiny-2"}
    return {**body, "choices": [choice], **more}


class Chats:
    """Replies, and what was requested; a question with the name of a fault meets it."""

    def __init__(self):
        self.requests, self.keys, self.url = [], [], ""
        self.times: Counter[str] = Counter()

    def asked(self, word):
        """Number of requests whose last message has a word."""
        return sum(word in request["messages"][-1]["content"] for request in self.requests)

    async def reply(self, request):
        from starlette.responses import HTMLResponse, JSONResponse, Response

        body = await request.json()
        self.requests.append(body)
        self.keys.append(request.headers.get("authorization", ""))
        text = body["messages"][-1]["content"]
        self.times[text] += 1
        first = self.times[text] == 1
        if "busy" in text and first:
            return JSONResponse({"error": "slow down"}, 429, {"retry-after": "0.2"})
        if "broken" in text and first:
            return HTMLResponse("<html>502 Bad Gateway</html>", 502)
        if "denied" in text:
            key = self.keys[-1].removeprefix("Bearer ")
            return JSONResponse({"error": {"message": f"Incorrect API key provided: {key}"}}, 401)
        if "page" in text:
            return HTMLResponse("<html>Welcome</html>")
        if "hang" in text:
            await asyncio.sleep(1)
        if "garbled" in text:
            return Response('{"choices": [', media_type="application/json")
        return Response(json.dumps(self.content(text, body)), media_type="application/json")

    def content(self, text, body):
        """Replies with status 200."""
        if "Proposed answer" in text:
            return completion("True", {"True": 0.9})
        if "empty" in text:
            return completion(choices=[])
        if "silent" in text:
            return completion(text=None)
        if "nan" in text:
            return completion(tokens={"Lima": math.nan})
        if "hidden" in text or not body.get("logprobs"):
            stated = (
                "Lima\nConfidence: 70%" if "Confidence" in text else f"Lima {len(self.requests)}"
            )
            return completion(stated, {})
        if "Confidence" in text:
            tokens = {"Lima": 0.8, "\n": 0.6, "Confidence": 0.9, ": 70%": 0.4}
            return completion("Lima\nConfidence: 70%", tokens)
        return completion()


@contextmanager
def chat_server() -> Iterator[Chats]:
    """Run the server in a thread."""
    from starlette.applications import Starlette
    from starlette.routing import Route

    chats = Chats()
    app = Starlette(routes=[Route("/v1/chat/completions", chats.reply, methods=["POST"])])
    with local_server(lambda _: app) as port:
        chats.url = f"http://127.0.0.1:{port}/v1"
        yield chats
