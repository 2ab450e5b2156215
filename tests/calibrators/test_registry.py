"""The registry: discovery, order, aliases, errors, and what is made from it."""

import sys
from pathlib import Path

import numpy as np
import pytest

from calibrant import calibrators
from calibrant.calibrators import registry
from calibrant.calibrators.base import Calibrator
from calibrant.calibrators.registry import CALIBRATORS, PARTS, TAG_CALIBRATORS, make_calibrator
from calibrant.calibrators.scaling import TemperatureScaling

NAMES = (
    "none ts ets vector matrix dirichlet cts pts smart sigmoid beta spline histogram "
    "bbq scaling_binning histogram_ovr isotonic isotonic_ovr gc procal fc maccal auto"
)


def test_names_come_in_the_order_of_the_families():
    assert [name for name in CALIBRATORS if name in NAMES.split()] == NAMES.split()
    assert all(kind.name == name for name, kind in CALIBRATORS.items())
    assert all(kind.summary for kind in CALIBRATORS.values())


def test_a_class_in_a_new_module_is_found_and_comes_before_auto(tmp_path, monkeypatch):
    (tmp_path / "toy.py").write_text(
        "from calibrant.calibrators.scaling import Identity\n"
        "class Toy(Identity):\n    name = 'toy'\n"
        "class Helper(Identity):\n    pass\n"
    )
    monkeypatch.setattr(calibrators, "__path__", [*calibrators.__path__, str(tmp_path)])
    found = [kind.name for kind in registry._calibrators()]
    monkeypatch.delitem(sys.modules, "calibrant.calibrators.toy")
    assert [name for name in found if name not in PARTS] == [*list(CALIBRATORS)[:-1], "toy", "auto"]


def test_classes_can_be_imported_from_the_package():
    kinds: list[type[Calibrator]] = [Calibrator, *CALIBRATORS.values(), *PARTS.values()]
    for kind in kinds:
        assert getattr(calibrators, kind.__name__) is kind
        assert kind.__name__ in dir(calibrators)
    assert set(calibrators.__all__) == set(dir(calibrators))
    with pytest.raises(
        AttributeError, match="'TemperatureScalling': did you mean TemperatureScaling"
    ):
        _ = calibrators.TemperatureScalling


@pytest.mark.parametrize(
    ("alias", "name"),
    [
        ("temperature", "ts"),
        ("Temperature-Scaling", "ts"),
        ("platt", "sigmoid"),
        ("Venn-Abers", "venn_abers"),
        ("ivap", "venn_abers"),
        ("TS", "ts"),
        ("histogram_ovr", "histogram_ovr"),
    ],
)
def test_aliases_are_understood(alias, name):
    assert CALIBRATORS.name(alias) == name
    assert type(make_calibrator(alias)) is CALIBRATORS[name]


def test_no_alias_is_the_name_of_another_method():
    assert not set(CALIBRATORS.aliases) & set(CALIBRATORS)
    assert len(CALIBRATORS.aliases) == sum(len(kind.aliases) for kind in CALIBRATORS.values())


def test_unknown_names_and_options_are_answered_with_what_there_is():
    with pytest.raises(ValueError, match=r"unknown method 'tss': did you mean ts\? choose from no"):
        make_calibrator("tss")
    with pytest.raises(ValueError, match="ts has no option 'loss': its options are objective"):
        make_calibrator("ts", {"loss": "nll"})
    with pytest.raises(ValueError, match="vector has no option 'bins': it has none"):
        make_calibrator("vector", {"bins": 3})
    with pytest.raises(TypeError, match="options go with the name of a method, got bins beside a"):
        make_calibrator(TemperatureScaling(), {"bins": 3})


def test_descriptions_say_what_was_learned():
    rng = np.random.default_rng(0)
    logits = 2 * rng.normal(size=(400, 3))
    labels = (logits / 2 + rng.gumbel(size=logits.shape)).argmax(-1)
    fitted = TemperatureScaling().fit(logits, labels)
    value = float(fitted.temperature_)
    assert fitted.describe() == (
        f"TemperatureScaling for 3 classes: 1 parameter, temperature {value:.4g}"
    )
    assert fitted.learned() == {"temperature": value}
    cts = make_calibrator("cts").fit(logits, labels)
    assert "3 parameters, temperatures from" in cts.describe()
    beta = make_calibrator("beta").fit(logits, labels)
    assert beta.describe() == "BetaCalibration for 3 classes: 3 parameters"
    assert set(beta.learned()) == {"line", "temperature", "rest_temperature"}
    assert TemperatureScaling().describe() == "TemperatureScaling, not fitted"


def test_the_documentation_lists_every_method(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "docs"))
    import generate  # type: ignore[import-not-found]

    methods, properties = (
        [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()[2:]]
        for text in (generate.methods(), generate.properties())
    )
    assert [row[0].strip("`") for row in methods] == list(CALIBRATORS)
    rows = {row[0].strip("`"): row[1:] for row in properties}
    assert rows["isotonic_ovr"] == ["10K + 1", "no", "no", "yes", "whole", ""]
    assert rows["matrix"] == ["K² + K", "no", "no", "no", "whole", ""]
    assert rows["fc"] == ["2", "no", "no", "yes", "whole", "features, head"]
    page = "\n".join(generate.api_pages().values())
    for kind in CALIBRATORS.values():
        assert f"   {kind.__name__}\n" in page


def test_a_calibrator_without_a_size_says_what_is_missing():
    class Sizeless(Calibrator):
        pass

    message = r"Sizeless must set parameter_count or define size\(classes\)"
    with pytest.raises(NotImplementedError, match=message):
        Sizeless().size(3)
    assert make_calibrator("none").size(3) == 0


@pytest.mark.parametrize("kind", [*CALIBRATORS.values(), *TAG_CALIBRATORS.values()])
def test_at_most_four_classes_stand_above_a_method(kind):
    above = [c for c in kind.__mro__[1:] if c.__module__.startswith("calibrant.")]
    assert len(above) <= 4, above
