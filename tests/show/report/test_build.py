"""Which data a report is about, and what it says of where they came from."""

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import softmax

import calibrant as cal
from calibrant import use
from calibrant.data import save_predictions
from calibrant.show.report.verdict import _snippets
from tests.show.report.conftest import drawn

QUICK: dict[str, Any] = {"methods": [], "level": None}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for k, name in enumerate(("monday", "tuesday", "b/monday")):
        one = drawn(200, seed=k)
        save_predictions(
            f"{name}.npz", {**one, **{f"cold_{key}": v[:90] for key, v in one.items()}}
        )
    return tmp_path


def names(*args, **options):
    return [s.name for s in cal.report(*args, **{**QUICK, **options}).subjects]


def test_sets_are_named_by_their_files(files):
    assert names("monday.npz") == ["monday"]
    assert names(["monday.npz", Path("tuesday.npz")]) == ["monday", "tuesday"]
    assert names(["monday.npz", "b/monday.npz"]) == ["monday.npz", "b/monday.npz"]
    assert names({"old": "monday.npz", "new": drawn(50)}) == ["old", "new"]


def test_several_splits_are_several_sets(files):
    result = cal.report(["monday.npz", "tuesday.npz"], split=["cold", ""], **QUICK)
    found = [(s.name, s.split, s.evaluation.n) for s in result.subjects]
    assert found == [
        ("monday, cold", "cold", 90),
        ("monday, unnamed split", "", 200),
        ("tuesday, cold", "cold", 90),
        ("tuesday, unnamed split", "", 200),
    ]


def test_a_file_is_called_as_it_was_typed(files):
    assert names("b/monday.npz") == ["b/monday"]
    assert names(str(files / "b" / "monday.npz")) == ["monday"]


def test_logits_and_labels_are_one_set():
    data = drawn(50)
    assert names(data["logits"], data["labels"]) == ["predictions"]
    mapped, plain = (
        cal.report(*form, **QUICK).subjects[0].evaluation["ece"]
        for form in ((data,), (data["logits"].tolist(), data["labels"]))
    )
    assert plain == mapped
    with pytest.raises(TypeError, match="labels go with logits"):
        cal.report(data, data["labels"])


def test_probabilities_are_passed_by_name():
    data = drawn(50)
    asked = {"probs": softmax(data["logits"], axis=-1), "labels": data["labels"]}
    found = cal.report(**asked, **QUICK).subjects[0].evaluation
    assert found["ece"] == cal.evaluate(**asked, level=None)["ece"]


def test_a_mapping_of_arrays_is_one_set():
    assert names(drawn(50)) == ["predictions"]
    assert names({f"test_{key}": v for key, v in drawn(50).items()}) == ["predictions"]


def test_a_data_frame_is_one_set():
    pd = pytest.importorskip("pandas")
    data = drawn(60, classes=2)
    frame = pd.DataFrame(data["logits"], columns=["logit_no", "logit_yes"])
    frame["label"] = np.array(["no", "yes"])[data["labels"]]
    result = cal.report(frame, **QUICK)
    assert [c.part.name for c in result.subjects[0].classes] == ["no", "yes"]


@pytest.mark.parametrize("data", [[], [drawn(5)], ["a.npz", 3]])
def test_other_sequences_are_refused(data):
    with pytest.raises(TypeError, match="a sequence must have paths"):
        cal.report(data)


def test_a_file_named_twice_is_refused(files):
    with pytest.raises(ValueError, match="named twice"):
        cal.report(["monday.npz", "monday.npz"])


def test_an_empty_list_of_splits_is_refused(files):
    with pytest.raises(ValueError, match="at least one split"):
        cal.report("monday.npz", split=[])


def test_only_a_validation_split_is_measured_all_the_same():
    result = cal.report({f"val_{key}": v for key, v in drawn(50).items()}, **QUICK)
    assert result.subjects[0].split == "val"


