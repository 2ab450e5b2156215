"""Mistakes that users make, and what each door says of them: once, with the remedy."""

import contextlib
import io
import re
import sys
import warnings
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from scipy.special import softmax
from torch import nn

import calibrant
from calibrant import cli, decide, deploy, llm
from calibrant.calibrators import CALIBRATORS
from tests.support.few_draws import few_draws
from tests.support.simulate import drawn

TABLE = r"""
# evaluate

swapped arguments
    cal.evaluate(labels, logits)
    raises: logits and labels are swapped: pass floats first, then integers
labels that count from 1
    cal.evaluate(logits, labels + 1)
    raises: got 5 at row \d+: the logits have 5 classes; if they count from 1, pass labels - 1
labels of the next class
    cal.evaluate(logits, (labels + 1) % 5, level=None)
    tells: accuracy .* is no better than that of guessing .*: check that labels are in the order
shuffled labels
    cal.evaluate("shuffled.npz", level=None)
    tells: accuracy .* is no better than that of guessing .*: check that labels are in the order
labels of two classes the wrong way round
    cal.evaluate(odds, 1 - events, level=None)
    tells: P\(y = 1\) is higher where y = 0 .*: check that class 1 is the second column
one-hot labels
    cal.evaluate(logits, np.eye(5, dtype=int)[labels])
    raises: for one-hot labels pass labels.argmax\(-1\); if every column is a tag
one-hot labels as floats
    cal.evaluate(logits, np.eye(5)[labels])
    raises: labels must be integers, got float64: .* for one-hot labels pass labels.argmax\(-1\)
labels as floats
    cal.evaluate(logits, labels * 1.0)
    raises: labels must be integers, got float64: .* convert whole numbers with .astype\(int\)
labels as text
    cal.evaluate(logits, np.array(["cat"] * 600))
    raises: got names such as 'cat': .* probs=pandas.DataFrame\(P, columns=model.classes_\), or
labels as text in a series
    cal.evaluate(probs=probs, labels=pd.Series(["cat"] * 600))
    raises: got names such as 'cat': .* probs=pandas.DataFrame\(P, columns=model.classes_\), or
labels of other examples
    cal.evaluate(probs=probs[:, 1], labels=labels[:500])
    raises: probs and labels must have the same shape, .* the lengths differ; pass the labels of
labels of other examples, with all probabilities
    cal.evaluate(probs=probs, labels=labels[:500])
    raises: probs must be \(..., classes\) and labels .*: one row of probs is wanted for each label
a column of labels
    cal.evaluate(logits, labels[:, None])
    raises: for a column of labels pass labels.squeeze\(-1\)
transposed logits
    cal.evaluate(logits.T, labels)
    raises: logits must be \(..., classes\) and labels \(...\), .* classes come last: pass logits.T
classes in front
    cal.evaluate(np.zeros((4, 5, 3, 3)), np.zeros((4, 3, 3), int))
    raises: classes come last: pass class_dim=1, or logits.movedim\(1, -1\)
probabilities as logits
    cal.evaluate(probs, labels, level=None)
    warns: logits look like probabilities: .* sums to one; if they are, pass them as probs=
percentages
    cal.evaluate(probs=100 * probs, labels=labels)
    raises: probs must be in \[0, 1\], got \d\S+ at row 0: divide percentages by 100
a missing probability
    cal.evaluate(probs=softmax(with_nan, -1), labels=labels)
    raises: probs must be in \[0, 1\], got NaN at row 7: leave out examples without a prediction
log-odds as probabilities
    cal.evaluate(probs=-1 - odds ** 2, labels=events)
    raises: probs must be in \[0, 1\], got -\S+ at row 0: pass logarithms, .* as logits
scores as probabilities
    cal.evaluate(probs=probs / 2, labels=labels)
    raises: probs must sum to one in each row, .* normalise them, or pass the scores as logits
both logits and probabilities
    cal.evaluate(logits, labels, probs=probs)
    raises: pass either logits or probs=, got both
whole numbers as logits
    cal.evaluate(logits.astype(int), labels)
    raises: logits must be floating point, got int64: convert with .astype\(float\)
NaN
    cal.evaluate(with_nan, labels)
    raises: row 7 has NaN: find the layer or the example that overflowed
masked labels
    cal.evaluate(masked, labels)
    raises: -inf at its own label \d: a masked class cannot be the answer: correct the mask or
the training set
    cal.evaluate(logits, logits.argmax(-1), level=None)
    tells: use held-out examples if the model was trained on these, and the true labels if these
copied rows
    cal.evaluate("copied.npz", level=None)
    warns: 540 of the first 600 rows are copies of other rows: .* keep one of each
a misspelt metric
    cal.evaluate(logits, labels, metrics=["eec"])
    raises: unknown metric 'eec': did you mean ece\?
a split of arrays
    cal.evaluate(logits, labels, split="val")
    raises: arrays have no splits, got split='val': pass the logits and labels of that split
a split that is not there
    cal.evaluate("split.npz", split="tset")
    raises: unknown split 'tset': did you mean test\?
a level in percent
    cal.evaluate(logits, labels, level=95)
    raises: level must be above 0 and at most 0.99, got 95: 0.9 means 90 %
no labels
    cal.evaluate(logits)
    raises: labels are missing: pass \(logits, labels\) or \(probs=..., labels=...\)
only ignored labels
    cal.evaluate(logits, np.full(600, -100))
    raises: nothing to measure: .* every label is -100 \(ignored\)
subgroups of other examples
    cal.evaluate(logits, labels, by=np.arange(5))
    raises: by must have one value per example or per row, got \(5,\) for \(600,\)
negative weights
    cal.evaluate(logits, labels, sample_weight=-np.ones(600))
    raises: sample_weight must be 0 \(leaves out\) or in
other names of arrays
    cal.evaluate("keys.npz")
    raises: has no logits, probs or features, only preds, y

# metrics

probabilities as logits
    cal.ece(probs, labels)
    warns: logits look like probabilities: .* pass them as probs=, or as confidence= with outcome=
swapped arguments
    cal.nll(labels, logits)
    raises: logits and labels are swapped
confidence without outcome
    cal.ece(confidence=probs.max(-1))
    raises: confidence= and outcome= go together
class labels as outcomes
    cal.ece(confidence=probs.max(-1), outcome=labels)
    raises: outcome must be 0 or 1 .*: class labels are not outcomes
logits as confidences
    cal.ece(confidence=logits.max(-1), outcome=labels == 0)
    raises: confidence must be in \[0, 1\], .* reduce logits with calibrant.top_label
a metric of two classes for five
    cal.metrics.roc_auc(logits, labels)
    raises: the binary estimand needs \(n,\) or \(n, 2\) logits, .*one_vs_rest\(logits, labels, k

# fit

the training set
    cal.TemperatureScaling().fit(logits, logits.argmax(-1))
    warns: all predictions are right, .* use held-out examples if the model was trained on these
predictions as labels
    cal.Auto().fit(logits, logits.argmax(-1))
    warns: and the true labels if these are its own predictions
shuffled labels
    cal.Auto(candidates=("none", "ts")).fit(logits, shuffled)
    warns: accuracy .* is no better than that of guessing .*: check that labels are in the order
labels of the next class
    cal.fit({"logits": logits, "labels": (labels + 1) % 5}, method="ts")
    warns: count from 0, and number the classes in the order of the columns
probabilities as logits
    cal.TemperatureScaling().fit(probs, labels)
    warns: logits look like probabilities: .* if they are, calibrant.fit\(\{"probs": ..., "labels"
a file of probabilities as logits
    cal.fit("as_probs.npz", method="beta")
    warns: logits of as_probs.npz look like probabilities: .* if they are, save them as probs
copied rows
    cal.fit("copied.npz", method="ts")
    warns: 540 of the first 600 rows are copies of other rows: .* groups= \(--groups\)
class weights
    cal.TemperatureScaling().fit(weighted, labels)
    warns: keeps predictions, so that .* use a method that corrects these, such as auto with keep
no object
    cal.TemperatureScaling.fit(logits, labels)
    raises: create an object first: TemperatureScaling\(\).fit\(logits, labels\)
a misspelt method
    cal.fit("data.npz", method="smrat")
    raises: unknown method 'smrat': did you mean smart\?
an option as text
    cal.Auto(keep_argmax="False")
    raises: keep_argmax must be True or False, or one of auto, got 'False'
a misspelt option
    cal.fit("data.npz", method="ts", options={"objectve": "brier"})
    raises: ts has no option 'objectve': did you mean objective\? its options are objective
a choice that is none
    cal.TemperatureScaling(objective="mse")
    raises: objective must be one of nll, brier, ece, soft_ece, got 'mse'
no features
    CALIBRATORS["gc"]().fit(logits, labels)
    raises: needs features: pass features=, inputs of the last layer
no last layer
    CALIBRATORS["fc"]().fit(logits, labels, features=features)
    raises: needs the last layer: pass head=\(weight, bias\)
labels of one class
    cal.TemperatureScaling().fit(logits, 0 * labels)
    warns: all 600 labels are 0: what is learned of one class may be wrong for the others
few examples
    CALIBRATORS["vector"]().fit(logits[:40], np.arange(40) % 5)
    warns: VectorScaling has 10 parameters for 40 examples: it may fit their noise; .* is safer
masked classes in a method without them
    CALIBRATORS["vector"]().fit(np.where(logits == logits.min(), -np.inf, logits), labels)
    raises: masked classes need a temperature method, such as ts
only a test split
    cal.fit("test_only.npz")
    raises: has no split 'val' and no unnamed split .* name a split \(split=, --fit-split\), or use
other groups than examples
    cal.TemperatureScaling().fit(logits, labels, groups=np.arange(5))
    raises: groups must have one value per example or per row

# predictions

a calibrator without a fit
    cal.TemperatureScaling().predict_proba(logits)
    raises: this TemperatureScaling is not fitted: call fit\(logits, labels\) first
another number of classes
    ts.predict_proba(logits[:, :4])
    raises: fitted for 5 classes, got 4: logits must be \(..., 5\), as in fit
probabilities as logits
    ts.predict_proba(probs)
    warns: logits look like probabilities: .* if they are, pass their logarithm
a tensor of probabilities as logits
    ts.transform(torch.tensor(probs))
    warns: logits look like probabilities: .* if they are, pass their logarithm
a call with an array
    ts(logits)
    raises: a calibrator is called with tensors, got a ndarray: predict_proba\(logits\)
NaN
    ts.predict_proba(with_nan)
    raises: row 7 has NaN: find the layer or the example that overflowed

# cross_fit, compare, effect

a single fold
    cal.cross_fit("data.npz", method="ts", folds=1)
    raises: folds must be from 2 to the number of labelled rows
the training set, cross-fitted
    cal.cross_fit("trained.npz", method="ts", level=None)
    warns: all predictions are right, .* use held-out examples
a misspelt method in a comparison
    cal.compare("data.npz", methods=["none", "tss"])
    raises: unknown method 'tss': did you mean ts\?
shuffled labels in a comparison
    cal.compare("shuffled.npz", methods=["none", "ts", "beta"], level=None)
    warns: unnamed split: accuracy .* no better than that of guessing
class weights in a comparison
    cal.compare("weighted.npz", methods=["none", "ts", "beta"], level=None)
    tells: keeps predictions, so that .* use a method that corrects these
copied rows in a comparison
    cal.compare("copied.npz", methods=["none", "ts"], level=None)
    warns: 540 of the first 600 rows are copies of other rows
a comparison with no method
    cal.compare("data.npz", methods=[])
    raises: methods must name at least one of
a file of another model
    cal.effect(ts, "narrow.npz")
    raises: fitted for 5 classes, got 4

# report

shuffled labels
    cal.report("shuffled.npz", methods=[], level=None).verdict
    tells: Check the data first. Accuracy .* is no better than that of guessing
the training set
    cal.report("trained.npz", methods=[], level=None).verdict
    tells: Check the data first. All predictions are right, .* use held-out examples
copied rows
    cal.report("copied.npz", methods=[], level=None).verdict
    tells: Check the data first. 540 of the first 600 rows are copies
methods that are fitted on the training set
    cal.report("val_trained.npz", methods=["none", "ts"], level=None).verdict
    tells: Check the data first. Val split: all predictions are right, .* use held-out examples
a misspelt split
    cal.report("split.npz", split="tets", methods=[])
    raises: unknown split 'tets': did you mean test\?
a misspelt suffix
    cal.report("data.npz", methods=[], level=None).save("report.htlm")
    raises: a report is written as .html, .md, .json, got report.htlm

# apply, save and load

another number of classes
    cal.apply(ts, "narrow.npz", "out.npz")
    raises: fitted for 5 classes, got 4
a file onto itself
    cal.apply(ts, "data.npz", "data.npz")
    raises: data.npz is part of the input data.npz: write to another place
probabilities as logits
    cal.apply(ts, "as_probs.npz", "calibrated.npz")
    warns: logits of as_probs.npz look like probabilities: .* if they are, save them as probs
a suffix that is not known
    cal.apply(ts, "data.npz", "out.xlsx")
    raises: cannot write out.xlsx: the suffix must be one of .npz,
a calibrator without a fit
    cal.save(cal.TemperatureScaling(), "unfitted")
    raises: this TemperatureScaling is not fitted: call fit first
a prediction file as an artifact
    cal.load("data.npz")
    raises: data.npz is a prediction file, not an artifact: calibrant.fit\(path\) fits a calibrator
no artifact
    cal.load("nowhere")
    raises: there is no artifact nowhere: calibrant.save\(obj, path\) or calibrant fit -o makes one

# decisions

an error in percent
    cal.threshold(logits, labels, max_error=5)
    raises: max_error must be between 0 and 1, got 5: 0.05 allows 5 % of wrong answers
a coverage in percent
    cal.conformal(logits, labels, coverage=90)
    raises: coverage must be between 0 and 1, got 90: 0.9 means 90 %
a guarantee that few examples cannot keep
    cal.threshold(logits, labels, max_error=0.001)
    warns: no threshold keeps the error at 0.001 .* so no example is accepted; .*label
probabilities as logits for sets
    cal.conformal(probs, labels)
    warns: logits look like probabilities: .* if they are, pass them as probs=
probabilities as logits of sets
    cal.conformal(logits, labels).sets(probs)
    warns: logits look like probabilities: .* if they are, pass them as probs=
probabilities as logits of a rule
    decide.DecisionRule(cal.conformal(logits, labels), classes=5).decide(probs)
    warns: logits look like probabilities: .* if they are, pass them as probs=
probabilities as logits for a threshold
    cal.threshold(probs, labels, max_error=0.4)
    warns: logits look like probabilities: .* pass them as probs=
counts as a prior
    decide.shift_prior(logits, old_prior=[20.0] * 5, new_prior=[0.2] * 5)
    raises: old_prior must sum to one, got 100: divide counts by their sum

# monitor, estimate, slices

labels of another length
    cal.Monitor(ts).update(logits, labels[:5])
    raises: logits must be \(..., classes\) and labels \(...\), .* one row of logits is wanted
a monitor of a calibrator without a fit
    cal.Monitor(cal.TemperatureScaling()).update(logits, labels)
    raises: this TemperatureScaling is not fitted: call fit\(logits, labels\) first
an estimate of nothing
    cal.estimate_performance({"labels": labels})
    raises: has no logits, probs or features
columns that are not there
    cal.find_slices(logits, labels, metadata={"age": labels}, columns=["aeg"])
    raises: unknown column 'aeg': did you mean age\?

# scikit-learn

the training set
    cal.CalibratedClassifier(FrozenEstimator(tree)).fit(features, events)
    warns: all predictions are right, .* use held-out examples if the model was trained on these
an estimator without a fit
    cal.CalibratedClassifier(FrozenEstimator(DecisionTreeClassifier())).fit(features, events)
    raises: this FrozenEstimator is not fitted, or a clone .* has forgotten its fit: fit it first
a misspelt method
    cal.CalibratedClassifier(method="smrat").fit(features, events)
    raises: unknown method 'smrat': did you mean smart\?
misspelt folds
    cal.CalibratedClassifier(cv="prefitt").fit(features, events)
    raises: cv must be folds, their number or "prefit", got 'prefitt'
a single class
    cal.CalibratedClassifier().fit(features, 0 * events)
    raises: the data contains only one class

# models

a softmax at the end
    cal.calibrated(ends_with_softmax, ts)
    warns: the model ends with nn.Softmax, so that it returns probabilities .* leave that layer out
a softmax inside
    cal.calibrated(returns_probs, ts).predict_proba(features)
    warns: logits look like probabilities
a softmax in an exported model
    cal.export(ts, "model.onnx", model=ends_with_softmax, example=torch.zeros(2, 8))
    warns: the model ends with nn.Softmax, so that it returns probabilities .* leave that layer out
a softmax of a collected model
    cal.collect(ends_with_softmax, [(torch.tensor(features).float(), torch.tensor(labels))])
    warns: logits look like probabilities: .* collect the outputs of the layer before
a function as a model
    cal.calibrated(lambda x: x, ts)
    raises: model must be an nn.Module, got function
features of no layer
    cal.calibrated(nn.Linear(8, 5), CALIBRATORS["gc"]())
    raises: needs features: pass last_layer=, the layer they go into
an export without a fit
    cal.export(cal.TemperatureScaling(), "ts.onnx")
    raises: this TemperatureScaling is not fitted: call fit\(logits, labels\) first
an export without a calibrator
    cal.export(ends_with_softmax, "model.onnx", example=torch.zeros(2, 8))
    raises: must be a Calibrator, got Sequential: .* in calibrant.calibrated\(model, calibrator\)
logits of a dataset
    cal.collect(ends_with_softmax, [(torch.zeros(8), 1)])
    raises: labels of a batch must be \(n, ...\), got a single one: .*DataLoader\(dataset
a loader in place of the model
    cal.collect([(torch.zeros(2, 8), torch.zeros(2))], ends_with_softmax)
    raises: model must be an nn.Module, got list: pass the model first, then the loader
an export under another suffix
    cal.export(ts, "ts.pt")
    raises: cannot write ts.pt: the suffix must be .onnx
a batch of other size than its labels
    cal.LOSSES["ce"]()(torch.zeros(4, 5), torch.zeros(3, dtype=torch.long))
    raises: logits must be \(..., classes\) and labels \(...\), got \(4, 5\) and \(3,\)
a misspelt loss
    cal.LOSSES["foacl"]
    raises: unknown loss 'foacl': did you mean focal\?
labels of one class for MaC-Cal
    cal.MaCCal(epochs=1).fit(features, 0 * labels)
    raises: labels must have at least two classes, got only 0
MaC-Cal with a share in percent
    cal.MaCCal(keep=90)
    raises: keep must be a number, above 0 and at most 1, got 90

# data frames and files

probabilities as logits in a table
    deploy.calibrate_table({"logits": probs}, ts)
    warns: logits look like probabilities
a frame without columns of scores
    cal.evaluate(pd.DataFrame({"a": labels, "b": labels}))
    raises: has no column of logits or probabilities, only a, b: name the columns of logits
an id among the classes
    cal.ece(pd.DataFrame(logits).assign(id=range(len(labels))), labels)
    raises: columns that are not scores, id: select the columns of classes
columns of other classes
    cal.fit("pets.csv", method="ts").predict(pd.DataFrame({"logit_cat": [0.5], "logit_cow": [1.0]}))
    raises: other classes than those of the fit: dog missing, cow new
a frame with an index in another order
    cal.evaluate(pd.DataFrame(logits), pd.Series(labels).sort_values(), level=None)
    raises: labels have the index of the logits in another order: pass labels.loc\[logits.index\]
a label that no column has
    cal.evaluate("names.csv")
    raises: names.csv.* 'bird'.* choose from cat, dog
no lines below the header
    cal.evaluate("header.csv")
    raises: nothing to measure: there are no examples \(empty arrays, or a file with only a header\)
no file
    cal.evaluate("nowhere.npz")
    raises: nowhere.npz does not exist; expected a prediction file, folder or glob

# language models

confidences in percent
    llm.evaluate_answers(np.array([90.0, 80.0]), np.array([1, 0]))
    raises: confidence must be in \[0, 1\], got 90.0
grades that are no grades
    llm.AnswerCalibrator().fit(np.array([0.9, 0.8]), np.array([1, 2]))
    raises: correct must be 0 or 1 \(is the answer right\?\), got 2
a map that is not known
    llm.AnswerCalibrator(stage="betta")
    raises: stage must be one of sigmoid, beta, isotonic, got 'betta'

# the command line

a misspelt split
    calibrant evaluate split.npz --split tset
    exits with 2: error: split.npz: unknown split 'tset': did you mean test\?
shuffled labels
    calibrant evaluate shuffled.npz --level 0
    tells: accuracy .* is no better than that of guessing .*: check that labels are in the order
shuffled labels for JSON
    calibrant evaluate shuffled.npz --level 0 --json
    tells: "hint": "accuracy .* is no better than that of guessing .*: check that labels
a limit in percent
    calibrant evaluate data.npz --max ece=3
    exits with 2: error: the limit of ece must be a fraction \(0.03 is 3 %\), got 3
a limit of a misspelt metric
    calibrant evaluate data.npz --max ecee=0.05
    exits with 2: error: unknown metric 'ecee': did you mean ece\?
a largest accuracy
    calibrant evaluate data.npz --max accuracy=0.9
    exits with 2: error: accuracy is better if it is larger: give the smallest value .*--min
a limit without a number
    calibrant evaluate data.npz --max ece
    exits with 2: --max wants METRIC=LIMIT, such as --max ece=0.05, got ece
percentages in a file
    calibrant evaluate percent.npz
    exits with 2: error: percent.npz.* divide percentages by 100
a misspelt verb
    calibrant evalute data.npz
    exits with 2: No such command 'evalute'.* Did you mean 'evaluate'\?|No such command 'evalute'
the training set
    calibrant fit trained.npz --method ts -o cal1
    tells: warning: all predictions are right, .* use held-out examples
shuffled labels for auto
    calibrant fit shuffled.npz -o cal2
    tells: warning: accuracy .* is no better than that of guessing
class weights
    calibrant fit weighted.npz -o cal3
    tells: predictions change, as by sms: accuracy
copied rows
    calibrant fit copied.npz --method ts -o cal4
    tells: warning: 540 of the first 600 rows are copies
no split to fit on
    calibrant fit test_only.npz -o cal5
    exits with 2: only test: name a split \(split=, --fit-split\), or use --cross-fit
a misspelt method
    calibrant fit data.npz --method smrat -o cal6
    exits with 2: unknown method 'smrat': did you mean smart\?
an option without a value
    calibrant fit data.npz --method ts --set objective -o cal7
    exits with 2: --set wants KEY=VALUE, got objective
a calibrator of other classes
    calibrant apply ts narrow.npz -o out.npz
    exits with 2: fitted for 5 classes, got 4
shuffled labels in a comparison
    calibrant compare shuffled.npz --methods none,ts --level 0
    tells: warning: unnamed split: accuracy .* no better than that of
copied rows in a report
    calibrant report copied.npz --methods= --level 0 -o -
    tells: Check the data first..* 540 of the first 600 rows are copies of other rows
a guarantee that the examples do not allow
    calibrant decide data.npz --max-error 0.001
    exits with 2: warning: no threshold keeps the error at 0.001
probabilities as logits for a decision
    calibrant decide as_probs.npz --max-error 0.4
    tells: warning: logits of as_probs.npz look like probabilities: .* save them as probs
probabilities as logits to be calibrated
    calibrant apply ts as_probs.npz -o out2.npz
    tells: warning: logits of as_probs.npz look like probabilities: .* save them as probs
two guarantees
    calibrant decide data.npz --max-error 0.1 --coverage 0.9
    exits with 2: name one of --max-error, --coverage, --rule
an artifact that is none
    calibrant export nowhere -o out.onnx
    exits with 2: there is no artifact nowhere
an export under another suffix
    calibrant export ts -o out.tflite
    exits with 2: cannot write out.tflite: the suffix must be .onnx or .pt2
a monitor of no file
    calibrant monitor nowhere.npz
    exits with 2: nowhere.npz does not exist
an estimate of no file
    calibrant estimate nowhere.npz
    exits with 2: nowhere.npz does not exist
"""


