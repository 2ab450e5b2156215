"""Hugging Face models: loading, and the parts that calibration needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from calibrant._core.torch_models import own_device


def load_model(
    path: str | os.PathLike[str], *, device: str | None = None, dtype: str = "auto"
) -> tuple[Any, Any]:
    """Read a causal language model and its tokenizer.

    Parameters
    ----------
    path : path
        A folder of Hugging Face, a name on its hub, or a ``.gguf`` file.
    device : str, optional
        As torch names it; of the processes of ``torchrun`` each gets a GPU of its own by ``cuda``.
    dtype : str
        As torch names it; ``auto`` is that of the file.

    Returns
    -------
    (model, tokenizer)
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise ImportError(
            f"language models need transformers ({error}): pip install 'calibrant[llm]'"
        ) from error
    place = Path(path)
    named: dict[str, Any] = {}
    # a name on the hub is one word, or two with a stroke between them
    local = place.is_absolute() or str(path).startswith(".") or str(path).endswith(("/", ".gguf"))
    if local and not place.exists():
        raise FileNotFoundError(f"there is no model at {path}: it does not exist")
    if place.suffix == ".gguf":
        path, named = place.parent, {"gguf_file": place.name}
    wanted = _precision(dtype)
    target = None if device is None else own_device(device)  # before the model is read
    tokenizer = AutoTokenizer.from_pretrained(path, **named)
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=wanted, **named)
    if named:
        model.config._name_or_path = place.name
    return (model if target is None else model.to(target)).eval(), tokenizer


def _precision(dtype: str) -> Any:
    found = "auto" if dtype == "auto" else getattr(torch, dtype, None)
    if found != "auto" and not (isinstance(found, torch.dtype) and found.is_floating_point):
        raise ValueError(f"dtype must be auto, float32, bfloat16 or float16, got {dtype!r}")
    return found


SCALES = "scales_for_calibrant"
"""Attribute of the hooks that multiply logits, and of the states whose logits they multiplied."""


def has_head(inner: nn.Module) -> bool:
    """Whether logits are scaled now; a copy that was made within a block keeps its hooks."""
    return any(hasattr(hook, SCALES) for hook in inner._forward_hooks.values())


SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names that configurations have for the bound of the logits."""


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