def test_methods_that_cannot_be_tried_do_not_cost_the_report():
    result = cal.report(drawn(1), level=None)
    assert "folds" in result.subjects[0].remedy_error
    assert "Methods of calibration" in result.to_markdown()


def test_the_command_makes_the_report_again(files, run):
    odd: dict[str, Any] = {
        "level": 0.8,
        "methods": ["none", "ts"],
        "split": "cold",
    }
    first = cal.report("monday.npz", **odd)
    words = shlex.split(first.provenance.command)
    assert words[:3] == ["calibrant", "report", "monday.npz"]
    assert run(*words[1:], "-o", "again.json")[0] == 0
    assert json.loads(Path("again.json").read_text("utf-8"))["provenance"]["command"] == (
        f"{first.provenance.command} -o again.json"
    )
    first, again = json.loads(first.to_json()), json.loads(Path("again.json").read_text("utf-8"))
    for result in (first, again):
        result["provenance"].pop("created")
        for row in result["subjects"][0]["remedy"]["comparison"]["rows"]:
            row.pop("fit_seconds")
    assert first["subjects"][0]["evaluation"] == again["subjects"][0]["evaluation"]
    assert first["subjects"][0]["remedy"] == again["subjects"][0]["remedy"]
    assert first["provenance"]["options"] == again["provenance"]["options"]


@pytest.mark.parametrize("option", [{"bins": 10}, {"seed": 2}, {"estimand": "top_label"}])
def test_there_is_no_command_for_options_of_python(files, option):
    assert cal.report("monday.npz", **QUICK, **option).provenance.command == ""


def test_there_is_no_command_for_arrays(files):
    none = cal.report("monday.npz", methods=["none"], level=None).provenance.command
    assert none == "calibrant report monday.npz --methods none --level 0"
    result = cal.report({"a": "monday.npz", "b": drawn(50)}, **QUICK)
    assert result.provenance.command == ""
    assert "calibrant report" not in result.to_html() + result.to_markdown()


def advised(result, language):
    """The commands, or lines of Python, that a report says to copy."""
    copied = [each for each in _snippets(result.subjects[0]) if each.language == language]
    return [line for snippet in copied for line in snippet.code.splitlines()]


@pytest.mark.parametrize("factor", [1.0, 3.0])
def test_the_commands_to_copy_work_whatever_the_splits_are_called(files, run, factor):
    parts = {name: drawn(400, factor=factor, seed=k) for k, name in enumerate(("fit", "my day"))}
    save_predictions(
        "p.npz", {f"{name}_{key}": v for name, part in parts.items() for key, v in part.items()}
    )
    result = cal.report("p.npz", split="my day", fit_split="fit", methods=["none", "ts"])
    save_predictions("today.npz", parts["my day"])  # the file that the reader is told to have
    verbs = ["fit", "apply", "apply", "evaluate"]
    commands = [shlex.split(line)[1:] for line in advised(result, "bash")]
    commands = [words for words in commands if words[0] in verbs]
    assert [words[0] for words in commands] == (verbs if factor > 1 else verbs[-1:])
    # among them the limit, which the calibrated predictions keep and the others do not
    assert [run(*words)[0] for words in commands] == [0] * len(commands)


