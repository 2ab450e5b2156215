"""Features are checked, whatever the method, and what ignored rows hold does not matter."""

import copy
import warnings

import numpy as np
import pytest
import torch

from calibrant.calibrators.features import FeatureClipping
from tests.support.with_features import every, fitted, linear_data


@every
def test_missing_and_misshapen_features_are_refused(method, rng):
    logits, labels, features, head = linear_data(rng)
    name = method().__class__.__name__
    with pytest.raises(ValueError, match=f"{name} needs features: pass features="):
        method().fit(logits, labels, head=head)
    for wrong in (features[:-1], features[:, 0], features[None], features[:, :0]):
        with pytest.raises(ValueError, match=r"features must be \(..., width\) with one row for"):
            method().fit(logits, labels, features=wrong, head=head)
    with pytest.raises(TypeError, match="features must be floating point, got int64"):
        method().fit(logits, labels, features=features.astype(int), head=head)
    labels[:9] = -100  # rows are counted with those that are ignored
    for value in (np.nan, np.inf):
        broken = features.copy()
        broken[17, 2] = value
        with pytest.raises(ValueError, match="features must be finite, row 17 has NaN or numbers"):
            method().fit(logits, labels, features=broken, head=head)


@every
def test_prediction_wants_features_of_the_width_of_the_fit(method, rng):
    logits, labels, features, head = linear_data(rng)
    module = fitted(method(), logits, labels, features, head)
    name = type(module).__name__
    again = method()
    again.load_state_dict(module.state_dict())
    for one in (module, again, copy.deepcopy(module)):
        with pytest.raises(ValueError, match=f"{name} needs features"):
            one(torch.zeros(2, 4))
        with pytest.raises(ValueError, match=f"{name} needs features"):
            one.predict_proba(logits)
        with pytest.raises(ValueError, match=r"features must be \(..., 6\), as in fit, with one"):
            one.predict_proba(logits, features[:, :5])
        with pytest.raises(ValueError, match=r"got \(600, 6\) for rows of shape \(2,\)"):
            one(torch.zeros(2, 4), torch.from_numpy(features))
        with pytest.raises(ValueError, match=r"features must be \(..., 6\)"):
            one(torch.zeros(2, 4), torch.tensor(1.0))
    broken = features.copy()
    broken[3] = np.inf
    with pytest.raises(ValueError, match="features must be finite, row 3"):
        module.predict_proba(logits, broken)


@every
def test_what_ignored_rows_hold_does_not_matter(method, rng):
    logits, labels, features, head = linear_data(rng)
    expected = fitted(method(), logits[5:], labels[5:], features[5:], head)
    labels, features = labels.copy(), features.copy()
    labels[:5], features[:5] = -100, np.nan
    found = fitted(method(), logits, labels, features, head)
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value, rtol=0, atol=0)


@every
def test_masked_classes_stay_impossible(method, rng):
    logits, labels, features, (weight, bias) = linear_data(rng, classes=5)
    logits = np.concatenate([logits, np.full((600, 1), -np.inf)], axis=1)
    head = np.concatenate([weight, rng.normal(size=(1, 6))]), np.append(bias, 0.0)
    module = fitted(method(), logits, labels, features, head)
    probs = module.predict_proba(logits, features)
    assert (probs[:, 5] == 0).all()
    np.testing.assert_allclose(probs.sum(-1), 1, atol=1e-6)


@every
@pytest.mark.parametrize("answers", ["one class", "same features", "no features"])
def test_odd_data_give_bounded_fits_and_a_warning(method, answers, rng):
    logits, labels, features, head = linear_data(rng, n=300)
    if answers == "one class":
        labels = np.zeros(300, int)
    else:
        features = np.full((300, 6), float(answers == "same features"))
        logits = np.broadcast_to(features[:1] @ head[0].T + head[1], (300, 4)).copy()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        module = method().fit(logits, labels, features=features, head=head)
    assert told or answers == "one class" or (method is FeatureClipping)
    probs = module.predict_proba(logits, features)
    assert np.isfinite(probs).all()
    assert all(torch.isfinite(value).all() for value in module.state_dict().values())
    far = module.predict_proba(logits, features + 1e6)
    assert np.isfinite(far).all()
