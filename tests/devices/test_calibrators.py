"""What every calibrator guarantees about devices, by the registries: none can be forgotten."""

import copy
import functools
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from calibrant._core import chunks
from calibrant._core.chunks import examples
from calibrant.calibrators import isotonic, logpartition
from calibrant.calibrators.average import Average
from calibrant.calibrators.features.multicalibration import Multicalibration
from calibrant.calibrators.logpartition import tabulate
from calibrant.calibrators.objectives import PROPER, _with_likelihood, pointwise, soft_ece
from calibrant.calibrators.records import TemperatureCalibrator
from calibrant.calibrators.registry import TAG_CALIBRATORS, make_calibrator
from calibrant.calibrators.top_label import _confidence_objective
from tests.support.calibrators import EVERY_METHOD, beside, make
from tests.support.pretended_device import WITHOUT_FLOAT64
from tests.support.simulate import drawn, drawn_tags
from tests.support.tensors import tensors

ALL = [*EVERY_METHOD, *(f"tags: {name}" for name in TAG_CALIBRATORS)]
TEMPERED = [name for name, kind in EVERY_METHOD.items() if issubclass(kind, TemperatureCalibrator)]
MASKABLE = [n for n, kind in EVERY_METHOD.items() if kind().accepts_masked]
FITS_ON_CPU = "fits are those of the CPU where a device has no float64"
ONE_OF_TWO = [n for n, kind in EVERY_METHOD.items() if not kind.two_classes_only]


@pytest.fixture(params=ALL)
def name(request):
    return request.param


def new(name) -> Any:
    kind, _, tag = name.partition("tags: ")
    if kind in ("matrix", "dirichlet"):  # which search for penalties otherwise
        return make_calibrator(kind, {"off_diagonal": 0.01, "intercept": 0.001})
    return TAG_CALIBRATORS[tag]() if tag else make(kind)


@functools.cache
def data_of(name):
    """Logits in single precision and labels, on the CPU."""
    rng = np.random.default_rng(3)
    if name.startswith("tags"):
        logits, labels = drawn_tags(rng, 200, np.array([0.5, 0.8, 1.2]), np.array([0.3, 0.0, -0.5]))
    else:
        classes = 2 if EVERY_METHOD[name].two_classes_only else 4
        logits, labels = drawn(rng, 240, classes, temperature=1.8, scale=2.5)
    return tensors(logits, labels)


def inputs(calibrator, logits):
    """Features for a call, on the device of the logits."""
    return beside(calibrator, logits)["features"] if calibrator.needs_features else None


@functools.cache
def fitted_on_cpu(name):
    logits, labels = data_of(name)
    calibrator = new(name)
    return calibrator.fit(logits, labels, **beside(calibrator, logits))


@functools.cache
def fitted_once(name, device):
    logits, labels = (x.to(device) for x in data_of(name))
    calibrator = new(name)
    return calibrator.fit(logits, labels, **beside(calibrator, logits))


def fitted(name, device):
    """A copy of a calibrator that was fitted there."""
    return copy.deepcopy(fitted_once(name, device))


def places(module) -> set[torch.device]:
    return {x.device for x in (*module.buffers(), *module.parameters())}


def assert_near(result, wanted, device, on_gpu=1e-3):
    """Compare probabilities; those of a GPU are rounded otherwise, before a step or after it."""
    assert result.device == device
    tolerance = on_gpu if device.type == "cuda" else 1e-4
    assert float((result.cpu() - wanted).abs().double().mean()) < tolerance


def probs_of(name, values):
    return values.sigmoid() if name.startswith("tags") else values.softmax(-1)


def test_a_fit_leaves_it_on_the_device_of_its_logits_where_it_answers(name, device):
    calibrator, plain = fitted(name, device), fitted_on_cpu(name)
    assert places(calibrator) == {device}
    logits = data_of(name)[0]
    there, features = logits.to(device), inputs(calibrator, logits.to(device))
    wanted = plain.predict_proba(logits, inputs(plain, logits))
    assert_near(probs_of(name, calibrator(there, features)), wanted, device)
    assert_near(calibrator.predict_proba(there, features), wanted, device)
    assert_near(probs_of(name, calibrator.transform(there, features)), wanted, device)
    log_probs = calibrator.log_probs(there, features)
    assert_near(log_probs.exp(), wanted, device)
    with torch.inference_mode():
        assert_near(probs_of(name, calibrator(there, features)), wanted, device)


