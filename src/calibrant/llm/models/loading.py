"""Load language models and their tokenizers, from folders, the hub of Hugging Face and GGUF."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from calibrant._core.checks import warn
from calibrant._core.torch_models import (
    check_complete,
    check_model,
    check_transformers,
    device_and_dtype,
)

GGUF_TEXT, GGUF_ARRAY = 8, 9
GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the values of each kind in a GGUF file, besides texts and arrays."""

GGUF_ALIGNMENT = 32
"""Bytes of which the place of the values of tensors in a GGUF file is a multiple."""


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, and return both.

    A checkpoint that lacks some of the weights is refused. The tokenizer of a ``.gguf`` file adds
    the beginning-of-text token if the file says so.

    Parameters
    ----------
    path : path
        A Hugging Face folder, a name on the hub, or a ``.gguf`` file.
    device : str, optional
        A torch device; with ``cuda`` each process of ``torchrun`` gets its own GPU.
    dtype : str
        A torch dtype; ``auto`` keeps that of the file.
    trust_remote_code : bool
        Run Python code that comes with the model; if False, a model that needs it is refused.
    """
    device_and_dtype(device=device, dtype=dtype)  # fails before the slow load
    tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
    options: Any = {"device": device, "dtype": dtype, "trust_remote_code": trust_remote_code}
    return load_weights(path, **options), tokenizer


def load_tokenizer(path: str | os.PathLike[str], *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a model as :func:`load_model` does."""
    source = _Source.of(path)
    from transformers import AutoTokenizer

    with _naming_the_model(path):
        tokenizer = AutoTokenizer.from_pretrained(
            source.path, trust_remote_code=trust_remote_code, **source.options
        )
    if source.options:
        add_start(tokenizer, Path(path))
    return tokenizer


def load_weights(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> Any:
    """Load a model without its tokenizer as :func:`load_model` does."""
    target, precision = device_and_dtype(device=device, dtype=dtype)
    source = _Source.of(path)
    from transformers import AutoModelForCausalLM

    model: Any
    with _naming_the_model(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            source.path,
            dtype=precision,
            trust_remote_code=trust_remote_code,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with the missing ones
            **source.options,
        )
    check_complete(report, path, type(model).__name__)
    if source.options:
        model.config._name_or_path = Path(path).name
    return (model if target is None else model.to(target)).eval()


class _Source(NamedTuple):
    """A model as ``from_pretrained`` takes it: a path, and the options of a ``.gguf`` file."""

    path: str | os.PathLike[str]
    options: dict[str, Any]

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> _Source:
        """Check that there is a model, as far as that shows without loading it."""
        check_transformers("language models")
        check_model(path)
        file = Path(path)
        if file.suffix == ".gguf":
            _check_whole(file)
            return cls(file.parent, {"gguf_file": file.name})
        return cls(path, {})


# -------------------------------------------------------------------------------------------- GGUF


def add_start(tokenizer: Any, file: Path) -> None:
    """Let a tokenizer add the beginning-of-text token, to texts and chats, if its file says so.

    transformers before 5.23 ignores what the file says, and models such as Gemma make nonsense of
    texts without that token. Runtimes of GGUF also put it before chats whose template does not.
    """
    if not _adds_start(tokenizer):
        if not _wants_start(file):
            return
        tokenizer.add_bos_token = True
        if not _adds_start(tokenizer):
            warn(
                f"{file} asks for a beginning-of-text token, which {type(tokenizer).__name__} does "
                "not add: put it before each text, or update transformers"
            )
            return
    if tokenizer.chat_template and not _renders_start(tokenizer):
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template


def _adds_start(tokenizer: Any) -> bool:
    start = tokenizer.bos_token_id
    return start is not None and tokenizer("a")["input_ids"][:1] == [start]


def _renders_start(tokenizer: Any) -> bool:
    """Return True if chats begin with the token, or if the template cannot render a plain one."""
    from jinja2 import TemplateError

    try:
        text = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    except TemplateError:
        return True
    return bool(text.startswith(tokenizer.bos_token))


def _wants_start(file: Path) -> bool:
    """Return what a file says about the token; sentencepiece models that say nothing have it."""
    # the package gguf would decode every token of the vocabulary too, which takes seconds
    with file.open("rb") as stream:
        stream.seek(16)  # after the magic, the version and the number of tensors
        settings = dict(_settings(stream))
    if "tokenizer.ggml.add_bos_token" in settings:
        return settings["tokenizer.ggml.add_bos_token"] != b"\0"
    return settings.get("tokenizer.ggml.model") == b"llama"


def _check_whole(file: Path) -> None:
    """Raise if a file ends before the last of its tensors begins, as one does that was cut off."""
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file} is no GGUF file: it does not begin with GGUF")
        stream.seek(8)
        tensors = _number(stream, 8)
        for _ in _settings(stream):
            pass
        last = max((_offset(stream) for _ in range(tensors)), default=-GGUF_ALIGNMENT)
        values = -(-stream.tell() // GGUF_ALIGNMENT) * GGUF_ALIGNMENT
        if values + last >= file.stat().st_size:
            raise _cut_off(stream)


def _cut_off(stream: BinaryIO) -> ValueError:
    return ValueError(f"{stream.name} is damaged or cut off: download it again")


def _offset(stream: BinaryIO) -> int:
    """Read the description of a tensor, and return where its values begin."""
    stream.seek(_number(stream, 8), os.SEEK_CUR)  # its name
    stream.seek(8 * _number(stream, 4) + 4, os.SEEK_CUR)  # its shape and type
    return _number(stream, 8)


def _settings(stream: BinaryIO) -> Iterator[tuple[str, bytes]]:
    """Yield the single values at the beginning of a GGUF file, as their bytes."""
    for _ in range(_number(stream, 8)):
        name, kind = stream.read(_number(stream, 8)).decode(), _number(stream, 4)
        if kind == GGUF_ARRAY:
            _skip(stream, _number(stream, 4), _number(stream, 8))
        else:
            yield (
                name,
                stream.read(_number(stream, 8) if kind == GGUF_TEXT else _size(stream, kind)),
            )


def _skip(stream: BinaryIO, kind: int, count: int) -> None:
    """Skip the values of an array."""
    if kind in GGUF_SIZES:
        stream.seek(count * GGUF_SIZES[kind], os.SEEK_CUR)
        return
    for _ in range(count):
        if kind == GGUF_TEXT:
            stream.seek(_number(stream, 8), os.SEEK_CUR)
        else:
            _skip(stream, _number(stream, 4), _number(stream, 8))


def _size(stream: BinaryIO, kind: int) -> int:
    if kind not in GGUF_SIZES:
        raise _cut_off(stream)
    return GGUF_SIZES[kind]


def _number(stream: BinaryIO, size: int) -> int:
    data = stream.read(size)
    if len(data) < size:
        raise _cut_off(stream)
    return int.from_bytes(data, "little")


@contextmanager
def _naming_the_model(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let errors of transformers name the model, since many tell only what went wrong inside."""
    try:
        yield
    except (OSError, ValueError) as error:
        if str(path) in str(error):
            raise
        kind = OSError if isinstance(error, OSError) else ValueError
        raise kind(f"the model {path} cannot be loaded: {error}") from error
