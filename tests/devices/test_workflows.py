"""Every function on top of the package that takes examples, with those on a device."""

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant.workflows.fit import fit_and_measure
from tests.support.simulate import drawn
from tests.support.tensors import tensors

METHODS = ["none", "ts", "vector"]


def examples():
    logits, labels = drawn(np.random.default_rng(8), 600, 4, temperature=1.7)
    return dict(zip(("logits", "labels"), tensors(logits, labels), strict=True))


def probabilities(calibrator):
    return calibrator.predict_proba(examples()["logits"].numpy())


def ece(evaluation):
    return [*evaluation["ece"]]


def watched(data, calibrator):
    updated = cal.Monitor(calibrator, window=200).update(data["logits"], data["labels"])
    watch = cal.Monitor(calibrator)
    watch.predicted(range(10), data["logits"][:10])
    watch.labelled(range(10), data["labels"][:10])
    windows = [*updated.report().windows, *watch.report().windows]
    return [window["accuracy"] for window in windows]


def written(data, tmp_path):
    cal.save_predictions(tmp_path / "written.npz", data)
    return cal.evaluate(tmp_path / "written.npz", level=None)["ece"].value


def applied(data, calibrator, tmp_path):
    cal.apply(calibrator, data, tmp_path / "applied.npz")
    return cal.evaluate(tmp_path / "applied.npz", level=None)["ece"].value


WORK: dict[str, Any] = {
    "evaluate": lambda d, c, _: ece(cal.evaluate(d["logits"], d["labels"], level=None)),
    "compare": lambda d, c, _: [
        ece(evaluation)
        for evaluation in cal.compare(
            d["logits"], d["labels"], methods=METHODS, level=None
        ).measured.values()
    ],
    "report": lambda d, c, _: [
        ece(subject.evaluation)
        for subject in cal.report(d["logits"], d["labels"], methods=METHODS, level=None).subjects
    ],
    "fit": lambda d, c, _: probabilities(cal.fit(d, method="vector")),
    "cross_fit": lambda d, c, _: ece(cal.cross_fit(d, method="ts", level=None).effect.after),
    "effect": lambda d, c, _: ece(cal.effect(c, d, level=None).after),
    "apply": applied,
    "find_slices": lambda d, c, _: len(
        cal.find_slices(
            d["logits"], d["labels"], metadata={"age": d["labels"].float()}, calibrator=c
        )
    ),
    "estimate_performance": lambda d, c, _: (
        cal.estimate_performance(d["logits"], d, calibrator=c)["accuracy"].value
    ),
    "save_predictions": lambda d, c, path: written(d, path),
    "Monitor": lambda d, c, _: watched(d, c),
    "top_label": lambda d, c, _: cal.top_label(d["logits"], d["labels"]).confidence,
}
"""By the names of what they try; the results do not depend on the device of the data."""
ELSEWHERE = {"conformal", "threshold", "Accumulator", "open_dataset", *cal.METRICS}
"""Those of other tests in this folder, and one whose ``logits`` are names of columns."""


@pytest.mark.parametrize("name", WORK)
def test_examples_there_are_as_good_as_those_here(name, device, tmp_path):
    here = examples()
    there = {key: values.to(device) for key, values in here.items()}
    wanted = WORK[name](here, cal.SMART(steps=20).fit(**here), tmp_path)
    found = WORK[name](there, cal.SMART(steps=20).fit(**there), tmp_path)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)


FITS: dict[str, Any] = {
    "logits": lambda d: [cal.fit(d["logits"], d["labels"], method="ts")],
    "probs": lambda d: [
        cal.fit(probs=d["logits"].softmax(-1), labels=d["labels"].cpu(), method="isotonic")
    ],
    "a mapping": lambda d: [cal.fit({**d, "labels": d["labels"].cpu().numpy()}, method="vector")],
    "a split": lambda d: [
        cal.fit({f"{s}_{k}": v for s in ("val", "test") for k, v in d.items()}, method="ts")
    ],
    "in place": lambda d: [cal.fit(d, method=cal.SMART(steps=20))],
    "measured": lambda d: [fit_and_measure(d, method="ts").calibrator],
    "crossed": lambda d: crossed(cal.cross_fit(d["logits"], d["labels"], method="ts", level=None)),
    "a mapping, crossed": lambda d: crossed(cal.cross_fit(d, method="vector", level=None)),
}


def crossed(fitted):
    return [fitted.calibrator, *fitted.calibrators]


@pytest.mark.parametrize("kind", FITS)
def test_a_fit_leaves_calibrators_on_the_device_of_the_logits(kind, device):
    here = examples()
    for place in (device, torch.device("cpu")):
        there = {key: values.to(place) for key, values in here.items()}
        for calibrator in FITS[kind](there):
            assert {x.device for x in calibrator.buffers()} == {place}
            assert calibrator(there["logits"]).device == place


def test_labels_on_a_device_do_not_move_a_fit_on_arrays(device):
    here = examples()
    arrays = {"logits": here["logits"].numpy(), "labels": here["labels"].to(device)}
    assert cal.fit(arrays, method="ts").device == torch.device("cpu")


def test_every_function_of_examples_is_here():
    wanted = set()
    for name in dir(cal):
        value = getattr(cal, name)
        if inspect.isfunction(value):
            parameters = inspect.signature(value).parameters
            wanted |= {name} if {"data", "logits"} & {*parameters} else set()
    assert wanted - ELSEWHERE <= {*WORK}


def test_calibrators_there_draw_their_maps(device):
    pytest.importorskip("matplotlib")
    here = examples()
    there = {key: values.to(device) for key, values in here.items()}
    for kind in (cal.SMART, cal.CALIBRATORS["vector"], cal.CALIBRATORS["isotonic"]):
        calibrator = kind().fit(**there)
        assert calibrator.plot(there["logits"]) is not None
        assert calibrator.plot(here["logits"].numpy()) is not None
        assert calibrator.plot() is not None
