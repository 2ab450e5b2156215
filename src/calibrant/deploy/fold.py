"""Fold calibrators into the last linear layer."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from calibrant._core.chunks import as_tensor
from calibrant.calibrators.affine import MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.calibrators.tags import TagCalibrator
from calibrant.decide.priors import PriorCorrection
from calibrant.deploy.calibrated_model import _fitted_calibrator


def fold_into_linear(calibrator: Calibrator, linear: nn.Linear) -> nn.Linear:
    r"""Build a calibrator into the last layer of a network, at no cost at inference.

    With :math:`z = Ax + c`, calibrated logits that are linear in :math:`z` are linear in
    :math:`x`: for ``ts``, :math:`A / T` and :math:`c / T`. ``none``, ``ts``, ``vector``,
    ``matrix`` and ``cts`` are linear, as are all methods for tags, ``auto`` where it chose one of
    them, and a correction of the prior after one of them. All others are refused.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted on the outputs of ``linear``.
    linear : nn.Linear

    Returns
    -------
    nn.Linear
        A new layer. Its logits are the calibrated ones up to a constant for each row, computed in
        float64 and rounded to the type of ``linear``.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> last = nn.Linear(3, 2)
    >>> inputs = torch.randn(4, 3)
    >>> probs = fold_into_linear(fitted, last)(inputs).softmax(-1)
    >>> torch.allclose(probs, fitted.predict_proba(last(inputs)), atol=1e-6)
    True
    """
    calibrator = copy.deepcopy(_fitted_calibrator(calibrator)).cpu()
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    classes = int(calibrator.classes_)
    if linear.out_features != classes:
        raise ValueError(f"linear must have {classes} outputs, got {linear.out_features}")
    weight = as_tensor(linear.weight).double()
    bias = weight.new_zeros(classes) if linear.bias is None else as_tensor(linear.bias).double()
    if calibrator.one_logit:  # the other class has the logit 0
        weight, bias = (torch.cat([torch.zeros_like(part), part]) for part in (weight, bias))
    weight, bias = _folded(calibrator, weight, bias)
    if calibrator.one_logit:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    has_bias = linear.bias is not None or bool(bias.any())
    like = {"device": linear.weight.device, "dtype": linear.weight.dtype}
    folded = nn.Linear(linear.in_features, classes, has_bias, **like)
    with torch.no_grad():
        folded.weight.copy_(weight)
        if has_bias:
            folded.bias.copy_(bias)
    return folded.train(linear.training)


def _folded(calibrator: Calibrator, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight ``(classes, width)`` and bias ``(classes,)`` after calibration."""
    if isinstance(calibrator, Auto) and calibrator.chosen_ is not None:
        return _folded(calibrator.chosen_, weight, bias)
    if isinstance(calibrator, PriorCorrection):
        weight, bias = _folded(calibrator.calibrator, weight, bias)
        zeros = calibrator.new_prior_.new_zeros(() if calibrator.one_logit else len(bias))
        shift = calibrator(zeros) - calibrator.calibrator(zeros)  # up to a constant
        return weight, bias + (torch.stack([zeros, shift]) if shift.ndim == 0 else shift).to(bias)
    if isinstance(calibrator, Identity):
        return weight, bias
    if isinstance(calibrator, TagCalibrator):
        slope, intercept = calibrator.slope_.to(bias), calibrator.intercept_.to(bias)
        return slope[:, None] * weight, slope * bias + intercept
    if isinstance(calibrator, TemperatureScaling):
        temperature = calibrator.temperature_.to(bias)
        return weight / temperature, bias / temperature
    # the others first subtract the mean of the logits
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    if isinstance(calibrator, ClassTemperatures):
        temperatures = calibrator.temperatures_.to(bias)
        return weight / temperatures[:, None], bias / temperatures
    if isinstance(calibrator, (VectorScaling, MatrixScaling)):
        scale = calibrator.weight_.to(bias)
        matrix = scale.diag() if scale.ndim == 1 else scale
        return matrix @ weight, matrix @ bias + calibrator.bias_.to(bias)
    name = type(calibrator).__name__
    raise ValueError(f"{name} is not linear in the logits: use calibrated(model, calibrator)")
