"""What the pages of the documentation are made from: every name that they list exists."""

import re
import runpy
from pathlib import Path

import calibrant

GENERATE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "generate.py"))


def test_the_api_has_every_public_name_and_few_pages():
    """A name that was moved raises AttributeError here, long before Sphinx reads the pages."""
    pages = GENERATE["api_pages"]()
    listed = set(re.findall(r"^   (\w+)$", pages["api"], re.M))
    tables = {name for name in calibrant.__all__ if isinstance(getattr(calibrant, name), dict)}
    assert listed | {"CalibratedClassifier"} >= {*calibrant.__all__} - tables
    assert len(listed) + len(pages) <= 120


def test_the_command_line_page_has_every_command():
    from calibrant.cli import cli

    page = GENERATE["command_line"]()
    for name, command in cli.commands.items():
        assert f"### calibrant {name}\n" in page
        for inner in getattr(command, "commands", {}):
            assert f"### calibrant {name} {inner}\n" in page
    assert max(map(len, page.splitlines())) <= 80


def test_the_page_of_reports_has_every_finding():
    from calibrant.show.report import CHECKS

    page = GENERATE["findings"]()
    assert re.findall(r"^### (\w+):", page, re.M) == sorted(CHECKS)
    assert all(check.meaning in page and check.fix in page for check in CHECKS.values())


def test_the_readme_prints_what_its_comments_say(capsys):
    readme = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    exec(code, {})
    said = re.findall(r"^print\(.*\)  # (.*)$", code, re.M)
    assert len(said) == 2
    assert capsys.readouterr().out.splitlines() == said
