"""Public names of the package, each imported from the module that defines it."""

from calibrant._core.binning import Bins as Bins
from calibrant._core.torch_models import layer_inputs as layer_inputs
from calibrant.artifacts import load as load, save as save
from calibrant.calibrators.affine import (
    DirichletCalibration as DirichletCalibration,
    MatrixScaling as MatrixScaling,
    VectorScaling as VectorScaling,
)
from calibrant.calibrators.auto import Auto as Auto
from calibrant.calibrators.base import Calibrator as Calibrator
from calibrant.calibrators.binning import (
    BBQ as BBQ,
    HistogramBinning as HistogramBinning,
    HistogramOneVsRest as HistogramOneVsRest,
    ScalingBinning as ScalingBinning,
)
from calibrant.calibrators.class_temperatures import ClassTemperatures as ClassTemperatures
from calibrant.calibrators.confidence_maps import (
    BetaCalibration as BetaCalibration,
    SigmoidScaling as SigmoidScaling,
    SplineCalibration as SplineCalibration,
)
from calibrant.calibrators.features import (
    FeatureClipping as FeatureClipping,
    GroupCalibration as GroupCalibration,
    ProCal as ProCal,
)
from calibrant.calibrators.isotonic import (
    IsotonicCalibration as IsotonicCalibration,
    IsotonicOneVsRest as IsotonicOneVsRest,
)
from calibrant.calibrators.margin_curves import (
    margin_change as margin_change,
    margin_temperature as margin_temperature,
)
from calibrant.calibrators.network import (
    SMART as SMART,
    ParametrizedTemperatureScaling as ParametrizedTemperatureScaling,
    margin_bounds as margin_bounds,
)
from calibrant.calibrators.registry import CALIBRATORS as CALIBRATORS
from calibrant.calibrators.scaling import (
    EnsembleTemperatureScaling as EnsembleTemperatureScaling,
    Identity as Identity,
    TemperatureScaling as TemperatureScaling,
)
from calibrant.calibrators.top_label import Blend as Blend, OddsScaling as OddsScaling
from calibrant.data import (
    open_predictions as open_predictions,
    sample_path as sample_path,
    save_predictions as save_predictions,
)
from calibrant.decide.conformal_sets import ConformalSets as ConformalSets, conformal as conformal
from calibrant.decide.priors import (
    PriorCorrection as PriorCorrection,
    estimate_prior as estimate_prior,
    label_shift as label_shift,
    shift_prior as shift_prior,
)
from calibrant.decide.thresholds import Threshold as Threshold, threshold as threshold
from calibrant.deploy.attach import CalibratedModel as CalibratedModel, calibrated as calibrated
from calibrant.deploy.collect import collect as collect
from calibrant.deploy.fold import fold as fold
from calibrant.deploy.onnx import export_onnx as export_onnx
from calibrant.deploy.torch_export import export_program as export_program
from calibrant.losses.fedlas import FeDLaS as FeDLaS
from calibrant.losses.registry import LOSSES as LOSSES, Loss as Loss
from calibrant.metrics.accumulator import Accumulator as Accumulator
from calibrant.metrics.binned import (
    ada_ece as ada_ece,
    classwise_ece as classwise_ece,
    debiased_ece as debiased_ece,
    ece as ece,
    mce as mce,
    over_ece as over_ece,
    per_class_ece as per_class_ece,
    under_ece as under_ece,
)
from calibrant.metrics.curves import (
    histogram as histogram,
    margin_groups as margin_groups,
    reliability as reliability,
    smooth_reliability as smooth_reliability,
)
from calibrant.metrics.evaluation import Evaluation as Evaluation
from calibrant.metrics.intervals import (
    CalibrationTest as CalibrationTest,
    Estimate as Estimate,
    calibration_test as calibration_test,
)
from calibrant.metrics.ranking import (
    aurc as aurc,
    auroc as auroc,
    fpr95 as fpr95,
    ood_auroc as ood_auroc,
    risk_coverage as risk_coverage,
)
from calibrant.metrics.reductions import (
    Pairs as Pairs,
    binary as binary,
    margins as margins,
    multilabel as multilabel,
    one_vs_rest as one_vs_rest,
    top_label as top_label,
)
from calibrant.metrics.registry import METRICS as METRICS, Metric as Metric
from calibrant.metrics.scores import accuracy as accuracy, brier as brier, nll as nll
from calibrant.metrics.smooth import ks as ks, smce as smce, smooth_ece as smooth_ece
from calibrant.monitor import Monitor as Monitor, MonitorReport as MonitorReport
from calibrant.retrain.backbone import replace_head as replace_head
from calibrant.retrain.maccal import MaCCal as MaCCal
from calibrant.retrain.masked_classifier import MaskedClassifier as MaskedClassifier
from calibrant.workflows.apply import apply_file as apply_file
from calibrant.workflows.compare import Comparison as Comparison, compare as compare
from calibrant.workflows.cross_fit import CrossFit as CrossFit, cross_fit as cross_fit
from calibrant.workflows.effect import Effect as Effect, effect_file as effect_file
from calibrant.workflows.evaluate import evaluate as evaluate, evaluate_file as evaluate_file
from calibrant.workflows.fit import fit_file as fit_file
from calibrant.workflows.retrain import retrain as retrain
