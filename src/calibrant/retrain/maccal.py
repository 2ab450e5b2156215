"""MaC-Cal: retrain the classifier on frozen features under random masks."""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core import checks
from calibrant._core.checks import IGNORED, Values, warn
from calibrant._core.chunks import Progress, as_tensor, on_device
from calibrant._core.options import (
    Count,
    NonNegative,
    Positive,
    Seed,
    Share,
    WithOptions,
    above,
    at_least,
    at_most,
)
from calibrant._core.tables import frame
from calibrant._core.torch_models import check_place, device_of, digest, save_state
from calibrant.display.elements import plain
from calibrant.display.html import notebook
from calibrant.display.results import heading, one_line
from calibrant.display.svg import Line, line_chart
from calibrant.retrain import features as frozen
from calibrant.retrain.features import Batch, LabelledFeatures, as_labelled_features
from calibrant.retrain.masked_classifier import Epoch, KeepRate, MaskedClassifier, masked_step

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

TRAINING_GAMMA = 0.95  # default without held-out examples: accuracy on the training set is inflated
EPOCHS = 20
"""Epochs by default."""
STEPS = 2000
"""Least number of steps by default: small data get more epochs."""
WARM_UP = 100  # steps before the control starts: an untrained classifier would lose its weights
LEAST_LIFT = 1.5  # accuracy relative to chance below which a warning says that little was learned
MOST_SAMPLES = 1000
SETTLED = 0.02  # largest final gap between confidence and its target without a warning


@dataclass
class _Run:
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


