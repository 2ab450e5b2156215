"""Logs that Inspect wrote."""

import json
import math
import tracemalloc
import zipfile
import zlib

import numpy as np
import pytest

from calibrant.llm import read_log, study_answers
from calibrant.llm.answers.logs import inspect_logs
from calibrant.llm.gate.gate import _unscored
from calibrant.show.answer_findings import kinds as parts_of
from tests.support.recorded_logs import FILES

WHOLE = json.loads((FILES / "log.json").read_text())


def rewritten(file, log, *, without=()):
    """Write a log as an archive, as Inspect did before it used Zstandard."""
    header = {key: value for key, value in log.items() if key != "samples"}
    members = {"_journal/start.json": header, "header.json": header}
    members |= {f"samples/{s['id']}_epoch_{s['epoch']}.json": s for s in log["samples"]}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            if name not in without:
                archive.writestr(name, json.dumps(content))
    return file


def changed(number=0, **values):
    """The recorded log with other values in a sample."""
    log = json.loads(json.dumps(WHOLE))
    log["samples"][number] |= values
    return log


def test_json_has_the_answers_and_their_tokens():
    log = read_log(FILES / "log.json")
    answers = log.answers
    confidence, source = answers.confidences()
    assert log.format == "inspect"
    assert [row["answer"] for row in answers.rows] == [
        "Lima",
        "Quito",
        "Lima",
        "Bogota",
        "Lima",
        "Quito",
    ]
    assert answers.grades().tolist() == [True, False, True, False, True, False]
    logs = (-0.1, -0.9, -0.3, -1.2, -0.05, -0.7)
    assert confidence == pytest.approx([math.exp(x) for x in logs])
    assert answers.rows[0]["question"] == "Capital of Peru, please (0)?"
    assert source.model == "mockllm/model"
    row = log.answers.rows[1]
    assert (row["id"], row["kind"]) == ("q1", "capitals")
    assert row["top_logprobs"] == [{"Quito": -0.9, "La": -4.9}]


def test_an_answer_that_a_scorer_took_out_of_the_text(tmp_path):
    log = changed()
    for number, sample in enumerate(log["samples"]):
        (name,) = sample["scores"]
        sample["scores"][name]["answer"] = "L" if number == 0 else None
    log["samples"][1]["output"]["choices"][0]["stop_reason"] = "max_tokens"
    (tmp_path / "log.json").write_text(json.dumps(log))
    first, second, third, *_ = read_log(tmp_path / "log.json").answers.rows
    assert (first["answer"], first["completion"]) == ("L", "Lima")
    assert [row.get("truncated") for row in (first, second, third)] == [None, True, None]
    assert "completion" not in second
    assert _unscored(first) == ""


def test_scores_that_are_a_list_are_named(tmp_path):
    log = changed(scores=[None, "match"])
    (tmp_path / "log.json").write_text(json.dumps(log))
    with pytest.raises(ValueError, match=r"sample q0 \(epoch 1\) of .* does not have the form"):
        read_log(tmp_path / "log.json")


def test_an_archive_says_the_same_in_either_compression(tmp_path):
    expected = read_log(FILES / "log.json").answers.rows
    plain = read_log(rewritten(tmp_path / "log.eval", WHOLE))
    assert plain.answers.rows == expected
    killed = rewritten(tmp_path / "killed.eval", WHOLE, without=["header.json"])
    assert read_log(killed).answers.rows == expected
    pytest.importorskip("zstandard")
    compressed = read_log(FILES / "log.eval").answers
    assert [row["answer"] for row in compressed.rows] == [row["answer"] for row in expected]
    assert compressed.rows == plain.answers.rows


def test_a_damaged_archive_is_an_error(tmp_path):
    content = (FILES / "log.eval").read_bytes()
    cut = tmp_path / "cut.eval"
    cut.write_bytes(content[:9000])
    with pytest.raises(ValueError, match="not a zip archive, or it is cut off"):
        read_log(cut)
    other = tmp_path / "other.eval"
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("a.txt", "a")
    with pytest.raises(ValueError, match="it is not a log of Inspect"):
        read_log(other)
    pytest.importorskip("zstandard")
    at = content.index(b"samples/q0_epoch_1.json") + 500
    cut.write_bytes(content[:at] + bytes([content[at] ^ 255]) + content[at + 1 :])
    with pytest.raises(ValueError, match=r"samples/q0_epoch_1.json of .* is damaged"):
        read_log(cut)


