"""Make classifiers and language models say how sure they are, and mean it.

>>> import calibrant as cal
>>> cal.ece([0.9, 0.6], [1, 0])
0.35
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from calibrant._binning import Bins as Bins
    from calibrant._models import layer_inputs as layer_inputs
    from calibrant.calibrators import CALIBRATORS as CALIBRATORS
    from calibrant.calibrators.adaptive import (
        SMART as SMART,
        ParametrizedTemperatureScaling as ParametrizedTemperatureScaling,
        margin_bounds as margin_bounds,
    )
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
    from calibrant.calibrators.classwise import ClassTemperatures as ClassTemperatures
    from calibrant.calibrators.crossfit import CrossFit as CrossFit, cross_fit as cross_fit
    from calibrant.calibrators.curves import (
        margin_change as margin_change,
        margin_temperature as margin_temperature,
    )
    from calibrant.calibrators.features import (
        FeatureClipping as FeatureClipping,
        GroupCalibration as GroupCalibration,
        ProCal as ProCal,
    )
    from calibrant.calibrators.files import (
        Effect as Effect,
        apply_file as apply_file,
        effect_file as effect_file,
        fit_file as fit_file,
    )
    from calibrant.calibrators.isotonic import (
        IsotonicCalibration as IsotonicCalibration,
        IsotonicOneVsRest as IsotonicOneVsRest,
    )
    from calibrant.calibrators.scaling import (
        EnsembleTemperatureScaling as EnsembleTemperatureScaling,
        Identity as Identity,
        TemperatureScaling as TemperatureScaling,
    )
    from calibrant.calibrators.smooth_maps import (
        BetaCalibration as BetaCalibration,
        SigmoidScaling as SigmoidScaling,
        SplineCalibration as SplineCalibration,
    )
    from calibrant.calibrators.toplabel import Blend as Blend, OddsScaling as OddsScaling
    from calibrant.comparison import Comparison as Comparison, compare as compare
    from calibrant.data import (
        open_predictions as open_predictions,
        sample_path as sample_path,
        save_predictions as save_predictions,
    )
    from calibrant.decide import (
        ConformalSets as ConformalSets,
        PriorCorrection as PriorCorrection,
        Threshold as Threshold,
        conformal as conformal,
        estimate_prior as estimate_prior,
        label_shift as label_shift,
        shift_prior as shift_prior,
        threshold as threshold,
    )
    from calibrant.deploy import (
        CalibratedModel as CalibratedModel,
        calibrated as calibrated,
        collect as collect,
        fold as fold,
    )
    from calibrant.export import export_onnx as export_onnx, export_program as export_program
    from calibrant.heads import (
        MaCCal as MaCCal,
        MaskedClassifier as MaskedClassifier,
        replace_head as replace_head,
        retrain_file as retrain_file,
    )
    from calibrant.io import load as load, save as save
    from calibrant.losses import LOSSES as LOSSES, Loss as Loss
    from calibrant.losses.fedlas import FeDLaS as FeDLaS
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
    from calibrant.metrics.files import evaluate_file as evaluate_file
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
    from calibrant.metrics.rows import (
        Pairs as Pairs,
        binary as binary,
        margins as margins,
        multilabel as multilabel,
        one_vs_rest as one_vs_rest,
        top_label as top_label,
    )
    from calibrant.metrics.scores import accuracy as accuracy, brier as brier, nll as nll
    from calibrant.metrics.smooth import ks as ks, smce as smce, smooth_ece as smooth_ece
    from calibrant.metrics.stream import Accumulator as Accumulator, evaluate as evaluate
    from calibrant.metrics.table import METRICS as METRICS, Metric as Metric
    from calibrant.monitor import Monitor as Monitor, MonitorReport as MonitorReport

_WHERE = {
    "_binning": ["Bins"],
    "_models": ["layer_inputs"],
    "calibrators": ["CALIBRATORS"],
    "calibrators.adaptive": ["ParametrizedTemperatureScaling", "SMART", "margin_bounds"],
    "calibrators.affine": ["DirichletCalibration", "MatrixScaling", "VectorScaling"],
    "calibrators.auto": ["Auto"],
    "calibrators.base": ["Calibrator"],
    "calibrators.binning": ["BBQ", "HistogramBinning", "HistogramOneVsRest", "ScalingBinning"],
    "calibrators.classwise": ["ClassTemperatures"],
    "calibrators.crossfit": ["CrossFit", "cross_fit"],
    "calibrators.curves": ["margin_change", "margin_temperature"],
    "calibrators.features": ["FeatureClipping", "GroupCalibration", "ProCal"],
    "calibrators.files": ["Effect", "apply_file", "effect_file", "fit_file"],
    "calibrators.isotonic": ["IsotonicCalibration", "IsotonicOneVsRest"],
    "calibrators.scaling": ["EnsembleTemperatureScaling", "Identity", "TemperatureScaling"],
    "calibrators.smooth_maps": ["BetaCalibration", "SigmoidScaling", "SplineCalibration"],
    "calibrators.toplabel": ["Blend", "OddsScaling"],
    "comparison": ["Comparison", "compare"],
    "data": ["open_predictions", "sample_path", "save_predictions"],
    "decide": [
        "ConformalSets",
        "PriorCorrection",
        "Threshold",
        "conformal",
        "estimate_prior",
        "label_shift",
        "shift_prior",
        "threshold",
    ],
    "deploy": ["CalibratedModel", "calibrated", "collect", "fold"],
    "export": ["export_onnx", "export_program"],
    "heads": ["MaCCal", "MaskedClassifier", "replace_head", "retrain_file"],
    "io": ["load", "save"],
    "losses": ["LOSSES", "Loss"],
    "losses.fedlas": ["FeDLaS"],
    "metrics.binned": [
        "ada_ece",
        "classwise_ece",
        "debiased_ece",
        "ece",
        "mce",
        "over_ece",
        "per_class_ece",
        "under_ece",
    ],
    "metrics.curves": ["histogram", "margin_groups", "reliability", "smooth_reliability"],
    "metrics.evaluation": ["Evaluation"],
    "metrics.files": ["evaluate_file"],
    "metrics.intervals": ["CalibrationTest", "Estimate", "calibration_test"],
    "metrics.ranking": ["aurc", "auroc", "fpr95", "ood_auroc", "risk_coverage"],
    "metrics.rows": ["Pairs", "binary", "margins", "multilabel", "one_vs_rest", "top_label"],
    "metrics.scores": ["accuracy", "brier", "nll"],
    "metrics.smooth": ["ks", "smce", "smooth_ece"],
    "metrics.stream": ["Accumulator", "evaluate"],
    "metrics.table": ["METRICS", "Metric"],
    "monitor": ["Monitor", "MonitorReport"],
}
_SUBMODULES = (
    *("calibrators", "data", "decide", "heads", "llm", "losses"),
    *("metrics", "monitor", "plots", "sklearn"),
)
_MODULE = {name: module for module, names in _WHERE.items() for name in names}

__all__ = sorted(_MODULE)


def __getattr__(name: str) -> Any:
    """Import a public name, or a submodule, when it is first used."""
    if name == "__version__":
        from importlib.metadata import PackageNotFoundError, version

        try:
            return version("calibrant")
        except PackageNotFoundError:  # a copy of the source that was never installed
            return "unknown"
    if name in _MODULE:
        value = getattr(import_module(f"calibrant.{_MODULE[name]}"), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return import_module(f"calibrant.{name}")
    raise AttributeError(f"module 'calibrant' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__", *_SUBMODULES]
