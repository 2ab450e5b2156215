"""Help, listings and messages as a newcomer sees them, in a terminal of 80 columns."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import click
import numpy as np
import pytest

from calibrant import cli
from calibrant.calibrators.registry import CALIBRATORS, PARTS
from calibrant.cli.listing import _plain
from calibrant.cli.shared import Verb
from calibrant.metrics.registry import METRICS
from calibrant.workflows import evaluate as workflow
from tests.support.command_line import in_shell

VERBS = [name for name in cli.cli.commands if name != "llm"]


def of_group(group, *start):
    """The words of a group and of all commands inside."""
    yield " ".join(start)
    for name, command in getattr(group, "commands", {}).items():
        yield from of_group(command, *start, name)


LANGUAGE_MODELS = [*of_group(cli.cli.commands["llm"], "llm")]


def test_every_verb_stands_in_one_section_with_a_whole_sentence(run):
    code, out, _ = run("--help")
    assert code == 0
    listed = [name for names in cli.SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(cli.cli.commands)
    assert "..." not in out.split("Measure:")[1]
    for title, names in cli.SECTIONS.items():
        section = out.split(f"\n{title}:\n")[1].split("\n\n")[0]
        assert re.findall(r"^  (\w+) +[A-Z].*\.$", section, re.M) == names


@pytest.mark.parametrize("verb", ["", *VERBS, *LANGUAGE_MODELS])
def test_help_fits_80_columns(run, verb):
    code, out, _ = run(*verb.split(), "--help")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 80
    assert not re.search(r"--[a-z-]*-$", out, re.M)  # an option is not broken at a hyphen
    listed = re.split(r"\n(?:Commands|Tokens|Answers):\n", out)[1:]
    assert not any("..." in part for part in listed)


def test_help_imports_nothing_heavy():
    script = """
        import sys
        from calibrant import cli
        for verb in ([], *([name] for name in cli.cli.commands)):
            sys.argv = ["calibrant", *verb, "--help"]
            try:
                cli.main()
            except SystemExit:
                pass
        print([name for name in ("torch", "numpy", "rich", "pandas") if name in sys.modules])
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_one_word_stands_for_one_option():
    """An option has one meaning: the same name, type and kind of value wherever it stands."""
    kinds: dict[str, set[tuple[object, ...]]] = {}
    for _, verb in verbs_of(cli.cli):
        assert isinstance(verb, Verb)  # which can be quiet
        for option in verb.params:
            if isinstance(option, click.Option):
                of_value = option.type.name.removesuffix(" range")
                kind = (of_value, option.is_flag, option.multiple)
                kinds.setdefault(option.opts[-1], set()).add(kind)
    assert {name for name, found in kinds.items() if len(found) > 1} == set()
    assert not {"--test-split", "--reference-split", "--batch-size"} & set(kinds)


@pytest.mark.parametrize(
    ("verb", "names"), [(["methods"], CALIBRATORS), (["metrics"], METRICS)], ids=["both", "all"]
)
def test_listings(run, verb, names):
    code, out, err = run(*verb)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    lines = re.sub(r" *\n {8,}", " ", out).splitlines()  # long sentences go on in the next line
    for name, entry in names.items():
        (line,) = [line for line in lines if line.split()[:1] == [name]]
        assert line.split(maxsplit=1)[1].strip() == _plain(entry.summary)
    assert not re.search(r"[`\\{\]]", out)


def test_options_of_a_method_are_listed(run):
    code, out, _ = run("methods", "SMART")
    assert code == 0
    assert re.search(r"^steps +250 +a whole number, at least 1 *$", out, re.M)
    assert "no options" in run("methods", "none")[1]
    assert "pooled" in run("methods", "--multilabel")[1]
    assert run("methods", "smrt")[2].startswith("error: unknown method 'smrt': did you mean smart?")


def test_set_lists_the_options_of_the_method(run, path):
    for setting in ("steps", "stps=3"):
        code, _, err = run("fit", path, "--method", "smart", "--set", setting)
        assert code == 2
        assert {"objective", "indicator", "steps"} <= {*re.findall(r"\w+", err)}


