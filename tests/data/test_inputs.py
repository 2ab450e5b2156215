"""Inputs of models are opened as they are: no rule for predictions applies to their columns."""

import numpy as np
import pytest

from calibrant.data.files import open_inputs
from calibrant.data.shards import read_all


def test_columns_of_a_table_are_text_whatever_they_are_called(tmp_path):
    """Names that are ambiguous in a prediction file are nothing special."""
    (tmp_path / "a.csv").write_text('text,prob_a,p_b,label,y\n"one, two",0.5,x,1,2\nthree,1,,0,3\n')
    (columns,) = open_inputs(tmp_path / "a.csv").files
    assert list(columns) == ["text", "prob_a", "p_b", "label", "y"]
    assert read_all([columns["text"]]).tolist() == ["one, two", "three"]
    assert [chunk.tolist() for chunk in columns["y"].chunks(1)] == [["2"], ["3"]]


def test_types_of_json_lines(tmp_path):
    lines = [
        '{"i": 1, "f": 1, "b": true, "t": "\u00e9", "mixed": 1, "some": 0, "l": [1], "big": 1}',
        "",
        f'{{"i": -2, "f": 0.5, "b": false, "t": "", "mixed": "x", "l": [2, 3], "big": {1 << 63}}}',
    ]
    (tmp_path / "a.jsonl").write_text("\ufeff" + "\n".join(lines), encoding="utf-8")
    (columns,) = open_inputs(tmp_path / "a.jsonl").files
    exact = {key: read_all([c]).tolist() for key, c in columns.items() if c.exact}
    assert exact == {"i": [1, -2], "f": [1.0, 0.5], "b": [True, False], "t": ["\u00e9", ""]}
    assert {columns[key].dtype.kind for key in "ib"} == {"i", "b"}
    assert [key for key, column in columns.items() if not column.exact] == [
        "mixed",
        "some",
        "l",
        "big",
    ]
    (tmp_path / "a.jsonl").write_bytes(b'{"t": "a"}\n{"t": "\xe9"}')
    with pytest.raises(ValueError, match="line 2: no UTF-8"):
        open_inputs(tmp_path / "a.jsonl")


def test_numpy_files(tmp_path):
    for i in range(2):
        np.save(tmp_path / f"{i}_inputs.npy", np.full((3, 2), i))
        np.save(tmp_path / f"{i}_labels.npy", np.zeros(3))
    for place in (tmp_path, tmp_path / "*.npy"):
        files = open_inputs(place).files
        assert [sorted(columns) for columns in files] == [["inputs", "labels"]] * 2
        assert [read_all([columns["inputs"]]).max() for columns in files] == [0, 1]
    assert list(open_inputs(tmp_path / "1_inputs.npy").files[0]) == ["1_inputs"]


def test_a_name_of_a_split_changes_no_column(tmp_path):
    np.savez(tmp_path / "val.npz", features=np.zeros((2, 3)), labels=np.zeros(2))
    np.savez(tmp_path / "test.npz", features=np.zeros((2, 3)), labels=np.zeros(2))
    assert [sorted(f) for f in open_inputs(tmp_path).files] == [["features", "labels"]] * 2


def test_other_files_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("good")
    with pytest.raises(ValueError, match=r"a\.txt holds no inputs: the suffix must be one of"):
        open_inputs(tmp_path / "a.txt")
    with pytest.raises(FileNotFoundError):
        open_inputs(tmp_path / "b.npz")
