"""Class names: labels that are names, columns that carry them, and frames of any library."""

import numpy as np
import pytest

import calibrant as cal
from calibrant._core.class_names import ClassNumbers, class_names_of, numbered

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

NAMES = ["cat", "dog", "cow"]
RNG = np.random.default_rng(0)
LOGITS = 2 * RNG.normal(size=(300, 3))
LABELS = (LOGITS + RNG.gumbel(size=LOGITS.shape)).argmax(-1)
WORDS = np.array(NAMES)[LABELS]


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        (NAMES, ["cow", " cat ", "-100"], [2, 0, -100]),
        (NAMES, ["0", "2", "1.0"], [0, 2, 1]),
        (NAMES, [1.0, 2.0, -100.0], [1, 2, -100]),
        (["1", "2", "3"], [1, 3, -100], [0, 2, -100]),
        (["3", "1", "10"], ["10", "3", "01"], [2, 0, 1]),
        (["0", "1"], [0, 1], [0, 1]),
        (["no", "yes"], [True, False], [1, 0]),
        ([], ["true", "False", "1"], [1, 0, 1]),
        (["true", "false"], ["true", "false"], [0, 1]),
    ],
)
def test_labels_are_names_or_numbers(names, labels, expected):
    np.testing.assert_array_equal(ClassNumbers(names)(np.array(labels)), expected)


@pytest.mark.parametrize(
    ("names", "label", "message"),
    [
        (NAMES, "Cat", "unknown class 'Cat': did you mean cat"),
        (NAMES, "3", "is 3, but the classes are 0, 1, 2"),
        (NAMES, "1.5", "is 1.5, but"),
        (NAMES, "", "is missing"),
        (NAMES, "nan", "is missing"),
        (["1", "2"], "0", "is 0, but the classes are 1, 2"),
        ([], "2", "is 2, but the classes are 0, 1"),
        ([], "spam", "is 'spam': 0 or 1 is wanted beside one column"),
        (NAMES, "True", "unknown class 'True'"),
    ],
)
def test_labels_of_no_class(names, label, message):
    with pytest.raises(ValueError, match=message):
        ClassNumbers(names)(np.array([label]))


def frames():
    """The same logits and labels in several kinds of frames and series."""
    plain = pd.DataFrame(LOGITS, columns=NAMES)
    yield plain, pd.Series(WORDS)
    yield plain, pd.Series(WORDS).astype("category")
    yield plain, pd.Series(LABELS, dtype="Int64")
    yield plain.add_prefix("logit_"), pd.Series(WORDS)
    yield pd.DataFrame(LOGITS, columns=[5, 6, 9]), pd.Series(np.array([5, 6, 9])[LABELS])
    yield pl.DataFrame(LOGITS, schema=NAMES), pl.Series(WORDS.tolist())
    yield pl.DataFrame(LOGITS, schema=NAMES), pl.Series(LABELS)


@pytest.mark.parametrize("case", range(7))
def test_frames_are_as_good_as_arrays(case):
    logits, labels = list(frames())[case]
    expected = cal.evaluate(LOGITS, LABELS, level=None)
    assert cal.evaluate(logits, labels, level=None).metrics == expected.metrics
    assert cal.ece(logits, labels) == expected["ece"].value
    ours, theirs = (cal.TemperatureScaling().fit(*x) for x in ((logits, labels), (LOGITS, LABELS)))
    assert ours.temperature_ == theirs.temperature_
    np.testing.assert_array_equal(ours.predict_proba(logits), theirs.predict_proba(LOGITS))
    assert cal.conformal(logits, labels).limit == cal.conformal(LOGITS, LABELS).limit


def test_probs_weights_and_subgroups_of_frames():
    probs = np.exp(LOGITS) / np.exp(LOGITS).sum(-1, keepdims=True)
    weight, by = RNG.uniform(size=300), np.where(LABELS, "de", "fr")
    expected = cal.evaluate(
        probs=probs, labels=LABELS, sample_weight=weight, by=by, level=None
    ).to_dict()
    for library in (pd, pl):
        frame = library.DataFrame({name: probs[:, i] for i, name in enumerate(NAMES)})
        series = {"sample_weight": library.Series(weight), "by": library.Series(by.tolist())}
        labels = library.Series(WORDS.tolist())
        assert cal.evaluate(probs=frame, labels=labels, level=None, **series).to_dict() == expected


def test_labels_in_another_order_are_refused():
    frame, labels = pd.DataFrame(LOGITS, columns=NAMES), pd.Series(WORDS)
    with pytest.raises(ValueError, match=r"pass labels\.loc\[logits\.index\]"):
        cal.ece(frame, labels.sample(frac=1, random_state=0))
    shuffled = frame.sample(frac=1, random_state=0)
    assert cal.ece(shuffled, labels.loc[shuffled.index]) == pytest.approx(cal.ece(LOGITS, LABELS))
    # an index of other rows tells nothing
    numbered(labels.set_axis(range(1000, 1300)), frame)


def test_further_columns_beside_logits_are_refused():
    frame = pd.DataFrame(LOGITS, columns=[f"logit_{name}" for name in NAMES]).assign(label=LABELS)
    with pytest.raises(ValueError, match="select them, or pass the whole frame without labels"):
        cal.ece(frame, frame["label"])
    with pytest.raises(ValueError, match="nothing but their columns"):
        class_names_of(pd.DataFrame([[1.0, 0.5]], columns=["logit_a", "prob_a"]))


def test_unknown_names_name_their_row():
    with pytest.raises(ValueError, match="labels, row 2: it is an unknown class 'Cow': did you"):
        cal.ece(pd.DataFrame(LOGITS[:3], columns=NAMES), pd.Series(["cat", "dog", "Cow"]))
