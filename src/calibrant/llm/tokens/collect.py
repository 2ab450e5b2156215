"""One pass of a frozen language model over documents, into a token table."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import BoolArray, IntArray, check_whole
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant._core.torch_models import digest, evaluating, layer_inputs, own_device
from calibrant.llm.fingerprint import mark_of
from calibrant.llm.huggingface import (
    at_hand,
    backbone_of,
    has_head,
    inputs_device,
    output_embeddings,
    plain_model,
    positions_of,
)
from calibrant.llm.tokens.documents import Document, Encoded, digest_of, encoded, groups
from calibrant.llm.tokens.tables import (
    COLUMNS,
    HEADER,
    Header,
    Put,
    TokenTable,
    as_half,
    new_shard,
    open_table,
    read_header,
    shard_folder,
    write_header,
)

LOGITS = 1 << 24
"""Logits that stand in memory at a time, at most: 64 MB in single precision."""
PROBE = 8
"""Tokens on which the way from hidden states to logits is compared with the model's own."""
ADAPTERS = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
"""What layers of PEFT say of the adapters in them, which their weights do not tell."""


def collect(
    model: nn.Module,
    documents: Iterable[Document],
    folder: str | os.PathLike[str],
    *,
    tokenizer: Any = None,
    batch: int = 8192,
    tokens_per_shard: int = 1 << 16,
    length: int = 1024,
    prompts: bool = False,
    device: str | torch.device | None = None,
    progress: Callable[[int, int], object] | None = None,
) -> TokenTable:
    """Run a language model over documents once and keep what a temperature can do to each token.

    The logits are computed for some tokens at a time and never kept: a token takes its
    hidden state in half precision and its records, whatever the size of the vocabulary. A run
    that was stopped goes on after its last whole shard when it is started again.

    Parameters
    ----------
    model : PreTrainedModel
        A causal language model of Hugging Face, in any precision.
    documents : iterable
        Each is one of these:

        - a string: every token but the first counts;
        - a chat, a list of ``{"role": ..., "content": ...}``: what the assistant says counts;
        - a pair of strings ``(prompt, answer)``: the answer counts;
        - ``{"input_ids": ..., "labels": ...}``, each ``(t,)``, with -100 where a token does not
          count; labels stand at the place of their token, as Hugging Face has it.
    folder : path
        Where the table goes: a new or empty folder, or one of an earlier run with the same
        settings. Under ``torchrun`` or ``accelerate launch`` each process takes a share of the
        documents and writes the folder ``rank-0``, ``rank-1`` and so on in it.
    tokenizer : PreTrainedTokenizer, optional
        Needed unless all documents are ready ids. It decides on a token for the beginning of
        a text; some models are of no use without it.
    batch : int
        Tokens of a batch, with the padding.
    tokens_per_shard : int
        Tokens that count in a shard, about: documents are not divided.
    length : int
        Documents are cut after so many tokens.
    prompts : bool
        Keep the hidden states of prompts too: the decoder head looks at them.
    device : optional
        Where the model is moved to; by default it stays where it is. Of the processes of
        ``torchrun`` each gets a GPU of its own by ``cuda``.
    progress : callable, optional
        Called with the number of tokens done and of all, first before the model runs, when those
        of an earlier run are done.

    Returns
    -------
    TokenTable
        Of this process: :func:`open_table` reads those of all.

    Examples
    --------
    >>> import tempfile
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> small = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    >>> model = LlamaForCausalLM(LlamaConfig(vocab_size=50, num_hidden_layers=1, **small))
    >>> documents = [{"input_ids": [1, 7, 9, 3]}, {"input_ids": [1, 4], "labels": [-100, 4]}]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     table = collect(model, documents, folder)
    ...     table.documents, table.records().labels, table.hidden().shape
    (array([0, 0, 0, 1]), array([7, 9, 3, 4]), (4, 8))
    """
    check_whole("batch", batch)
    check_whole("tokens_per_shard", tokens_per_shard)
    check_whole("length", length, 2)
    _check_plain(model)
    rank, ranks = _processes()
    model = model if device is None else model.to(own_device(device))
    mark = mark_of(model)
    texts = encoded(documents, tokenizer, length)
    _check_documents(texts, model)
    share = _share(texts, rank, ranks)
    plan = _planned(share, tokens_per_shard)
    header = Header(
        mark=mark,
        settings=_settings(model, texts, tokens_per_shard),
        documents=len(share),
        prompts=prompts,
        whole=all(len(_kept(text, prompts)) == len(_kept(text, True)) for text in texts),
        shards=[sum(len(share[n].targets) for n in shard) for shard in plan],
        rank=rank,
        ranks=ranks,
    )
    target = Path(folder) if ranks == 1 else Path(folder) / f"rank-{rank}"
    with evaluating(model), torch.no_grad():
        reader = _Reader.of(model, share[plan[0][0]].ids)
        _prepare(Path(folder), target, header)  # nothing is written for a model that is refused
        _fill(reader, target, header, share, plan, batch, progress)
    return open_table(target)


