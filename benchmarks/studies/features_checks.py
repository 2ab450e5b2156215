"""What is run for each cell of ``features.py``: statements, of which the last is a truth.

An answer that is neither "yes" nor "no" says what there is in part. A "no" with words says what the
public names mean that contain a word that is looked for.
"""

FEATURES = {
    "Measure": {
        "ECE": r"ece$|expected_?calibration|calibrationerror",
        "interval of the ECE": r"bootstrap|get_ci$",
        "test of calibration with a p-value": r"p_?value|test$|calibration_test",
        "smooth ECE": r"smooth.*(ece|calibration)|smece",
        "class-wise ECE": r"class_?wise|top_label_ece",
        "reliability diagram": r"reliability|calibration_curve|plot_calib",
        "split of losses into calibration and refinement": r"refinement|loss_split|withcalibration",
        "calibration slope and intercept": r"slope|cox_",
        "calibration in the large": r"citl|in_the_large|cox_",
        "Spiegelhalter's z": r"spiegelhalter",
        "Hosmer-Lemeshow test": r"hosmer",
        "ICI, E50, E90": r"_?ici($|_)|e90",
        "decision curve (net benefit)": r"net_benefit|decision_curve",
        "Brier skill": r"skill|normalizedmetric",
        "risk against coverage (AURC)": r"aurc|auarc",
        "pixels and tokens without a label": r"ignore_index|segmentation|class_dim",
    },
    "Calibrate": {
        "temperature": r"temperature",
        "vector, matrix": r"vector|matrix_?scal|matrixscal|logisticcal",
        "Dirichlet": r"dirichlet",
        "isotonic": r"isotonic",
        "Venn-Abers": r"venn",
        "beta": r"beta_?cal",
        "splines": r"spline",
        "histogram, BBQ": r"histogram|bbq",
        "temperature for each example": r"^smart$|^pts$|parametri[sz]ed|samplewise",
        "choice of the method by cross-validation": r"^auto|compare",
        "tags (multi-label)": r"multi_?label|tag_?scal",
        "multicalibration over columns": r"multi_?cal|mcgrad",
        "updates by a stream": r"^update|online",
        "losses for training": r"loss(es)?$|penalty|focal",
        "a map for each token of a language model": r"token_?temp|^ats$",
    },
    "Decide": {
        "threshold with a bound on precision or recall": r"controller|risk_control|^thresholds?$",
        "several limits at once": r"controller|risk_control|^thresholds?$",
        "thresholds of tags": r"multilabelclassificationcontroller|^thresholds$",
        "conformal sets": r"conformal",
        "conformal sets by class": r"class_?cond|conformal|mondrian",
        "conformal sets by group": r"conformal|mondrian",
        "conformal sets after a known shift": r"conformal|covariate",
        "sets of neighbouring classes": r"ordinal|ordered|contiguous",
        "correction of class frequencies": r"preval|label_?shift|priorcorr",
    },
    "Watch": {
        "alarm on labelled examples, valid at all times": r"monitor|martingale|performancecalc",
        "estimates without labels": r"cbpe|estimate_performance",
        "drift of single features": r"univariate|data_?drift",
        "search for groups that are off": r"slices|segment.*error|multicalibrationerror",
        "checks of data quality": r"missingvalues|data_?quality",
    },
    "Language models": {
        "confidence of answers, from graded ones": r"scorecalibrator|answer",
        "scores of samples (semantic entropy)": r"semantic_?(entropy|negentropy)|blackbox",
        "judges": r"judge|panel",
    },
    "Use": {
        "torch tensors in and out": r"torch|tensor",
        "scikit-learn classifier": r"classifier$|wrapclassifier|sklearn",
        "ONNX": r"onnx",
        "saved without pickle": r"serialize|save|state_dict",
        "command line": r"cli$|__main__",
        "report as a page": r"report$|html",
    },
    "Not in calibrant": {
        "calibration for regression": r"regress",
        "conformal intervals for regression": r"regress",
        "object detection": r"detection",
        "ensembles and Bayesian networks": r"bayes|ensemble|mc_?dropout|swag",
        "time series": r"time_?series",
        "errors of regression models without labels": r"^dle$",
        "unknown inputs (out of distribution)": r"(^|_)ood_|out_of_dist",
        "claims of long texts, and code": r"long_?(text|form)|codegen",
    },
}
"""Features, each with the names that are looked for where a library has none."""

PREPARED = """
import warnings, tempfile, os, sys
import numpy as np
warnings.simplefilter("ignore")
rng = np.random.default_rng(0)
z = 4 * rng.normal(size=(900, 4))
y = (z / 2 + rng.gumbel(size=z.shape)).argmax(-1)
P = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
a, b = slice(0, 600), slice(600, 900)
zb = 4 * rng.normal(size=900)
yb = (rng.random(900) < 1 / (1 + np.exp(1 - zb / 2))).astype(int)
pb = 1 / (1 + np.exp(-zb))
Pb = np.stack([1 - pb, pb], -1)
g = np.arange(900) % 3
tags = (z / 2 + rng.logistic(size=z.shape) > 0).astype(int)
tags[np.arange(900), z.argmax(-1)] = 1
nll = lambda p, y: -np.log(np.clip(p, 1e-12, 1))[np.arange(len(y)), y].mean()
better = lambda q: nll(np.asarray(q), y) < nll(P, y) - 0.05
rows, P1 = np.arange(900)[:, None], 1 / (1 + np.exp(-z))
betterb = lambda q: nll(np.stack([1 - np.asarray(q), np.asarray(q)], -1), yb) < nll(Pb, yb) - 0.05


def fixed(probs):
    from sklearn.base import BaseEstimator, ClassifierMixin

    class Fixed(ClassifierMixin, BaseEstimator):
        classes_, is_fitted_ = np.arange(probs.shape[1]), True

        def fit(self, X, y):
            return self

        def predict_proba(self, X):
            return probs[np.asarray(X)[:, 0].astype(int)]

        def predict(self, X):
            return self.predict_proba(X).argmax(-1)

        def __sklearn_is_fitted__(self):
            return True

    return Fixed()
"""

