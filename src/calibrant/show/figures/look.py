"""The look of all figures: sizes, type and colours in one place, and files of them."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from itertools import cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, get_args

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import check_choice, warn
from calibrant._core.messages import comma_separated, needed, printable
from calibrant.show.style import DARK, LIGHT, Palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


P = ParamSpec("P")
R = TypeVar("R")

SizeName = Literal["column", "page", "talk"]
"""Column of a paper, width of a page, or slide."""
FALLBACKS = (
    *("Noto Sans CJK SC", "Noto Sans CJK JP", "PingFang SC", "Microsoft YaHei", "Malgun Gothic"),
    *("Arial Unicode MS", "WenQuanYi Zen Hei", "Noto Sans Arabic", "Noto Sans Devanagari"),
)
"""Fonts for names in other scripts, in the order in which they are tried."""
LONGEST = 32
"""Characters of a name that are drawn."""


@dataclass(frozen=True)
class _Size:
    """Sizes of a figure, in inches, and of its text, in points."""

    width: float  # of the widest figure
    panel: float  # of a single diagram
    narrowest: float  # of a diagram among others
    text: float


SIZES: dict[str, _Size] = {
    "column": _Size(width=3.3, panel=3.3, narrowest=1.6, text=7.5),
    "page": _Size(width=6.9, panel=4.2, narrowest=2.0, text=8.5),
    "talk": _Size(width=12.0, panel=7.0, narrowest=3.4, text=15.0),
}


@dataclass(frozen=True)
class _Look:
    """The size and the colours that are in use."""

    size: _Size
    colours: Palette

    @property
    def thin(self) -> float:
        """Width of thin lines, in points."""
        return self.size.text / 10

    @property
    def thick(self) -> float:
        """Width of the lines that show data."""
        return self.size.text / 4.5

    def series(self, count: int) -> list[tuple[str, str]]:
        """Colours and line styles of some lines, which can be told apart without colours too."""
        names = ("right", "wrong", "good", "muted", "bad", "warn")
        colours = cycle(getattr(self.colours, name) for name in names)
        return list(islice(zip(colours, cycle(["-", "--", "-.", ":"]), strict=False), count))


_IN_USE: ContextVar[_Look | None] = ContextVar("look", default=None)


def _current() -> _Look:
    """Return the look that is in use."""
    return _IN_USE.get() or _Look(SIZES["page"], _palette())


@contextmanager
def look(size: SizeName = "page", *, dark: bool | None = None) -> Iterator[None]:
    """Draw everything inside at one size, and in light or dark colours.

    Parameters
    ----------
    size : {"column", "page", "talk"}
        Figures of at most 3.3 inches for a column of a paper, 6.9 inches for a page, and large
        ones for slides. Outside of this context the size is "page".
    dark : bool, optional
        Light text on dark paper, or the reverse; by default that of the matplotlib style.

    Examples
    --------
    >>> from calibrant.metrics import reliability
    >>> with look("column"):
    ...     axes = reliability(confidence=[0.9, 0.8], outcome=[1, 0]).plot()
    >>> float(axes.figure.get_figwidth())
    3.3
    """
    _pyplot()
    check_choice("size", size, get_args(SizeName))
    given = None if dark is None else DARK if dark else LIGHT
    with _in_use(_Look(SIZES[size], given or _palette()), paper=given is not None):
        yield


@contextmanager
def _in_use(chosen: _Look, *, paper: bool) -> Iterator[None]:
    import matplotlib

    settings: Any = _settings(chosen)
    if paper:
        settings |= dict.fromkeys(("figure.facecolor", "axes.facecolor"), chosen.colours.paper)
    token = _IN_USE.set(chosen)
    try:
        with matplotlib.rc_context(settings):
            yield
    finally:
        _IN_USE.reset(token)


def _settings(chosen: _Look) -> dict[str, Any]:
    """Settings of matplotlib for a look."""
    ink, muted, text = chosen.colours.ink, chosen.colours.muted, chosen.size.text
    inked = ("text.color", "axes.labelcolor", "xtick.labelcolor", "ytick.labelcolor")
    sized = ("font.size", "axes.labelsize", "axes.titlesize", "legend.title_fontsize")
    smaller = ("xtick.labelsize", "ytick.labelsize", "legend.fontsize")
    lines = ("axes.linewidth", "xtick.major.width", "ytick.major.width", "hatch.linewidth")
    return {
        **dict.fromkeys(inked, ink),
        **dict.fromkeys(("axes.edgecolor", "xtick.color", "ytick.color"), muted),
        **dict.fromkeys(sized, text),
        **dict.fromkeys(smaller, 0.92 * text),
        **dict.fromkeys(lines, chosen.thin),
        **dict.fromkeys(("xtick.major.size", "ytick.major.size"), 0.35 * text),
        **dict.fromkeys(("xtick.minor.size", "ytick.minor.size"), 0.0),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "axes.grid"), False),
        **dict.fromkeys((f"figure.constrained_layout.{x}_pad" for x in "wh"), 0.45 * text / 72),
        "axes.titlecolor": ink,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelweight": "normal",
        "font.family": ["sans-serif", *_fallbacks()],
        "grid.color": chosen.colours.grid,
        "legend.edgecolor": "none",
        "legend.fancybox": False,
        "legend.framealpha": 0.9,
        "text.usetex": False,  # names and per cent signs would be commands
    }


@cache
def _fallbacks() -> list[str]:
    """Return installed fonts for the characters that the usual one does not have."""
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    return [name for name in FALLBACKS if name in installed]


def _palette(paper: Any = None) -> Palette:
    """Return the colours that suit the paper; of transparent paper the text tells."""
    import matplotlib
    from matplotlib.colors import to_rgba

    red, green, blue, alpha = to_rgba(paper or matplotlib.rcParams["figure.facecolor"])
    bright = (0.3 * red + 0.59 * green + 0.11 * blue) > 0.5
    if alpha < 0.5:
        text = to_rgba(matplotlib.rcParams["text.color"])
        bright = sum(text[:3]) < 1.5
    return LIGHT if bright else DARK


def _in_look(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function in the look that is in use, or in one that suits its ``ax``."""
    names = inspect.signature(draw)

    @wraps(draw)
    def drawn(*args: P.args, **options: P.kwargs) -> R:
        _pyplot()
        ax = names.bind(*args, **options).arguments.get("ax")
        chosen, figure = _current(), getattr(ax, "figure", None)
        if figure is not None:
            chosen = _Look(chosen.size, _palette(figure.get_facecolor()))
        with _in_use(chosen, paper=False):
            return draw(*args, **options)

    return drawn


