"""Training of a masked classifier: its epochs, the control of its keep rate, and checkpoints."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from calibrant._core.checks import warn
from calibrant._core.engines import steps
from calibrant._core.solve import check_time
from calibrant._core.torch_models import save_state
from calibrant.calibrators.maccal.frozen import Batch, LabelledFeatures
from calibrant.calibrators.maccal.masked import Epoch, KeepRate, MaskedClassifier, masked_step

_WARM_UP_STEPS = 100
"""Steps before the control starts: an untrained classifier would lose its weights."""
_MIN_LIFT = 1.5  # accuracy relative to chance below which a warning says that little was learned
_MAX_FINAL_GAP = 0.02  # largest final gap between confidence and its target without a warning


@dataclass
class Training:
    """A training run, whose state between two epochs is what a checkpoint keeps."""

    classifier: MaskedClassifier
    controller: KeepRate
    watched: LabelledFeatures | None  # held-out examples that control the keep rate
    rate: float
    decay: float
    seed: int
    epochs: int
    fingerprint: str  # of the options and the data
    checkpoint: Path | None
    steps: int = 0
    history: list[Epoch] = field(default_factory=list)

    def __post_init__(self) -> None:
        parameters = self.classifier.parameters()
        self.optimiser = torch.optim.Adam(parameters, lr=self.rate, weight_decay=self.decay)
        self.device = self.classifier.keep_.device

    def run(self, batches: Callable[[int], Iterable[Batch]]) -> None:
        """Train on the batches of each epoch, after those of the checkpoint if there is one."""
        self._resume()
        with steps(self.epochs) as step:
            for _ in self.history:
                step()
            for epoch in range(len(self.history), self.epochs):
                if self.steps >= _WARM_UP_STEPS:
                    last = self.history[-1]
                    self.controller.update(last.confidence, last.accuracy)
                self.history.append(self._epoch(batches(epoch), epoch))
                self._save()
                step()

    def _epoch(self, batches: Iterable[Batch], epoch: int) -> Epoch:
        # Seeded by the epoch, so that a continued run takes the same steps, and on the CPU, since
        # every device has other random numbers.
        random = torch.Generator("cpu").manual_seed(1_000_003 * self.seed + epoch)
        for group in self.optimiser.param_groups:
            group["lr"] = self.rate * (1 + math.cos(math.pi * epoch / self.epochs)) / 2
        self.classifier.keep_.fill_(self.controller.keep)
        sums = torch.zeros(4, device=self.device)
        for batch in batches:
            check_time()
            sums += self._step(batch, random)
            self.steps += 1
        weight, loss, confidence, correct = sums.tolist()
        if not weight:
            raise ValueError(f"the loader gave no labelled example in epoch {epoch + 1}")
        if not math.isfinite(loss):
            raise ValueError(f"the loss became {loss} in epoch {epoch + 1}: lower rate")
        seen = confidence / weight, correct / weight
        if self.watched is not None:
            seen = self._watch(self.watched)
        return Epoch(float(self.classifier.keep_), *seen, loss / weight)

    def _step(self, batch: Batch, random: torch.Generator) -> Tensor:
        """Take one step with new masks; the loss is a weighted mean."""
        masks = self.classifier.draw(random)
        logits = self.classifier(batch.features, masks)
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        loss = (losses * batch.weight).sum() / batch.weight.sum()
        self.optimiser.zero_grad()
        loss.backward()
        masked_step(self.optimiser, self.classifier, masks)
        return _sums(logits.detach(), batch, loss.detach())

    @torch.no_grad()
    def _watch(self, watched: LabelledFeatures) -> tuple[float, float]:
        """Return confidence and accuracy of the predictions that the classifier would make."""
        sums = torch.zeros(4, device=self.device)
        for batch in watched.chunks(self.device):
            sums += _sums(self.classifier(batch.features), batch)
        weight, _, confidence, correct = sums.tolist()
        return confidence / weight, correct / weight

    def _save(self) -> None:
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

    def _resume(self) -> None:
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

    def warn_of_failure(self) -> None:
        """Warn where the control of the keep rate did not do what it is for."""
        last, least = self.history[-1], self.controller.least
        target = self.controller.gamma * last.accuracy
        if last.accuracy * self.classifier.classes < _MIN_LIFT:
            warn(
                f"the classifier has hardly learned: accuracy {last.accuracy:.3f}; train for more "
                "epochs, or raise rate"
            )
        elif self.watched is not None and last.accuracy == 1:
            warn(
                "every held-out example is predicted right, so over-confidence cannot be seen: "
                "hold out examples that the network was not trained on"
            )
        elif abs(last.confidence - target) > _MAX_FINAL_GAP:
            warn(
                f"the keep rate did not settle: confidence {last.confidence:.3f} should be "
                f"{target:.3f}, at a keep rate of {last.keep:.3f} in [{least:g}, 1]; "
                "train for more epochs, or widen the bounds"
            )


def _sums(logits: Tensor, batch: Batch, loss: Tensor | float = 0.0) -> Tensor:
    """Return the sums of weight, loss, confidence and correct answers over a batch."""
    confidence, top = logits.softmax(-1).max(-1)
    weight, total = batch.weight, batch.weight.sum()
    correct = (weight * (top == batch.labels)).sum()
    return torch.stack([total, total * loss, (weight * confidence).sum(), correct])
