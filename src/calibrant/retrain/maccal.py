"""MaC-Cal: retrain the classifier under random masks, with a share that confidence controls."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import (
    IGNORED,
    IntArray,
    Values,
    as_scores,
    check_labels,
    check_whole,
    warn,
)
from calibrant._core.chunks import as_tensor
from calibrant._core.torch_models import digest
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.data_checks import check_finite_features
from calibrant.retrain.backbone import count_outputs, feature_batches, last_layer
from calibrant.retrain.feature_rows import BLOCK, Batch, Rows, as_rows, count_labels
from calibrant.retrain.masked_classifier import MaskedClassifier, Masks, masked_step

if TYPE_CHECKING:
    from typing_extensions import Self


ON_TRAINING = 0.95
"""gamma where confidence is compared on the training set, whose accuracy is inflated."""
HALVINGS, FARTHEST = 4, 0.1
"""How often the step of the control is halved at most, and how far q moves in an epoch."""
EPOCHS, STEPS = 20, 2000
"""Epochs by default, and the steps that small data are to get: then there are more epochs."""
WARM_UP = 100
"""Steps before the control begins: a head that has learned nothing yet is surer than it is right,
and would lose its weights before it learns."""
HARDLY = 1.5
"""How many times as often as by chance a head must be right to pass without a warning."""
SETTLED = 0.02
"""Largest gap between confidence and its target at the end that passes without a warning."""


# ---------------------------------------------------------------------------------- the control


@dataclass
class KeepRate:
    r"""The share of weights that a mask keeps, controlled by confidence and accuracy.

    .. math:: q \leftarrow \mathrm{clip}(q - \eta\,(\mathit{conf} - \gamma\,\mathit{acc}),
        \; q_\mathrm{least}, \; 1)

    Too much confidence: fewer weights. Whenever the gap changes its sign, :math:`\eta` is halved,
    down to a sixteenth; without that q swings about its goal for ever. Nor does q move by more than
    0.1 at a time.

    Parameters
    ----------
    keep : float
        q at the start.
    step : float
        :math:`\eta` at the start; with 0 the share stays.
    gamma : float
    least : float

    Examples
    --------
    >>> control = KeepRate(0.9, step=2.0, gamma=1.0, least=0.1)
    >>> round(control.update(confidence=0.97, accuracy=0.94), 6)
    0.84
    >>> round(control.update(confidence=0.90, accuracy=0.94), 6), control.step
    (0.88, 1.0)
    """

    keep: float
    step: float
    gamma: float
    least: float
    gap: float = 0.0
    halvings: int = 0

    def update(self, confidence: float, accuracy: float) -> float:
        """Take one step, and return the new share."""
        gap = confidence - self.gamma * accuracy
        if gap * self.gap < 0 and self.halvings < HALVINGS:
            self.step, self.halvings = self.step / 2, self.halvings + 1
        self.gap = gap
        change = min(max(-self.step * gap, -FARTHEST), FARTHEST)
        self.keep = min(max(self.keep + change, self.least), 1.0)
        return self.keep


class Epoch(NamedTuple):
    """What was seen in an epoch; confidence and accuracy are those that the control looks at."""

    keep: float
    confidence: float
    accuracy: float
    loss: float


# ----------------------------------------------------------------------------------- the method


@dataclass
class _Run:
    """A training run between two epochs."""

    head: MaskedClassifier
    optimiser: torch.optim.Optimizer
    control: KeepRate
    mark: str  # of the options and the data
    epochs: int
    steps: int = 0  # so far
    history: list[Epoch] = field(default_factory=list)

    def save(self, path: Path) -> None:
        state = {
            "mark": self.mark,
            "head": self.head.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "control": vars(self.control),
            "steps": self.steps,
            "history": [tuple(epoch) for epoch in self.history],
        }
        with replacing(path) as temporary:
            torch.save(state, temporary)

    def resume(self, path: Path) -> None:
        state = torch.load(path, map_location=self.head.keep_.device, weights_only=True)
        if state["mark"] != self.mark:
            raise ValueError(
                f"{path} is the checkpoint of a run with other data or options: name another file, "
                "or delete it to begin anew"
            )
        self.head.load_state_dict(state["head"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.control = KeepRate(**state["control"])
        self.steps = state["steps"]
        self.history = [Epoch(*epoch) for epoch in state["history"]]


class MaCCal(Calibrator):
    r"""Retrain the classifier of a network under random masks (Ni et al. 2026, MaC-Cal).

    The features stay as they are, the last layer is replaced by a :class:`MaskedClassifier`. For
    each batch every weight is kept with probability q; the others take no part in the forward pass
    and are not moved by the step. After each epoch :class:`KeepRate` changes q, so that confidence
    comes to gamma times the accuracy. What is not published (widths, rates, the update of q, the
    use of the weights afterwards) was chosen by measurements, see the page on MaC-Cal.

    Parameters
    ----------
    bottleneck : int, optional
        Units between the two layers; ``min(256, max(64, classes, width // 4))`` by default.
    epochs : int, optional
        By default 20, or as many as make 2000 steps of features in memory. q stays as it is for
        the first 100 steps.
    batch_size : int
    rate, decay : float
        Learning rate of Adam at the start, which falls to zero along a cosine, and weight decay.
    keep, least_keep : float
        The share q at the start, and the least that it may become.
    gamma : float, optional
        By default 1 with held-out examples, and 0.95 without, where the accuracy is that on the
        training set.
    step : float
        How far q moves for a gap between confidence and accuracy; 0 leaves it where it is.
    samples : int
        With 0, predictions are made in one pass, with all weights multiplied by q. Otherwise they
        are the mean over that many masks; the control then looks at that mean.
    seed : int
        Of the first weights, the order of the examples and the masks.

    Attributes
    ----------
    head : MaskedClassifier
    history_ : (epochs, 4) Tensor
        A row for each :class:`Epoch`; :attr:`history` has them by name.

    Notes
    -----
    Predicted classes are those of the new head, not of the old one. As every other calibrator it
    can be called with logits and features, behind a model or on a prediction file; the logits have
    no say.

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

    needs_features = True

    # What the ablations change; nobody else has a reason to.
    mask_forward = True
    mask_update = True
    watch_masked = False  # whether the control looks at held-out examples with masks

    history_: Tensor
    learned_shapes = (
        "history_ epochs =; head.first.weight units width; head.first.bias units; "
        "head.second.weight classes units; head.second.bias classes"
    )

    def __init__(
        self,
        *,
        bottleneck: int | None = None,
        epochs: int | None = None,
        batch_size: int = 256,
        rate: float = 1e-3,
        decay: float = 0.0,
        keep: float = 0.9,
        least_keep: float = 0.1,
        gamma: float | None = None,
        step: float = 4.0,
        samples: int = 0,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.bottleneck, self.epochs, self.batch_size = bottleneck, epochs, batch_size
        self.rate, self.decay = rate, decay
        self.keep, self.least_keep, self.gamma, self.step = keep, least_keep, gamma, step
        self.samples, self.seed = samples, seed
        self._check_options()
        # one of the right size takes its place in fit and load
        self.head = MaskedClassifier(1, 1)
        self._store(history_=torch.zeros(0, len(Epoch._fields)))

    def _check_options(self) -> None:
        for name, least in {"batch_size": 1, "samples": 0, "seed": 0}.items():
            check_whole(name, getattr(self, name), least)
        for name in ("bottleneck", "epochs"):
            if getattr(self, name) is not None:
                check_whole(name, getattr(self, name))
        within = {
            "rate": (self.rate, 0 < self.rate < math.inf, "above 0"),
            "decay": (self.decay, 0 <= self.decay < math.inf, "at least 0"),
            "step": (self.step, 0 <= self.step < math.inf, "at least 0"),
            "least_keep": (self.least_keep, 0 < self.least_keep <= 1, "above 0 and at most 1"),
            "keep": (
                self.keep,
                self.least_keep <= self.keep <= 1,
                f"from least_keep ({self.least_keep:g}) to 1",
            ),
            "gamma": (self.gamma, self.gamma is None or 0 < self.gamma <= 2, "None or in (0, 2]"),
        }
        for name, (value, fine, wanted) in within.items():
            if not fine:
                raise ValueError(f"{name} must be {wanted}, got {value!r}")

    @property
    def history(self) -> list[Epoch]:
        """What was seen in each epoch of the fit."""
        return [Epoch(*row) for row in self.history_.tolist()]

    def size(self, classes: int) -> int:
        """Number of weights of the head."""
        return sum(values.numel() for values in self.head.parameters())

    # ------------------------------------------------------------------------------------ fit

    def fit(  # type: ignore[override]  # features stand where others have logits
        self,
        features: Values,
        labels: Values,
        *,
        held_out: tuple[Values, Values] | float | None = None,
        classes: int | None = None,
        sample_weight: Values | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Self:
        """Train a new head on cached features; an earlier fit is forgotten.

        Parameters
        ----------
        features : (..., width)
            Inputs of the last layer, for the training set of the network. Half precision and
            memory-mapped arrays are converted a batch at a time.
        labels : (...) integers, -100 ignored
        held_out : (features, labels), or float, optional
            Examples for the control of q that the network was not trained on, such as its
            validation set; much the best choice. A share takes a part of the given examples, which
            is right only where the network has not seen those either. Without, the control
            compares confidence and accuracy on the training set, with masks.
        classes : int, optional
            By default the largest label and one.
        sample_weight : (...) or fewer leading dimensions, optional
            Weights of the examples; 0 leaves one out.
        checkpoint : path, optional
            Written after each epoch. A run that finds one goes on from it, and ends as it would
            have without the break.
        progress : callable, optional
            Called with (epochs done, epochs in all).

        Returns
        -------
        self
        """
        train = as_rows(features, labels, sample_weight)
        count = count_labels(train.labels[train.kept], classes)
        check_labels(train.labels, count)
        train, watched = self._divided(train, held_out, count)
        device = self.classes_.device

        def batches(epoch: int) -> Iterator[Batch]:
            order = np.random.default_rng((self.seed, epoch)).permutation(train.kept)
            for start in range(0, len(order), self.batch_size):
                yield train.batch(order[start : start + self.batch_size], device)

        mark = "".join(part.digest() for part in (train, watched) if part is not None)
        width, steps = int(train.features.shape[-1]), -(-len(train.kept) // self.batch_size)
        epochs = max(EPOCHS, -(-STEPS // steps))
        return self._train(batches, watched, (width, count), mark, epochs, checkpoint, progress)

    def fit_model(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        held_out: Iterable[Any] | None = None,
        name: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Self:
        """Train a new head on a frozen network and a loader, with what it does to the inputs.

        The network runs in ``eval`` mode and without gradients; it is the same afterwards, to
        the bit. :func:`replace_head` then puts the new head into it.

        Parameters
        ----------
        model : nn.Module
            With outputs as for :func:`calibrant.calibrated`.
        loader : iterable of batches
            It is gone through once an epoch, and may augment and shuffle. Batches are as for
            :func:`calibrant.collect`. The order is that of the loader, whatever the seed is.
        held_out : iterable of batches, optional
            A loader of examples that the network was not trained on, without augmentation, for
            the control of q. Their features are held in memory.
        name : str, optional
            The last layer, as for :func:`replace_head`.
        checkpoint, progress
            As for :meth:`fit`. A run that goes on is the same as one without a break where the
            loader gives the same batches for the same epoch.

        Returns
        -------
        self
        """
        classes = count_outputs(model, loader)
        layer = last_layer(model, classes, name)
        device = self.classes_.device

        def batches(_: int) -> Iterator[Batch]:
            for features, labels in feature_batches(model, loader, layer):
                if (labels != IGNORED).any():
                    rows = as_rows(features.float(), labels, None)
                    check_labels(rows.labels, classes)
                    yield rows.batch(rows.kept, device)

        watched = None
        if held_out is not None:
            found = list(feature_batches(model, held_out, layer))
            if not found:
                raise ValueError("held_out must have a batch at least, got none")
            given = (
                torch.cat([part.float().cpu() for part in parts])
                for parts in zip(*found, strict=True)
            )
            inputs, targets = given
            watched = as_rows(inputs, targets.long(), None, "held_out ")
            check_labels(watched.labels, classes)
        linear = model.get_submodule(layer)
        assert isinstance(linear, nn.Linear)
        sizes = linear.in_features, classes
        mark = f"{layer} {digest(model)} {'' if watched is None else watched.digest()}"
        return self._train(batches, watched, sizes, mark, EPOCHS, checkpoint, progress)

    def _divided(
        self, train: Rows, held_out: tuple[Values, Values] | float | None, classes: int
    ) -> tuple[Rows, Rows | None]:
        """Rows to learn from, and rows that the control looks at."""
        if held_out is None:
            return train, None
        if isinstance(held_out, (int, float)):
            if not 0 < held_out <= 0.5:
                raise ValueError(f"held_out must be a share in (0, 0.5], got {held_out}")
            slice_ = train.kept[share_of(train.labels[train.kept], held_out, self.seed)]
            if not len(slice_):
                raise ValueError(
                    f"held_out={held_out} leaves nothing of {len(train.kept)} examples: give more"
                )
            return train.without(slice_), train._replace(kept=slice_)
        if not isinstance(held_out, (tuple, list)) or len(held_out) != 2:
            raise TypeError(
                f"held_out must be (features, labels) or a share, got {type(held_out).__name__}"
            )
        watched = as_rows(*held_out, None, "held_out ")
        wanted, width = int(train.features.shape[-1]), int(watched.features.shape[-1])
        if wanted != width:
            raise ValueError(f"held_out features must be (..., {wanted}), got a width of {width}")
        check_labels(watched.labels, classes)
        return train, watched

    def _train(
        self,
        batches: Callable[[int], Iterable[Batch]],
        watched: Rows | None,
        sizes: tuple[int, int],
        mark: str,
        epochs: int,
        checkpoint: str | os.PathLike[str] | None,
        progress: Callable[[int, int], object] | None,
    ) -> Self:
        run = self._begun(sizes, watched is not None, mark, self.epochs or epochs)
        path = None if checkpoint is None else Path(checkpoint)
        if path is not None and path.exists():
            run.resume(path)
        for epoch in range(len(run.history), run.epochs):
            if run.steps >= WARM_UP:
                last = run.history[-1]
                run.control.update(last.confidence, last.accuracy)
            run.history.append(self._epoch(run, batches(epoch), watched, epoch))
            if path is not None:
                run.save(path)
            if progress is not None:
                progress(epoch + 1, run.epochs)
        self._ended(run, sizes, watched is not None)
        return self

    def _begun(self, sizes: tuple[int, int], held_out: bool, mark: str, epochs: int) -> _Run:
        width, classes = sizes
        head = self._new_head(width, classes, self.bottleneck)
        optimiser = torch.optim.Adam(head.parameters(), lr=self.rate, weight_decay=self.decay)
        gamma = self.gamma or (1.0 if held_out else ON_TRAINING)
        control = KeepRate(self.keep, self.step, gamma, self.least_keep)
        return _Run(head, optimiser, control, f"{self.config()} {sizes} {mark}", epochs)

    def _new_head(self, width: int, classes: int, bottleneck: int | None) -> MaskedClassifier:
        head = MaskedClassifier(
            width, classes, bottleneck=bottleneck, samples=self.samples, seed=self.seed
        )
        return head.to(self.classes_.device)

    def _epoch(
        self, run: _Run, batches: Iterable[Batch], watched: Rows | None, epoch: int
    ) -> Epoch:
        head = run.head
        # of the epoch alone, so that a run that goes on later takes the same steps
        random = torch.Generator(head.keep_.device).manual_seed(1_000_003 * self.seed + epoch)
        for group in run.optimiser.param_groups:
            group["lr"] = self.rate * (1 + math.cos(math.pi * epoch / run.epochs)) / 2
        head.keep_.fill_(run.control.keep)
        total = torch.zeros(4, device=head.keep_.device)  # weight, loss, confidence, right
        for batch in batches:
            masks = head.draw(random)
            loss, logits = self._loss(head, batch, masks if self.mask_forward else None, random)
            run.optimiser.zero_grad()
            loss.backward()
            if self.mask_update:
                masked_step(run.optimiser, head, masks)
            else:
                run.optimiser.step()
            total += _sums(logits.detach(), batch, loss.detach())
            run.steps += 1
        weight, lost, confidence, right = total.tolist()
        if not weight:
            raise ValueError(f"the loader gave no labelled example in epoch {epoch + 1}")
        if not math.isfinite(lost):
            raise ValueError(f"the loss became {lost} in epoch {epoch + 1}: lower rate")
        if watched is None:
            found = confidence / weight, right / weight
        else:
            found = self._looked_at(head, watched, random)
        return Epoch(float(head.keep_), *found, lost / weight)

    def _loss(
        self, head: MaskedClassifier, batch: Batch, masks: Masks | None, random: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Loss of a batch, a weighted mean, and its logits."""
        full = head.keep_.new_ones(())
        logits = head(batch.features, masks or (full, full))
        losses = F.cross_entropy(logits, batch.labels, reduction="none")
        return (losses * batch.weight).sum() / batch.weight.sum(), logits

    @torch.no_grad()
    def _looked_at(
        self, head: MaskedClassifier, watched: Rows, random: torch.Generator
    ) -> tuple[float, float]:
        """Confidence and accuracy of the predictions that the finished head would make."""
        total = torch.zeros(4, device=head.keep_.device)
        for batch in watched.blocks(head.keep_.device):
            logits = head(batch.features, head.draw(random) if self.watch_masked else None)
            total += _sums(logits, batch, total.new_zeros(()))
        weight, _, confidence, right = total.tolist()
        return confidence / weight, right / weight

    def _ended(self, run: _Run, sizes: tuple[int, int], held_out: bool) -> None:
        self.head = run.head.requires_grad_(False)
        self._width, classes = sizes
        self._store(width_=torch.tensor(self._width), history_=torch.tensor(run.history))
        self._set_classes(classes)
        if not self.step:
            return
        last = run.history[-1]
        target = run.control.gamma * last.accuracy
        if last.accuracy * classes < HARDLY:
            warn(
                f"the head has hardly learned: it is right for {100 * last.accuracy:.1f} % of the "
                "examples that the control looked at; train for more epochs, or raise rate"
            )
        elif held_out and last.accuracy == 1:
            warn(
                "every held-out example is predicted right, so they show no over-confidence: hold "
                "out examples that the network was not trained on"
            )
        elif abs(last.confidence - target) > SETTLED:
            warn(
                f"the keep-rate did not settle: confidence is {last.confidence:.3f} and should be "
                f"{target:.3f}, at a keep-rate of {last.keep:.3f} (least {self.least_keep:g}, most "
                "1); train for more epochs, or widen the bounds"
            )

    # ------------------------------------------------------------------------------------ use

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Logits ``(..., classes)`` of features, the largest of each row 0.

        Parameters
        ----------
        logits : (..., width)
            The features; or, where ``features`` are given, logits, which are passed over.
        features : (..., width), optional
        """
        inputs = logits if features is None else features
        if not self._classes:
            raise RuntimeError("this MaCCal is not fitted: call fit(features, labels) first")
        found: Tensor = self.head(inputs)
        return found - found.amax(-1, keepdim=True)

    @overload
    def predict_proba(self, logits: Tensor, features: Values | None = None) -> Tensor: ...
    @overload
    def predict_proba(self, logits: ArrayLike, features: Values | None = None) -> NDArray[Any]: ...
    def predict_proba(
        self, logits: Values, features: Values | None = None
    ) -> Tensor | NDArray[Any]:
        """Probabilities ``(..., classes)``; arguments are as for :meth:`forward`.

        NumPy in gives NumPy out, a tensor in gives a tensor out.
        """
        given = logits if features is None else features
        inputs = as_scores(given, "features")
        if not self._classes or inputs.ndim == 0 or inputs.shape[-1] != self._width:
            self(torch.zeros(tuple(inputs.shape)))  # says what is wrong
        rows = inputs.reshape(-1, self._width)
        found = torch.zeros(len(rows), self._classes, device=self.classes_.device)
        with torch.no_grad():
            for start in range(0, len(rows), BLOCK):
                block = as_tensor(rows[start : start + BLOCK]).to(found.device)
                check_finite_features(block)
                found[start : start + BLOCK] = self(block).softmax(-1)
        probs = found.reshape(*inputs.shape[:-1], self._classes)
        return probs.to(given.device) if isinstance(given, Tensor) else probs.cpu().numpy()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Make a head of the size that the file has."""
        first, second = (state_dict.get(f"{prefix}head.{n}.weight") for n in ("first", "second"))
        if first is not None and second is not None:
            sizes = first.shape[1], second.shape[0], first.shape[0]
            self.head = self._new_head(*sizes).requires_grad_(False)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


def share_of(labels: IntArray, share: float, seed: int) -> IntArray:
    """Places of a share of the examples, of each class alike, in order.

    >>> share_of(np.array([0, 0, 0, 0, 1, 1]), 0.5, seed=0)
    array([0, 2, 5])
    """
    random = np.random.default_rng(seed)
    found = []
    for name in np.unique(labels):
        members = random.permutation(np.flatnonzero(labels == name))
        found.append(members[: round(share * len(members))])
    return np.sort(np.concatenate(found))


def _sums(logits: Tensor, batch: Batch, loss: Tensor) -> Tensor:
    """Sums over a batch: weight, loss, confidence, right answers."""
    weight = batch.weight
    confidence, top = logits.softmax(-1).max(-1)
    whole = weight.sum()
    right = (weight * (top == batch.labels)).sum()
    return torch.stack([whole, whole * loss, (weight * confidence).sum(), right])
