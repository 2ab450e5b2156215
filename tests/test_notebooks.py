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
        for line in source.splitlines():
            words = shlex.split(line.removeprefix("!"), comments=True)
            if ">" in words:
                words = words[: words.index(">")]
            done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