# What is checked and decided before the model runs.


def _check_plain(model: nn.Module) -> None:
    if has_head(plain_model(model)):
        raise ValueError(
            "a model as it is is wanted, got one with a head attached, whose logits are scaled: "
            "collect outside of that block"
        )


def _processes() -> tuple[int, int]:
    """Number of this process and of all, as ``torchrun`` and ``accelerate launch`` tell them."""
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < ranks:
        raise ValueError(
            f"RANK must be below WORLD_SIZE, got {rank} and {ranks} (1 where it is not set): set "
            "both, as torchrun does, or none of them"
        )
    return rank, ranks


def _check_documents(texts: Sequence[Encoded], model: nn.Module) -> None:
    if not texts:
        raise ValueError("documents must not be empty: at least one is wanted")
    if not any(len(text.targets) for text in texts):
        raise ValueError(
            f"no token of the {len(texts)} documents counts: all are masked, cut off by length, "
            "or the first of their document, which nothing predicts; raise length, or mask less"
        )
    rows = len(_embeddings(model))
    largest = max(int(text.ids.max(initial=0)) for text in texts)
    smallest = min(int(text.ids.min(initial=0)) for text in texts)
    if largest >= rows or smallest < 0:
        raise ValueError(
            f"token ids must be in [0, {rows}) for {type(model).__name__}, got "
            f"{largest if largest >= rows else smallest}: pass the tokenizer of this model"
        )
    for number, text in enumerate(texts):
        labels = text.labels[text.targets]
        if len(labels) and not 0 <= labels.min() <= labels.max() < rows:
            raise ValueError(
                f"labels of document {number} must be token ids in [0, {rows}), or -100 where none "
                f"counts, got {labels.min() if labels.min() < 0 else labels.max()}"
            )
    positions, longest = positions_of(model), max(len(text.ids) for text in texts)
    if positions and longest > positions:
        raise ValueError(
            f"length must be at most {positions}, the positions that {type(model).__name__} has, "
            f"got a document of {longest} tokens"
        )


def _embeddings(model: Any) -> Tensor:
    """Matrix of the input embeddings."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight


def _share(texts: list[Encoded], rank: int, ranks: int) -> list[Encoded]:
    """Documents of one process: a run of them, so that the tables join to that of one alone."""
    counting = [number for number, text in enumerate(texts) if len(text.targets)]
    if ranks > len(counting):
        raise ValueError(
            f"{ranks} processes need as many documents with tokens that count, got "
            f"{len(counting)}: start fewer processes"
        )
    starts = [int(part[0]) for part in np.array_split(np.array(counting), ranks)]
    cuts = [0, *starts[1:], len(texts)]
    return texts[cuts[rank] : cuts[rank + 1]]


def _planned(texts: Sequence[Encoded], tokens_per_shard: int) -> list[list[int]]:
    """Numbers of the documents of each shard."""
    plan: list[list[int]] = [[]]
    tokens = 0
    for number, text in enumerate(texts):
        count = len(text.targets)
        if not count:
            continue
        if plan[-1] and tokens + count > tokens_per_shard:
            plan.append([])
            tokens = 0
        plan[-1].append(number)
        tokens += count
    return plan


def _settings(model: Any, texts: Sequence[Encoded], tokens_per_shard: int) -> str:
    """Digest of all that decides what stands in the shards, but for the model's mark.

    An adapter or a short training may leave the output embeddings as they were, so some numbers of
    every weight are part of it, and which adapters are in use.
    """
    total = hashlib.sha256(digest_of(texts).encode())
    total.update(json.dumps([tokens_per_shard, str(_embeddings(model).dtype)]).encode())
    with ExitStack() as stack:
        for module in model.modules():
            stack.enter_context(at_hand(module, "cpu"))  # a GPU may be too small for all at once
        total.update(digest(model).encode())
    for name, module in model.named_modules():
        if isinstance(getattr(module, "disable_adapters", None), bool):  # whole models: a method
            state = [getattr(module, part, None) for part in ADAPTERS]
            total.update(repr((name, state)).encode())
    return total.hexdigest()[:16]


def _prepare(folder: Path, target: Path, header: Header) -> None:
    """Make the folder of a new table, or see that the one there is the same."""
    foreign = [path.name for path in _entries(folder) if not _belongs(path, header.ranks)]
    if (target / HEADER).exists():
        there = read_header(target)
        header.mark.check(there.mark, f"the table in {target}")
        if asdict(there) != {**asdict(header), "mark": asdict(there.mark)}:
            raise ValueError(
                f"{target} holds a table of other settings (documents, tokenizer, length, weights, "
                "adapters, precision, prompts, tokens_per_shard or processes): collect into "
                "another folder"
            )
    elif foreign or _entries(target):
        names = foreign or [path.name for path in _entries(target)]
        raise ValueError(
            f"{folder} must be new, empty or hold the same table, got a folder with "
            f"{', '.join(sorted(names)[:3])}: collect into another one"
        )
    target.mkdir(parents=True, exist_ok=True)
    if not (target / HEADER).exists():
        write_header(target, header)


def _entries(folder: Path) -> list[Path]:
    """What is in a folder, but for the rests of a run that was killed."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _belongs(path: Path, ranks: int) -> bool:
    return ranks > 1 and path.name.startswith("rank-")