SETS = "s = {}; 0.85 < s[np.arange(300), y[b]].mean() < 0.97"

_CALIBRANT = {
    "ECE": "cal.ece(z, y) > 0.1",
    "interval of the ECE": "e = cal.evaluate(z, y)['ece']; e.low < e.value < e.high",
    "test of calibration with a p-value": "cal.metrics.calibration_test(z, y).p_value < 0.01",
    "smooth ECE": "cal.smooth_ece(z, y) > 0.1",
    "class-wise ECE": "cal.classwise_ece(z, y) > 0.05",
    "reliability diagram": "cal.evaluate(z, y).plot() is not None",
    "split of losses into calibration and refinement": (
        "from calibrant.workflows.loss_split import loss_split\n"
        "loss_split(z, y)['nll'].calibration.low > 0"
    ),
    "calibration slope and intercept": (
        "abs(cal.metrics.calibration_slope(zb, yb) - 0.5) < 0.1 and "
        "cal.metrics.calibration_intercept(zb, yb) < -0.5"
    ),
    "calibration in the large": "cal.metrics.citl(zb, yb) < -0.5",
    "Spiegelhalter's z": "cal.metrics.spiegelhalter_z(zb, yb) > 3",
    "Hosmer-Lemeshow test": "cal.metrics.hosmer_lemeshow_p(zb, yb) < 0.01",
    "ICI, E50, E90": "0 < cal.metrics.ici(zb, yb) < cal.metrics.e90(zb, yb)",
    "decision curve (net benefit)": "len(cal.metrics.decision_curve(zb, yb).net_benefit) > 1",
    "Brier skill": "0 < cal.metrics.brier_skill(zb, yb) < 1",
    "risk against coverage (AURC)": "0 < cal.aurc(z, y) < 1",
    "pixels and tokens without a label": (
        "d = np.where(np.arange(900) % 2, y, 255).reshape(9, 10, 10)\n"
        "x = np.moveaxis(z.reshape(9, 10, 10, 4), -1, 1)\n"
        "e = cal.evaluate(x, d, class_dim=1, ignore_index=255, level=None)\n"
        "np.isclose(e['ece'].value, cal.ece(z[1::2], y[1::2]))"
    ),
    "temperature": "better(cal.TemperatureScaling().fit(z, y).predict_proba(z))",
    "vector, matrix": (
        "all(better(cal.CALIBRATORS[m]().fit(z, y).predict_proba(z)) for m in ('vector', 'matrix'))"
    ),
    "Dirichlet": "better(cal.CALIBRATORS['dirichlet']().fit(z, y).predict_proba(z))",
    "isotonic": "better(cal.CALIBRATORS['isotonic']().fit(z, y).predict_proba(z))",
    "Venn-Abers": "betterb(cal.CALIBRATORS['venn_abers']().fit(zb, yb).predict_proba(zb))",
    "beta": "betterb(cal.CALIBRATORS['beta']().fit(zb, yb).predict_proba(zb))",
    "splines": "better(cal.CALIBRATORS['spline']().fit(z, y).predict_proba(z))",
    "histogram, BBQ": (
        "all(better(cal.CALIBRATORS[m]().fit(z, y).predict_proba(z)) for m in ('histogram', 'bbq'))"
    ),
    "temperature for each example": "np.ptp(cal.SMART().fit(z, y).temperature(z)) > 0",
    "choice of the method by cross-validation": "better(cal.Auto().fit(z, y).predict_proba(z))",
    "tags (multi-label)": "cal.TAG_CALIBRATORS['tags']().fit(z, tags).slope_.shape == (4,)",
    "multicalibration over columns": (
        "m = cal.CALIBRATORS['multicalibration']().fit(zb, yb, features=g[:, None] * 1.0)\n"
        "betterb(m.predict_proba(zb, features=g[:, None] * 1.0))"
    ),
    "updates by a stream": (
        "m = cal.TemperatureScaling().update(z[a], y[a], half_life=500).update(z[b], y[b])\n"
        "better(m.predict_proba(z))"
    ),
    "losses for training": (
        "import torch\nfloat(cal.LOSSES['focal']()(torch.tensor(z), torch.tensor(y))) > 0"
    ),
    "a map for each token of a language model": (
        "from calibrant.llm.heads.ats import ATSHead\nimport torch\n"
        "t = ATSHead(width=16, attention_heads=2)(torch.randn(2, 7, 16)); t.shape[:2] == (2, 7)"
    ),
    "threshold with a bound on precision or recall": (
        "t = cal.threshold(zb, yb, recall=0.9); (pb[yb == 1] >= t.threshold).mean() >= 0.9"
    ),
    "several limits at once": (
        "t = cal.threshold(zb, yb, recall=0.6, precision=0.6); len(t.limits) == 2"
    ),
    "thresholds of tags": (
        "from calibrant.decide import thresholds\nlen(thresholds(z, tags, recall=0.8)) == 4"
    ),
    "conformal sets": SETS.format("cal.conformal(z[a], y[a], coverage=0.9).sets(z[b])"),
    "conformal sets by class": SETS.format("cal.conformal(z[a], y[a], by='class').sets(z[b])"),
    "conformal sets by group": SETS.format(
        "cal.conformal(z[a], y[a], by=g[a]).sets(z[b], group=g[b])"
    ),
    "conformal sets after a known shift": SETS.format(
        "cal.conformal(z[a], y[a], weight=1.0 + g[a]).sets(z[b], weight=1.0 + g[b])"
    ),
    "sets of neighbouring classes": SETS.format(
        "cal.conformal(z[a], y[a], score='ordered').sets(z[b])"
    ),
    "correction of class frequencies": (
        "from calibrant.decide import shift_prior\n"
        "q = shift_prior(zb / 2, old_prior=[0.6, 0.4], new_prior=[0.9, 0.1]); q.shape == zb.shape"
    ),
    "alarm on labelled examples, valid at all times": (
        "m = cal.Monitor(window=100); m.update(probs=P, labels=y); m.alarm is not None"
    ),
    "estimates without labels": (
        "e = cal.estimate_performance(z[b] / 2, {'logits': z[a] / 2, 'labels': y[a]})\n"
        "abs(e['accuracy'].value - (z[b].argmax(-1) == y[b]).mean()) < 0.1"
    ),
    "search for groups that are off": "cal.find_slices(zb, yb, metadata={'g': g}) is not None",
    "confidence of answers, from graded ones": (
        "from calibrant.llm.answers.calibrator import AnswerCalibrator\n"
        "m = AnswerCalibrator().fit(pb, yb)\n"
        "betterb(m.predict(pb))"
    ),
    "scores of samples (semantic entropy)": (
        "from calibrant.llm.answers.signals import semantic_entropy\n"
        "np.isclose(semantic_entropy([[0, 2], [1, 3]]), np.log(2))"
    ),
    "judges": ("from calibrant.estimate.judges import agreement\nagreement(yb, yb) is not None"),
    "torch tensors in and out": (
        "import torch\n"
        "q = cal.TemperatureScaling().fit(torch.tensor(z), torch.tensor(y))(torch.tensor(z))\n"
        "isinstance(q, torch.Tensor)"
    ),
    "scikit-learn classifier": (
        "from sklearn.linear_model import LogisticRegression\n"
        "c = cal.CalibratedClassifier(LogisticRegression()).fit(z, y); "
        "c.predict_proba(z).shape == P.shape"
    ),
    "ONNX": (
        "f = tempfile.mkdtemp() + '/m.onnx'\n"
        "cal.export(cal.TemperatureScaling().fit(z, y), f); os.path.getsize(f) > 0"
    ),
    "saved without pickle": (
        "f = tempfile.mkdtemp() + '/m'; m = cal.TemperatureScaling().fit(z, y); cal.save(m, f)\n"
        "np.allclose(cal.load(f).predict_proba(z), m.predict_proba(z))"
    ),
    "command line": (
        "import subprocess\n"
        "subprocess.run([sys.executable, '-m', 'calibrant', '--help'], "
        "capture_output=True).returncode == 0"
    ),
    "report as a page": (
        "f = tempfile.mkdtemp() + '/r.html'; cal.report({'logits': z, 'labels': y}).save(f)\n"
        "'<html' in open(f, encoding='utf-8').read()"
    ),
}

