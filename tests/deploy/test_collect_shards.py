"""Models run over shards of inputs: as one forward pass would, once each, whatever interrupts."""

import json
import os
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from safetensors.torch import save_model
from torch import nn

import calibrant as cal
from calibrant import use
from calibrant._core.engines import _WorkerPool
from calibrant.data import open_dataset
from calibrant.deploy import collect_shards
from calibrant.deploy.models import _load_classifier, _ModelName
from calibrant.workflows.receipts import RECEIPTS
from tests.support import classifiers
from tests.support.classifiers import KILLED
from tests.support.interrupted_writes import interrupt_third_write
from tests.support.language_models import transformers
from tests.support.predictions import cut, needs_pyarrow

LINEAR = "tests.support.classifiers:linear"
RNG = np.random.default_rng(0)
ARRAYS = {
    "inputs": RNG.normal(size=(40, 8)),
    "labels": RNG.integers(0, 3, 40),
    "id": np.arange(1000, 1040),
    "site": np.array(["north", "south"])[RNG.integers(0, 2, 40)],
}
CUTS = (0, 7, 21)  # four shards, the first of them empty


def expected(network=None, rows=slice(None)):
    """One forward pass over all rows."""
    network = _load_classifier(_ModelName(LINEAR)).module if network is None else network
    with torch.no_grad():
        return network(torch.from_numpy(ARRAYS["inputs"][rows]).float()).numpy()


