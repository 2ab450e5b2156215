"""The page offers what suits a file, and its results are those of the library."""

import json

import numpy as np
import pytest

import calibrant as cal
from calibrant.ui import tasks
from calibrant.ui.fit_choices import Choices
from calibrant.ui.tasks import look, run
from tests.ui.conftest import npz, over_confident

ENOUGH = 10**9


@pytest.fixture
def file(tmp_path, monkeypatch):
    """Write arrays to a file in the working folder and return its name."""
    monkeypatch.chdir(tmp_path)

    def written(**arrays):
        (tmp_path / "a1b2.npz").write_bytes(npz(**arrays))
        return "a1b2.npz"

    return written


def names(found):
    return [method["name"] for method in found["methods"]]


def test_splits_and_methods_of_a_file(file, arrays):
    found = look(file(**arrays), ENOUGH)
    val = {"name": "val", "examples": 300, "domain": "logits", "features": None}
    assert found["splits"] == [val, {**val, "name": "test", "examples": 200}]
    assert (found["fit_split"], found["test_split"]) == ("val", "test")
    assert (found["classes"], found["multilabel"], found["class_names"]) == (3, False, [])
    assert names(found)[0] == "auto"
    assert {"ts", "smart"} <= set(names(found))
    assert not {"gc", "fc", "venn_abers"} & set(names(found))  # features, last layer, two classes
    assert not any(
        "`" in method["summary"] or "](" in method["summary"] for method in found["methods"]
    )


def test_features_and_the_last_layer_bring_more_methods(file):
    logits, labels = over_confident(50, 0)
    features = {"features": np.zeros((50, 7), "float32")}
    found = look(file(logits=logits, labels=labels, **features), ENOUGH)
    assert found["splits"][0]["features"] == 7
    assert "gc" in names(found)
    assert not {"fc", "multicalibration"} & {*names(found)}
    head = {"head_weight": np.zeros((3, 7)), "head_bias": np.zeros(3)}
    assert "fc" in names(look(file(logits=logits, labels=labels, **features, **head), ENOUGH))


def test_two_classes_and_plain_arrays(file):
    logits, labels = over_confident(50, 0, classes=2)
    found = look(file(logits=logits[:, 1] - logits[:, 0], labels=labels), ENOUGH)
    assert (found["classes"], found["multilabel"]) == (2, False)
    assert (found["fit_split"], found["test_split"]) == ("", "")
    assert "venn_abers" in names(found)


def test_tags_are_known_by_the_shape_of_the_labels(file):
    found = look(file(probs=np.full((9, 4), 0.5), labels=np.zeros((9, 4), int)), ENOUGH)
    assert found["multilabel"]
    assert names(found) == ["tags", "pooled"]  # the first is what auto stands for
    assert found["splits"][0]["domain"] == "probs"


def test_a_file_without_a_split_to_fit_on_leaves_the_choice_open(file, arrays):
    only = {key: values for key, values in arrays.items() if key.startswith("test")}
    assert look(file(**only), ENOUGH)["fit_split"] is None


def test_splits_without_labels_are_left_out(file, arrays):
    found = look(
        file(**arrays, new_logits=np.zeros((4, 3)), train_features=np.zeros((4, 7))), ENOUGH
    )
    assert [split["name"] for split in found["splits"]] == ["val", "test"]


def test_class_names_are_inert_and_few(file):
    logits, labels = over_confident(50, 0, classes=20)
    hostile = [f"<script>alert({i})</script>\x1b[31m\u202e" for i in range(20)]
    found = look(file(logits=logits, labels=labels, class_names=hostile), ENOUGH)
    assert len(found["class_names"]) == tasks.NAMES_SHOWN
    assert found["class_names"][0] == "<script>alert(0)</script>\\x1b[31m\\u202e"


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"x": np.zeros(3)}, "no logits, probs or features, only x"),
        ({"logits": np.zeros((3, 2))}, "has no labels in this split"),
        ({"features": np.zeros((3, 2)), "labels": np.zeros(3)}, "has no logits or probs"),
        ({"logits": np.zeros((3, 2)), "labels": np.zeros(4, int)}, "4 rows, but logits has 3"),
        ({"logits": np.array([[{}]], object), "labels": np.zeros(1)}, "pickle, which is never"),
        ({"logits": np.zeros((1, 2)), "labels": np.array([{}], object)}, "pickle, which is never"),
        ({"logits": np.array([["a"]]), "labels": np.zeros(1, int)}, "must be numbers"),
    ],
)
def test_files_that_cannot_be_used_are_explained(file, arrays, reason):
    with pytest.raises(ValueError, match=reason):
        look(file(**arrays), ENOUGH)