CALIBRANT = {
    **{
        feature: ("yes", f"import calibrant as cal\n{code}") for feature, code in _CALIBRANT.items()
    },
    "calibration for regression": ("no", "a logistic regression of signals"),
    "conformal intervals for regression": ("no", "a logistic regression of signals"),
    "ensembles and Bayesian networks": ("no", "a calibrator of the name"),
    "unknown inputs (out of distribution)": (
        "figures of given scores",
        "from calibrant.metrics import ood_auroc; ood_auroc([0.9, 0.8], [0.1, 0.2]) == 1",
    ),
}

MAPIE = {
    "interval of the ECE": ("no", "bootstraps are of regressors"),
    "updates by a stream": ("no", "update is of tests of exchangeability"),
    "losses for training": ("no", "loss is a risk that is bounded"),
    "conformal sets after a known shift": ("no", "no conformal class takes weights for a shift"),
    "scores of samples (semantic entropy)": ("no", "semantic means segmentation"),
    "calibration for regression": ("no", "intervals only, see below"),
    "ensembles and Bayesian networks": ("no", "ensembles are those of cross-conformal fits"),
    "ECE": (
        "as flags of right answers",
        "from mapie.metrics.calibration import expected_calibration_error as ece\n"
        "ece((P.argmax(1) == y).astype(int), P, num_bins=16) > 0.1",
    ),
    "test of calibration with a p-value": (
        "two classes",
        "from mapie.metrics.calibration import kolmogorov_smirnov_p_value, kuiper_p_value\n"
        "max(kolmogorov_smirnov_p_value(yb, pb), kuiper_p_value(yb, pb)) < 0.01",
    ),
    "class-wise ECE": (
        "by predicted class",
        "from mapie.metrics.calibration import top_label_ece\ntop_label_ece(y, P) > 0.1",
    ),
    "Spiegelhalter's z": (
        "yes",
        "from mapie.metrics.calibration import spiegelhalter_statistic\n"
        "spiegelhalter_statistic(yb, pb) > 3",
    ),
    "risk against coverage (AURC)": (
        "accuracy and rejection",
        "from mapie.metrics.uncertainty import auarc\n"
        "0 < auarc((P.argmax(1) == y).astype(int), 1 - P.max(1)) < 1",
    ),
    "isotonic": (
        "in its top-label method",
        "from mapie.calibration import TopLabelCalibrator\n"
        "m = TopLabelCalibrator(fixed(P), calibrator='isotonic', cv='prefit').fit(rows, y)\n"
        "np.nanmax(m.predict_proba(rows)) <= 1",
    ),
    "Venn-Abers": (
        "yes",
        "from mapie.calibration import VennAbersCalibrator\n"
        "m = VennAbersCalibrator(fixed(P), cv='prefit', inductive=True).fit(rows, y)\n"
        "better(m.predict_proba(rows))",
    ),
    "pixels and tokens without a label": (
        "recall of masks",
        "from mapie.risk_control import SemanticSegmentationController as C\n"
        "masks = (rng.random((30, 1, 8, 8)) < 0.6).astype(int)\n"
        "m = C(lambda x: np.clip(0.8 * x + 0.1, 0, 1), risk='recall', target_level=0.8)\n"
        "m.calibrate(masks.astype(float), masks).best_predict_param is not None",
    ),
    "tags (multi-label)": (
        "thresholds only",
        "from mapie.risk_control import MultiLabelClassificationController as C\n"
        "m = C(lambda x: P1[x[:, 0]], risk='recall', target_level=0.8)\n"
        "float(m.calibrate(rows, tags).best_predict_param[0]) < 1",
    ),
    "threshold with a bound on precision or recall": (
        "yes",
        "from mapie.risk_control import BinaryClassificationController as C\n"
        "m = C(lambda x: Pb[x[:, 0]], 'recall', 0.9, confidence_level=0.95).calibrate(rows, yb)\n"
        "(pb[yb == 1] >= m.best_predict_param).mean() >= 0.9",
    ),
    "several limits at once": (
        "yes",
        "from mapie.risk_control import BinaryClassificationController as C\n"
        "m = C(lambda x: Pb[x[:, 0]], ['recall', 'precision'], [0.6, 0.6])\n"
        "m.calibrate(rows, yb).best_predict_param is not None",
    ),
    "thresholds of tags": (
        "one for all tags",
        "from mapie.risk_control import MultiLabelClassificationController as C\n"
        "m = C(lambda x: P1[x[:, 0]], risk='recall', target_level=0.8)\n"
        "np.size(m.calibrate(rows, tags).best_predict_param) == 1",
    ),
    "conformal sets": (
        "yes",
        "from mapie.classification import SplitConformalClassifier as C\n"
        "m = C(fixed(P), confidence_level=0.9, "
        "conformity_score='lac').conformalize(rows[a], y[a])\n"
        + SETS.format("m.predict_set(rows[b])[1][..., 0]"),
    ),
    "conformal sets by class": ("no", "conditional sets take features, not labels"),
    "conformal sets by group": (
        "yes",
        "from mapie.conditional_conformal_prediction import "
        "ConditionalSplitConformalClassifier as C\n"
        "m = C(lambda x: np.eye(3)[x[:, 0].astype(int) % 3], fixed(P), confidence_level=0.9)\n"
        "m.conformalize(rows[a], y[a])\n" + SETS.format("m.predict_set(rows[b])[1][..., 0]"),
    ),
    "alarm on labelled examples, valid at all times": (
        "of risks such as accuracy",
        "from mapie.exchangeability_testing import RiskMonitoring\n"
        "m = RiskMonitoring('accuracy', warn=False); m.compute_threshold(y, P.argmax(1))\n"
        "m.update(y, np.zeros(900, int)); bool(m.harmful_shift_detected)",
    ),
    "scikit-learn classifier": (
        "yes",
        "from mapie.calibration import TopLabelCalibrator\n"
        "hasattr(TopLabelCalibrator(), 'get_params')",
    ),
    "conformal intervals for regression": (
        "yes",
        "from mapie.regression import SplitConformalRegressor as R\n"
        "from sklearn.linear_model import LinearRegression\n"
        "x = rng.normal(size=(900, 1)); t = x[:, 0] + rng.normal(size=900)\n"
        "m = R(LinearRegression().fit(x[a], t[a]), confidence_level=0.9).conformalize(x[a], t[a])\n"
        "i = m.predict_interval(x[b])[1][..., 0]\n"
        "0.85 < ((i[:, 0] <= t[b]) & (t[b] <= i[:, 1])).mean() < 0.97",
    ),
    "time series": (
        "yes",
        "from mapie.regression import TimeSeriesRegressor as R\n"
        "from mapie.subsample import BlockBootstrap\n"
        "x = rng.normal(size=(200, 1)); t = x[:, 0] + rng.normal(size=200)\n"
        "m = R(cv=BlockBootstrap(n_resamplings=5, length=20), agg_function='mean').fit(x, t)\n"
        "m.predict(x, confidence_level=0.9)[1].shape[:2] == (200, 2)",
    ),
}

