"""Names from data that would write to the terminal: every verb shows them as text."""

import json
import re
import sys
from typing import Any

import click
import numpy as np
import pytest

import calibrant
from calibrant.cli import cli
from tests.support.command_line import ROWS
from tests.support.predictions import predictions, splits

# Clears the screen, rings, overwrites the line, reverses text, and is no valid Unicode.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
NAME = "a\x1b[2J\x07\r\x9b31m\u202e[bold]b"
SHOWN = r"a\x1b[2J\x07"  # and the rest, but for lists of names, in which \r is between two
FILE = NAME + "\udcff"
"""As Linux has it for a byte that is no UTF-8."""


def verbs(group: click.Group, above: str = "") -> dict[str, click.Command]:
    """Every command of a group and of those in it, by its words."""
    found: dict[str, click.Command] = {}
    for name, command in group.commands.items():
        words = f"{above}{name}"
        if isinstance(command, click.Group):
            found |= verbs(command, f"{words} ")
        else:
            found[words] = command
    return found


# In order: some use what those before them have written.
LINES: dict[str, list[list[str]]] = {
    "evaluate": [
        [f"{FILE}.npz", "--by", "region", "--metrics", "ece", "--level", "0"],
        [f"{FILE}.npz", "--by", "region", "--metrics", "ece", "--json"],
        ["split.npz", "--split", NAME, "--metrics", "ece"],
        ["split.npz", "--split", NAME, "--metrics", "ece", "--json"],
        ["split.npz", "--split", "none"],
        [f"{FILE}.npz", "--metrics", NAME],
        [FILE, "--split", "none"],
        ["split.npz", f"--{NAME}"],
    ],
    "estimate": [
        [f"{FILE}.npz", "--ignore-labels"],
        [f"{FILE}.npz", "--ignore-labels", "--json"],
        [f"{FILE}.npz", "--label-budget", "5", "-o", f"{FILE}.csv"],
        [f"{FILE}.npz", "--labelled", f"{FILE}.npz"],
        [f"{FILE}.npz", "--labels", NAME, "--logits", f"{NAME},{NAME}2"],
        ["split.npz", "--split", "none"],
        [f"{FILE}.npz", "--reference", FILE],
    ],
    "fit": [
        [f"{FILE}.npz", "--method", "ts", "-o", FILE],
        [f"{FILE}.npz", "--method", "ts", "-o", "ts", "--json"],
        [f"{FILE}.npz", "--method", NAME, "-o", "ts"],
        [f"{FILE}.npz", "--method", "ts", "--set", f"{NAME}=1", "-o", "ts"],
    ],
    "apply": [[FILE, f"{FILE}.npz", "-o", f"{FILE}2.npz"], [FILE, FILE, "-o", "x.npz"]],
    "collect": [
        ["torch.nn:Identity", f"{FILE}.npz", "--inputs", "logits", "-o", f"{FILE}5"],
        ["torch.nn:Identity", f"{FILE}.npz", "--inputs", NAME, "-o", "x"],
        ["torch.nn:Identity", f"{FILE}.jsonl", "--skip-bad", "-o", "x"],
        ["torch.nn:Identity", f"{FILE}.npz", "--inputs", "region", "-o", "x"],
        [FILE, "t.jsonl", "-o", "x"],
    ],
    "export": [[FILE, "-o", f"{FILE}.{NAME}"], [f"{FILE}.npz", "-o", "x.onnx"]],
    "compare": [
        [f"{FILE}/{FILE}.npz", "--methods", "none,ts", "--level", "0"],
        [f"{FILE}/{FILE}.npz", "--methods", "none", "--level", "0", "--json"],
        [f"{FILE}/{FILE}.npz", "--methods", f"none,{NAME}"],
    ],
    "monitor": [
        [f"{FILE}.npz", "--state", f"{FILE}.json"],
        ["--state", f"{FILE}.json", "--json"],
        ["--state", FILE],
    ],
    "report": [
        [f"{FILE}.npz", "--by", "region", "--methods", "", "--level", "0", "-o", "-"],
        [f"{FILE}.npz", "--methods", "", "--level", "0", "-o", f"{FILE}.html"],
        ["split.npz", "--split", NAME, "--methods", "", "--level", "0", "-o", f"{FILE}.json"],
        [f"{FILE}.npz", "-o", f"{FILE}.{NAME}"],
    ],
    "slices": [
        [f"{FILE}.npz"],
        [f"{FILE}.npz", "--by", "region"],
        [f"{FILE}.npz", "--by", "region", "--json"],
        [f"{FILE}.npz", "--columns", NAME],
        ["split.npz", "--split", "none"],
    ],
    "decide": [
        [f"{FILE}/{FILE}.npz", "--max-error", "0.9", "--save", f"{FILE}3"],
        [f"{FILE}/{FILE}.npz", "--max-error", "0.9", "--json"],
        [f"{FILE}.npz", "--rule", f"{FILE}3", "-o", f"{FILE}.{NAME}"],
    ],
    "plot": [
        [f"{FILE}.npz", "--by", "region", "--level", "0", "-o", f"{FILE}.svg"],
        [f"{FILE}.npz", "split.npz", "--kind", "risk", "-o", "x.png"],
        [f"{FILE}.npz", "--kind", NAME, "-o", "x.png"],
        [f"{FILE}.npz", "-o", f"{FILE}.{NAME}"],
    ],
    "llm collect": [[FILE, f"{FILE}.jsonl", "-o", "table"], [FILE, "t.jsonl", "-o", "t"]],
    "llm fit": [[FILE, "-o", "head"]],
    "llm evaluate": [[FILE], [f"{FILE}.csv", "--model", FILE]],
    "llm answers fit": [
        [f"{NAME}.jsonl", "-o", f"{FILE}4"],
        [f"{NAME}.jsonl", "-o", f"{FILE}4", "--json"],
        ["judged.jsonl", "-o", f"{FILE}9"],
        ["mixed.jsonl", "-o", "x"],
        [f"{FILE}.npz", "-o", "x"],
        [f"{NAME}.jsonl", "--signals", "all", "-o", f"{FILE}5"],
        [f"{NAME}.jsonl", "--signals", NAME, "-o", f"{FILE}5", "--json"],
        ["other.jsonl", "--signals", NAME, "-o", "x"],
    ],
    "llm answers apply": [
        [f"{FILE}4", f"{NAME}.jsonl", "-o", f"{FILE}.csv"],
        [f"{FILE}9", "judged.jsonl", "-o", f"{FILE}9.csv"],
        [f"{FILE}4", "other.jsonl", "-o", "x.csv"],
        [f"{FILE}4", f"{NAME}.jsonl", "-o", FILE],
    ],
    "llm answers request": [
        [f"{FILE}.jsonl", "--model", NAME, "-o", FILE, "--url", "http://127.0.0.1:9"],
        [f"{NAME}.jsonl", "--model", NAME, "-o", FILE, "--url", f"http://127.0.0.1:9/{NAME}"],
    ],
    "llm answers read": [
        [f"{NAME}.jsonl", "-o", f"{FILE}7.csv"],
        [f"{NAME}.jsonl", "--outcome", NAME, "--grades", f"{NAME}.jsonl", "-o", "x.csv"],
        ["extracted.jsonl", "--fields", "all", "-o", f"{FILE}10.jsonl"],
        ["extracted.jsonl", "--fields", f"{NAME}.jsonl", "-o", "x.jsonl"],
        [f"{NAME}.jsonl", "--fields", "all", "-o", "x.jsonl"],
        ["extracted.jsonl", "--fields", "all", "-o", f"{FILE}.{NAME}"],
    ],
    "llm answers report": [
        [f"{NAME}.jsonl", "-o", f"{FILE}8"],
        ["mixed.jsonl", "-o", FILE],
    ],
    "llm judge": [
        ["judged.jsonl"],
        ["judged.jsonl", "--json"],
        [f"{NAME}.jsonl"],
        ["judged.jsonl", "--scale", NAME],
    ],
    "llm gate fit": [
        ["many.jsonl", "--max-error", "0.6", "-o", f"{FILE}11"],
        ["mixed.jsonl", "--max-error", "0.3", "-o", "x"],
    ],
    "llm gate check": [
        [f"{FILE}11", "other.jsonl"],
        [f"{FILE}11", f"{NAME}{NAME}.jsonl"],
        [f"{FILE}4", "other.jsonl"],
    ],
    "llm gate watch": [[f"{FILE}11", "other.jsonl", "--state", FILE], [FILE, "x", "--state", "y"]],
    "llm ask": [
        [FILE, NAME, "--map", f"{FILE}4"],
        [f"{FILE}.gguf", NAME],
        [FILE, NAME, FILE],
    ],
    "ui": [["--host", NAME, "--no-browser"], [NAME]],
    "demo": [[NAME]],
    "methods": [[NAME]],
    "metrics": [[NAME]],
}