@pytest.mark.parametrize("factor", [1.0, 3.0])
@pytest.mark.parametrize("kind", ["npz", "csv", "arrays", "splits"])
def test_everything_to_copy_runs(files, run, kind, factor):
    """A calibrated model has no calibrator to watch with, and arrays are saved first."""
    values = drawn(400, factor=factor)
    day = f"today.{'csv' if kind == 'csv' else 'npz'}"
    save_predictions(day, values)  # the file that the reader is told to have
    names = dict(values)
    if kind == "splits":
        names = {f"{name}_{key}": v for name in ("val", "test") for key, v in values.items()}
    if kind in ("npz", "csv"):
        data: Any = f"model.{kind}"
        save_predictions(data, values)
    else:
        data = names
    result = cal.report(data, methods=["none", "ts"])
    said = _snippets(result.subjects[0])
    assert any(f"{day} is your file" in each.title for each in said)
    for each in said:
        if each.language == "python":
            exec(each.code, {**names})
            continue
        for line in each.code.splitlines():
            program, *words = shlex.split(line)
            assert program == "calibrant"
            if words[0] != "export" or find_spec("onnx"):
                assert run(*words)[0] == 0, line
    verbs = [line.split()[1] for line in advised(result, "bash")]
    kept = ["monitor", "apply", "evaluate"] if factor > 1 else ["monitor", "evaluate"]
    assert verbs == ["fit", "apply", "export"] * (factor > 1) + kept


def test_what_to_copy_names_columns_as_the_report_was_told(files, run):
    rng = np.random.default_rng(0)
    honest = 2 * rng.normal(size=400)
    right = (rng.uniform(size=400) < 1 / (1 + np.exp(-honest))).astype(int)
    rows = [f"{1 / (1 + np.exp(-3 * z)):.12f},{y}" for z, y in zip(honest, right, strict=True)]
    Path("scores.csv").write_text("\n".join(["my score,truth", *rows]))
    Path("today.csv").write_text("\n".join(["my score,truth", *rows]))
    data = cal.open_dataset("scores.csv", labels="truth", probs="my score")
    result = cal.report(data, methods=["none", "ts"])
    commands = [shlex.split(line)[1:] for line in advised(result, "bash")]
    verbs = ["fit", "apply", "export", "monitor", "apply", "evaluate"]
    assert [words[0] for words in commands] == verbs
    for words in commands:
        if words[0] != "export":  # which needs onnx
            assert run(*words)[0] == 0, words
    written = Path("calibrated.csv").read_bytes()
    Path("calibrated.csv").unlink()
    exec("\n".join(advised(result, "python")), {})
    assert Path("calibrated.csv").read_bytes() == written


def test_progress_ends_at_its_total():
    steps = []
    with use(progress=lambda done, total: steps.append((done, total))):
        cal.report(
            {"a": drawn(60), "b": drawn(60, seed=1)},
            methods=["none", "ts"],
            level=None,
        )
    assert steps[-1] == (6, 6)
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)


def test_what_was_not_checked_is_listed(over_confident, calibrated):
    (subject,) = calibrated.subjects
    said = " ".join(item.what for item in calibrated.unchecked(subject))
    assert "Subgroups" in said
    assert "Methods of calibration" in said
    (subject,) = over_confident.subjects
    said = " ".join(item.what for item in over_confident.unchecked(subject))
    assert "Subgroups" not in said
    assert "Drift" in said


def test_predictions_change_where_that_is_clearly_better_unless_told_otherwise():
    rng = np.random.default_rng(0)
    honest = rng.normal(size=(1000, 4))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    logits = honest + np.array([2.0, 0, 0, 0])
    biased = {"val_logits": logits[:500], "val_labels": labels[:500]}
    biased |= {"test_logits": logits[500:], "test_labels": labels[500:]}
    options: dict[str, Any] = {"methods": ["none", "auto"], "level": None}
    reports = [cal.report(biased, keep_argmax=keep, **options) for keep in (True, "auto", False)]
    changed = []
    for each in reports:
        remedy = each.subjects[0].remedy
        assert remedy is not None
        changed.append(remedy.comparison["auto"].argmax_changed or 0)
    assert changed[0] == 0 < changed[1] == changed[2]
    shown = [each.to_markdown() for each in reports]
    assert ["--set keep_argmax=" in text for text in shown] == [True, False, True]
    assert ['options={"keep_argmax": True}' in text for text in shown] == [True, False, False]
    assert ["no prediction changes" in text for text in shown] == [True, False, False]
    assert ["Accuracy rises from" in text for text in shown] == [False, True, True]
