"""Base classes of calibrators: modules that are fitted once and then map logits to logits."""

from __future__ import annotations

import copy
import inspect
import math
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeVar, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor, nn

from calibrant._core import checks
from calibrant._core.checks import (
    IGNORED,
    Features,
    FloatArray,
    IntArray,
    Logits,
    Values,
    as_scores,
    warn_of_copies,
)
from calibrant._core.chunks import (
    EstimandChoice,
    Examples,
    as_tensor,
    examples as check_examples,
    full_precision,
    has_float64,
    in_blocks,
    mask_gap,
    on_device,
    rounds,
    with_masks,
    worth_blocks,
)
from calibrant._core.class_names import (
    as_array,
    class_names_of,
    in_order,
    kept_names,
    without_frames,
)
from calibrant._core.options import check_constructor
from calibrant._core.showing import as_html
from calibrant._core.solve import Solution
from calibrant.calibrators import description, fit_inputs, online
from calibrant.calibrators.fit_inputs import Passes, watched
from calibrant.calibrators.logpartition import Records, tabulate

if TYPE_CHECKING:
    from typing_extensions import Self

BOUNDS = (0.05, 20.0)
"""Range of fitted temperatures. Data without an optimum (all right, all wrong) end at a bound."""
PASS_LOGARITHM = "if they are, pass their logarithm"
"""Remedy where predictions get what look like probabilities."""
C = TypeVar("C", bound="Calibrator")


def feature_rows(features: Any, rows: Any = None) -> Any:
    """Return rows of features, which may be a mapping of arrays; all of them for None."""
    if rows is None or features is None:
        return features
    if isinstance(features, Mapping):
        return {name: as_array(values)[rows] for name, values in features.items()}
    return as_scores(features, "features")[rows]


class Context(NamedTuple):
    """Optional inputs of a fit, besides logits and labels."""

    features: Logits | None = None
    head: tuple[Any, Any] | None = None
    groups: NDArray[Any] | None = None
    records: Records | None = None  # the table of the examples, where it is known already
    fitted: list[Calibrator] | None = None  # calibrators that were fitted on the same examples

    def table(self, examples: Examples) -> Records:
        """Return the table of the examples."""
        return tabulate(examples) if self.records is None else self.records

    def part(self, new: C, examples: Examples) -> C:
        """Fit a calibrator, unless one like it is known to be fitted on the same examples."""
        for known in self.fitted or ():
            if type(known) is type(new) and known.config() == new.config():
                return copy.deepcopy(known)
        new.fit_examples(examples, self)
        if self.fitted is not None:
            self.fitted.append(new)
        return new


