"""Calibrated columns of tables are what apply writes, and nothing else of a table changes."""

import pickle
from functools import partial
from itertools import pairwise

import numpy as np
import pytest

import calibrant as cal
from calibrant.calibrators.affine import VectorScaling
from calibrant.calibrators.fit_inputs import told
from calibrant.calibrators.registry import TAG_CALIBRATORS
from calibrant.calibrators.scaling import TemperatureScaling
from calibrant.data import open_dataset
from calibrant.deploy import calibrate_table
from tests.support.models import CLASSES, WIDTH, shifted
from tests.support.simulate import drawn

pa = pytest.importorskip("pyarrow")
pd = pytest.importorskip("pandas")
pl = pytest.importorskip("polars")

ROWS = 30
NAMES = ["cat", "dog", "eel"]


@pytest.fixture(scope="module")
def data():
    return drawn(np.random.default_rng(0), 500, 3, 2.0)


@pytest.fixture(scope="module")
def fitted(data):
    return VectorScaling().fit(*data)  # classes differ, so that their order shows


@pytest.fixture(scope="module")
def probs(data):
    logits = np.exp(data[0][:ROWS])
    return logits / logits.sum(1, keepdims=True)


@pytest.fixture(scope="module")
def applied(fitted, probs, tmp_path_factory):
    """The probabilities that apply writes."""
    out = tmp_path_factory.mktemp("applied") / "a.npz"
    cal.apply(fitted, {"probs": probs}, out)
    written = open_dataset(out).split().read("probs")
    assert written.dtype == np.float64
    assert np.abs(written - probs).max() > 0.01
    return written


def test_zeros_count_as_in_the_fit():
    probs = np.array([[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.0, 0.0, 1.0]] * 20)
    with told(), pytest.warns(UserWarning, match="they count as 0.05"):
        fitted = cal.fit({"probs": probs, "labels": np.arange(60) % 3}, method="ts")
    root = np.maximum(probs, 0.05) ** (1 / float(fitted.temperature_))
    found = calibrate_table({"probs": probs}, fitted)["calibrated"]
    np.testing.assert_allclose(found, root / root.sum(1, keepdims=True), atol=1e-7)


def new_columns(table, names=NAMES):
    return np.stack([np.asarray(table[f"calibrated_{name}"]) for name in names], axis=-1)


def close(values, expected):
    np.testing.assert_allclose(np.asarray(values, dtype=float), expected, rtol=0, atol=1e-9)


# ------------------------------------------------------------------------------------------ frames


@pytest.fixture
def frame(probs):
    """A frame with a column per class, an index, and other columns with missing values."""
    index = [f"row {i}" for i in range(ROWS)]
    frame = pd.DataFrame(probs.copy(), columns=[f"prob_{name}" for name in NAMES], index=index)
    frame.insert(1, "id", np.arange(ROWS))
    frame["note"] = [None, "a", *["b"] * (ROWS - 2)]
    frame["day"] = pd.to_datetime([None, *["2024-01-02"] * (ROWS - 1)])
    return frame


def test_a_frame_of_pandas(frame, fitted, applied):
    before = frame.copy(deep=True)
    result = calibrate_table(frame, fitted)
    close(new_columns(result), applied)
    pd.testing.assert_frame_equal(frame, before)
    pd.testing.assert_frame_equal(result[before.columns], before)
    assert list(result.columns) == [*before.columns, *(f"calibrated_{name}" for name in NAMES)]


def test_a_frame_of_polars(frame, fitted, applied):
    table = pl.from_pandas(frame)
    result = calibrate_table(table, fitted)
    close(new_columns(result), applied)
    assert result.select(table.columns).equals(table)
    assert result.schema["calibrated_cat"] == pl.Float64


def test_tables_and_batches_of_arrow(frame, fitted, applied):
    table = pa.Table.from_pandas(frame, preserve_index=False)
    result = calibrate_table(table, fitted)
    assert isinstance(result, pa.Table)
    close(new_columns(result), applied)
    assert result.select(table.column_names).equals(table)
    batch = calibrate_table(table.to_batches()[0], fitted)
    assert isinstance(batch, pa.RecordBatch)
    assert pa.Table.from_batches([batch]).equals(result.combine_chunks())


