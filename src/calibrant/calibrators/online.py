"""Updates of a calibrator by a stream of labelled examples, of which older ones weigh less.

:func:`update` is a method of :class:`~calibrant.calibrators.base.Calibrator`.
"""

from __future__ import annotations

import math
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core import checks
from calibrant._core.checks import IGNORED, FloatArray, Values
from calibrant._core.chunks import EstimandChoice, Examples, examples as check_examples
from calibrant._core.class_names import (
    as_array,
    class_names_of,
    in_order,
    is_frame,
    kept_names,
    numbered,
    numbers_in_order,
)

C = TypeVar("C", bound=Any)
HALF_LIFE = 2000.0
HALF_LIVES = 5
"""Half-lives that examples are kept for; older ones would have 3 % of the weight of all."""


class Recent(nn.Module):
    """The last labelled examples of a stream, the newest last.

    Attributes
    ----------
    logits : (n, classes), or (n,) log-odds, float32
    labels : (n,), or (n, tags) of tags
    half_life : scalar float32
    """

    logits: Tensor
    labels: Tensor
    half_life: Tensor
    learned_shapes = "logits n classes|n; labels n|n classes"

    def __init__(
        self, logits: Tensor | None = None, labels: Tensor | None = None, half_life: float = 1.0
    ) -> None:
        super().__init__()
        none = torch.zeros(0)
        self.register_buffer("logits", none if logits is None else logits)
        self.register_buffer("labels", none.long() if labels is None else labels)
        self.register_buffer("half_life", torch.tensor(half_life, dtype=torch.float32))

    def after(self, new: Recent) -> Recent:
        """Return the examples after those of a batch, on its device and with its half-life."""
        keep = math.ceil(HALF_LIVES * float(new.half_life))
        parts = ((getattr(x, name) for x in (self, new)) for name in ("logits", "labels"))
        logits, labels = (torch.cat([a.to(b.device), b])[-keep:].clone() for a, b in parts)
        return Recent(logits, labels, float(new.half_life))

    def weights(self) -> FloatArray:
        """Return the weight of each example: half for every half-life of newer ones."""
        newer = np.arange(len(self.labels))[::-1]
        return np.asarray(0.5 ** (newer / float(self.half_life)))

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *rest: Any, **named: Any
    ) -> None:
        for name in self._buffers:
            if prefix + name in state_dict:
                self._buffers[name] = torch.empty_like(state_dict[prefix + name])
        super()._load_from_state_dict(state_dict, prefix, *rest, **named)


def update(
    calibrator: C,
    logits: Values,
    labels: Values,
    *,
    half_life: float | None = None,
    class_dim: int | None = None,
    ignore_index: int | None = None,
) -> C:
    """Learn from the next examples of a stream, and forget older ones gradually.

    The examples are added to those of earlier updates, and the calibrator is fitted to all of
    them, with weights that halve for every ``half_life`` examples that came later. The result
    does not depend on how the stream is cut into updates. It is remembered what this takes, the
    last five half-lives of labelled examples, and saved with the calibrator; a ``fit`` drops it.

    The first update fits a new calibrator: pass the examples that would be those of a fit.
    Methods that need features or the last layer cannot be updated.

    Parameters
    ----------
    logits : (..., classes), or (n,) log-odds of two classes
        In the order in which they came.
    labels : (...) integers, -100 ignored
    half_life : float, optional
        In labelled examples; that of the last update, or else 2000. The fit is about as precise
        as one on 2.7 times as many examples.
    class_dim, ignore_index : int, optional
        As in :meth:`fit`.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(20_000, 10))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = TemperatureScaling().update(2 * truth[:5000], labels[:5000], half_life=1000)
    >>> before = float(fitted.temperature_)
    >>> after = fitted.update(3 * truth[5000:], labels[5000:]).temperature_
    >>> round(before, 1), round(float(after), 1)
    (2.0, 3.0)
    """
    name, before = type(calibrator).__name__, calibrator.recent_
    if calibrator.needs_features or calibrator.needs_head:
        raise TypeError(f"{name} cannot be updated: only logits and labels are remembered")
    if before is None and calibrator.classes:
        raise ValueError(
            f"this {name} was fitted, and a fit keeps no examples to go on from: pass the examples "
            f"of the fit to {name}().update(...) first, then new ones"
        )
    if half_life is None:
        half_life = HALF_LIFE if before is None else float(before.half_life)
    if not 1 <= half_life < math.inf:
        raise ValueError(f"half_life must be a number of examples, at least 1, got {half_life!r}")
    with checks.warnings_at_caller():
        names = calibrator.class_names_ if before else kept_names(class_names_of(logits))
        if is_frame(logits):
            labels = numbered(labels, logits)
            logits, places = in_order(logits, names)
            labels = labels if places is None else numbers_in_order(places, as_array(labels))
        logits = checks.classes_last(logits, class_dim)
        estimand: EstimandChoice = "multilabel" if calibrator.multilabel else "top_label"
        given = check_examples(logits, checks.with_ignored(labels, ignore_index), None, estimand)
        new = _labelled(calibrator, given, half_life)
        if before is not None:
            if before.logits.shape[1:] != new.logits.shape[1:]:
                calibrator.check_logits(new.logits)  # which says what is wanted
            new = before.after(new)
        if not len(new.labels):
            return calibrator
        calibrator.fit(new.logits, new.labels, sample_weight=new.weights())
        calibrator.recent_, calibrator.class_names_ = new.to(calibrator.device), names
    return calibrator


def _labelled(calibrator: Any, given: Examples, half_life: float) -> Recent:
    """Return the rows of a batch that have labels, at most as many as are kept."""
    scores = calibrator._tensor(given.logits)
    one_logit = scores.ndim == 1
    rows = scores if one_logit else scores.reshape(-1, scores.shape[-1])
    labels = torch.from_numpy(given.labels.astype(np.int64)).to(rows.device)
    labels = labels.reshape(rows.shape if calibrator.multilabel else (-1,))
    known = labels != IGNORED
    known = known.any(-1) if calibrator.multilabel else known
    # masked classes as finite numbers, which files hold
    kept = rows[known].float().clamp(min=torch.finfo(torch.float32).min)
    return Recent(kept[:0], labels[:0], half_life).after(Recent(kept, labels[known], half_life))