# The pass.


class _Reader(NamedTuple):
    """A model taken apart: its layers, and the way from hidden states to logits."""

    backbone: Any
    layer: Any  # output embeddings
    scale: float  # by which the model multiplies what comes out of them
    softcap: float | None
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, ids: IntArray) -> _Reader:
        """Take a model apart, and see on some tokens that the parts give the model's logits.

        Models scale their logits under various names and in both directions, so the factor is
        measured: it is the one from the output of the last layer to the logits before the cap.
        """
        device, softcap = inputs_device(model), mark_of(model).softcap
        reader = cls(
            backbone_of(plain_model(model)), output_embeddings(model), 1.0, softcap, device
        )
        probe = torch.from_numpy(ids[None, :PROBE]).to(device)
        with layer_inputs(model, reader.layer) as inputs, _widened(reader.layer) as raw:
            wanted = model(input_ids=probe, use_cache=False).logits[0]
            hidden = inputs()[0]
        if not torch.isfinite(hidden).all():
            raise ValueError(
                f"hidden states of {type(model).__name__} are NaN or infinite: load the model in "
                "bfloat16 or float32, and see that its weights are whole"
            )
        reader = reader._replace(scale=_scale(raw[0], wanted, softcap))
        if not (
            _close(reader.states(probe, None)[0], hidden) and _close(reader.bent(raw[0]), wanted)
        ):
            raise ValueError(
                f"{type(model).__name__} makes its logits in a way that is not known here: they "
                "are not those of its layers and output embeddings, scaled and capped; token "
                "tables need that (prompt tuning, for one, puts tokens before a text)"
            )
        other = probe.clone()
        other[0, -1] = (probe[0, -1] + 1) % len(_embeddings(model))
        if not _close(reader.states(other, None)[0, :-1], hidden[:-1]):
            raise ValueError(
                f"{type(model).__name__} must look at a token and those before it alone, but its "
                "hidden states change with the tokens after them: load a causal language model"
            )
        return reader

    def states(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states ``(rows, t, width)`` as the output embeddings get them."""
        found = self.backbone(input_ids=ids, attention_mask=mask, use_cache=False)
        states: Tensor = found.last_hidden_state.to(self.layer.weight.dtype)  # Mamba's are wider
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(n, vocabulary)`` of hidden states, in the precision of the model."""
        return self.bent(self.layer(hidden))

    def bent(self, raw: Tensor) -> Tensor:
        """Logits from what comes out of the output embeddings: scaled, and then capped."""
        raw = raw if self.scale == 1 else raw * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap


@contextmanager
def _widened(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Keep what comes out of a layer, and let the model go on with it in single precision.

    A scale or a cap that is not known here would drown in the rounding of half precision.
    """
    heard: list[Tensor] = []

    def widen(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        heard[:] = [output[0].float().clone()]  # models may write over what they get
        return output.float()

    hook = layer.register_forward_hook(widen)
    try:
        yield heard
    finally:
        hook.remove()


def _close(got: Tensor, wanted: Tensor) -> bool:
    """Whether two ways to the same numbers agree, up to what their precision allows."""
    x, y, allowed = got.double(), wanted.double(), _allowed(got, wanted)
    same = x.shape == y.shape
    return same and torch.allclose(x, y, rtol=allowed, atol=allowed * float(y.abs().max()))


def _allowed(*values: Tensor) -> float:
    """Relative error that may come from rounding: more where one of them is in half precision."""
    return 0.02 if any(torch.finfo(x.dtype).bits < 32 for x in values) else 1e-4


def _scale(raw: Tensor, logits: Tensor, softcap: float | None) -> float:
    """Factor by which a model multiplies its raw logits, 1 for most."""
    x, y = raw.double(), logits.double()
    if softcap is not None:
        y = (y / softcap).clamp(-0.999, 0.999).atanh() * softcap
        kept = logits.abs() < 0.9 * softcap
        x, y = x[kept], y[kept]
    factor = float((x * y).sum() / (x * x).sum().clamp(min=torch.finfo(torch.double).tiny))
    return 1.0 if abs(factor - 1) < _allowed(raw, logits) / 20 else factor


def _fill(
    reader: _Reader,
    folder: Path,
    header: Header,
    texts: Sequence[Encoded],
    plan: Sequence[list[int]],
    batch: int,
    progress: Callable[[int, int], object] | None,
) -> None:
    """Write the shards that are not there yet."""
    tell = progress or (lambda done, total: None)
    missing = [n for n in range(len(plan)) if not shard_folder(folder, n).is_dir()]
    total = sum(header.shards)
    done = total - sum(header.shards[number] for number in missing)
    tell(done, total)
    for number in missing:
        with new_shard(folder, number) as put:
            for count in _shard(reader, texts, plan[number], batch, header.prompts, put):
                done += count
                tell(done, total)


def _shard(
    reader: _Reader,
    texts: Sequence[Encoded],
    numbers: Sequence[int],
    batch: int,
    prompts: bool,
    put: Put,
) -> Iterator[int]:
    """Put the tokens of some documents into a shard, and yield the size of each batch."""
    tokens = _Places.of({n: len(texts[n].targets) for n in numbers})
    states = _Places.of({n: len(_kept(texts[n], prompts)) for n in numbers})
    for together in _batches(texts, numbers, batch):
        rows, kept = tokens.of_all(together), states.of_all(together)
        found = _states(reader, [texts[n] for n in together], prompts)
        put(kept, {"hidden": as_half(found.cpu().float().numpy())}, states.total)
        counting = np.concatenate([_counting(texts[n], prompts) for n in together])
        if prompts:
            put(rows, {"states": kept[counting]}, tokens.total)
        hidden = found[torch.from_numpy(np.flatnonzero(counting)).to(found.device)]
        owners = np.concatenate([np.full(len(texts[n].targets), n) for n in together])
        labels = np.concatenate([texts[n].labels[texts[n].targets] for n in together])
        step = max(1, LOGITS // reader.layer.weight.shape[0])
        for first in range(0, len(rows), step):
            chunk = slice(first, first + step)
            records = tabulate(examples(reader.logits(hidden[chunk]), labels[chunk]))
            columns = {name: getattr(records, name) for name in COLUMNS}
            put(rows[chunk], {"documents": owners[chunk], **columns}, tokens.total)
        yield len(rows)


class _Places(NamedTuple):
    """Where the rows of each document lie in a shard."""

    first: dict[int, int]
    size: dict[int, int]
    total: int

    @classmethod
    def of(cls, sizes: dict[int, int]) -> _Places:
        ends = np.cumsum([0, *sizes.values()]).tolist()
        return cls(dict(zip(sizes, ends, strict=False)), sizes, ends[-1])

    def of_all(self, documents: Sequence[int]) -> IntArray:
        """Rows of some documents, one after the other."""
        return np.concatenate([self.first[n] + np.arange(self.size[n]) for n in documents])


def _kept(text: Encoded, prompts: bool) -> IntArray:
    """Places whose hidden states are kept; the token after each is predicted from it."""
    targets = text.targets
    return np.arange(targets.max(initial=0)) if prompts else targets - 1


def _counting(text: Encoded, prompts: bool) -> BoolArray:
    """Which of the states that are kept predict a token that counts."""
    return np.isin(_kept(text, prompts), text.targets - 1)


def _batches(texts: Sequence[Encoded], numbers: Sequence[int], batch: int) -> Iterator[list[int]]:
    """Documents of like length together; the longest come first, to show at once if they fit."""
    order = sorted(numbers, key=lambda n: -int(texts[n].targets[-1]))
    for run in groups([int(texts[n].targets[-1]) for n in order], batch):
        yield order[run]


def _states(reader: _Reader, texts: Sequence[Encoded], prompts: bool) -> Tensor:
    """Hidden states ``(n, width)`` that are kept of some documents, one after the other.

    What comes after the last token that counts is not run, and the rest is padded on the right,
    where causal attention does not look.
    """
    lengths = [int(text.targets[-1]) for text in texts]
    ids = np.zeros((len(texts), max(lengths)), np.int64)
    mask = np.zeros_like(ids)
    for line, (text, size) in enumerate(zip(texts, lengths, strict=True)):
        ids[line, :size], mask[line, :size] = text.ids[:size], 1
    states = reader.states(*(torch.from_numpy(x).to(reader.device) for x in (ids, mask)))
    kept = [_kept(text, prompts) for text in texts]
    lines = np.repeat(np.arange(len(texts)), [len(places) for places in kept])
    chosen = lines, np.concatenate(kept)
    return states[tuple(torch.from_numpy(x).to(states.device) for x in chosen)]
