"""Updates by a stream: against fits on the weighted stream, and their state."""

from functools import partial

import numpy as np
import pytest
import torch

import calibrant as cal
from calibrant.artifacts import load, save
from calibrant.calibrators import SMART, Auto, SigmoidScaling, TagScaling, TemperatureScaling
from calibrant.calibrators.online import HALF_LIVES
from calibrant.deploy import export

LIGHT_AUTO = partial(Auto, candidates=("none", "ts", "beta"), folds=2)
METHODS = [
    *(TemperatureScaling, SigmoidScaling),
    pytest.param(LIGHT_AUTO, id="Auto"),
]


def stream(n, kind=TemperatureScaling, seed=0):
    """Logits and labels whose sharpness falls over time."""
    rng = np.random.default_rng(seed)
    sharpness = np.linspace(1, 0.4, n)
    if kind is SigmoidScaling:
        odds = 2 * rng.normal(size=n)
        chance = 1 / (1 + np.exp(-sharpness * odds + 1))
        return odds.astype("f4"), (rng.random(n) < chance).astype(int)
    logits = 2 * rng.normal(size=(n, 4))
    noise = rng.gumbel(size=logits.shape)
    return logits.astype("f4"), (sharpness[:, None] * logits + noise).argmax(-1)


def kept(calibrator):
    return len(calibrator.recent_.labels)


def by_definition(kind, logits, labels, half_life):
    """A fit on what is kept of the stream, with weights that halve."""
    kept = slice(-int(np.ceil(HALF_LIVES * half_life)), None)
    age = np.arange(len(labels))[::-1][kept]
    return kind().fit(logits[kept], labels[kept], sample_weight=0.5 ** (age / half_life))


@pytest.mark.parametrize("kind", METHODS)
def test_an_update_is_a_fit_on_all_examples_with_weights_that_halve(kind):
    logits, labels = stream(3000, kind)
    updated = kind()
    for rows in np.array_split(np.arange(3000), [1500, 1510, 2400]):
        updated.update(logits[rows], labels[rows], half_life=400)
    wanted = by_definition(kind, logits, labels, 400)
    np.testing.assert_allclose(updated.transform(logits), wanted.transform(logits), atol=1e-5)
    assert kept(updated) == 2000


def test_a_half_life_stays_until_another_is_given():
    logits, labels = stream(1000)
    updated = TemperatureScaling().update(logits[:500], labels[:500], half_life=50)
    updated.update(logits[500:], labels[500:])
    assert kept(updated) == HALF_LIVES * 50
    wanted = by_definition(TemperatureScaling, logits, labels, 50)
    assert float(updated.temperature_) == pytest.approx(float(wanted.temperature_), rel=1e-5)
    assert kept(updated.update(logits[:9], labels[:9], half_life=10)) == 50


def test_examples_without_a_label_do_not_age_the_others():
    logits, labels = stream(600)
    some = labels.copy()
    some[::2] = -100
    updated = TemperatureScaling().update(logits, some, half_life=100)
    wanted = TemperatureScaling().update(logits[1::2], labels[1::2], half_life=100)
    assert float(updated.temperature_) == float(wanted.temperature_)
    updated.update(logits[:3], np.full(3, -100))
    assert float(updated.temperature_) == float(wanted.temperature_)


def test_images_are_rows_of_pixels():
    logits, labels = stream(480)
    images = np.moveaxis(logits.reshape(5, 12, 8, 4), -1, 1)
    left_out = np.arange(480) % 10 == 0
    seen = np.where(left_out, 255, labels).reshape(5, 12, 8)
    updated = TemperatureScaling().update(images, seen, class_dim=1, ignore_index=255)
    wanted = TemperatureScaling().update(logits, np.where(left_out, -100, labels))
    assert float(updated.temperature_) == float(wanted.temperature_)


def test_tags_are_updated_row_by_row():
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(400, 3)).astype("f4")
    tags = (rng.random(logits.shape) < 1 / (1 + np.exp(-0.5 * logits))).astype(int)
    updated = TagScaling().update(logits[:250], tags[:250], half_life=60)
    updated.update(logits[250:], tags[250:])
    weight = 0.5 ** (np.arange(300)[::-1] / 60)
    wanted = TagScaling().fit(logits[-300:], tags[-300:], sample_weight=weight)
    np.testing.assert_allclose(updated.slope_, wanted.slope_, atol=1e-5)


