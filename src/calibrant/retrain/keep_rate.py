"""The controller of MaC-Cal: it sets the share of weights that a mask keeps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

HALVINGS, LARGEST_CHANGE = 4, 0.1
"""Limits of the controller: how often its step is halved, and how far q moves in one epoch."""


@dataclass
class KeepRate:
    r"""The share q of weights that a mask keeps, controlled by confidence and accuracy.

    .. math:: q \leftarrow \mathrm{clip}(q - \eta\,(\mathit{conf} - \gamma\,\mathit{acc}),
        \; q_\mathrm{least}, \; 1)

    Over-confidence lowers q. Whenever the gap changes its sign, :math:`\eta` is halved, down to a
    sixteenth; with a fixed step q would oscillate. One update changes q by 0.1 at most.

    Parameters
    ----------
    keep : float
        Initial q.
    step : float
        Initial :math:`\eta`; 0 leaves q unchanged.
    gamma : float
    least : float

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
        if gap * self.gap < 0 and self.halvings < HALVINGS:
            self.step, self.halvings = self.step / 2, self.halvings + 1
        self.gap = gap
        change = min(max(-self.step * gap, -LARGEST_CHANGE), LARGEST_CHANGE)
        self.keep = min(max(self.keep + change, self.least), 1.0)
        return self.keep


class Epoch(NamedTuple):
    """Figures of one epoch; confidence and accuracy are those that the controller used."""

    keep: float
    confidence: float
    accuracy: float
    loss: float
