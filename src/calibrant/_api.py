"""The names on top of ``calibrant``; everything else is imported from its package.

This is a list and not run: ``calibrant/__init__.py`` reads it and imports each name on first use,
so that optional libraries are needed only for names that use them. Type checkers import it.
"""

from calibrant._core.engines import use as use
from calibrant._core.torch_models import layer_inputs as layer_inputs
from calibrant.artifacts import load as load, save as save
from calibrant.calibrators import (
    CALIBRATORS as CALIBRATORS,
    SMART as SMART,
    TAG_CALIBRATORS as TAG_CALIBRATORS,
    Auto as Auto,
    Calibrator as Calibrator,
    MaCCal as MaCCal,
    TemperatureScaling as TemperatureScaling,
)
from calibrant.data import (
    open_dataset as open_dataset,
    sample_path as sample_path,
    save_predictions as save_predictions,
)
from calibrant.decide import conformal as conformal, threshold as threshold
from calibrant.deploy.calibrated_model import calibrated as calibrated
from calibrant.deploy.exports import export as export
from calibrant.deploy.logits import collect as collect
from calibrant.deploy.sklearn import CalibratedClassifier as CalibratedClassifier
from calibrant.estimate import estimate_performance as estimate_performance
from calibrant.losses import LOSSES as LOSSES, FeDLaS as FeDLaS
from calibrant.metrics import (
    METRICS as METRICS,
    Accumulator as Accumulator,
    accuracy as accuracy,
    ada_ece as ada_ece,
    aurc as aurc,
    auroc as auroc,
    brier as brier,
    classwise_ece as classwise_ece,
    debiased_ece as debiased_ece,
    ece as ece,
    ks as ks,
    mce as mce,
    nll as nll,
    over_ece as over_ece,
    smce as smce,
    smooth_ece as smooth_ece,
    top_label as top_label,
    under_ece as under_ece,
)
from calibrant.monitor import Monitor as Monitor
from calibrant.show.report import report as report
from calibrant.slices import find_slices as find_slices
from calibrant.workflows.apply import apply as apply
from calibrant.workflows.compare import compare as compare
from calibrant.workflows.effect import effect as effect
from calibrant.workflows.evaluate import evaluate as evaluate
from calibrant.workflows.fit import cross_fit as cross_fit, fit as fit