CREPES = {
    "test of calibration with a p-value": ("no", "p-values are conformal"),
    "conformal sets after a known shift": ("no", "no method takes weights"),
    "updates by a stream": (
        "conformal p-values",
        "from crepes import ConformalClassifier\nfrom crepes.extras import hinge\n"
        "p = ConformalClassifier().predict_p_online(hinge(P), np.arange(4), y, warm_start=False)\n"
        "p.shape == P.shape",
    ),
    "conformal sets": (
        "yes",
        "from crepes import ConformalClassifier\nfrom crepes.extras import hinge\n"
        "c = ConformalClassifier().fit(hinge(P[a], np.arange(4), y[a]))\n"
        + SETS.format("c.predict_set(hinge(P[b]), confidence=0.9, smoothing=False).astype(bool)"),
    ),
    "conformal sets by class": (
        "yes",
        "from crepes import WrapClassifier\n"
        "m = WrapClassifier(fixed(P)).calibrate(rows[a], y[a], class_cond=True)\n"
        + SETS.format("m.predict_set(rows[b], confidence=0.9, labels=False).astype(bool)"),
    ),
    "conformal sets by group": (
        "yes",
        "from crepes import ConformalClassifier\nfrom crepes.extras import hinge\n"
        "c = ConformalClassifier().fit(hinge(P[a], np.arange(4), y[a]), bins=g[a])\n"
        + SETS.format("c.predict_set(hinge(P[b]), bins=g[b], confidence=0.9).astype(bool)"),
    ),
    "alarm on labelled examples, valid at all times": (
        "of exchangeability",
        "from crepes.martingales import SimpleJumper\n"
        "m = SimpleJumper().apply(np.concatenate([rng.random(200), rng.random(300) ** 4]))\n"
        "float(np.max(m)) > 20",
    ),
    "scikit-learn classifier": (
        "around one",
        "from crepes import WrapClassifier\n"
        "np.allclose(WrapClassifier(fixed(P)).predict_proba(rows), P)",
    ),
    "calibration for regression": (
        "predictive distributions",
        "from crepes import ConformalPredictiveSystem\n"
        "t = rng.normal(size=900); c = ConformalPredictiveSystem().fit(t[a])\n"
        "0.4 < c.predict_p(np.zeros(300), y=t[b]).mean() < 0.6",
    ),
    "conformal intervals for regression": (
        "yes",
        "from crepes import ConformalRegressor\n"
        "t = rng.normal(size=900); c = ConformalRegressor().fit(t[a])\n"
        "i = c.predict_int(np.zeros(300), confidence=0.9)\n"
        "0.85 < ((i[:, 0] <= t[b]) & (t[b] <= i[:, 1])).mean() < 0.97",
    ),
}

