"""Base classes of calibrators: modules that are fitted once and then map logits to logits."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from calibrant._core.checks import (
    IGNORED,
    LOOKED_AT,
    FloatArray,
    Logits,
    Values,
    as_labels,
    as_scores,
    bad_row,
    check_finite_rows,
    check_some,
    warn_of_probs,
    warnings_at_caller,
)
from calibrant._core.chunks import CHUNK_SIZE, Examples, as_tensor, examples as check_examples
from calibrant._core.logpartition import Records, tabulate
from calibrant._core.solve import Solution
from calibrant.calibrators.data_checks import (
    distinct_rows,
    first_rows,
    flat_groups,
    masked_row,
    warn_of_few_examples,
    warn_of_one_label,
)

if TYPE_CHECKING:
    from typing_extensions import Self

BOUNDS = (0.05, 20.0)
"""Range of fitted temperatures. Data without an optimum (all right, all wrong) end at a bound."""
FEW_VALUES = 5
"""Largest number of elements of a learned value that :meth:`Calibrator.learned` lists."""


class Context(NamedTuple):
    """Optional inputs of a fit, besides logits and labels."""

    features: Logits | None = None
    head: tuple[Any, Any] | None = None
    groups: NDArray[Any] | None = None


class Calibrator(nn.Module):
    """A map from logits to calibrated logits, learned from held-out predictions.

    ``fit`` learns it, calling the module applies it. A subclass writes ``_fit``, ``_transform``
    and ``size``, creates its learned buffers (names with a trailing underscore) in ``__init__``
    with ``_store``, and declares its properties as class attributes. One with a ``name`` is found
    by the registry and thus by the command line, the documentation and the common tests.

    A calibrator may hold others: as attributes, which makes them submodules that are saved and
    moved with it. Its ``_fit`` fits them with :meth:`fit_examples`, and its ``_transform`` or
    ``forward`` calls them.

    Attributes
    ----------
    name : str
        Name on the command line and in saved files; ``aliases`` are understood too.
    summary : str
        What it does, for the table of methods in the documentation.
    retired_options : dict
        Options of earlier releases, with the value that is now fixed: saved files may have them.
    keeps_argmax : bool
        The predicted class never changes, not even by rounding.
    monotone : bool
        The order of all classes of a row is kept.
    accepts_masked : bool
        Logits may be -inf.
    needs_features : bool
        ``fit`` and ``forward`` require features, the inputs of the last layer.
    uses_features : bool
        ``fit`` takes features into account if there are any.
    needs_head : bool
        ``fit`` requires the last layer.
    solution_ : Solution or None
        How the search of the last fit ended.
    learned_shapes : str
        Buffers whose shapes a fit decides, for the check of saved files: ``"edges_ cuts; levels_
        cuts+1"``. ``classes`` and ``width`` are the learned numbers, ``=`` is the size before a
        fit, other names stand for one size each; ``|`` separates alternatives.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str] = ""
    retired_options: ClassVar[dict[str, Any]] = {}
    keeps_argmax: bool = False
    monotone: bool = False
    accepts_masked: bool = True
    needs_features: bool = False
    uses_features: bool = False
    needs_head: bool = False
    learned_shapes: str = ""

    classes_: Tensor
    width_: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.solution_: Solution | None = None
        self._store(classes_=torch.tensor(0))
        if self.needs_features:
            self._store(width_=torch.tensor(0))
        # as Python numbers, so that an exported graph does not depend on them
        self._classes = self._width = 0

    # ------------------------------------------------------------------------- for subclasses

    def _fit(self, examples: Examples, context: Context) -> None:
        raise NotImplementedError

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        """Map logits ``(..., classes)``, shifted so that the largest is 0, to calibrated ones.

        ``top`` ``(..., 1)`` is the largest logit before the shift.
        """
        raise NotImplementedError

    def size(self, classes: int) -> int:
        """Number of fitted parameters for a number of classes."""
        raise NotImplementedError

    @property
    def fits_records(self) -> bool:
        """A fit needs only :class:`calibrant._core.logpartition.Records`, not the logits."""
        return False

    # --------------------------------------------------------------------------- fit and apply

    @property
    def classes(self) -> int:
        """Number of classes; 1 if fitted on log-odds ``(n,)``, 0 before a fit."""
        return self._classes

    @property
    def width(self) -> int:
        """Width of the features that are required; 0 if none are."""
        parts = (part for part in self.modules() if isinstance(part, Calibrator))
        return max(part._width for part in parts)

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
        """Learn from held-out logits and labels, and forget any earlier fit.

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
        with warnings_at_caller():
            examples = check_examples(logits, labels, sample_weight)
            warn_of_probs(examples.logits, "if they are, fit on their logarithm")
            shape = as_labels(labels).shape
            inputs = None if features is None else as_scores(features, "features")
            required = self.needs_features and not self.uses_features
            self._check_feature_rows(inputs, shape, required=required)
            if self.needs_head and head is None:
                raise ValueError(
                    f"{type(self).__name__} needs the last layer: pass head=(weight, bias), of "
                    "shapes (classes, width) and (classes,)"
                )
            known = examples.labels[examples.labels != IGNORED]
            distinct = distinct_rows(first_rows(examples.logits))
            self._warn_of_few(len(known), examples.classes, distinct)
            warn_of_one_label(known)
            members = None if groups is None else flat_groups(groups, shape)
            return self.fit_examples(examples, Context(inputs, head, members))

    def fit_examples(self, examples: Examples, context: Context | None = None) -> Self:
        """Learn from checked examples; calibrators that hold others fit them with this."""
        self._fit(examples, context or Context())
        self._set_classes(1 if examples.logits.ndim == 1 else examples.classes)
        return self

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits ``(..., classes)``, the largest of each row 0, in float32 or wider."""
        self.check_logits(logits)
        self.check_features(features, logits.shape if self._classes == 1 else logits.shape[:-1])
        wide = self._wide(logits)
        top = wide.amax(-1, keepdim=True)
        return self._finished(wide, top, self._transform(wide - top, top, features))

    def _finished(self, wide: Tensor, top: Tensor, result: Tensor) -> Tensor:
        """Calibrated logits whose largest is 0 and, where promised, at the argmax of ``wide``."""
        if self.keeps_argmax:
            # Rounding may level what was apart: a class below the top stays below it by an
            # amount that survives the softmax.
            below = -2 * torch.finfo(wide.dtype).eps
            result = torch.where(wide < top, result.clamp(max=below), 0)
        else:
            result = result - result.amax(-1, keepdim=True)
        return result[..., 1] - result[..., 0] if self._classes == 1 else result

    @overload
    def transform(self, logits: Tensor, features: Values | None = None) -> Tensor: ...
    @overload
    def transform(self, logits: ArrayLike, features: Values | None = None) -> NDArray[Any]: ...
    def transform(self, logits: Values, features: Values | None = None) -> Tensor | NDArray[Any]:
        """Calibrated logits, as those of ``forward``, after a check of all values.

        NumPy in gives NumPy out, a tensor in gives a tensor out.
        """
        scores = self._checked(logits)
        with torch.no_grad():
            result: Tensor = self(scores, self._checked_features(features, scores.device))
        return result if isinstance(logits, Tensor) else result.cpu().numpy()

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
        scores = self._checked(logits)
        with torch.no_grad():
            probs = self._probs(scores, self._checked_features(features, scores.device))
        return probs if isinstance(logits, Tensor) else probs.cpu().numpy()

    def check_logits(self, logits: Tensor) -> None:
        """Raise unless the calibrator is fitted, and for logits of this shape."""
        if self._classes == 0:
            raise RuntimeError(
                f"this {type(self).__name__} is not fitted: call fit(logits, labels) first"
            )
        if self._classes > 1 and (logits.ndim == 0 or logits.shape[-1] != self._classes):
            raise ValueError(
                f"fitted for {self._classes} classes, got {logits.shape[-1] if logits.ndim else 1}:"
                f" logits must be (..., {self._classes}), as in fit, got {tuple(logits.shape)}"
            )

    def check_features(self, features: Logits | None, rows: tuple[int, ...]) -> None:
        """Raise unless there are features, where needed, for logits with rows of a shape."""
        self._check_feature_rows(features, rows, self._width, required=self.needs_features)

    # --------------------------------------------------------------------------- what it learned

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as they can be written to JSON."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    def learned(self) -> dict[str, Any]:
        """Learned values of at most five numbers each, by name, as they can be written to JSON.

        >>> from calibrant.calibrators.scaling import TemperatureScaling
        >>> TemperatureScaling().learned()
        {'temperature': 1.0}
        """
        few = {
            name.rstrip("_"): value.tolist()
            for name, value in self.named_buffers()
            if value.numel() <= FEW_VALUES
        }
        return {name: value for name, value in few.items() if not name.endswith("classes")}

    def describe(self) -> str:
        """One sentence about the fit: classes, number of parameters, temperatures.

        >>> from calibrant.calibrators.scaling import TemperatureScaling
        >>> TemperatureScaling().fit([2.0, 1.0, -1.0, -0.5, -1.5], [1, 0, 0, 1, 0]).describe()
        'TemperatureScaling for one logit: 1 parameter, temperature 1.246'
        """
        kind = type(self).__name__
        if not self._classes:
            return f"{kind}, not fitted"
        size = self.size(max(self._classes, 2))  # one logit stands for two classes
        parts = [f"{size:,} parameter{'s' * (size != 1)}", *self._temperature_range()]
        of = "one logit" if self._classes == 1 else f"{self._classes:,} classes"
        return f"{kind} for {of}: {', '.join(parts)}"

    def _temperature_range(self) -> list[str]:
        """A phrase about the learned temperatures, where there are any."""
        values = dict(self.named_buffers())
        learned = values.get("temperature_", values.get("temperatures_"))
        if learned is None:
            return []
        if learned.numel() > 1:
            return [f"temperatures from {float(learned.min()):.4g} to {float(learned.max()):.4g}"]
        # 1 means that it is not in use, unless it is all there is
        alone = set(values) == {"classes_", "temperature_"}
        return [f"temperature {float(learned):.4g}"] if alone or float(learned) != 1 else []

    def extra_repr(self) -> str:
        """The arguments that differ from their defaults, and the number of classes."""
        defaults = inspect.signature(type(self)).parameters
        config = {k: v for k, v in self.config().items() if not isinstance(v, nn.Module)}
        plain = {k: tuple(v) if isinstance(v, list) else v for k, v in config.items()}
        changed = [f"{k}={v!r}" for k, v in plain.items() if v != defaults[k].default]
        return ", ".join([*changed, f"classes={self._classes}" if self._classes else "not fitted"])

    # --------------------------------------------------------------------------------- plumbing

    def _store(self, **buffers: Any) -> None:
        """Set learned values: float32, so that every device can hold them."""
        for name, value in buffers.items():
            tensor = torch.as_tensor(value)
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            before = getattr(self, name, None)
            device = before.device if isinstance(before, Tensor) else tensor.device
            self.register_buffer(name, tensor.to(device))

    def _set_classes(self, classes: int) -> None:
        self._store(classes_=torch.tensor(classes))
        self._classes = classes

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        """Take the shapes of learned values from the state."""
        for name in self._buffers:
            if prefix + name in state_dict:
                self._store(**{name: torch.empty_like(state_dict[prefix + name])})
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        self._classes = int(self.classes_)
        self._width = int(self.width_) if "width_" in self._buffers else 0

    def _labelled_features(self, examples: Examples, context: Context) -> Tensor:
        """Features of the labelled examples, ``(n, width)`` float32; stores the width."""
        assert context.features is not None
        kept = np.flatnonzero(examples.labels != IGNORED)
        check_some(len(kept))
        self._width = int(context.features.shape[-1])
        self._store(width_=torch.tensor(self._width))
        labelled = as_tensor(context.features.reshape(-1, self._width)[kept]).float()
        check_finite_rows(labelled, kept)
        return labelled

    def _checked(self, logits: Values) -> Tensor:
        """Logits as a tensor in which every row has a softmax."""
        scores = self._tensor(as_scores(logits))
        self.check_logits(scores)
        one = self._classes == 1
        top = scores if one else scores.amax(-1)
        bad = torch.isnan(top) | torch.isposinf(top)
        bad = bad if one else bad | torch.isneginf(top)
        if bad.any():
            at = int(bad.reshape(-1).nonzero()[0])
            raise bad_row(scores.reshape(-1, 1 if one else scores.shape[-1])[at], 0, at)
        if not self.accepts_masked and torch.isneginf(scores).any():
            rows = scores.reshape(-1, 1 if one else scores.shape[-1])
            raise masked_row(int(torch.isneginf(rows).any(-1).nonzero()[0]))
        return scores

    def _checked_features(self, features: Values | None, device: torch.device) -> Tensor | None:
        """Features as a finite tensor, for methods that need them."""
        if features is None or not self.needs_features:
            return None
        inputs = self._tensor(as_scores(features, "features"), device)
        if inputs.ndim:
            check_finite_rows(inputs.reshape(-1, inputs.shape[-1]))
        return inputs

    def _check_feature_rows(
        self, features: Logits | None, rows: tuple[int, ...], width: int = 0, *, required: bool
    ) -> None:
        if features is None:
            if required:
                raise ValueError(
                    f"{type(self).__name__} needs features: pass features=, the inputs of the last "
                    "layer, one row for each row of logits"
                )
            return
        if not (self.needs_features or self.uses_features):
            return
        shape = tuple(features.shape)
        if not shape or shape[:-1] != tuple(rows) or shape[-1] != (width or max(shape[-1], 1)):
            wanted = f"(..., {width}), as in fit," if width else "(..., width)"
            raise ValueError(
                f"features must be {wanted} with one row for each row of logits, got {shape} for "
                f"rows of shape {tuple(rows)}"
            )

    def _probs(self, scores: Tensor, features: Tensor | None) -> Tensor:
        """Probabilities of checked logits, some rows at a time to save memory."""
        one = self._classes == 1
        rows = scores.reshape(-1) if one else scores.reshape(-1, self._classes)
        step = max(1, CHUNK_SIZE.get(scores.device.type, CHUNK_SIZE["cpu"]) // self._classes)
        if len(rows) <= step:
            return self._probs_at_once(scores, features)
        self.check_features(features, scores.shape if one else scores.shape[:-1])
        flat = None if features is None else features.reshape(-1, features.shape[-1])
        probs = torch.empty_like(rows, dtype=torch.promote_types(scores.dtype, torch.float32))
        for start in range(0, len(rows), step):
            chunk = slice(start, start + step)
            probs[chunk] = self._probs_at_once(rows[chunk], None if flat is None else flat[chunk])
        return probs.reshape(scores.shape)

    def _probs_at_once(self, scores: Tensor, features: Tensor | None) -> Tensor:
        result = self(scores, features)
        return torch.sigmoid(result) if self._classes == 1 else torch.softmax(result, -1)

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

    def _warn_of_few(self, count: int, classes: int, distinct: int | None) -> None:
        warn_of_few_examples(type(self).__name__, self.size(classes), count, distinct)


class RecordPredictions(NamedTuple):
    """What a fitted calibrator predicts for each example of a table, each ``(n,)``."""

    confidence: FloatArray
    nll: FloatArray


class RecordsCalibrator(Calibrator):
    """A calibrator that is fitted on the log-partition table, whatever the number of classes.

    Subclasses write ``_fit_records``, ``predict_records`` and ``_transform``.
    """

    keeps_argmax = True
    monotone = True

    @property
    def fits_records(self) -> bool:
        """A fit needs only records, so that shards need not be loaded whole."""
        return True

    def _fit_records(self, records: Records) -> None:
        raise NotImplementedError

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        raise NotImplementedError

    def _fit(self, examples: Examples, context: Context) -> None:
        self._fit_records(tabulate(examples))

    def fit_records(
        self, records: Records, *, groups: NDArray[Any] | None = None, one_logit: bool = False
    ) -> Self:
        """Learn from records, which may be collected from any number of shards.

        ``groups`` has one value per record; only methods with folds use it. ``one_logit``: the
        records are those of log-odds ``(n,)``.
        """
        with warnings_at_caller():
            some = records.take(slice(LOOKED_AT))
            rows = np.stack([some.top, some.mean_gap, some.margin], axis=1)
            self._warn_of_few(len(records), records.classes, distinct_rows(rows))
            warn_of_one_label(records.labels)
            self._fit_records(records)
            self._set_classes(1 if one_logit else records.classes)
            return self


class TemperatureCalibrator(RecordsCalibrator):
    """A calibrator that divides the logits of each row by a temperature of its own.

    Subclasses write ``_fit_records``, ``_temperature`` and ``_sharpness``.
    """

    def _temperature(self, logits: Tensor, top: Tensor) -> Tensor:
        """Temperatures ``(..., 1)`` of logits ``(..., classes)`` whose largest is 0."""
        raise NotImplementedError

    def _sharpness(self, records: Records) -> float | FloatArray:
        """Inverse temperatures, one or ``(n,)``, of the examples of a table."""
        raise NotImplementedError

    def predict_records(self, records: Records) -> RecordPredictions:
        """Confidence and negative log-likelihood of each example after calibration."""
        sharpness = self._sharpness(records)
        value = records.log_partition(sharpness).value
        return RecordPredictions(np.exp(-value), sharpness * records.own_gap + value)

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
        wide = self._wide(self._checked(logits))
        top = wide.amax(-1, keepdim=True)
        with torch.no_grad():
            result = self._temperature(wide - top, top).expand_as(top)[..., 0]
        return result if isinstance(logits, Tensor) else result.cpu().numpy()

    def transform_with_temperature(self, logits: ArrayLike) -> tuple[NDArray[Any], NDArray[Any]]:
        """Calibrated logits as :meth:`transform` gives them, and the temperature of each row."""
        wide = self._wide(self._checked(logits))
        top = wide.amax(-1, keepdim=True)
        with torch.no_grad():
            temperature = self._temperature(wide - top, top)
            result = self._finished(wide, top, (wide - top) / temperature)
        return result.cpu().numpy(), temperature.expand_as(top)[..., 0].cpu().numpy()
