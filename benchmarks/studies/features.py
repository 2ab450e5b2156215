"""Which features other libraries have beside calibrant, each found by running it.

    python benchmarks/studies/features.py LIBRARY -o docs/data
    python benchmarks/studies/features.py --tables docs/data

The first form is for an environment with LIBRARY. Of each feature, a few lines of
``features_checks.py`` call the library on small data and must come out true. Where there are none,
no public name of the library may contain the words that are looked for, unless it is said what such
names mean. Rows of other libraries in ``features.csv`` are kept. The second form writes the table
of ``docs/migrate.md``.
"""

import argparse
import ast
import csv
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import features_checks
from features_checks import FEATURES, PREPARED
from rows import MISSING, Rows, Table, read, write_tables

COLUMNS = ("library", "version", "feature", "answer", "checked")
LIBRARIES = {
    **{"calibrant": "calibrant", "MAPIE": "mapie", "crepes": "crepes", "netcal": "netcal"},
    **{"probmetrics": "probmetrics", "torch-uncertainty": "torch-uncertainty"},
    **{"calzone": "calzone-tool", "uqlm": "uqlm", "NannyML": "nannyml", "MCGrad": "mcgrad"},
}
"""Libraries with their names on PyPI, in the order of the table."""
MODULES = {"calzone": "calzone", "torch-uncertainty": "torch_uncertainty"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("library", nargs="?", choices=LIBRARIES)
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--tables", type=Path)
    given = parser.parse_args()
    if given.library and given.out:
        path = given.out / "features.csv"
        before = read(path) if path.exists() else []
        rows = [row for row in before if row["library"] != given.library]
        rows += checked(given.library)
        rows.sort(key=lambda row: list(LIBRARIES).index(row["library"]))
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    elif given.tables is None:
        parser.error("name a library and -o FOLDER, or --tables FOLDER")
    folder = given.tables or given.out
    write_tables(folder, tables(folder))


def checked(library: str) -> Iterator[dict[str, str]]:
    """Run the checks of a library, and look for names where it has none."""
    if library == "torch-uncertainty" and importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(Standin())
    os.environ["NML_DISABLE_USAGE_LOGGING"] = "1"
    module = MODULES.get(library, LIBRARIES[library])
    version = importlib.metadata.version(LIBRARIES[library])
    found = sorted(public_names(module))
    cells = getattr(features_checks, module.upper())
    for group in FEATURES.values():
        for feature, words in group.items():
            answer, check = cells.get(feature, ("no", ""))
            if answer != "no":
                if not is_true(check):
                    raise RuntimeError(f"{library}: {feature} is not what it should be")
            elif not check:
                alike = [name for name in found if re.search(words, name, re.IGNORECASE)]
                if alike:
                    raise RuntimeError(f"{library}, {feature}: what about {', '.join(alike[:9])}?")
                check = f"no public name like {words}"
            yield dict(zip(COLUMNS, (library, version, feature, answer, check), strict=True))


def is_true(code: str) -> bool:
    """Run statements on the prepared data, and return the value of the last."""
    names: dict[str, Any] = {}
    exec(PREPARED, names)
    *first, last = ast.parse(code).body
    if not isinstance(last, ast.Expr):
        raise TypeError(f"a check ends with a value: {code}")
    exec(compile(ast.Module(first, []), "check", "exec"), names)
    return bool(eval(compile(ast.Expression(last.value), "check", "eval"), names))


def public_names(module: str) -> set[str]:
    """Modules of a package, and the classes, functions and methods in them, read not imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(f"{module} is not installed")
    found: set[str] = set()
    for root in map(Path, spec.submodule_search_locations):
        for path in root.rglob("*.py"):
            parts = path.relative_to(root).with_suffix("").parts
            if any(part.startswith("_") or part.startswith("test") for part in parts[:-1]):
                continue
            found.update(part for part in parts if not part.startswith("_"))
            for node in ast.walk(ast.parse(path.read_text("utf-8"))):
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    found.add(node.name)
    return {name for name in found if not name.startswith("_")}


class Standin(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Empty classes in place of those of torchvision, which only draw pictures here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.partition(".")[0] == "torchvision":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        made = types.ModuleType(spec.name)
        made.__getattr__ = empty_class  # type: ignore[method-assign]
        return made

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def empty_class(name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(name)
    return type(name, (), {})


# ------------------------------------------------------------------------------------ the table


def tables(folder: Path) -> dict[str, Table]:
    rows = read(folder / "features.csv")
    versions = {row["library"]: row["version"] for row in rows}
    heads = [name if name == "calibrant" else f"{name} {versions[name]}" for name in versions]
    table = [["feature", *heads]]
    for group, features in FEATURES.items():
        table.append([f"**{group}**", *[""] * len(versions)])
        table += [_line(rows, feature, list(versions)) for feature in features]
    return {"table_features": table}


def _line(rows: Rows, feature: str, libraries: list[str]) -> list[str]:
    shown = {"yes": "✓", "no": ""}
    answers = {
        row["library"]: shown.get(row["answer"], row["answer"])
        for row in rows
        if row["feature"] == feature
    }
    return [feature, *(answers.get(name, MISSING) for name in libraries)]


if __name__ == "__main__":
    main()
