"""The public names: where they live, what they say, and that they come when they are called."""

import ast
import doctest
import inspect
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import calibrant

DATA = {"CALIBRATORS", "LOSSES", "METRICS"}
"""Public names that are tables and not functions or classes."""

RECORDS = {
    *("Bins", "CalibrationTest", "Comparison", "ConformalSets", "Estimate", "Evaluation", "Metric"),
    *("CrossFit", "Effect", "MonitorReport", "Pairs", "Threshold"),
    "Calibrator",  # a base class
}
"""What functions return; the examples are those of the functions."""


def source():
    assert calibrant.__file__ is not None
    return ast.parse(Path(calibrant.__file__).read_text())


@pytest.mark.parametrize("name", calibrant.__all__)
def test_every_public_name_resolves(name):
    assert getattr(calibrant, name) is not None
    assert getattr(calibrant, name) is getattr(calibrant, name)


@pytest.mark.parametrize("name", [n for n in calibrant.__all__ if n not in DATA])
def test_every_public_name_is_explained(name):
    thing = getattr(calibrant, name)
    assert thing.__name__ == name
    text = inspect.getdoc(thing) or ""
    assert len(text.splitlines()[0]) > 20
    assert text.splitlines()[0].endswith((".", "?"))
    assert not text.startswith(f"{name}(")  # what a class says of itself if nobody wrote it


@pytest.mark.parametrize("name", [n for n in calibrant.__all__ if n not in DATA | RECORDS])
def test_every_public_function_has_an_example(name):
    text = inspect.getdoc(getattr(calibrant, name)) or ""
    examples = doctest.DocTestParser().get_examples(text)
    assert any(name in example.source for example in examples)


@pytest.mark.parametrize("name", [n for n in calibrant.__all__ if n not in DATA | RECORDS])
def test_every_public_function_is_typed(name):
    thing = getattr(calibrant, name)
    signature = inspect.signature(thing)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
    if inspect.isfunction(thing):
        assert signature.return_annotation is not inspect.Signature.empty


def test_every_metric_of_the_table_has_a_function_of_its_name():
    assert set(calibrant.METRICS) <= set(calibrant.__all__)


def test_the_names_that_type_checkers_see_are_those_that_resolve():
    seen: dict[str, str] = {}
    for node in ast.walk(source()):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for imported in node.body:
                assert isinstance(imported, ast.ImportFrom)
                assert imported.module is not None
                for alias in imported.names:
                    assert alias.asname == alias.name  # which makes it a public name
                    seen[alias.name] = imported.module.removeprefix("calibrant.")
    assert seen == calibrant._MODULE
    assert sorted(seen) == calibrant.__all__


def test_every_name_is_listed_once_and_under_the_module_that_defines_it():
    names = [name for names in calibrant._WHERE.values() for name in names]
    assert len(names) == len(set(names))
    for module, names in calibrant._WHERE.items():
        assert names == sorted(names)
        for name in names:
            home = getattr(getattr(calibrant, name), "__module__", None)
            assert name in DATA or (home or "").startswith(f"calibrant.{module}")


def test_dir_lists_the_public_names():
    assert set(dir(calibrant)) == {*calibrant.__all__, "__version__", *calibrant._SUBMODULES}


@pytest.mark.parametrize("name", calibrant._SUBMODULES)
def test_submodules_come_when_they_are_called(name):
    assert getattr(calibrant, name).__name__ == f"calibrant.{name}"


def test_an_unknown_name_is_an_attribute_error_that_names_it():
    with pytest.raises(AttributeError, match="module 'calibrant' has no attribute 'eec'"):
        calibrant.eec  # noqa: B018
    assert not hasattr(calibrant, "_nothing")


def test_the_version_is_that_of_the_installed_package():
    assert calibrant.__version__ == version("calibrant")


def test_a_source_tree_that_is_not_installed_saves_all_the_same(tmp_path):
    code = (
        "import importlib.metadata as m, calibrant as cal\n"
        "def missing(name):\n    raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        "cal.save(cal.TemperatureScaling().fit([[2.0, 0.0]] * 4, [0, 0, 0, 1]), 'ts.json')\n"
        "print(cal.__version__, bool(cal.load('ts.json').temperature_ > 0))\n"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.split() == ["unknown", "True"]


def test_a_star_import_brings_the_public_names_and_nothing_else():
    space: dict[str, object] = {}
    exec("from calibrant import *", space)
    assert set(space) - {"__builtins__"} == set(calibrant.__all__)


LAZY = """
import sys, calibrant
assert "torch" not in sys.modules and "numpy" not in sys.modules
calibrant.METRICS
assert "torch" in sys.modules
assert not {"matplotlib", "pyarrow", "sklearn"} & set(sys.modules)
"""


def test_names_are_imported_when_they_are_first_used():
    subprocess.run([sys.executable, "-c", LAZY], check=True, timeout=120)
