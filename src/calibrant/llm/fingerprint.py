"""Fingerprints that tell which language model a table or a head belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from calibrant.llm.huggingface import _softcap, at_hand, output_embeddings

ROWS = 256
"""Rows of the output embedding that tell one model from another."""


@dataclass(frozen=True)
class ModelMark:
    """What must agree for hidden states and logits to mean the same.

    Attributes
    ----------
    name : str
        As the configuration has it. A model may be copied or renamed, so it is not compared.
    hidden_size : int
        Width of what goes into the output embedding.
    vocabulary : int
        Number of logits: rows of the output embedding.
    digest : str
        Of some rows of the output embedding, rounded to bfloat16.
    half : str
        The same, rounded to float16 first. By the two a model in single precision agrees with
        itself in either half precision. These two do not agree with each other if both were
        rounded from single precision: some numbers between two of bfloat16 go up on one way and
        down on the other, so no digest is the same for both.
    softcap : float or None
        Bound of the logits in models of the Gemma family and some others (``SOFTCAPS``).

    Examples
    --------
    >>> mine = ModelMark("a", 64, 1000, "0123456789abcdef", None)
    >>> mine.check(ModelMark("b", 64, 1000, "0123456789abcdef", None), "the table")
    >>> mine.check(ModelMark("c", 32, 1000, "fedcba9876543210", None), "the table")
    Traceback (most recent call last):
    ...
    ValueError: the table belongs to another model: c has hidden_size 32 where a has 64, ...
    """

    name: str
    hidden_size: int
    vocabulary: int
    digest: str
    softcap: float | None
    half: str = ""

    def check(self, other: ModelMark, what: str) -> None:
        """Raise unless ``what``, whose mark is ``other``, belongs to the model of this mark."""
        names = [f.name for f in fields(self) if f.name not in ("name", "digest", "half")]
        if not {self.digest, self.half} & {other.digest, other.half} - {""}:
            names.append("digest")
        differing = [
            f"{name} {getattr(other, name)} where {self.name} has {getattr(self, name)}"
            for name in names
            if getattr(other, name) != getattr(self, name)
        ]
        if differing:
            raise ValueError(
                f"{what} belongs to another model: {other.name} has {', '.join(differing)}; "
                "collect and fit again with this model, or load the one it was made for (a model "
                "that was rounded to bfloat16 is another than in float16: load it in float32)"
            )


def mark_of(model: nn.Module) -> ModelMark:
    """Mark of a causal language model of Hugging Face.

    Parameters
    ----------
    model : PreTrainedModel
        One with output embeddings, ``(vocabulary, width)``.

    Returns
    -------
    ModelMark
    """
    layer = output_embeddings(model)
    config: Any = getattr(model, "config", None)
    with at_hand(layer):
        return ModelMark(
            name=str(getattr(config, "_name_or_path", "") or type(model).__name__),
            hidden_size=int(layer.weight.shape[1]),
            vocabulary=int(layer.weight.shape[0]),
            digest=_digest(layer.weight),
            softcap=_softcap(model),
            half=_digest(layer.weight, torch.float16),
        )


def _digest(weight: Tensor, first: torch.dtype | None = None) -> str:
    """Digest of some rows, rounded to ``first`` and then to bfloat16."""
    rows = np.linspace(0, len(weight) - 1, min(ROWS, len(weight))).astype(np.int64)
    chosen = weight.detach()[torch.from_numpy(rows).to(weight.device)]
    rounded = chosen.to(first or weight.dtype).to(torch.bfloat16).float().cpu().contiguous().numpy()
    return hashlib.sha256(rounded.astype("<f4").tobytes()).hexdigest()[:16]