@pytest.fixture
def in_folder(tmp_path, monkeypatch, arrays):
    """Work where everything that can have a name has that one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "path", [*sys.path])  # to which collect adds the working folder
    arrays["region"] = np.array([NAME, "b"])[np.arange(ROWS) % 2]
    np.savez(f"{FILE}.npz", **arrays)
    np.savez("split.npz", **{f"{NAME}_{key}": arrays[key] for key in ("logits", "labels")})
    (tmp_path / FILE).mkdir()
    two = splits(val=predictions(200, seed=1), test=predictions(200, seed=2))
    np.savez(f"{FILE}/{FILE}.npz", **two)
    (tmp_path / f"{FILE}.jsonl").write_text(json.dumps({NAME: 1}))
    (tmp_path / "t.jsonl").write_text(json.dumps({"text": NAME}))
    graded = [{"confidence": n / 20, "correct": n % 3 < 2, "source": NAME} for n in range(20)]
    other = [{**row, "source": "judge"} for row in graded]
    judged = [
        {"judge": row["confidence"], "human": row["correct"], "source": NAME} for row in graded
    ]
    both = [{**row, "system": system} for system in (NAME, "b") for row in judged]
    sets = {NAME: graded, "other": other, "mixed": [*graded, *other]}
    sets |= {"judged": both, "many": 5 * graded}
    sets |= {"extracted": [extraction({NAME: NAME}), extraction({"b": 1, NAME: None})]}
    for name, rows in sets.items():
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def extraction(answer):
    """A structured answer in a log of a service."""
    text = json.dumps(answer, ensure_ascii=False)
    token = {"token": text, "logprob": -0.1, "bytes": list(text.encode()), "top_logprobs": []}
    choice = {"message": {"content": text}, "logprobs": {"content": [token]}}
    body = {"model": NAME, "choices": [choice]}
    return {"custom_id": NAME, "response": {"status_code": 200, "body": body}}


def refuse(constant: str) -> Any:
    raise AssertionError(f"{constant} is not JSON")


@pytest.mark.filterwarnings("always:20 answers")  # are too few to compare signals
@pytest.mark.filterwarnings("always:confident answers are not right more often")
@pytest.mark.filterwarnings("always:.*grade 20 at least")
@pytest.mark.filterwarnings("always:.*rows are copies")
def test_every_verb_shows_them_as_text(run, in_folder):
    assert set(LINES) == set(verbs(cli))
    for words, lines in LINES.items():
        for line in lines:
            code, out, err = run(*words.split(), *line)
            screen, what = out + err, [words, *line]
            assert not CONTROL.search(screen), (what, screen)
            assert "Traceback" not in screen, (what, screen)
            if code == 0 and "--json" in line:
                json.loads(out, parse_constant=refuse)
            else:
                assert SHOWN in screen, (what, screen)


def test_results_and_warnings_in_python_show_them_as_text(in_folder, tmp_path):
    result = calibrant.evaluate(f"{FILE}.npz", by="region", level=None, metrics=["ece"])
    assert SHOWN in str(result)
    assert not CONTROL.search(str(result))
    with np.load(f"{FILE}.npz") as arrays:
        broken = {**arrays, "labels": arrays["labels"] + 9}
    np.savez(f"{FILE}.npz", **broken)
    with pytest.raises(ValueError, match="label") as problem:
        calibrant.evaluate(f"{FILE}.npz")
    assert SHOWN in str(problem.value)
    assert not CONTROL.search(str(problem.value))


def test_line_breaks_in_names_break_no_table(run, tmp_path, monkeypatch, arrays):
    monkeypatch.chdir(tmp_path)
    arrays["region"] = np.array(["two\nlines", "a\ttab"])[np.arange(ROWS) % 2]
    np.savez("a.npz", **arrays)
    _, out, _ = run("evaluate", "a.npz", "--by", "region", "--metrics", "ece", "--level", "0")
    assert [line.split()[0] for line in out.splitlines()[-2:]] in (
        [r"two\nlines", r"a\ttab"],
        [r"a\ttab", r"two\nlines"],
    )
    shown = str(calibrant.evaluate("a.npz", by="region", level=0)).splitlines()
    (heading,) = [k for k, line in enumerate(shown) if line.startswith("subgroup ")]
    names = [line.split("  ")[0] for line in shown[heading + 1 : heading + 3]]
    assert sorted(names) == [r"a\ttab", r"two\nlines"]
