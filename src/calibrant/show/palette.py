"""Colours of everything calibrant draws: figures, notebooks and reports.

Blue stands for what happened and orange for the distance to what was claimed. The two differ in
lightness too, so that they stay apart for colour-blind readers and in grey print. Text colours have
a contrast of at least 4.5 to 1 with their paper (WCAG AA).
"""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Palette:
    """Colours for one kind of paper, as ``#rrggbb``."""

    paper: str
    panel: str  # of boxes on the paper
    ink: str
    muted: str  # of notes, ticks and counts
    grid: str
    right: str  # accuracy, right answers, "after"
    wrong: str  # gaps, wrong answers, "before"
    good: str
    warn: str
    bad: str

    def css_variables(self) -> str:
        """Declare the colours as ``--cal-NAME`` for a rule of CSS."""
        return " ".join(f"--cal-{f.name}: {getattr(self, f.name)};" for f in fields(self))


LIGHT = Palette(
    paper="#ffffff",
    panel="#f5f7f9",
    ink="#1c2733",
    muted="#566370",
    grid="#dde3e9",
    right="#2372ab",
    wrong="#b94a12",
    good="#1d7a45",
    warn="#8f5a00",
    bad="#b3261e",
)
DARK = Palette(
    paper="#14181d",
    panel="#1d232a",
    ink="#e6eaee",
    muted="#a3aeb9",
    grid="#333c46",
    right="#6db3e6",
    wrong="#f0935c",
    good="#62cb8e",
    warn="#e2ad52",
    bad="#f28b82",
)


def themes() -> str:
    """Return CSS that declares the colours: by the system, unless ``data-theme`` is set.

    >>> themes().count("--cal-paper")
    5
    """
    light, dark = LIGHT.css_variables(), DARK.css_variables()
    return (
        f':root, :root[data-theme="light"] {{ {light} }}\n'
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        f':root[data-theme="light"] {{ {light} }}\n:root[data-theme="dark"] {{ {dark} }}\n'
        f"@media print {{ :root, :root[data-theme] {{ {light} }} }}\n"
    )