class Calibrator(nn.Module):
    """A map from logits to calibrated logits, learned from held-out predictions.

    ``fit`` learns it, calling the module applies it. A subclass writes ``_fit``, ``_transform``
    and ``size`` (or ``parameter_count``), creates its learned buffers (names with a trailing
    underscore) in ``__init__`` with ``_store``, and declares its properties as class attributes.
    One with a ``name`` is found by the registry. Calibrators that it holds are attributes, which
    it fits with :meth:`fit_examples`.

    Attributes
    ----------
    name, aliases : str and tuple of str
        Names on the command line and in saved files.
    summary : str
        A line for the table of methods in the documentation.
    part_of_auto : bool
        Made for ``auto``: its name is understood, and listed among the parts of ``auto``.
    parameter_count : int or None
        Number of fitted parameters, where it does not depend on classes or options.
    keeps_argmax, monotone : bool
        The predicted class, or the order of all classes of a row, never changes.
    accepts_masked : bool
        Logits may be -inf.
    needs_features, uses_features, needs_head : bool
        ``fit`` requires features, or takes them if there are any, or requires the last layer.
    two_classes_only : bool
        More classes are refused.
    multilabel : bool
        Columns are tags, with a label each; ``classes`` is their number.
    fits_records : bool
        A fit needs only :class:`calibrant.calibrators.logpartition.Records`, not the logits.
    fits_passes : bool
        A fit on a sample can be refined by sums over all examples, which need not fit into memory.
    uses_logits : bool
        If ``fits_records``: a fit on the logits themselves can do more, if there is room for them.
    class_names_ : tuple of str, or None
        Names of the classes in the order of the fit, if the logits were a data frame or a file with
        names. Data frames and files with the names in another order are read in this one.
    recent_ : Recent or None
        The examples that :meth:`update` remembers.
    solution_ : Solution or None
        The result of the search of the last fit.
    floor_ : scalar Tensor
        Smaller probabilities count as this, after a fit on probabilities; 0 after one on logits.
    learned_shapes : str
        Buffers whose shapes a fit decides, for the check of saved files: ``"edges_ cuts; levels_
        cuts+1"``. ``classes`` and ``width`` are the learned numbers, ``=`` is the size before a
        fit, other names stand for one size each; ``|`` separates alternatives.
    positive : tuple of str
        Buffers that every fit makes positive, for the same check.
    """

    name: ClassVar[str] = ""
    aliases: ClassVar[tuple[str, ...]] = ()
    summary: ClassVar[str] = ""
    part_of_auto: ClassVar[bool] = False
    parameter_count: ClassVar[int | None] = None
    keeps_argmax: bool = False
    monotone: bool = False
    accepts_masked: bool = True
    needs_features: bool = False
    uses_features: bool = False
    needs_head: bool = False
    two_classes_only: bool = False
    multilabel: bool = False
    fits_records: bool = False
    fits_passes: bool = False
    uses_logits: bool = False
    learned_shapes: str = ""
    positive: tuple[str, ...] = ("temperature_", "temperatures_", "rest_temperature_")
    classes_: Tensor
    floor_: Tensor
    width_: Tensor

    if TYPE_CHECKING:  # learned values, which `_store` creates, are tensors

        def __getattr__(self, name: str) -> Tensor: ...

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        check_constructor(cls)

    def __init__(self) -> None:
        super().__init__()
        self.solution_: Solution | None = None
        self.class_names_: tuple[str, ...] | None = None
        self.recent_: online.Recent | None = None
        self._store(classes_=torch.tensor(0), floor_=0.0)
        if self.needs_features:
            self._store(width_=torch.tensor(0))
        # as Python numbers, so that an exported graph does not depend on them
        self._classes = self._width = 0
        self._floor = 0.0

    # ---------------------------------------------------------------------- what a method writes

    def _fit(self, examples: Examples, context: Context) -> None:
        raise NotImplementedError

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        """Calibrated logits, of logits less the ``top`` ``(..., 1)`` of their row."""
        raise NotImplementedError

    def size(self, classes: int) -> int:
        """Number of fitted parameters for a number of classes."""
        if self.parameter_count is None:
            name = type(self).__name__
            raise NotImplementedError(f"{name} must set parameter_count or define size(classes)")
        return self.parameter_count

    def effective_size(self, classes: int) -> int:
        """Number of free parameters that need as many examples; a fit on less than five each warns.

        It is smaller than ``size`` where penalties hold parameters back.
        """
        return self.size(classes)

    def refine(self, passes: Passes) -> None:
        """Learn from all examples, after a fit on some of them, if it ``fits_passes``."""
        raise NotImplementedError

    def left_out(self) -> list[str]:
        """Sentences about clear gains that the last fit left out."""
        return []

    # ---------------------------------------------------------------------------- what it is for

    @property
    def classes(self) -> int:
        """Number of classes; 1 if fitted on log-odds ``(n,)``, 0 before a fit."""
        return self._classes

    @property
    def one_logit(self) -> bool:
        """True if fitted on log-odds ``(n,)``, each of which stands for two classes."""
        return self._classes == 1 and not self.multilabel

    @property
    def width(self) -> int:
        """Width of the features that are required; 0 if none are."""
        return max(part._width for part in self.modules() if isinstance(part, Calibrator))

    def estimand_for(self, choice: EstimandChoice) -> EstimandChoice:
        """Return the estimand of its predictions for the caller's choice, or raise.

        Tags are always ``"multilabel"``, and nothing else is.
        """
        if self.multilabel and choice in ("auto", "multilabel"):
            return "multilabel"
        if self.multilabel or choice == "multilabel":
            name = type(self).__name__
            kind = "tags" if self.multilabel else "exclusive classes"
            raise ValueError(
                f'{name} is for {kind}, got estimand="{choice}": methods for tags are in '
                "TAG_CALIBRATORS, and their estimand is multilabel"
            )
        return choice

    def refuse_tags(self, user: str) -> None:
        """Raise if it is for tags, where a ``user`` of it wants exclusive classes."""
        if self.multilabel:
            name = type(self).__name__
            raise ValueError(
                f"{user} needs a calibrator for exclusive classes, {name} is for tags: treat one "
                "tag at a time, as log-odds (n,)"
            )

    @property
    def input_columns(self) -> tuple[str, ...]:
        """Columns of a prediction file that it reads beside the logits."""
        return ("features",) if self.needs_features else ()

    def input_features(self, columns: Mapping[str, Any], rows: Any = None) -> Features | None:
        """Return its ``features=`` for arrays by name, among which its input columns are.

        ``rows`` selects some of the examples, by a mask or an index.
        """
        return feature_rows(columns["features"], rows) if self.needs_features else None

    def encoded(self, features: Features) -> Logits:
        """Return features as the numbers ``(..., width)`` that calling the module takes."""
        if isinstance(features, Mapping):
            name = type(self).__name__
            raise TypeError(f"features of {name} must be numbers (..., width), got a mapping")
        return as_scores(features, "features")

    # --------------------------------------------------------------------------------------- fit

    def fit(
        self,
        logits: Values,
        labels: Values | None = None,
        *,
        features: Features | None = None,
        head: tuple[Any, Any] | None = None,
        sample_weight: Values | None = None,
        groups: Values | None = None,
        class_dim: int | None = None,
        ignore_index: int | None = None,
    ) -> Self:
        """Learn from held-out logits and labels, and forget any earlier fit.

        Parameters
        ----------
        logits : (..., classes), or (n,) log-odds of two classes
            Of examples that the model was not trained on. Masked classes are -inf.
        labels : (...) integers, -100 ignored
        features, head : (..., width) and (weight, bias), optional
            Inputs of the last linear layer, and the layer, for methods that need them.
        sample_weight : (...) or fewer leading dimensions, optional
            Example weights; 0 excludes. Only their ratios matter.
        groups : (...), optional
            Examples of one group (a document, a patient) stay together in cross-validation.
        class_dim, ignore_index : int, optional
            Dimension of the classes where it is not the last, as 1 for images ``(n, classes,
            height, width)``, and a label of ignored examples beside -100, such as 255.
        """
        if labels is None:
            remedy = "pass fit(logits, labels)"
            if not isinstance(self, Calibrator):  # the first array took its place
                remedy = "fit was called on a class, as in TemperatureScaling.fit(logits, labels); "
                remedy += "create an object first: TemperatureScaling().fit(logits, labels)"
            raise TypeError(f"labels are missing: {remedy}")
        with checks.warnings_at_caller(), full_precision():
            self.class_names_ = kept_names(class_names_of(logits))
            labels, logits = without_frames(labels, logits)
            logits = checks.classes_last(logits, class_dim)
            labels = checks.with_ignored(labels, ignore_index)
            estimand: EstimandChoice = "multilabel" if self.multilabel else "top_label"
            examples = check_examples(logits, labels, sample_weight, estimand).scale_free()
            if not self.multilabel:  # tags may add up to anything
                remedy = 'if they are, calibrant.fit({"probs": ..., "labels": ...}) takes them'
                checks.warn_of_probs(examples.logits, remedy)
            shape = checks.as_labels(labels).shape
            inputs = None
            if features is not None:
                inputs = self._features_of_fit(features, labels, sample_weight)
            self.check_features(inputs, shape, fitting=True)
            if self.needs_head and head is None:
                name = type(self).__name__
                raise ValueError(
                    f"{name} needs the last layer: pass head=(weight, bias), of shapes "
                    "(classes, width) and (classes,)"
                )
            members = None
            if groups is not None:  # one value for a row of labels serves all of the row
                members = checks.spread(checks.as_keys(groups), shape, "groups").reshape(-1)
            self._warn_of_examples(examples, grouped=groups is not None)
            self.set_floor(0)
            with watched(self, examples, inputs):
                return self.fit_examples(examples, Context(inputs, head, members))

    update = online.update

    def _warn_of_examples(self, examples: Examples, *, grouped: bool) -> None:
        """Warn of few examples, and of copies unless groups tell them."""
        count = int((examples.labels != IGNORED).sum())
        if self.multilabel:  # labels of one row of tags are several
            self._warn_of_few(count, examples.columns, None)
            return
        distinct = fit_inputs._distinct_rows(fit_inputs._first_rows(examples.logits))
        self._warn_of_few(count, examples.columns, distinct)
        if not grouped:
            warn_of_copies(examples.logits, examples.labels)

    def _features_of_fit(
        self, features: Features, labels: Values, sample_weight: Values | None
    ) -> Logits:
        """Return features as numbers; a method may learn first how they become these."""
        return self.encoded(features)

    def fit_examples(self, examples: Examples, context: Context | None = None) -> Self:
        """Learn from checked examples; calibrators that hold others fit them with this.

        It ends on the device of the logits; arrays have none, and leave it where it is.
        """
        logits = examples.logits
        home = logits.device if isinstance(logits, Tensor) else self.device
        if isinstance(logits, Tensor) and not has_float64(home):  # in which all fits compute
            examples = examples._replace(logits=logits.cpu())
        self.to(examples.device)
        try:
            self._fit(examples, context or Context())
            self._set_classes(1 if logits.ndim == 1 else examples.columns)
        finally:
            self.to(home)
        return self

    def set_floor(self, floor: float) -> None:
        """Let probabilities count as at least ``floor``, as in a fit on them; 0 for logits."""
        for part in self.modules():
            if isinstance(part, Calibrator):
                part._store(floor_=float(floor))
                part._floor = float(part.floor_)

    # -------------------------------------------------------------------------------------- call

    def forward(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits ``(..., classes)``, the largest of each row 0, in float32 or wider."""
        if rounds():  # asked first, so that exported graphs know nothing of it
            with full_precision():
                return self.forward(logits, features)
        self.check_logits(logits)
        self.check_features(features, logits.shape if self._classes == 1 else logits.shape[:-1])
        if features is not None and features.device != logits.device:
            features = features.to(logits.device)
        if worth_blocks(logits, features, self.parameters()):
            return in_blocks(self._whole, logits, features, one_logit=self.one_logit)
        return self._whole(logits, features)

    def _whole(self, logits: Tensor, features: Tensor | None) -> Tensor:
        return self._narrow(self._calibrated(self._wide(logits), features))

    def _calibrated(self, wide: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits ``(..., classes)`` of such logits, of two classes for one logit."""
        top = wide.amax(-1, keepdim=True)
        return self._finished(wide, top, self._transform(wide - top, top, features))

    def _on_top_of(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Calibrated logits of logits ``(..., classes)`` whose largest is 0, as results are."""
        level = torch.zeros_like(logits[..., :1])
        return self._finished(logits, level, self._transform(logits, level, features))

    def _finished(self, wide: Tensor, top: Tensor, result: Tensor) -> Tensor:
        """Calibrated logits whose largest is 0 and, where guaranteed, at the argmax of ``wide``."""
        if self.keeps_argmax:
            # A class below the top stays below it by an amount that survives the softmax.
            below = -2 * torch.finfo(wide.dtype).eps
            return torch.where(wide < top, result.clamp(max=below), 0)
        return result - result.amax(-1, keepdim=True)

    def _wide(self, logits: Tensor) -> Tensor:
        """Logits of two classes or more, in float32 or wider, and -inf where they are masked.

        With a floor nothing is masked, and no probability is smaller.
        """
        return self._raised(with_masks(self._pairs(logits), mask_gap(logits)))

    def _pairs(self, logits: Tensor) -> Tensor:
        """Logits of two classes or more, in float32 or wider."""
        wide = logits if logits.dtype.itemsize >= 4 else logits.float()
        return torch.stack([torch.zeros_like(wide), wide], -1) if self._classes == 1 else wide

    def _raised(self, wide: Tensor) -> Tensor:
        """Logits of probabilities that are not below the floor, if there is one."""
        if not self._floor:
            return wide
        least = wide.logsumexp(-1, keepdim=True) + math.log(self._floor)
        return torch.maximum(wide, least)  # the others stay, bit by bit, and so do near ties

    def _narrow(self, logits: Tensor) -> Tensor:
        """Log-odds of logits of two classes, for a fit on one logit."""
        return logits[..., 1] - logits[..., 0] if self._classes == 1 else logits

    def log_probs(self, logits: Tensor, features: Tensor | None = None) -> Tensor:
        """Logarithms of calibrated probabilities ``(..., classes)``, of two for one logit."""
        result = self(logits, features if self.needs_features else None)
        return self._pairs(result).log_softmax(-1)

    # -------------------------------------------------------- predictions for arrays and tensors

    @overload
    def transform(self, logits: Tensor, features: Features | None = None) -> Tensor: ...
    @overload
    def transform(self, logits: ArrayLike, features: Features | None = None) -> NDArray[Any]: ...
    def transform(self, logits: Values, features: Features | None = None) -> Tensor | NDArray[Any]:
        """Calibrated logits of checked values: an array for arrays, a tensor for a tensor."""
        return self._predicted(self, logits, features)

    @overload
    def predict_proba(
        self, logits: Tensor, features: Features | None = None, *, class_dim: int | None = None
    ) -> Tensor: ...
    @overload
    def predict_proba(
        self, logits: ArrayLike, features: Features | None = None, *, class_dim: int | None = None
    ) -> NDArray[Any]: ...
    def predict_proba(
        self, logits: Values, features: Features | None = None, *, class_dim: int | None = None
    ) -> Tensor | NDArray[Any]:
        """Calibrated probabilities, of the form of the logits; of class 1 for log-odds ``(n,)``.

        Their columns have the order of those of the logits. ``class_dim`` is the dimension of the
        classes where it is not the last.
        """
        if class_dim is None:
            return self._predicted(self._probs, logits, features)
        last: Any = checks.classes_last(logits, class_dim)
        probs = self._predicted(self._probs, last, features)
        if isinstance(probs, Tensor):
            return probs.movedim(-1, class_dim)
        return np.moveaxis(probs, -1, class_dim)

    @overload
    def predict(
        self, logits: Tensor, features: Features | None = None, *, class_dim: int | None = None
    ) -> Tensor: ...
    @overload
    def predict(
        self, logits: ArrayLike, features: Features | None = None, *, class_dim: int | None = None
    ) -> NDArray[Any]: ...
    def predict(
        self, logits: Values, features: Features | None = None, *, class_dim: int | None = None
    ) -> Tensor | NDArray[Any]:
        """The most probable class of each row, as a whole number; of tags, a boolean for each.

        Of classes with equal probabilities it is the first; of log-odds ``(n,)`` it is class 1, and
        a tag is True, where the probability is above 0.5. An array for arrays, a tensor for a
        tensor.
        """
        last: Any = checks.classes_last(logits, class_dim)
        probs: Any = self.predict_proba(last, features)
        if self.multilabel or self.one_logit:
            above: Tensor | NDArray[Any] = probs > 0.5
            return above if self.multilabel else above + 0
        classes: Tensor | NDArray[Any] = probs.argmax(-1)
        return classes

    def probs_of_classes(self, logits: Logits, features: Logits | None = None) -> FloatArray:
        """Calibrated probabilities ``(n, classes)`` of logits of any form, in float64."""
        scores = self._checked(logits).to(self.classes_.device)
        with torch.no_grad():
            probs = self._probs(scores, self._checked_features(features, scores.device))
        exact = checks.as_float64(probs)
        return np.stack([1 - exact, exact], -1) if self.one_logit else exact

    def _probs(self, scores: Tensor, features: Tensor | None) -> Tensor:
        """Probabilities of checked logits, some rows at a time to save memory."""
        one = self._classes == 1
        self.check_features(features, scores.shape if one else scores.shape[:-1])

        def probs(rows: Tensor, inputs: Tensor | None) -> Tensor:
            result: Tensor = self(rows, inputs)
            return result.sigmoid() if one else result.softmax(-1)

        return in_blocks(probs, scores, features, one_logit=self.one_logit)

    def _predicted(
        self, call: Callable[..., Tensor], logits: Values, features: Features | None
    ) -> Tensor | NDArray[Any]:
        """Call with checked logits; return a tensor for a tensor, and an array otherwise."""
        values, places = in_order(logits, self.class_names_)
        if not self.multilabel:
            checks.warn_of_probs(as_scores(values), PASS_LOGARITHM, checks.MANY_ODDS)
        scores = self._checked(values)
        with torch.no_grad():
            result = call(scores, self._checked_features(features, scores.device))
        if isinstance(logits, Tensor):
            return result
        array: NDArray[Any] = result.cpu().numpy()
        return array if places is None else array[..., np.argsort(places)]

    # ------------------------------------------------------------------------------------ checks

    check_logits = fit_inputs._check_logits
    check_features = fit_inputs._check_features
    _checked = fit_inputs._checked_logits
    _warn_of_few = fit_inputs._warn_of_few

    def _checked_features(self, features: Features | None, device: torch.device) -> Tensor | None:
        """Features as a finite tensor, for methods that need them."""
        if features is None or not self.needs_features:
            return None
        values = self._tensor(self.encoded(features), device)
        if values.ndim:
            self._check_feature_values(values.reshape(-1, values.shape[-1]))
        return values

    def _tensor(self, values: Values, device: torch.device | None = None) -> Tensor:
        """A tensor as it is, and an array on a device, by default where the calibrator is."""
        if isinstance(values, Tensor):
            return values.detach()
        array = np.asarray(values)
        plain = array.dtype in (np.float32, np.float64) and array.flags.carray  # need no copy
        tensor = torch.from_numpy(array) if plain else as_tensor(array)
        return on_device(tensor, device or self.device)

    def _check_feature_values(self, features: Tensor, numbers: IntArray | None = None) -> None:
        """Raise unless features ``(n, width)`` are finite; ``numbers`` are those of the rows."""
        checks.check_finite_rows(features, numbers)

    def _labelled_features(self, examples: Examples, context: Context) -> Tensor:
        """Features of the labelled examples, ``(n, width)`` float32; stores the width."""
        assert context.features is not None
        kept = np.flatnonzero(examples.labels != IGNORED)
        checks.check_some(len(kept))
        self._width = int(context.features.shape[-1])
        self._store(width_=torch.tensor(self._width))
        labelled = as_tensor(context.features.reshape(-1, self._width)[kept])
        labelled = labelled.to(self.device, torch.float32)
        self._check_feature_values(labelled, kept)
        return labelled

    # ------------------------------------------------------------------------------------- state

    def config(self) -> dict[str, Any]:
        """The arguments of the constructor, as they can be written to JSON."""
        values = {name: getattr(self, name) for name in inspect.signature(type(self)).parameters}
        return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}

    @property
    def device(self) -> torch.device:
        """Device of what was learned, where tensors must be that it is called with."""
        return self.classes_.device

    def _store(self, **buffers: Any) -> None:
        """Set learned values: float32, so that every device can hold them."""
        for name, value in buffers.items():
            tensor = value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
            tensor = tensor.float() if tensor.is_floating_point() else tensor
            device = self.device if "classes_" in self._buffers else tensor.device
            self.register_buffer(name, tensor.to(device))

    def _set_classes(self, classes: int) -> None:
        self._store(classes_=torch.tensor(classes))
        self._classes = classes
        self.recent_ = None  # a fit does not go on from the examples of updates

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move learned values between devices; ``.half()`` and the like do not round them."""

        def moved(value: Tensor) -> Tensor:
            result = fn(value)
            return result if result.dtype == value.dtype else value.to(result.device)

        super()._apply(moved, recurse)  # type: ignore[no-untyped-call]
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        for name in self._buffers:
            if prefix + name in state_dict:
                self._store(**{name: torch.empty_like(state_dict[prefix + name])})
        self.recent_ = online.Recent() if f"{prefix}recent_.logits" in state_dict else None
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)
        self._classes, self._floor = int(self.classes_), float(self.floor_)
        self._width = int(self.width_) if "width_" in self._buffers else 0

    # -------------------------------------------------------------------- what it says of itself

    describe = description.describe
    learned = description._learned
    key_values = description._key_values
    properties = description.properties
    held = description._held
    extra_repr = description._extra_repr
    __repr__ = description._in_words
    _repr_html_ = as_html
    to_frame = description.to_frame
    plot = description.plot


def check_calibrator(calibrator: object) -> None:
    """Raise TypeError unless an object is a calibrator."""
    if isinstance(calibrator, Calibrator):
        return
    got, remedy = type(calibrator).__name__, ""
    if isinstance(calibrator, type):
        got, remedy = f"the class {calibrator.__name__}", ": create one, and fit it"
    elif isinstance(calibrator, (str, os.PathLike)):
        remedy = ": pass calibrant.load(path) for a saved one"
    elif isinstance(calibrator, nn.Module):
        remedy = ": a model and its calibrator are one in calibrant.calibrated(model, calibrator)"
    raise TypeError(f"calibrator must be a Calibrator, got {got}{remedy}")
