"""Calibrators keep their guarantees on few, tied, masked and extreme examples."""

import warnings
from typing import Any

import numpy as np
import torch

from calibrant._core.chunks import examples as checked
from calibrant.artifacts.objects import artifact_of, packed, restored, unpacked
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.network import ParametrizedTemperatureScaling
from calibrant.calibrators.records import RecordsCalibrator
from calibrant.calibrators.registry import TAG_CALIBRATORS
from calibrant.calibrators.smart import SMART
from tests.fuzz.examples import Examples, random_examples
from tests.support.calibrators import EVERY_METHOD

SLOW = ("auto", "pts", "smart", "blend", "sms_blend", "top_and_rest", "multicalibration")
"""Methods that take longer and are drawn less often."""


def check(rng: np.random.Generator) -> None:
    """Fit one method to one set of examples, and hold it to what it declares."""
    tags = rng.random() < 0.08
    kinds: Any = TAG_CALIBRATORS if tags else EVERY_METHOD
    names = [name for name in kinds if name not in SLOW or rng.random() < 0.15]
    kind = kinds[names[rng.integers(len(names))]]
    # features that give the logits of masked classes would be as huge
    masks = rng.random() < 0.5 and not kind.needs_features
    examples = random_examples(rng, tags=tags, masks=masks)
    if kind.two_classes_only and examples.rows.shape[1] > 2:
        return
    if not examples.legal:
        if not (tags and examples.kept.any()):  # no tag is masked
            refused(kind, examples)
        return
    calibrator = fitted(kind, examples)
    if calibrator is None:
        return
    at = random_rows(rng, examples)
    if not calibrator.accepts_masked and far(examples.rows, examples.gap):
        return  # there may be masks where labels are ignored
    beside = features_of(calibrator, at)
    probs = calibrator.predict_proba(at, beside)
    check_probs(calibrator, at, np.asarray(probs.double() if torch.is_tensor(probs) else probs))
    check_logits(calibrator, at, beside)
    check_batches(rng, calibrator, at, beside, probs)
    again = fitted(kind, examples)
    same_fit(again, calibrator, "a refit")
    same_fit(restored(unpacked(packed(artifact_of(calibrator)))), calibrator, "a saved one")
    if isinstance(calibrator, RecordsCalibrator) and not calibrator.uses_logits:
        check_records(calibrator, kind, examples)


def quick(kind: type[Calibrator]) -> Any:
    """A calibrator that is quick to fit: few steps of networks, few candidates of ``auto``."""
    calibrator = Auto(candidates=("none", "ts", "beta")) if kind is Auto else kind()
    for part in calibrator.modules():
        if isinstance(part, SMART | ParametrizedTemperatureScaling):
            part.steps = 20
    return calibrator


def fitted(kind: type[Calibrator], examples: Examples) -> Any:
    """Return a fitted calibrator, or None if it says that it takes no masked classes."""
    calibrator = quick(kind)
    features = features_of(calibrator, examples.passed)
    beside = {}
    if features is not None:
        width = examples.rows.shape[1]
        beside = {"features": features, "head": (np.eye(width), np.zeros(width))}
    try:
        return calibrator.fit(
            examples.passed, examples.labels, sample_weight=examples.weight, **beside
        )
    except ValueError as error:
        if far(examples.rows[examples.kept], examples.gap) and (
            "far below" in str(error) or "must be finite" in str(error)
        ):
            return None
        raise


def far(rows: np.ndarray, gap: float) -> bool:
    """Return True if a class is masked."""
    return bool((rows.max(-1, keepdims=True) - rows >= gap).any())


def features_of(calibrator: Any, logits: Any) -> torch.Tensor | None:
    """Return features whose last layer is the identity."""
    if not calibrator.needs_features:
        return None
    scores = torch.as_tensor(logits).double()
    scores = torch.stack([torch.zeros_like(scores), scores], -1) if scores.ndim == 1 else scores
    return scores - scores.mean(-1, keepdim=True)


