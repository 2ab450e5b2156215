"""Temperature heads in vLLM: logits processors that scale the logits of each token.

vLLM passes logits to its processors, and no hidden states. Heads that are functions of the logits,
``global`` and ``shape``, can so be served; ``linear``, ``mlp`` and ``ats`` are refused. The
head is named in the configuration or by the environment variable ``CALIBRANT_HEAD``.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from calibrant._core.messages import needed
from calibrant.artifacts import load
from calibrant.llm.heads.attach import log_sharpness_of_tokens, on_device
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import bounded

_V1, _V2 = "vllm.v1.sample.logits_processor", "vllm.v1.worker.gpu.sample.logits_processor"
"""Modules with the base class of processors, of the first and of the second model runner."""
_OPTION, _VARIABLE = "calibrant_head", "CALIBRANT_HEAD"
_SERVED = ("nothing", "shape")
"""Inputs of the heads that can be served."""


def _base(module: str, *, required: bool = True) -> Any:
    """Return the base class of logits processors; ``object`` where vLLM does not have it yet."""
    try:
        with needed("calibrant.integrations.vllm needs vLLM", "vllm"):
            return import_module(module).LogitsProcessor
    except ImportError:
        if required:
            raise
        return object


class _ScaledLogits:
    """The head that a server was started with, applied to batches of logits."""

    def __init__(self, vllm_config: Any, device: torch.device) -> None:
        folder = (getattr(vllm_config, "additional_config", None) or {}).get(_OPTION)
        folder = folder or os.environ.get(_VARIABLE)
        if not folder:
            raise ValueError(
                f"a head is needed: pass additional_config={{'{_OPTION}': FOLDER}} to vLLM, or set "
                f"the environment variable {_VARIABLE}"
            )
        fitted = load(folder, FittedHead)
        if fitted.head.wants not in _SERVED:
            raise ValueError(
                f"the {fitted.head.kind} head needs the hidden states, which vLLM does not pass to "
                "logits processors: fit a shape or global head (calibrant llm fit --head shape)"
            )
        self.head = on_device(fitted.head, torch.device(device))
        self.vocabulary = fitted.fingerprint.vocabulary

    @torch.no_grad()
    def apply(self, logits: Tensor) -> Tensor:
        """Return calibrated logits ``(rows, vocabulary)``; changed in place in single precision."""
        if logits.shape[-1] != self.vocabulary:
            raise ValueError(
                f"the head is for a vocabulary of {self.vocabulary}, and the model has "
                f"{logits.shape[-1]}: use the head of this model"
            )
        sharpness = bounded(log_sharpness_of_tokens(self.head, None, logits)).exp()[..., None]
        same = logits.dtype == torch.float32
        return logits.mul_(sharpness) if same else logits.float() * sharpness


class HeadProcessor(_base(_V1)):  # type: ignore[misc]  # known at run time
    """Logits processor for vLLM with its first model runner.

    Start vLLM with ``logits_processors=["calibrant.integrations.vllm:HeadProcessor"]``,
    ``additional_config={"calibrant_head": FOLDER}`` and ``logprobs_mode="processed_logprobs"``:
    log-probabilities are taken before the processors otherwise. They come after a temperature,
    top-k and top-p too, so that requests need ``temperature=1, top_p=1, top_k=0``, or
    ``temperature=0`` for greedy search. Log-probabilities of prompts are not calibrated.
    """

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.scaled = _ScaledLogits(vllm_config, device)

    def apply(self, logits: Tensor) -> Tensor:
        """Return calibrated logits."""
        return self.scaled.apply(logits)

    def is_argmax_invariant(self) -> bool:
        """Return False, since vLLM would skip the processor in greedy search otherwise."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: each token is scaled by its own logits alone."""


class HeadProcessorV2(_base(_V2, required=False)):  # type: ignore[misc]
    """The same for the second model runner, the default of vLLM 0.32 on GPUs."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.scaled = _ScaledLogits(vllm_config, req_states.device)

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """Return calibrated logits."""
        return self.scaled.apply(logits)
