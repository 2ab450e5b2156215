"""Subgroups that are found: planted ones, in arrays, files and shards; and refused input."""

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np
import pandas as pd
import pytest

import calibrant as cal
from calibrant import use
from calibrant.data.files import as_dataset
from calibrant.slices import find_slices, measure_groups
from calibrant.slices.examples import Reading
from calibrant.slices.find import search


def planted(rng, n=6000, factor=0.5):
    """P(y = 1) that is too high for the young of one site."""
    metadata = {
        "age": rng.integers(20, 80, n),
        "site": rng.choice(["A", "B", "C"], n),
        "patient": np.array([f"p{i}" for i in range(n)]),
    }
    probs = rng.uniform(size=n)
    wrong = (metadata["age"] < 40) & (metadata["site"] == "B")
    labels = (rng.uniform(size=n) < np.where(wrong, factor * probs, probs)).astype(int)
    return metadata, probs, labels


def test_a_planted_subgroup_is_found_and_named(rng):
    metadata, probs, labels = planted(rng, 12_000)
    result = find_slices(probs=probs, labels=labels, metadata=metadata)
    worst = result[0]
    assert "site = B" in worst.name
    assert "age < " in worst.name
    assert worst.estimand == "binary"
    assert worst.gap.low <= 0.25 <= worst.gap.high  # half of the mean of a uniform claim
    assert result.left_out == ["patient"]
    assert [one.least for one in result.slices] == sorted(
        (one.least for one in result.slices), reverse=True
    )
    assert worst.n / 12_000 == pytest.approx(worst.share)
    assert "too high by" in result.verdict()
    assert "patient" in str(result)


def as_colours(rng, factor):
    """Five classes and seven colours, which have nothing to do with them."""
    logits = 1.5 * rng.normal(size=(7000, 5))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    colour = rng.choice(list("DEFGHIJ"), 7000)
    return {"logits": factor * logits, "labels": labels, "colour": colour}


def test_a_model_that_is_off_as_a_whole_is_said_to_be(rng):
    data = as_colours(rng, 2.0)
    reading = Reading({"colour": "colour"}, 5, predictions=False)
    result = search(as_dataset(data).split(None), reading).result
    assert (len(result), result.searched, result.off_as_a_whole) == (0, 7, ["top_label"])
    right = data["logits"].argmax(1) == data["labels"]
    p = np.exp(data["logits"]) / np.exp(data["logits"]).sum(1, keepdims=True)
    gaps = [(p.max(1) - right)[data["colour"] == each].mean() for each in "DEFGHIJ"]
    by = f"by {100 * min(gaps):.1f} to {100 * max(gaps):.1f} points"
    assert result.verdict() == (
        f"All 7 subgroups are over-confident {by}, as the model is as a whole. "
        "No subgroup is shown to be off by more than that explains."
    )
    assert "cal-warn" in result._repr_html_()
    groups = measure_groups(data, by="colour")
    assert groups.verdict().startswith("All 7 groups are over-confident")
    (off,) = result.to_dict()["off"]
    assert (off["searched"], off["number"]) == (7, 7)
    assert (off["smallest"], off["largest"]) == pytest.approx((min(gaps), max(gaps)))


def test_a_model_that_is_not_sure_enough_as_a_whole(rng):
    result = find_slices(as_colours(rng, 0.4))
    assert "subgroups are under-confident by" in result.verdict()
    assert "as the model is as a whole" in result.verdict()


def test_the_sentence_is_kept_for_calibrated_models(rng):
    assert find_slices(as_colours(rng, 1.0)).verdict() == (
        "No subgroup is shown to be miscalibrated."
    )


@pytest.mark.parametrize("scale", [0.01, 100.0])
def test_the_scale_of_weights_does_not_matter(rng, scale):
    metadata, probs, labels = planted(rng)
    weight = rng.uniform(0.5, 2, probs.size)
    results = [
        find_slices(probs=probs, labels=labels, metadata=metadata, sample_weight=s * weight)
        for s in (1.0, scale)
    ]
    first, second = ([one.name for one in result.slices] for result in results)
    assert first == second != []


