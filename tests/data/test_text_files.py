"""CSV: the same rows as the csv module and pandas, flat memory, and errors that name the line."""

import csv
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from calibrant import evaluate
from calibrant.data import open_dataset, save_predictions
from calibrant.data.text_files import MAX_LINE_LENGTH, _CsvTable


def written(folder, text, name="a.csv"):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


FLOATS = st.floats(allow_nan=False, width=64) | st.sampled_from([0.0, -0.0, -np.inf, 1e-320, 1e300])
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=6)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(FLOATS, FLOATS, TEXTS), min_size=1, max_size=9),
    delimiter=st.sampled_from(",;\t"),
    quoting=st.sampled_from([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC]),
    chunk=st.integers(1, 10),
)
def test_what_the_csv_module_writes_is_read(tmp_path_factory, rows, delimiter, quoting, chunk):
    path = tmp_path_factory.mktemp("csv") / "a.csv"
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream, delimiter=delimiter, quoting=quoting)
        writer.writerow(["logit_a", "logit_b", "note"])
        writer.writerows(rows)
    table = _CsvTable(str(path))
    batches = [batch.columns for batch in table.batches(["logit_b", "note", "logit_a"], chunk)]
    for column, key in zip(zip(*rows, strict=True), ("logit_a", "logit_b", "note"), strict=True):
        values = np.concatenate([batch[key] for batch in batches])
        if key == "note":
            assert values.tolist() == [text.strip() for text in column]
        else:
            np.testing.assert_array_equal(values, np.array(column))
    assert table.headers["note"].shape == (len(rows),)


HEADER = "label,p_0,p_1\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEADER + "0,1,0\n0,1", "line 3: 2 fields, but the first line has 3; .* is incomplete"),
        (
            HEADER + "0,1,0,5\n0,1,0\n",
            "line 2: 4 fields, but the first line has 3; .* a decimal point",
        ),
        (HEADER + "0,1,0,\n", "line 2: 4 fields"),
        (HEADER + "0,0,5,0,5\n", "line 2: 5 fields.* a decimal point"),
        ("label;p_0;p_1\n0;0,5;0,5\n", "line 2: p_0 must be a number, got '0,5'; write a decimal"),
        (HEADER + "0,1,0\n\n0,,1\n", "line 4: p_0 must be a number, got '': drop rows"),
        (HEADER + "0,1,nan\n", "line 2: p_1 must be a number, got 'nan': drop"),
        (HEADER + "0,1,NA\n", "line 2: p_1 must be a number, got 'NA': drop"),
        (HEADER + "0,1,x\n", "line 2: p_1 must be a number, got 'x'$"),
        (HEADER + "0,1_0,1\n", "line 2: p_0 must be a number, got '1_0'"),
        (HEADER + "0,1,0\n1,x,0\n1,0,y\n", "line 3: p_0 must be a number, got 'x'"),
        (HEADER + ",1,0\n", "line 2: label is missing"),
        (HEADER + "2,1,0\n", "line 2: label is 2, but the classes are 0, 1"),
        (HEADER + '0,1,0\n"0,1,0\n0,1,0\n', "line 4: unexpected end of data; close every quote"),
        (HEADER + '0,"1"x,0\n', "line 2: .* close every quote"),
        (HEADER + f'0,"{"1" * 200_000}",0\n', "line 2: field larger than field limit"),
        (HEADER + "0,1\0,0\n", "line 2: a NUL character"),
        (HEADER.encode("utf-16"), "line 1: .*UTF-8"),
        (HEADER.encode() + b"0,1,0\n\xe9,1,0\n", "line 3: no UTF-8"),
        ("label,p_0,p_1,p_1\n", "line 1: two columns are called 'p_1'"),
        ("0,0.1,0.9\n1,0.2,0.8\n", "first line names 0, 0.1, 0.9: name the columns"),
        ("score_0,score_1,label\n", "first line names score_0, score_1, label"),
        ("", "first line names nothing"),
    ],
)
def test_malformed_files_name_the_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=rf"(?s)a\.csv.* {message}"):
        evaluate(written(tmp_path, text))


def test_a_file_without_rows_has_nothing_to_measure(tmp_path):
    with pytest.raises(ValueError, match=r"no examples \(empty arrays, or a file with only a head"):
        evaluate(written(tmp_path, HEADER))


def test_quoted_line_breaks_blank_lines_and_spaces(tmp_path):
    text = '\ufefflabel, p_0 ,p_1,note\r\n\r\n 0 , 0.25 ,0.75,"a\nb"\n1,1e-1,.9,"say ""hi"""\n\n'
    split = open_dataset(written(tmp_path, text)).split()
    np.testing.assert_array_equal(split.read("probs"), [[0.25, 0.75], [0.1, 0.9]])
    assert split.read("labels").tolist() == [0, 1]
    assert split.read("note").tolist() == ["a\nb", 'say "hi"']


def test_a_line_without_end_is_not_held_in_memory(tmp_path):
    path = tmp_path / "a.csv"
    with path.open("wb") as stream:
        stream.write(HEADER.encode())
        stream.truncate(1 << 32)  # sparse: four gigabytes of NUL
    with pytest.raises(ValueError, match=r"line 2: longer than 16,777,216 characters"):
        open_dataset(path)
    assert MAX_LINE_LENGTH == 1 << 24


def test_memory_does_not_grow_with_the_file(tmp_path):
    row = "1," + ",".join(f"{i / 7:.15f}" for i in range(50)) + "\n"
    header = "label," + ",".join(f"logit_{i}" for i in range(50)) + "\n"
    peaks = []
    for rows in (500, 5000):
        split = open_dataset(written(tmp_path, header + row * rows, f"{rows}.csv")).split()
        tracemalloc.start()
        for chunk in split.shards[0].column("logits").chunks(100):
            assert chunk.shape == (100, 50)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.2 * peaks[0]


def test_a_file_that_is_replaced_is_detected(tmp_path):
    path = written(tmp_path, HEADER + "0,0.5,0.5\n" * 3)
    split = open_dataset(path).split()
    written(tmp_path, HEADER + "1,0.25,0.75\n" * 4, "b.csv").replace(path)
    with pytest.raises(ValueError, match="was replaced or rewritten while it was read"):
        split.read("probs")


def test_written_files_read_back(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "val_probs": rng.uniform(size=(7, 3)).astype(np.float32),
        "val_labels": np.array([0, 1, 2, -100, 1, 0, 2]),
        "val_note": np.array(["a,b", 'c"d', "e\nf", "", "é", "g;", "h"]),
        "test_probs": rng.uniform(size=(4, 3)).astype(np.float32),
        "test_labels": np.arange(4) % 3,
        "test_note": np.array(list("abcd")),
        "class_names": np.array(["x", "y,z", "u_v"]),
    }
    save_predictions(tmp_path / "a.csv", arrays)
    dataset = open_dataset(tmp_path / "a.csv")
    assert dataset.class_names == arrays["class_names"].tolist()
    for name in ("val", "test"):
        for column in ("probs", "labels", "note"):
            values = dataset.split(name).read(column)
            np.testing.assert_array_equal(
                values.astype(np.float32) if column == "probs" else values,
                arrays[f"{name}_{column}"],
            )