def test_quiet_leaves_results_and_errors(run, path):
    code, out, err = run("-q", "fit", path, "--method", "ts")
    assert (code, err) == (0, "")
    assert "ECE" in out
    assert run("apply", "calibrator", path, "-o", "out.npz", "--quiet") == (0, "", "")
    assert run("-q", "apply", "calibrator", "gone.npz", "-o", "out.npz")[2].startswith("error: ")
    code, _, err = run("-q", "evaluate", path, "--max", "ece=0.001", "--metrics", "ece")
    assert code == 1
    assert err.startswith("1 limit is exceeded:\n")


def test_equal_warnings_are_said_once(run, path, monkeypatch):
    evaluate = workflow.evaluate

    def warned(*given, **options):
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            for n in range(21):
                warnings.warn("the logits look like probabilities", stacklevel=1)
                if n % 10 == 0:
                    warnings.warn(f"another {n}", stacklevel=1)
        return evaluate(*given, **options)

    monkeypatch.setattr(workflow, "evaluate", warned)
    _, _, err = run("evaluate", path, "--metrics", "ece", "--level", "0")
    lines = err.splitlines()
    assert lines.count("warning: the logits look like probabilities") == 1
    assert lines[-1] == "the warning 'the logits look like probabilities' came 21 times"
    assert len(lines) == 5


@pytest.mark.parametrize(("scale", "colour", "word"), [(3, 31, "Mis"), (1, 32, "No evidence")])
def test_the_verdict_comes_first_and_in_colour(
    run, tmp_path, rng, monkeypatch, scale, colour, word
):
    logits = rng.normal(size=(500, 4))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(1)
    np.savez(tmp_path / "p.npz", logits=scale * logits, labels=labels)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    _, out, _ = run("evaluate", tmp_path / "p.npz", "--metrics", "ece,nll")
    verdict = out.splitlines()[1]
    assert verdict.startswith(f"\x1b[1;{colour}m{word}")


@pytest.mark.skipif(os.name == "nt", reason="bash")
def test_shells_complete_verbs_and_files():
    asked = {
        "_CALIBRANT_COMPLETE": "bash_complete",
        "COMP_WORDS": "calibrant ev",
        "COMP_CWORD": "1",
    }
    done = in_shell(env=asked)
    assert (done.returncode, done.stdout) == (0, "plain,evaluate\n")
    asked["COMP_WORDS"], asked["COMP_CWORD"] = "calibrant evaluate p", "2"
    assert in_shell(env=asked).stdout == "file,p\n"


def verbs_of(group, *names):
    """Every verb below a group, with the words that call it."""
    for name, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from verbs_of(command, *names, name)
        else:
            yield (*names, name), command


def test_examples_in_the_help_of_a_verb_parse():
    examples = 0
    for names, command in verbs_of(cli.cli):
        text = re.sub(r"\\\n +", " ", command.help or "")
        for line in re.findall(rf"^ *calibrant {' '.join(names)} (.+)$", text, re.M):
            words = shlex.split(re.split(r" {2,}\(| [|>]", line)[0])
            command.make_context(names[-1], words)
            examples += 1
    assert examples > 80


def documented():
    """Command lines of the README and the documentation, by page."""
    root = Path(__file__).parents[2]
    for page in (root / "README.md", *sorted((root / "docs").glob("*.md"))):
        text = page.read_text("utf-8").replace("\\\n", " ")
        for line in re.findall(r"^(?:\$ )?calibrant ([a-z].*)$", text, re.M):
            yield page.name, re.split(r" [#|>] ?", line)[0]


def test_documented_command_lines_have_options_that_exist():
    lines = list(documented())
    assert len(lines) > 80
    for page, line in lines:
        command: click.Command = cli.cli
        for word in line.split():
            if isinstance(command, click.Group) and word in command.commands:
                command = command.commands[word]
        if isinstance(command, click.Group):
            continue  # prose, or a group that has a verb by default
        known = {name for option in command.params for name in option.opts} | {"--help"}
        assert {*re.findall(r"(?<=\s)--[a-z-]+", line)} <= known, (page, line)


def test_parts_of_auto_are_listed_after_the_methods(run):
    """A fit prints their names."""
    out = run("methods")[1]
    listed = out.split("part of auto")[1]
    for name in PARTS:
        assert re.search(rf"^{name} +[A-Za-z]", listed, re.M)
    assert "part of auto" not in run("methods", "--multilabel")[1]
    assert "drawn towards 1" in run("methods", "shrunk_ts")[1]