def zstandard_archive(file, members, sizes=()):
    """Write an archive as Inspect does; ``sizes`` are declared for members in place of theirs."""
    compressor = pytest.importorskip("zstandard").ZstdCompressor()
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, compressor.compress(content))
            info = archive.filelist[-1]  # what is written about it at the end
            info.compress_type, info.CRC = 93, zlib.crc32(content)
            info.file_size = dict(sizes).get(name, len(content))
    return file


HEADER = json.dumps({"eval": WHOLE["eval"]}).encode()


def test_a_sample_that_is_too_large_when_decompressed_is_left_out(tmp_path, monkeypatch):
    good = {f"samples/{s['id']}.json": json.dumps(s).encode() for s in WHOLE["samples"][:2]}
    members = {"header.json": HEADER, **good, "samples/z.json": b"[]" + b" " * 10**6}
    monkeypatch.setattr(inspect_logs, "_MAX_MEMBER", 10**6)
    deflated = tmp_path / "deflated.eval"
    with zipfile.ZipFile(deflated, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    for file in (deflated, zstandard_archive(tmp_path / "zstandard.eval", members)):
        problem = r"samples/z.json.* holds 1 MB when decompressed, up to 1 are read: .*to json"
        with pytest.raises(ValueError, match=problem):
            read_log(file)
        with pytest.warns(UserWarning, match=problem):
            assert len(read_log(file, skip_bad=True).answers.rows) == 2


def test_a_small_log_of_very_many_bytes_is_refused(tmp_path, monkeypatch):
    members = {"header.json": HEADER}
    members |= {f"samples/{i}.json": b"[]" + b" " * 10**6 for i in range(9)}
    file = zstandard_archive(tmp_path / "log.eval", members)
    monkeypatch.setattr(inspect_logs, "_MAX_LOG", 8 * 10**6)
    with pytest.raises(ValueError, match=r"holds 9 MB when decompressed: convert the log by"):
        read_log(file)
    monkeypatch.setattr(inspect_logs, "_EXPANSION", 10**4)
    with pytest.raises(ValueError, match="must be an object, got"):  # each is read then
        read_log(file)


def test_no_more_is_decompressed_than_a_sample_declares(tmp_path):
    members = {"header.json": HEADER, "samples/a.json": bytes(10**8)}
    file = zstandard_archive(tmp_path / "log.eval", members, {"samples/a.json": 1000})
    assert file.stat().st_size < 20_000
    tracemalloc.start()
    with pytest.raises(ValueError, match=r"samples/a.json of .* is damaged"):
        read_log(file)
    assert tracemalloc.get_traced_memory()[1] < 10**7
    tracemalloc.stop()


def test_further_epochs_are_samples_of_the_first(tmp_path):
    log = json.loads(json.dumps(WHOLE))
    again = json.loads(json.dumps(log["samples"][0]))
    again |= {"epoch": 2, "scores": {"match": {"value": "I", "answer": "Cusco"}}}
    log["samples"].append(again)
    rows = read_log(rewritten(tmp_path / "log.eval", log)).answers.rows
    assert len(rows) == 6
    assert rows[0]["samples"] == ["Cusco"]
    assert rows[0]["correct"] is True
    assert "samples" not in rows[1]


@pytest.mark.parametrize(("value", "right"), [("C", True), ("I", False), ("N", False), (1, True)])
def test_scores_of_right_and_wrong(tmp_path, value, right):
    file = rewritten(tmp_path / "l.eval", changed(scores={"match": {"value": value}}))
    assert read_log(file).answers.rows[0]["correct"] is right


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"scores": {"match": {"value": "P"}}}, r"scored as right or wrong .*, got 'P'"),
        ({"scores": {"match": {"value": 0.5}}}, "got 0.5"),
        ({"scores": {}}, "has no score"),
        ({"error": {"message": "out of memory"}}, "ended with an error: out of memory"),
        (
            {"output": {"choices": []}, "scores": {"match": {"value": "C"}}},
            "inspect eval with --logprobs",
        ),
    ],
)
def test_a_sample_without_a_grade_is_named(tmp_path, values, message):
    file = rewritten(tmp_path / "l.eval", changed(**values))
    with pytest.raises(ValueError, match=message) as error:
        read_log(file)
    assert "samples/q0_epoch_1.json" in str(error.value)


