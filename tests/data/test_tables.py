"""Tables: the rules for columns, in CSV and parquet files and in frames."""

from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.data import open_dataset, save_predictions
from calibrant.data.tables import _table_of, layout_of

pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")
pytest.importorskip("pyarrow")

NAMES = np.array(["cat", "dog", "cow"])


@pytest.mark.parametrize(
    ("columns", "scores", "names", "labels", "others"),
    [
        ("y_true p_0 p_1", {"probs": "p_0 p_1"}, "0 1", "y_true", ""),
        ("label prob", {"probs": "prob"}, "", "label", ""),
        ("target prob_spam id", {"probs": "prob_spam"}, "", "target", "id"),
        ("logit_cat logit_dog y", {"logits": "logit_cat logit_dog"}, "cat dog", "y", ""),
        ("p_10 p_9 p_2", {"probs": "p_2 p_9 p_10"}, "2 9 10", None, ""),
        ("Label Logits_1 Logits_0", {"logits": "Logits_0 Logits_1"}, "0 1", "Label", ""),
        ("log_prob_a log_prob_b", {"logits": "log_prob_a log_prob_b"}, "a b", None, ""),
        ("proba_x_y proba_z", {"probs": "proba_x_y proba_z"}, "x_y z", None, ""),
        (
            "prob_b logit_a prob_a logit_b",
            {"logits": "logit_a logit_b", "probs": "prob_a prob_b"},
            *("a b", None, ""),
        ),
        ("price score_0 score_1 label", {}, "", "label", "price score_0 score_1"),
    ],
)
def test_rules(columns, scores, names, labels, others):
    layout = layout_of(columns.split(), "here")
    assert layout.scores == {key: value.split() for key, value in scores.items()}
    assert layout.names == names.split()
    assert (layout.labels, layout.others) == (labels, others.split())


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        (
            "label y p_0 p_1",
            "label and y, which do not go together: .*, or say which columns count",
        ),
        ("p_0 p_1 p_value", "columns p_0 and p_value"),
        ("p_0 p_1 prob_0", "columns p_0 and prob_0"),
        ("prob prob_a prob_b", "columns prob and prob_a"),
        ("p_1 p_01", "columns p_1 and p_01"),
        ("p_0 label", "one column alone must be that of class 1"),
        ("logit_a logit_b prob_a prob_c", "classes a, b and probabilities of a, c"),
        ("p_0 p_1 model_probs", "column model_probs beside p_0: rename"),
        ("p_0 p_1 split SPLIT", "columns split and SPLIT"),
        ("p_0 p_1 feature_0 feature_00", "columns feature_0 and feature_00"),
    ],
)
def test_no_guessing(columns, message):
    with pytest.raises(ValueError, match=message):
        layout_of(columns.split(), "here")


@pytest.mark.parametrize(
    ("columns", "further", "others"),
    [
        ("label_b p_a label_a p_b", {"labels": "label_a label_b"}, ""),
        ("Labels_1 logit_0 labels_0 logit_1", {"labels": "labels_0 Labels_1"}, ""),
        ("p_a p_b label_a", {}, "label_a"),  # not of every tag
        ("p_a p_b label label_a label_b", {}, "label_a label_b"),  # further columns
        ("p_a p_b feature_1 features_0", {"features": "features_0 feature_1"}, ""),
        ("p_a p_b feature_1 feature_2", {}, "feature_1 feature_2"),  # 0 is missing
        ("p_a p_b feature_age", {}, "feature_age"),
    ],
)
def test_rules_for_tags_and_features(columns, further, others):
    layout = layout_of(columns.split(), "here")
    assert layout.further == {key: value.split() for key, value in further.items()}
    assert layout.others == others.split()