def test_calibrated_predictions_have_none():
    """Nothing is named in at least 90 % of data sets."""
    named = 0
    for seed in range(30):
        rng = np.random.default_rng(seed)
        metadata, probs, labels = planted(rng, 800, factor=1.0)
        named += len(find_slices(probs=probs, labels=labels, metadata=metadata)) > 0
    assert named <= 8  # of 30, where 3 are allowed on average; more with probability 0.2 %


def test_symmetric_over_confidence_of_two_classes_is_found(rng):
    """P(y = 1) is right on average in the subgroup; the confidence is not."""
    site = rng.choice(["A", "B"], 8000)
    logits = 2 * rng.normal(size=8000)
    truth = 1 / (1 + np.exp(-np.where(site == "B", 0.4, 1.0) * logits))
    labels = (rng.uniform(size=8000) < truth).astype(int)
    result = find_slices(logits, labels, metadata={"site": site}, columns=["site"])
    named = {(one.name, one.estimand) for one in result.slices}
    assert ("site = B", "top_label") in named
    assert any("over-confident" in one.finding() for one in result.slices)


def test_classes_confidences_and_clusters_of_features(rng):
    logits = 2 * rng.normal(size=(6000, 4))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    of_cat = logits.argmax(1) == 2
    labels[of_cat & (rng.uniform(size=6000) < 0.4)] = 0
    frame = pd.DataFrame(logits, columns=["a", "b", "cat", "d"])
    result = find_slices(frame, pd.Series(labels))
    assert "predicted class = cat" in result[0].name
    assert set(result.columns) == {"confidence", "predicted class", "second class"}
    features = rng.normal(size=(6000, 3)) + 8 * of_cat[:, None]
    far = find_slices(logits, labels, features=features, columns=[])
    assert "feature cluster" in far.columns
    assert any("Typical rows of each feature cluster" in note for note in far.notes)


def test_missing_values_are_a_subgroup(rng):
    metadata, probs, labels = planted(rng, factor=1.0)
    age = metadata["age"].astype(float)
    age[rng.uniform(size=age.size) < 0.2] = np.nan
    labels = np.where(np.isnan(age), rng.integers(0, 2, age.size), labels)
    result = find_slices(probs=probs, labels=labels, metadata={"age": age})
    assert "age is missing" in {one.name.split(" and ")[0] for one in result.slices}


def test_files_shards_and_processes_agree(rng, tmp_path):
    metadata, probs, labels = planted(rng, 3000)
    columns = {"probs": probs, "labels": labels, **metadata}
    whole = find_slices(columns).to_dict()
    frame = pd.DataFrame({"prob": probs, "label": labels, **metadata})
    assert find_slices(frame).to_dict() == whole
    for i, rows in enumerate(np.array_split(np.arange(3000), 3)):
        np.savez(tmp_path / f"{i}.npz", **{name: v[rows] for name, v in columns.items()})
    with ProcessPoolExecutor(2, get_context("spawn")) as pool, use(executor=pool):
        shards = find_slices(tmp_path).to_dict()
    for one, other in zip(whole["slices"], shards["slices"], strict=True):
        assert one["name"] == other["name"]
        assert one["gap"] == pytest.approx(other["gap"], abs=1e-12)


def test_weights_ignored_labels_and_calibrators(rng):
    metadata, probs, labels = planted(rng)
    given = {"probs": probs, "labels": labels, **metadata}
    weight = rng.uniform(0.5, 2, labels.size)
    kept = rng.uniform(size=labels.size) < 0.7
    some = find_slices({**given, "w": np.where(kept, weight, 0)}, sample_weight="w")
    same = find_slices(
        {**given, "w": 10 * weight, "labels": np.where(kept, labels, -100)}, sample_weight="w"
    )
    assert some.n == same.n == kept.sum()
    assert some[0].name == same[0].name
    assert some[0].gap == pytest.approx(same[0].gap)
    logits = np.log(probs / (1 - probs))
    calibrator = cal.CALIBRATORS["sigmoid"]().fit(logits, labels)
    after = find_slices({**given, "logits": logits}, calibrator=calibrator)
    expected = find_slices({**given, "probs": calibrator.predict_proba(logits)})
    assert after[0].gap == pytest.approx(expected[0].gap, abs=1e-6)


