"""A smooth logistic regression on the log-odds of two classes: a method for the arena.

    python -m benchmarks.arena DATA --methods auto,spline_logistic:SplineLogistic

with this folder on PYTHONPATH.
"""

import numpy as np
from scipy.optimize import minimize
from scipy.special import expit

from calibrant._core.checks import FloatArray, IntArray

PENALTIES = 10.0 ** np.array([-2, -1, 0, 1, 2, 4])
RIDGE, FOLDS, LARGEST = 1e-3, 5, 12.0


class SplineLogistic:
    """An intercept, a slope, and a penalised natural cubic spline with knots at quantiles.

    The penalty of the spline is that with the highest held-out likelihood. Log-odds beyond 12 are
    taken for 12.
    """

    takes = "logits"

    def __init__(self, knots: int = 5) -> None:
        self.knots = knots

    def fit(self, logits: FloatArray, labels: IntArray) -> None:
        odds = log_odds(logits)
        self.mean, self.scale = odds.mean(), odds.std() + 1e-9
        places = np.quantile(self._standard(odds), np.linspace(0.05, 0.95, self.knots))
        self.places = np.unique(places)
        inputs = self._inputs(odds)
        fold = np.random.default_rng(0).permutation(len(labels)) % FOLDS

        def held_out(penalty: float) -> float:
            total = 0.0
            for number in range(FOLDS):
                seen, unseen = fold != number, fold == number
                fitted = penalised(inputs[seen], labels[seen], penalty)
                total += loss(inputs[unseen] @ fitted, labels[unseen])
            return total

        self.parameters = penalised(inputs, labels, min(PENALTIES, key=held_out))

    def predict_proba(self, logits: FloatArray) -> FloatArray:
        claimed = expit(self._inputs(log_odds(logits)) @ self.parameters)
        return np.stack([1 - claimed, claimed], -1)

    def _standard(self, odds: FloatArray) -> FloatArray:
        return (odds - self.mean) / self.scale

    def _inputs(self, odds: FloatArray) -> FloatArray:
        z, last = self._standard(odds), self.places[-1]

        def cube(at: float) -> FloatArray:
            return ((z - at).clip(0) ** 3 - (z - last).clip(0) ** 3) / (last - at)

        curves = [cube(at) - cube(self.places[-2]) for at in self.places[:-2]]
        return np.stack([np.ones(len(z)), odds, *curves], -1)


def log_odds(logits: FloatArray) -> FloatArray:
    return np.asarray(logits[:, 1] - logits[:, 0], np.float64).clip(-LARGEST, LARGEST)


def loss(scores: FloatArray, labels: IntArray) -> float:
    return float((np.logaddexp(0, scores) - labels * scores).sum())


def penalised(inputs: FloatArray, labels: IntArray, penalty: float) -> FloatArray:
    """Parameters with the least loss plus penalties; without evidence the log-odds stay."""
    centre = np.zeros(inputs.shape[1])
    centre[1] = 1
    price = np.full(len(centre), penalty)
    price[:2] = RIDGE

    def objective(x: FloatArray) -> tuple[float, FloatArray]:
        scores, away = inputs @ x, x - centre
        gradient = inputs.T @ (expit(scores) - labels) + 2 * price * away
        return loss(scores, labels) + float(price @ away**2), gradient

    return np.asarray(minimize(objective, centre, jac=True, method="L-BFGS-B").x)
