"""Calibrators folded into the last linear layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from calibrant.calibrators.affine import DirichletCalibration, MatrixScaling, VectorScaling
from calibrant.calibrators.auto import Auto
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.class_temperatures import ClassTemperatures
from calibrant.calibrators.scaling import Identity, TemperatureScaling
from calibrant.decide.priors import PriorCorrection

if TYPE_CHECKING:
    pass
from calibrant.deploy.attach import check_fitted


def fold(calibrator: Calibrator, linear: nn.Linear) -> nn.Linear:
    r"""Build a calibrator into the last layer of a network, at no cost when it is used.

    With :math:`z = Ax + c`, calibrated logits that are linear in :math:`z` are linear in
    :math:`x`: for ``ts``, :math:`A / T` and :math:`c / T`. ``none``, ``ts``, ``vector``,
    ``matrix`` and ``cts`` are linear, and so are ``auto``, where it chose one of them, and a
    correction of the prior after one of them. All others are refused.

    Parameters
    ----------
    calibrator : Calibrator
        Fitted on the outputs of ``linear``.
    linear : nn.Linear

    Returns
    -------
    nn.Linear
        A new one, with the calibrated logits up to a constant for each row, which no softmax
        sees. Values are computed in float64 and rounded to the type of ``linear``.

    Examples
    --------
    >>> from calibrant.calibrators import TemperatureScaling
    >>> logits = torch.tensor([[4.0, 0.0], [2.0, 0.0], [0.0, 6.0], [0.0, 2.0], [4.0, 2.0]])
    >>> fitted = TemperatureScaling().fit(logits, [0, 0, 1, 0, 1])
    >>> last = nn.Linear(3, 2)
    >>> inputs = torch.randn(4, 3)
    >>> probs = fold(fitted, last)(inputs).softmax(-1)
    >>> torch.allclose(probs, fitted.predict_proba(last(inputs)), atol=1e-6)
    True
    """
    check_fitted(calibrator)
    if not isinstance(linear, nn.Linear):
        raise TypeError(f"linear must be an nn.Linear, got {type(linear).__name__}")
    classes = int(calibrator.classes_)
    if linear.out_features != classes:
        raise ValueError(
            f"linear must have {classes} outputs, as the logits of the fit, got "
            f"{linear.out_features}"
        )
    weight = linear.weight.detach().double()
    bias = weight.new_zeros(classes) if linear.bias is None else linear.bias.detach().double()
    if classes == 1:  # the other class has the logit 0
        weight, bias = (torch.cat([torch.zeros_like(part), part]) for part in (weight, bias))
    weight, bias = _folded(calibrator, weight, bias)
    if classes == 1:
        weight, bias = weight[1:] - weight[:1], bias[1:] - bias[:1]
    has_bias = linear.bias is not None or bool(bias.any())
    found = nn.Linear(
        *(linear.in_features, classes, has_bias), linear.weight.device, linear.weight.dtype
    )
    with torch.no_grad():
        found.weight.copy_(weight)
        if has_bias:
            found.bias.copy_(bias)
    return found.train(linear.training)


def _folded(calibrator: Calibrator, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Weight ``(classes, width)`` and bias ``(classes,)`` after calibration."""
    if isinstance(calibrator, Auto) and calibrator.chosen_ is not None:
        return _folded(calibrator.chosen_, weight, bias)
    if isinstance(calibrator, PriorCorrection):
        weight, bias = _folded(calibrator.calibrator, weight, bias)
        return weight, bias + _added(calibrator).to(bias)
    if isinstance(calibrator, Identity):
        return weight, bias
    if isinstance(calibrator, TemperatureScaling):
        temperature = calibrator.temperature_.to(bias)
        return weight / temperature, bias / temperature
    # the others take the mean of the logits away first
    weight, bias = weight - weight.mean(0), bias - bias.mean()
    if isinstance(calibrator, ClassTemperatures):
        temperatures = calibrator.temperatures_.to(bias)
        return weight / temperatures[:, None], bias / temperatures
    if isinstance(calibrator, (VectorScaling, MatrixScaling)):
        by, plus = calibrator.weight_.to(bias), calibrator.bias_.to(bias)
        matrix = by.diag() if by.ndim == 1 else by
        return matrix @ weight, matrix @ bias + plus
    reason = "its logits are not a linear function of those that it is given"
    if isinstance(calibrator, DirichletCalibration):
        reason = "it works on log-probabilities, which are not linear in what the layer gives"
    raise ValueError(
        f"{type(calibrator).__name__} cannot be folded into a linear layer: {reason}; put it "
        "behind the model with calibrated(model, calibrator)"
    )


def _added(correction: PriorCorrection) -> Tensor:
    """What it adds to the calibrated logits of all rows, up to a constant."""
    classes = int(correction.classes_)
    zeros = correction.new_prior_.new_zeros(() if classes == 1 else classes)
    shift: Tensor = correction(zeros) - correction.calibrator(zeros)
    return torch.stack([zeros, shift]) if classes == 1 else shift
