"""Random examples: few, with ties, edges, masks, ignored labels, odd weights, in any dtype."""

from typing import Any, NamedTuple

import numpy as np
import torch

IGNORED = -100
DTYPES = ["float64", "float64", "float32", "float16", "bfloat16"]
MASKS = [-np.inf, -1e9, -1e30, "lowest"]


class Examples(NamedTuple):
    """Examples as they are passed on, and the values behind them in float64.

    ``logits`` are ``(n, classes)``, or ``(n,)`` log-odds, or with ``tags`` one problem a column.
    """

    passed: Any  # logits in the dtype and container of the input
    logits: np.ndarray
    labels: np.ndarray
    weight: np.ndarray | None
    tags: bool = False

    @property
    def rows(self) -> np.ndarray:
        """Logits of two classes or more, a row for each label."""
        if self.logits.ndim == 2 and not self.tags:
            return self.logits
        flat: np.ndarray = self.logits.reshape(-1)
        return np.stack([np.zeros_like(flat), flat], -1)

    @property
    def kept(self) -> np.ndarray:
        """Which of the flat labels count."""
        labelled: np.ndarray = self.labels.reshape(-1) != IGNORED
        return labelled if self.weight is None else labelled & (self.weight.reshape(-1) > 0)

    @property
    def gap(self) -> float:
        """Distance to the largest logit from which a class is masked."""
        return min(1e8, largest(self.passed) / 2)

    @property
    def legal(self) -> bool:
        """True if some labels count, and none of these is of a masked class."""
        rows, labels = self.rows[self.kept], self.labels.reshape(-1)[self.kept]
        own = rows[np.arange(len(rows)), labels]
        with np.errstate(over="ignore", invalid="ignore"):
            return bool(len(rows) and (rows.max(-1) - own < self.gap).all())


def largest(values: Any) -> float:
    info: Any = torch.finfo if isinstance(values, torch.Tensor) else np.finfo
    return float(info(values.dtype).max)


def in_dtype(rng: np.random.Generator, values: np.ndarray, dtype: str) -> Any:
    """An array or a tensor; NumPy has no bfloat16."""
    with np.errstate(over="ignore"):
        if dtype == "bfloat16" or rng.random() < 0.2:
            return torch.from_numpy(values).to(getattr(torch, dtype))
        return values.astype(dtype)


def exact(values: Any) -> np.ndarray:
    return np.asarray(torch.as_tensor(values).double())


def random_logits(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Of any scale, many of them tied or rounded."""
    kind = rng.integers(7)
    logits = rng.normal(size=shape)
    if kind == 0:
        logits = np.round(8 * logits) / 8
    elif kind == 1:
        logits = np.round(logits)
    elif kind == 2:
        logits = np.zeros(shape) + rng.choice([0.0, 3.5, -700.0, 1e4])
    elif kind == 3:
        logits *= rng.choice([1e-9, 1e-3, 30.0, 1e3, 1e4])
    elif kind == 4:  # rows that are alike
        logits = np.broadcast_to(logits[:1], shape).copy()
    return logits * float(rng.choice([1.0, 1.0, 3.0, 10.0]))


def random_weight(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray | None:
    kind = rng.integers(8)
    if kind < 3:
        return None
    if kind == 3:
        return rng.exponential(size=shape)
    if kind == 4:
        return rng.integers(0, 4, size=shape).astype(float)
    if kind == 5:
        return np.full(shape, float(rng.choice([1e-99, 0.25, 1e99])))
    if kind == 6:
        return rng.exponential(size=shape) * 10.0 ** rng.integers(-90, 90)
    return 10.0 ** rng.integers(-9, 9, size=shape)


def random_labels(rng: np.random.Generator, rows: np.ndarray) -> np.ndarray:
    """Likely ones, the argmax, any class, or one for all; some are ignored."""
    count, classes = rows.shape
    kind = rng.integers(5)
    labels: np.ndarray = np.asarray(rng.integers(classes, size=count))
    if kind == 0:
        labels = (rows + rng.gumbel(size=rows.shape)).argmax(-1)
    elif kind == 1:
        labels = rows.argmax(-1)
    elif kind == 2:
        labels = np.full(count, rng.integers(classes))
    if rng.random() < 0.4:
        labels[rng.random(count) < rng.choice([0.1, 0.5, 0.95])] = IGNORED
    return labels


def random_examples(
    rng: np.random.Generator, *, most: int = 40, tags: bool = False, masks: bool = True
) -> Examples:
    """Draw examples; ``masks`` may put classes out of reach, now and then that of a label."""
    n, classes = int(rng.integers(1, most + 1)), int(rng.integers(2, 7))
    shape = (n,) if not tags and rng.random() < 0.15 else (n, classes)
    logits = random_logits(rng, shape)
    dtype = str(rng.choice(DTYPES))
    passed = in_dtype(rng, np.clip(logits, -6e4, 6e4) if dtype == "float16" else logits, dtype)
    plain = Examples(passed, exact(passed), np.zeros(0), None, tags)
    labels = random_labels(rng, plain.rows)
    if masks and len(shape) == 2 and not tags and rng.random() < 0.2:
        hidden = rng.random(shape) < 0.3
        if rng.random() < 0.9:  # else some label may be masked
            hidden[np.arange(n), labels.clip(0)] = False
            hidden[np.arange(n), exact(passed).argmax(-1)] = False
        mask = MASKS[rng.integers(len(MASKS))]
        value = -largest(passed) if mask == "lowest" else float(mask)  # type: ignore[arg-type]
        value = value if -value <= largest(passed) or np.isinf(value) else -largest(passed)
        passed[torch.from_numpy(hidden) if isinstance(passed, torch.Tensor) else hidden] = value
    if tags:
        labels = labels.reshape(shape)
    return Examples(passed, exact(passed), labels, random_weight(rng, labels.shape), tags)
