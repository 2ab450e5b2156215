r"""Adaptive temperature scaling (ATS, Xie et al. 2024): the head, its loss, and its batches.

A transformer layer on the last hidden states gives each token a temperature, and is trained with
selective smoothing: likelihood where the model is right, a uniform target where it is wrong.
``fit_head(table, "ats", alpha=0.5, keep_always=True)`` trains it as in the paper, on whole
documents, since the head looks at all earlier tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.checks import IntArray, check_choice
from calibrant._core.options import Count, Positive
from calibrant.calibrators.logpartition import TOP, Records
from calibrant.calibrators.objectives import LogSharpness, Measured
from calibrant.llm.heads.modules import SHARPEST, Head, last_layer

if TYPE_CHECKING:
    from calibrant.llm.heads.tables import TokenTable

_EPS, _THETA = 1e-6, 10000.0
"""Epsilon of the RMS norms, and base of the rotary positions, as in Llama 2."""
Weighting = Literal["paper", "official"]


class ATSHead(Head):
    """The head of adaptive temperature scaling: a transformer layer, then a linear one.

    The first is a decoder layer like those of Llama: RMS norm, causal self-attention with rotary
    positions, SwiGLU, residuals, no biases. It attends to all earlier tokens, so it must be trained
    on whole texts, prompts included. The width must be a multiple of twice the ``attention_heads``.
    ``inner`` is the width of the SwiGLU layer, by default 8/3 of ``width``; ``cap`` is the largest
    sharpness.
    """

    kind = "ats"
    wants = "sequence"

    def __init__(
        self,
        *,
        width: Count,
        attention_heads: Count = 8,
        inner: Count | None = None,
        cap: Positive = SHARPEST,
        start: float = 0.0,
    ) -> None:
        super().__init__()
        if width % (2 * attention_heads):
            raise ValueError(
                f"width must be a multiple of twice the attention heads, got {width} and "
                f"{attention_heads}: choose another number of attention_heads"
            )
        self.width, self.attention_heads, self.cap = width, attention_heads, cap
        self.inner = 8 * width // 3 if inner is None else inner
        self.input_layernorm = nn.RMSNorm(width, _EPS)

        def matrix(inputs: int, outputs: int) -> nn.Linear:
            layer = nn.Linear(inputs, outputs, bias=False)
            nn.init.normal_(layer.weight, std=0.02)
            return layer

        self.self_attn = nn.ModuleDict({f"{n}_proj": matrix(width, width) for n in "qkvo"})
        self.post_attention_layernorm = nn.RMSNorm(width, _EPS)
        self.mlp = nn.ModuleDict(
            {
                "gate_proj": matrix(width, self.inner),
                "up_proj": matrix(width, self.inner),
                "down_proj": matrix(self.inner, width),
            }
        )
        self.last = last_layer(width, start)

    def forward(
        self, hidden: Tensor, *, present: Tensor | None = None, memory: Memory | None = None
    ) -> Tensor:
        """Log-sharpness ``(batch, tokens)`` of states ``(batch, tokens, width)``.

        They follow the tokens in the ``memory`` and are added to it. ``present``
        ``(batch, tokens so far)`` is False for padding, which takes up no position.
        """
        x = hidden + self._attended(self.input_layernorm(hidden), present, memory)
        normed = self.post_attention_layernorm(x)
        gate, up, down = (self.mlp[f"{name}_proj"] for name in ("gate", "up", "down"))
        x = x + down(F.silu(gate(normed)) * up(normed))
        return cast(Tensor, self.last(x))[..., 0].clamp(max=math.log(self.cap))

    def _attended(self, x: Tensor, present: Tensor | None, memory: Memory | None) -> Tensor:
        batch, tokens, _ = x.shape
        query, key, value = (
            self.self_attn[f"{name}_proj"](x)
            .view(batch, tokens, self.attention_heads, -1)
            .transpose(1, 2)
            for name in "qkv"
        )
        past = 0 if memory is None else len(memory)
        everything = torch.arange(past + tokens, device=x.device)
        position = own = everything[past:]
        allowed = everything <= own[:, None]
        if present is not None:
            present = present.bool()
            # a padded token still sees itself, since a softmax over nothing is NaN
            allowed = (allowed & present[:, None, None, :]) | (everything == own[:, None])
            position = present.cumsum(1)[:, None, past:] - 1  # padding takes up no position
        key = _rotated(key, position)
        if memory is not None:
            key, value = memory.extend(key, value)
        mixed = F.scaled_dot_product_attention(
            _rotated(query, position), key, value, attn_mask=allowed
        )
        return cast(Tensor, self.self_attn["o_proj"](mixed.transpose(1, 2).flatten(2)))

    def of_documents(self, table: TokenTable, rows: IntArray) -> Tensor:
        """Log-sharpness ``(m,)`` of rows of a table, which hold all of each document in order."""
        texts = table.texts(rows)
        longest = max(len(states) for states, _ in texts)
        # padding comes after the tokens of a document, where causal attention does not look
        padded = np.zeros((len(texts), longest, self.width), np.float16)
        for line, (states, _) in zip(padded, texts, strict=True):
            line[: len(states)] = states
        counting = np.concatenate([n * longest + places for n, (_, places) in enumerate(texts)])
        device = self.last.weight.device
        u = self(torch.from_numpy(padded).to(device).float())
        return cast(Tensor, u.reshape(-1)[torch.from_numpy(counting).to(device)])


class Memory:
    """Keys and values of the tokens that an ATS head has seen."""

    seen: Tensor | None = None  # (2, batch, heads, tokens, size)

    def __len__(self) -> int:
        return 0 if self.seen is None else self.seen.shape[3]

    @property
    def batch(self) -> int | None:
        """Number of texts; None before the first tokens."""
        return None if self.seen is None else self.seen.shape[1]

    def extend(self, keys: Tensor, values: Tensor) -> Tensor:
        """Add tokens, and return the keys and values of all."""
        new = torch.stack([keys, values])
        self.seen = new if self.seen is None else torch.cat([self.seen, new], 3)
        return self.seen

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the batch, in this order, as each step of a beam search does."""
        if self.seen is not None:
            self.seen = self.seen[:, rows.to(self.seen.device)]

    def crop(self, tokens: int) -> None:
        """Forget all but the first tokens."""
        if self.seen is not None:
            self.seen = self.seen[:, :, :, :tokens]


