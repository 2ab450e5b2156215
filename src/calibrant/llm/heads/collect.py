"""Run a frozen language model over documents once, and store a token table."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from calibrant._core.atomic_files import locked
from calibrant._core.checks import IntArray, check_whole
from calibrant._core.chunks import examples
from calibrant._core.engines import report
from calibrant._core.torch_models import device_and_dtype, digest, evaluating, own_device, own_rank
from calibrant.calibrators.logpartition import COLUMNS, tabulate
from calibrant.llm.heads import tables
from calibrant.llm.heads.documents import (
    Document,
    Encoded,
    _encode_document,
    _encode_documents,
    _padded,
    _padded_batches,
)
from calibrant.llm.heads.reading import _check_document_file, _convert_documents
from calibrant.llm.models import loading
from calibrant.llm.models.huggingface import (
    ModelReader,
    _has_head,
    _plain_model,
    _positions_of,
    _weights_loaded,
    fingerprint_of,
)

_MAX_LOGITS = 1 << 24
"""Logits in memory at a time: 64 MB in single precision."""
_SHARDS, _MIN_SHARD, _MAX_SHARD = 16, 1 << 11, 1 << 14
"""Shards of a table by default, and their smallest and largest number of tokens."""
_ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
"""State of PEFT layers that their weights do not show."""


def collect(
    model: nn.Module,
    documents: Iterable[Document],
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    batch: int = 8192,
    tokens_per_shard: int | None = None,
    length: int = 1024,
    prompts: bool = False,
    device: str | torch.device | None = None,
) -> tables.TokenTable:
    """Run a language model over documents once, and keep what heads are fitted from.

    A token takes its hidden state in half precision and its records, whatever the size of the
    vocabulary. An interrupted run continues after its last complete shard when it is started again.
    The callback of :func:`calibrant.use` is told the tokens done and their total.

    Parameters
    ----------
    model : PreTrainedModel
        A Hugging Face causal language model, in any precision.
    documents : iterable
        Each is a string, in which every token but the first counts; a chat, a list of
        ``{"role": ..., "content": ...}``, in which the assistant's turns count; a pair of strings
        ``(prompt, answer)``; or ``{"input_ids": ..., "labels": ...}``, each ``(t,)``, with -100 for
        tokens that do not count and labels at the position of their token, as in Hugging Face.
        :func:`~calibrant.llm.read_documents` reads them from a file.
    folder : path
        A new or empty folder, or one of an earlier run with the same settings. Under
        ``torchrun`` or ``accelerate launch`` each process takes a share of the documents and
        writes a folder ``rank-0``, ``rank-1`` and so on inside.
    tokenizer : PreTrainedTokenizer, optional
        Needed unless all documents are token ids. It decides on a beginning-of-text token.
    batch : int
        Tokens of a batch, with padding.
    tokens_per_shard : int, optional
        Approximate number of tokens that count in a shard: documents are not divided. By default
        a sixteenth of all tokens, but at least 2,048 and at most 16,384.
    length : int
        Documents are truncated to this number of tokens.
    prompts : bool
        Keep the hidden states of prompts too: the ATS head needs them.
    device : optional
        Device to move the model to; with ``cuda`` each process of ``torchrun`` gets its own GPU.

    Returns
    -------
    TokenTable
        Of this process: :func:`~calibrant.llm.open_table` reads those of all.
    """
    check_whole("batch", batch)
    if tokens_per_shard is not None:
        check_whole("tokens_per_shard", tokens_per_shard)
    check_whole("length", length, 2)
    if _has_head(_plain_model(model)):
        raise ValueError("this model has a head attached, which scales its logits: detach it first")
    rank, ranks = own_rank()
    model = model if device is None else model.to(own_device(device))
    fingerprint = fingerprint_of(model)
    texts = _encode_documents(documents, tokenizer, length)
    _check_documents(texts, model)
    total = sum(len(text.targets) for text in texts)
    tokens_per_shard = tokens_per_shard or max(_MIN_SHARD, min(total // _SHARDS, _MAX_SHARD))
    share = _share(texts, rank, ranks)
    plan = _planned(share, tokens_per_shard)
    header = tables.Header(
        fingerprint=fingerprint,
        settings=_settings(model, texts, tokens_per_shard),
        documents=len(share),
        prompts=prompts,
        whole=prompts or all(len(x.targets) == x.targets.max(initial=0) for x in texts),
        shards=[sum(len(share[n].targets) for n in shard) for shard in plan],
        rank=rank,
        ranks=ranks,
    )
    target = Path(folder) if ranks == 1 else Path(folder) / f"rank-{rank}"
    with evaluating(model), torch.no_grad(), ExitStack() as stack:
        reader = ModelReader.of(model, fingerprint.softcap, share[plan[0][0]].ids)
        # nothing is written for a model that is refused
        stack.enter_context(_prepared(target, header, inside=Path(folder)))
        missing = [n for n in range(len(plan)) if not tables._shard_folder(target, n).is_dir()]
        total = sum(header.shards)
        done = total - sum(header.shards[number] for number in missing)

        def told(tokens: int) -> None:
            nonlocal done
            done += tokens
            report(done, total)

        told(0)
        for number in missing:
            documents_of_shard = {n: share[n] for n in plan[number]}
            columns = _columns(reader, documents_of_shard, batch, prompts, told)
            tables._write_shard(target, number, columns)
    return tables.open_table(target)


def collect_file(
    model: str | os.PathLike[str],
    documents: str | os.PathLike[str],
    folder: str | os.PathLike[str],
    *,
    length: int = 1024,
    limit: int | None = None,
    skip_bad: bool = False,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    **options: Any,
) -> tuple[tables.TokenTable, int]:
    """Load a model and run it over a file of documents, whose texts are not kept in memory.

    ``limit`` and ``skip_bad`` are those of :func:`~calibrant.llm.read_documents`, ``options`` those
    of :func:`~calibrant.llm.collect`. Returns the table, and the number of documents.
    """
    # find mistakes in these before the slow loading of the model
    device_and_dtype(device=device, dtype=dtype)
    _check_document_file(documents)
    tokenizer = loading._load_tokenizer(model, trust_remote_code)
    encode = partial(_encode_document, tokenizer=tokenizer, length=length)
    texts = _convert_documents(documents, encode, limit, skip_bad)
    network = loading._load_weights(model, device, dtype, trust_remote_code)
    return collect(network, texts, folder, length=length, **options), len(texts)


def _check_documents(texts: Sequence[Encoded], model: Any) -> None:
    if not texts:
        raise ValueError("documents must not be empty")
    if not any(len(text.targets) for text in texts):
        raise ValueError(
            f"no token of the {len(texts)} documents counts: all are masked, truncated, or the "
            "first of their document; raise length, or mask fewer"
        )
    name, positions = type(model).__name__, _positions_of(model)
    rows = len(model.get_input_embeddings().weight)
    for number, text in enumerate(texts):
        for what, values in (("token ids", text.ids), ("labels", text.labels[text.targets])):
            outside = values[(values < 0) | (values >= rows)]
            if len(outside):
                raise ValueError(
                    f"{what} of documents[{number}] must be in [0, {rows}) for {name}, or labels "
                    f"of -100, got {outside[0]}: pass the tokenizer of this model"
                )
        if positions and len(text.ids) > positions:
            raise ValueError(
                f"length must be at most {positions}, the positions of {name}, got "
                f"documents[{number}] of {len(text.ids)} tokens"
            )


def _share(texts: list[Encoded], rank: int, ranks: int) -> list[Encoded]:
    """Return the documents of one process; the tables of all join to that of a single one."""
    counting = [number for number, text in enumerate(texts) if len(text.targets)]
    if ranks > len(counting):
        raise ValueError(
            f"{ranks} processes need as many documents with tokens that count, got "
            f"{len(counting)}: start fewer processes"
        )
    starts = [int(numbers[0]) for numbers in np.array_split(counting, ranks)]
    cuts = [0, *starts[1:], len(texts)]
    return texts[cuts[rank] : cuts[rank + 1]]


def _planned(texts: Sequence[Encoded], tokens_per_shard: int) -> list[list[int]]:
    plan: list[list[int]] = [[]]
    tokens = 0
    for number, count in enumerate(len(text.targets) for text in texts):
        if count and plan[-1] and tokens + count > tokens_per_shard:
            plan.append([])
            tokens = 0
        if count:
            plan[-1].append(number)
            tokens += count
    return plan


def _settings(model: Any, texts: Sequence[Encoded], tokens_per_shard: int) -> str:
    """Hash everything that decides the content of the shards, except the fingerprint.

    An adapter or a short training may leave the output embeddings as they were, so some values of
    every weight and the active adapters are included.
    """
    contents = hashlib.sha256()
    for ids, labels in texts:
        contents.update(len(ids).to_bytes(8, "little"))
        contents.update(ids.astype("<i8").tobytes() + labels.astype("<i8").tobytes())
    total = hashlib.sha256(contents.hexdigest()[:16].encode())
    total.update(
        json.dumps([tokens_per_shard, str(model.get_input_embeddings().weight.dtype)]).encode()
    )
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(_weights_loaded(module, "cpu"))  # a GPU may be too small for all
        total.update(digest(model).encode())
    for name, module in model.named_modules():
        # in whole models it is a method
        if isinstance(getattr(module, "disable_adapters", None), bool):
            state = [getattr(module, attribute, None) for attribute in _ADAPTERS]
            total.update(repr((name, state)).encode())
    return total.hexdigest()[:16]


@contextmanager
def _prepared(target: Path, header: tables.Header, *, inside: Path) -> Iterator[None]:
    """Hold the folder of a new table, or of the same one; no other process may write there."""
    _check_folder(target, header, inside)  # nothing is written in the folder of something else
    target.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(target / tables.HEADER, wait=False))
        except BlockingIOError as error:
            raise ValueError(
                f"{target} is being written by another process: wait until it ends, or use "
                "another folder"
            ) from error
        for leftover in target.glob(".shard-*"):  # of a process that was killed
            shutil.rmtree(leftover, ignore_errors=True)
        _check_folder(target, header, inside)
        if not (target / tables.HEADER).exists():
            tables._write_header(target, header)
        yield


def _check_folder(target: Path, header: tables.Header, inside: Path) -> None:
    """Raise unless a folder is new, empty or holds the same table."""
    if (target / tables.HEADER).exists():
        there = tables._read_header(target)
        header.fingerprint.check(there.fingerprint, f"the table in {target}")
        if replace(there, fingerprint=header.fingerprint) != header:
            raise ValueError(
                f"{target} holds a table of other settings (documents, tokenizer, length, weights, "
                "adapters, precision, prompts, tokens_per_shard or processes): use another folder"
            )
        return
    # hidden files are the lock, and leftovers of an interrupted run
    entries = {*target.glob("[!.]*"), *inside.glob("[!.]*")}
    ranks = {*inside.glob("rank-*")} if header.ranks > 1 else set()
    foreign = sorted(path.name for path in entries - ranks)
    if foreign:
        raise ValueError(
            f"{inside} must be new, empty or hold the same table, got a folder with "
            f"{', '.join(foreign[:3])}: use another one"
        )


def _columns(
    reader: ModelReader,
    texts: Mapping[int, Encoded],
    batch: int,
    prompts: bool,
    told: Callable[[int], None],
) -> dict[str, NDArray[Any]]:
    """Compute the columns of a shard from documents by number; ``told`` counts tokens of batches.

    Tokens after the last one that counts are not run, and the rest is padded on the right, where
    causal attention does not look.
    """
    lengths = {n: int(text.targets[-1]) for n, text in texts.items()}
    tokens = _rows({n: len(text.targets) for n, text in texts.items()})
    states = _rows(lengths) if prompts else tokens
    sizes = {name: sum(map(len, tokens.values())) for name in ("documents", "states", *COLUMNS)}
    sizes["hidden"] = sum(map(len, states.values()))
    columns: dict[str, NDArray[Any]] = {}

    def put(name: str, rows: IntArray, values: NDArray[Any]) -> None:
        if name not in columns:
            columns[name] = np.empty((sizes[name], *values.shape[1:]), values.dtype)
        columns[name][rows] = values

    # documents of similar length together; the longest come first, to run out of memory early
    order = sorted(texts, key=lambda n: -lengths[n])
    for run in _padded_batches([lengths[n] for n in order], batch):
        together = order[run]
        padded = _padded([texts[n].ids[: lengths[n]] for n in together])
        computed = reader.states(*(x.to(reader.device) for x in padded))
        counting = []
        for document, n in zip(computed, together, strict=True):
            own = texts[n].targets - 1  # each state predicts the token after it
            counting.append(document[torch.from_numpy(own).to(document.device)])
            kept = document[: lengths[n]] if prompts else counting[-1]
            put("hidden", states[n], tables._as_half(kept.cpu().float().numpy()))
            put("documents", tokens[n], np.full(len(own), n))
            if prompts:
                put("states", tokens[n], states[n][own])
        hidden, rows = torch.cat(counting), np.concatenate([tokens[n] for n in together])
        labels = np.concatenate([texts[n].labels[texts[n].targets] for n in together])
        step = max(1, _MAX_LOGITS // reader.layer.weight.shape[0])
        for first in range(0, len(rows), step):
            chunk = slice(first, first + step)
            records = tabulate(examples(reader.logits(hidden[chunk]), labels[chunk]))
            for name in COLUMNS:
                put(name, rows[chunk], getattr(records, name))
        told(len(rows))
    return columns


def _rows(sizes: dict[int, int]) -> dict[int, IntArray]:
    ends = np.cumsum([*sizes.values()])
    return dict(zip(sizes, np.split(np.arange(ends[-1]), ends[:-1]), strict=True))