NETCAL_CALIBRATED = "m = {}; m.fit(P, y); better(m.transform(P))"
NETCAL = {
    "temperature for each example": ("no", "name of a decorator"),
    "saved without pickle": (
        "no",
        "save_model is torch.save with a pickle, which torch from 2.6 on does not load by default",
    ),
    "conformal intervals for regression": ("no", "regression is of distributions"),
    "ECE": ("yes", "from netcal.metrics import ECE; ECE(15).measure(P, y) > 0.1"),
    "reliability diagram": (
        "yes",
        "import matplotlib; matplotlib.use('Agg')\n"
        "from netcal.presentation import ReliabilityDiagram; "
        "ReliabilityDiagram(10).plot(P, y) is not None",
    ),
    "temperature": (
        "yes",
        "from netcal.scaling import TemperatureScaling\n"
        + NETCAL_CALIBRATED.format("TemperatureScaling()"),
    ),
    "vector, matrix": (
        "matrix",
        "from netcal.scaling import LogisticCalibration\n"
        + NETCAL_CALIBRATED.format("LogisticCalibration()"),
    ),
    "isotonic": (
        "yes",
        "from netcal.binning import IsotonicRegression\n"
        "m = IsotonicRegression(); m.fit(pb, yb); betterb(m.transform(pb))",
    ),
    "beta": (
        "yes",
        "from netcal.scaling import BetaCalibration\n"
        + NETCAL_CALIBRATED.format("BetaCalibration()"),
    ),
    "histogram, BBQ": (
        "yes",
        "from netcal.binning import BBQ, HistogramBinning\n"
        "m, n = BBQ(), HistogramBinning(10); m.fit(pb, yb); n.fit(pb, yb)\n"
        "betterb(m.transform(pb)) and betterb(n.transform(pb))",
    ),
    "losses for training": (
        "penalties",
        "from netcal.regularization import MMCEPenalty; import torch\n"
        "float(MMCEPenalty(weight=1.0)(torch.tensor(z), torch.tensor(y))) > 0",
    ),
    "calibration for regression": (
        "yes",
        "from netcal.regression import VarianceScaling\n"
        "t = 2 * rng.normal(size=900); m = VarianceScaling(); x = (np.zeros(900), np.ones(900))\n"
        "m.fit(x, t); 1.7 < float(np.mean(m.transform(x))) < 2.3",
    ),
    "object detection": (
        "yes",
        "from netcal.metrics import ECE\nECE(10, detection=True).measure(pb, yb) > 0.05",
    ),
}

PROBMETRICS_METRICS = (
    "import torch\nfrom probmetrics.metrics import Metrics\n"
    "m = Metrics.from_names([{!r}])\n"
    "v = m.compute_all_from_labels_probs(torch.tensor(y), torch.tensor(P)); {}"
)
PROBMETRICS_CALIBRATED = (
    "from probmetrics.calibrators import get_calibrator\n"
    "m = get_calibrator({!r}); m.fit(P, y); better(m.predict_proba(P))"
)
PROBMETRICS_BINARY = (
    "from probmetrics.calibrators import get_calibrator\n"
    "m = get_calibrator({!r}); m.fit(Pb, yb); betterb(m.predict_proba(Pb)[:, 1])"
)
PROBMETRICS = {
    "beta": ("yes", PROBMETRICS_BINARY.format("beta")),
    "Venn-Abers": ("yes", PROBMETRICS_CALIBRATED.format("ivap")),
    "splines": (
        "yes",
        "from probmetrics.calibrators.splines import MLISplineCalibrator\n"
        "m = MLISplineCalibrator(); m.fit(Pb, yb); betterb(m.predict_proba(Pb)[:, 1])",
    ),
    "histogram, BBQ": (
        "yes",
        "from probmetrics.calibrators.binning import BinaryHistogramBinningCalibrator as H\n"
        "m = H(); m.fit(Pb, yb); betterb(m.predict_proba(Pb)[:, 1])",
    ),
    "Dirichlet": ("no", "wraps dirichletcal, which needs Python 3.12 and was not run"),
    "choice of the method by cross-validation": ("no", "AutoGluon is the origin of a method"),
    "losses for training": ("no", "losses are metrics"),
    "saved without pickle": ("no", "save is a pickle"),
    "calibration for regression": ("no", "metrics of regression, no calibrator"),
    "conformal intervals for regression": ("no", "metrics of regression"),
    "ECE": ("yes", PROBMETRICS_METRICS.format("ece-15", "float(v['ece-15']) > 0.1")),
    "smooth ECE": ("yes", PROBMETRICS_METRICS.format("smece", "float(v['smece']) > 0.1")),
    "split of losses into calibration and refinement": (
        "no interval",
        PROBMETRICS_METRICS.format(
            "calib-err_logloss_ts-mix_cv-5", "float(next(iter(v.values()))) > 0.05"
        ),
    ),
    "Brier skill": (
        "as a ratio",
        PROBMETRICS_METRICS.format("mpn_brier", "0 < float(next(iter(v.values()))) < 1"),
    ),
    "temperature": ("yes", PROBMETRICS_CALIBRATED.format("temp-scaling")),
    "vector, matrix": (
        "yes",
        PROBMETRICS_CALIBRATED.format("svs") + " and " + "True",
    ),
    "isotonic": ("yes", PROBMETRICS_CALIBRATED.format("isotonic")),
    "torch tensors in and out": (
        "yes",
        "import torch\nfrom probmetrics.calibrators import get_calibrator\n"
        "from probmetrics.distributions import CategoricalLogits\n"
        "x = CategoricalLogits(torch.tensor(z)); m = get_calibrator('temp-scaling')\n"
        "m.fit_torch(x, torch.tensor(y)); better(m.predict_proba_torch(x).get_probs())",
    ),
    "scikit-learn classifier": (
        "its calibrators",
        "from probmetrics.calibrators import get_calibrator\n"
        "hasattr(get_calibrator('temp-scaling'), 'get_params')",
    ),
}

