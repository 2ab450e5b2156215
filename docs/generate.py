"""Pages that are made from the code: the tables of methods and the list of public names."""

from importlib import import_module
from itertools import groupby
from pathlib import Path

TITLES = {
    "metrics": "Measure",
    "calibrators": "Calibrators",
    "workflows": "Workflows",
    "artifacts": "Save and load",
    "decide": "Decide",
    "deploy": "Deploy",
    "monitor": "Monitor",
    "losses": "Train: losses",
    "retrain": "Train: masked classifiers",
    "data": "Prediction files",
    "_core": "Helpers",
}
"""Sections of the API page by package, in order; other packages follow under their own name."""
SUBMODULES = {"llm": "Language models", "plots": "Diagrams"}
"""Modules whose names are not at the top level."""

SKLEARN = """## scikit-learn

```{eval-rst}
.. autoclass:: calibrant.deploy.sklearn.CalibratedClassifier
   :members: fit, predict, predict_proba
```
"""
"""Without the methods that scikit-learn adds, whose texts refer to its own documentation."""


def write(folder: Path) -> None:
    """Write all pages under the folder of the documentation."""
    (folder / "_generated").mkdir(exist_ok=True)
    for name, text in {"methods": methods(), "properties": properties()}.items():
        (folder / "_generated" / f"{name}.md").write_text(text, encoding="utf-8")
    (folder / "api.md").write_text(api(), encoding="utf-8")


# ------------------------------------------------------------------------------------ calibrators


def methods() -> str:
    """The table of all calibrators: name, class, what it does."""
    from calibrant.calibrators.registry import CALIBRATORS

    cells = ((f"`{n}`", f"`{kind.__name__}`", kind.summary) for n, kind in CALIBRATORS.items())
    return table(("name", "class", "what it does"), cells)


def properties() -> str:
    """The table of what calibrators guarantee and need."""
    from calibrant.calibrators.registry import CALIBRATORS

    headings = (
        *("name", "parameters", "predicted class kept", "order of classes kept"),
        *("masked classes", "reads", "needs"),
    )
    rows = []
    for name, kind in CALIBRATORS.items():
        one = kind()
        promises = (one.keeps_argmax, one.monotone, one.accepts_masked)
        needs = ["features"] * one.needs_features + ["head"] * one.needs_head
        rows.append(
            (
                *(f"`{name}`", "those of its choice" if name == "auto" else formula(one.size)),
                *("yes" if promise else "no" for promise in promises),
                *("chunks" if one.fits_records else "whole", ", ".join(needs)),
            )
        )
    return table(headings, rows)


def formula(size) -> str:
    """The number of parameters as a polynomial of the number of classes K.

    >>> formula(lambda k: k * k + k), formula(lambda k: 10 * k + 1), formula(lambda k: 0)
    ('K² + K', '10K + 1', '0')
    """
    low, middle, high = (size(classes) for classes in (10, 20, 30))
    square = (high - 2 * middle + low) // 200
    linear = (middle - low) // 10 - 30 * square
    constant = low - 10 * linear - 100 * square
    terms = [
        f"{factor if factor > 1 else ''}{power}"
        for factor, power in ((square, "K²"), (linear, "K"))
        if factor
    ]
    return " + ".join([*terms, *([str(constant)] if constant or not terms else [])])


def table(headings, rows) -> str:
    """A table in Markdown."""
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


# ---------------------------------------------------------------------------------------- API page


def api() -> str:
    """The page of public names, by package."""
    import calibrant

    page = ["# Python interface\n", "The names below are those of `import calibrant`.\n"]
    tables = [name for name in calibrant.__all__ if isinstance(getattr(calibrant, name), dict)]
    page.append(f"Tables of what there is, from name to class or function: {code(tables)}.\n")
    names = sorted((n for n in calibrant.__all__ if n not in tables), key=_place)
    done = set()
    for package, group in groupby(names, key=_package):
        listed = list(group)
        done.update(listed)
        page.append(section(TITLES.get(package, package), "calibrant", listed))
        if package == "calibrators":
            page.append(_more_calibrators(done))
    for module, title in SUBMODULES.items():
        page.append(section(title, f"calibrant.{module}", public(f"calibrant.{module}")))
    return "\n".join(part for part in [*page, SKLEARN] if part)


def _more_calibrators(done) -> str:
    from calibrant.calibrators.registry import CALIBRATORS

    rest = [kind.__name__ for kind in CALIBRATORS.values() if kind.__name__ not in done]
    return section("", "calibrant.calibrators", rest) if rest else ""


def _package(name: str) -> str:
    import calibrant

    return getattr(calibrant, name).__module__.split(".")[1]


def _place(name: str):
    """By section, and calibrators in the order of their table."""
    import calibrant
    from calibrant.calibrators.registry import CALIBRATORS

    package, kinds = _package(name), list(CALIBRATORS.values())
    value, titles = getattr(calibrant, name), list(TITLES)
    rank = titles.index(package) if package in titles else len(titles)
    return rank, package, kinds.index(value) if value in kinds else len(kinds), name


def section(title: str, module: str, names) -> str:
    """A heading and a list of names with a page each."""
    lines = "".join(f"   {name}\n" for name in names)
    heading = f"## {title}\n\n" if title else ""
    return (
        f"{heading}```{{eval-rst}}\n.. currentmodule:: {module}\n"
        f".. autosummary::\n   :toctree: api/_generated\n\n{lines}```\n"
    )


def public(module: str):
    """Names that a module exports, or else defines."""
    found = import_module(module)
    listed = getattr(found, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, value in vars(found).items()
            if not name.startswith("_") and getattr(value, "__module__", "") == module
        ]
    return [name for name in listed if callable(getattr(found, name))]


def code(names) -> str:
    """Names as code, separated by commas."""
    return ", ".join(f"`{name}`" for name in names)