def test_it_describes_itself_there(name, device):
    calibrator, plain = fitted(name, device), fitted_on_cpu(name)
    assert type(calibrator).__name__ in repr(calibrator)
    assert calibrator.describe().split()[0] == plain.describe().split()[0]
    assert calibrator.learned().keys() == plain.learned().keys()
    assert len(calibrator._repr_html_()) > 100


def test_what_comes_with_the_logits_may_be_anywhere(name, device):
    logits, labels = data_of(name)
    weight = np.random.default_rng(0).uniform(0.5, 2, len(labels))
    groups = torch.arange(len(labels)) // 2
    calibrator = new(name)
    extra = beside(calibrator, logits)
    plain = new(name).fit(logits, labels, **extra, sample_weight=weight, groups=groups)
    if extra:
        weights, bias = extra["head"]
        extra["features"] = extra["features"].numpy()
        extra["head"] = (torch.as_tensor(weights).float().to(device), bias)
    there = logits.to(device)
    calibrator.fit(
        there, labels.numpy(), **extra, sample_weight=torch.from_numpy(weight), groups=groups
    )
    wanted = plain.predict_proba(logits, inputs(plain, logits))
    beside_there = extra.get("features")
    assert_near(calibrator.predict_proba(there, beside_there), wanted, device)
    if beside_there is not None:  # a tensor of the CPU is brought to the logits, as an array is
        at_hand = torch.from_numpy(beside_there)
        assert_near(calibrator.predict_proba(there, at_hand), wanted, device)
        assert_near(calibrator(there, at_hand).softmax(-1), wanted, device)
    # the labels, weights and groups there, and the logits here
    calibrator.fit(
        logits.numpy(),
        labels.to(device),
        **beside(calibrator, there),
        sample_weight=torch.from_numpy(weight).float().to(device),
        groups=groups.to(device),
    )
    assert_near(calibrator.predict_proba(logits.to(device), beside_there), wanted, device)


def test_arrays_are_brought_to_it_and_come_back_as_arrays(name, device):
    calibrator = fitted(name, device)
    logits = data_of(name)[0]
    features = inputs(calibrator, logits)
    beside_it = None if features is None else features.numpy()
    probs = calibrator.predict_proba(logits.numpy(), beside_it)
    assert isinstance(probs, np.ndarray)
    there = calibrator.predict_proba(logits.to(device), features)
    np.testing.assert_allclose(probs, there.cpu().numpy(), atol=1e-6)
    assert isinstance(calibrator.transform(logits.numpy(), beside_it), np.ndarray)


def test_a_tensor_elsewhere_is_told_of(name, device):
    calibrator, logits = fitted(name, device), data_of(name)[0]
    features = inputs(calibrator, logits)
    wanted = rf"on {device}, .* on cpu: .*\.to\('{device}'\)"
    for call in (calibrator, calibrator.predict_proba, calibrator.transform, calibrator.log_probs):
        with pytest.raises(ValueError, match=wanted):
            call(logits, features)
    other = logits.to(device)
    with pytest.raises(ValueError, match=rf"on cpu, .* on {device}: "):
        fitted_on_cpu(name)(other, features)


def test_a_fit_moves_it_and_arrays_leave_it_where_it_is(name, device):
    logits, labels = data_of(name)
    calibrator = fitted(name, device)
    calibrator.fit(logits.numpy(), labels.numpy(), **beside(calibrator, logits))
    assert places(calibrator) == {device}
    calibrator.fit(logits, labels, **beside(calibrator, logits))
    assert places(calibrator) == {torch.device("cpu")}
    wanted = fitted_on_cpu(name).predict_proba(logits, inputs(calibrator, logits))
    assert_near(
        calibrator.predict_proba(logits, inputs(calibrator, logits)), wanted, torch.device("cpu")
    )


def test_it_moves_as_modules_do(name, device):
    logits = data_of(name)[0]
    whole = nn.Sequential(fitted(name, device)).to("cpu")
    calibrator: Any = whole[0]
    assert places(calibrator) == {torch.device("cpu")}
    wanted = fitted_on_cpu(name).predict_proba(logits, inputs(calibrator, logits))
    cpu = torch.device("cpu")
    assert_near(calibrator.predict_proba(logits, inputs(calibrator, logits)), wanted, cpu)
    calibrator.to(device)
    there = logits.to(device)
    assert_near(calibrator.predict_proba(there, inputs(calibrator, there)), wanted, device)


