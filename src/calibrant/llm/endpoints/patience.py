"""Repeated requests: as a service asks for, or after longer and longer waits."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from calibrant.llm.endpoints.services import ServiceError

T = TypeVar("T")

FIRST, LONGEST = 0.5, 60.0
"""Seconds of the first wait, of which each is twice the one before, and of the longest."""
LONGEST_ASKED = 600.0
"""Seconds up to which a service may ask for a wait."""


class Patience:
    """Repeats requests that may succeed later; shared by all threads that ask one service.

    A service that names a time (``Retry-After``) is left alone by all threads until then.
    Otherwise the waits double from half a second to a minute, times a random number between 1/2
    and 1, so that threads do not ask at the same moment.

    Parameters
    ----------
    max_retries : int
        How often one request is repeated.
    seed : int
        Of the random numbers.
    """

    def __init__(self, max_retries: int = 5, *, seed: int = 0) -> None:
        self.max_retries = max_retries
        self.stopped = threading.Event()
        self._random = random.Random(seed)
        self._not_before = 0.0

    def __call__(self, request: Callable[[], T]) -> T:
        """Return what a request returns, or raise its last error."""
        for attempt in range(self.max_retries + 1):
            self._sleep(self._not_before - time.monotonic())
            try:
                return request()
            except ServiceError as error:
                if not error.may_pass or attempt == self.max_retries:
                    raise
                self._sleep(self._wait(error, attempt))
        raise AssertionError("the last attempt returns or raises")

    def _wait(self, error: ServiceError, attempt: int) -> float:
        if error.retry_after is not None:
            wait = min(error.retry_after, LONGEST_ASKED)
            self._not_before = max(self._not_before, time.monotonic() + wait)
            return 0.0
        return min(LONGEST, FIRST * 2.0**attempt) * self._random.uniform(0.5, 1)

    def _sleep(self, seconds: float) -> None:
        """Wait, or raise if everything is to end."""
        if self.stopped.wait(max(seconds, 0.0)):
            raise ServiceError("stopped", status=0)
