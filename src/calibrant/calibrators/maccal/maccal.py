"""MaC-Cal: retrain the classifier on frozen features under random masks."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core import checks
from calibrant._core.checks import IGNORED, Features, Values
from calibrant._core.chunks import Examples
from calibrant._core.engines import silently
from calibrant._core.options import (
    Count,
    NonNegative,
    Positive,
    Seed,
    Share,
    above,
    at_least,
    at_most,
)
from calibrant._core.showing import frame
from calibrant._core.torch_models import device_of, digest
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.maccal import frozen
from calibrant.calibrators.maccal.frozen import (
    _as_labelled_features,
    _FeatureBatch,
    _LabelledFeatures,
)
from calibrant.calibrators.maccal.masked import Epoch, KeepRate, MaskedClassifier, _Training

if TYPE_CHECKING:
    import pandas as pd
    from typing_extensions import Self

_TRAINING_GAMMA = 0.95  # without held-out examples: accuracy on the training set is inflated
_HELD_OUT_SHARE = 0.2  # of a calibration set: these examples control q
_DEFAULT_EPOCHS, _MIN_STEPS = 20, 2000  # least number of each by default
_MAX_SAMPLES = 1000


class MaCCal(Calibrator):
    r"""Retrain the classifier of a network under random masks (Ni et al. 2026, MaC-Cal).

    The features are frozen and the last layer is replaced by a :class:`MaskedClassifier`. In each
    batch a weight is kept with probability q; the others take no part in the forward pass and are
    not changed by the step. After each epoch :class:`KeepRate` moves q, so that confidence
    approaches gamma times the accuracy. The page on MaC-Cal says how the defaults were chosen.

    It maps features. Called with logits and ``features=``, as every calibrator, it learns nothing
    from the logits but the number of classes, and controls q by a fifth of the examples. To train
    on the features of a training set, pass them in the place of the logits:
    ``fit(features, labels, held_out=(val_features, val_labels))``, then
    ``predict_proba(features)``.

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

    name = "maccal"
    aliases = ("mac_cal",)
    summary = "[retrains the last layer](maccal.md) on the features, under random masks"
    accepts_masked = False
    needs_features = True
    learned_shapes = (
        "history_ epochs =; classifier.first.weight units width; classifier.first.bias units; "
        "classifier.second.weight classes units; classifier.second.bias classes"
    )
    history_: Tensor

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
        samples: Annotated[int, at_least(0), at_most(_MAX_SAMPLES)] = 0,
        seed: Seed = 0,
    ) -> None:
        super().__init__()
        self.bottleneck, self.epochs, self.batch_size = bottleneck, epochs, batch_size
        self.keep, self.least_keep, self.gamma, self.step = keep, least_keep, gamma, step
        self.rate, self.decay, self.samples, self.seed = rate, decay, samples, seed
        if keep < least_keep:
            raise ValueError(f"keep must be at least least_keep ({least_keep:g}), got {keep!r}")
        self.classifier = MaskedClassifier(1, 1)  # replaced by one of the right size in a fit
        self._store(history_=torch.zeros(0, len(Epoch._fields)))

    @property
    def history(self) -> list[Epoch]:
        """Figures of each epoch of the fit."""
        return [Epoch(*row) for row in self.history_.tolist()]

    def size(self, classes: int) -> int:
        """Number of trained weights; none before a fit, which learns the number of features."""
        return sum(x.numel() for x in self.classifier.parameters()) if self._width else 0

    def describe(self) -> str:
        """Describe the classifier in a sentence."""
        if not self._classes:
            return "MaC-Cal, not fitted"
        return (
            f"masked classifier of {self._width} features for {self.classifier.classes} classes, "
            f"{self.size(self._classes):,} parameters, keep rate {self.history[-1].keep:.3f}"
        )

    def learned(self) -> dict[str, Any]:
        """Return the final keep rate."""
        return {"keep": float(self.classifier.keep_)}

    def to_frame(self) -> pd.DataFrame:
        """Return :attr:`history` as a frame, with a row for each epoch. Needs pandas."""
        return frame(epoch._asdict() for epoch in self.history)

    def fit(  # type: ignore[override]  # rows of features, which have no dimension of classes
        self,
        logits: Values,
        labels: Values | None = None,
        *,
        features: Features | None = None,
        head: tuple[Any, Any] | None = None,
        sample_weight: Values | None = None,
        groups: Values | None = None,
        held_out: tuple[Values, Values] | float | None = None,
        classes: int | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Train a new classifier; an earlier fit is forgotten.

        It trains, and stays, on the device of a tensor of features; an array has none, and leaves
        it where it is. :func:`calibrant.use` reports the epochs of a training set to a callback.

        Parameters
        ----------
        logits : (..., classes) or (..., width)
            Logits of held-out examples with ``features=``, as for other calibrators; or, without,
            the features of the training set: inputs of the last layer, converted one batch at a
            time.
        labels : (...) integers, -100 ignored
        features, head, groups
            As for other calibrators; the last layer is not used.
        sample_weight : (...) or fewer leading dimensions, optional
            Example weights; 0 excludes.
        held_out : (features, labels), or float, optional
            Examples that the network was not trained on, by which q is controlled: by far the best
            choice. A float holds out that share of the examples, which is valid only if the network
            has not seen them. By default q is controlled by the training set, with masks. This and
            the following go with the features of a training set, without ``features=``.
        classes : int, optional
            By default the largest label plus one.
        checkpoint : path, optional
            File that is written after each epoch, and from which a run continues if it exists.
        """
        if features is not None:
            if any(given is not None for given in (held_out, classes, checkpoint)):
                raise TypeError(
                    "held_out, classes and checkpoint go with the features of a training set: "
                    "pass fit(features, labels, held_out=...), without logits"
                )
            beside: dict[str, Any] = {"sample_weight": sample_weight, "groups": groups}
            return super().fit(logits, labels, features=features, head=head, **beside)
        if labels is None:
            raise TypeError("labels are missing: pass fit(features, labels)")
        train = _as_labelled_features(logits, labels, sample_weight)
        present = np.unique(train.labels[train.kept])
        if len(present) < 2:
            raise ValueError(f"labels must have at least two classes, got only {present[0]}")
        count = int(present[-1]) + 1 if classes is None else classes
        checks.check_labels(train.labels, count)
        train, watched = self._hold_out(train, held_out, count)
        if isinstance(train.features, Tensor):
            self.to(train.features.device)
        self._train_on(train, watched, count, checkpoint)
        return self._of_features(count)

    def _of_features(self, classes: int) -> Self:
        """Forget what earlier logits were: a fit on features had none."""
        self.class_names_ = None
        self.set_floor(0)
        self._set_classes(classes)
        return self

    def _fit(self, examples: Examples, context: Context) -> None:
        """Learn from four fifths of a calibration set, and control q by the others."""
        features = context.features
        assert features is not None
        weight = np.ones(examples.labels.size) if examples.weight is None else examples.weight
        kept = np.flatnonzero((examples.labels != IGNORED) & (weight > 0))
        checks.check_some(len(kept))
        rows = features.reshape(-1, features.shape[-1])
        known = _LabelledFeatures(rows, examples.labels, weight, kept)
        known.check_finite()
        strata = examples.labels[kept]
        if context.groups is None:
            part = kept[frozen._stratified_share(strata, _HELD_OUT_SHARE, self.seed)]
        else:
            names = np.unique(context.groups[kept])
            alike = np.zeros(len(names), dtype=np.int64)
            some = frozen._stratified_share(alike, _HELD_OUT_SHARE, self.seed)
            part = kept[np.isin(context.groups[kept], names[some])]
        rest = np.setdiff1d(kept, part)
        train, watched = known._replace(kept=rest), known._replace(kept=part)
        with silently():  # as in the fits of other calibrators
            if len(part) and len(rest):
                self._train_on(train, watched, examples.classes)
            else:  # too few to share
                self._train_on(known, None, examples.classes)

    def _warn_of_few(self, count: int, classes: int, distinct: int | None) -> None:
        """Do nothing: the end of the fit shows whether there were enough examples."""

    def _train_on(
        self,
        train: _LabelledFeatures,
        watched: _LabelledFeatures | None,
        classes: int,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> None:
        """Train on features that are all known, in an order that each epoch draws."""

        def batches(epoch: int) -> Iterator[_FeatureBatch]:
            order = np.random.default_rng((self.seed, epoch)).permutation(train.kept)
            for start in range(0, len(order), self.batch_size):
                yield train.batch(order[start : start + self.batch_size], self.device)

        sizes = int(train.features.shape[-1]), classes
        steps = -(-len(train.kept) // self.batch_size)
        epochs = max(_DEFAULT_EPOCHS, -(-_MIN_STEPS // steps))
        self._train(batches, sizes, train.fingerprint(), watched, epochs, checkpoint)

    def fit_model(
        self,
        model: nn.Module,
        loader: Iterable[Any],
        *,
        held_out: Iterable[Any] | None = None,
        name: str | None = None,
        checkpoint: str | os.PathLike[str] | None = None,
    ) -> Self:
        """Train a new classifier on the features that a frozen network computes, on its device.

        The network runs in ``eval`` mode and is not changed;
        :func:`~calibrant.calibrators.maccal.replace_head` then puts the new classifier into it.

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
            The last layer, as for :func:`~calibrant.calibrators.maccal.replace_head`.
        checkpoint
            As for :meth:`fit`.
        """
        classes = frozen._count_outputs(model, loader)
        layer = frozen._last_layer(model, classes, name)
        self.to(device_of(model, self.device))

        def batches(_: int) -> Iterator[_FeatureBatch]:
            for features, labels in frozen._feature_batches(model, loader, layer):
                if (labels != IGNORED).any():
                    data = _as_labelled_features(features, labels, classes=classes)
                    yield data.batch(data.kept, self.device)

        watched = None
        if held_out is not None:
            parts = list(zip(*frozen._feature_batches(model, held_out, layer), strict=True))
            if not parts:
                raise ValueError("held_out must have at least one batch, got none")
            inputs, targets = (torch.cat([values.cpu() for values in part]) for part in parts)
            watched = _as_labelled_features(inputs, targets, classes=classes, name="held_out ")
        sizes = int(model.get_submodule(layer).in_features), classes  # type: ignore[arg-type]
        data = f"{layer} {digest(model)} "
        self._train(batches, sizes, data, watched, _DEFAULT_EPOCHS, checkpoint)
        return self._of_features(classes)

    def _hold_out(
        self, train: _LabelledFeatures, held_out: tuple[Values, Values] | float | None, classes: int
    ) -> tuple[_LabelledFeatures, _LabelledFeatures | None]:
        """Return the examples to learn from and those that control q."""
        if held_out is None:
            return train, None
        if isinstance(held_out, (int, float)):
            if not 0 < held_out <= 0.5:
                raise ValueError(f"held_out must be a share in (0, 0.5], got {held_out}")
            kept = train.kept
            part = kept[frozen._stratified_share(train.labels[kept], held_out, self.seed)]
            if not len(part):
                raise ValueError(f"held_out={held_out} of {len(kept)} examples is none")
            return train._replace(kept=np.setdiff1d(kept, part)), train._replace(kept=part)
        if not isinstance(held_out, (tuple, list)) or len(held_out) != 2:
            kind = type(held_out).__name__
            raise TypeError(f"held_out must be (features, labels) or a share, got {kind}")
        watched = _as_labelled_features(*held_out, classes=classes, name="held_out ")
        wanted, width = int(train.features.shape[-1]), int(watched.features.shape[-1])
        if wanted != width:
            raise ValueError(f"held_out features must be (..., {wanted}), got a width of {width}")
        return train, watched

    def _new_classifier(self, width: int, classes: int, bottleneck: int | None) -> MaskedClassifier:
        classifier = MaskedClassifier(
            width, classes, bottleneck=bottleneck, samples=self.samples, seed=self.seed
        )
        return classifier.to(self.device)

    def _train(
        self,
        batches: Callable[[int], Iterable[_FeatureBatch]],
        sizes: tuple[int, int],
        data: str,
        watched: _LabelledFeatures | None,
        epochs: int,
        checkpoint: str | os.PathLike[str] | None,
    ) -> None:
        """Train on the batches of each epoch, of so many features and classes, and keep it."""
        gamma = self.gamma or (_TRAINING_GAMMA if watched is None else 1.0)
        training = _Training(
            self._new_classifier(*sizes, self.bottleneck),
            KeepRate(self.keep, self.step, gamma, self.least_keep),
            watched,
            rate=self.rate,
            decay=self.decay,
            seed=self.seed,
            epochs=self.epochs or epochs,
            fingerprint=f"{self.config()} {sizes} {data}{watched.fingerprint() if watched else ''}",
            checkpoint=Path(checkpoint) if checkpoint else None,
        )
        training.run(batches)
        self.classifier = training.classifier.requires_grad_(False)
        self._width = self.classifier.width
        self._store(history_=torch.tensor(training.history), width_=torch.tensor(self._width))
        if self.step:
            training.warn_of_failure()

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Logits ``(..., classes)`` of features, the largest of each row 0; see :meth:`fit`."""
        return super().forward(*self._both(logits, features))

    def transform(self, logits: Any, features: Features | None = None) -> Any:
        """Logits of checked features: an array for arrays, a tensor for tensors."""
        return super().transform(*self._both(logits, features))

    def predict_proba(  # type: ignore[override]  # as of fit
        self, logits: Any, features: Features | None = None
    ) -> Any:
        """Probabilities of checked features: an array for arrays, a tensor for tensors."""
        return super().predict_proba(*self._both(logits, features))

    def _both(self, logits: Any, features: Any) -> tuple[Any, Any]:
        """Logits, which say nothing, and features, which may have come in their place."""
        if features is not None or not self._classes:
            return logits, features
        features = checks.as_scores(logits, "features")
        rows = tuple(features.shape[:-1])
        shape = rows if self.one_logit else (*rows, self._classes)
        if isinstance(features, Tensor):
            return features.new_zeros(()).expand(shape), features
        return np.broadcast_to(np.float32(0), shape), features

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        result: Tensor = self.classifier(features)
        return result

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Take the sizes of the classifier and of the history from the state."""
        names = (f"{prefix}classifier.{layer}.weight" for layer in ("first", "second"))
        first, second = map(state_dict.get, names)
        if first is not None and second is not None:
            sizes = first.shape[1], second.shape[0], first.shape[0]
            self.classifier = self._new_classifier(*sizes).requires_grad_(False)
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
