"""The parts of Hugging Face models that calibration needs, and their fingerprints."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import IntArray, check_whole
from calibrant._core.chunks import as_tensor
from calibrant._core.torch_models import layer_inputs

SCALES = "scales_for_calibrant"
"""Attribute of the hooks that scale logits."""
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
"""Names of the bound of the logits in model configurations."""
_ROWS = 256
"""Rows of the output embedding that are hashed."""
_PROBE_TOKENS = 8
"""Number of tokens on which the parts of a model are compared with the whole."""


def _plain_model(model: Any) -> Any:
    """Return the causal language model inside a PEFT or compiled model, or the model itself."""
    getter = getattr(model, "get_base_model", None)
    inner = getter() if callable(getter) else model
    return getattr(inner, "_orig_mod", inner)  # of torch.compile; generate calls the inner one


def _has_head(inner: nn.Module) -> bool:
    """Return True if a head is attached; a copy made while it was attached keeps the hooks."""
    return any(hasattr(hook, SCALES) for hook in inner._forward_hooks.values())


@contextmanager
def _weights_loaded(layer: nn.Module, device: str | None = None) -> Iterator[None]:
    """Load the weights of a layer that accelerate offloads, for the duration of the block.

    Between calls such weights are on the ``meta`` device, without values. They are loaded to
    ``device``, or to where the layer computes.
    """
    if not getattr(getattr(layer, "_hf_hook", None), "offload", False):
        yield
        return
    from accelerate.utils import align_module_device  # type: ignore[import-untyped]

    with align_module_device(layer, device):
        yield


def _inputs_device(model: Any) -> torch.device:
    """Return the device of the input embeddings, where token ids go."""
    layer = model.get_input_embeddings()
    with _weights_loaded(layer):
        device: torch.device = layer.weight.device
    return device


def _backbone_of(inner: Any) -> Any:
    """Return the module that computes the hidden states of all tokens.

    OPT and Bart call the decoder of their base model. ModernBERT returns its output embeddings
    from ``get_decoder``, and Llama 4 has its layers under ``model`` only.
    """
    getter = getattr(inner, "get_decoder", None)
    decoder = getter() if callable(getter) else inner
    for backbone in (decoder, inner.base_model, getattr(inner, "model", inner)):
        if backbone is not inner and backbone is not _output_embeddings(inner):
            return backbone
    raise ValueError(
        f"{type(inner).__name__} has no decoder or base_model that returns hidden states: use "
        "another model, or a global head"
    )


def _output_embeddings(model: nn.Module) -> Any:
    """Return the layer that turns hidden states into logits; raise if there is none."""
    getter = getattr(model, "get_output_embeddings", None)
    layer = getter() if callable(getter) else None
    weight = getattr(layer, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        raise ValueError(
            f"the model must have output embeddings, got {type(model).__name__}: load it with "
            "AutoModelForCausalLM"
        )
    return layer


def _setting(model: nn.Module, *names: str) -> Any:
    """Return a setting of the text part of a model, or None if the configuration has none."""
    config: Any = getattr(model, "config", None)
    settings = {} if config is None else config.get_text_config().to_dict()
    return next((settings[name] for name in names if settings.get(name)), None)


def _positions_of(model: nn.Module) -> int | None:
    """Return the largest number of tokens of a text, or None if there is none."""
    found: int | None = _setting(model, "n_positions", "max_position_embeddings")
    return found


class ModelReader(NamedTuple):
    """The parts of a model that compute hidden states and logits.

    ``layer`` are the output embeddings, ``scale`` is the factor of the raw logits, ``softcap``
    their bound, ``device`` that of the inputs.
    """

    backbone: Any
    layer: Any
    scale: float
    softcap: float | None
    device: torch.device

    @classmethod
    def of(cls, model: Any, softcap: float | None, ids: IntArray) -> ModelReader:
        """Take a model apart, and check on some tokens that the parts give its logits.

        Models have various names for the factor of their logits, so it is measured.
        """
        device = _inputs_device(model)
        backbone = _backbone_of(_plain_model(model))
        reader = cls(backbone, _output_embeddings(model), 1.0, softcap, device)
        probe = torch.from_numpy(ids[None, :_PROBE_TOKENS]).to(device)
        with layer_inputs(model, reader.layer) as inputs, _float32_outputs(reader.layer) as raw:
            logits = model(input_ids=probe, use_cache=False).logits[0]
            hidden = inputs()[0]
        name = type(model).__name__
        if not torch.isfinite(hidden).all():
            raise ValueError(f"hidden states of {name} are NaN or infinite: load it in bfloat16")
        reader = reader._replace(scale=_scale(raw[0], logits, softcap))
        same_hidden = _close(reader.states(probe, None)[0], hidden)
        if not (same_hidden and _close(reader.scaled(raw[0]), logits)):
            raise ValueError(
                f"{name} makes its logits in an unknown way: token tables need those of its layers "
                "and output embeddings, scaled and capped (prompt tuning adds tokens)"
            )
        other = probe.clone()
        other[0, -1] = (probe[0, -1] + 1) % len(model.get_input_embeddings().weight)
        if not _close(reader.states(other, None)[0, :-1], hidden[:-1]):
            raise ValueError(f"{name} is not causal: states change with the tokens after them")
        return reader

    def states(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        """Hidden states ``(rows, t, width)`` as the output embeddings get them."""
        output = self.backbone(input_ids=ids, attention_mask=mask, use_cache=False)
        states: Tensor = output.last_hidden_state.to(self.layer.weight.dtype)  # Mamba's are wider
        return states

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``(n, vocabulary)`` of hidden states, in the precision of the model."""
        return self.scaled(self.layer(hidden))

    def scaled(self, raw: Tensor) -> Tensor:
        """Scale and cap the output of the output embeddings."""
        raw = raw if self.scale == 1 else raw * self.scale
        return raw if self.softcap is None else torch.tanh(raw / self.softcap) * self.softcap