@pytest.fixture
def shards(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    for i, shard in enumerate(cut(ARRAYS, *CUTS)):
        np.savez(folder / f"{i:05}-of-00004.npz", **shard)
    return folder


def assert_complete(folder, logits):
    split = open_dataset(folder).split()
    np.testing.assert_allclose(split.logits, logits, rtol=1e-6, atol=1e-6)
    for key in ("labels", "id"):
        np.testing.assert_array_equal(split.read(key), ARRAYS[key])
    assert "inputs" not in split.keys


def stamps(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("[!.]*.*")}


def test_shards_hold_what_one_forward_pass_gives(tmp_path, shards):
    steps, out = [], tmp_path / "out"
    with use(progress=lambda *step: steps.append(step)):
        result = collect_shards(LINEAR, shards, out, batch_size=5)
    assert result.describe() == "wrote 4 shards"
    assert steps == [(n, 40) for n in (5, 7, 12, 17, 21, 26, 31, 36, 40)]  # batches of five at most
    assert_complete(out, expected())
    np.testing.assert_array_equal(open_dataset(out).split().read("site"), ARRAYS["site"])
    assert cal.evaluate(out, level=None).n == 40
    assert cal.fit(out, method="ts").classes == 3


def test_a_module_in_training_mode_is_evaluated_and_returned_as_it_was(tmp_path, shards):
    network = nn.Sequential(nn.Dropout(0.9), nn.Linear(8, 3))
    network[1].eval()
    collect_shards(network, shards, tmp_path / "out")
    assert [module.training for module in network.modules()] == [True, True, False]
    assert_complete(tmp_path / "out", expected(network[1]))


def formats(folder):
    """Write the same rows, as far as each format holds them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for i, shard in enumerate(cut(ARRAYS, 7, 21)):
        numbers = {key: values for key, values in shard.items() if key != "site"}
        columns = {key: pa.array(list(v)) if v.ndim == 2 else v for key, v in shard.items()}
        for kind in ("npz", "npy", "safetensors", "parquet", "arrow"):
            (folder / kind).mkdir(exist_ok=True)
        np.savez(folder / "npz" / f"{i}.npz", **shard)
        save_file(numbers, folder / "safetensors" / f"{i}.safetensors")
        pq.write_table(pa.table(columns), folder / "parquet" / f"{i}.parquet")
        with pa.ipc.new_file(str(folder / "arrow" / f"{i}.arrow"), pa.table(columns).schema) as f:
            f.write_table(pa.table(columns))
        for key, values in numbers.items():
            np.save(folder / "npy" / f"{i}_{key}.npy", values)


@needs_pyarrow
def test_every_format_of_arrays(tmp_path):
    formats(tmp_path)
    suffixes = {"npy": "npz"}
    for kind in ("npz", "npy", "safetensors", "parquet", "arrow"):
        out = tmp_path / f"{kind}-out"
        collect_shards(LINEAR, tmp_path / kind, out)
        assert {path.suffix for path in out.glob("[!.]*.*")} == {f".{suffixes.get(kind, kind)}"}
        assert_complete(out, expected())


@needs_pyarrow
def test_other_columns_of_parquet_keep_types_and_nulls(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    day = pa.array([None, *range(39)], pa.date32())
    table = pa.table({"inputs": list(ARRAYS["inputs"]), "y": ARRAYS["labels"], "day": day})
    pq.write_table(table, tmp_path / "in.parquet")
    collect_shards(LINEAR, tmp_path / "in.parquet", tmp_path / "out")
    written = pq.read_table(tmp_path / "out" / "in.parquet")
    assert written.column("day").combine_chunks().equals(day)
    assert written.column("labels").to_pylist() == ARRAYS["labels"].tolist()
    assert sorted(written.column_names) == ["day", "labels", "logits"]


# ---------------------------------------------------------------------------------------- receipts


def test_a_killed_run_goes_on(tmp_path, shards, monkeypatch):
    """Ended after two shards, in the middle of the third."""
    out = tmp_path / "out"
    interrupt_third_write(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        collect_shards(LINEAR, shards, out)
    before = stamps(out)
    assert sorted(before) == ["00000-of-00004.npz", "00001-of-00004.npz"]
    result = collect_shards(LINEAR, shards, out)
    assert [os.path.basename(path) for path in result.kept] == sorted(before)
    assert before.items() <= stamps(out).items()
    assert_complete(out, expected())
    assert collect_shards(LINEAR, shards, out).written == []


def test_a_change_of_input_weights_or_settings_is_noticed(tmp_path, shards):
    out, weights = tmp_path / "out", tmp_path / "w.safetensors"
    network = classifiers.linear()
    save_model(network, str(weights))
    collect_shards(LINEAR, shards, out, weights=weights)
    assert_complete(out, expected(network))
    np.savez(shards / "00001-of-00004.npz", **{**cut(ARRAYS, 7)[0], "site": np.zeros(7)})
    again = "wrote 1 shard (1 of them again, since the input or the model changed)"
    result = collect_shards(LINEAR, shards, out, weights=weights)
    assert result.describe() == f"{again}, kept 3 of an earlier run"
    nn.init.constant_(network[2].bias, 3.0)
    save_model(network, str(weights))
    assert len(collect_shards(LINEAR, shards, out, weights=weights).changed) == 4
    assert_complete(out, expected(network))
    changed = collect_shards(LINEAR, shards, out, weights=weights, last_layer="2").changed
    assert len(changed) == 4
    assert collect_shards(LINEAR, shards, out, weights=weights, last_layer="2").changed == []
    assert len(collect_shards(LINEAR, shards, out, weights=weights, dtype="float64").changed) == 4


def test_features_are_the_inputs_of_the_layer(tmp_path, shards):
    collect_shards(LINEAR, shards, tmp_path / "out", last_layer="2", batch_size=3)
    split = open_dataset(tmp_path / "out").split()
    network = _load_classifier(_ModelName(LINEAR)).module
    with torch.no_grad():
        assert isinstance(network, nn.Sequential)
        hidden = network[:2](torch.from_numpy(ARRAYS["inputs"]).float())
    np.testing.assert_allclose(split.features, hidden, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="last_layer must be a layer of the model"):
        collect_shards(LINEAR, shards, tmp_path / "other", last_layer="9")


def test_processes_of_torchrun_share_the_shards(tmp_path, shards, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    out, written = tmp_path / "out", []
    for rank in ("2", "0", "1"):
        monkeypatch.setenv("RANK", rank)
        written.append([os.path.basename(p) for p in collect_shards(LINEAR, shards, out).written])
    assert [len(names) for names in written] == [1, 2, 1]
    assert len({name for names in written for name in names}) == 4
    assert_complete(out, expected())


@pytest.mark.slow
def test_processes_of_a_pool_load_the_same_model(tmp_path, shards):
    """New weights are those of this process; weights that differ there are refused."""
    KILLED.unlink(missing_ok=True)
    with _WorkerPool(2) as pool:
        killed = "tests.support.classifiers:KilledOnce"
        with use(executor=pool):
            result = collect_shards(killed, shards, tmp_path / "once")
        KILLED.unlink()
        assert result.describe() == "wrote 4 shards"
        assert_complete(tmp_path / "once", ARRAYS["inputs"][:, :3])
        with use(executor=pool):
            result = collect_shards(LINEAR, shards, tmp_path / "out")
        assert result.describe() == "wrote 4 shards"
        assert_complete(tmp_path / "out", expected())
        noisy = "tests.support.classifiers:noisy"
        with (
            pytest.raises(OSError, match=r"noisy has other weights in another process"),
            use(executor=pool),
        ):
            collect_shards(noisy, shards, tmp_path / "noisy")


def test_threads_of_an_executor(tmp_path, shards):
    steps: list[tuple[int, int]] = []
    with ThreadPoolExecutor(2) as pool:
        with use(executor=pool, progress=lambda *step: steps.append(step)):
            collect_shards(LINEAR, shards, tmp_path / "out")
        assert steps == [(0, 40), (7, 40), (21, 40), (40, 40)]
        assert_complete(tmp_path / "out", expected())
        with (
            pytest.raises(ValueError, match="with an executor the model must be a name"),
            use(executor=pool),
        ):
            collect_shards(nn.Linear(8, 3), shards, tmp_path / "other")


def test_threads_share_one_model():
    """Two that draw new weights at a time would get other ones than a process alone."""
    slow = "tests.support.classifiers:slow"
    alone = _load_classifier(_ModelName(slow, call="alone"))
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(_load_classifier, 4 * [_ModelName(slow, call="together")])
    assert first is not alone
    assert all(other is first for other in others)
    assert first.fingerprint == alone.fingerprint


@needs_pyarrow
def test_labels_may_not_be_missing(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    inputs = pa.FixedSizeListArray.from_arrays(pa.array(np.zeros(16)), 8)
    pq.write_table(pa.table({"inputs": inputs, "label": [0, None]}), tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="label has missing values"):
        collect_shards(LINEAR, tmp_path / "a.parquet", tmp_path / "out")


def test_bad_shards_are_named_or_skipped(tmp_path):
    folder, out = tmp_path / "in", tmp_path / "out"
    folder.mkdir()
    for i, shard in enumerate(cut(ARRAYS, 10, 20, 30)):
        np.savez(folder / f"{i}.npz", **shard)
    (folder / "4.npz").write_bytes((folder / "3.npz").read_bytes()[:-30])
    np.savez(folder / "5.npz", other=np.zeros(3))
    np.savez(folder / "6.npz", inputs=np.zeros((3, 7)), labels=np.zeros(3))
    with pytest.raises(ValueError, match=r"4\.npz is damaged"):
        collect_shards(LINEAR, folder, out)
    result = collect_shards(LINEAR, folder, out, skip_bad=True)
    assert [os.path.basename(path) for path in result.skipped] == ["4.npz", "5.npz", "6.npz"]
    _, missing, refused = result.skipped.values()
    assert "5.npz has no column inputs, only other" in missing
    assert "6.npz: the model refused 3 examples (RuntimeError: mat1 and mat2" in refused
    assert len(list(out.glob("*.npz"))) == 4
    assert_complete(out, expected())
    (folder / "3.npz").write_bytes((folder / "6.npz").read_bytes())
    with pytest.warns(UserWarning, match=r"3\.npz was made from an earlier version of its input"):
        collect_shards(LINEAR, folder, out, skip_bad=True)
    with pytest.raises(ValueError, match=r"every shard of .* is bad; the first: .*6\.npz"):
        collect_shards(LINEAR, folder / "6.npz", tmp_path / "none", skip_bad=True)


# ------------------------------------------------------------------------------------------- texts


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    """A classifier, 30 texts, and its logits for each text alone."""
    home = tmp_path_factory.mktemp("reviews")
    folder = str(classifiers.save_text_classifier(home / "model"))
    rng = np.random.default_rng(1)
    texts = classifiers.made_up_texts(rng, 30)
    labels = rng.integers(0, 3, 30)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        encoded = [tokenizer(t, truncation=True, max_length=12, return_tensors="pt") for t in texts]
        logits = torch.cat([model(**tokens).logits for tokens in encoded]).numpy()
    return folder, texts, labels, logits


def write_texts(folder, texts, labels, names):
    """The same rows as JSON lines, CSV and parquet, in shards of 11 and 19 rows."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    for i, rows in enumerate((range(11), range(11, 30))):
        content = [{"id": n, "text": texts[n], "label": int(labels[n])} for n in rows]
        for kind in ("jsonl", "csv", "parquet"):
            (folder / kind).mkdir(exist_ok=True)
        lines = "\n".join(json.dumps(row) for row in content)
        (folder / "jsonl" / f"{i}.jsonl").write_text(f"{lines}\n\n")
        table = [f'{row["id"]},"{row["text"]}",{names[row["label"]]}' for row in content]
        (folder / "csv" / f"{i}.csv").write_text("\n".join(["id,text,label", *table]))
        pq.write_table(pa.Table.from_pylist(content), folder / "parquet" / f"{i}.parquet")


@needs_pyarrow
def test_texts_in_batches_have_the_logits_of_each_alone(tmp_path, reviews):
    folder, texts, labels, logits = reviews
    assert np.abs(logits - logits.mean(0)).max() > 0.5
    write_texts(tmp_path, texts, labels, classifiers.NAMES)
    for kind in ("jsonl", "csv", "parquet"):
        out = tmp_path / f"{kind}-out"
        collect_shards(folder, tmp_path / kind, out, batch_size=4)
        split = open_dataset(out).split()
        np.testing.assert_allclose(split.logits, logits, rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(split.labels, labels)
        assert split.read("id").astype(int).tolist() == [*range(30)]
        assert "text" not in split.keys
    shorter = collect_shards(folder, tmp_path / "jsonl", out, length=4)  # another folder of inputs
    assert len(shorter.written) == 2
    assert np.abs(open_dataset(out / "*.npz").split().logits - logits).max() > 0.1


def test_pairs_of_texts_and_names_of_classes(tmp_path, reviews):
    folder, texts, _, _ = reviews
    rows = [{"a": texts[0], "b": texts[1], "y": "positive"}, {"a": "good", "b": "bad", "y": "-100"}]
    path = tmp_path / "in.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    options: Any = {"inputs": ["a", "b"], "last_layer": "classifier"}
    collect_shards(Path(folder), path, tmp_path / "out", **options)
    split = open_dataset(tmp_path / "out").split()
    assert split.labels.tolist() == [2, -100]
    assert split.features.shape == (2, 16)
    model = _load_classifier(_ModelName(folder))
    with torch.no_grad():
        alone = model(model.encode([np.array(["good"]), np.array(["bad"])])).logits
    np.testing.assert_allclose(split.logits[1:], alone, rtol=1e-6, atol=1e-6)
    rows[0]["y"] = "superb"
    path.write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(ValueError, match=r"in\.jsonl, row 0: y is an unknown class 'superb'"):
        collect_shards(folder, path, tmp_path / "out", inputs=["a", "b"])


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ('{"text": "good"}\n{"text": ["bad"]}', "text must be text, or numbers, in every line"),
        ('{"text": "good"}\n{"text": null}', "text must be text, or numbers, in every line"),
        ('{"text": 3}', "inputs of this model must be texts, or pairs of texts, got int64"),
        ('{"text": "good"}\n[1]', 'line 2: an object such as {"text": ...} is wanted, got a list'),
        ('{"text": "good"', "line 1: no JSON"),
    ],
)
def test_lines_that_are_refused(lines, problem, tmp_path, reviews):
    (tmp_path / "in.jsonl").write_text(lines)
    with pytest.raises(ValueError, match=re.escape(problem)):
        collect_shards(reviews[0], tmp_path / "in.jsonl", tmp_path / "out")


