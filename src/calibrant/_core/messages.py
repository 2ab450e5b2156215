"""Texts of error messages, and the error where a library is not installed."""

from __future__ import annotations

import difflib
import errno
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

# C0 and C1 but for tabs and line breaks, which start escape sequences or overwrite a line; what
# reverses or breaks text, so that a name could show as another; and lone surrogates, as in file
# names that are not UTF-8, which no stream takes.
_CONTROL = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


_EXPECTED = (ValueError, TypeError, OSError, ImportError, MemoryError)
_NO_MEMORY = "DefaultCPUAllocator: can't allocate memory"  # a RuntimeError of torch
_NO_ROOM = (errno.ENOSPC, errno.EFBIG, getattr(errno, "EDQUOT", errno.ENOSPC))


def failure_text(problem: BaseException) -> str | None:
    """Return what to tell about a failure; None for a bug, whose traceback is of use.

    >>> failure_text(ValueError("bins must be positive, got 0"))
    'bins must be positive, got 0'
    """
    if isinstance(problem, _EXPECTED):
        return str(problem) or type(problem).__name__
    if _NO_MEMORY in str(problem):
        return "not enough memory: use fewer classes or examples, or a larger machine"
    cause: BaseException | None = problem
    while cause is not None:  # libraries raise errors of theirs for a full disk
        from_rust = re.search(r"\(os error (\d+)\)", str(cause))
        number = int(from_rust[1]) if from_rust else getattr(cause, "errno", None)
        if number in _NO_ROOM:
            return f"{os.strerror(number)}: make room on the disk, and run the same again"
        cause = cause.__cause__ or cause.__context__
    return None


def printable(text: str) -> str:
    r"""Return text of any origin for a terminal: control characters become ``\x1b`` and the like.

    >>> print(printable("red \x1b[31m text"))
    red \x1b[31m text
    """
    return _CONTROL.sub(lambda match: repr(match[0])[1:-1], text)


def printable_name(text: str) -> str:
    r"""Return a name for a line or a cell of a table: line breaks and tabs are escaped too.

    >>> print(printable_name("two\nlines"))
    two\nlines
    """
    return printable(text).replace("\n", "\\n").replace("\t", "\\t")


def comma_separated(names: Iterable[str]) -> str:
    """Join names for an error message; "nothing" if there are none."""
    return ", ".join(map(printable_name, names)) or "nothing"


def unknown_name(
    kind: str, name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None
) -> ValueError:
    """Return the error for a name that does not exist, with the nearest one that does.

    >>> unknown_name("method", "tss", ["none", "ts"], {"temperature": "ts"})
    ValueError("unknown method 'tss': did you mean ts? choose from none, ts")
    """
    names = list(known)
    hint = did_you_mean(name, names, aliases)
    return ValueError(f"unknown {kind} {name!r}: {hint}choose from {comma_separated(names)}")


def did_you_mean(name: str, known: Iterable[str], aliases: Mapping[str, str] | None = None) -> str:
    """Return a question for the nearest name, with a blank after it; nothing if none is near.

    >>> did_you_mean("evalute", ["fit", "evaluate"])
    'did you mean evaluate? '
    """
    names = {name: name for name in known} | dict(aliases or {})
    plain = {plain_name(name): meant for name, meant in names.items()}
    near = difflib.get_close_matches(plain_name(name), plain, n=1)
    return f"did you mean {plain[near[0]]}? " if near else ""


def no_attribute(module: str, name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for a name that a module does not have, with the nearest one."""
    hint = did_you_mean(name, known).rstrip()
    return AttributeError(f"module {module!r} has no attribute {name!r}{hint and f': {hint}'}")


def plain_name(name: object) -> str:
    """Return a name as typed in lower case, with underscores for dashes and blanks."""
    return str(name).strip().lower().replace("-", "_").replace(" ", "_")


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


def about(count: int) -> str:
    """Return a number of examples, rounded up to two digits.

    >>> about(1234), about(80)
    ('1,300', '80')
    """
    unit = 10 ** max(len(str(max(count, 1))) - 2, 0)
    return f"{-(-count // unit) * unit:,}"
