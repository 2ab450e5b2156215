"""Sets of MAPIE and calibrant on the same examples."""

import warnings

import numpy as np
import pytest
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin

from calibrant.decide import conformal


class Given(ClassifierMixin, BaseEstimator):
    """A fitted classifier whose inputs are its logits."""

    classes_ = np.arange(4)

    def fit(self, X, y):
        return self

    def predict_proba(self, X):
        return softmax(X, axis=-1)

    def predict(self, X):
        return X.argmax(-1)

    def __sklearn_is_fitted__(self):
        return True


def theirs(logits, labels, new, coverage, score="lac"):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mapie = pytest.importorskip("mapie.classification")
        fitted = mapie.SplitConformalClassifier(
            Given(), confidence_level=coverage, prefit=True, conformity_score=score, random_state=0
        ).conformalize(logits, labels)
        return fitted.predict_set(new)[1][:, :, 0]


def draw(n, seed=0):
    rng = np.random.default_rng(seed)
    logits = 2 * rng.normal(size=(n, 4)) - [0, 0, 0, 1]
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1)


@pytest.mark.parametrize("coverage", [0.7, 0.8, 0.9, 0.95])
@pytest.mark.parametrize("n", [99, 199, 200, 203, 1000])  # (n + 1) * 0.9 is whole for the first two
def test_plain_sets_are_those_of_mapie(n, coverage):
    logits, labels = draw(n + 500, seed=n)
    sets = conformal(logits[:n], labels[:n], coverage=coverage, score="lac").sets(logits[n:])
    assert (sets == theirs(logits[:n], labels[:n], logits[n:], coverage)).all()
    assert 0 < sets.mean() < 1


@pytest.mark.parametrize("by", ["class", "group"])
def test_sets_by_class_and_group_are_those_of_mapie_on_each_part(by):
    logits, labels = draw(1200)
    group = np.where(np.arange(1200) % 3 == 0, "a", "b")
    old, new = slice(0, 600), slice(600, 1200)
    part = labels if by == "class" else group
    fitted = conformal(
        logits[old], labels[old], score="lac", by="class" if by == "class" else group[old]
    )
    sets = fitted.sets(logits[new], group=None if by == "class" else group[new])
    for one in np.unique(part):
        rows = part[old] == one
        expected = theirs(logits[old][rows], labels[old][rows], logits[new], 0.9)
        if by == "class":  # a class is in the set by the limit of its own examples
            assert (sets[:, one] == expected[:, one]).all()
        else:
            assert (sets[group[new] == one] == expected[group[new] == one]).all()


def test_aps_of_mapie_takes_in_the_last_class_and_covers_more():
    """Its default is not randomised, so that the sets cover clearly more than was asked for."""
    sizes, covered = [], []
    for seed in range(3):
        logits, labels = draw(3000, seed)
        ours = conformal(logits[:1000], labels[:1000], score="aps").sets(logits[1000:])
        larger = theirs(logits[:1000], labels[:1000], logits[1000:], 0.9, "aps")
        hits = [sets[np.arange(2000), labels[1000:]].mean() for sets in (ours, larger)]
        sizes.append([ours.sum(-1).mean(), larger.sum(-1).mean()])
        covered.append(hits)
    assert np.mean(covered, 0)[0] == pytest.approx(0.9, abs=0.02)
    assert np.mean(covered, 0)[1] > 0.93
    assert np.mean(sizes, 0)[1] > np.mean(sizes, 0)[0] + 0.2
