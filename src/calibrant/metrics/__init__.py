"""Measuring calibration: metrics, reductions to pairs, intervals, curves, streams."""

from typing import TYPE_CHECKING

from calibrant._core.binning import Bins as Bins
from calibrant._core.messages import no_attribute
from calibrant.metrics.accumulator import Accumulator as Accumulator
from calibrant.metrics.binned import (
    ada_ece as ada_ece,
    binned_pairs as binned_pairs,
    classwise_ece as classwise_ece,
    debiased_ece as debiased_ece,
    ece as ece,
    mce as mce,
    over_ece as over_ece,
    per_class_ece as per_class_ece,
    under_ece as under_ece,
)
from calibrant.metrics.clinical import (
    DecisionCurve as DecisionCurve,
    brier_skill as brier_skill,
    calibration_intercept as calibration_intercept,
    calibration_slope as calibration_slope,
    citl as citl,
    decision_curve as decision_curve,
    e50 as e50,
    e90 as e90,
    hosmer_lemeshow_p as hosmer_lemeshow_p,
    ici as ici,
    spiegelhalter_p as spiegelhalter_p,
    spiegelhalter_z as spiegelhalter_z,
)
from calibrant.metrics.curves import (
    ClassReliability as ClassReliability,
    Histogram as Histogram,
    MarginReliability as MarginReliability,
    SmoothReliability as SmoothReliability,
    confidence_histogram as confidence_histogram,
    reliability as reliability,
    reliability_by_class as reliability_by_class,
    reliability_by_margin as reliability_by_margin,
    smooth_reliability as smooth_reliability,
)
from calibrant.metrics.evaluation import CheckedLimit as CheckedLimit, Evaluation as Evaluation
from calibrant.metrics.intervals import Estimate as Estimate
from calibrant.metrics.ranking import (
    RiskCoverage as RiskCoverage,
    aurc as aurc,
    auroc as auroc,
    fpr95 as fpr95,
    ood_auroc as ood_auroc,
    risk_coverage as risk_coverage,
    roc_auc as roc_auc,
)
from calibrant.metrics.reductions import (
    Pairs as Pairs,
    margins as margins,
    multilabel as multilabel,
    one_vs_rest as one_vs_rest,
    positive_class as positive_class,
    top_label as top_label,
)
from calibrant.metrics.registry import METRICS as METRICS
from calibrant.metrics.reliability import Reliability as Reliability
from calibrant.metrics.scores import accuracy as accuracy, brier as brier, nll as nll
from calibrant.metrics.smooth import (
    CalibrationTest as CalibrationTest,
    calibration_test as calibration_test,
    ks as ks,
    smce as smce,
    smooth_ece as smooth_ece,
)
from calibrant.metrics.summary import Metric as Metric

if not TYPE_CHECKING:  # type checkers know the names above, and complain about others

    def __getattr__(name: str) -> object:
        """Return a metric that the registry found."""
        if name not in METRICS:
            raise no_attribute(__name__, name, [*METRICS, *globals()])
        return METRICS[name].compute