@contextmanager
def _float32_outputs(layer: nn.Module) -> Iterator[list[Tensor]]:
    """Keep the output of a layer, and let the model continue with it in single precision.

    An unknown scale or cap would be lost in the rounding of half precision.
    """
    outputs: list[Tensor] = []

    def widen(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        outputs[:] = [output[0].float().clone()]  # models may modify it in place
        return output.float()

    hook = layer.register_forward_hook(widen)
    try:
        yield outputs
    finally:
        hook.remove()


def _close(got: Tensor, wanted: Tensor) -> bool:
    x, y = (as_tensor(values).double() for values in (got, wanted))
    allowed = _tolerance(got, wanted)
    same = x.shape == y.shape
    return same and torch.allclose(x, y, rtol=allowed, atol=allowed * float(y.abs().max()))


def _tolerance(*values: Tensor) -> float:
    """Relative rounding error to allow: more if any values are in half precision."""
    return 0.02 if any(torch.finfo(x.dtype).bits < 32 for x in values) else 1e-4


def _scale(raw: Tensor, logits: Tensor, softcap: float | None) -> float:
    """Measure the factor by which a model multiplies its raw logits, 1 for most."""
    x, y = (as_tensor(values).double() for values in (raw, logits))
    if softcap is not None:
        kept = y.abs() < 0.9 * softcap
        y = (y / softcap).clamp(-0.999, 0.999).atanh() * softcap
        x, y = x[kept], y[kept]
    factor = float((x * y).sum() / (x * x).sum().clamp(min=torch.finfo(torch.double).tiny))
    return 1.0 if abs(factor - 1) < _tolerance(raw, logits) / 20 else factor


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
    bound = _setting(model, *_SOFTCAPS)
    with _weights_loaded(layer):
        return ModelFingerprint(
            name=str(getattr(config, "_name_or_path", "") or type(model).__name__),
            hidden_size=int(layer.weight.shape[1]),
            vocabulary=int(layer.weight.shape[0]),
            digest=_digest(layer.weight),
            softcap=None if bound is None else float(bound),
            half=_digest(layer.weight, torch.float16),
        )


def _digest(weight: Tensor, first: torch.dtype | None = None) -> str:
    """Hash some rows, rounded to ``first`` and then to bfloat16."""
    rows = np.linspace(0, len(weight) - 1, min(_ROWS, len(weight))).astype(np.int64)
    chosen = weight.detach()[torch.from_numpy(rows).to(weight.device)]
    rounded = chosen.to(first or weight.dtype).to(torch.bfloat16).float().cpu().contiguous().numpy()
    return hashlib.sha256(rounded.astype("<f4").tobytes()).hexdigest()[:16]
