"""A language model taken apart: its layers, and the way from hidden states to logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant._core.checks import IntArray
from calibrant._core.torch_models import layer_inputs
from calibrant.llm.huggingface import backbone_of, inputs_device, output_embeddings, plain_model

PROBE = 8
"""Number of tokens on which the parts are compared with the whole model."""


def input_embeddings(model: Any) -> Tensor:
    """Return the matrix of the input embeddings."""
    weight: Tensor = model.get_input_embeddings().weight
    return weight


class ModelReader(NamedTuple):
    """The parts of a model that compute hidden states and logits."""

    backbone: Any
    layer: Any  # output embeddings
    scale: float  # factor of the raw logits
    softcap: float | None
    device: torch.device

    @classmethod
    def of(cls, model: nn.Module, softcap: float | None, ids: IntArray) -> ModelReader:
        """Take a model apart, and check on some tokens that the parts give its logits.

        Models scale their logits under various names and in both directions, so the factor is
        measured, from the output of the last layer to the logits before the cap.
        """
        device = inputs_device(model)
        backbone = backbone_of(plain_model(model))
        reader = cls(backbone, output_embeddings(model), 1.0, softcap, device)
        probe = torch.from_numpy(ids[None, :PROBE]).to(device)
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
        other[0, -1] = (probe[0, -1] + 1) % len(input_embeddings(model))
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
    """Compare two computations of the same numbers, up to their precision."""
    x, y, allowed = got.double(), wanted.double(), _tolerance(got, wanted)
    same = x.shape == y.shape
    return same and torch.allclose(x, y, rtol=allowed, atol=allowed * float(y.abs().max()))


def _tolerance(*values: Tensor) -> float:
    """Relative rounding error to allow: more if any values are in half precision."""
    return 0.02 if any(torch.finfo(x.dtype).bits < 32 for x in values) else 1e-4


def _scale(raw: Tensor, logits: Tensor, softcap: float | None) -> float:
    """Measure the factor by which a model multiplies its raw logits, 1 for most."""
    x, y = raw.double(), logits.double()
    if softcap is not None:
        y = (y / softcap).clamp(-0.999, 0.999).atanh() * softcap
        kept = logits.abs() < 0.9 * softcap
        x, y = x[kept], y[kept]
    factor = float((x * y).sum() / (x * x).sum().clamp(min=torch.finfo(torch.double).tiny))
    return 1.0 if abs(factor - 1) < _tolerance(raw, logits) / 20 else factor
