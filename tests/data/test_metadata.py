"""Metadata as codes: cuts, categories, dates, missing values, and conditions in words."""

import numpy as np
import pandas as pd
import pytest

from calibrant.data.metadata import (
    Condition,
    MetadataColumn,
    as_metadata,
    conjunction_text,
    learn_column,
)


def learned(*arguments, **options) -> MetadataColumn:
    column = learn_column(*arguments, **options)
    assert column is not None
    return column


def codes_of(column, values):
    return column.codes(column.numbers(np.asarray(values))).tolist()


def test_numbers_are_cut_into_bins_of_about_equal_size(rng):
    values = rng.lognormal(10, 1, 8000)
    column = learned("income", values)
    counts = np.bincount(column.codes(column.numbers(values)), minlength=column.size)
    assert column.kind == "number"
    assert counts[-1] == 0  # nothing is missing
    assert 700 < counts[:-1].min() <= counts[:-1].max() < 1300
    assert all(len(f"{cut:g}") <= 5 for cut in column.cuts)  # round numbers


@pytest.mark.parametrize(
    ("values", "cuts"),
    [
        (np.arange(20, 60), (25, 30, 35, 40, 45, 50, 55)),
        (np.linspace(-1, 1, 400) * 1e-5, (-7e-06, -5e-06, -2e-06, 0, 2e-06, 5e-06, 8e-06)),
        ([str(x) for x in range(100)], (12, 25, 37, 50, 62, 75, 87)),  # as CSV files have them
        (np.r_[np.zeros(5000), np.arange(1, 17)], (3, 5, 7, 9, 11, 13, 15)),
        ([*range(2010, 2026)], (2012, 2014, 2016, 2018, 2020, 2022, 2024)),
    ],
)
def test_cuts_are_round(values, cuts):
    column = learned("x", np.asarray(values))
    np.testing.assert_allclose(column.cuts, cuts, atol=1.01 * np.diff(cuts).min() / 2)
    assert not any(str(cut) == "-0.0" for cut in column.cuts)


def test_a_cut_belongs_to_the_bin_above():
    column = MetadataColumn("age", "number", cuts=(30.0, 40.0))
    assert codes_of(column, [29.9, 30.0, 39.9, 40.0, np.inf, -np.inf, np.nan]) == [
        *(0, 1, 1, 2, 2, 0, 3)
    ]
    assert [column.text(c.low, c.high) for c in column.conditions(0, between=True)] == [
        *("age < 30", "age < 40", "30 <= age < 40", "age >= 30", "age >= 40", "age is missing")
    ]


def test_categories_rare_and_missing_values():
    values = ["B"] * 50 + ["A"] * 30 + ["rare"] * 2 + ["", "NaN", "None"]
    column = learned("site", np.array(values, dtype=object), fewest=5)
    assert column.values == ("A", "B")
    assert codes_of(column, ["A", "B", "rare", "never seen", "nan", ""]) == [0, 1, 2, 2, 3, 3]
    assert learned("site", np.array(values), fewest=5, most=1).values == ("B",)
    assert learn_column("id", np.array([f"u{i}" for i in range(100)]), fewest=2) is None
    assert learn_column("constant", np.ones(10)) is None
    assert learn_column("nothing", np.full(10, np.nan)) is None


def test_few_numbers_booleans_and_missing_alone_are_categories():
    assert learned("grade", np.array([3.0, 1.0, 2.0, np.nan])).values == ("1", "2", "3")
    assert learned("flag", np.array([True, False])).values == ("False", "True")
    column = learned("seen", np.array(["yes", None, "yes"], dtype=object))
    assert codes_of(column, ["yes", "None"]) == [0, 2]


def test_dates():
    days = np.arange("2020-01-01", "2022-01-01", dtype="datetime64[D]")
    column = learned("day", days)
    assert column.text(0, 1) == "day < 2020-04-02"
    assert codes_of(column, np.array(["2019-05-05", "NaT", "2021-12-31"], "datetime64[ns]")) == [
        *(0, column.size - 1, column.size - 2)
    ]


def test_conditions_on_one_column_are_joined():
    age = MetadataColumn("age", "number", cuts=(30.0, 40.0))
    site = MetadataColumn("site", "category", values=("A", "B"))
    conditions = [Condition(0, 1, 3), Condition(1, 0, 1), Condition(0, 0, 2)]
    assert conjunction_text([age, site], conditions) == "30 <= age < 40 and site = A"
    assert conjunction_text([age, site], []) == "all examples"
    assert conjunction_text([age, site], [Condition(1, 3, 4)]) == "site is missing"


def test_a_column_survives_json():
    for column in (
        MetadataColumn("age", "number", cuts=(30.0,)),
        MetadataColumn("site", "category", values=("A",)),
    ):
        assert MetadataColumn.from_config(column.config()) == column


def test_metadata_of_frames_mappings_and_arrays():
    frame = pd.DataFrame({"age": [1, 2], "site": ["a", "b"]})
    assert list(as_metadata(frame)) == ["age", "site"]
    assert as_metadata({"age": [1, 2]})["age"].tolist() == [1, 2]
    assert as_metadata(np.eye(2))["column 1"].tolist() == [0, 1]
    with pytest.raises(ValueError, match=r"one value per example.*age of shape \(2, 2\)"):
        as_metadata({"age": np.eye(2)})