class MaCCal(WithOptions, nn.Module):
    r"""Retrain the classifier of a network under random masks (Ni et al. 2026, MaC-Cal).

    The features are frozen and the last layer is replaced by a :class:`MaskedClassifier`. In each
    batch a weight is kept with probability q; the others take no part in the forward pass and are
    not changed by the step. After each epoch :class:`KeepRate` moves q, so that confidence
    approaches gamma times the accuracy. It maps features, not logits, and can be used wherever
    calibrators with features can. The page on MaC-Cal says how the defaults were chosen.

    Parameters
    ----------
    bottleneck : int, optional
        Units between the two layers; ``min(256, max(64, classes, width // 4))`` by default.
    epochs : int, optional
        By default 20, or as many as make 2000 steps on features in memory.
    batch_size : int
    rate, decay : float
        Initial learning rate of Adam, annealed to zero along a cosine, and weight decay.
    keep, least_keep : float
        Initial and smallest share q. The first 100 steps use the initial one.
    gamma : float, optional
        By default 1 with held-out examples, and 0.95 without.
    step : float
        How far q moves for a gap between confidence and accuracy; 0 leaves it unchanged.
    samples : int
        With 0, predictions take one pass with all weights multiplied by q. Otherwise they are
        averaged over that many masks, up to 1,000, during training too.
    seed : int
        Of the initial weights, the order of the examples and the masks.

    Attributes
    ----------
    classifier : MaskedClassifier
    history_ : (epochs, 4) Tensor
        A row for each :class:`Epoch`; :attr:`history` has them by name.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> labels = random.integers(3, size=600)
    >>> features = random.normal(size=(600, 8)) + 2 * np.eye(3, 8)[labels]
    >>> held_out = features[:200], labels[:200]
    >>> small = MaCCal(bottleneck=64, epochs=40, batch_size=32, rate=0.01)
    >>> retrained = small.fit(features[200:], labels[200:], held_out=held_out)
    >>> retrained.predict_proba(features[:5]).shape
    (5, 3)
    """

    history_: Tensor
    learned_shapes = (
        "history_ epochs =; classifier.first.weight units width; classifier.first.bias units; "
        "classifier.second.weight classes units; classifier.second.bias classes"
    )

    def __init__(
        self,
        *,
        bottleneck: Count | None = None,
        epochs: Count | None = None,
        batch_size: Count = 256,
        rate: Positive = 1e-3,
        decay: NonNegative = 0.0,
        keep: Share = 0.9,
        least_keep: Share = 0.1,
        gamma: Annotated[float, above(0), at_most(2)] | None = None,
        step: NonNegative = 4.0,
        samples: Annotated[int, at_least(0), at_most(MOST_SAMPLES)] = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.class_names_: tuple[str, ...] | None = None
        self.bottleneck, self.epochs, self.batch_size = bottleneck, epochs, batch_size
        self.keep, self.least_keep, self.gamma, self.step = keep, least_keep, gamma, step
        self.rate, self.decay, self.samples, self.seed = rate, decay, samples, seed
        if keep < least_keep:
            raise ValueError(f"keep must be at least least_keep ({least_keep:g}), got {keep!r}")
        self.classifier = MaskedClassifier(1, 1)  # replaced by one of the right size in a fit
        self.register_buffer("history_", torch.zeros(0, len(Epoch._fields)))

    @property
    def classes(self) -> int:
        """Number of classes; 0 before a fit."""
        return self.classifier.classes if len(self.history_) else 0

    @property
    def width(self) -> int:
        """Number of features; 0 before a fit."""
        return self.classifier.width if len(self.history_) else 0

    @property
    def history(self) -> list[Epoch]:
        """Figures of each epoch of the fit."""
        return [Epoch(*row) for row in self.history_.tolist()]

    @property
    def size(self) -> int:
        """Number of trained weights."""
        return sum(values.numel() for values in self.classifier.parameters())

    def config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}

    def describe(self) -> str:
        """Describe the classifier in a sentence."""
        if not self.classes:
            return "MaC-Cal, not fitted"
        return (
            f"masked classifier of {self.width} features for {self.classes} classes, "
            f"{self.size:,} parameters, keep rate {self.history[-1].keep:.3f}"
        )

    def __repr__(self) -> str:
        return one_line(self, self.describe().removeprefix("MaC-Cal, "))

    def _repr_html_(self) -> str:
        names = {"keep": "keep rate", "confidence": "confidence", "accuracy": "accuracy"}
        epochs = range(1, len(self.history) + 1)
        lines = [
            Line(title, list(epochs), [getattr(epoch, name) for epoch in self.history])
            for name, title in names.items()
        ]
        chart = line_chart(lines, x_label="epoch", y_label="share", x_format=plain, y_range=(0, 1))
        return notebook(heading("MaC-Cal", self.describe()), chart if self.classes else "")

    def to_frame(self) -> pd.DataFrame:
        """Return :attr:`history` as a frame, with a row for each epoch. Needs pandas."""
        return frame(epoch._asdict() for epoch in self.history)

    def fit(
        self,
        features: Values,
        labels: Values,
        *,
        held_out: tuple[Values, Values] | float | None = None,
        classes: int | None = None,
        sample_weight: Values | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Train a new classifier on cached features; an earlier fit is forgotten.

        It trains, and stays, on the device of a tensor of features; an array has none, and leaves
        it where it is.

        Parameters
        ----------
        features : (..., width)
            Inputs of the last layer for the training set, converted one batch at a time.
        labels : (...) integers, -100 ignored
        held_out : (features, labels), or float, optional
            Examples that the network was not trained on, by which q is controlled: by far the best
            choice. A float holds out that share of the examples, which is valid only if the network
            has not seen them. By default q is controlled by the training set, with masks.
        classes : int, optional
            By default the largest label plus one.
        sample_weight : (...) or fewer leading dimensions, optional
            Weights of the examples; 0 leaves one out.
        checkpoint : path, optional
            File that is written after each epoch, and from which a run continues if it exists.
        progress : callable, optional
            Called with (epochs done, epochs in all).
        """
        train = as_labelled_features(features, labels, sample_weight)
        present = np.unique(train.labels[train.kept])
        if len(present) < 2:
            raise ValueError(f"labels must have at least two classes, got only {present[0]}")
        count = int(present[-1]) + 1 if classes is None else classes
        checks.check_labels(train.labels, count)
        train, watched = self._hold_out(train, held_out, count)
        if isinstance(train.features, Tensor):
            self.to(train.features.device)

        def batches(epoch: int) -> Iterator[Batch]:
            order = np.random.default_rng((self.seed, epoch)).permutation(train.kept)
            for start in range(0, len(order), self.batch_size):
                yield train.batch(order[start : start + self.batch_size], self.history_.device)

        sizes = int(train.features.shape[-1]), count
        steps = -(-len(train.kept) // self.batch_size)
        epochs = max(EPOCHS, -(-STEPS // steps))
        run = self._new_run(sizes, train.fingerprint(), watched, epochs, checkpoint)
        return self._train(run, batches, progress)

    def fit_model(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        held_out: Iterable[Any] | None = None,
        name: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Progress | None = None,
    ) -> Self:
        """Train a new classifier on the features that a frozen network computes, on its device.

        The network runs in ``eval`` mode and is not changed;
        :func:`~calibrant.retrain.replace_head` then puts the new classifier into it.

        Parameters
        ----------
        model : nn.Module
            With outputs as for :func:`calibrant.calibrated`.
        loader : iterable of batches
            As for :func:`calibrant.collect`, iterated once per epoch; it may augment and shuffle.
        held_out : iterable of batches, optional
            Examples that the network was not trained on, without augmentation, by which q is
            controlled. Their features are held in memory.
        name : str, optional
            The last layer, as for :func:`~calibrant.retrain.replace_head`.
        checkpoint, progress
            As for :meth:`fit`.
        """
        classes = frozen.count_outputs(model, loader)
        layer = frozen.last_layer(model, classes, name)
        self.to(device_of(model, self.history_.device))

        def batches(_: int) -> Iterator[Batch]:
            for features, labels in frozen.feature_batches(model, loader, layer):
                if (labels != IGNORED).any():
                    data = as_labelled_features(features, labels, classes=classes)
                    yield data.batch(data.kept, self.history_.device)

        watched = None
        if held_out is not None:
            parts = list(zip(*frozen.feature_batches(model, held_out, layer), strict=True))
            if not parts:
                raise ValueError("held_out must have at least one batch, got none")
            inputs, targets = (torch.cat([values.cpu() for values in part]) for part in parts)
            watched = as_labelled_features(inputs, targets, classes=classes, name="held_out ")
        sizes = int(model.get_submodule(layer).in_features), classes  # type: ignore[arg-type]
        run = self._new_run(sizes, f"{layer} {digest(model)} ", watched, EPOCHS, checkpoint)
        return self._train(run, batches, progress)

    def _hold_out(
        self, train: LabelledFeatures, held_out: tuple[Values, Values] | float | None, classes: int
    ) -> tuple[LabelledFeatures, LabelledFeatures | None]:
        """Return the examples to learn from and those that control q."""
        if held_out is None:
            return train, None
        if isinstance(held_out, (int, float)):
            if not 0 < held_out <= 0.5:
                raise ValueError(f"held_out must be a share in (0, 0.5], got {held_out}")
            kept = train.kept
            part = kept[frozen.stratified_share(train.labels[kept], held_out, self.seed)]
            if not len(part):
                raise ValueError(f"held_out={held_out} of {len(kept)} examples is none")
            return train._replace(kept=np.setdiff1d(kept, part)), train._replace(kept=part)
        if not isinstance(held_out, (tuple, list)) or len(held_out) != 2:
            kind = type(held_out).__name__
            raise TypeError(f"held_out must be (features, labels) or a share, got {kind}")
        watched = as_labelled_features(*held_out, classes=classes, name="held_out ")
        wanted, width = int(train.features.shape[-1]), int(watched.features.shape[-1])
        if wanted != width:
            raise ValueError(f"held_out features must be (..., {wanted}), got a width of {width}")
        return train, watched

    def _new_run(
        self,
        sizes: tuple[int, int],
        data: str,
        watched: LabelledFeatures | None,
        epochs: int,
        checkpoint: str | os.PathLike[str] | None,
    ) -> _Run:
        classifier = self._new_classifier(*sizes, self.bottleneck)
        optimiser = torch.optim.Adam(classifier.parameters(), lr=self.rate, weight_decay=self.decay)
        gamma = self.gamma or (TRAINING_GAMMA if watched is None else 1.0)
        controller = KeepRate(self.keep, self.step, gamma, self.least_keep)
        fingerprint = f"{self.config()} {sizes} {data}{watched.fingerprint() if watched else ''}"
        path, count = Path(checkpoint) if checkpoint else None, self.epochs or epochs
        return _Run(classifier, optimiser, controller, watched, fingerprint, count, path)

    def _new_classifier(self, width: int, classes: int, bottleneck: int | None) -> MaskedClassifier:
        classifier = MaskedClassifier(
            width, classes, bottleneck=bottleneck, samples=self.samples, seed=self.seed
        )
        return classifier.to(self.history_.device)

    def _train(
        self, run: _Run, batches: Callable[[int], Iterable[Batch]], progress: Progress | None
    ) -> Self:
        run.resume()
        for epoch in range(len(run.history), run.epochs):
            if run.steps >= WARM_UP:
                last = run.history[-1]
                run.controller.update(last.confidence, last.accuracy)
            run.history.append(self._epoch(run, batches(epoch), epoch))
            run.save()
            if progress is not None:
                progress(epoch + 1, run.epochs)
        self.classifier = run.classifier.requires_grad_(False)
        self.history_ = torch.tensor(run.history, device=self.history_.device)
        if self.step:
            self._warn_of_failure(run)
        return self

    def _epoch(self, run: _Run, batches: Iterable[Batch], epoch: int) -> Epoch:
        device = self.history_.device
        # seeded by the epoch, so that a continued run takes the same steps
        random = torch.Generator(device).manual_seed(1_000_003 * self.seed + epoch)
        for group in run.optimiser.param_groups:
            group["lr"] = self.rate * (1 + math.cos(math.pi * epoch / run.epochs)) / 2
        run.classifier.keep_.fill_(run.controller.keep)
        sums = torch.zeros(4, device=device)
        for batch in batches:
            loss, logits = self._learn(run, batch, random)
            sums += _sums(logits.detach(), batch, loss.detach())
            run.steps += 1
        weight, loss_sum, confidence, correct = sums.tolist()
        if not weight:
            raise ValueError(f"the loader gave no labelled example in epoch {epoch + 1}")
        if not math.isfinite(loss_sum):
            raise ValueError(f"the loss became {loss_sum} in epoch {epoch + 1}: lower rate")
        seen = confidence / weight, correct / weight
        if run.watched is not None:
            seen = self._watch(run.classifier, run.watched)
        return Epoch(float(run.classifier.keep_), *seen, loss_sum / weight)

    def _learn(self, run: _Run, batch: Batch, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Take one step with new masks; return the loss, a weighted mean, and the logits."""
        masks = run.classifier.draw(random)
        logits = run.classifier(batch.features, masks)
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        loss = (losses * batch.weight).sum() / batch.weight.sum()
        run.optimiser.zero_grad()
        loss.backward()
        masked_step(run.optimiser, run.classifier, masks)
        return loss, logits

    @torch.no_grad()
    def _watch(
        self, classifier: Callable[[Tensor], Tensor], watched: LabelledFeatures
    ) -> tuple[float, float]:
        """Return confidence and accuracy of the predictions that this classifier would make."""
        sums = torch.zeros(4, device=self.history_.device)
        for batch in watched.chunks(sums.device):
            sums += _sums(classifier(batch.features), batch)
        weight, _, confidence, correct = sums.tolist()
        return confidence / weight, correct / weight

    def _warn_of_failure(self, run: _Run) -> None:
        last = run.history[-1]
        target = run.controller.gamma * last.accuracy
        if last.accuracy * self.classes < LEAST_LIFT:
            warn(
                f"the classifier has hardly learned: accuracy {last.accuracy:.3f}; train for more "
                "epochs, or raise rate"
            )
        elif run.watched is not None and last.accuracy == 1:
            warn(
                "every held-out example is predicted right, so over-confidence cannot be seen: "
                "hold out examples that the network was not trained on"
            )
        elif abs(last.confidence - target) > SETTLED:
            warn(
                f"the keep rate did not settle: confidence {last.confidence:.3f} should be "
                f"{target:.3f}, at a keep rate of {last.keep:.3f} in [{self.least_keep:g}, 1]; "
                "train for more epochs, or widen the bounds"
            )

    def forward(self, features: Tensor) -> Tensor:
        """Return logits ``(..., classes)`` of features ``(..., width)``, the largest of a row 0."""
        if not self.classes:
            raise RuntimeError("this MaCCal is not fitted: call fit(features, labels) first")
        check_place(self, self.history_.device, features, "features")
        logits: Tensor = self.classifier(features)
        return logits - logits.amax(-1, keepdim=True)

    @overload
    def predict_proba(self, features: Tensor) -> Tensor: ...
    @overload
    def predict_proba(self, features: ArrayLike) -> NDArray[Any]: ...
    def predict_proba(self, features: Values) -> Tensor | NDArray[Any]:
        """Return probabilities ``(..., classes)``: an array for an array, a tensor for a tensor."""
        inputs, home = checks.as_scores(features, "features"), self.history_.device
        if not self.classes or inputs.ndim == 0 or inputs.shape[-1] != self.width:
            self(torch.zeros(tuple(inputs.shape), device=home))  # raises the error that explains it
        rows = inputs.reshape(-1, self.width)
        probs = torch.zeros(len(rows), self.classes, device=home)
        with torch.no_grad():
            for start in range(0, len(rows), frozen.CHUNK):
                some = slice(start, start + frozen.CHUNK)
                part = rows[some]
                chunk = part if isinstance(part, Tensor) else on_device(as_tensor(part), home)
                checks.check_finite_rows(chunk.float(), np.arange(start, start + len(chunk)))
                probs[some] = self(chunk).softmax(-1)
        probs = probs.reshape(*inputs.shape[:-1], self.classes)
        return probs if isinstance(features, Tensor) else probs.cpu().numpy()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Take the sizes of the classifier and of the history from the state."""
        names = (f"{prefix}classifier.{layer}.weight" for layer in ("first", "second"))
        first, second = map(state_dict.get, names)
        if first is not None and second is not None:
            sizes = first.shape[1], second.shape[0], first.shape[0]
            self.classifier = self._new_classifier(*sizes).requires_grad_(False)
        history = state_dict.get(f"{prefix}history_")
        if history is not None:
            self.history_ = torch.empty_like(history, device=self.history_.device)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


def _sums(logits: Tensor, batch: Batch, loss: Tensor | float = 0.0) -> Tensor:
    """Return the sums of weight, loss, confidence and correct answers over a batch."""
    confidence, top = logits.softmax(-1).max(-1)
    weight, total = batch.weight, batch.weight.sum()
    correct = (weight * (top == batch.labels)).sum()
    return torch.stack([total, total * loss, (weight * confidence).sum(), correct])
