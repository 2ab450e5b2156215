"""Imports point one way, between packages and inside them, and importing calibrant stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1] / "src" / "calibrant"

# A module imports from its own package and from those to the left of it, never to the right.
ORDER = (
    *("_version", "sample", "_core", "data", "metrics", "losses", "calibrators", "decide"),
    *("slices", "workflows", "artifacts", "deploy", "monitor", "estimate", "llm"),
    *("show", "integrations", "ui", "_api", "__init__", "cli", "__main__"),
)
OPEN_TO_ALL = {"calibrant.__version__"}
# Results are shown when somebody looks: the one import that points down, made late and by name.
LATE = {("_core/showing.py", "show")}

HEAVY = {
    *("click", "distributed", "fsspec", "httpx", "matplotlib", "onnx", "pandas", "pyarrow"),
    *("ray", "rich", "sklearn", "starlette", "transformers", "uvicorn"),
}


class Import(NamedTuple):
    """One imported name: ``calibrant.data.files`` and ``Split``, for instance."""

    module: str
    name: str
    line: int

    @property
    def dotted(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


def imports(source: str, module: str, *, is_package: bool = False) -> Iterator[Import]:
    """Yield every import of calibrant, also those inside functions and TYPE_CHECKING."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found = [Import(alias.name, "", node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            target = ".".join([*base, *([node.module] if node.module else [])])
            found = [Import(target, alias.name, node.lineno) for alias in node.names]
        else:
            continue
        yield from (i for i in found if i.module.split(".")[0] == "calibrant")


def package_of(dotted: str, modules: set[str]) -> str:
    """The direct part of calibrant that a name is in: a package, a module, or the top itself."""
    parts = dotted.split(".")
    known = len(parts) > 1 and (parts[1] in ORDER or f"calibrant.{parts[1]}" in modules)
    return parts[1] if known else "__init__"


def offences(sources: Mapping[str, str]) -> list[str]:
    """List what breaks the rules in files by their path inside the package."""
    modules = {path: module_of(path) for path in sources}
    names = set(modules.values())
    found: list[str] = []
    graph: dict[str, set[str]] = {}
    for path, module in modules.items():
        here = "__init__" if module == "calibrant" else module.split(".")[1]
        graph[module] = set()
        if here not in ORDER:
            found.append(f"{path}: {here} is not in ORDER yet")
            continue
        for i in imports(sources[path], module, is_package=path.endswith("__init__.py")):
            there = package_of(i.dotted, names)
            if i.dotted in OPEN_TO_ALL or (path, there) in LATE:
                continue
            if there == here:
                target = i.dotted if i.dotted in names else i.module
                graph[module] |= {target} - {module}
                continue
            if there not in ORDER:
                found.append(f"{path}:{i.line}: {there} is not in ORDER yet")
            elif ORDER.index(there) > ORDER.index(here):
                found.append(f"{path}:{i.line}: {here} may not import {there}")
            if any(part.startswith("_") for part in i.dotted.split(".")[2:]):
                found.append(f"{path}:{i.line}: {i.dotted} is private to {there}")
    return found + cycles(graph)


def cycles(graph: Mapping[str, set[str]]) -> list[str]:
    """Name one cycle of modules, if there is any."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["cycle: " + " -> ".join(error.args[1])]
    return []


def module_of(path: str) -> str:
    parts = [part for part in Path(path).with_suffix("").parts if part != "__init__"]
    return ".".join(["calibrant", *parts])


def tree():
    return {
        file.relative_to(ROOT).as_posix(): file.read_text("utf-8") for file in ROOT.rglob("*.py")
    }


def test_imports_point_one_way_between_packages_and_inside_them():
    assert len(tree()) > 50
    found = offences(tree())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        ({"metrics/ece.py": "from calibrant.cli import main"}, "metrics may not import cli"),
        ({"metrics/ece.py": "import calibrant.show as s"}, "metrics may not import show"),
        ({"metrics/ece.py": "from ..show import bars"}, "metrics may not import show"),
        ({"metrics/ece.py": "from .. import show"}, "metrics may not import show"),
        ({"metrics/a/b.py": "from ...show import bars"}, "metrics may not import show"),
        (
            {"data/a.py": "def f():\n    from calibrant import metrics"},
            "data may not import metrics",
        ),
        ({"data/a.py": "from calibrant import ece"}, "data may not import __init__"),
        ({"data/a.py": "import calibrant as cal"}, "data may not import __init__"),
        ({"data/a.py": "if TYPE_CHECKING:\n    from calibrant.cli import x"}, "may not import cli"),
        ({"decide/a.py": "import calibrant.workflows.fit"}, "decide may not import workflows"),
        ({"brand_new.py": ""}, "brand_new is not in ORDER yet"),
        ({"cli/a.py": "from calibrant.new import x", "new.py": ""}, "new is not in ORDER yet"),
        ({"llm/a.py": "from calibrant.metrics.binned import _bins"}, "_bins is private to metrics"),
        ({"llm/a.py": "from calibrant.metrics._binned import x"}, "is private to metrics"),
        ({"llm/a.py": "from .b import x", "llm/b.py": "def f():\n    from . import a"}, "cycle"),
        (
            {"llm/__init__.py": "from .a import x", "llm/a.py": "from calibrant.llm import y"},
            "cycle",
        ),
        (
            {
                "_core/a.py": "from calibrant._core.b import x",
                "_core/b.py": "from calibrant._core import c",
                "_core/c.py": "import calibrant._core.a",
            },
            "cycle",
        ),
    ],
)
def test_a_planted_offence_is_reported(planted, message):
    (found,) = offences({"show.py": "", "metrics/__init__.py": "", **planted})[:1]
    assert message in found


@pytest.mark.parametrize(
    "allowed",
    [
        {"metrics/a.py": "from calibrant._core.binning import Bins\nfrom .b import _x"},
        {"metrics/a.py": "from calibrant.metrics.b import Pairs\nfrom .. import _core"},
        {"metrics/__init__.py": "from . import a\nfrom .b import ece", "metrics/a.py": ""},
        {"artifacts.py": "from calibrant import __version__\nimport io, show, numpy"},
        {"cli/fit.py": "import calibrant as cal\nfrom calibrant import evaluate, show"},
        {"__main__.py": "from calibrant.cli import main"},
        {"__init__.py": "from calibrant._api import *"},
    ],
)
def test_an_allowed_import_passes(allowed):
    assert offences({"show.py": "", **allowed}) == []


def test_importing_calibrant_is_light():
    code = "import calibrant, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "calibrant" in loaded
    assert not loaded & (HEAVY | {"numpy", "torch", "calibrant._api"})


def test_help_does_not_import_torch():
    command = [sys.executable, "-X", "importtime", "-m", "calibrant", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "calibrant.cli" in modules
    assert not modules & ({"numpy", "scipy", "torch", *HEAVY} - {"click"})
