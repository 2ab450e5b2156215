"""The verb plot."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")


@pytest.mark.parametrize("suffix", ["pdf", "png", "svg"])
def test_a_figure_is_written_as_the_suffix_says(run, path, suffix):
    code, out, err = run("plot", path, "-o", f"a.{suffix}", "--size", "column", "--level", "0")
    assert (code, out, err) == (0, "", f"wrote a.{suffix}\n")
    start = {"pdf": b"%PDF", "png": b"\x89PNG", "svg": b"<?xml"}[suffix]
    assert Path(f"a.{suffix}").read_bytes().startswith(start)
    assert run("plot", path, "-o", f"a.{suffix}", "--level", "0")[2] == f"replaced a.{suffix}\n"


def test_a_figure_is_called_like_its_kind(run, path):
    assert run("plot", path, "--kind", "histogram")[2] == "wrote histogram.png\n"


def test_options_reach_the_figure(run, path):
    common = ("--by", "region", "--sample-weight", "importance")
    code, _, err = run("plot", path, *common, "--dark", "-o", "a.svg")
    assert (code, err) == (0, "wrote a.svg\n")
    assert "#14181d" in Path("a.svg").read_text()  # the dark paper
    assert run("fit", path, "--method", "ts", "-o", "ts")[0] == 0
    for kind in ("effect", "map", "histogram"):
        assert run("plot", path, "--calibrator", "ts", "--kind", kind, "-o", "b.png")[0] == 0
    code = run("plot", path, "--kind", "compare", "--methods", "none,ts", "-o", "c.png")[0]
    assert code == 0
    assert run("plot", path, "--kind", "threshold", "--max-error", "0.9", "-o", "c.png")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("p.npz", "-o", "a.gif"), "figures are written as .pdf, .png, .svg, got a.gif"),
        (("p.npz", "-o", "none/a.png"), "folder none does not exist"),
        (("p.npz", "-o", "a.png", "--kind", "riks"), "did you mean risk?"),
        (("p.npz", "-o", "a.png", "--kind", "map"), "map needs a calibrator"),
        (("p.npz", "-o", "a.png", "--by", "nothing"), "nothing"),
        (("gone.npz", "-o", "a.png"), "gone.npz"),
    ],
)
def test_what_cannot_be_drawn_writes_nothing(run, path, arguments, message):
    before = sorted(Path().iterdir())
    code, out, err = run("plot", *arguments)
    assert (code, out) == (2, "")
    assert message in err
    assert sorted(Path().iterdir()) == before


def test_two_files_are_drawn_together(run, path, arrays):
    np.savez("q.npz", logits=arrays["logits"] / 2, labels=arrays["labels"])
    for kind in ("reliability", "risk"):
        assert run("plot", "p.npz", "q.npz", "--kind", kind, "--level", "0", "-o", "a.png")[0] == 0
