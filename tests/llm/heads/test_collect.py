"""Collected tables against direct passes of tiny random models."""

import copy
import errno
import importlib
import shutil
from typing import Any

import numpy as np
import pytest
import torch

from calibrant._core.atomic_files import locked
from calibrant._core.engines import use
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.tables import open_table
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import (
    FAMILIES,
    assert_same_table,
    drawn_documents,
    tiny_model,
    transformers,
    with_adapter,
    word_tokenizer,
)

module = importlib.import_module("calibrant.llm.heads.collect")  # the function has the same name


COLLECTED = [name for name in FAMILIES if name not in ("Mamba", "Rwkv", "OPT", "Bart")]


@torch.no_grad()
def direct(model, documents):
    """Hidden states, logits, labels and documents, one document at a time and all at once."""
    hidden, logits, labels, owners, heard = [], [], [], [], []
    hook = model.lm_head.register_forward_pre_hook(lambda _, args: heard.append(args[0]))
    for number, document in enumerate(documents):
        ids = torch.tensor(document["input_ids"])[None]
        wanted = torch.tensor(document["labels"])[1:]
        found = model(input_ids=ids, use_cache=False)
        kept = wanted != -100
        hidden.append(heard[-1][0, :-1][kept])
        logits.append(found.logits[0, :-1][kept])
        labels.append(wanted[kept])
        owners.append(torch.full((int(kept.sum()),), number))
    hook.remove()
    return [torch.cat(part) for part in (hidden, logits, labels, owners)]


@pytest.mark.parametrize("family", COLLECTED)
def test_table_equals_a_direct_pass(family, documents, tmp_path):
    model = tiny_model(family)
    table = collect(model, documents, tmp_path / "table", batch=64)
    hidden, logits, labels, owners = direct(model, documents)
    records = table.records()
    assert len(table) == len(labels) == len(records)
    np.testing.assert_array_equal(table.documents, owners)
    np.testing.assert_array_equal(records.labels, labels)
    np.testing.assert_allclose(table.hidden(), hidden, rtol=2e-3, atol=1e-4)
    np.testing.assert_array_equal(records.correct, logits.argmax(-1) == labels)
    assert records.classes == 300
    for b in (0.3, 1.0, 2.7):
        log_probs = (b * logits.double()).log_softmax(-1)
        curve = records.log_partition(b)
        np.testing.assert_allclose(np.exp(-curve.value), log_probs.max(-1)[0].exp(), atol=2e-5)
        loss = -log_probs.gather(-1, labels[:, None])[:, 0]
        np.testing.assert_allclose(b * records.own_gap + curve.value, loss, atol=1e-4)


@pytest.mark.parametrize("scaling", [0.8, 1.0005])
def test_logit_scales_near_one_are_measured(documents, tmp_path, scaling):
    model = tiny_model("Granite", logits_scaling=scaling)
    table = collect(model, documents, tmp_path / "table")
    np.testing.assert_allclose(table.records().top, direct(model, documents)[1].amax(-1), rtol=2e-5)


def test_logits_scaled_in_place_are_measured(documents, tmp_path):
    model = tiny_model()
    model.register_forward_hook(lambda m, a, out: setattr(out, "logits", out.logits.mul_(0.5)))
    table = collect(model, documents, tmp_path / "table")
    np.testing.assert_allclose(table.records().top, direct(model, documents)[1].amax(-1), rtol=2e-5)


def test_padding_and_batches_have_no_effect(model, documents, tmp_path):
    alone = collect(model, documents, tmp_path / "alone", batch=1)
    together = collect(model, documents, tmp_path / "together", batch=10_000)
    assert_same_table(alone, together, exact=False)


@pytest.mark.parametrize("family", ["Llama", "Mamba"])
def test_half_precision(family, documents, tmp_path):
    model = tiny_model(family).to(torch.bfloat16)
    table = collect(model, documents, tmp_path / "table", batch=1)
    hidden, logits, labels, _ = direct(model, documents)
    np.testing.assert_allclose(table.hidden(), hidden.float(), rtol=0.02, atol=0.02)
    loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    records = table.records()
    found = records.own_gap + records.log_partition(1.0).value
    np.testing.assert_allclose(found.mean(), loss.mean(), rtol=0.01)