TU_LOADER = (
    "import torch\nfrom torch.utils.data import DataLoader, TensorDataset\n"
    "Z, Y = torch.tensor(z).float(), torch.tensor(y)\n"
    "loader = DataLoader(TensorDataset(Z, Y), 300)\n"
)
TU_CALIBRATED = (
    TU_LOADER + "import torch_uncertainty.post_processing as t\n"
    "m = {}; m.fit(loader, progress=False); better(m(Z).detach().softmax(-1))"
)
TU_METRIC = (
    "import torch\nimport torch_uncertainty.metrics as t\n"
    "m = {}; m.update(torch.tensor(P).float(), torch.tensor(y)); float(m.compute()) > {}"
)
TU_SETS = (
    TU_LOADER + "import torch_uncertainty.post_processing as t\n"
    "fit = DataLoader(TensorDataset(Z[a], Y[a]), 300)\n"
    "m = t.ConformalClsTHR(0.1, torch.nn.Identity()); m.fit(fit)\n"
    + SETS.format("(m.conformal(Z[b]) > 0).numpy()")
)
TORCH_UNCERTAINTY = {
    "unknown inputs (out of distribution)": (
        "yes",
        "import torch\nfrom torch_uncertainty.ood_criteria import MaxSoftmaxCriterion\n"
        "MaxSoftmaxCriterion()(torch.tensor(z)).shape == (900,)",
    ),
    "pixels and tokens without a label": (
        "accuracy, no ECE",
        "import torch\nimport torch_uncertainty.metrics as t\n"
        "m = t.MeanIntersectionOverUnion(num_classes=4, ignore_index=255)\n"
        "k = torch.where(torch.arange(900) % 2 == 0, torch.tensor(y), 255)\n"
        "m.update(torch.tensor(P), k); 0 < float(m.compute()) < 1",
    ),
    "command line": (
        "of its training",
        "from torch_uncertainty.utils import TULightningCLI; callable(TULightningCLI)",
    ),
    "choice of the method by cross-validation": ("no", "a transform of images"),
    "updates by a stream": ("no", "update of a metric; a data set of shoppers"),
    "conformal sets by class": ("no", "the conformal classes take neither labels nor groups"),
    "conformal sets by group": ("no", "the conformal classes take neither labels nor groups"),
    "conformal sets after a known shift": ("no", "the conformal classes take no weights"),
    "ECE": ("yes", TU_METRIC.format("t.CalibrationError(task='multiclass', num_classes=4)", 0.1)),
    "smooth ECE": (
        "yes",
        TU_METRIC.format("t.SmoothCalibrationError()", 0.1),
    ),
    "class-wise ECE": ("yes", TU_METRIC.format("t.ClasswiseCalibrationError(num_classes=4)", 0.05)),
    "reliability diagram": (
        "yes",
        TU_METRIC.format("t.CalibrationError(task='multiclass', num_classes=4)", 0.1).rsplit(
            ";", 1
        )[0]
        + "; m.plot() is not None",
    ),
    "risk against coverage (AURC)": ("yes", TU_METRIC.format("t.AURC()", 0)),
    "temperature": ("yes", TU_CALIBRATED.format("t.TemperatureScaler()")),
    "vector, matrix": (
        "yes",
        TU_CALIBRATED.format("t.VectorScaler(4)")
        + "\nm = t.MatrixScaler(4); m.fit(loader, progress=False)\n"
        "better(m(Z).detach().softmax(-1))",
    ),
    "Dirichlet": ("yes", TU_CALIBRATED.format("t.DirichletScaler(4)")),
    "isotonic": ("yes", TU_CALIBRATED.format("t.IsotonicRegressionScaler()")),
    "histogram, BBQ": (
        "yes",
        TU_CALIBRATED.format("t.HistogramBinningScaler()")
        + "\nm = t.BBQScaler(); m.fit(loader, progress=False)\n"
        "better(m(Z).detach().softmax(-1))",
    ),
    "losses for training": (
        "yes",
        TU_LOADER + "import torch_uncertainty.losses as t\nfloat(t.FocalLoss(gamma=2)(Z, Y)) > 0",
    ),
    "conformal sets": ("yes", TU_SETS),
    "torch tensors in and out": ("yes", TU_CALIBRATED.format("t.TemperatureScaler()")),
    "saved without pickle": (
        "scalers of logits",
        TU_LOADER + "import torch_uncertainty.post_processing as t\n"
        "m = t.VectorScaler(4); m.fit(loader, progress=False); len(m.state_dict()) > 0",
    ),
    "calibration for regression": (
        "measured",
        "import torch\nimport torch_uncertainty.metrics as t\n"
        "m = t.QuantileCalibrationError()\n"
        "m.update(torch.distributions.Normal(torch.zeros(900), torch.ones(900)), "
        "torch.tensor(2 * rng.normal(size=900)).float())\nfloat(m.compute()) > 0.05",
    ),
    "conformal intervals for regression": (
        "yes (not run)",
        "import torch_uncertainty.post_processing as t\ncallable(t.ConformalRegCQR)",
    ),
    "ensembles and Bayesian networks": (
        "yes",
        "import torch\nfrom torch_uncertainty.layers.bayesian import BayesLinear\n"
        "m = BayesLinear(4, 2); x = torch.randn(5, 4); bool((m(x) != m(x)).any())",
    ),
}