def table(rows=200, seed=0):
    """A frame as people have them, and the arrays of each split by a definition of their own."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(rows, 3))
    labels, split = rng.integers(3, size=rows), rng.choice(["train", "val", "test"], size=rows)
    group = rng.choice(["de", 'f"r', "a,b", " x"], size=rows)
    frame = pd.DataFrame({"split": split, "logit_cat": logits[:, 0], "label": NAMES[labels]})
    frame = frame.assign(logit_dog=logits[:, 1], group=group, logit_cow=logits[:, 2])
    arrays: dict[str, Any] = {}
    for name in ("train", "val", "test"):
        kept = [i for i in range(rows) if split[i] == name]
        arrays |= {f"{name}_logits": logits[kept], f"{name}_labels": labels[kept]}
        arrays[f"{name}_group"] = group[kept]
    return frame, arrays


def forms(folder, frame):
    """The same table in every form."""
    frame.to_csv(folder / "a.csv")  # with its index
    frame.to_csv(folder / "b.csv", sep=";", index=False, encoding="utf-8-sig")
    frame.to_csv(folder / "c.csv", sep="\t", index=False, quoting=1, lineterminator="\r\n")
    frame.to_parquet(folder / "d.parquet", row_group_size=37)
    yield from (folder / name for name in ("a.csv", "b.csv", "c.csv", "d.parquet"))
    yield frame
    yield pl.DataFrame({name: frame[name].tolist() for name in frame.columns})


def test_every_form_has_the_same_arrays(tmp_path):
    frame, arrays = table()
    for data in forms(tmp_path, frame):
        dataset = cal.data.as_dataset(data)
        assert dataset.class_names == list(NAMES)
        assert set(dataset.splits) == {"train", "val", "test"}
        for name in dataset.splits:
            split = dataset.split(name)
            for column in ("logits", "labels", "group"):
                expected = arrays[f"{name}_{column}"]
                if column == "group" and str(data).endswith(".csv"):
                    expected = np.char.strip(expected)
                np.testing.assert_array_equal(split.read(column), expected)
                for rows in (1, 7, 1000):
                    chunks = [c for (c,) in split.shards[0].chunks(rows, [column])]
                    assert {len(c) for c in chunks[:-1]} <= {rows}
                    np.testing.assert_array_equal(np.concatenate(chunks), expected)


def test_workflows_take_tables(tmp_path):
    frame, arrays = table()
    expected = cal.evaluate(arrays, by="group", level=None)
    fitted = cal.fit(arrays, method="ts")
    for data in forms(tmp_path, frame):
        evaluation = cal.evaluate(data, by="group", level=None)
        assert evaluation["nll"].value == pytest.approx(expected["nll"].value, rel=1e-12)
        assert {k.strip(): v.n for k, v in evaluation.by.items()} == {
            k.strip(): v.n for k, v in expected.by.items()
        }
        assert cal.fit(data, method="ts").temperature_ == pytest.approx(float(fitted.temperature_))
    by = frame["group"]
    assert cal.evaluate(frame, by=by, sample_weight=pd.Series(np.ones(200)), level=None).n == (
        expected.n
    )
    comparison = cal.compare(frame, methods=["none", "ts"], groups="group", level=None)
    assert comparison.n_fit == len(arrays["val_labels"])


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("names", [None, NAMES])
def test_tables_have_labels_of_tags_and_features(tmp_path, rng, suffix, names):
    logits, features = rng.normal(size=(40, 3)), rng.normal(size=(40, 12))
    labels = rng.choice([0, 1, -100], size=(40, 3))
    arrays = {"logits": logits, "labels": labels, "features": features}
    stored = arrays if names is None else arrays | {"class_names": names}
    save_predictions(tmp_path / f"a{suffix}", stored)
    split = open_dataset(tmp_path / f"a{suffix}").split()
    for key, values in arrays.items():
        np.testing.assert_array_equal(split.read(key), values)
    found = cal.evaluate(tmp_path / f"a{suffix}", estimand="multilabel", level=None)
    assert found == cal.evaluate(logits, labels, estimand="multilabel", level=None)


def test_labels_of_tags_are_zero_or_one(tmp_path):
    (tmp_path / "a.csv").write_text("p_a,p_b,label_a,label_b\n0.2,0.3,0,1\n0.2,0.3,0,0.5\n")
    with pytest.raises(ValueError, match=r"a.csv, line 3: label_b must be 0, 1 or -100 .* got 0.5"):
        cal.evaluate(tmp_path / "a.csv", estimand="multilabel")


def test_apply_keeps_the_form_and_the_names(tmp_path):
    frame, arrays = table()
    frame = frame.assign(when=pd.Timestamp("2026-01-02"))
    frame.to_parquet(tmp_path / "in.parquet")
    frame.to_csv(tmp_path / "in.csv", index=False)
    fitted = cal.fit(arrays, method="ts")
    for source, out in (("in.parquet", "out.parquet"), ("in.csv", "out.csv")):
        cal.apply(fitted, tmp_path / source, tmp_path / out)
        dataset = open_dataset(tmp_path / out)
        assert dataset.class_names == list(NAMES)
        for name in ("train", "val", "test"):
            split, expected = dataset.split(name), fitted.transform(arrays[f"{name}_logits"])
            stored = split.read("logits").astype(np.float32)
            np.testing.assert_array_equal(stored, expected.astype(np.float32))
            np.testing.assert_array_equal(split.read("labels"), arrays[f"{name}_labels"])
    written = pd.read_parquet(tmp_path / "out.parquet")
    assert written["when"].dtype.kind == "M"  # not text
    assert sorted(written["label"].unique()) == sorted(NAMES)
    read = {".parquet": pd.read_parquet, ".csv": pd.read_csv}
    for suffix in read:
        source, out = (read[suffix](tmp_path / f"{name}{suffix}") for name in ("in", "out"))
        assert list(out) == list(source)  # names of columns, and their order


def test_a_table_keeps_its_columns_in_other_tables(tmp_path):
    """Of numbered classes, tags, one column for two classes, and features; rows by split."""
    rng = np.random.default_rng(1)
    probs = rng.dirichlet(np.ones(3), 40)
    frame = pd.DataFrame({"id": range(40), "site": "x", "Target": rng.integers(3, size=40)})
    frame["split"] = ["test", "val"] * 20
    frame[["p_2", "p_0", "p_1"]] = probs
    frame["feature_0"] = rng.normal(size=40)
    frame.to_csv(tmp_path / "in.csv", index=False)
    fitted = cal.fit(tmp_path / "in.csv", method="ts")
    for suffix in (".csv", ".parquet"):
        cal.apply(fitted, tmp_path / "in.csv", tmp_path / f"out{suffix}")
    out = pd.read_csv(tmp_path / "out.csv")
    assert list(out) == list(pd.read_parquet(tmp_path / "out.parquet")) == list(frame)
    by_split = frame.sort_values("split", kind="stable").reset_index(drop=True)
    kept = ["id", "site", "Target", "split", "feature_0"]
    pd.testing.assert_frame_equal(out[kept], by_split[kept])
    alone = frame[["id", "p_1", "Target"]].assign(Target=lambda one: one["Target"] % 2)
    alone.to_csv(tmp_path / "alone.csv", index=False)
    cal.apply(
        cal.fit(tmp_path / "alone.csv", method="ts"), tmp_path / "alone.csv", tmp_path / "a.csv"
    )
    assert list(pd.read_csv(tmp_path / "a.csv")) == list(alone)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_names_that_begin_with_an_underscore(suffix, tmp_path):
    """They are usual in databases, and are no columns of the unnamed split."""
    frame, arrays = table()
    frame = frame.drop(columns="split").assign(id=[f"a{i}" for i in range(200)], _id="x", __part=1)
    save_predictions(tmp_path / f"in{suffix}", {name: frame[name].to_numpy() for name in frame})
    cal.apply(cal.fit(arrays, method="ts"), tmp_path / f"in{suffix}", tmp_path / f"out{suffix}")
    for name in ("in", "out"):
        split = open_dataset(tmp_path / f"{name}{suffix}").split()
        assert split.read("id").tolist() == frame["id"].tolist()
        assert set(split.read("_id").tolist()) == {"x"}
        assert [key for key in split.further if key.startswith("_")] == ["_id", "__part"]


def test_parquet_with_lists_is_read_as_before(tmp_path):
    arrays = {"logits": np.eye(3), "labels": np.arange(3), "p": np.ones(3), "split": np.arange(3)}
    save_predictions(tmp_path / "a.parquet", arrays)
    split = open_dataset(tmp_path / "a.parquet").split("")
    assert split.keys == ["logits", "labels", "p", "split"]
    one_logit = {"val_logits": np.ones(3), "val_labels": np.ones(3, int), "p": np.ones(3)}
    save_predictions(tmp_path / "b.parquet", one_logit)
    assert open_dataset(tmp_path / "b.parquet").splits == ["val"]


def test_whole_numbers_and_text_as_scores(tmp_path):
    frame = pd.DataFrame({"p_0": [0, 1], "p_1": [1, 0], "label": [1.0, 0.0]})
    frame.to_parquet(tmp_path / "a.parquet")
    split = open_dataset(tmp_path / "a.parquet").split()
    assert split.domain == "probs"
    assert split.read("probs").dtype == np.float64
    frame.astype({"p_0": str}).to_parquet(tmp_path / "b.parquet")
    with pytest.raises(ValueError, match=r"b\.parquet: p_0 must be numbers, got str: cast it to d"):
        open_dataset(tmp_path / "b.parquet")
    frame.assign(p_0=[Decimal("0.5")] * 2).to_parquet(tmp_path / "c.parquet")
    with pytest.raises(ValueError, match=r"c\.parquet: p_0 must be numbers, got decimals"):
        open_dataset(tmp_path / "c.parquet")


def test_errors_of_tables_name_the_place(tmp_path):
    frame, _ = table(30)
    frame.loc[20, "label"] = "Dog"
    frame.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"a\.parquet, row 20: label is an unknown class 'Dog'"):
        open_dataset(tmp_path / "a.parquet").split("val").read("labels")
    with pytest.raises(ValueError, match="the data frame, row 20: label is an unknown class"):
        cal.evaluate(frame)
    with pytest.raises(ValueError, match=r"only a, b: name the columns of logits logit_CLASS or"):
        cal.evaluate(pd.DataFrame({"a": [1.0], "b": [2.0]}))
    frame["split"] = range(30)
    many = pd.concat([frame.assign(split=range(i, i + 30)) for i in range(0, 120, 30)])
    with pytest.raises(ValueError, match="split must name at most 100 splits"):
        cal.evaluate(many)
    with pytest.raises(ValueError, match=r"row 1: split is missing"):
        cal.evaluate(pd.DataFrame({"split": ["test", ""], "prob": [0.1, 0.2], "label": [0, 1]}))


def test_shards_with_other_columns_are_refused(tmp_path):
    frame, _ = table(30)
    frame = frame.drop(columns="split")
    frame.to_csv(tmp_path / "0.csv")
    order = ["label", "logit_dog", "logit_cat", "logit_cow"]
    frame[order].to_csv(tmp_path / "1.csv")
    message = r"0\.csv has the classes cat, dog, cow, but .*1\.csv dog, cat, cow: write their"
    with pytest.raises(ValueError, match=message):
        cal.evaluate(tmp_path)
    for name in ("val", "test"):
        frame.to_csv(tmp_path / f"{name}.csv")
    (tmp_path / "0.csv").unlink()
    (tmp_path / "1.csv").unlink()
    assert open_dataset(tmp_path).splits == ["test", "val"]


def test_tables_beside_other_formats_are_no_shards(tmp_path):
    save_predictions(tmp_path / "a.npz", {"logits": np.eye(3), "labels": np.arange(3)})
    (tmp_path / "results.csv").write_text("method,ece\nts,0.1\n")
    (tmp_path / "model.pth").write_bytes(b"")
    assert open_dataset(tmp_path).split().rows == 3


def test_what_no_table_holds(tmp_path):
    for key, values in {"margins": np.ones((3, 2)), "head_weight": np.ones((3, 2))}.items():
        with pytest.raises(ValueError, match=rf"cannot hold {key} of shape \(3, 2\); write \.npz"):
            save_predictions(tmp_path / "a.csv", {"logits": np.eye(3), key: values})
    arrays = {"val_logits": np.eye(3), "test_logits": np.eye(3), "test_id": np.arange(3)}
    with pytest.raises(ValueError, match="cannot hold id of one split only"):
        _table_of(arrays, ".csv")
    assert not list(tmp_path.iterdir())


def odd_table() -> dict[str, Any]:
    """A table whose columns have names that no rule knows, or knows for something else."""
    rng = np.random.default_rng(0)
    score = rng.uniform(size=200).round(3)
    happened = rng.uniform(size=200) < score
    return {
        "id": np.arange(200),
        "truth": happened.astype(int),
        "animal": np.where(happened, "dog", "cat"),
        "score": score,
        "cat_score": 1 - score,
        "dog_score": score,
        "labels": np.array(["unsure"] * 200),  # by the annotator, say
    }


def stored(kind: str, folder: Path) -> Any:
    frame = pd.DataFrame(odd_table())
    path = folder / f"odd{kind}"
    if kind == "frame":
        return frame
    (frame.to_csv if kind == ".csv" else frame.to_parquet)(path, index=False)
    return path


KINDS = ("frame", ".csv", ".parquet")


@pytest.mark.parametrize("kind", KINDS)
def test_named_columns(kind, tmp_path):
    table = odd_table()
    split = cal.open_dataset(stored(kind, tmp_path), labels="truth", probs="score").split()
    assert split.domain == "probs"
    np.testing.assert_array_equal(split.labels, table["truth"])
    np.testing.assert_allclose(split.read("probs"), table["score"])
    assert "labels" not in split.further
    assert {"id", "animal", "cat_score"} <= {*split.further}


@pytest.mark.parametrize("kind", KINDS)
def test_named_columns_of_classes_have_their_names(kind, tmp_path):
    order = ["dog_score", "cat_score"]
    data = cal.open_dataset(stored(kind, tmp_path), labels="animal", probs=order)
    assert data.class_names == ["dog", "cat"]
    np.testing.assert_array_equal(data.split().labels, odd_table()["animal"] == "cat")
    np.testing.assert_allclose(data.split().read("probs")[:, 0], odd_table()["score"])


@pytest.mark.parametrize("kind", KINDS)
def test_named_columns_that_are_not_there(kind, tmp_path):
    with pytest.raises(ValueError, match=r"unknown column 'trut': did you mean truth\? choose"):
        cal.open_dataset(stored(kind, tmp_path), labels="trut", probs="score")


def test_named_arrays(tmp_path):
    table, path = odd_table(), tmp_path / "odd.npz"
    scores = np.stack([table["cat_score"], table["dog_score"]], 1)
    np.savez(path, val_scores=scores, val_truth=table["truth"], val_labels=table["id"], rate=0.1)
    split = cal.open_dataset(path, labels="truth", probs="scores").split("val")
    np.testing.assert_array_equal(split.labels, table["truth"])
    np.testing.assert_array_equal(split.read("probs"), scores)
    with pytest.raises(ValueError, match="unknown array 'y'"):
        cal.open_dataset(path, labels="y")
    with pytest.raises(ValueError, match="one array"):
        cal.open_dataset(path, probs=["a", "b"])