def _pyplot() -> Any:
    """Return matplotlib.pyplot, or raise an error that names the extra."""
    with needed("figures need matplotlib", "'calibrant[plot]'"):
        import matplotlib.pyplot as plt
    return plt


def _new_axes(ax: Axes | None, *, height: float = 0.8) -> Axes:
    """Return dressed axes: those given, or of a new figure whose height is a share of its width."""
    if ax is None:
        width = _current().size.panel
        ax = _pyplot().subplots(figsize=(width, height * width), layout="constrained")[1]
    _dress(ax)
    return ax


def _panels(count: int, *, height: float, columns: int | None = None) -> list[Axes]:
    """Return dressed axes of a new figure, side by side in rows as wide as the look allows.

    ``height`` is that of a diagram in units of its width; text around it gets its room.
    """
    size = _current().size
    em, most = size.text / 72, columns or max(1, int(size.width / size.narrowest + 1e-6))
    rows = -(-count // most)
    across = -(-count // rows)
    width = min(size.width, across * size.panel)
    tall = height * (width - 5 * em) / across + 2.5 * em
    grid = _pyplot().subplots(
        rows,
        across,
        figsize=(width, rows * tall + 6 * em),
        squeeze=False,
        layout="compressed",  # as constrained, and square diagrams stay next to each other
    )[1]
    axes = list(grid.flat)
    for unused in axes[count:]:
        unused.remove()
    for ax in axes[:count]:
        _dress(ax)
    return axes[:count]


def _panel_title(ax: Axes, title: object, below: str = "") -> None:
    """Set the title of one of several panels, cut to what its width holds.

    Below stands a text that breaks before a bracket where it is too long for a line. The figure
    grows by these lines, which the first panel of each row adds.
    """
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import TextPath

    spec, figure, text = ax.get_subplotspec(), _figure_of(ax), _current().size.text
    assert spec is not None
    points = 72 * figure.bbox.width / figure.dpi / spec.get_gridspec().ncols
    font, shown = FontProperties(weight="bold"), _text_of(title)

    def fits(line: str) -> bool:
        width = TextPath((0, 0), line, text, font).get_extents().width
        return bool(width <= points - 4 * text)  # ticks stand beside

    for longest in range(len(shown), 3, -1):
        if fits(shown):
            break
        shown = _text_of(title, longest)
    if below:
        shown += "\n" + (below if fits(below) else below.replace(" [", "\n["))
        if spec.is_first_col():
            grown = figure.bbox.height / figure.dpi + 1.3 * shown.count("\n") * text / 72
            figure.set_size_inches(figure.bbox.width / figure.dpi, grown)
    ax.set_title(shown)


def _dress(ax: Axes) -> None:
    """Give axes the text, ticks and frame of the look, wherever they come from."""
    chosen = _current()
    ink, muted, text = chosen.colours.ink, chosen.colours.muted, chosen.size.text
    ax.tick_params(
        color=muted, labelcolor=ink, labelsize=0.92 * text, width=chosen.thin, length=0.35 * text
    )
    for name, spine in ax.spines.items():
        spine.set(edgecolor=muted, linewidth=chosen.thin)
        spine.set_visible(name in ("left", "bottom"))
    for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
        label.set(color=ink, size=text)


def legend(
    ax: Axes,
    loc: str | tuple[float, float] = "best",
    *,
    title: str = "",
    handles: Sequence[Any] | None = None,
) -> None:
    """Draw the legend of axes, with a bold title if there is any.

    ``loc`` is in data if numbers; "below" leaves room for the ticks and the name of the axis.
    """
    from matplotlib.transforms import ScaledTranslation

    options: Any = {} if handles is None else {"handles": handles}
    place: Any = loc
    if loc == "below":
        inches = (2.7 * _current().size.text + 9) / 72
        down = ScaledTranslation(0, -inches, ax.figure.dpi_scale_trans)
        options |= {"bbox_to_anchor": (0.5, 0), "bbox_transform": ax.transAxes + down}
        options |= {"borderaxespad": 0, "ncols": 2, "columnspacing": 1.2}
        place = "upper center"
    elif isinstance(loc, tuple):
        options |= {"bbox_to_anchor": loc, "bbox_transform": ax.transData, "borderaxespad": 0}
        place = "upper left"
    drawn = ax.legend(loc=place, title=title or None, alignment="left", handlelength=1.6, **options)
    drawn.get_title().set_fontweight("bold")
    frame = drawn.get_frame()
    frame.set_linewidth(0)
    frame.set_facecolor(ax.figure.get_facecolor())


def _figure_of(drawn: Axes | Figure) -> Figure:
    """Return the figure of what a drawing function returned."""
    figure: Any = getattr(drawn, "figure", drawn)
    return getattr(figure, "figure", figure)  # type: ignore[no-any-return]


def _set_title(figure: Figure, title: str) -> None:
    """Write a title of any origin above a figure, in as many lines as it needs."""
    text = _current().size.text
    width = max(10, int(figure.get_figwidth() / (0.7 * text / 72)))
    lines = textwrap.wrap(_text_of(title, 4 * width), width)
    style: Any = {"weight": "bold", "size": 1.1 * text, "ha": "left"}
    figure.suptitle("\n".join(lines), x=0.02, color=_current().colours.ink, **style)


def _text_of(name: object, longest: int = LONGEST) -> str:
    r"""Return a name of any origin as text that matplotlib draws as it is, in one line.

    Control characters become visible, ``$`` does not start a formula, a leading underscore does
    not hide the name from a legend, and long names are cut.

    >>> _text_of("$cost$"), _text_of("a\nb"), _text_of("x" * 99)[-3:]
    ('\\$cost\\$', 'a b', 'xx…')
    """
    plain = printable(" ".join(str(name).split())) or "(empty)"
    cut = plain if len(plain) <= longest else plain[: longest - 1] + "…"
    escaped = cut.replace("$", r"\$")
    return f" {escaped}" if escaped.startswith("_") else escaped


GLYPH = re.compile(r"Glyph (\d+) .*missing from .*font")
SUFFIXES = (".pdf", ".png", ".svg")
DPI = 300


def check_suffix(out: str | os.PathLike[str]) -> str:
    """Return the suffix of a file for a figure, or raise.

    >>> check_suffix("figure.PDF")
    '.pdf'
    """
    suffix = Path(out).suffix.lower()
    if suffix not in SUFFIXES:
        known = comma_separated(SUFFIXES)
        raise ValueError(f"figures are written as {known}, got {os.fspath(out)}: change the suffix")
    return suffix


def save_figure(drawn: Axes | Figure, out: str | os.PathLike[str]) -> None:
    """Write what a drawing function returned to a file: ``.pdf``, ``.png`` or ``.svg``.

    The file is replaced as a whole. The same figure gives the same bytes: no date is written.
    PDF files have TrueType fonts, which journals ask for, and PNG files 300 dots per inch.

    Parameters
    ----------
    drawn : Axes or Figure
    out : path

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.metrics import reliability
    >>> axes = reliability(confidence=[0.9, 0.8], outcome=[1, 0]).plot()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_figure(axes, f"{folder}/reliability.svg")
    """
    import matplotlib

    suffix = check_suffix(out)
    dates = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    settings: Any = {"pdf.fonttype": 42, "svg.hashsalt": "calibrant"}
    with replacing(Path(out)) as temporary, matplotlib.rc_context(settings), _one_warning():
        _figure_of(drawn).savefig(temporary, format=suffix[1:], dpi=DPI, metadata=dates.get(suffix))


@contextmanager
def _one_warning() -> Iterator[None]:
    """Warn once of all characters that no font has, where matplotlib warns of each."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    missing = {m[1] for w in caught if (m := GLYPH.search(str(w.message)))}
    for other in (w for w in caught if not GLYPH.search(str(w.message))):
        warnings.warn_explicit(other.message, other.category, other.filename, other.lineno)
    if missing:
        warn(
            f"no font here has {len(missing)} of the characters, which are drawn as boxes: install "
            "one for the script of these names, such as Noto Sans CJK"
        )