CALZONE = {
    "losses for training": ("no", "loss of the search for a prevalence"),
    "calibration for regression": ("no", "regressions of outcomes on claims"),
    "conformal intervals for regression": ("no", "regressions of outcomes on claims"),
    "ECE": (
        "yes",
        "from calzone.metrics import calculate_ece_mce\n"
        "from calzone.utils import reliability_diagram\n"
        "r, c, e, n = reliability_diagram(y, P, num_bins=15)\n"
        "calculate_ece_mce(r, c, n)[0] > 0.1",
    ),
    "interval of the ECE": (
        "bootstrap",
        "from calzone.metrics import CalibrationMetrics, get_CI\n"
        "m = CalibrationMetrics(class_to_calculate=1)\n"
        "c = get_CI(m.bootstrap(yb, Pb, metrics=['ECE-H'], n_samples=50)); len(c) > 0",
    ),
    "test of calibration with a p-value": (
        "yes",
        "from calzone.metrics import spiegelhalter_z_test; spiegelhalter_z_test(yb, Pb)[1] < 0.01",
    ),
    "reliability diagram": (
        "yes",
        "import matplotlib; matplotlib.use('Agg')\nfrom calzone.utils import reliability_diagram\n"
        "from calzone.vis import plot_reliability_diagram\n"
        "r, c, e, n = reliability_diagram(y, P, num_bins=15)\n"
        "plot_reliability_diagram(r, c, n)\n"
        "import matplotlib.pyplot as plt; len(plt.get_fignums()) > 0",
    ),
    "calibration slope and intercept": (
        "yes",
        "from calzone.metrics import cox_regression_analysis as cox\n"
        "abs(cox(yb, Pb)[0] - 0.5) < 0.1",
    ),
    "calibration in the large": (
        "yes",
        "from calzone.metrics import cox_regression_analysis as cox\n"
        "cox(yb, Pb, fix_slope=True)[1] < -0.5",
    ),
    "Spiegelhalter's z": (
        "yes",
        "from calzone.metrics import spiegelhalter_z_test; spiegelhalter_z_test(yb, Pb)[0] > 3",
    ),
    "Hosmer-Lemeshow test": (
        "yes",
        "from calzone.metrics import hosmer_lemeshow_test\n"
        "from calzone.utils import reliability_diagram\n"
        "r, c, e, n = reliability_diagram(yb, Pb, class_to_plot=1)\n"
        "hosmer_lemeshow_test(r, c, n)[1] < 0.01",
    ),
    "ICI, E50, E90": (
        "ICI",
        "from calzone.metrics import lowess_regression_analysis\n"
        "lowess_regression_analysis(yb, Pb)[0] > 0.05",
    ),
    "correction of class frequencies": (
        "yes",
        "from calzone.utils import find_optimal_prevalence\n"
        "0 < find_optimal_prevalence(yb, Pb)[0] < 1",
    ),
    "command line": ("no", "the command of 0.1.0 imports a module that it lacks"),
}

NANNYML_FRAME = (
    "import nannyml as n, pandas as pd\n"
    "q = (rng.random(900) < 1 / (1 + np.exp(-zb))).astype(int)\n"
    "d = pd.DataFrame({'y': q, 'p': pb, 'label': (pb > 0.5).astype(int), 'x': zb})\n"
)
NANNYML_OPTIONS = (
    "y_true='y', y_pred='label', y_pred_proba='p', problem_type='classification_binary'"
)
NANNYML = {
    "errors of regression models without labels": (
        "yes",
        NANNYML_FRAME + "d['y'], d['label'] = zb + rng.normal(size=900), zb\n"
        "m = n.DLE(feature_column_names=['x'], y_true='y', y_pred='label', metrics=['mae'], "
        "chunk_size=100)\n"
        "f = m.fit(d[a]).estimate(d[b].drop(columns='y')).to_df()\n"
        "abs(float(f[('mae', 'value')].mean()) - 0.8) < 0.2",
    ),
    "command line": (
        "yes",
        "import subprocess\ne = os.path.join(os.path.dirname(sys.executable), 'nml')\n"
        "subprocess.run([e, '--help'], capture_output=True).returncode == 0",
    ),
    "choice of the method by cross-validation": ("no", "compares drifts"),
    "threshold with a bound on precision or recall": ("no", "thresholds are of alarms"),
    "several limits at once": ("no", "thresholds are of alarms"),
    "thresholds of tags": ("no", "thresholds are of alarms"),
    "scikit-learn classifier": ("no", "a drift detector"),
    "saved without pickle": ("no", "serializers are pickles"),
    "calibration for regression": ("no", "DLE estimates errors, and calibrates nothing"),
    "conformal intervals for regression": ("no", "sampling errors of metrics"),
    "isotonic": (
        "inside CBPE",
        "from nannyml.calibration import IsotonicCalibrator\n"
        "m = IsotonicCalibrator(); m.fit(pb, yb); betterb(m.calibrate(pb))",
    ),
    "alarm on labelled examples, valid at all times": (
        "metrics by chunk, three sigma",
        NANNYML_FRAME + f"m = n.PerformanceCalculator({NANNYML_OPTIONS}, metrics=['accuracy'], "
        "chunk_size=100)\nlen(m.fit(d[a]).calculate(d[b]).to_df()) >= 3",
    ),
    "estimates without labels": (
        "yes",
        NANNYML_FRAME + f"m = n.CBPE({NANNYML_OPTIONS}, metrics=['accuracy'], chunk_size=100)\n"
        "f = m.fit(d[a]).estimate(d[b].drop(columns='y')).to_df()\n"
        "abs(float(f[('accuracy', 'value')].mean()) - 0.9) < 0.15",
    ),
    "drift of single features": (
        "yes",
        NANNYML_FRAME + "m = n.UnivariateDriftCalculator(column_names=['x'], chunk_size=100)\n"
        "k = d[b].assign(x=d.x[b] + 20)\n"
        "bool(m.fit(d[a]).calculate(k).to_df().xs('alert', axis=1, level=-1).to_numpy()[-1].any())",
    ),
    "checks of data quality": (
        "yes",
        NANNYML_FRAME + "m = n.MissingValuesCalculator(column_names=['x'], chunk_size=100)\n"
        "len(m.fit(d[a]).calculate(d[b]).to_df()) >= 3",
    ),
}

