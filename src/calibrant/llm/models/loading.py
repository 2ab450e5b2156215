"""Load language models and their tokenizers, from folders, the hub of Hugging Face and GGUF."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from calibrant._core.checks import warn
from calibrant._core.torch_models import (
    check_complete,
    check_model,
    check_transformers,
    device_and_dtype,
)

_GGUF_TEXT, _GGUF_ARRAY = 8, 9
_GGUF_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the values of each kind in a GGUF file, besides texts and arrays."""
_GGUF_ALIGNMENT = 32
"""The values of tensors in a GGUF file begin at a multiple of this many bytes."""


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> tuple[Any, Any]:
    """Load a causal language model and its tokenizer, and return both.

    ``path`` is a Hugging Face folder, a name on the hub, or a ``.gguf`` file, whose tokenizer adds
    the beginning-of-text token if the file says so. A checkpoint that lacks some of the weights is
    refused. With ``device="cuda"`` each process of ``torchrun`` gets its own GPU;
    ``dtype="auto"`` keeps the precision of the file. Python code that comes with a model runs only
    with ``trust_remote_code``.
    """
    device_and_dtype(device=device, dtype=dtype)  # fails before the slow load
    tokenizer = _load_tokenizer(path, trust_remote_code)
    return _load_weights(path, device, dtype, trust_remote_code), tokenizer


def _load_tokenizer(path: str | os.PathLike[str], trusted: bool = False) -> Any:
    place, options = _place(path)
    from transformers import AutoTokenizer

    with _naming_the_model(path):
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=trusted, **options)
    if options:
        _add_start(tokenizer, Path(path))
    return tokenizer


def _load_weights(
    path: str | os.PathLike[str],
    device: str | None = None,
    dtype: str = "auto",
    trusted: bool = False,
) -> Any:
    target, precision = device_and_dtype(device=device, dtype=dtype)
    place, options = _place(path)
    from transformers import AutoModelForCausalLM

    model: Any
    with _naming_the_model(path):
        model, report = AutoModelForCausalLM.from_pretrained(
            place,
            dtype=precision,
            trust_remote_code=trusted,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are refused below, with the missing ones
            **options,
        )
    check_complete(report, path, type(model).__name__)
    if options:
        model.config._name_or_path = Path(path).name
    return (model if target is None else model.to(target)).eval()


def _place(path: str | os.PathLike[str]) -> tuple[str | os.PathLike[str], dict[str, str]]:
    """Check that there is a model; return where, and the options of a GGUF file."""
    check_transformers("language models")
    check_model(path)
    file = Path(path)
    if file.suffix == ".gguf":
        _gguf_settings(file)  # a damaged file shows before the slow load
        return file.parent, {"gguf_file": file.name}
    return path, {}


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


def _gguf_settings(file: Path) -> dict[str, bytes]:
    """Return the values at the beginning of a GGUF file; raise if it ends before its last tensor.

    The package gguf takes 20 seconds for a vocabulary of 128,000 tokens.
    """
    with file.open("rb") as stream:

        def number(size: int) -> int:
            data = stream.read(size)
            if len(data) < size:
                raise EOFError
            return int.from_bytes(data, "little")

        def value(kind: int) -> bytes:
            if kind == _GGUF_TEXT:
                return stream.read(number(8))
            if kind != _GGUF_ARRAY:
                return stream.read(_GGUF_SIZES[kind])
            kind, count = number(4), number(8)
            if kind in _GGUF_SIZES:
                stream.seek(count * _GGUF_SIZES[kind], os.SEEK_CUR)
            else:
                for _ in range(count):
                    value(kind)
            return b""

        if stream.read(4) != b"GGUF":
            raise ValueError(f"{file} is not a GGUF file: it does not begin with GGUF")
        settings, last = {}, -_GGUF_ALIGNMENT
        try:
            number(4)  # the version
            tensors, values = number(8), number(8)
            for _ in range(values):
                name = stream.read(number(8)).decode()
                settings[name] = value(number(4))
            for _ in range(tensors):
                stream.seek(number(8), os.SEEK_CUR)  # its name
                stream.seek(8 * number(4) + 4, os.SEEK_CUR)  # its shape and type
                last = max(last, number(8))
            begin = -(-stream.tell() // _GGUF_ALIGNMENT) * _GGUF_ALIGNMENT
            if begin + last >= file.stat().st_size:
                raise EOFError
        except (EOFError, KeyError, UnicodeDecodeError) as error:
            raise ValueError(f"{file} is damaged or cut off: download it again") from error
    return settings


def _add_start(tokenizer: Any, file: Path) -> None:
    """Let a tokenizer add the beginning-of-text token, to texts and chats, if its file says so.

    transformers before 5.23 ignores what the file says, and models such as Gemma make nonsense of
    texts without that token. Runtimes of GGUF also put it before chats whose template does not.
    """
    if not _adds_start(tokenizer):
        settings = _gguf_settings(file)
        # sentencepiece models whose file says nothing have it
        unsaid = b"\1" if settings.get("tokenizer.ggml.model") == b"llama" else b"\0"
        if settings.get("tokenizer.ggml.add_bos_token", unsaid) == b"\0":
            return
        tokenizer.add_bos_token = True
        if not _adds_start(tokenizer):
            warn(
                f"{file} asks for a beginning-of-text token, which {type(tokenizer).__name__} does "
                "not add: put it before each text, or update transformers"
            )
            return
    if not tokenizer.chat_template:
        return
    from jinja2 import TemplateError

    try:
        chat = [{"role": "user", "content": "a"}]
        rendered = tokenizer.apply_chat_template(chat, tokenize=False)
    except TemplateError:  # the template wants more than a plain question
        return
    if not rendered.startswith(tokenizer.bos_token):
        tokenizer.chat_template = "{{ bos_token }}" + tokenizer.chat_template


def _adds_start(tokenizer: Any) -> bool:
    start = tokenizer.bos_token_id
    return start is not None and tokenizer("a")["input_ids"][:1] == [start]
