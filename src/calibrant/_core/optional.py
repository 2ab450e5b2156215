"""Libraries that only some functions need, and that are imported there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def needed(what: str, packages: str) -> Iterator[None]:
    """Name the packages to install where an import inside a ``with`` block fails.

    >>> with needed("the answer needs deep thought", "'calibrant[thought]'"):
    ...     import deep_thought
    Traceback (most recent call last):
    ImportError: the answer needs deep thought (No module named 'deep_thought'): pip install ...
    """
    try:
        yield
    except ImportError as error:
        message = f"{what} ({error}): pip install {packages}"
        raise ImportError(message, name=error.name) from error
