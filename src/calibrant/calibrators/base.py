"""What every calibrator is: a module that is fitted once and then maps logits to logits."""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from calibrant._core.checks import (
    FEW,
    IGNORED,
    LOOKED_AT,
    FloatArray,
    Logits,
    Values,
    as_float64,
    as_labels,
    as_scores,
    bad_row,
    check_finite_rows,
    check_some,
    spread,
    warn,
    warn_of_probs,
)
from calibrant._core.chunks import BLOCK, Examples, as_tensor, examples
from calibrant._core.logpartition import Records, tabulate
from calibrant._core.solve import Solution

if TYPE_CHECKING:
    from typing_extensions import Self


BOUNDS = (0.05, 20.0)
"""Temperatures that a fit may give. Data without an optimum (all right, all wrong) end there."""
ENOUGH = 5
"""Samples per parameter below which a fit warns."""


class Context(NamedTuple):
    """What may come with the logits of a fit."""

    features: Logits | None = None
    head: tuple[Any, Any] | None = None
    groups: NDArray[Any] | None = None


def _members(groups: Values, shape: tuple[int, ...]) -> NDArray[Any]:
    """Groups as a flat array; one value per row of labels serves all of the row."""
    given = groups.cpu().numpy() if isinstance(groups, Tensor) else np.asarray(groups)
    return spread(given, shape, "groups").reshape(-1)