def _rotated(x: Tensor, position: Tensor) -> Tensor:
    """Rotary positions: pairs (i, i + size/2) are rotated (Su et al. 2021)."""
    half = x.shape[-1] // 2
    speed = _THETA ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = position[..., None].to(torch.float32) * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], -1)


def _selective(
    records: Records,
    u: LogSharpness,
    *,
    alpha: float = 0.5,
    over: Literal["vocabulary"] | int = "vocabulary",
    weighting: Weighting = "paper",
) -> Measured:
    r"""Selective smoothing: likelihood if the model is right, else smoothing.

    .. math::
        \ell = \begin{cases}
            (1 - \alpha) \, [b d_y + A(b)] & \text{top token right} \\
            \alpha \, [b \bar d + A(b)] & \text{wrong}
        \end{cases}

    The second line is the cross-entropy of a uniform distribution over the vocabulary. The loss is
    not proper: no single alpha makes the confidence at the minimum right for every token.

    Parameters
    ----------
    over : "vocabulary" or int
        Tokens that the uniform distribution covers: all, or this many of the likeliest, up to 10.
    weighting : {"paper", "official"}
        ``official`` is that of the authors' code: means over the right and the wrong tokens of a
        batch, weighted by the count of the *other* group, so that the meaning of alpha changes with
        the accuracy of the batch; 0 if one group is empty. Masked positions, which that code counts
        as wrong ones with a loss of 0, do not count here.
    """
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be between 0 and 1, got {alpha}")
    if over != "vocabulary" and not (isinstance(over, int) and 1 <= over <= TOP):
        raise ValueError(f"over must be 'vocabulary' or a number from 1 to {TOP}, got {over!r}")
    check_choice("weighting", weighting, get_args(Weighting))
    b = np.exp(u)
    value, slope = records.log_partition(b)
    flat = records.mean_gap  # of the tokens that the uniform target covers
    if over != "vocabulary":
        gaps = records.gaps[:, :over].astype(np.float64)
        there = np.isfinite(gaps)
        flat = np.where(there, gaps, 0).sum(-1) / there.sum(-1)
    linear = b * np.where(records.correct, records.own_gap, flat)
    if weighting == "paper":
        pull = np.where(records.correct, 1 - alpha, alpha)
        weight = records.weight * pull / records.weight.sum()
    else:
        right = records.weight * records.correct
        wrong = records.weight - right
        n_right, n_wrong = right.sum(), wrong.sum()
        total = (1 - alpha) * n_wrong + alpha * n_right
        weight = np.zeros(len(records))
        if n_right and n_wrong and total:
            weight = right * ((1 - alpha) * n_wrong / n_right) + wrong * (alpha * n_right / n_wrong)
            weight /= total
    return Measured(float(weight @ (linear + value)), weight * (linear + slope))


def _document_batches(
    table: TokenTable, rows: IntArray, size: int, rng: np.random.Generator
) -> Iterator[IntArray]:
    """Yield the rows of whole documents of similar length, ``size`` tokens with padding each."""
    names = rng.permutation(np.unique(table.documents[rows]))
    by_length = names[np.argsort(table.document_lengths(names), kind="stable")]
    batches = list(table.document_chunks(by_length, size))
    for number in rng.permutation(len(batches)):
        yield batches[number]
