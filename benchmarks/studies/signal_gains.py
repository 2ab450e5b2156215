"""Simulations of the gain of combined signals: its interval, and when the combination is used.

    python benchmarks/studies/signal_gains.py

Four kinds of answers with four signals each: one informative signal among noise, four copies of
one, and a second signal that adds little or much. For each kind and number of graded answers, over
``--sets`` data sets: the true gain in log loss of the combination over the best single signal, on
20,000 new answers; the share of 90 % intervals that hold it; the share of sets where the
combination is used; and what that rule gains. Prints a table; asserts nothing.
"""

import argparse
from collections.abc import Callable

import numpy as np
from scipy.special import expit

from calibrant.llm.answers.combining import fit_combined, held_out, log_loss, paired_gain

NEW = 20_000
FIRST_SEED = 1000
"""The rule was chosen on the data of seeds from 0 on."""
Draw = Callable[[np.random.Generator, int], tuple[np.ndarray, np.ndarray]]


def answers(*slopes: float) -> Draw:
    """Four independent signals, of which the first have these slopes."""

    def draw(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
        odds = rng.normal(size=(n, 4))
        return expit(odds), rng.random(n) < expit(odds[:, : len(slopes)] @ slopes)

    return draw


def copies(rng: np.random.Generator, n: int) -> tuple[np.ndarray, np.ndarray]:
    common = rng.normal(size=n)
    odds = common[:, None] + 0.3 * rng.normal(size=(n, 4))
    return expit(odds), rng.random(n) < expit(1.2 * common)


KINDS: dict[str, Draw] = {
    "one and noise": answers(1.2),
    "copies of one": copies,
    "a weak second": answers(1.2, 0.3),
    "a good second": answers(1.0, 0.8),
}


def one_set(draw: Draw, n: int, seed: int) -> tuple[float, bool, bool]:
    """True gain, whether the interval holds it, and whether the combination is used."""
    rng = np.random.default_rng(seed)
    (values, right), (others, happened) = draw(rng, n), draw(rng, NEW)
    groups = np.arange(n)
    fitted = fit_combined(values, right, groups, "sigmoid")
    held = held_out(values, right, groups, "sigmoid")
    best, together = log_loss(held.best, right), log_loss(held.together, right)
    each = log_loss(held.each, right[:, None]).mean(0)
    gain = paired_gain(best, together, groups)
    alone = log_loss(fitted.alone(others), happened).mean()
    true = float(alone - log_loss(fitted.together(others), happened).mean())
    holds = abs(gain.value - true) < 1.645 * gain.deviation
    return true, bool(holds), bool(gain.value > 0 and together.mean() < each.min())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sets", type=int, default=40)
    sets = parser.parse_args().sets
    print("answers  signals          gain     interval holds  used   gain of the rule")
    for n in (100, 300):
        for name, draw in KINDS.items():
            runs = [one_set(draw, n, FIRST_SEED + i) for i in range(sets)]
            true, holds, used = (np.array(column) for column in zip(*runs, strict=True))
            rule = np.where(used, true, 0.0).mean()
            shares = f"{100 * holds.mean():.0f} %", f"{100 * used.mean():.0f} %"
            print(
                f"{n:<8} {name:<15} {true.mean():+.4f}  {shares[0]:<15} {shares[1]:<6} {rule:+.4f}"
            )


if __name__ == "__main__":
    main()
