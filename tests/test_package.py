"""The public names: few, explained, typed, and imported when they are first used."""

import ast
import doctest
import inspect
import math
import pkgutil
import re
import runpy
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from typing_extensions import assert_type

import calibrant
from calibrant._core.checks import FloatArray
from calibrant.decide import Threshold, shift_prior
from tests.support.thresholds import error_threshold

TABLES = {"CALIBRATORS", "LOSSES", "METRICS", "TAG_CALIBRATORS"}
"""Public names that are neither functions nor classes."""

NAMES = [name for name in calibrant.__all__ if name not in TABLES]
PACKAGES = ["calibrators", "data", "decide", "deploy", "llm", "losses", "metrics", "show"]


@pytest.mark.parametrize("name", calibrant.__all__)
def test_every_public_name_resolves(name):
    assert getattr(calibrant, name) is getattr(calibrant, name) is not None


def test_there_are_few_public_names():
    assert len(calibrant.__all__) <= 50


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_explained_and_typed(name):
    thing = getattr(calibrant, name)
    assert thing.__name__ == name
    text = inspect.getdoc(thing) or ""
    assert len(text.splitlines()[0]) > 20
    assert text.splitlines()[0].endswith((".", "?"))
    assert not text.startswith(f"{name}(")  # what a class says of itself if nobody wrote it
    if name != "Calibrator":  # a base class
        examples = doctest.DocTestParser().get_examples(text)
        assert any(name in example.source for example in examples)
    signature = inspect.signature(thing)
    for parameter in signature.parameters.values():
        assert parameter.annotation is not inspect.Parameter.empty, parameter
    if inspect.isfunction(thing):
        assert signature.return_annotation is not inspect.Signature.empty


def test_the_list_of_names_is_what_type_checkers_import():
    """Each as ``a as a``, which makes it public to them, and once."""
    assert calibrant.__file__ is not None
    listed = ast.parse(Path(calibrant.__file__).with_name("_api.py").read_text()).body[1:]
    names = []
    for node in listed:
        assert isinstance(node, ast.ImportFrom)
        assert all(alias.asname == alias.name for alias in node.names)
        names += [alias.name for alias in node.names]
    assert sorted(names) == calibrant.__all__
    for name in names:
        assert getattr(import_module("calibrant._api"), name) is getattr(calibrant, name)


def test_the_packages_are_those_that_type_checkers_import():
    """They see no ``__getattr__``, so that an unknown name is an error."""
    known = ast.parse(inspect.getsource(calibrant))
    imported = [node for node in ast.walk(known) if isinstance(node, ast.ImportFrom)]
    names = {alias.name for node in imported if node.module == "calibrant" for alias in node.names}
    modules = {module.name for module in pkgutil.iter_modules(calibrant.__path__)}
    assert names == {name for name in modules if not name.startswith("_")} - {"cli"}


def test_type_checkers_know_the_public_names():
    """They check this line: a name that they do not find would be Any."""
    value = assert_type(calibrant.ece([[1.0, 0.0]], [0]), float)
    assert value == pytest.approx(1 - 1 / (1 + math.exp(-1)))


def test_type_checkers_know_the_form_of_results(tmp_path):
    """They check these lines: a tensor for a tensor, an array for an array, the class loaded."""
    priors: Any = {"old_prior": [0.5, 0.5], "new_prior": [0.2, 0.8]}
    tensor = assert_type(shift_prior(torch.zeros(1, 2), **priors), torch.Tensor)
    array = assert_type(shift_prior(probs=np.full((1, 2), 0.5), **priors), FloatArray)
    np.testing.assert_allclose(tensor, array, rtol=1e-6)
    calibrant.save(error_threshold(0.9, 0.5, 0.1, 0.2, 10, 0.25, 0.95), tmp_path / "threshold.json")
    again = assert_type(calibrant.load(tmp_path / "threshold.json", Threshold), Threshold)
    assert again.threshold == 0.9


def test_dir_lists_the_public_names_and_packages():
    assert set(dir(calibrant)) > {*calibrant.__all__, "__version__", *PACKAGES}


@pytest.mark.parametrize("name", PACKAGES)
def test_packages_are_attributes(name):
    assert getattr(calibrant, name).__name__ == f"calibrant.{name}"


def test_an_unknown_name_is_an_attribute_error_with_the_nearest_one():
    with pytest.raises(AttributeError, match="no attribute 'evalute': did you mean evaluate"):
        calibrant.evalute  # type: ignore[attr-defined] # noqa: B018
    assert not hasattr(calibrant, "_nothing")


def test_the_version_is_that_of_the_build(monkeypatch):
    """That builds write it, from the tag, is seen by tests/release/check.py."""
    monkeypatch.setitem(sys.modules, "calibrant._version", SimpleNamespace(version="1.2.3"))
    assert calibrant.__version__ == "1.2.3"


def test_a_checkout_that_was_never_installed_saves_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "calibrant._version", None)  # as if it were not there
    assert calibrant.__version__ == "unknown"
    calibrant.save(error_threshold(0.9, 0.5, 0.1, 0.2, 10, 0.25, 0.95), tmp_path / "threshold.json")
    assert calibrant.load(tmp_path / "threshold.json").threshold == 0.9


def test_a_star_import_brings_the_public_names_and_nothing_else():
    space: dict[str, object] = {}
    exec("from calibrant import *", space)
    assert set(space) - {"__builtins__"} == set(calibrant.__all__)


LAZY = """
import sys, calibrant
assert "torch" not in sys.modules and "numpy" not in sys.modules
calibrant.METRICS
assert "torch" in sys.modules
assert not {"matplotlib", "pyarrow", "sklearn", "calibrant.llm"} & set(sys.modules)
"""


def test_names_are_imported_when_they_are_first_used():
    subprocess.run([sys.executable, "-c", LAZY], check=True, timeout=120)


@pytest.mark.parametrize("home", ["", "https://example.org/calibrant"])
def test_the_package_page_has_no_link_that_leads_nowhere(home):
    root = Path(__file__).parents[1]
    namespace = runpy.run_path(str(root / "hatch_build.py"))
    text = (root / "README.md").read_text("utf-8")
    page = namespace["readme"](text, home)
    targets = re.findall(r"\]\(([^)]+)\)", page)
    paths = [target.split("/main/")[-1].partition("#")[0] for target in targets]
    assert len(targets) == (text.count("](") if home else 0)
    assert all(
        target.startswith(home) and (root / path).exists()
        for target, path in zip(targets, paths, strict=True)
    )
    assert "New to calibration?" in page
