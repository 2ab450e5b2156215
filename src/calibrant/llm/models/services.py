"""Services that answer chats: through the client of OpenAI, LiteLLM, or a function."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from calibrant._core.messages import needed, printable

if TYPE_CHECKING:
    import openai

KEY = "OPENAI_API_KEY"
"""Environment variable with the key, which is read from nowhere else."""
_LITELLM = "litellm/"
"""Beginning of the names of models that LiteLLM asks."""
_FINAL = (401, 403, 404)
"""Statuses that every further request would get, too."""

Message: TypeAlias = Mapping[str, Any]
Service: TypeAlias = Callable[[Sequence[Message], Mapping[str, Any]], Mapping[str, Any]]
"""Returns the body of a chat completion, for messages and fields such as ``temperature``."""


class ServiceError(ValueError):
    """A request failed, even when the client repeated it.

    ``status`` is that of the response; None if there was none in time.
    """

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_final(self) -> bool:
        """True if all other requests will fail, too."""
        return self.status in _FINAL


class Connection(NamedTuple):
    """How to reach a service.

    ``url`` is that of the interface, mostly with ``/v1`` at the end; None for that of OpenAI.
    ``timeout`` are the seconds to wait for a response. The client repeats a request that may
    succeed later up to ``max_retries`` times: after lost connections and statuses such as 429 and
    500, as long as the service asks for (``Retry-After``) or after growing waits.
    """

    url: str | None = None
    timeout: float = 60.0
    max_retries: int = 5


@contextmanager
def service_for(model: str, connection: Connection | None = None) -> Iterator[Service]:
    """Yield the service of a model, and close its connections at the end.

    ``litellm/NAME`` is asked through LiteLLM, every other model through the client of OpenAI, with
    the key that the environment variable ``OPENAI_API_KEY`` has.
    """
    reach = connection or Connection()
    if model.startswith(_LITELLM):
        yield _litellm(model.removeprefix(_LITELLM), reach)
        return
    with needed("asking a service needs openai", "'calibrant[api]'"):
        import openai
    key = os.environ.get(KEY)
    if not key and reach.url is None:
        raise ValueError(f"set the environment variable {KEY}, or pass the url of a local server")
    with openai.OpenAI(
        api_key=key or "none",  # local servers take any key, but the client wants one
        base_url=reach.url,
        timeout=reach.timeout,
        max_retries=reach.max_retries,
    ) as client:
        yield _openai(client, model, reach)


def _openai(client: openai.OpenAI, model: str, connection: Connection) -> Service:
    from openai import APIError

    def service(messages: Sequence[Message], fields: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            response = client.chat.completions.with_raw_response.create(
                model=model,
                messages=list(messages),
                extra_body=dict(fields),
            )
        except APIError as error:
            problem = _error(error, connection)
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


def _litellm(model: str, connection: Connection) -> Service:
    with needed("this model needs LiteLLM", "litellm"):
        import litellm

    def service(messages: Sequence[Message], fields: Mapping[str, Any]) -> Mapping[str, Any]:
        try:
            response = litellm.completion(
                model=model,
                messages=list(messages),
                base_url=connection.url,
                timeout=connection.timeout,
                num_retries=connection.max_retries,
                **fields,
            )
        except Exception as error:  # of many services, with the status as an attribute
            problem = _error(error, connection)
        else:
            return response.model_dump()  # type: ignore[no-any-return]
        raise problem

    return service


def _error(error: Exception, connection: Connection) -> ServiceError:
    status = getattr(error, "status_code", None)
    if status is None:
        where = connection.url or "the endpoint"
        said = _without_key(str(error))
        return ServiceError(f"{where} did not answer within {connection.timeout:g} s ({said:.100})")
    said = _without_key(printable(str(error)))
    hint = f": set {KEY}" if status == 401 else ""
    return ServiceError(
        f"the endpoint answered with status {status} ({said:.200}){hint}",
        status=int(status),
    )


def _without_key(text: str) -> str:
    """Return a text without the key: some services repeat it in errors."""
    key = os.environ.get(KEY)
    return text.replace(key, "***") if key else text
