"""Imports inside the package point one way, and importing it stays light."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "calibrant"

# From low to high. A module may import from itself and from lower rows, never from its own row.
LAYERS: list[set[str]] = [
    {"sample"},  # data files, without code
    {"_checks"},
    {"_models"},
    {"_walk"},
    {"_binning"},
    {"_solve"},
    {"_partition"},
    {"data"},
    {"shards"},
    {"metrics"},
    {"losses"},
    {"calibrators"},
    {"decide", "heads", "comparison"},
    {"llm"},
    {"io"},  # knows every kind of artifact that it loads
    {"deploy"},
    {"sklearn", "export", "plots", "report", "monitor"},
    {"bench"},
    {"__init__"},  # resolves the public names of everything below
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, row in enumerate(LAYERS) for name in row}
OPEN_TO_ALL = {"__version__"}  # of the names in calibrant/__init__.py

HEAVY = {
    *("click", "matplotlib", "onnx", "pandas", "pyarrow"),
    *("ray", "rich", "sklearn", "transformers"),
}


def imported(tree: ast.AST, package: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Yield (direct part of calibrant, line) for each import, wherever in the file it stands.

    `package` is the dotted name, as a tuple, of the package that holds the file.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            targets = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            base += tuple(node.module.split(".")) if node.module else ()
            targets = [(*base, alias.name) for alias in node.names]
        else:
            continue
        for target in targets:
            if target[0] != "calibrant":
                continue
            part = target[1] if len(target) > 1 else "__init__"
            if part in OPEN_TO_ALL:
                continue
            is_module = part in RANK or (ROOT / part).is_dir() or (ROOT / f"{part}.py").is_file()
            yield (part if is_module else "__init__"), node.lineno


def offences(source: str, path: str) -> list[str]:
    """List the imports in `source` that break the order; `path` is relative to the package."""
    parts = Path(path).with_suffix("").parts
    here = parts[0]
    if here not in RANK:
        return [f"{path}: `{here}` has no layer yet; add it to LAYERS in {Path(__file__).name}"]
    package = ("calibrant", *parts[:-1])
    found = []
    for part, line in imported(ast.parse(source), package):
        if part not in RANK:
            found.append(f"{path}:{line}: imports `{part}`, which has no layer yet")
        elif part != here and RANK[part] >= RANK[here]:
            found.append(f"{path}:{line}: `{here}` may not import `{part}`")
    return found


def test_imports_point_one_way():
    files = sorted(ROOT.rglob("*.py"))
    assert files
    found = []
    for file in files:
        found += offences(file.read_text("utf-8"), file.relative_to(ROOT).as_posix())
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("metrics/ece.py", "from calibrant.cli import main"),
        ("metrics/ece.py", "import calibrant.plots as p"),
        ("metrics/ece.py", "from ..plots import reliability"),
        ("metrics/ece.py", "from .. import plots"),
        ("metrics/deep/ece.py", "from ...plots import reliability"),
        ("_binning.py", "def f():\n    from calibrant import metrics"),
        ("_binning.py", "from . import _solve"),
        ("_checks.py", "from ._binning import Bins"),
        ("plots.py", "from .report import page"),
        ("data.py", "from calibrant import ece"),
        ("data.py", "import calibrant as cal"),
        ("data.py", "if TYPE_CHECKING:\n    from calibrant.metrics import ece"),
        ("brand_new.py", ""),
    ],
)
def test_planted_offence_is_found(path, source):
    assert len(offences(source, path)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("metrics/ece.py", "from calibrant._binning import Bins\nfrom .pairs import Pairs"),
        ("metrics/ece.py", "from calibrant.metrics.pairs import Pairs\nfrom .. import _checks"),
        ("metrics/__init__.py", "from . import pairs\nfrom .ece import ece"),
        ("io.py", "from calibrant import __version__\nimport io, plots, numpy"),
        ("shards.py", "from .data import read\nfrom ._walk import blocks"),
        ("cli/fit.py", "import calibrant as cal\nfrom calibrant import evaluate, plots"),
        ("__main__.py", "from calibrant.cli import main"),
        ("__init__.py", "from calibrant.metrics import ece"),
    ],
)
def test_allowed_import_passes(path, source):
    assert offences(source, path) == []


def test_import_is_light():
    code = "import calibrant, sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    assert "calibrant" in loaded
    assert not loaded & HEAVY


def test_help_does_not_import_torch():
    command = [sys.executable, "-X", "importtime", "-m", "calibrant", "--help"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "calibrant.cli" in modules
    assert not modules & ({"numpy", "scipy", "torch", *HEAVY} - {"click"})