def test_repaired_predictions(rng):
    """The calibrator reads metadata that is not searched."""
    metadata, probs, labels = planted(rng, 8000)
    logits = np.log(probs / (1 - probs))
    inputs = {name: metadata[name] for name in ("age", "site")}
    repair = cal.calibrators.Multicalibration(columns=["age", "site"], base="none")
    half = slice(0, 4000)
    repair.fit(logits[half], labels[half], features={k: v[half] for k, v in inputs.items()})
    rest = {"labels": labels[4000:], "metadata": {k: v[4000:] for k, v in metadata.items()}}
    before = find_slices(logits[4000:], **rest, columns=["site"])
    after = find_slices(logits[4000:], **rest, columns=["site"], calibrator=repair)
    worst = {one.name: abs(one.gap.value) for one in before.slices}
    assert max(worst.values()) > 0.06
    assert all(one.least < 0.02 for one in after.slices)


def test_depth_size_and_columns(rng):
    metadata, probs, labels = planted(rng)
    given = {"probs": probs, "labels": labels, "metadata": metadata}
    one = find_slices(**given, depth=1)
    assert all(" and " not in each.name for each in one.slices)
    three = find_slices(**given, depth=3, min_size=200, most=2)
    assert len(three) <= 2
    assert all(each.n >= 200 for each in three.slices)
    only = find_slices(**given, columns=["age"])
    assert only.columns == ["age", "P(1)"]


def test_names_that_clash_with_keys(rng):
    metadata, probs, labels = planted(rng, 2000)
    clashing = {"labels": metadata["site"], "dev_features": metadata["age"]}
    result = find_slices(probs=probs, labels=labels, metadata=clashing)
    assert result.columns == ["labels", "dev_features", "P(1)"]


def test_forms_of_a_result(rng):
    metadata, probs, labels = planted(rng)
    result = find_slices(probs=probs, labels=labels, metadata=metadata)
    frame = result.to_frame()
    assert frame.name.tolist()[:2] == ["all examples"] * 2
    assert len(frame) == len(result) + 2
    assert result.to_latex().startswith(r"\begin{tabular}{lrrrrr}")
    assert "miscalibrated" in result._repr_html_()
    axes = result.plot()
    assert axes.get_xlabel() == "gap (%), 90 % interval"
    assert repr(result[0]).startswith("Slice(age < ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 4}, "depth must be 1, 2 or 3"),
        ({"columns": ["agee"]}, "unknown column 'agee': did you mean age"),
        ({"level": 1.5}, "level"),
        ({"min_size": 0}, "min_size"),
        ({"metadata": {"age": np.zeros((100, 2))}}, "one value per example"),
        ({"metadata": {"age": np.zeros(99)}}, "age has 99 rows"),
        ({"metadata": {"P(1)": np.arange(100)}}, r"rename the column 'P\(1\)'"),
        ({"metadata": {1: np.arange(100), "1": np.arange(100)}}, "different names, got 1 twice"),
        ({"metadata": np.zeros((4, 5, 5))}, r"an array \(n, columns\)"),
        ({"depth": 2.0}, "depth must be a whole number"),
        ({"seed": -1}, "seed must be a whole number"),
        ({"features": np.full((100, 2), np.inf)}, "features must be finite"),
        ({"labels": np.full(100, -100)}, "label"),
        ({"probs": np.full(100, np.nan)}, "NaN"),
        ({"labels": None}, "labels are missing"),
    ],
)
def test_bad_input_is_refused_with_the_remedy(options, message):
    usual = {"probs": np.full(100, 0.5), "labels": np.arange(100) % 2}
    with pytest.raises((ValueError, TypeError), match=message):
        find_slices(**{**usual, "metadata": {"age": np.arange(100)}, **options})


def test_tags_and_metadata_beside_a_file_are_refused(tmp_path):
    path = tmp_path / "p.npz"
    np.savez(path, logits=np.zeros((10, 3)), labels=np.zeros(10, int))
    with pytest.raises(TypeError, match="has it as further columns"):
        find_slices(path, metadata={"age": np.arange(10)})
    with pytest.raises(ValueError, match="one label per row"):
        find_slices({"logits": np.zeros((10, 3, 2)), "labels": np.zeros((10, 3), int)})


