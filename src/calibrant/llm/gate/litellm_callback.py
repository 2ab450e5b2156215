"""Verdicts of a gate in the proxy of LiteLLM, as one of its callbacks.

LiteLLM serves, streams, authenticates and retries; the callback asks for log-probabilities and adds
the verdict. It needs ``pip install 'litellm[proxy]'``.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from typing import Any

from litellm.integrations.custom_logger import CustomLogger

from calibrant.artifacts import load
from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.serving import Call, Form, LiveGate, _async_chunks_with_verdict

_FORMS: dict[str, Form] = {
    **dict.fromkeys(("completion", "acompletion"), "chat"),
    **dict.fromkeys(("text_completion", "atext_completion"), "completions"),
    **dict.fromkeys(("responses", "aresponses"), "responses"),
}
"""Forms of requests by LiteLLM's types of calls."""
_MAX_OPEN = 10_000
"""Requests that may be open at a time."""


class GateCallback(CustomLogger):
    """A callback for ``config.yaml`` of LiteLLM that adds the verdict of a gate to answers.

    A file ``my_gate.py`` beside the configuration has

    ::

        from calibrant.llm.gate.litellm_callback import GateCallback

        gate = GateCallback("/path/to/gate", state="/path/to/watch.json")

    and the configuration ``litellm_settings: {callbacks: my_gate.gate}``. Chats, completions and
    responses then have a field ``calibrant`` as by :func:`~calibrant.llm.gated`, and, unless they
    are streamed, a header ``x-calibrant-verdict``.
    """

    def __init__(
        self, gate: str | os.PathLike[str] | Gate, *, state: str | os.PathLike[str] | None = None
    ) -> None:
        super().__init__()
        self.live = LiveGate(gate if isinstance(gate, Gate) else load(gate, Gate), state)
        self._calls: dict[str, Call] = {}  # by LiteLLM's identifier of the request

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        """Ask for log-probabilities."""
        form = _FORMS.get(str(getattr(call_type, "value", call_type)))
        if form is None:
            return data
        headers = (data.get("proxy_server_request") or {}).get("headers") or {}
        call = Call(self.live, data, form, headers)
        data.update(call.sent)
        self._calls[str(data.get("litellm_call_id"))] = call
        while len(self._calls) > _MAX_OPEN:  # of requests that failed or whose clients have gone
            del self._calls[next(iter(self._calls))]
        return data

    async def async_post_call_success_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any
    ) -> Any:
        """Add the verdict to a whole response."""
        call = self._calls.pop(str(data.get("litellm_call_id")), None)
        return response if call is None else call.finish(response)

    async def async_post_call_streaming_iterator_hook(
        self, user_api_key_dict: Any, response: Any, request_data: dict[str, Any]
    ) -> AsyncIterator[Any]:
        """Add the verdict to a chunk of a stream."""
        call = self._calls.pop(str(request_data.get("litellm_call_id")), None)
        if call is None:
            async for chunk in response:
                yield chunk
            return
        async for chunk in _async_chunks_with_verdict(_as_sent(response), call):
            if hasattr(chunk, "calibrant") and hasattr(chunk, "provider_specific_fields"):
                # chunks without such fields are written by a shortcut that knows no others
                chunk.provider_specific_fields = chunk.provider_specific_fields or {}
            yield chunk

    async def async_post_call_response_headers_hook(
        self, data: dict[str, Any], user_api_key_dict: Any, response: Any, **_: Any
    ) -> dict[str, str] | None:
        """Repeat the verdict in a header."""
        verdict = getattr(response, "calibrant", None)
        return {"x-calibrant-verdict": verdict["verdict"]} if isinstance(verdict, dict) else None


async def _as_sent(response: Any) -> AsyncIterator[Any]:
    """Yield the chunks of a stream, without an end that LiteLLM writes and the service did not.

    The chunks that LiteLLM keeps of chats for its logs have the end only if the service sent it.
    """
    async for chunk in response:
        choices = getattr(chunk, "choices", None) or ()
        if any(one.finish_reason for one in choices) and hasattr(response, "chunks"):
            kept = (one for chunk in response.chunks for one in chunk.choices)
            if not any(one.finish_reason for one in kept):
                for one in choices:
                    one.finish_reason = None
        yield chunk