def test_a_mapping_of_arrays(fitted, probs, applied):
    table = {"probs": probs, "id": np.arange(ROWS)}
    result = calibrate_table(table, fitted)
    close(result["calibrated"], applied)
    assert result["probs"] is probs
    assert list(table) == ["probs", "id"]
    single = calibrate_table({"probs": probs.astype(np.float32)}, fitted)["calibrated"]
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, applied, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (lambda: pa.list_(pa.float64()), lambda: pa.list_(pa.float64())),
        (lambda: pa.large_list(pa.float64()), lambda: pa.large_list(pa.float64())),
        (lambda: pa.list_(pa.float64(), 3), lambda: pa.list_(pa.float64(), 3)),
        (lambda: pa.list_(pa.float32()), lambda: pa.list_(pa.float32())),
        (lambda: pa.list_(pa.float16()), lambda: pa.list_(pa.float32())),
    ],
)
def test_lists_keep_their_type_and_missing_ones(kind, expected, fitted, data):
    logits = data[0][:ROWS].astype(np.float16)
    column = pa.array([*logits[:2], None, *logits[3:]], kind())
    table = pa.table({"logits": column})
    result = calibrate_table(table, fitted)["calibrated"]
    assert result.type == expected()
    assert [i for i in range(ROWS) if result[i].as_py() is None] == [2]
    values = np.array([result[i].as_py() for i in range(ROWS) if i != 2])
    wanted = np.delete(fitted.predict_proba(logits), 2, axis=0)
    np.testing.assert_allclose(values, wanted, atol=1e-6)
    assert calibrate_table(table.slice(0, 0), fitted).schema.field("calibrated").type == expected()


def test_missing_scores_have_missing_probabilities(frame, fitted, applied):
    frame.loc["row 4", "prob_dog"] = None
    kept = np.arange(ROWS) != 4
    for table in (frame, pl.from_pandas(frame), pa.Table.from_pandas(frame)):
        values = new_columns(calibrate_table(table, fitted))
        close(values[kept], applied[kept])
        assert np.isnan(values[4]).all()
    assert calibrate_table(pl.from_pandas(frame), fitted)["calibrated_cat"].null_count() == 1
    nothing = calibrate_table(pl.from_pandas(frame)[4:5], fitted)
    assert nothing["calibrated_eel"].to_list() == [None]


def test_logits_of_frames(data, fitted):
    """What apply writes for them is logits, in single precision."""
    frame = pd.DataFrame(data[0], columns=[f"logit_{i}" for i in (0, 1, 2)])
    expected = fitted.predict_proba(data[0])
    np.testing.assert_allclose(new_columns(calibrate_table(frame, fitted), "012"), expected, 1e-6)
    shuffled = frame[["logit_2", "logit_0", "logit_1"]]  # numbers decide, not the order
    np.testing.assert_allclose(
        new_columns(calibrate_table(shuffled, fitted), "012"), expected, 1e-6
    )


@pytest.mark.parametrize("cuts", [(), (1,), (0, 0, 7, 29)])
def test_batches_of_any_size_give_the_same(cuts, frame, fitted, applied):
    """Through a pickle, as an engine sends the function to its workers."""
    calibrate = pickle.loads(pickle.dumps(partial(calibrate_table, calibrator=fitted)))
    table = pa.Table.from_pandas(frame, preserve_index=False)
    bounds = [0, *cuts, ROWS]
    parts = [calibrate(table.slice(a, b - a)) for a, b in pairwise(bounds)]
    close(new_columns(pa.concat_tables(parts)), applied)


def test_rows_in_chunks_of_memory(frame, fitted, applied, monkeypatch):
    monkeypatch.setattr("calibrant.deploy.dataframes.CHUNK", 20)  # six rows
    close(new_columns(calibrate_table(frame, fitted)), applied)


# ------------------------------------------------------------------------------- other calibrators


def test_one_column_of_two_classes():
    rng = np.random.default_rng(1)
    odds = 3 * rng.normal(size=400)
    labels = (odds / 2 + rng.logistic(size=400) > 0).astype(int)
    fitted = TemperatureScaling().fit(odds, labels)
    frame = pd.DataFrame({"prob": 1 / (1 + np.exp(-odds)), "id": range(400)})
    result = calibrate_table(frame, fitted)["calibrated"]
    np.testing.assert_allclose(result, fitted.predict_proba(odds), atol=1e-6)
    two = pd.DataFrame({"prob_no": [0.4], "prob_yes": [0.6]})
    with pytest.raises(ValueError, match=r"has 2 scores per row, but .* fitted on one logit"):
        calibrate_table(two, fitted)


def test_tags():
    rng = np.random.default_rng(1)
    odds = 3 * rng.normal(size=(300, 2))
    labels = (odds / 2 + rng.logistic(size=odds.shape) > 0).astype(int)
    fitted = TAG_CALIBRATORS["pooled"]().fit(odds, labels)
    frame = pd.DataFrame(1 / (1 + np.exp(-odds)), columns=["prob_red", "prob_big"])
    values = new_columns(calibrate_table(frame, fitted), ["red", "big"])
    np.testing.assert_allclose(values, fitted.predict_proba(odds), atol=1e-6)
    assert (np.abs(values.sum(1) - 1) > 0.1).any()


