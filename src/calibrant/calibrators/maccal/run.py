"""The state of a training run, which checkpoints keep."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from calibrant._core.torch_models import save_state
from calibrant.calibrators.maccal.features import Batch, LabelledFeatures
from calibrant.calibrators.maccal.masked import Epoch, KeepRate, MaskedClassifier


@dataclass
class Run:
    """State of a training run between two epochs."""

    classifier: MaskedClassifier
    optimiser: torch.optim.Optimizer
    controller: KeepRate
    watched: LabelledFeatures | None  # held-out examples that control the keep rate
    fingerprint: str  # of the options and the data
    epochs: int
    checkpoint: Path | None
    steps: int = 0
    history: list[Epoch] = field(default_factory=list)

    def save(self) -> None:
        """Write the checkpoint, if there is to be one."""
        if self.checkpoint is None:
            return
        state = {
            "fingerprint": self.fingerprint,
            "classifier": self.classifier.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "controller": vars(self.controller),
            "steps": self.steps,
            "history": [tuple(epoch) for epoch in self.history],
        }
        save_state(state, self.checkpoint)

    def resume(self) -> None:
        """Go on from the checkpoint, if there is one."""
        path = self.checkpoint
        if path is None or not path.exists():
            return
        state = torch.load(path, map_location="cpu", weights_only=True)
        if state.get("fingerprint") != self.fingerprint:
            raise ValueError(f"{path} is of a run with other data or options: delete or rename it")
        self.classifier.load_state_dict(state["classifier"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.controller = KeepRate(**state["controller"])
        self.steps = state["steps"]
        self.history = [Epoch(*epoch) for epoch in state["history"]]


def batch_sums(logits: Tensor, batch: Batch, loss: Tensor | float = 0.0) -> Tensor:
    """Return the sums of weight, loss, confidence and correct answers over a batch."""
    confidence, top = logits.softmax(-1).max(-1)
    weight, total = batch.weight, batch.weight.sum()
    correct = (weight * (top == batch.labels)).sum()
    return torch.stack([total, total * loss, (weight * confidence).sum(), correct])
