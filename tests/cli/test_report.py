"""The verb report."""

import json
from pathlib import Path

import pytest


def test_a_page_is_written_and_the_verdict_said(run, path):
    code, out, err = run("report", path, "--methods", "", "-o", "report.html")
    assert (code, out) == (0, "")
    assert err.startswith("wrote report.html\nNo. On average it is")
    assert "<h1>Calibration of p</h1>" in Path("report.html").read_text("utf-8")
    assert run("report", path, "--methods", "", "--level", 0, "-o", "report.html")[2].startswith(
        "replaced"
    )


def test_figures_equal_those_of_evaluate(run, split_file, tmp_path):
    out = tmp_path / "report.json"
    options = ("--by", "region", "--sample-weight", "importance", "--level", 0)
    assert run("report", split_file, *options, "--methods", "none,ts", "-o", out)[0] == 0
    _, printed, _ = run("evaluate", split_file, *options, "--json")
    (subject,) = json.loads(out.read_text("utf-8"))["subjects"]
    expected = json.loads(printed)
    assert expected.pop("split") == subject["split"] == "test"
    assert (expected.pop("skipped"), expected.pop("format")) == ({}, 1)
    assert subject["evaluation"] == expected
    assert [row["method"] for row in subject["remedy"]["comparison"]["rows"]] == ["none", "ts"]


def test_the_page_is_opened_if_asked(run, path, monkeypatch):
    opened: list[str] = []
    monkeypatch.setattr("click.launch", opened.append)
    none = ("--methods", "", "--level", 0)
    assert run("report", path, *none)[0] == 0
    assert opened == []
    assert run("report", path, *none, "--open")[0] == 0
    assert opened == ["report.html"]
    code, _, err = run("report", path, *none, "--open", "-o", "-")
    assert code == 2
    assert "--open needs a page" in err


def test_markdown_goes_to_stdout(run, path):
    code, out, err = run("report", path, "--methods", "", "--level", 0, "-o", "-")
    assert (code, err) == (0, "")
    assert out.startswith("# Calibration of p\n")


def test_several_files_and_splits_are_compared(run, folder):
    none = ("--methods", "", "--level", 0)
    assert run("report", "p.npz", "test.npz", *none, "-o", "r.json")[0] == 0
    names = [s["name"] for s in json.loads(Path("r.json").read_text("utf-8"))["subjects"]]
    assert names == ["p", "test"]
    assert run("report", "p.npz", "--split", "val,test", *none, "-o", "r.json")[0] == 0
    names = [s["name"] for s in json.loads(Path("r.json").read_text("utf-8"))["subjects"]]
    assert names == ["val", "test"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p.npz", "-o", "report.pdf"), "written as .html, .md, .json, got report.pdf"),
        (("p.npz", "-o", "nowhere/report.html"), "folder nowhere does not exist"),
        (("p.npz", "--by", "nothing", "-o", "r.html"), "nothing"),
        (("p.npz", "--methods", "tss", "-o", "r.html"), "did you mean ts?"),
        (("other.npz", "-o", "r.html"), "other.npz"),
    ],
)
def test_what_cannot_be_done_is_explained(run, path, arguments, message):
    code, out, err = run("report", *arguments, "--level", 0)
    assert (code, out) == (2, "")
    assert message in err
    assert not Path("r.html").exists()


def test_a_monitor_writes_its_page(run, path):
    code, _, err = run("monitor", path, "--report", "drift.html")
    assert code == 0
    assert "wrote drift.html" in err
    assert "Has the model drifted?" in Path("drift.html").read_text("utf-8")
    assert run("monitor", path, "--report", "drift.pdf")[0] == 2