def test_models_without_classes_are_refused(tmp_path, shards, reviews):
    from tests.support.language_models import tiny_model

    tiny_model().save_pretrained(tmp_path / "lm")
    with pytest.raises(ValueError, match=r"got LlamaForCausalLM; token tables .* llm collect"):
        collect_shards(str(tmp_path / "lm"), shards, tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(OSError, match=r"is not a model folder: it has no config\.json"):
        collect_shards(str(tmp_path / "empty"), shards, tmp_path / "out")


# ------------------------------------------------------------------------------------------ images


def test_images(tmp_path):
    """Floats go to the model as they are, bytes through the processor of its folder."""
    torch.manual_seed(0)
    config = transformers.ViTConfig(
        **{"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_labels": 3},
        **{"intermediate_size": 8, "image_size": 8, "patch_size": 4, "initializer_range": 0.5},
    )
    model = transformers.ViTForImageClassification(config).eval()
    model.save_pretrained(tmp_path / "model")
    settings = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    (tmp_path / "model" / "preprocessor_config.json").write_text(json.dumps(settings))
    images = RNG.integers(0, 256, (5, 8, 8, 3), dtype=np.uint8)
    pixels = np.moveaxis(images / np.float32(127.5) - 1, -1, 1)  # mean and deviation of one half
    np.savez(tmp_path / "in.npz", image=images, pixel_values=pixels, label=np.arange(5) % 3)
    for column in ("image", "pixel_values"):
        out = tmp_path / column
        collect_shards(str(tmp_path / "model"), tmp_path / "in.npz", out, inputs=[column])
        with torch.no_grad():
            logits = model(torch.from_numpy(pixels)).logits
        np.testing.assert_allclose(open_dataset(out).split().logits, logits, rtol=1e-5, atol=1e-5)


# ------------------------------------------------------------------------------------------ models


def test_several_inputs_by_position_and_one_logit(tmp_path):
    first, second = RNG.normal(size=(2, 9, 4)).astype(np.float32)
    np.savez(tmp_path / "in.npz", first=first, second=second, target=np.arange(9) % 2)
    name, out = "tests.support.classifiers:Sum", tmp_path / "out"
    collect_shards(name, tmp_path / "in.npz", out, inputs=["second", "first"], batch_size=4)
    split = open_dataset(out).split()
    np.testing.assert_allclose(split.logits, second.sum(1) - first.sum(1), rtol=1e-5)
    assert split.labels.tolist() == [0, 1] * 4 + [0]
    with pytest.raises(ValueError, match=r"in\.npz has no column inputs, only first, second"):
        collect_shards(name, tmp_path / "in.npz", out)


def test_options_of_models_with_names(tmp_path, shards):
    options: dict[str, Any] = {"weights": "w.safetensors", "length": 4, "dtype": "bfloat16"}
    for name, value in options.items():
        with pytest.raises(ValueError, match=f"{name} is for models that are loaded by a name"):
            collect_shards(nn.Linear(8, 3), shards, tmp_path / "out", **{name: value})


def test_half_precision_is_written_wide(tmp_path, shards):
    collect_shards(LINEAR, shards, tmp_path / "out", dtype="bfloat16")
    logits = open_dataset(tmp_path / "out").split().logits
    assert logits.dtype == np.float32
    np.testing.assert_allclose(logits, expected(), rtol=0.05, atol=0.02)
    assert np.abs(logits - expected()).max() > 1e-4


def test_logits_that_are_nan_are_refused(tmp_path, shards):
    with pytest.raises(ValueError, match=r"00001-of.*: logits of example 0 of a batch are NaN"):
        collect_shards("tests.support.classifiers:Broken", shards, tmp_path / "out")
    assert os.listdir(tmp_path / "out") == [RECEIPTS, "00000-of-00004.npz"]


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ("nowhere.models:make", "nowhere.models:make cannot be imported .No module named"),
        ("tests.support.classifiers:missing", "must name a function that returns a model"),
        ("tests.support.classifiers:no_model", "must return an nn.Module, got str"),
        ("model.pt", "is a pickle, which is never loaded"),
        ("weights.bin", "is a pickle, which is never loaded"),
        ("program.pt2", "may run code when torch loads it"),
        ("./nowhere/", "there is no model at ./nowhere/"),
    ],
)
def test_models_that_are_refused(model, problem, shards, tmp_path):
    with pytest.raises((ImportError, OSError, TypeError, ValueError), match=problem):
        collect_shards(model, shards, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_are_refused(tmp_path, shards):
    save_model(nn.Linear(2, 2), str(tmp_path / "w.safetensors"))
    (tmp_path / "damaged.safetensors").write_bytes(b"none")
    for name, problem in {
        "w.safetensors": "must have the weights of this Sequential: .*0.weight",
        "damaged.safetensors": "must have the weights of this Sequential",
        "w.pt": "must be a .safetensors file",
    }.items():
        with pytest.raises(ValueError, match=problem):
            collect_shards(LINEAR, shards, tmp_path / "out", weights=tmp_path / name)
    with pytest.raises(ValueError, match=r"weights are for package\.module:factory"):
        collect_shards("model/", shards, tmp_path / "out", weights="w.safetensors")


@pytest.mark.slow
def test_exported_programs(tmp_path, shards):
    network = classifiers.linear().eval()
    rows = torch.export.Dim("rows", min=1)
    program = torch.export.export(network, (torch.zeros(2, 8),), dynamic_shapes=({0: rows},))
    torch.export.save(program, tmp_path / "network.pt2")
    name = str(tmp_path / "network.pt2")
    collect_shards(name, shards, tmp_path / "out", trust_remote_code=True, batch_size=6)
    assert_complete(tmp_path / "out", expected(network))
    options: Any = {"trust_remote_code": True, "dtype": "float16"}
    with pytest.raises(ValueError, match=r"the precision of .*network\.pt2 is fixed"):
        collect_shards(name, shards, tmp_path / "out", **options)


def test_receipts_name_input_and_output(tmp_path, shards):
    collect_shards(LINEAR, shards, tmp_path / "out")
    content = json.loads((tmp_path / "out" / RECEIPTS / "00002-of-00004.npz.json").read_text())
    assert content["input"] == str(shards / "00002-of-00004.npz")
    with pytest.raises(ValueError, match="is part of the input"):
        collect_shards(LINEAR, shards, shards)
