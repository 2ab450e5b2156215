"""Services that answer chats: through the client of OpenAI, LiteLLM, or a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from calibrant._core.messages import needed, printable

if TYPE_CHECKING:
    import openai

KEY = "OPENAI_API_KEY"
"""Environment variable with the key, which is read from nowhere else."""
_LITELLM = "litellm/"
"""Beginning of the names of models that LiteLLM asks."""
FINAL = (401, 403, 404)
"""Statuses that every further request would get, too."""

Message: TypeAlias = Mapping[str, Any]
Service: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], Mapping[str, Any]]
"""Returns the body of a chat completion, for messages and fields such as ``temperature``."""
Told: TypeAlias = "Callable[[Exception], ServiceError]"


class ServiceError(ValueError):
    """A request failed, even when the client repeated it.

    ``status`` is that of the response; None if there was none in time.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


@contextmanager
def service_for(
    model: str, *, url: str | None = None, timeout: float = 60.0, max_retries: int = 5
) -> Iterator[Service]:
    """Yield the service of a model, and close its connections at the end.

    ``litellm/NAME`` is asked through LiteLLM, every other model through the client of OpenAI, with
    the key that the environment variable ``OPENAI_API_KEY`` has.

    ``url`` is that of the interface, mostly with ``/v1`` at the end; None for that of OpenAI.
    ``timeout`` are the seconds to wait for a response. The client repeats a request that may
    succeed later up to ``max_retries`` times: after lost connections and statuses such as 429 and
    500, as long as the service asks for (``Retry-After``) or after growing waits.
    """
    options: dict[str, Any] = {"base_url": url, "timeout": timeout}
    told = partial(_error, url or "the endpoint", timeout)
    if model.startswith(_LITELLM):
        yield _litellm(model.removeprefix(_LITELLM), {**options, "num_retries": max_retries}, told)
        return
    with needed("asking a service needs openai", "'calibrant[api]'"):
        import openai
    key = os.environ.get(KEY)
    if not key and url is None:
        raise ValueError(f"set the environment variable {KEY}, or pass the url of a local server")
    # local servers take any key, but the client wants one
    with openai.OpenAI(api_key=key or "none", max_retries=max_retries, **options) as client:
        yield _openai(client, model, told)


def _openai(client: openai.OpenAI, model: str, told: Told) -> Service:
    from openai import APIError

    def service(messages: Sequence[Message], fields: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            response = client.chat.completions.with_raw_response.create(
                model=model,
                messages=list(messages),
                extra_body=dict(fields),
            )
        except APIError as error:
            problem = told(error)
        except UnicodeEncodeError as error:
            problem = ServiceError(f"a message is not valid text ({error})", status=400)
        else:
            text = response.http_response.text
            try:
                body = json.loads(text)
            except (ValueError, RecursionError):
                body = None
            if isinstance(body, Mapping):
                return body
            problem = ServiceError(
                f"the endpoint did not return a JSON object but {_without_key(text)!r:.60}: check "
                "the url, which mostly ends with /v1",
                status=200,
            )
        raise problem  # not within the handler: the original error may hold the key

    return service


def _litellm(model: str, options: Mapping[str, Any], told: Told) -> Service:
    with needed("this model needs LiteLLM", "litellm"):
        import litellm

    def service(messages: Sequence[Message], fields: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            said = list(messages)
            response = litellm.completion(model=model, messages=said, **options, **fields)
        except Exception as error:  # of many services, with the status as an attribute
            problem = told(error)
        else:
            return response.model_dump()  # type: ignore[no-any-return]
        raise problem

    return service


def _error(where: str, timeout: float, error: Exception) -> ServiceError:
    status, said = getattr(error, "status_code", None), _without_key(printable(str(error)))
    if status is None:
        return ServiceError(f"{where} did not answer within {timeout:g} s ({said:.100})")
    hint = f": set {KEY}" if status == 401 else ""
    return ServiceError(
        f"the endpoint answered with status {status} ({said:.200}){hint}", status=int(status)
    )


def _without_key(text: str) -> str:
    """Return a text without the key: some services repeat it in errors."""
    key = os.environ.get(KEY)
    return text.replace(key, "***") if key else text
