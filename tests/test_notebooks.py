"""The tutorials run as the notebooks that readers download."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


PAGES = [DOCS / "quickstart.md", *sorted(DOCS.glob("tutorial_*.md"))]


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_cell_runs(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")  # for reports that are opened
    notebook_of = runpy.run_path(str(DOCS / "generate.py"))["notebook_of"]
    cells = json.loads(notebook_of(page.read_text("utf-8")))["cells"]
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    text = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    assert len(code) > 1
    assert "```" not in text
    assert not re.search(r"\{\w+\}`", text)
    variables: dict[str, object] = {}
    for source in code:
        if not source.startswith("!"):
            exec(source, variables)
            continue
        for line in source.replace("\\\n", "").splitlines():
            words = shlex.split(line.removeprefix("!"), comments=True)
            if ">" in words:
                words = words[: words.index(">")]
            done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr


BLOCK = re.compile(
    r"^((?:% skip: next.*\n\n)?)```(python|bash|text)\n(.*?)```", re.DOTALL | re.MULTILINE
)
SHOWN = [DOCS / f"{name}.md" for name in ("calibrate", "quickstart", "tutorial_tabular")]


@pytest.mark.slow
@pytest.mark.parametrize("page", SHOWN, ids=lambda page: page.stem)
def test_pages_show_what_is_printed(page, tmp_path, monkeypatch, capsys):
    """Words are equal and numbers close: other versions of libraries may round otherwise."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setenv("COLUMNS", "80")
    bash = f'calibrant() {{ {shlex.quote(sys.executable)} -m calibrant "$@"; }}\n'
    variables: dict[str, object] = {}
    printed, compared = "", 0
    for skipped, language, text in BLOCK.findall(page.read_text("utf-8")):
        if skipped:
            printed = ""
        elif language == "python":
            exec(text, variables)
            printed = capsys.readouterr().out
        elif language == "bash":
            done = subprocess.run(["bash", "-c", bash + text], capture_output=True, text=True)
            printed = done.stdout + done.stderr
        elif printed:
            for fragment in text.split("..."):
                assert is_shown(tokens(fragment), tokens(printed)), f"{fragment}\nnot in\n{printed}"
                compared += 1
    assert compared


def tokens(text):
    """Words and numbers, without times and lines."""
    return re.findall(r"-?\d[\d,]*\.?\d*|[^\s\d]+", re.sub(r"\b[\d.]+ s\b", "", text))


def is_shown(fragment, printed):
    """Return True if tokens stand somewhere among those printed."""
    size = len(fragment)
    starts = range(len(printed) - size + 1)
    return any(all(map(alike, fragment, printed[i : i + size])) for i in starts)


def alike(one, other):
    numbers = [each.replace(",", "") for each in (one, other)]
    try:
        return float(numbers[0]) == pytest.approx(float(numbers[1]), rel=0.03, abs=0.02)
    except ValueError:
        return one == other