def test_features():
    fitted = shifted()
    rng = np.random.default_rng(2)
    logits, features = rng.normal(size=(9, CLASSES)), rng.normal(size=(9, WIDTH))
    expected = fitted.predict_proba(logits, features)
    lists = calibrate_table({"logits": logits, "features": features}, fitted)
    np.testing.assert_allclose(lists["calibrated"], expected, atol=1e-6)
    columns = {f"logit_{i}": logits[:, i] for i in range(CLASSES)}
    columns |= {f"feature_{i}": features[:, i] for i in range(WIDTH)}
    frame = calibrate_table(pd.DataFrame(columns), fitted)
    np.testing.assert_allclose(new_columns(frame, "0123"), expected, atol=1e-6)
    with pytest.raises(ValueError, match="Shifted needs features"):
        calibrate_table({"logits": logits}, fitted)


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ({"a": np.zeros(2)}, "has no column of logits or probabilities, only a: name the columns"),
        ({"logits": np.zeros((2, 4))}, "fitted for 3 classes, got 4"),
        ({"logits": np.full((2, 3), np.nan)}, "NaN"),
        ({"probs": np.full((2, 3), 2.0)}, r"probs must be in \[0, 1\]"),
        (
            {"logits": np.zeros((2, 3)), "calibrated": np.zeros(2)},
            "has a column calibrated already",
        ),
        ({f"logit_{i}": np.array(["x", "y"]) for i in range(3)}, "must be numbers, got string"),
        ({"logits": np.array([[1.0, 2, 3], [1.0, 2]], object)}, "must have one length, .* 2 to 3"),
        (
            {"logits": np.array([[1.0, None, 3], None], object)},
            "lists of logits have missing values",
        ),
    ],
)
def test_tables_that_are_refused(table, problem, fitted):
    with pytest.raises(ValueError, match=problem):
        calibrate_table(table, fitted)


def test_forms_that_are_refused(frame, fitted):
    with pytest.raises(TypeError, match=r"got a LazyFrame: lazy frames are collected first"):
        calibrate_table(pl.from_pandas(frame).lazy(), fitted)
    twice = pd.concat([frame, frame[["id"]]], axis=1)
    with pytest.raises(ValueError, match="two columns of one name"):
        calibrate_table(twice, fitted)
    with pytest.raises(RuntimeError, match="not fitted"):
        calibrate_table(frame, TemperatureScaling())


# ----------------------------------------------------------------------------------------- engines


@pytest.fixture
def lists(probs, tmp_path):
    """A file with lists of probabilities, and a row without."""
    rows = [*probs.tolist(), None]
    path = tmp_path / "lists.parquet"
    pl.DataFrame({"id": range(ROWS + 1), "probs": rows}).write_parquet(path)
    return path


def check_file(path, applied):
    written = pl.read_parquet(path).sort("id")
    assert written["id"].to_list() == [*range(ROWS + 1)]
    *values, missing = written["calibrated"].to_list()
    assert missing is None
    close(values, applied)


def test_lazy_frames_of_polars(lists, fitted, applied, tmp_path):
    calibrate = partial(calibrate_table, calibrator=fitted)
    lazy = pl.scan_parquet(lists)
    schema = calibrate(lazy.head(0).collect()).schema
    steps = lazy.map_batches(
        calibrate, schema=schema, projection_pushdown=False, predicate_pushdown=False
    )
    steps.select("id", "calibrated").collect().write_parquet(tmp_path / "out.parquet")
    check_file(tmp_path / "out.parquet", applied)


def test_a_function_of_duckdb(lists, fitted, applied, tmp_path):
    duckdb = pytest.importorskip("duckdb")

    def calibrated(probs):
        table = calibrate_table(pa.table({"probs": probs}), fitted)
        return table["calibrated"].combine_chunks()

    with duckdb.connect() as database:
        options = {"type": "arrow", "null_handling": "special"}
        database.create_function("f", calibrated, ["DOUBLE[]"], "DOUBLE[]", **options)
        query = f"SELECT id, f(probs) AS calibrated FROM '{lists}'"
        database.execute(f"COPY ({query}) TO '{tmp_path / 'out.parquet'}'")
    check_file(tmp_path / "out.parquet", applied)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_batches_of_spark(lists, fitted, applied, tmp_path):
    sql = pytest.importorskip("pyspark.sql")
    types = pytest.importorskip("pyspark.sql.pandas.types")

    def calibrate(batches):
        for batch in batches:
            yield calibrate_table(batch, fitted)

    spark = sql.SparkSession.builder.master("local[1]").getOrCreate()
    scores = spark.read.parquet(str(lists))
    schema = calibrate_table(types.to_arrow_schema(scores.schema).empty_table(), fitted).schema
    result = scores.mapInArrow(calibrate, types.from_arrow_schema(schema))
    result.write.parquet(str(tmp_path / "out"))
    spark.stop()
    check_file(tmp_path / "out" / "*.parquet", applied)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_batches_of_ray(lists, fitted, applied, tmp_path):
    ray = pytest.importorskip("ray")
    scores = ray.data.read_parquet(str(lists))
    options = {"fn_kwargs": {"calibrator": fitted}, "batch_format": "pyarrow"}
    scores.map_batches(calibrate_table, **options).write_parquet(str(tmp_path / "out"))
    ray.shutdown()
    check_file(tmp_path / "out" / "*.parquet", applied)