def refused(kind: type[Calibrator], examples: Examples) -> None:
    try:
        calibrator = quick(kind)
        features = features_of(calibrator, examples.passed)
        width = examples.rows.shape[1]
        head = (np.eye(width), np.zeros(width))
        beside: dict[str, Any] = {} if features is None else {"features": features, "head": head}
        calibrator.fit(examples.passed, examples.labels, sample_weight=examples.weight, **beside)
    except ValueError:
        return
    raise AssertionError(f"{kind.__name__} was fitted on labels of masked classes, or on none")


def random_rows(rng: np.random.Generator, examples: Examples) -> Any:
    """Return rows to predict: those of the fit, or others with as many classes."""
    rows = examples.passed
    if rng.random() < 0.5:
        return rows
    scale = float(rng.choice([1e-3, 1.0, 50.0]))
    other = np.round(rng.normal(size=tuple(rows.shape)) * scale, int(rng.integers(0, 4)))
    if isinstance(rows, torch.Tensor):
        return torch.from_numpy(other).to(rows.dtype)
    return other.astype(rows.dtype)


def check_probs(calibrator: Any, logits: Any, probs: np.ndarray) -> None:
    assert probs.shape == tuple(logits.shape)
    assert np.isfinite(probs).all()
    assert (probs >= 0).all()
    assert (probs <= 1 + 1e-6).all()
    if probs.ndim == 2 and not calibrator.multilabel:
        np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-5)


def check_logits(calibrator: Any, logits: Any, beside: Any) -> None:
    """The order of classes, as far as it is guaranteed, near ties included."""
    before = torch.as_tensor(logits)
    out = torch.as_tensor(calibrator.transform(logits, beside))
    if before.ndim == 1 or calibrator.multilabel:
        assert torch.isfinite(out).all() or (before.abs() >= 1e8).any()
        if calibrator.keeps_argmax and not calibrator.multilabel:
            assert ((out > 0) == (before > 0)).all()
        return
    assert not torch.isnan(out).any()
    if calibrator.keeps_argmax:
        top, after = before.argmax(-1), out.argmax(-1)
        assert (top == after).all()
        assert (out.softmax(-1).argmax(-1) == top).all()
        ties = (before == before.amax(-1, keepdim=True)).sum(-1)
        assert ((out == 0).sum(-1) == ties).all()
    if calibrator.monotone:
        order = before.double().argsort(-1)
        step = out.gather(-1, order).double()
        step = step[:, 1:] - step[:, :-1]
        assert (torch.isnan(step) | (step >= 0)).all()  # -inf less -inf


def check_batches(
    rng: np.random.Generator, calibrator: Any, logits: Any, beside: Any, probs: Any
) -> None:
    """One row alone gets the probabilities that it gets among others."""
    i = int(rng.integers(len(probs)))
    alone = calibrator.predict_proba(
        logits[i : i + 1], None if beside is None else beside[i : i + 1]
    )
    expected = probs[i : i + 1]
    gap = np.abs(np.asarray(alone, dtype=np.float64) - np.asarray(expected, dtype=np.float64))
    assert gap.max() <= 1e-5, (alone, expected)


def same_fit(found: Any, expected: Any, what: str) -> None:
    """Equal to the last bit."""
    one, other = found.state_dict(), expected.state_dict()
    assert set(one) == set(other), what
    for name, value in other.items():
        assert not torch.is_tensor(value) or torch.isfinite(value).all(), (what, name, value)
        same = torch.equal(one[name], value) if torch.is_tensor(value) else one[name] == value
        assert same, (what, name, one[name], value)


def check_records(calibrator: Any, kind: type[Calibrator], examples: Examples) -> None:
    """A fit on the table of the examples is the fit on the examples."""
    data = checked(examples.passed, examples.labels, examples.weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        other = quick(kind).fit_records(tabulate(data), one_logit=examples.logits.ndim == 1)
    same_fit(other, calibrator, "records")
