"""The tables of the documentation are those that the rows of the studies give."""

import csv
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DATA = ROOT / "docs" / "data"


@pytest.fixture(scope="module")
def tables():
    folder = ROOT / "benchmarks" / "studies"
    scripts = (folder / f"{name}.py" for name in ("tables", "maccal", "answers"))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        found = [runpy.run_path(str(script))["tables"](DATA) for script in scripts]
    return {name: table for part in found for name, table in part.items()}


def test_every_table_is_up_to_date(tables):
    assert {path.stem for path in DATA.glob("table_*.csv")} == set(tables)
    for name, rows in tables.items():
        with (DATA / f"{name}.csv").open(newline="") as file:
            assert [tuple(row) for row in csv.reader(file)] == [tuple(row) for row in rows]


def test_auto_is_as_calibrated_as_smart_and_as_likely_as_temperature_scaling(tables):
    headings, *rows = tables["table_methods"]
    found = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
    for splits in ("", ", five splits"):
        ece = {
            method: float(row[f"ECE %{splits}"])
            for method, row in found.items()
            if row[f"ECE %{splits}"] != "\N{EN DASH}"
        }
        nll = {
            method: float(row[f"NLL{splits}"])
            for method, row in found.items()
            if row[f"NLL{splits}"] != "\N{EN DASH}"
        }
        assert ece["auto"] <= ece["smart"] <= ece["ts"]
        assert nll["auto"] <= nll["ts"]


def test_the_claims_of_the_page_about_maccal_are_those_of_its_tables(tables):
    for name in ("table_maccal_rivals", "table_maccal_resnet50"):
        headings, *rows = tables[name]
        found = {row[0]: dict(zip(headings, row, strict=True)) for row in rows}
        ece = {head: float(row["ECE %"].split("±")[0]) for head, row in found.items()}
        nll = {head: float(row["NLL, ts"].split("±")[0]) for head, row in found.items()}
        assert ece["maccal, held out"] < 1 < 3 < ece["original"]
        assert float(found["original"]["ECE %, ts"].split("±")[0]) < ece["maccal, held out"]
        assert nll["original"] == min(nll.values())


def test_the_claims_about_a_network_trained_with_mixup(tables):
    headings, *rows = tables["table_maccal_mixup"]
    mean = {
        row[0]: {h: float(x.split("±")[0]) for h, x in zip(headings[1:9], row[1:9], strict=True)}
        for row in rows
    }
    ours, old, plain = (mean[name] for name in ("maccal, held out", "original", "plain"))
    assert ours["ECE %"] < old["ECE %, ts"] < plain["ECE %"] < old["ECE %"]
    assert plain["NLL, ts"] < ours["NLL"] < old["NLL, ts"]
    assert mean["dropout"]["ECE %, ts"] < plain["ECE %, ts"] < ours["ECE %"]
    assert mean["maccal, slice"]["ECE %"] > ours["ECE %"]
