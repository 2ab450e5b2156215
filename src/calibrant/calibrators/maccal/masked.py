"""A two-layer classifier with randomly masked weights, its keep rate, and its training."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.checks import warn
from calibrant._core.engines import steps
from calibrant._core.options import Count, Seed, WithOptions, at_least
from calibrant._core.solve import check_time
from calibrant._core.torch_models import save_state
from calibrant.calibrators.maccal.frozen import _FeatureBatch, _LabelledFeatures

_Masks = tuple[Tensor, Tensor]  # factors of the weights of both layers: ones and zeros, or a number
_MAX_HALVINGS, _MAX_CHANGE = 4, 0.1  # how often the step is halved, how far q moves in one epoch


class MaskedClassifier(WithOptions, nn.Module):
    r"""Two layers with a bottleneck between them, which :class:`MaCCal` trains under masks.

    .. math:: z = (q W_2)\,\mathrm{relu}((q W_1) x + b_1) + b_2

    In training :math:`q W` is :math:`M \odot W`, with a mask :math:`M` of independent ones and
    zeros, one with probability :math:`q`. Without masks the weights are multiplied by that
    expectation, in ``train`` mode too: masks are always passed explicitly.

    Parameters
    ----------
    width, classes : int
        Numbers of features and of classes.
    bottleneck, samples, seed : int
        As for :class:`MaCCal`. Averages over masks use the same ones in every call, and return the
        logarithms of the mean probabilities.

    Attributes
    ----------
    keep_ : () Tensor
        The share q of the weights that a mask keeps.

    Examples
    --------
    >>> classifier = MaskedClassifier(512, 10)
    >>> classifier(torch.randn(4, 512)).shape, classifier.bottleneck
    (torch.Size([4, 10]), 128)
    """

    keep_: Tensor

    def __init__(
        self,
        width: Count,
        classes: Count,
        *,
        bottleneck: Count | None = None,
        samples: Annotated[int, at_least(0)] = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.width, self.classes, self.samples, self.seed = width, classes, samples, seed
        self.bottleneck = bottleneck or min(256, max(64, classes, width // 4))
        # without torch's own initial values, which would advance its global random state
        self.first = nn.utils.skip_init(nn.Linear, width, self.bottleneck)
        self.second = nn.utils.skip_init(nn.Linear, self.bottleneck, classes)
        random = torch.Generator().manual_seed(seed)
        for layer in (self.first, self.second):
            bound = 1 / math.sqrt(layer.in_features)
            nn.init.uniform_(layer.weight, -bound, bound, generator=random)
            nn.init.uniform_(layer.bias, -bound, bound, generator=random)
        self.register_buffer("keep_", torch.tensor(1.0))

    def forward(self, features: Tensor, masks: _Masks | None = None) -> Tensor:
        """Logits ``(..., classes)`` of features ``(..., width)``."""
        if features.ndim == 0 or features.shape[-1] != self.width:
            wanted = f"(..., {self.width}), the inputs of the last layer"
            raise ValueError(f"features must be {wanted}, got {tuple(features.shape)}")
        if masks is None and self.samples:
            # NumPy draws are the same on every device, and constants in an exported graph
            random = np.random.default_rng(self.seed)
            draws = (
                self._masks(lambda shape: torch.from_numpy(random.random(shape, np.float32)))
                for _ in range(self.samples)
            )
            logs = [self(features, mask).log_softmax(-1) for mask in draws]
            return torch.stack(logs).logsumexp(0) - math.log(self.samples)
        first, second = masks or (self.keep_, self.keep_)
        inputs = features.to(self.first.weight.dtype)
        hidden = F.relu(F.linear(inputs, self.first.weight * first, self.first.bias))
        return F.linear(hidden, self.second.weight * second, self.second.bias)

    def draw(self, random: torch.Generator) -> _Masks:
        """Draw masks of ones and zeros for both weight matrices."""
        return self._masks(lambda shape: torch.rand(shape, generator=random, device=random.device))

    def _masks(self, uniform: Callable[[torch.Size], Tensor]) -> _Masks:
        first, second = (
            (uniform(layer.weight.shape).to(self.keep_.device) < self.keep_).to(layer.weight.dtype)
            for layer in (self.first, self.second)
        )
        return first, second


def masked_step(
    optimiser: torch.optim.Optimizer, classifier: MaskedClassifier, masks: _Masks
) -> None:
    """Take a step of an optimiser and restore masked weights.

    They have no gradient, but momentum, the averages of Adam and weight decay would move them.

    Examples
    --------
    >>> classifier = MaskedClassifier(3, 2, bottleneck=2)
    >>> optimiser = torch.optim.Adam(classifier.parameters())
    >>> classifier(torch.ones(4, 3)).sum().backward()
    >>> before = classifier.first.weight.detach().clone()
    >>> masked_step(optimiser, classifier, (torch.zeros(2, 3), torch.ones(2, 2)))
    >>> torch.equal(before, classifier.first.weight)
    True
    """
    weights = classifier.first.weight, classifier.second.weight
    before = [weight.detach().clone() for weight in weights]
    optimiser.step()
    with torch.no_grad():
        for weight, mask, old in zip(weights, masks, before, strict=True):
            weight.copy_(torch.where(mask > 0, weight, old))


@dataclass
class KeepRate:
    r"""The share q of weights that a mask keeps, controlled by confidence and accuracy.

    .. math:: q \leftarrow \mathrm{clip}(q - \eta\,(\mathit{conf} - \gamma\,\mathit{acc}),
        \; q_\mathrm{least}, \; 1)

    Over-confidence lowers q. Whenever the gap changes its sign, :math:`\eta` is halved, down to a
    sixteenth; with a fixed step q would oscillate. One update changes q by 0.1 at most. ``keep`` is
    the initial q and ``step`` the initial :math:`\eta`, where 0 leaves q unchanged.

    Examples
    --------
    >>> controller = KeepRate(0.9, step=2.0, gamma=1.0, least=0.1)
    >>> round(controller.update(confidence=0.97, accuracy=0.94), 6)
    0.84
    >>> round(controller.update(confidence=0.90, accuracy=0.94), 6), controller.step
    (0.88, 1.0)
    """

    keep: float
    step: float
    gamma: float
    least: float
    gap: float = 0.0
    halvings: int = 0

    def update(self, confidence: float, accuracy: float) -> float:
        """Take one step and return the new share."""
        gap = confidence - self.gamma * accuracy
        if gap * self.gap < 0 and self.halvings < _MAX_HALVINGS:
            self.step, self.halvings = self.step / 2, self.halvings + 1
        self.gap = gap
        change = min(max(-self.step * gap, -_MAX_CHANGE), _MAX_CHANGE)
        self.keep = min(max(self.keep + change, self.least), 1.0)
        return self.keep


class Epoch(NamedTuple):
    """Figures of one epoch; confidence and accuracy are those that the controller used."""

    keep: float
    confidence: float
    accuracy: float
    loss: float


_WARM_UP_STEPS = 100
"""Steps before the control starts: an untrained classifier would lose its weights."""
_MIN_LIFT = 1.5  # accuracy relative to chance below which a warning says that little was learned
_MAX_FINAL_GAP = 0.02  # largest final gap between confidence and its target without a warning


@dataclass
class _Training:
    """A training run, whose state between two epochs is what a checkpoint keeps."""

    classifier: MaskedClassifier
    controller: KeepRate
    watched: _LabelledFeatures | None  # held-out examples that control the keep rate
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

    def run(self, batches: Callable[[int], Iterable[_FeatureBatch]]) -> None:
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

    def _epoch(self, batches: Iterable[_FeatureBatch], epoch: int) -> Epoch:
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

    def _step(self, batch: _FeatureBatch, random: torch.Generator) -> Tensor:
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
    def _watch(self, watched: _LabelledFeatures) -> tuple[float, float]:
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


def _sums(logits: Tensor, batch: _FeatureBatch, loss: Tensor | float = 0.0) -> Tensor:
    """Return the sums of weight, loss, confidence and correct answers over a batch."""
    confidence, top = logits.softmax(-1).max(-1)
    weight, total = batch.weight, batch.weight.sum()
    correct = (weight * (top == batch.labels)).sum()
    return torch.stack([total, total * loss, (weight * confidence).sum(), correct])