class Calibrator(nn.Module):
    """A map from logits to calibrated logits that is learned from held-out predictions.

    ``fit`` learns it, calling the module applies it. Subclasses write ``_fit`` and
    ``_transform``, name their learned buffers (with a trailing underscore) in ``__init__`` by
    :meth:`_learned`, and declare what they guarantee.

    Attributes
    ----------
    keeps_argmax : bool
        The predicted class is never changed, by rounding neither.
    monotone : bool
        The order of all classes of a row is kept.
    needs_features : bool
        ``fit`` and ``forward`` want the features before the last layer.
    uses_features : bool
        ``fit`` looks at features where there are any.
    needs_head : bool
        ``fit`` wants the last layer too.
    solution_ : Solution or None
        How the search of the last fit ended.
    """

    keeps_argmax: bool = False
    monotone: bool = False
    needs_features: bool = False
    uses_features: bool = False
    needs_head: bool = False

    classes_: Tensor
    width_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.solution_: Solution | None = None
        self._learned(classes_=torch.tensor(0))
        if self.needs_features:
            self._learned(width_=torch.tensor(0))
        # as Python numbers, so that an exported graph does not depend on them
        self._classes = self._width = 0

    # ------------------------------------------------------------------ what a subclass writes

    def _fit(self, given: Examples, context: Context) -> None:
        raise NotImplementedError

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        """Map logits ``(..., classes)``, whose largest is 0, to calibrated ones.

        ``top`` ``(..., 1)`` was the largest before it was taken away.
        """
        raise NotImplementedError

    def size(self, classes: int) -> int:
        """Number of fitted parameters for a number of classes."""
        raise NotImplementedError

    @property
    def fits_records(self) -> bool:
        """Whether :class:`calibrant._core.logpartition.Records` suffice for a fit."""
        return False

    # ------------------------------------------------------------------------------ fit and use

    def fit(
        self,
        logits: Values,
        labels: Values,
        *,
        features: Values | None = None,
        head: tuple[Any, Any] | None = None,
        sample_weight: Values | None = None,
        groups: Values | None = None,
    ) -> Self:
        """Learn from held-out logits and labels; an earlier fit is forgotten.

        Parameters
        ----------
        logits : (..., classes), or (n,) log-odds of two classes
            Of examples that the model was not trained on. Masked classes are -inf.
        labels : (...) integers, -100 ignored
        features : (..., width), optional
            Inputs of the last layer, for methods that need them.
        head : (weight, bias), optional
            The last linear layer, for methods that need it.
        sample_weight : (...) or fewer leading dimensions, optional
            Weights of the examples; 0 leaves one out.
        groups : (...), optional
            Examples of one group (a document, a patient) stay together in cross-validation.

        Returns
        -------
        self
        """
        given = examples(logits, labels, sample_weight)
        warn_of_probs(given.logits, "if they are, fit on their logarithm")
        rows = as_labels(labels).shape
        inputs = None if features is None else as_scores(features, "features")
        self._check_features(inputs, rows)
        if self.needs_head and head is None:
            raise ValueError(
                f"{type(self).__name__} needs the last layer: pass head=(weight, bias), of shapes "
                "(classes, width) and (classes,); a prediction file has them under these names"
            )
        context = Context(inputs, head, None if groups is None else _members(groups, rows))
        known = given.labels[given.labels != IGNORED]
        self._warn_of_size(len(known), given.classes, _different(_first_rows(given.logits)))
        _warn_of_one_label(known)
        self._fit(given, context)
        self._fitted(1 if given.logits.ndim == 1 else given.classes)
        return self

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits ``(..., classes)``, the largest of each row 0, in float32 or wider."""
        self._check_input(logits)
        self._check_features(
            features, logits.shape if self._classes == 1 else logits.shape[:-1], self._width
        )
        wide = self._wide(logits)
        top = wide.amax(-1, keepdim=True)
        found = self._transform(wide - top, top, features)
        if self.keeps_argmax:
            # Rounding may level what was apart: a class below the top stays below it by an
            # amount that survives the softmax.
            rest = -2 * torch.finfo(wide.dtype).eps
            found = torch.where(wide < top, found.clamp(max=rest), 0)
        else:
            found = found - found.amax(-1, keepdim=True)
        return found[..., 1] - found[..., 0] if self._classes == 1 else found

    @overload
    def predict_proba(self, logits: Tensor, features: Values | None = None) -> Tensor: ...
    @overload
    def predict_proba(self, logits: ArrayLike, features: Values | None = None) -> NDArray[Any]: ...
    def predict_proba(
        self, logits: Values, features: Values | None = None
    ) -> Tensor | NDArray[Any]:
        """Calibrated probabilities ``(..., classes)``; of class 1 ``(...)`` for log-odds.

        NumPy in gives NumPy out, a tensor in gives a tensor out.
        """
        scores = self._scores(logits)
        with torch.no_grad():
            probs = self._probs(scores, self._inputs_beside(scores, features))
        return probs if isinstance(logits, Tensor) else probs.cpu().numpy()

    def _probs(self, scores: Tensor, features: Tensor | None) -> Tensor:
        """Probabilities of checked logits, some rows at a time, so that little is held besides."""
        one = self._classes == 1
        rows = scores.reshape(-1) if one else scores.reshape(-1, self._classes)
        step = max(1, BLOCK.get(scores.device.type, BLOCK["cpu"]) // self._classes)
        if len(rows) <= step:
            return self._block(scores, features)
        self._check_features(features, scores.shape if one else scores.shape[:-1], self._width)
        beside = None if features is None else features.reshape(-1, features.shape[-1])
        found = torch.empty_like(rows, dtype=torch.promote_types(scores.dtype, torch.float32))
        for start in range(0, len(rows), step):
            run = slice(start, start + step)
            found[run] = self._block(rows[run], None if beside is None else beside[run])
        return found.reshape(scores.shape)

    def _block(self, scores: Tensor, features: Tensor | None) -> Tensor:
        found = self(scores, features)
        return torch.sigmoid(found) if self._classes == 1 else torch.softmax(found, -1)

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as they can be written to JSON."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, and whether it is fitted."""
        defaults = inspect.signature(type(self)).parameters
        config = {k: v for k, v in self.config().items() if not isinstance(v, nn.Module)}
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
        said = [f"{k}={v!r}" for k, v in plain.items() if v != defaults[k].default]
        state = [f"classes={self._classes}"] if self._classes else ["not fitted"]
        return ", ".join([*said, *state])

    # --------------------------------------------------------------------------------- plumbing

    def _learned(self, **buffers: Any) -> None:
        """Set learned values: float32, so that every device can hold them."""
        for name, value in buffers.items():
            tensor = torch.as_tensor(value)
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            before = getattr(self, name, None)
            device = before.device if isinstance(before, Tensor) else tensor.device
            self.register_buffer(name, tensor.to(device))

    def _fitted(self, classes: int) -> None:
        self._learned(classes_=torch.tensor(classes))
        self._classes = classes

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Take the shapes of learned values from the file."""
        for name in self._buffers:
            if prefix + name in state_dict:
                self._learned(**{name: torch.empty_like(state_dict[prefix + name])})
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        self._classes = int(self.classes_)
        self._width = int(self.width_) if "width_" in self._buffers else 0

    def _labelled_features(self, given: Examples, context: Context) -> Tensor:
        """Features of the labelled rows of a fit, ``(n, width)`` float32; learns the width."""
        assert context.features is not None
        kept = np.flatnonzero(given.labels != IGNORED)
        check_some(len(kept))
        self._width = int(context.features.shape[-1])
        self._learned(width_=torch.tensor(self._width))
        rows = context.features.reshape(-1, self._width)
        chosen = as_tensor(rows[kept]).float()
        check_finite_rows(chosen, kept)
        return chosen

    def _inputs_beside(self, scores: Tensor, features: Values | None) -> Tensor | None:
        """Features as a finite tensor, for methods that need them."""
        if features is None or not self.needs_features:
            return None
        inputs = self._tensor(as_scores(features, "features"), scores.device)
        if inputs.ndim:
            check_finite_rows(inputs.reshape(-1, inputs.shape[-1]))
        return inputs

    def _scores(self, logits: Values) -> Tensor:
        """Logits as a tensor in which every row has a softmax."""
        scores = self._tensor(as_scores(logits))
        self._check_input(scores)
        top = scores if self._classes == 1 else scores.amax(-1)
        bad = torch.isnan(top) | torch.isposinf(top)
        bad = bad if self._classes == 1 else bad | torch.isneginf(top)
        if bad.any():
            at = int(bad.reshape(-1).nonzero()[0])
            row = scores.reshape(-1, 1 if self._classes == 1 else scores.shape[-1])[at]
            raise bad_row(row, 0, at)
        return scores

    def _wide(self, logits: Tensor) -> Tensor:
        """Logits of two classes or more, in float32 or wider."""
        wide = logits if logits.dtype.itemsize >= 4 else logits.float()
        return torch.stack([torch.zeros_like(wide), wide], -1) if self._classes == 1 else wide

    def _tensor(self, values: Values, device: Any = None) -> Tensor:
        """Values as a tensor; plain arrays are not copied, since nothing is written to them."""
        if isinstance(values, Tensor):
            return values.detach()
        array = np.asarray(values)
        plain = array.dtype in (np.float32, np.float64) and array.flags.carray
        tensor = torch.from_numpy(array) if plain else as_tensor(array)
        return tensor.to(device or self.classes_.device)

    def _check_input(self, logits: Tensor) -> None:
        if self._classes == 0:
            raise RuntimeError(
                f"this {type(self).__name__} is not fitted: call fit(logits, labels) first"
            )
        if self._classes > 1 and (logits.ndim == 0 or logits.shape[-1] != self._classes):
            came = logits.shape[-1] if logits.ndim else 1
            raise ValueError(
                f"fitted for {self._classes} classes, got {came}: logits must be "
                f"(..., {self._classes}), as in fit, got {tuple(logits.shape)}"
            )

    def _check_features(
        self, features: Logits | None, rows: tuple[int, ...], width: int = 0
    ) -> None:
        """Raise unless there are features for rows of a shape, where they are needed."""
        if not self.needs_features:
            return
        if features is None:
            raise ValueError(
                f"{type(self).__name__} needs features: pass features=, the inputs of the last "
                "layer, one row for each row of logits"
            )
        self._check_rows(features, rows, width)

    @staticmethod
    def _check_rows(features: Logits, rows: tuple[int, ...], width: int = 0) -> None:
        """Raise unless features have one row for each row of logits."""
        shape = tuple(features.shape)
        if not shape or shape[:-1] != tuple(rows) or shape[-1] != (width or max(shape[-1], 1)):
            wanted = f"(..., {width}), as in fit," if width else "(..., width)"
            raise ValueError(
                f"features must be {wanted} with one row for each row of logits, got {shape} for "
                f"rows of shape {tuple(rows)}"
            )

    def _warn_of_size(self, samples: int, classes: int, different: int | None) -> None:
        """Warn of few samples; ``different`` is how many of them are not the same as others."""
        size = self.size(classes)
        # one parameter is not led astray by copies
        counted = samples if different is None or size == 1 else different
        if counted < ENOUGH * size:
            remedy = "; a method with fewer parameters (ts has one) is safer" if size > 1 else ""
            same = f" ({counted:,} of the first are not alike)" if counted < samples else ""
            warn(
                f"{type(self).__name__} has {size:,} parameter{'s' * (size > 1)} for {samples:,} "
                f"samples{same}: it may fit their noise{remedy}"
            )


def _first_rows(logits: Logits) -> FloatArray:
    """Some of the first rows of logits ``(..., classes)``, or log-odds ``(n,)``."""
    if logits.ndim == 1:
        return as_float64(logits[:LOOKED_AT])[:, None]
    rows = max(FEW, min(LOOKED_AT, (1 << 17) // logits.shape[-1]))
    each = max(1, math.prod(logits.shape[1:-1]))  # tokens or pixels of one example
    return as_float64(logits[: -(-rows // each)]).reshape(-1, logits.shape[-1])[:rows]


def _different(rows: FloatArray) -> int | None:
    """How many different rows there are; None where most of them are."""
    different = len(np.unique(rows, axis=0))
    return different if len(rows) >= FEW and different < len(rows) / 2 else None


def _warn_of_one_label(labels: NDArray[Any]) -> None:
    if len(labels) >= FEW and (labels == labels[0]).all():
        warn(
            f"all {len(labels):,} labels are {labels[0]}: what is learned of one class may be "
            "wrong for the others"
        )


class Claims(NamedTuple):
    """What a fitted calibrator says about each sample of a table, each ``(n,)``."""

    confidence: FloatArray
    nll: FloatArray


class RecordsCalibrator(Calibrator):
    """A calibrator that the log-partition table suffices for, whatever the number of classes.

    Subclasses write ``_fit_records``, ``claims`` and ``_transform``.
    """

    keeps_argmax = True
    monotone = True

    @property
    def fits_records(self) -> bool:
        """Whether records suffice for a fit, so that shards need not be loaded whole."""
        return True

    def _fit_records(self, records: Records) -> None:
        raise NotImplementedError

    def _fit_grouped(self, records: Records, groups: NDArray[Any] | None) -> None:
        """Fit with a group for each record; only methods with folds have a use for them."""
        self._fit_records(records)

    def claims(self, records: Records) -> Claims:
        """Confidence and negative log-likelihood of each sample after calibration."""
        raise NotImplementedError

    def _fit(self, given: Examples, context: Context) -> None:
        groups = context.groups
        self._fit_grouped(
            tabulate(given), None if groups is None else groups[given.labels != IGNORED]
        )

    def fit_records(
        self, records: Records, *, groups: NDArray[Any] | None = None, one_logit: bool = False
    ) -> Self:
        """Learn from records, which a walk over any number of shards can collect.

        ``groups`` has one value per record, as in :meth:`fit`.
        """
        some = records.take(slice(LOOKED_AT))
        rows = np.stack([some.top, some.mean_gap, some.margin], axis=1)
        self._warn_of_size(len(records), records.classes, _different(rows))
        _warn_of_one_label(records.labels)
        self._fit_grouped(records, groups)
        self._fitted(1 if one_logit else records.classes)
        return self


class TemperatureCalibrator(RecordsCalibrator):
    """A calibrator that divides the logits of each row by a temperature of its own.

    Subclasses write ``_fit_records``, ``_temperature`` and ``_sharpness``.
    """

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        """Temperatures ``(..., 1)`` of logits ``(..., classes)`` whose largest is 0."""
        raise NotImplementedError

    def _sharpness(self, records: Records) -> float | FloatArray:
        """Inverse temperatures, one or ``(n,)``, of the samples of a table."""
        raise NotImplementedError

    def claims(self, records: Records) -> Claims:
        """Confidence and negative log-likelihood of each sample after calibration."""
        sharpness = self._sharpness(records)
        value = records.log_partition(sharpness).value
        return Claims(np.exp(-value), sharpness * records.own_gap + value)

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return logits / self._temperature(logits, top)

    @overload
    def temperature(self, logits: Tensor) -> Tensor: ...
    @overload
    def temperature(self, logits: ArrayLike) -> NDArray[Any]: ...
    def temperature(self, logits: Values) -> Tensor | NDArray[Any]:
        """Temperature of each row, ``(..., classes) -> (...)``.

        NumPy in gives NumPy out, a tensor in gives a tensor out.
        """
        wide = self._wide(self._scores(logits))
        top = wide.amax(-1, keepdim=True)
        with torch.no_grad():
            found = self._temperature(wide - top, top).expand_as(top)[..., 0]
        return found if isinstance(logits, Tensor) else found.cpu().numpy()
