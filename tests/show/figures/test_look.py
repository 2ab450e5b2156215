"""One look: sizes, colours by the paper, text as it is, and files that are whole."""

import numpy as np
import pytest

import calibrant as cal
from calibrant.show import figures
from calibrant.show.figures.look import _current, _text_of
from calibrant.show.style import DARK, LIGHT

plt = pytest.importorskip("matplotlib.pyplot")


@pytest.fixture
def curve():
    return cal.metrics.reliability(confidence=[0.9, 0.8, 0.6], outcome=[1, 0, 1])


def test_the_look_is_in_use_inside_only():
    before = dict(plt.rcParams)
    with figures.look("talk", dark=True):
        assert _current().size.text == 15
        assert _current().colours == DARK
        assert plt.rcParams["figure.facecolor"] == DARK.paper
    assert dict(plt.rcParams) == before
    assert _current().colours == LIGHT
    with pytest.raises(ValueError, match="size must be"), figures.look("poster"):  # type: ignore[arg-type]
        pass


@pytest.mark.parametrize(
    ("paper", "text", "expected"),
    [("white", "black", LIGHT), ("#222222", "white", DARK), ("none", "white", DARK)],
)
def test_the_paper_decides_on_the_colours(paper, text, expected):
    with plt.rc_context({"figure.facecolor": paper, "text.color": text}):
        assert _current().colours == expected


def test_settings_for_tex_do_not_reach_our_text(curve):
    with plt.rc_context({"text.usetex": True}):
        axes = curve.plot()
    assert not axes.xaxis.label.get_usetex()
    assert not axes.get_legend().get_title().get_usetex()


@pytest.mark.parametrize(
    ("name", "drawn"),
    [
        ("plain", "plain"),
        ("$x$", r"\$x\$"),
        ("_x", " _x"),
        ("a\tb\nc", "a b c"),
        ("\x1b[31m", r"\x1b[31m"),
        ("", "(empty)"),
        (3, "3"),
        ("x" * 40, "x" * 31 + "…"),
    ],
)
def test_names_become_text(name, drawn):
    assert _text_of(name) == drawn


@pytest.mark.parametrize("suffix", ["pdf", "png", "svg"])
def test_a_figure_is_saved_the_same_each_time(tmp_path, curve, suffix):
    files = [tmp_path / f"{i}.{suffix}" for i in range(2)]
    for file in files:
        figures.save_figure(curve.plot(), file)
    first, second = (file.read_bytes() for file in files)
    assert first == second
    assert len(first) > 1000
    assert sorted(tmp_path.iterdir()) == files  # nothing else is left


def test_characters_without_a_glyph_are_one_warning(tmp_path, curve):
    figure = figures.reliability_diagrams({"\ue000\ue001": curve, "\ue002": curve})
    with pytest.warns(UserWarning, match="no font here has 3 of the characters") as caught:
        figures.save_figure(figure, tmp_path / "a.png")
    assert len(caught) == 1


def test_an_unknown_suffix_is_refused(tmp_path, curve):
    with pytest.raises(ValueError, match=r"written as \.pdf, \.png, \.svg, got .*a\.gif"):
        figures.save_figure(curve.plot(), tmp_path / "a.gif")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_leaves_the_old_file(tmp_path, curve, monkeypatch):
    out = tmp_path / "a.svg"
    out.write_text("old")
    axes = curve.plot()

    def fail(path, **_):
        path.write_text("half")
        raise OSError("the disk is full")

    monkeypatch.setattr(axes.figure, "savefig", fail)
    with pytest.raises(OSError, match="full"):
        figures.save_figure(axes, out)
    assert out.read_text() == "old"


def test_without_matplotlib_the_remedy_is_named(monkeypatch, curve):
    import builtins

    real = builtins.__import__

    def refuse(name, *rest):
        if name.startswith("matplotlib"):
            raise ImportError("No module named 'matplotlib'")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[plot\]'"):
        curve.plot()


def test_one_class_and_many_classes_are_drawn(rng):
    logits = rng.normal(size=(60, 5000)).astype(np.float32)
    figure = figures.class_diagrams(
        cal.metrics.reliability_by_class(logits, np.full(60, 7)), names=["c"] * 5000, most=3
    )
    assert len(figure.axes) == 3
    assert figure.axes[0].get_title(loc="left").startswith("c (7)\nECE")
