"""Keys of examples: the same for the same ids or scores, in whatever form they come."""

import numpy as np
import pytest
import torch

from calibrant.monitor.deliveries import KeyedExamples, _id_keys, _score_keys


def test_keys_of_scores_do_not_depend_on_their_form(rng):
    logits = rng.normal(size=(500, 7)).astype(np.float32)
    keys = _score_keys(logits)
    for same in (logits.astype(np.float64), torch.from_numpy(logits), logits.reshape(50, 10, 7)):
        np.testing.assert_array_equal(_score_keys(same), keys)
    order = rng.permutation(500)
    np.testing.assert_array_equal(_score_keys(logits[order]), keys[order])
    np.testing.assert_array_equal(_score_keys(logits[:, 0]), _score_keys(logits[:, :1]))
    np.testing.assert_array_equal(_score_keys(np.array([0.0])), _score_keys(np.array([-0.0])))
    masked = np.where(logits > 1, -np.inf, logits)
    assert len(np.unique(_score_keys(masked))) == 500


def test_other_scores_have_other_keys(rng):
    """Of n different rows, about n^2 / 2^33 pairs share 32 bits by chance."""
    n = 100_000
    for columns in (1, 2, 10):
        logits = rng.normal(size=(n, columns))
        logits[: n // 2] = logits[n // 2 :]
        logits[: n // 2, -1] += 1e-6  # more than the precision of single floats around 1
        different = len(np.unique(logits.astype(np.float32), axis=0))
        assert different - len(np.unique(_score_keys(logits) >> np.uint64(32))) < 12
    assert _score_keys(np.array([[1.0, 2.0]])) != _score_keys(np.array([[2.0, 1.0]]))


@pytest.mark.parametrize("columns", [1, 2, 10, 1000])
def test_half_precision_is_compared_with_single(rng, columns):
    logits = 5 * rng.normal(size=(400, columns))
    stored = KeyedExamples("logits", _score_keys(logits.astype(np.float16)), np.zeros(400, int))
    full = KeyedExamples("logits", _score_keys(logits.astype(np.float32)), np.zeros(400, int))
    assert len(stored.half) == 400
    assert len(stored.single) == 0
    assert len(full.half) < 4  # only numbers that need no rounding
    # rounded to single and then to half precision, some numbers differ
    assert (stored.half.keys == score_keys_in_half(logits)).mean() > 0.97


def score_keys_in_half(logits):
    """Keys of the same scores delivered in single precision, as they are compared with halves."""
    examples = KeyedExamples("logits", _score_keys(logits), np.zeros(len(logits), int))
    keys = np.zeros(len(logits), np.uint64)
    for view in (examples.single, examples.half):
        keys[view.places] = view.keys
    return keys


def test_keys_of_ids():
    keys = _id_keys(["a", "b", 7], (3,))
    assert len(set(keys.tolist())) == 3
    np.testing.assert_array_equal(_id_keys(np.array(["b", "7"]), (2,)), keys[1:])
    tokens = _id_keys(["a", "b"], (2, 5))
    assert len(set(tokens.tolist())) == 10
    np.testing.assert_array_equal(tokens[::5], keys[:2])
    with pytest.raises(ValueError, match=r"one id per row is wanted, got 2 for labels of shape"):
        _id_keys(["a", "b"], (3,))
    with pytest.raises(TypeError, match="whole numbers or text"):
        _id_keys([1.5], (1,))  # type: ignore[list-item]