def test_arrays_that_expand_beyond_the_memory_are_refused(file):
    path = file(logits=np.zeros((100, 10)), labels=np.zeros(100, int))
    assert look(path, 8800)
    with pytest.raises(ValueError, match="use the command line"):
        look(path, 8799)


def test_results_are_those_of_the_library(file, arrays, tmp_path, monkeypatch):
    monkeypatch.setattr(tasks, "export", lambda *_, **__: 0.0)  # see test_app.py
    monkeypatch.setattr(tasks, "usual_methods", lambda *_: ("none", "ts"))  # others take longer
    path, sent = file(**arrays), []
    chosen = Choices("ets", fit_split="test", test_split="val")
    told = run(path, "my <b>file.npz", tmp_path, chosen, lambda *update: sent.append(update))
    assert [update for update in sent if update[0] == "step"] == [("step", i) for i in range(3)]
    assert ("progress", 200, 200) in sent
    assert (told["no_onnx"], told["needs_features"]) == (None, False)
    fitted = cal.fit(path, method="ets", split="test")
    loaded = cal.load(tmp_path / "calibrator.safetensors")
    np.testing.assert_array_equal(
        loaded.predict_proba(arrays["test_logits"]), fitted.predict_proba(arrays["test_logits"])
    )
    made = json.loads((tmp_path / "report.json").read_text())
    (subject,) = made["subjects"]
    expected = cal.evaluate(path, split="val").to_dict()["metrics"]
    assert subject["evaluation"]["metrics"]["ece"] == expected["ece"]
    methods = [row["method"] for row in subject["remedy"]["comparison"]["rows"]]
    assert methods == ["none", "ts", "ets"]
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "my &lt;b&gt;file" in page
    assert "my <b>" not in page
    for form in ("html", "md", "json"):
        text = (tmp_path / f"report.{form}").read_text("utf-8")
        assert "a1b2" not in text
        assert str(tmp_path) not in text


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"logits": np.zeros((9, 1)), "labels": np.zeros(9, int)}, "at least two classes"),
        ({"logits": np.full((9, 3), np.nan), "labels": np.zeros(9, int)}, "row 0 has NaN"),
        ({"logits": np.zeros((9, 3)), "labels": np.full(9, 7)}, "got 7 at row 0"),
        ({"logits": np.zeros((0, 3)), "labels": np.zeros(0, int)}, "empty"),
    ],
)
def test_values_that_cannot_be_used_are_explained(file, tmp_path, arrays, reason):
    path = file(**arrays)
    assert look(path, ENOUGH)["splits"]
    with pytest.raises(ValueError, match=reason):
        run(path, "mine.npz", tmp_path, Choices("ts"), lambda *_: None)


def test_the_choice_to_keep_predictions_is_passed_to_auto_alone(
    monkeypatch, file, arrays, tmp_path
):
    asked = []

    def stop(*_, options, **__):
        asked.append(options)
        raise ValueError("asked")

    monkeypatch.setattr(tasks, "fit_and_measure", stop)
    chosen = (Choices(keep_argmax=False), Choices("ts"), Choices("auto", keep_argmax=True))
    for choices in (*chosen, Choices(estimand="multilabel")):
        with pytest.raises(ValueError, match="asked"):
            run(file(**arrays), "x.npz", tmp_path, choices, lambda *_: None)
    assert asked == [{"keep_argmax": False}, None, {"keep_argmax": True}, None]


def test_a_failed_export_is_told_and_costs_nothing_else(monkeypatch, file, arrays, tmp_path):
    def fails(*_, **__):
        raise ImportError("ONNX export needs more libraries: pip install 'calibrant[export]'")

    monkeypatch.setattr(tasks, "export", fails)
    monkeypatch.setattr(tasks, "_report", lambda *_: None)
    told = run(file(**arrays), "x.npz", tmp_path, Choices("ts"), lambda *_: None)
    assert "calibrant[export]" in told["no_onnx"]
    assert (tmp_path / "calibrator.safetensors").exists()