class Mistake(NamedTuple):
    """A mistake at a door, the call, how it is answered, and the pattern of the words."""

    door: str
    name: str
    call: str
    how: str
    says: str


def mistakes() -> list[Mistake]:
    """Read the table."""
    rows: list[Mistake] = []
    door, lines = "", [line for line in TABLE.splitlines() if line]
    while lines:
        line = lines.pop(0)
        if line.startswith("# "):
            door = line[2:]
            continue
        how, _, says = lines[1].strip().partition(": ")
        rows.append(Mistake(door, line, lines[0].strip(), how, says))
        del lines[:2]
    return rows


class ReturnsProbs(nn.Module):
    """A model that shows only in its outputs that they are probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 5)

    def forward(self, inputs):
        return self.layer(inputs).softmax(-1)


class Names(dict[str, Any]):
    """What calls may name; optional libraries are imported when they are."""

    def __missing__(self, name: str) -> Any:
        sklearn = {"FrozenEstimator": "frozen", "DecisionTreeClassifier": "tree"}
        if name == "pd":
            return pytest.importorskip("pandas")
        if name in sklearn:
            return getattr(pytest.importorskip(f"sklearn.{sklearn[name]}"), name)
        if name == "tree":  # one that was fitted on the examples
            return self["DecisionTreeClassifier"]().fit(self["features"], self["events"])
        raise KeyError(name)


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Sound data, and a folder with files of sound and of wrong ones."""
    rng = np.random.default_rng(0)
    logits, labels = drawn(rng, 600, 5, 1.5)
    features, probs, odds = rng.normal(size=(600, 8)), softmax(logits, -1), 3 * rng.normal(size=600)
    masked, with_nan = logits.copy(), logits.copy()
    masked[np.arange(600), labels], with_nan[7, 2] = -np.inf, np.nan
    found = Names(
        **{"np": np, "torch": torch, "nn": nn, "cal": calibrant, "CALIBRATORS": CALIBRATORS},
        **{"decide": decide, "deploy": deploy, "llm": llm, "logits": logits, "labels": labels},
        **{"features": features, "probs": probs, "masked": masked, "with_nan": with_nan},
        odds=odds,
        softmax=softmax,
        events=(odds > rng.logistic(size=600)).astype(int),
        shuffled=rng.permutation(labels),
        weighted=logits + 3 * np.eye(5)[0],
        ts=CALIBRATORS["ts"]().fit(logits, labels),
        ends_with_softmax=nn.Sequential(nn.Linear(8, 5), nn.Softmax(-1)),
        returns_probs=ReturnsProbs(),
    )
    split = {"val_logits": logits[:300], "val_labels": labels[:300]}
    split |= {"test_logits": logits[300:], "test_labels": labels[300:]}
    top = logits.argmax(-1)
    files: dict[str, Any] = {
        "data": {"logits": logits, "labels": labels},
        "shuffled": {"logits": logits, "labels": found["shuffled"]},
        "trained": {"logits": logits, "labels": top},
        "copied": {"logits": np.tile(logits[:60], (10, 1)), "labels": np.tile(labels[:60], 10)},
        "as_probs": {"logits": probs, "labels": labels},
        "weighted": {"logits": found["weighted"], "labels": labels},
        "narrow": {"logits": logits[:, :4], "labels": labels % 4},
        "percent": {"probs": 100 * probs, "labels": labels},
        "keys": {"preds": logits, "y": labels},
        "test_only": {"test_logits": logits, "test_labels": labels},
        "split": split,
        "val_trained": {**split, "val_labels": top[:300]},
    }
    with pytest.MonkeyPatch.context() as patch, few_draws():
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        for name, arrays in files.items():
            np.savez(f"{name}.npz", **arrays)
        calibrant.save(found["ts"], "ts")
        Path("names.csv").write_text("logit_cat,logit_dog,label\n1.0,0.5,cat\n0.1,2.0,bird\n")
        Path("header.csv").write_text("logit_cat,logit_dog,label\n")
        pets = ["2.0,0.5,cat", "0.5,2.0,dog"] * 30 + ["2.0,0.5,dog", "0.5,2.0,cat"] * 10
        Path("pets.csv").write_text("\n".join(["logit_cat,logit_dog,label", *pets]))
        yield found