def test_certain_claims_that_are_wrong(rng):
    site = np.array(list("ABCDE"))[np.arange(1000) % 5]
    probs = np.where(site == "A", 1.0, rng.uniform(0.05, 0.95, 1000))
    labels = (rng.uniform(size=1000) < probs).astype(int)
    wrong = np.where(site == "A", 0, labels)
    found = find_slices(probs=probs, labels=wrong, metadata={"site": site})
    assert "site = A" in {one.name for one in found.slices}
    sure = np.full((1000, 50), -100.0)
    sure[:, 0] = 100
    assert len(find_slices(sure, np.zeros(1000, int))) == 0
    assert len(find_slices(probs=labels.astype(float), labels=labels)) == 0


def test_few_examples_are_no_subgroups(rng):
    found = find_slices(probs=rng.uniform(size=20), labels=rng.integers(0, 2, 20))
    assert (found.searched, found.n) == (0, 20)
    assert "Nothing was searched: no subgroup has 30 examples." in str(found)


def test_columns_of_any_kind(rng):
    """Dates with time zones and as text, objects with missing values, names of predictions."""
    n = 2000
    days = pd.Series(pd.date_range("2023-01-01", periods=n, freq="h", tz="Europe/Paris"))
    early = (np.arange(n) < n // 4).astype(float)
    probs = rng.uniform(0.2, 0.9, n)
    labels = (rng.uniform(size=n) < np.where(early, probs / 3, probs)).astype(int)
    for metadata in (
        {"day": days},
        {"day": days.dt.tz_localize(None).astype(str).to_numpy()},
        {"day": np.array([d.date() for d in days], dtype=object)},
    ):
        found = find_slices(probs=probs, labels=labels, metadata=metadata)
        assert found[0].name.startswith("day < 2023-01-2"), metadata
    flags = pd.Series([True, False, None] * n, dtype="boolean")[:n]
    texts = pd.Series(["a", None, pd.NA, "b"] * n, dtype="string")[:n]
    mixed = np.array([1, None, "x", 2.5] * n, dtype=object)[:n]
    frame = pd.DataFrame({"flag": flags, "text": texts, "mixed": mixed})
    assert find_slices(probs=probs, labels=labels, metadata=frame).columns == [*frame, "P(1)"]
    whole = frame.assign(prob=probs, label=labels)
    assert find_slices(whole).columns == [*frame, "P(1)"]
    named = pd.Series(texts, name="site")
    assert find_slices(probs=probs, labels=labels, metadata=named).columns[0] == "site"


def test_a_column_called_row(rng):
    metadata, probs, labels = planted(rng, 3000)
    data = {"probs": probs, "labels": labels, "row": metadata["site"]}
    assert all("missing" not in one.name for one in find_slices(data).slices)
    assert "row = B" in find_slices(data)[0].name


def test_features_that_form_no_clusters(rng):
    _, probs, labels = planted(rng, 500)
    given = {"probs": probs, "labels": labels, "columns": []}
    find_slices(**given, features=np.ones((500, 3)))
    with pytest.raises(ValueError, match="features must be finite"):
        find_slices(**given, features=np.full((500, 3), np.nan))


def test_identifiers_are_no_subgroups(rng):
    """Rows in the order of a fault would otherwise be found as a range of their numbers."""
    n = 2000
    probs, income = rng.uniform(size=n), rng.lognormal(10, 1, n)
    labels = (rng.uniform(size=n) < np.where(np.arange(n) < 600, probs**3, probs)).astype(int)
    metadata = {
        "row": np.arange(n),
        "code": np.array([f"{100_000 + i}" for i in range(n)]),
        "day": np.arange("2020-01-01", n, dtype="datetime64[D]").astype(str),
        "income": income,
        "price": np.array([f"{value:.6f}" for value in income]),
    }
    found = find_slices(probs=probs, labels=labels, metadata=metadata)
    assert found.left_out == ["row", "code"]
    assert found.columns == ["day", "income", "price", "P(1)"]
    assert "identifiers" in " ".join(found.remarks())
    assert find_slices(probs=probs, labels=labels, metadata=metadata, columns=["row"])[0].name == (
        "row < 500"
    )