def test_long_texts_are_attached_once(tmp_path):
    long = "attachment://abc"
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": long}]
    log = changed(input=chat, attachments={"abc": "a long question"})
    assert (
        read_log(rewritten(tmp_path / "l.eval", log)).answers.rows[0]["question"]
        == "a long question"
    )


def test_the_scorer_can_be_chosen(tmp_path):
    log = json.loads(json.dumps(WHOLE))
    for sample in log["samples"]:
        sample["scores"]["strict"] = {"value": "I"}
    file = rewritten(tmp_path / "l.eval", log)
    with pytest.warns(UserWarning, match="2 scorers, of which match is read"):
        assert read_log(file).answers.grades().sum() == 3
    assert read_log(file, outcome="strict").answers.grades().sum() == 0
    with pytest.raises(ValueError, match="has no score of judge, it has match, strict"):
        read_log(file, outcome="judge")


def many(count=24):
    """The recorded log with many questions, in the order of their numbers, in two epochs."""
    samples = [
        {**WHOLE["samples"][i % 6], "id": f"q{i}", "epoch": epoch}
        for epoch in (1, 2)
        for i in range(count)
    ]
    return {**WHOLE, "samples": samples}


def graded(task, count=60):
    """A log of a task in the form of Inspect's, with questions of different difficulty."""
    samples = []
    for i in range(count):
        one = {**WHOLE["samples"][i % 6], "id": f"{task}{i}", "epoch": 1, "input": f"{task} {i}?"}
        output = json.loads(json.dumps(one["output"]))
        chance = 0.3 + 0.6 * (i * 7 % count) / count
        output["choices"][0]["logprobs"]["content"] = [{"token": "x", "logprob": math.log(chance)}]
        right = {"match": {"value": "C" if i * 11 % count < chance * count else "I"}}
        samples.append({**one, "output": output, "scores": right})
    return {**WHOLE, "eval": {**WHOLE["eval"], "task": task}, "samples": samples}


def figures(log):
    """What the map and the report say of a log."""
    study = study_answers(log, max_error=0.4)
    metrics = {"before": study.before.metrics, "after": study.after.metrics}
    kinds = [(part.name, part.n, part.confidence) for part in parts_of(study)]
    return metrics, study.threshold, kinds, [row["calibrated"] for row in study.rows]


def test_both_formats_give_the_same_figures(tmp_path):
    """Archives are read by the names of their members, where q10 comes before q2."""
    (tmp_path / "log.json").write_text(json.dumps(many()))
    one = read_log(tmp_path / "log.json").answers
    other = read_log(rewritten(tmp_path / "log.eval", many())).answers
    assert one.rows == other.rows
    assert [row["id"] for row in one.rows] == [f"q{i}" for i in range(24)]
    assert "epoch" not in one.rows[0]


def test_a_folder_of_tasks_gives_the_same_figures_in_both_formats(tmp_path):
    logs = {task: graded(task) for task in ("capitals", "rivers")}
    for name in ("json", "eval"):
        (tmp_path / name).mkdir()
    for task, log in logs.items():
        (tmp_path / "json" / f"{task}.json").write_text(json.dumps(log))
        rewritten(tmp_path / "eval" / f"{task}.eval", log)
    plain, archived = (read_log(tmp_path / name) for name in ("json", "eval"))
    assert figures(plain) == figures(archived)
    metrics, _, kinds, _ = figures(plain)
    claimed = [0.3 + 0.6 * i / 60 for i in range(60)]
    np.testing.assert_allclose(sorted(plain.answers.confidences()[0])[::2], claimed)
    right = [s["scores"]["match"]["value"] == "C" for log in logs.values() for s in log["samples"]]
    assert metrics["before"]["accuracy"].value == pytest.approx(np.mean(right))
    assert sorted(name for name, *_ in kinds) == ["capitals", "rivers"]


def test_folders_of_logs_are_read_whole(tmp_path):
    (tmp_path / "runs").mkdir()
    rewritten(tmp_path / "runs" / "a.eval", WHOLE)
    second = {**WHOLE, "eval": {**WHOLE["eval"], "task": "rivers"}}
    (tmp_path / "runs" / "b.json").write_text(json.dumps(second))
    (tmp_path / "runs" / "notes.json").write_text('{"about": "other things"}')
    log = read_log(tmp_path / "runs")
    assert log.format == "inspect"
    assert [row["kind"] for row in log.answers.rows] == ["capitals"] * 6 + ["rivers"] * 6
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match=r"neither files samples_TASK_DATE.jsonl nor logs of"):
        read_log(tmp_path / "none")
