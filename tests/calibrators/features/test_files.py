"""Methods with features fit prediction files that have what they need."""

import warnings
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

from calibrant import use
from calibrant.calibrators.features import FeatureClipping, GroupCalibration
from calibrant.calibrators.registry import CALIBRATORS
from calibrant.workflows import compare as comparison
from calibrant.workflows.apply import apply
from calibrant.workflows.fit import fit
from tests.support.prediction_files import arrays_in
from tests.support.with_features import linear_data


def file_arrays(rng, **extra):
    logits, labels, features, head = linear_data(rng, n=400)
    arrays: dict[str, Any] = {}
    for name, rows in (("val", slice(0, 200)), ("test", slice(200, 400))):
        arrays |= {f"{name}_logits": logits[rows], f"{name}_labels": labels[rows]}
        arrays[f"{name}_features"] = features[rows]
    return arrays | {"weight": head[0], "bias": head[1]} | extra


class OnePartition(GroupCalibration):
    """A group calibration whose fit is quick."""

    def __init__(self):
        super().__init__(partitions=1)


@pytest.fixture
def registered(monkeypatch):
    for name, kind in (("gc_", OnePartition), ("fc_", FeatureClipping)):
        monkeypatch.setitem(CALIBRATORS, name, kind)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("without", "run"),
    [
        ([], {"gc_", "fc_"}),
        (["weight", "bias"], {"gc_"}),
        (["bias"], {"gc_", "fc_"}),
        (["test_features"], set()),
    ],
)
def test_methods_run_where_the_file_has_what_they_need(without, run, rng, monkeypatch):
    some = {"gc_": OnePartition, "none": CALIBRATORS["none"], "fc_": FeatureClipping}
    monkeypatch.setattr(comparison, "calibrators_for", lambda _: some)
    arrays = {k: v for k, v in file_arrays(rng).items() if k not in without}
    found = comparison.compare(arrays, methods="all", level=None)
    assert {row.method for row in found.rows} == {"none"} | run


@pytest.mark.usefixtures("registered")
def test_a_column_of_weights_is_no_last_layer(rng):
    arrays = file_arrays(rng, weight=np.ones(200))
    del arrays["bias"]
    found = comparison.compare(arrays, methods=["gc_", "fc_"], level=None)
    assert found["gc_"].error is None
    assert "FeatureClipping needs the last layer" in (found["fc_"].error or "")


def test_files_with_features_are_fitted_and_calibrated(rng, tmp_path):
    arrays = file_arrays(rng)
    np.savez(tmp_path / "p.npz", **arrays)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = fit(tmp_path / "p.npz", method=FeatureClipping())
    apply(module, tmp_path / "p.npz", tmp_path / "out.npz")
    out = arrays_in(tmp_path / "out.npz")
    expected = module.predict_proba(arrays["test_logits"], arrays["test_features"])
    np.testing.assert_allclose(softmax(out["test_logits"], -1), expected, atol=1e-6)
    np.savez(tmp_path / "q.npz", **(arrays | {"test_features": np.zeros((200, 7))}))
    steps: list[tuple[int, int]] = []
    with (
        pytest.raises(ValueError, match=r"q\.npz: features must be \(..., 6\), as in fit"),
        use(progress=lambda *step: steps.append(step)),
    ):
        apply(
            module,
            tmp_path / "q.npz",
            tmp_path / "out2.npz",
        )
    assert not steps  # before any work
    assert not (tmp_path / "out2.npz").exists()
    del arrays["weight"], arrays["bias"]
    np.savez(tmp_path / "r.npz", **arrays)
    with pytest.raises(ValueError, match=r"r\.npz: FeatureClipping needs the last layer"):
        fit(tmp_path / "r.npz", method=FeatureClipping())