def typed(line: str) -> tuple[int, str]:
    """Run a command line, and return its exit code and everything that it prints."""
    screen = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("always")
        patch.setattr(sys, "argv", line.split())
        patch.setattr(warnings, "showwarning", warnings.showwarning)  # which the command replaces
        streams = contextlib.redirect_stdout(screen), contextlib.redirect_stderr(screen)
        with streams[0], streams[1], pytest.raises(SystemExit) as stopped:
            cli.main()
    return int(str(stopped.value.code)), screen.getvalue()


def answer(mistake: Mistake, names: Names) -> list[str]:
    """Return what is said, each text once or as often as it is said."""
    if mistake.call.startswith("calibrant "):
        code, screen = typed(mistake.call)
        assert code == (2 if mistake.how == "exits with 2" else 0), screen
        return [" ".join(screen.split())]
    if mistake.how == "raises":
        with pytest.raises((TypeError, ValueError, RuntimeError, KeyError, OSError)) as raised:
            eval(mistake.call, {}, names)
        return [str(raised.value)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = eval(mistake.call, {}, names)
    said = [str(one.message) for one in caught]
    if mistake.how == "warns":
        return said
    assert said == []
    return [" ".join(str(result).split())]


@pytest.mark.parametrize("mistake", mistakes(), ids=lambda one: f"{one.door}-{one.name}")
def test_mistakes_are_told_once_with_the_remedy(mistake, names):
    said = answer(mistake, names)
    assert len(said) == 1, said
    assert len(re.findall(mistake.says, said[0])) == 1, said[0]


def test_the_table_is_well_formed():
    rows = mistakes()
    assert {row.how for row in rows} == {"raises", "warns", "tells", "exits with 2"}
    assert len({(row.door, row.name) for row in rows}) == len(rows) > 100
    assert all(row.call and row.says for row in rows)
