"""The command as a whole: exit codes, pipes, progress and help."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import calibrant
from calibrant import deploy
from calibrant.workflows import evaluate as workflow
from tests.support.command_line import ROWS, in_shell


@pytest.mark.parametrize(
    ("problem", "code", "shown"),
    [
        (RuntimeError("the impossible"), 2, "Traceback"),
        (KeyError("x"), 2, "this is a bug in calibrant"),
        (AssertionError(), 2, "this is a bug in calibrant"),
        (MemoryError("no room"), 2, "error: no room"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), 2, "error: not enough mem"),
        (PermissionError(13, "Permission denied", "p.npz"), 2, "Permission denied: 'p.npz'"),
        (KeyboardInterrupt(), 2, "stopped"),
    ],
)
def test_every_other_exception_exits_2(run, path, monkeypatch, problem, code, shown):
    def fails(*_, **__):
        raise problem

    monkeypatch.setattr(workflow, "evaluate", fails)
    found, out, err = run("evaluate", path, "--max-ece", "0.5")
    assert (found, out) == (code, "")
    assert shown in err


HOSTILE = "a\x1b[2J\x07\r\x9b31m\u202eb"  # clears the screen, rings, overwrites, reverses
SHOWN = r"a\x1b[2J\x07\r\x9b31m\u202eb"


def test_control_characters_of_data_are_shown_as_text(run, tmp_path, monkeypatch, arrays):
    """Names of files, splits, groups and windows, in tables, titles, warnings and errors."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    arrays["region"] = np.array([HOSTILE, "b"])[np.arange(ROWS) % 2]
    np.savez(f"{HOSTILE}.npz", **arrays)
    np.savez("split.npz", **{f"{HOSTILE}_{key}": arrays[key] for key in ("logits", "labels")})
    screens = [
        run("evaluate", f"{HOSTILE}.npz", "--by", "region"),
        run("evaluate", "split.npz", "--split", HOSTILE),
        run("evaluate", "split.npz", "--split", HOSTILE, "--json"),
        run("evaluate", "split.npz", "--split", "none"),
        run("evaluate", f"{HOSTILE}.npz", "--metrics", HOSTILE),
        run("evaluate", HOSTILE),
        run("evaluate", "split.npz", f"--{HOSTILE}"),
        run("fit", f"{HOSTILE}.npz", "--method", "ts", "-o", "ts"),
        run("monitor", f"{HOSTILE}.npz"),
        run("monitor", "--state", HOSTILE),
        run("decide", f"{HOSTILE}.npz", "--max-error", "0.9"),
    ]
    screens.append((0, "", str(calibrant.evaluate(f"{HOSTILE}.npz", by="region"))))
    for _, out, err in screens:
        assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", out + err), out + err
    for i in (0, 1, 3, 5, 6, 7, 8, 9, 10):
        assert SHOWN in screens[i][1] + screens[i][2]


def test_a_process_that_fails_writes_one_line():
    failed = in_shell("evaluate", "gone.npz")
    assert (failed.returncode, failed.stdout) == (2, "")
    assert failed.stderr.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
@pytest.mark.parametrize(
    ("options", "code"),
    [([], 0), (["--json", "--max-ece", "0.01"], 1)],
)
def test_reader_that_leaves_early(path, options, code):
    """As in ``calibrant evaluate p.npz | head -1``: no complaint, and the limit still counts."""
    read, write = os.pipe()
    os.close(read)
    done = in_shell("evaluate", path, "--metrics", "ece", *options, stdout=write)
    os.close(write)
    assert done.returncode == code
    assert re.fullmatch(r"ECE .* exceeds the limit of 0\.01\n" if code else "", done.stderr)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("options", [[], ["--json"]])
def test_full_disk_exits_2(path, options):
    with open("/dev/full", "w") as full:
        done = in_shell("evaluate", path, "--metrics", "ece", *options, stdout=full)
    assert done.returncode == 2
    assert "No space left" in done.stderr
    assert "Traceback" not in done.stderr


def evaluated(monkeypatch, seconds):
    """Let the measurement take this long, by the clock that the bar looks at."""
    now, evaluate = [0.0], calibrant.evaluate  # the name is resolved before the patch
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def slow(pred, *, progress, metrics, **_):
        for done in (ROWS // 2, ROWS):
            now[0] += seconds / 2
            progress(done, ROWS)
        return evaluate(np.zeros((ROWS, 2)), [0] * ROWS, metrics=metrics, level=None)

    monkeypatch.setattr(workflow, "evaluate", slow)


@pytest.mark.parametrize(("seconds", "terminal"), [(10, True), (10, False), (0.5, True)])
def test_bar_is_shown_on_a_terminal_when_it_takes_long(run, path, monkeypatch, seconds, terminal):
    evaluated(monkeypatch, seconds)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    code, out, err = run("evaluate", path, "--metrics", "ece")
    assert code == 0
    assert "ECE" in out
    assert ("200/400" in err) == (seconds > 1 and terminal)
    assert bool(err) == (seconds > 1 and terminal)


def test_an_exported_file_that_is_replaced_is_told(run, tmp_path, monkeypatch, arrays):
    def written(calibrator, out, **options):
        Path(out).write_text("a graph")
        return 1e-8

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(deploy.EXPORTS, ".onnx", written)
    fitted = calibrant.TemperatureScaling().fit(arrays["logits"], arrays["labels"])
    calibrant.save(fitted, "saved")
    for start in ("wrote", "replaced"):
        _, _, err = run("export", "saved", "-o", "out.onnx")
        assert err.startswith(f"{start} out.onnx; its probabilities differ")


def test_a_missing_split_of_a_reference_lists_the_others(run, split_file):
    code, _, err = run("monitor", split_file, "--reference", split_file, "--reference-split", "x")
    assert code == 2
    assert err.endswith("unknown split 'x': choose from test, val\n")


def test_version(run):
    assert run("--version") == (0, f"calibrant, version {calibrant.__version__}\n", "")


def test_help_lists_the_verbs(run):
    code, out, _ = run("--help")
    assert code == 0
    assert {"demo", "evaluate"} <= {line.split()[0] for line in out.splitlines() if line.strip()}


def test_no_verb_shows_help_and_exits_2(run):
    code, out, err = run()
    assert code == 2
    assert "evaluate" in out + err


# Run in a process of its own, since an audit hook stays for good.
COUNT_OPENS = """
import os, sys
from calibrant import cli
opened = []
def hook(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes, os.PathLike)):
        opened.append(os.path.realpath(arguments[0]))
sys.addaudithook(hook)
for command in sys.argv[1:]:
    opened.clear()
    sys.argv = ["calibrant", *command.split()]
    try:
        cli.main()
    except SystemExit as stopped:
        print("opens", stopped.code, opened.count(os.path.realpath("p.npz")))
"""


def test_every_verb_opens_its_file_once(folder):
    commands = [
        "evaluate p.npz --metrics ece --level 0",
        "fit p.npz --method ts -o saved",
        "fit p.npz --method vector --cross-fit 2 -o saved",
        "compare p.npz --methods none,ts,vector --level 0",
        "apply saved p.npz -o out.npz",
    ]
    env = {**os.environ, "PYTHONPATH": str(Path(calibrant.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_OPENS, *commands], stdout=subprocess.PIPE, text=True, env=env
    )
    assert re.findall(r"^opens (\d) (\d+)$", done.stdout, re.M) == [("0", "1")] * len(commands)