MCGRAD_FRAME = (
    "import pandas as pd\n"
    "d = pd.DataFrame({'p': pb, 'y': yb, 'g': g.astype(str)})\n"
    "names = dict(prediction_column_name='p', categorical_feature_column_names=['g'])\n"
)
MCGRAD = {
    "losses for training": ("no", "a metric"),
    "sets of neighbouring classes": ("no", "an encoder of columns"),
    "correction of class frequencies": ("no", "a metric"),
    "scikit-learn classifier": ("no", "wraps metrics"),
    "conformal intervals for regression": ("no", "a calibrator of means"),
    "ECE": (
        "two classes",
        "from mcgrad.metrics import expected_calibration_error as ece; ece(yb, pb) > 0.05",
    ),
    "test of calibration with a p-value": (
        "two classes",
        "from mcgrad.metrics import ecce_pvalue; ecce_pvalue(yb, pb) < 0.01",
    ),
    "reliability diagram": (
        "yes",
        MCGRAD_FRAME + "from mcgrad.plotting import plot_global_calibration_curve as plot\n"
        "plot(d, score_col='p', label_col='y') is not None",
    ),
    "isotonic": (
        "yes",
        MCGRAD_FRAME + "from mcgrad.methods import IsotonicRegression\n"
        "m = IsotonicRegression().fit(d, 'p', 'y'); betterb(m.predict(d, 'p'))",
    ),
    "multicalibration over columns": (
        "yes",
        MCGRAD_FRAME + "from mcgrad.methods import MCGrad\n"
        "m = MCGrad().fit(d, label_column_name='y', **names); betterb(m.predict(d, **names))",
    ),
    "search for groups that are off": (
        "the worst of all segments",
        MCGRAD_FRAME + "from mcgrad.metrics import MulticalibrationError\n"
        "m = MulticalibrationError(d, 'y', 'p', categorical_segment_columns=['g'])\n"
        "m.mce > 0 and m.mce_pvalue < 0.01",
    ),
    "saved without pickle": (
        "yes",
        MCGRAD_FRAME + "from mcgrad.methods import MCGrad\n"
        "m = MCGrad().fit(d, label_column_name='y', **names)\n"
        "np.allclose(MCGrad.deserialize(m.serialize()).predict(d, **names), m.predict(d, **names))",
    ),
    "calibration for regression": (
        "multicalibration",
        MCGRAD_FRAME + "from mcgrad.methods import RegressionMCGrad\n"
        "m = RegressionMCGrad().fit(d.assign(y=2.0 * d.y), label_column_name='y', **names)\n"
        "np.isfinite(m.predict(d, **names)).all()",
    ),
}

UQLM_SCORED = (
    "from uqlm.black_box import MatchScorer\n"
    "v = MatchScorer().evaluate(['Lima', 'Rome'], [['Lima', 'Lima'], ['Oslo', 'Bern']])\n"
    "list(v) == [1.0, 0.0]"
)
UQLM = {
    "claims of long texts, and code": (
        "yes (not run)",
        "from uqlm import CodeGenUQ, LongTextUQ; callable(CodeGenUQ) and callable(LongTextUQ)",
    ),
    "judges": (
        "yes",
        "import asyncio\nfrom uqlm import LLMPanel\n"
        "from langchain_core.language_models.fake_chat_models import FakeListChatModel\n"
        "class M(FakeListChatModel):\n    temperature: float = 1.0\n"
        "p = LLMPanel(judges=[M(responses=['correct'] * 4)], scoring_templates=['true_false'])\n"
        "asyncio.run(p.score(prompts=['a'], responses=['b'])).data['judge_1'] == [1.0]",
    ),
    "test of calibration with a p-value": ("no", "runs the tests of generated code"),
    "reliability diagram": ("no", "a guard of prompts"),
    "split of losses into calibration and refinement": ("no", "refinement is of responses"),
    "scikit-learn classifier": ("no", "a model of entailment"),
    "saved without pickle": ("no", "settings of scorers"),
    "ensembles and Bayesian networks": ("no", "ensembles are of scorers"),
    "confidence of answers, from graded ones": (
        "Platt or isotonic",
        "from uqlm.calibration import ScoreCalibrator\nfrom uqlm.utils.results import UQResult\n"
        "r = UQResult({'data': {'responses': [''] * 900, 's': list(pb)}, 'metadata': {}})\n"
        "ScoreCalibrator('platt').fit_transform(r, yb); len(r.data) > 2",
    ),
    "scores of samples (semantic entropy)": ("yes", UQLM_SCORED),
}
