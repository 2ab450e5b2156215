"""Figures of prediction files: every kind, of every form of data, or a reason why not."""

import sys
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.data.files import as_dataset
from calibrant.show.figures.from_data import KINDS, _collected, draw_file, figure
from tests.show.figures.test_reliability import assert_whole, legend, name_of, shares_of
from tests.support.simulate import drawn

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture(autouse=True)
def closed():
    """Every test ends without figures."""
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.default_rng(0)
    logits, labels = drawn(rng, 400, 3)
    groups = np.where(np.arange(400) % 4 == 0, "$rare$", "_often")
    weight = rng.integers(0, 3, 400).astype(float)
    return {"logits": 3 * logits, "labels": labels, "group": groups, "weight": weight}


@pytest.fixture(scope="module")
def ts(arrays):
    return cal.TemperatureScaling().fit(arrays["logits"], arrays["labels"])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", ["classes", "one logit", "probs", "tags"])
@pytest.mark.filterwarnings("ignore:.*keeps predictions")
def test_every_kind_is_drawn_of_every_form_or_refused(arrays, ts, kind, form):
    data: dict[str, Any] = {key: arrays[key] for key in ("logits", "labels")}
    options: dict[str, Any] = {"kind": kind, "level": None}
    calibrator: Any = ts
    if form == "one logit":
        data = {"logits": data["logits"][:, 0], "labels": (data["labels"] == 0).astype(int)}
        calibrator = cal.TemperatureScaling().fit(**data)
    elif form == "probs":
        odds = np.exp(data.pop("logits"))
        data["probs"] = odds / odds.sum(1, keepdims=True)
    elif form == "tags":
        data["labels"] = np.eye(3, dtype=int)[data["labels"]]
        options["estimand"] = "multilabel"
        calibrator = next(iter(cal.TAG_CALIBRATORS.values()))().fit(**data)
    if kind == "compare":
        options["methods"] = ["none"]
    if KINDS[kind].needs_calibrator:
        options["calibrator"] = calibrator
    if form == "tags" and not KINDS[kind].tags:
        with pytest.raises(ValueError, match="about answers, and tags have none"):
            figure(data, **options)
        return
    assert_whole(figure(data, **options))


def test_pairs_of_chunks_are_those_of_the_whole(arrays, tmp_path, ts, monkeypatch):
    """With weights of zero, ignored labels whose logits are NaN, shards and small chunks."""

    labels, logits = arrays["labels"].copy(), arrays["logits"].copy()
    labels[::7], logits[::7] = -100, np.nan
    for i, part in enumerate(np.array_split(np.arange(400), 3)):
        columns = {"logits": logits, "labels": labels, "g": arrays["group"], "w": arrays["weight"]}
        np.savez(tmp_path / f"{i}.npz", **{k: v[part] for k, v in columns.items()})
    monkeypatch.setattr("calibrant.data.dataset.CHUNK", 90)
    data = as_dataset(tmp_path, by="g", sample_weight="w")
    found = _collected(data.split(), ts, "auto")
    kept = (labels != -100) & (arrays["weight"] > 0)
    confidence, outcome = cal.top_label(ts.transform(logits[kept]), labels[kept])
    np.testing.assert_allclose(found.pairs.confidence, confidence)
    np.testing.assert_array_equal(found.pairs.outcome, outcome)
    np.testing.assert_array_equal(found.pairs.weight, arrays["weight"][kept])
    np.testing.assert_array_equal(found.group, arrays["group"][kept])
    margin = cal.metrics.margins(logits[kept]) / float(ts.temperature_)
    np.testing.assert_allclose(found.margin, margin, rtol=1e-5)
    axes: Any = figure(tmp_path, kind="classes", sample_weight="w").axes[0]
    worst = cal.metrics.reliability_by_class(
        logits[kept], labels[kept], sample_weight=arrays["weight"][kept]
    )[0]
    assert axes.get_title(loc="left").endswith(f"\nECE {100 * worst.reliability.ece.value:.2f} %")


