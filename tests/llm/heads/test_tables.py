"""Rows, texts and files of token tables."""

import json
import shutil

import numpy as np
import pytest
import torch

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.tables import open_table
from calibrant.llm.models.huggingface import ModelFingerprint
from tests.support.language_models import (
    assert_same_table,
    drawn_documents,
    memory_table,
    tiny_model,
)


def test_rows_by_slice_mask_and_index(model, documents, tmp_path):
    table = collect(model, documents, tmp_path, tokens_per_shard=10)
    assert len(list(tmp_path.glob("shard-*"))) > 3
    hidden, labels = table.hidden(), table.records().labels
    rng = np.random.default_rng(0)
    mask = rng.random(len(table)) < 0.4
    for which in (
        *(slice(None), slice(3, 25), slice(40, 10), slice(2, None, 3), slice(None, None, -1)),
        *(mask, np.zeros(len(table), bool), rng.permutation(len(table)), np.array([5, 5, -1, 0])),
        *(np.arange(12, 30), np.array([], int)),
    ):
        np.testing.assert_array_equal(table.hidden(which), hidden[which])
        assert table.hidden(which).dtype == np.float16
        np.testing.assert_array_equal(table.records(which).labels, labels[which])
        np.testing.assert_array_equal(table.records(which).table, table.records().table[which])
    for wrong in (mask[:-1], np.array([len(table)]), np.array([-len(table) - 1])):
        with pytest.raises(IndexError):
            table.hidden(wrong)


def test_a_table_in_memory():
    records = tabulate(examples(np.eye(4), [0, 1, 2, 0]))
    mark = ModelFingerprint("tiny", 2, 4, "0" * 16, None)
    half = np.ones((4, 2), np.float16)
    np.testing.assert_array_equal(memory_table(half, records, [0] * 4, mark).hidden(), half)
    table = memory_table(np.ones((4, 2)) * 1e9, records, [0, 0, 3, 3], mark)
    assert table.hidden().max() == np.finfo(np.float16).max
    np.testing.assert_array_equal(table.records(table.documents == 3).correct, [True, False])


def test_several_folders_are_one_table(model, documents, tmp_path):
    first = collect(model, documents[:3], tmp_path / "a", batch=1)
    second = collect(model, documents[3:], tmp_path / "b", batch=1)
    both = open_table([tmp_path / "a", tmp_path / "b"])
    assert_same_table(both, collect(model, documents, tmp_path / "all", batch=1))
    np.testing.assert_array_equal(both.hidden(slice(len(first), None)), second.hidden())
    collect(tiny_model("Gemma2"), documents[:1], tmp_path / "c")
    with pytest.raises(ValueError, match="belongs to another model"):
        open_table([tmp_path / "a", tmp_path / "c"])


@pytest.mark.parametrize(
    ("column", "value"),
    [("possible", 0), ("documents", 0), ("documents", 8), ("labels", -1), ("labels", 300)],
)
def test_rows_that_were_never_written_are_refused(model, documents, tmp_path, column, value):
    collect(model, documents, tmp_path)
    file = tmp_path / "shard-00000" / f"{column}.npy"
    values = np.load(file)
    values[-4:-1] = value
    np.save(file, values)
    with pytest.raises(ValueError, match=r"shard-00000 has rows that were never written.*remove"):
        open_table(tmp_path)


def test_duplicate_tables_are_refused(model, documents, tmp_path):
    collect(model, documents, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(
        ValueError, match=r"b holds the same documents as .*a: pass each table once"
    ):
        open_table([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("shard", [1 << 16, 12])
def test_prompts_only_add_states(model, documents, tmp_path, shard):
    plain = collect(model, documents, tmp_path / "plain", tokens_per_shard=shard)
    table = collect(model, documents, tmp_path / "whole", tokens_per_shard=shard, prompts=True)
    assert_same_table(table, plain)
    rows = np.array([5, 0, 70, 33])
    np.testing.assert_array_equal(table.hidden(rows), plain.hidden(rows))
    assert table.whole
    assert not plain.whole


@pytest.mark.parametrize("shard", [1 << 16, 12])
@torch.no_grad()
def test_texts_have_the_states_of_prompts(model, documents, tmp_path, shard):
    table = collect(model, documents, tmp_path, tokens_per_shard=shard, prompts=True, batch=40)
    order = [4, 0, 6]
    texts = table.texts(np.concatenate([np.flatnonzero(table.documents == n) for n in order]))
    for number, (states, places) in zip(order, texts, strict=True):
        ids, labels = (np.array(documents[number][key]) for key in ("input_ids", "labels"))
        found = model(input_ids=torch.tensor(ids)[None], output_hidden_states=True)
        np.testing.assert_allclose(states, found.hidden_states[-1][0, :-1], atol=2e-3)
        np.testing.assert_array_equal(places, np.flatnonzero(labels[1:] != -100))


def test_texts_of_tables_without_prompts(model, tmp_path):
    plain = [{"input_ids": document["input_ids"]} for document in drawn_documents()]
    table = collect(model, plain, tmp_path, tokens_per_shard=12)
    assert table.whole  # nothing is masked
    ((states, places),) = table.texts(table.documents == 3)
    np.testing.assert_array_equal(states, table.hidden(table.documents == 3))
    np.testing.assert_array_equal(places, np.arange(13 - 1))


@pytest.mark.parametrize(
    "content", ["[]", '{"format": 1}', '{"format": 1, "fingerprint": {}}', "[" * 100_000]
)
def test_a_damaged_header(tmp_path, content):
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(ValueError, match=r"table\.json (is damaged|has format)"):
        open_table(tmp_path)


def test_a_file_is_no_table(tmp_path):
    (tmp_path / "questions.txt").write_text("Who?")
    with pytest.raises(ValueError, match="is not a token table"):
        open_table(tmp_path / "questions.txt")


def test_folders_that_are_no_tables(model, documents, tmp_path):
    with pytest.raises(ValueError, match="is not a token table"):
        open_table(tmp_path)
    with pytest.raises(ValueError, match="at least one folder"):
        open_table([])
    collect(model, documents, tmp_path)
    header = json.loads((tmp_path / "table.json").read_text())
    (tmp_path / "table.json").write_text(json.dumps({**header, "format": 99}))
    with pytest.raises(ValueError, match="format 99"):
        open_table(tmp_path)
    (tmp_path / "table.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        open_table(tmp_path)
    (tmp_path / "table.json").write_text(json.dumps(header))
    np.save(tmp_path / "shard-00000" / "top.npy", np.zeros(3))
    with pytest.raises(ValueError, match=r"rows of numbers, got \(3,\)"):
        open_table(tmp_path)
    for size in (3, [-1], ["x"], [10**400], [0.5]):
        (tmp_path / "table.json").write_text(json.dumps({**header, "shards": size}))
        with pytest.raises(ValueError, match="is damaged"):
            open_table(tmp_path)
    (tmp_path / "table.json").write_text(json.dumps(header))
    for content in (b"\x93NUMPY\x01\x00\x02\x00'\n", b"\x93NUMPY\x01\x00\x02\x00(\n", b""):
        (tmp_path / "shard-00000" / "top.npy").write_bytes(content)
        with pytest.raises(ValueError, match=r"top\.npy is damaged or missing"):
            open_table(tmp_path)
    (tmp_path / "shard-00000" / "hidden.npy").unlink()
    with pytest.raises(ValueError, match="is damaged or missing"):
        open_table(tmp_path)