def test_half_precision_there(name, device):
    logits, labels = data_of(name)
    dtype = torch.float16 if len(name) % 2 else torch.bfloat16
    calibrator, there = new(name), logits.to(dtype).to(device)
    extra = beside(calibrator, logits.to(dtype).float())
    calibrator.fit(there, labels.to(device), **extra)
    plain = new(name).fit(logits.to(dtype), labels, **extra)
    for narrow in (torch.float16, torch.bfloat16):
        result = calibrator(logits.to(narrow).to(device), extra.get("features"))
        assert result.dtype == torch.float32
        wanted = plain.predict_proba(logits.to(narrow), extra.get("features"))
        assert_near(probs_of(name, result), wanted, device)


def test_saved_from_there_and_loaded_there(name, device, tmp_path):
    calibrator = fitted(name, device)
    cal.save(calibrator, tmp_path / "saved")
    assert places(cal.load(tmp_path / "saved")) == {torch.device("cpu")}
    again = cal.load(tmp_path / "saved", device=device)
    assert places(again) == {device}
    there = data_of(name)[0].to(device)
    features = inputs(calibrator, there)
    expected = calibrator.predict_proba(there, features)
    assert_near(again.predict_proba(there, features), expected.cpu(), device)
    if not isinstance(calibrator, Multicalibration):  # which needs its options
        other = type(calibrator)(**calibrator.config()).to(device)
        other.load_state_dict(calibrator.state_dict())
        assert_near(other.predict_proba(there, features), expected.cpu(), device)


def test_log_odds_there(device, name):
    if name.startswith("tags"):
        pytest.skip("tags are never one logit")
    logits, labels = drawn(np.random.default_rng(5), 200, 2, temperature=2.0)
    odds, labels = tensors(logits[:, 1] - logits[:, 0], labels)
    plain, calibrator = new(name), new(name)
    plain.fit(odds, labels, **beside(plain, odds))
    there = odds.to(device)
    calibrator.fit(there, labels.to(device), **beside(calibrator, there))

    def features(values):
        return beside(plain, values).get("features")

    wanted = plain.predict_proba(odds, features(odds))
    assert_near(calibrator.predict_proba(there, features(there)), wanted, device)


@pytest.mark.parametrize("maskable", MASKABLE)
def test_masked_classes_there(maskable, device):
    logits, labels = (x.clone() for x in data_of(maskable))
    masked = torch.from_numpy(np.random.default_rng(1).random(tuple(logits.shape)) < 0.2)
    masked[torch.arange(len(labels)), labels] = False
    features = beside(new(maskable), logits)
    logits[masked] = -torch.inf
    plain, calibrator = (new(maskable) for _ in range(2))
    plain.fit(logits, labels, **features)
    calibrator.fit(logits.to(device), labels.to(device), **features)
    wanted = plain.predict_proba(logits, features.get("features"))
    probs = calibrator.predict_proba(logits.to(device), features.get("features"))
    # gc puts examples into groups by distances between features, and few are in each
    assert_near(probs, wanted, device, on_gpu=5e-3 if maskable == "gc" else 1e-3)
    if maskable not in EVERY_METHOD or EVERY_METHOD[maskable]().keeps_argmax:
        assert float(probs.cpu()[masked].max()) == 0


@pytest.mark.parametrize("tempered", TEMPERED)
def test_temperatures_there(tempered, device):
    logits = data_of(tempered)[0]
    calibrator = fitted(tempered, device)
    wanted = fitted_on_cpu(tempered).temperature(logits)
    assert_near(calibrator.temperature(logits.to(device)), wanted, device)
    assert isinstance(calibrator.temperature(logits.numpy()), np.ndarray)
    with pytest.raises(ValueError, match="on cpu"):
        calibrator.temperature(logits)


def test_bounds_of_venn_abers_there(device):
    logits = data_of("venn_abers")[0]
    calibrator = fitted("venn_abers", device)
    wanted = fitted_on_cpu("venn_abers").predict_bounds(logits)
    for found, expected in zip(calibrator.predict_bounds(logits.to(device)), wanted, strict=True):
        assert_near(found, expected, device)


@pytest.mark.parametrize("keeps", [True, False])
def test_auto_chooses_there_as_it_does_on_the_cpu(device, keeps):
    if device == WITHOUT_FLOAT64:
        pytest.skip(FITS_ON_CPU)
    rng = np.random.default_rng(2)
    logits, labels = drawn(rng, 400, 4, temperature=1.5, scale=2.5)
    logits[:, 0] += 2 * (logits[:, 1] > 2)  # so that one temperature is not enough
    logits, labels, features = tensors(logits, labels, rng.normal(size=(400, 4)))
    both: tuple[dict[str, Any], ...] = (
        {"keep_argmax": keeps, "folds": 2},
        {"candidates": ("none", "isotonic", "procal"), "folds": 2},
    )
    for options in both:
        plain: Any = cal.Auto(**options).fit(logits, labels, features=features)
        there: Any = cal.Auto(**options).fit(
            logits.to(device), labels.to(device), features=features.to(device)
        )
        assert places(there) == {device}
        assert there.chosen_.name == plain.chosen_.name
        assert_near(
            there.predict_proba(logits.to(device), features.to(device)),
            plain.predict_proba(logits, features),
            device,
        )