def test_frames_are_read_in_the_order_of_the_first():
    pandas = pytest.importorskip("pandas")
    logits, labels = stream(400)
    names = np.array(["cat", "dog", "owl", "pig"])
    frame = pandas.DataFrame(logits, columns=names)
    updated = TemperatureScaling().update(frame[:200], names[labels[:200]])
    updated.update(frame[200:][["pig", "cat", "owl", "dog"]], names[labels[200:]])
    wanted = TemperatureScaling().update(logits, labels)
    assert float(updated.temperature_) == pytest.approx(float(wanted.temperature_), rel=1e-6)
    assert updated.class_names_ == tuple(names)


@pytest.mark.parametrize("kind", METHODS)
def test_a_saved_calibrator_goes_on(kind, tmp_path):
    logits, labels = stream(900, kind)
    updated = kind().update(logits[:600], labels[:600], half_life=200)
    save(updated, tmp_path / "saved")
    again, fresh = load(tmp_path / "saved"), kind()
    fresh.load_state_dict(updated.state_dict())
    for one in (updated, again, fresh):
        one.update(logits[600:], labels[600:])
    for one in (again, fresh):
        np.testing.assert_array_equal(one.transform(logits), updated.transform(logits))


@pytest.mark.filterwarnings("ignore:TemperatureScaling keeps predictions")
def test_masked_classes_are_kept_and_saved(tmp_path):
    logits, labels = stream(400)
    logits[labels != 0, 0] = -np.inf
    updated = TemperatureScaling().update(logits[:200], labels[:200])
    save(updated, tmp_path / "saved")
    again = load(tmp_path / "saved").update(logits[200:], labels[200:])
    wanted = TemperatureScaling().update(logits, labels)
    assert float(again.temperature_) == pytest.approx(float(wanted.temperature_), rel=1e-6)


def test_a_rule_is_saved_with_a_calibrator_that_goes_on(tmp_path):
    from calibrant.workflows.decide import decide

    logits, labels = stream(2000)
    updated = TemperatureScaling().update(logits[:1000], labels[:1000])
    arrays = {"logits": logits[1000:], "labels": labels[1000:]}
    rule = decide(arrays, coverage=0.9, calibrator=updated).rule
    save(rule, tmp_path / "rule")
    assert kept(load(tmp_path / "rule").calibrator) == 1000


def test_a_fit_drops_what_updates_remember():
    logits, labels = stream(500)
    updated = TemperatureScaling().update(logits, labels)
    assert updated.fit(logits, labels).recent_ is None
    with pytest.raises(ValueError, match="pass the examples of the fit to TemperatureScaling"):
        updated.update(logits, labels)


def test_a_refused_update_changes_nothing():
    logits, labels = stream(500)
    updated = TemperatureScaling().update(logits, labels)
    before = {name: value.clone() for name, value in updated.state_dict().items()}
    bad = logits.copy()
    bad[3, 1] = np.nan
    for wrong, match in ((logits[:, :3], "fitted for 4 classes"), (bad, "NaN")):
        with pytest.raises(ValueError, match=match):
            updated.update(wrong, np.minimum(labels, 2))
        assert all(torch.equal(updated.state_dict()[name], x) for name, x in before.items())
    for half_life in (0, np.nan, np.inf):
        with pytest.raises(ValueError, match="half_life must be"):
            updated.update(logits, labels, half_life=half_life)
    with pytest.raises(TypeError, match="ProCal cannot be updated"):
        cal.CALIBRATORS["procal"]().update(logits, labels)


@pytest.mark.filterwarnings("ignore")  # of one example or so
def test_descriptions_and_exports_know_nothing_of_the_examples(tmp_path):
    logits, labels = stream(4000)
    few = TemperatureScaling().update(logits, labels, half_life=1)
    assert set(few.learned()) == {"temperature"}
    many = SMART().update(logits, labels)
    assert "recent" not in repr(many) + many.describe()
    assert not any("recent" in name for name in many.to_frame()["name"])
    export(many, tmp_path / "smart.onnx")
    assert (tmp_path / "smart.onnx").stat().st_size < logits.nbytes
