"""The command as a whole: exit codes, pipes, progress and help."""

import contextlib
import io
import json
import os
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import calibrant
from calibrant import cli
from calibrant._core.engines import current_work
from calibrant.cli.shared import _progress_bar
from calibrant.workflows import evaluate as workflow
from tests.support.command_line import ROWS, in_shell, set_clock
from tests.support.warm_scripts import run_script


@pytest.mark.parametrize(
    ("problem", "code", "shown"),
    [
        (RuntimeError("the impossible"), 2, "Traceback"),
        (KeyError("x"), 2, "this is a bug in calibrant"),
        (AssertionError(), 2, "this is a bug in calibrant"),
        (MemoryError("no room"), 2, "error: no room"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: 9"), 2, "error: not enough mem"),
        (RuntimeError("I/O error (os error 28)"), 2, "error: No space left on device: make room"),
        (RuntimeError("I/O error (os error 5)"), 2, "this is a bug in calibrant"),
        (PermissionError(13, "Permission denied", "p.npz"), 2, "Permission denied: 'p.npz'"),
        (KeyboardInterrupt(), 2, "stopped"),
    ],
)
def test_every_other_exception_exits_2(run, path, monkeypatch, problem, code, shown):
    def fails(*_, **__):
        raise problem

    monkeypatch.setattr(workflow, "evaluate", fails)
    found, out, err = run("evaluate", path, "--max", "ece=0.5")
    assert (found, out) == (code, "")
    assert shown in err


@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
@pytest.mark.parametrize(
    ("command", "code"),
    [
        (["evaluate", "p.npz", "--metrics", "ece"], 0),
        (["evaluate", "p.npz", "--metrics", "ece", "--json", "--max", "ece=0.01"], 1),
        (["--help"], 0),
    ],
)
def test_reader_that_leaves_early(path, command, code):
    """As in ``calibrant evaluate p.npz | head -1``: no complaint, and the limit still counts."""
    read, write = os.pipe()
    os.close(read)
    done = in_shell(*command, stdout=write)
    os.close(write)
    assert done.returncode == code
    assert done.stderr.startswith("1 limit is exceeded:\n" if code else "")
    assert len(done.stderr.splitlines()) == 3 * code


def stopped_with(monkeypatch, *arguments, **streams):
    """Run the command in this process with other streams; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["calibrant", *map(str, arguments)])
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code


@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
@pytest.mark.parametrize(
    ("arguments", "code"), [(["gone.npz"], 2), (["p.npz", "--max", "ece=0.01"], 1)]
)
def test_nobody_reads_the_messages(path, monkeypatch, arguments, code):
    """As in ``calibrant evaluate p.npz 2>&1 >out | true``: the exit code does not change."""
    read, write = os.pipe()
    os.close(read)
    options = ("--metrics", "ece", "--level", "0")
    with os.fdopen(write, "w") as left:
        assert stopped_with(monkeypatch, "evaluate", *arguments, *options, stderr=left) == code


def test_streams_that_were_closed_before_the_start(path, monkeypatch):
    """As by ``>&-``, and by programs that start others without a terminal."""
    ran = ("evaluate", path, "--metrics", "ece", "--level", "0")
    assert stopped_with(monkeypatch, *ran, stdout=None) == 0
    sys.stdout.close()
    assert stopped_with(monkeypatch, "evaluate", "gone.npz", stdout=None, stderr=None) == 2
    sys.stdout.close()
    sys.stderr.close()


def test_streams_that_know_ascii_only(path, arrays, monkeypatch):
    """As with ``PYTHONIOENCODING=ascii``: other characters are shown by their number."""
    np.savez(path, **{**arrays, "region": np.array(["ä"] * ROWS)})
    out = io.TextIOWrapper(io.BytesIO(), "ascii")
    ran = ("evaluate", path, "--by", "region", "--metrics", "ece", "--level", "0")
    assert stopped_with(monkeypatch, *ran, stdout=out) == 0
    out.seek(0)
    assert re.search(r"^\\xe4 +400 ", out.read(), re.M)


def test_a_narrow_terminal_gets_whole_figures(run, path, monkeypatch):
    command = ("evaluate", path, "--metrics", "ece", "--by", "region")
    wide = run(*command)
    monkeypatch.setenv("COLUMNS", "20")
    assert run(*command) == wide


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_exits_2_with_one_line(path, monkeypatch, capsys):
    command = ("evaluate", path, "--metrics", "ece", "--level", "0")
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # closing it fails, too
        done = in_shell(*command, stdout=full)
        code = stopped_with(monkeypatch, *command, "--json", stdout=full)
    assert done.returncode == code == 2
    for printed in (done.stderr, capsys.readouterr().err):
        assert "No space left" in printed
        assert printed.count("\n") == 1


FULL = """
    import contextlib, io, json, resource, sys
    from calibrant import cli

    told, before = [], resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (500, before[1]))
    for command in json.loads(sys.argv[1]):
        sys.argv = ["calibrant", *command]
        with contextlib.redirect_stderr(io.StringIO()) as err:
            try:
                cli.main()
            except SystemExit as stopped:
                told.append([stopped.code, err.getvalue()])
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    print(json.dumps(told))
"""
"""Run commands while no file may have more than 500 bytes, as on a disk that is nearly full."""


@pytest.mark.skipif(os.name == "nt", reason="the size of files cannot be limited there")
def test_a_disk_that_is_full_is_no_bug(run, folder):
    assert run("fit", "p.npz", "--method", "ts", "-o", "ts")[0] == 0
    before = sorted(folder.rglob("*"))
    commands = [
        ["fit", "p.npz", "--method", "ts", "--cache", "cache", "-o", "new"],
        ["fit", "p.npz", "--method", "ts", "-o", "new"],
        *(["apply", "ts", "p.npz", "-o", f"out{x}"] for x in (".npz", ".safetensors", ".csv")),
        *(["plot", "p.npz", "-o", f"out{suffix}"] for suffix in (".pdf", ".png", ".svg")),
        ["export", "ts", "-o", "ts.pt2"],
        ["report", "p.npz", "-o", "report.html"],
    ]
    told = json.loads(run_script(FULL, json.dumps(commands), cwd=folder).stdout)
    for command, (code, err) in zip(commands, told, strict=True):
        assert code == 2, command
        assert re.search(r"^error: .*File too large", err, re.M), (command, err)
        assert "bug" not in err, command
    left = {str(path.relative_to(folder)) for path in folder.rglob("*") if path not in before}
    assert left == {"cache", "new"}  # empty folders


def evaluated(monkeypatch, seconds):
    """Let the measurement take this long, by the clock that the bar looks at."""
    now, evaluate = [0.0], calibrant.evaluate  # the name is resolved before the patch
    set_clock(monkeypatch, now)

    def slow(pred, *, metrics, **_):
        progress = current_work().progress
        assert progress is not None
        for done in (ROWS // 2, ROWS):
            now[0] += seconds / 2
            progress(done, ROWS)
        return evaluate(np.zeros((ROWS, 2)), [0] * ROWS, metrics=metrics, level=None)

    monkeypatch.setattr(workflow, "evaluate", slow)


@pytest.mark.parametrize(("seconds", "terminal"), [(10, True), (8, False), (0.5, True)])
def test_bar_is_shown_on_a_terminal_when_it_takes_long(run, path, monkeypatch, seconds, terminal):
    evaluated(monkeypatch, seconds)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    monkeypatch.setenv("TTY_COMPATIBLE", "1" if terminal else "0")
    code, out, err = run("evaluate", path, "--metrics", "ece")
    assert code == 0
    assert "ECE" in out
    assert ("200/400" in err) == (seconds > 1 and terminal)
    assert bool(err) == (seconds > 1 and terminal)


def test_a_pipe_gets_a_line_of_progress_every_ten_seconds(capsys, monkeypatch):
    now = [0.0]
    set_clock(monkeypatch, now)
    with _progress_bar("tokens") as progress:
        for done in range(0, 2600, 100):  # a second each
            progress(done, 2500)
            now[0] += 1
    assert capsys.readouterr().err.splitlines() == [
        "1,000 of 2,500 tokens",
        "2,000 of 2,500 tokens",
    ]


def test_an_exported_file_that_is_replaced_is_told(run, tmp_path, monkeypatch, arrays):
    def written(calibrator, out, **options):
        Path(out).write_text("a graph")
        return 1e-8

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("calibrant.deploy.exports.export", written)
    fitted = calibrant.TemperatureScaling().fit(arrays["logits"], arrays["labels"])
    calibrant.save(fitted, "saved")
    for start in ("wrote", "replaced"):
        _, _, err = run("export", "saved", "-o", "out.onnx")
        assert err.startswith(f"{start} out.onnx; where tried, its probabilities differ")


def test_version(run):
    assert run("--version") == (0, f"calibrant, version {calibrant.__version__}\n", "")


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
    done = run_script(COUNT_OPENS, *commands)
    assert re.findall(r"^opens (\d) (\d+)$", done.stdout, re.M) == [("0", "1")] * len(commands)
