"""One method for the top class of each row and another for all, or for the rest."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from calibrant._core.checks import IGNORED, silenced
from calibrant._core.chunks import Examples
from calibrant._core.options import Seed
from calibrant.calibrators.affine import (
    Structured,
    StructuredMatrixScaling,
    StructuredVectorScaling,
)
from calibrant.calibrators.base import Calibrator, Context
from calibrant.calibrators.rank_gaps import RankGaps
from calibrant.calibrators.top_label import Blend, with_log_odds

MOST_LOGITS = 1 << 21
"""Logits that gaps are learned from at most: they have one parameter per class, and are slow."""


def structured(classes: int, count: int) -> Structured:
    """``sms`` where there are as many examples as its matrix has entries, else ``svs``."""
    return StructuredMatrixScaling() if classes**2 <= count else StructuredVectorScaling()


def _structured(examples: Examples) -> Structured:
    return structured(examples.classes, int(np.sum(examples.labels != IGNORED)))


def _some(examples: Examples, seed: int) -> Examples:
    """Return as many of the examples as gaps are learned from, drawn by a seed."""
    count, most = int(np.sum(examples.labels != IGNORED)), MOST_LOGITS // examples.classes
    if count <= most:
        return examples
    return examples.take(np.sort(np.random.default_rng(seed).permutation(count)[:most]))


class TopAndRest(Calibrator):
    r"""Log-odds of the top class by ``blend``; the rest is shared by ``sms``, then ``rank_gaps``.

    To keep the predicted class binds the top class alone: the others may change places. With the
    log-odds :math:`s` of :class:`Blend` and the logits :math:`u` of :class:`RankGaps`, fitted on
    the result of :class:`StructuredMatrixScaling` (whose matrix is diagonal if it would have more
    entries than there are examples; gaps are learned from two million logits at most),

    .. math:: P(\text{top}) = \sigma(s) , \qquad
              P(k) = (1 - \sigma(s)) \frac{e^{u_k}}{\sum_{j \ne \text{top}} e^{u_j}} ,

    where each of the others is held below the top class. The confidence is that of ``blend``; the
    likelihood of the labels that come second or later is better, since the rest knows which
    classes are taken for each other. This is calibrant's own method.

    Parameters
    ----------
    seed : int
        Of SMART, a part of ``blend``, and of the examples that gaps are learned from.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> logits = 2 * rng.normal(size=(4000, 4))
    >>> truth = logits + [0.0, 0.0, 0.0, -1.0]  # the last class is rarer than the model says
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> fitted = TopAndRest().fit(logits, labels)
    >>> fitted.predict_proba(np.array([3.0, 1.0, 1.0, 1.0])).argsort()[0]
    np.int64(3)
    """

    name = "top_and_rest"
    part_of_auto = True
    keeps_argmax = True

    def __init__(self, *, seed: Seed = 0) -> None:
        super().__init__()
        self.seed = seed
        self.top = Blend(seed=seed)
        self.matrix: Structured = StructuredMatrixScaling()
        self.gaps = RankGaps()

    def size(self, classes: int) -> int:
        """Those of all three."""
        return sum(part.size(classes) for part in (self.top, self.matrix, self.gaps))

    def effective_size(self, classes: int) -> int:
        """The larger of those of the top class and of the rest, which has penalties."""
        return max(self.top.effective_size(classes), self.matrix.effective_size(classes))

    def _fit(self, examples: Examples, context: Context) -> None:
        known = context._replace(records=context.table(examples))
        with silenced():  # this one has warned of the number of examples
            self.top = known.part(self.top, examples)
            self.matrix = known.part(_structured(examples), examples)
            some = _some(examples, self.seed)
            self.gaps.fit_examples(some._replace(logits=self.matrix.transform(some.logits)))
        self.solution_ = self.top.solution_

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        others = self.gaps._calibrated(self.matrix._calibrated(logits))
        return with_log_odds(logits, self.top._odds(logits, top), others)


class MatrixAndTop(Calibrator):
    r"""All classes by ``sms``, then the log-odds of the class on top by ``blend``.

    :class:`StructuredMatrixScaling` corrects what the model prefers whatever the question, such as
    the first of the options of a multiple choice, and may change the predicted class.
    :class:`Blend`, fitted on its result, then corrects the confidence, which the penalties of the
    matrix leave wrong where the logits say little. This is calibrant's own method.

    Parameters
    ----------
    seed : int
        Of SMART, a part of ``blend``.

    Examples
    --------
    >>> import numpy as np
    >>> rng = np.random.default_rng(0)
    >>> truth = 2 * rng.normal(size=(4000, 4))
    >>> labels = (truth + rng.gumbel(size=truth.shape)).argmax(-1)
    >>> logits = truth + [2.0, 0.0, 0.0, 0.0]  # the model prefers the first option
    >>> fitted = MatrixAndTop().fit(logits, labels)
    >>> for scores in (logits, fitted.transform(logits)):
    ...     print(round(float((scores.argmax(-1) == labels).mean()), 2))
    0.58
    0.69
    """

    name = "sms_blend"
    part_of_auto = True

    def __init__(self, *, seed: Seed = 0) -> None:
        super().__init__()
        self.seed = seed
        self.matrix: Structured = StructuredMatrixScaling()
        self.top = Blend(seed=seed)

    def size(self, classes: int) -> int:
        """Those of both."""
        return self.matrix.size(classes) + self.top.size(classes)

    def effective_size(self, classes: int) -> int:
        """The larger of the two."""
        return max(self.matrix.effective_size(classes), self.top.effective_size(classes))

    def _fit(self, examples: Examples, context: Context) -> None:
        with silenced():  # this one has warned of the number of examples
            self.matrix = context.part(_structured(examples), examples)
            after = self.matrix.transform(examples.logits)
            self.top.fit_examples(examples._replace(logits=after))
        self.solution_ = self.top.solution_

    def _transform(self, logits: Tensor, top: Tensor, features: Tensor | None) -> Tensor:
        return self.top._calibrated(self.matrix._calibrated(logits))