def test_subgroups_and_several_files_are_side_by_side(arrays, tmp_path):
    for name in ("first", "second"):
        np.savez(tmp_path / f"{name}.npz", **arrays)
    files = [tmp_path / "first.npz", tmp_path / "second.npz"]
    for kind in ("reliability", "smooth", "histogram"):
        two = figure(*files, kind=kind, level=None)
        assert [name_of(ax) for ax in two.axes] == ["first", "second"]
    assert legend(figure(*files, kind="risk").axes[0]) == ["first", "second"]
    groups = figure(files[0], kind="smooth", by="group")
    assert [name_of(ax) for ax in groups.axes] == [r"\$rare\$", " _often"]
    same = figure(files[0], files[0])
    assert len(same.axes) == 2
    many = {**arrays, "group": np.arange(400) % 11}
    with pytest.warns(UserWarning, match="11 subgroups: the 8 largest"):
        assert len(figure(many, kind="histogram", by="group").axes) == 8


def test_a_calibrator_shows_before_and_after(arrays, ts):
    data = {key: arrays[key] for key in ("logits", "labels")}
    result = cal.effect(ts, data, metrics=["ece"])
    for kind in ("reliability", "effect"):
        before, after = figure(data, kind=kind, calibrator=ts).axes
        most = max(e.reliability().share.max() for e in (result.before, result.after))
        for ax, evaluation in ((before, result.before), (after, result.after)):
            expected = 0.14 * evaluation.reliability().share / most
            np.testing.assert_allclose(shares_of(ax)[:, 3], expected)
    assert legend(figure(data, kind="risk", calibrator=ts).axes[0]) == ["before", "after"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "relibility"}, "did you mean reliability"),
        ({"kind": "effect"}, "effect needs a calibrator"),
        ({"kind": "margins", "by": "group"}, "subgroups of one file"),
        ({"kind": "compare", "calibrator": True}, "fits calibrators of its own"),
        ({"max_error": 0.1}, "belongs to the kind threshold"),
        (
            {"kind": "threshold", "max_error": 0.1, "sample_weight": "w"},
            "counts examples and takes no sample_weight",
        ),
        ({"methods": ["ts"]}, "belong to the kind compare"),
        ({"calibrator": True, "twice": True}, "with a calibrator is of one file, got 2"),
        ({"kind": "classes", "twice": True}, "classes is of one file, got 2"),
    ],
)
def test_what_cannot_be_drawn_is_explained(arrays, ts, options, message):
    options = {**options, **({"calibrator": ts} if "calibrator" in options else {})}
    data = [arrays] * (2 if options.pop("twice", False) else 1)
    with pytest.raises(ValueError, match=message):
        figure(*data, **options)


def test_a_threshold_is_found_on_other_examples(arrays):
    data = {f"val_{k}": arrays[k] for k in ("logits", "labels")}
    data |= {f"test_{k}": arrays[k][::-1] for k in ("logits", "labels")}
    limit = cal.threshold(data["val_logits"], data["val_labels"], max_error=0.3)
    drawn_figure = figure(data, kind="threshold", max_error=0.3)
    title = drawn_figure.axes[0].get_title(loc="left")
    assert title == f"threshold {100 * round(limit.threshold, 4):.10g} %"


@pytest.mark.parametrize(
    "rows", [[[5.0, 0.0, 0.0]], [[5.0, 0.0, 0.0]] * 4], ids=["one example", "all alike"]
)
@pytest.mark.parametrize("kind", ["reliability", "smooth", "histogram", "margins", "risk"])
def test_little_data_is_drawn(kind, rows):
    assert_whole(figure({"logits": np.array(rows), "labels": [0] * len(rows)}, kind=kind))


def test_files_are_written_whole_and_figures_closed(arrays, tmp_path):
    before = plt.get_fignums()
    out = tmp_path / "a.svg"
    draw_file(arrays, out=out, size="column", dark=True, title="$x$ <b> " + "long " * 30)
    assert out.read_bytes().startswith(b"<?xml")
    assert plt.get_fignums() == before
    with pytest.raises(ValueError, match=r"written as \.pdf"):
        draw_file(arrays, out=tmp_path / "a.bmp")
    with pytest.raises(ValueError, match="unknown kind"):
        draw_file(arrays, out=out, kind="nothing")
    assert sorted(tmp_path.iterdir()) == [out]


def test_without_matplotlib_the_extra_is_named(monkeypatch, tmp_path, arrays):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[plot\]'"):
        draw_file(arrays, out=tmp_path / "figure.png")