def test_an_average_answers_where_its_members_are(device):
    logits = data_of("ts")[0]
    members = [fitted(n, device) for n in ("ts", "vector", "isotonic")]
    average = Average(members, [0.5, 0.3, 0.2])
    assert places(average) == {device}
    wanted = Average([fitted_on_cpu(n) for n in ("ts", "vector", "isotonic")], [0.5, 0.3, 0.2])
    assert_near(average.predict_proba(logits.to(device)), wanted.predict_proba(logits), device)


def test_metadata_of_subgroups_beside_logits_there(device, rng):
    odds = rng.normal(size=2000).astype(np.float32)
    age, site = rng.integers(18, 80, 2000), rng.choice(["A", "B"], 2000)
    truth = odds - 2 * ((age < 40) & (site == "B"))
    labels = (rng.random(2000) < 1 / (1 + np.exp(-truth))).astype(int)
    people = {"age": age, "site": site}
    plain, there = (Multicalibration(columns=["age", "site"], rounds=10) for _ in range(2))
    plain.fit(torch.from_numpy(odds), labels, features=people)
    there.fit(
        torch.from_numpy(odds).to(device), torch.from_numpy(labels).to(device), features=people
    )
    assert places(there) == {device}
    wanted = plain.predict_proba(torch.from_numpy(odds), people)
    assert_near(there.predict_proba(torch.from_numpy(odds).to(device), people), wanted, device)


@pytest.mark.parametrize("several", ONE_OF_TWO)
def test_a_fit_in_many_chunks_there(several, device, monkeypatch):
    """As with a hundred thousand rows of a thousand classes."""
    if device == WITHOUT_FLOAT64:
        pytest.skip(FITS_ON_CPU)
    for kind in ("cpu", "cuda", device.type):
        monkeypatch.setitem(chunks.CHUNK_SIZE, kind, 300)
        monkeypatch.setitem(isotonic._NUMBERS_AT_A_TIME, kind, 100)
    logits, labels = (x.to(device) for x in data_of(several))
    calibrator = new(several)
    calibrator.fit(logits, labels, **beside(calibrator, logits))
    wanted = fitted_on_cpu(several).predict_proba(logits.cpu(), inputs(calibrator, logits.cpu()))
    assert_near(calibrator.predict_proba(logits, inputs(calibrator, logits)), wanted, device)


@pytest.mark.parametrize("name", ["ts", "smart", "isotonic", "top_and_rest"])
def test_a_default_device_changes_nothing(name, device):
    logits, labels = data_of(name)
    with torch.device(device):
        there = torch.tensor(logits.tolist())
        assert there.device == device
        calibrator = new(name).fit(there, labels)
        probs = calibrator.predict_proba(there)
        error = cal.ece(there, labels)
        arrays = new(name).fit(logits.numpy(), labels.numpy()).predict_proba(logits.numpy())
    wanted = fitted_on_cpu(name).predict_proba(logits)
    assert_near(probs, wanted, device)
    assert_near(torch.from_numpy(arrays), wanted, torch.device("cpu"))
    assert error == pytest.approx(cal.ece(logits, labels))


def test_updates_stay_on_the_device_of_the_stream(device):
    logits, labels = data_of("ts")
    on_cpu = cal.TemperatureScaling().update(logits[:100], labels[:100], half_life=40)
    there: Any = cal.TemperatureScaling().update(
        logits[:100].to(device), labels[:100].to(device), half_life=40
    )
    assert there.recent_.logits.device == device
    there.to("cpu").update(logits[100:].to(device), labels[100:].to(device))
    on_cpu.update(logits[100:], labels[100:])
    assert there.device == there.recent_.labels.device == device
    torch.testing.assert_close(there.temperature_.cpu(), on_cpu.temperature_)