def test_logits_never_exceed_the_chunk(model, documents, tmp_path, monkeypatch):
    limit, seen = 10 * 300, []
    monkeypatch.setattr(module, "_MAX_LOGITS", limit)
    hook = model.lm_head.register_forward_hook(lambda *a: seen.append(a[2].numel()))
    table = collect(model, documents, tmp_path / "table")
    hook.remove()
    assert max(seen) <= limit
    assert len(seen) >= len(table) / 10
    monkeypatch.undo()
    assert_same_table(table, collect(model, documents, tmp_path / "other"), exact=False)


def test_the_model_is_left_as_it_was(documents, tmp_path):
    model = tiny_model(attention_dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = collect(model, documents, tmp_path / "a")
    assert_same_table(first, collect(model, documents, tmp_path / "b"))  # no dropout
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_hidden_states_are_clipped_to_half_precision(documents, tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.mul_(1e5)
        model.lm_head.weight.mul_(1e-5)
    hidden = collect(model, documents, tmp_path / "table").hidden()
    assert np.isfinite(hidden).all()
    assert np.abs(hidden).max() == np.finfo(np.float16).max


def test_documents_are_truncated_to_length(model, documents, tmp_path):
    short = [{name: part[:8] for name, part in each.items()} for each in documents]
    cut = collect(model, documents, tmp_path / "cut", length=8)
    assert_same_table(cut, collect(model, short, tmp_path / "short"))
    assert len(cut) < len(collect(model, documents, tmp_path / "whole"))


def test_progress_counts_all_tokens(model, documents, tmp_path):
    seen = []
    with use(progress=lambda *counts: seen.append(counts)):
        table = collect(model, documents, tmp_path / "table", batch=40, tokens_per_shard=20)
    done = [count for count, _ in seen]
    assert done[0] == 0
    assert done == sorted(set(done))
    assert seen[-1] == (len(table), len(table))
    assert {total for _, total in seen} == {len(table)}


def test_unknown_logits_are_refused(documents, tmp_path):
    model = tiny_model()
    model.register_forward_hook(lambda m, a, out: setattr(out, "logits", out.logits**3))
    with pytest.raises(ValueError, match="makes its logits in an unknown way"):
        collect(model, documents, tmp_path / "table")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("times", [2, 20])
def test_unknown_softcap_is_refused(documents, tmp_path, dtype, times):
    model = tiny_model().to(dtype)
    cap = times * direct(model, documents)[1].abs().max()

    def bend(_, args, output):
        output.logits = torch.tanh(output.logits / cap) * cap

    model.register_forward_hook(bend)
    with pytest.raises(ValueError, match="makes its logits in an unknown way"):
        collect(model, documents, tmp_path / "table")


def xlnet():
    options = {"vocab_size": 300, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24}
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**options))


