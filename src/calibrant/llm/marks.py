"""Which language model a table or a head belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

ROWS = 256
"""Rows of the output embedding that tell one model from another."""
SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that configurations have for the bound of the logits."""


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


@contextmanager
def at_hand(layer: nn.Module, device: str | None = None) -> Iterator[None]:
    """Let the weights of a layer be there for a while, if accelerate keeps them elsewhere.

    Between calls such weights are on the device ``meta``, without numbers. They come to where the
    layer computes, or to ``device``.
    """
    if not getattr(getattr(layer, "_hf_hook", None), "offload", False):
        yield
        return
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    with align_module_device(layer, device):
        yield


def inputs_device(model: Any) -> torch.device:
    """Where token ids go: the device of the input embeddings."""
    layer = model.get_input_embeddings()
    with at_hand(layer):
        device: torch.device = layer.weight.device
    return device


def plain_model(model: Any) -> Any:
    """The causal language model in a PEFT model or a compiled one, or the model itself."""
    getter = getattr(model, "get_base_model", None)
    return uncompiled(getter() if callable(getter) else model)


def uncompiled(model: Any) -> Any:
    """The model that ``torch.compile`` wrapped: generate calls it, and not the wrapper."""
    return getattr(model, "_orig_mod", model)


def backbone_of(inner: Any) -> Any:
    """The module that the model calls for the states of all tokens.

    OPT and Bart call the decoder in their base model. What ModernBERT has under this name are its
    output embeddings, and Llama 4 finds its layers by no method.
    """
    getter = getattr(inner, "get_decoder", None)
    decoder = getter() if callable(getter) else inner
    for found in (decoder, inner.base_model, getattr(inner, "model", inner)):
        if found is not inner and found is not output_embeddings(inner):
            return found
    raise ValueError(
        f"the states of all tokens are wanted, and {type(inner).__name__} has no decoder or "
        "base_model that returns them: load another causal language model, or use a global head"
    )


def output_embeddings(model: nn.Module) -> Any:
    """The layer that turns hidden states into logits.

    Raises
    ------
    ValueError
        For a model that has none: it does not predict tokens.
    """
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if callable(getter) else None
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            "a causal language model with output embeddings is wanted, got "
            f"{type(model).__name__}, which has no such floating point matrix: load it with "
            "transformers.AutoModelForCausalLM"
        )
    return layer


def settings_of(model: nn.Module) -> dict[str, Any]:
    """The configuration of the text part of a model, as a dictionary."""
    config: Any = getattr(model, "config", None)
    return {} if config is None else dict(config.get_text_config().to_dict())


def _softcap(model: nn.Module) -> float | None:
    """Bound of the logits, by whichever name; None where there is none."""
    settings = settings_of(model)
    return next((float(settings[name]) for name in SOFTCAPS if settings.get(name)), None)


def positions_of(model: nn.Module) -> int | None:
    """Tokens that a model was made for; None where it does not say."""
    settings = settings_of(model)
    return settings.get("n_positions") or settings.get("max_position_embeddings")


def _digest(weight: Tensor, first: torch.dtype | None = None) -> str:
    """Digest of some rows, rounded to ``first`` and then to bfloat16."""
    rows = np.linspace(0, len(weight) - 1, min(ROWS, len(weight))).astype(np.int64)
    chosen = weight.detach()[torch.from_numpy(rows).to(weight.device)]
    rounded = chosen.to(first or weight.dtype).to(torch.bfloat16).float().cpu().contiguous().numpy()
    return hashlib.sha256(rounded.astype("<f4").tobytes()).hexdigest()[:16]