def test_searches_there_have_the_curves_and_objectives_of_the_cpu(device, rng, monkeypatch):
    if device == WITHOUT_FLOAT64:
        pytest.skip(FITS_ON_CPU)
    monkeypatch.setattr(logpartition, "DEVICE_FROM", 1)
    logits, labels = drawn(rng, 300, 12, 2.0)
    weight = rng.exponential(size=300)
    records = tabulate(examples(logits, labels, weight))
    there: Any = records.on(device)
    beyond, within = rng.uniform(-4, 4, 300), rng.uniform(-2, 2, 300)
    for u in (beyond, within, 0.7, -4.0, 4.0):
        b = np.exp(u)
        given = torch.from_numpy(b).to(device) if np.ndim(u) else b
        for found, wanted in zip(there.log_partition(given), records.log_partition(b), strict=True):
            assert found.device == device
            # of one sharpness the CPU computes in single precision
            atol = 1e-9 if np.ndim(u) else 1e-5
            np.testing.assert_allclose(found.cpu().numpy(), wanted, rtol=0, atol=atol)
    mixed = partial(_with_likelihood, soft_ece, 0.3)
    measures: list[Any] = [*PROPER.values(), soft_ece, pointwise, mixed]
    for measure in measures:
        for u in (beyond, within):
            found, wanted = measure(there, torch.from_numpy(u).to(device)), measure(records, u)
            assert float(found.value) == pytest.approx(float(wanted.value), abs=1e-9)
            np.testing.assert_allclose(found.gradient.cpu().numpy(), wanted.gradient, atol=1e-9)


@pytest.mark.parametrize("method", ["smart", "pts"])
def test_networks_there_are_those_of_the_cpu_for_many_examples(device, method, monkeypatch):
    """The CPU joins points of one input by lines, and parts in bins on a grid."""
    monkeypatch.setattr(logpartition, "DEVICE_FROM", 1000)
    logits, labels = tensors(*drawn(np.random.default_rng(8), 3000, 5, temperature=1.8, scale=2.5))
    plain, there = new(method).fit(logits, labels), new(method)
    there.fit(logits.to(device), labels.to(device))
    assert there.solution_.value == pytest.approx(plain.solution_.value, abs=1e-5)
    found, wanted = there.temperature(logits.to(device)).cpu(), plain.temperature(logits)
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=0)
    assert float((found / wanted - 1).abs().mean()) < 1e-3


@pytest.mark.parametrize("weighted", [False, True])
def test_isotonic_sums_between_hits_are_those_of_the_cpu(device, rng, weighted):
    if device == WITHOUT_FLOAT64:
        pytest.skip(FITS_ON_CPU)
    for digits in (0, 1, 6):  # all, many and no ties
        hits = np.unique(rng.normal(size=20).round(digits).astype(np.float32))
        found, wanted = isotonic.nothing(hits), isotonic.nothing(hits)
        for size in (1, 7, 300):
            odds = rng.normal(size=size).round(digits).astype(np.float32)
            odds[rng.random(size) < 0.1] = -np.inf
            weight = rng.exponential(size=size) if weighted else None
            there = None if weight is None else torch.from_numpy(weight).to(device)
            isotonic.tally(hits, odds, weight, wanted)
            isotonic._tally_there(hits, torch.from_numpy(odds).to(device), there, found)
        np.testing.assert_allclose(found.mass, wanted.mass, rtol=1e-12, atol=1e-10)
        np.testing.assert_array_equal(found.largest, wanted.largest)


@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_log_odds_of_answers_have_the_objective_of_the_cpu(device, rng, weight, monkeypatch):
    monkeypatch.setattr(logpartition, "DEVICE_FROM", 1)
    inputs, share = rng.normal(size=(200, 3)), rng.dirichlet(np.ones(200))
    correct = rng.random(200) < 0.6
    there, plain = (
        _confidence_objective(inputs, correct, share, weight, place)
        for place in (device, torch.device("cpu"))
    )
    for parameters in rng.normal(size=(5, 3)):
        value, gradient = there(parameters)
        wanted, slope = plain(parameters)
        assert value == pytest.approx(wanted, abs=1e-12)
        np.testing.assert_allclose(gradient, slope, rtol=0, atol=1e-12)


@pytest.mark.parametrize("method", ["beta", "odds", "blend"])
def test_log_odds_searched_there_are_those_of_the_cpu(device, method, monkeypatch):
    monkeypatch.setattr(logpartition, "DEVICE_FROM", 1000)
    logits, labels = tensors(*drawn(np.random.default_rng(9), 2000, 5, temperature=1.8, scale=2.5))
    wanted = new(method).fit(logits, labels).predict_proba(logits)
    there = new(method).fit(logits.to(device), labels.to(device))
    found = there.predict_proba(logits.to(device)).cpu()
    # the network of blend as above
    torch.testing.assert_close(found, wanted, rtol=0, atol=5e-3 if method == "blend" else 1e-5)
