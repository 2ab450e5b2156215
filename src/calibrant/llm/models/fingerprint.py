"""Fingerprints that tell which language model a token table or a temperature head belongs to."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import check_whole
from calibrant.llm.models.huggingface import _output_embeddings, _softcap_of, _weights_loaded

_ROWS = 256
"""Rows of the output embedding that are hashed."""


@dataclass(frozen=True)
class ModelFingerprint:
    """Identity of a model, as far as its hidden states and logits are concerned.

    ``name`` comes from the configuration, and is not compared: models are copied and renamed.
    ``digest`` is a hash of some rows of the output embedding, rounded to bfloat16, ``half`` that of
    the same rows, rounded to float16 first: with both, a float32 model matches its own copies in
    either half precision, which do not match each other. ``softcap`` is the bound of the logits, in
    models of the Gemma family and some others.
    """

    name: str
    hidden_size: int
    vocabulary: int
    digest: str
    softcap: float | None
    half: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "digest", "half"):
            if not isinstance(getattr(self, name), str):
                raise TypeError(f"{name} must be text, got {getattr(self, name)!r:.60}")
        for name in ("hidden_size", "vocabulary"):
            check_whole(name, getattr(self, name), least=0)

    def check(self, other: ModelFingerprint, what: str) -> None:
        """Raise unless ``what``, with the fingerprint ``other``, belongs to this model."""
        names = ["hidden_size", "vocabulary", "softcap"]
        if not {self.digest, self.half} & {other.digest, other.half} - {""}:
            names.append("digest")
        differing = [
            f"{name} {getattr(other, name)} where {self.name} has {getattr(self, name)}"
            for name in names
            if getattr(other, name) != getattr(self, name)
        ]
        if differing:
            raise ValueError(
                f"{what} belongs to another model: {other.name} has {', '.join(differing)}; load "
                "that model, or collect and fit again (bfloat16 and float16 copies of a model "
                "differ: load it in float32)"
            )


def fingerprint_of(model: nn.Module) -> ModelFingerprint:
    """Compute the fingerprint of a Hugging Face causal language model."""
    layer, config = _output_embeddings(model), getattr(model, "config", None)
    with _weights_loaded(layer):
        return ModelFingerprint(
            name=str(getattr(config, "_name_or_path", "") or type(model).__name__),
            hidden_size=int(layer.weight.shape[1]),
            vocabulary=int(layer.weight.shape[0]),
            digest=_digest(layer.weight),
            softcap=_softcap_of(model),
            half=_digest(layer.weight, torch.float16),
        )


def _digest(weight: Tensor, first: torch.dtype | None = None) -> str:
    """Hash some rows, rounded to ``first`` and then to bfloat16."""
    rows = np.linspace(0, len(weight) - 1, min(_ROWS, len(weight))).astype(np.int64)
    chosen = weight.detach()[torch.from_numpy(rows).to(weight.device)]
    rounded = chosen.to(first or weight.dtype).to(torch.bfloat16).float().cpu().contiguous().numpy()
    return hashlib.sha256(rounded.astype("<f4").tobytes()).hexdigest()[:16]