def test_a_model_that_looks_ahead_is_refused(documents, tmp_path):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="change with the tokens after them"):
        collect(xlnet(), documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_a_model_with_a_head_is_refused(documents, tmp_path):
    for model in (tiny_model(), with_adapter(tiny_model(), "v_proj")):
        fitted = FittedHead.from_temperature(3.0, fingerprint_of(model))
        with attached(model, fitted), pytest.raises(ValueError, match="has a head attached"):
            collect(model, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(("family", "place"), [("Llama", "cpu"), ("Qwen2", "disk")])
def test_offloaded_weights(documents, tmp_path, family, place):
    accelerate = pytest.importorskip("accelerate")
    model = tiny_model(family)
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path / "weights", execution_device="cpu")
    assert fingerprint_of(model) == fingerprint_of(tiny_model(family))
    table = collect(model, documents, tmp_path / "table")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert_same_table(
        table, collect(tiny_model(family), documents, tmp_path / "table")
    )  # and the same settings
    assert_same_table(table, collect(tiny_model(family), documents, tmp_path / "plain"))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_an_adapter_that_adds_tokens_is_refused(documents, tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(tiny_model(), config)
    with pytest.raises(ValueError, match="makes its logits in an unknown way"):
        collect(tuned, documents, tmp_path / "table")


def test_nothing_is_written_for_a_model_that_is_refused(documents, tmp_path):
    broken = tiny_model()
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite"):
        collect(broken, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize(
    ("family", "targets", "trained"),
    [
        ("Llama", ["q_proj", "v_proj"], None),
        ("Gemma2", ["q_proj", "v_proj"], None),
        ("Llama", ["o_proj", "lm_head"], None),
        ("Llama", ["q_proj"], ["lm_head"]),
    ],
)
def test_a_table_sees_the_adapter(tmp_path, family, targets, trained):
    model = with_adapter(tiny_model(family), *targets, modules_to_save=trained)
    if trained:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
    documents = [{"input_ids": ids} for ids in ([1, 5, 6, 7, 8], [1, 9, 8], list(range(1, 30)))]
    table = collect(model, documents, tmp_path / "adapted")
    base = collect(tiny_model(family), documents, tmp_path / "base")
    merged = collect(copy.deepcopy(model).merge_and_unload(), documents, tmp_path / "merged")
    for name in ("table", "own_gap"):
        got, same, other = (getattr(t.records(), name) for t in (table, merged, base))
        np.testing.assert_allclose(got, same, rtol=1e-4, atol=1e-4)
        assert abs(got - other).max() > 0.1
    np.testing.assert_allclose(table.hidden(), merged.hidden(), rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match=r"another (model|folder)"):
        collect(tiny_model(family), documents, tmp_path / "adapted")


class Killed(Exception):
    pass


def killer(after):
    def progress(done, total):
        if done >= after:
            raise Killed

    return progress


def test_interrupted_run_is_resumed(model, documents, tmp_path):
    options: Any = {"tokens_per_shard": 20, "batch": 20}
    whole = collect(model, documents, tmp_path / "whole", **options)
    folder = tmp_path / "killed"
    with pytest.raises(Killed), use(progress=killer(35)):
        collect(model, documents, folder, **options)
    shards = sorted(folder.glob("shard-*"))
    assert 0 < len(shards) < len(list((tmp_path / "whole").glob("shard-*")))
    with pytest.raises(ValueError, match="is not finished"):
        open_table(folder)
    rest = folder / f".shard-{len(shards):05d}"  # as an abrupt end leaves it
    rest.mkdir()
    (rest / "hidden.npy").write_bytes(b"half")
    stamps = [(shard / "hidden.npy").stat().st_mtime_ns for shard in shards]
    seen: list[int] = []
    with use(progress=lambda *counts: seen.append(counts[0])):
        resumed = collect(model, documents, folder, **options)
    assert_same_table(resumed, whole)
    assert seen[0] == sum(len(np.load(shard / "top.npy")) for shard in shards)
    assert seen[-1] == len(whole)
    assert stamps == [(shard / "hidden.npy").stat().st_mtime_ns for shard in shards]
    assert [path.name for path in folder.glob(".*")] == [".table.json.lock"]


def test_one_process_at_a_time_writes_a_table(model, documents, tmp_path):
    with locked(tmp_path / "table.json"), pytest.raises(ValueError, match="by another process"):
        collect(model, documents, tmp_path)
    assert not (tmp_path / "table.json").exists()
    seen: list[str] = []

    def again(done, total):
        if done and not seen:
            with pytest.raises(ValueError, match="by another process") as refused:
                collect(model, documents, tmp_path)
            seen.append(str(refused.value))

    with use(progress=again):
        table = collect(model, documents, tmp_path)
    assert seen
    assert_same_table(table, collect(model, documents, tmp_path))


def test_a_small_table_has_shards_too(documents, tmp_path, monkeypatch):
    """So that an interruption does not cost all of it."""
    monkeypatch.setattr(module, "_MIN_SHARD", 10)
    collect(tiny_model(), documents, tmp_path)
    assert len(list(tmp_path.glob("shard-*"))) > 4


def test_a_run_ends_with_an_error_when_the_disk_is_full(model, documents, tmp_path, monkeypatch):
    options: Any = {"tokens_per_shard": 20, "batch": 20}
    whole = collect(model, documents, tmp_path / "whole", **options)
    save, room = np.save, [25_000]

    def limited(stream, values, **how):
        room[0] -= values.nbytes
        if room[0] < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        save(stream, values, **how)

    monkeypatch.setattr(np, "save", limited)
    message = r"shard-0000\d could not be written \(No space left on device\).*start again"
    with pytest.raises(OSError, match=message):
        collect(model, documents, tmp_path / "full", **options)
    monkeypatch.undo()
    kept, wanted = (len([*(tmp_path / name).glob("shard-*")]) for name in ("full", "whole"))
    assert 0 < kept < wanted
    assert not [*(tmp_path / "full").glob(".shard-*")]
    assert_same_table(collect(model, documents, tmp_path / "full", **options), whole)


def test_a_whole_table_is_not_collected_again(model, documents, tmp_path):
    first = collect(model, documents, tmp_path)
    calls = []
    hook = model.model.register_forward_hook(lambda *a: calls.append(a[2]))
    second = collect(model, documents, tmp_path)
    hook.remove()
    assert_same_table(first, second)
    assert len(calls) <= 3  # the look at how the model makes its logits


def test_tables_of_several_processes_join(model, tmp_path, monkeypatch):
    silent = {"input_ids": [3, 4, 5], "labels": [-100] * 3}
    documents = [silent, *drawn_documents(), silent]
    documents.insert(4, silent)
    one = collect(model, documents, tmp_path / "one", batch=1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    sizes = []
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        sizes.append(len(collect(model, documents, tmp_path / "three", batch=1)))
    joined = open_table(tmp_path / "three")
    assert_same_table(one, joined)
    parts = [open_table(tmp_path / "three" / f"rank-{rank}") for rank in range(3)]
    assert joined.collections == tuple(source for part in parts for source in part.collections)
    assert len(set(joined.collections)) == 3
    assert min(sizes) > 0
    assert sum(sizes) == len(one)
    shutil.rmtree(tmp_path / "three" / "rank-1")
    with pytest.raises(ValueError, match="all 3 processes"):
        open_table(tmp_path / "three")


def test_unlabelled_documents_at_the_end(model, tmp_path):
    silent = [{"input_ids": [5]}, {"input_ids": [4, 5], "labels": [-100, -100]}]
    long = [{"input_ids": list(range(3, 15))}]
    table = collect(model, long + silent, tmp_path / "table", tokens_per_shard=5)
    assert_same_table(table, collect(model, long, tmp_path / "long"))


def test_a_rank_without_the_number_of_processes(model, documents, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(
        ValueError, match=r"RANK must be below WORLD_SIZE .*, got 1 and 1: set both"
    ):
        collect(model, documents, tmp_path)


def test_more_processes_than_documents(model, documents, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="start fewer processes"):
        collect(model, documents[:2], tmp_path)


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([], ValueError, "must not be empty"),
        ([{"input_ids": [5, 6, 7], "labels": [5, -100, -100]}], ValueError, "no token of the 1"),
        ([{"input_ids": [5]}], ValueError, "no token"),
        ([{"input_ids": []}], ValueError, "no token"),
        ([{"input_ids": [0.5, 1.0]}], TypeError, r"input_ids of documents\[0\] must be integers"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, r"must both be \(t,\)"),
        ([{"labels": [1]}], ValueError, "must have input_ids"),
        ([{"input_ids": [1, 300]}], ValueError, "the tokenizer of this model"),
        ([{"input_ids": [1, -1]}], ValueError, "the tokenizer of this model"),
        (["text"], ValueError, "needs a tokenizer"),
    ],
)
def test_bad_documents(model, tmp_path, documents, error, message):
    with pytest.raises(error, match=message):
        collect(model, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_documents_of_other_kinds(model, tmp_path):
    tokenizer = word_tokenizer(["<pad>", "<s>", "</s>", "<unk>"])
    others: list[Any] = [3, [], ["a", "b", "c"], [{"role": "user"}]]
    for document in others:
        with pytest.raises(TypeError, match=r"documents\[0\] must be a string"):
            collect(model, [document], tmp_path / "table", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no token"):
        collect(model, [""], tmp_path / "table", tokenizer=tokenizer)


def test_one_text_is_no_list_of_documents(model, tmp_path):
    with pytest.raises(TypeError, match=r"got 'chats\.jsonl': of a path"):
        collect(model, "chats.jsonl", tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("label", [300, -7])
def test_labels_outside_the_vocabulary_are_refused(model, tmp_path, label):
    wrong = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [-100, 2, label]}]
    with pytest.raises(ValueError, match=rf"labels of documents\[1\] must be .* got {label}"):
        collect(model, wrong, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_more_tokens_than_positions(tmp_path):
    with pytest.raises(ValueError, match="length must be at most 64"):
        collect(tiny_model("GPT2"), drawn_documents([65]), tmp_path / "table")
    assert (
        len(collect(tiny_model("GPT2"), drawn_documents([65]), tmp_path / "table", length=64)) > 0
    )


def test_models_without_output_embeddings(documents, tmp_path):
    for model in (tiny_model().model, torch.nn.Linear(3, 3)):
        with pytest.raises(ValueError, match="must have output embeddings"):
            collect(model, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("option", ["batch", "tokens_per_shard", "length"])
def test_sizes_must_be_positive(model, documents, tmp_path, option):
    none: Any = {option: 0}
    with pytest.raises(ValueError, match=f"{option} must be"):
        collect(model, documents, tmp_path / "table", **none)


def test_folder_with_other_files_is_refused(model, documents, tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"must be new, empty or hold the same table.*notes"):
        collect(model, documents, tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"must be new, empty.*notes"):
        collect(model, documents, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_tables_of_other_settings(model, documents, tmp_path):
    collect(model, documents, tmp_path)
    with pytest.raises(ValueError, match=r"the table in .* belongs to another model"):
        collect(tiny_model("Qwen2"), documents, tmp_path)
    changed = [dict(document) for document in documents]
    changed[0]["input_ids"] = [3, *changed[0]["input_ids"][1:]]
    others: list[tuple[Any, Any]] = [
        (documents[1:], {}),
        (changed, {}),
        (documents, {"length": 8}),
        (documents, {"tokens_per_shard": 30}),
    ]
    for other, options in others:
        with pytest.raises(ValueError, match="a table of other settings"):
            collect(model, other, tmp_path, **options)
    with pytest.raises(ValueError, match="a table of other settings"):
        collect(tiny_model().to(torch.bfloat16), documents, tmp_path)
    tuned = tiny_model()
    with torch.no_grad():
        tuned.model.layers[0].self_attn.v_proj.weight += 0.1
    with pytest.raises(ValueError, match="a table of other settings"):
        collect(tuned, documents, tmp_path)
    assert len(collect(model, documents, tmp_path)) > 0


def scale(adapted):
    for layer in adapted.modules():
        if hasattr(layer, "scale_layer"):
            layer.scale_layer(0.5)


@pytest.mark.parametrize(
    "change",
    [
        lambda adapted: adapted.set_adapter("other"),
        lambda adapted: adapted.base_model.disable_adapter_layers(),  # as disable_adapter() does
        lambda adapted: adapted.merge_adapter(),
        scale,
    ],
    ids=["other", "disabled", "merged", "scaled"],
)
def test_tables_of_other_adapters(documents, tmp_path, request, change):
    adapted = with_adapter(tiny_model(), "v_proj", "up_proj")
    adapted.add_adapter("other", adapted.peft_config["default"])
    with torch.no_grad():  # the numbers that are looked at stay when the adapter is merged
        for name, weight in adapted.named_parameters():
            if "lora_B.default" in name:
                weight[0] = 0
    before = collect(adapted, documents, tmp_path / "before")
    assert_same_table(collect(copy.deepcopy(adapted), documents, tmp_path / "before"), before)
    change(adapted)
    with pytest.raises(ValueError, match="a table of other settings"):
        collect(adapted, documents, tmp_path / "before")
    after = collect(adapted, documents, tmp_path / "after")
    if "merged" in request.node.name:
        assert_same_table(after, before, exact=False)
    else:
        assert np.abs(after.hidden() - before.hidden()).max() > 0.05
    if "disabled" in request.node.name:
        assert_same_table(after, collect(tiny_model(), documents, tmp_path / "plain"))
