"""Token tables against direct passes of tiny random models."""

import copy
import importlib
import json
import shutil
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant.llm import (
    FittedHead,
    TokenTable,
    ask,
    attached,
    fit_head,
    mark_of,
    open_table,
    token_claims,
)
from calibrant.llm.fingerprint import ModelMark
from calibrant.llm.heads.modules import make_head
from calibrant.llm.tokens.collect import collect
from calibrant.llm.tokens.documents import encoded

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
module = importlib.import_module("calibrant.llm.tokens.collect")  # the function has the same name

VOCABULARY = 300
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.4,  # far from uniform, so that errors show
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.4,
}


def llama(**more):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, **more)).eval()


def gemma(**more):
    torch.manual_seed(1)
    options = {"head_dim": 4, "final_logit_softcapping": 3.0, "sliding_window": 8, **more}
    return transformers.Gemma2ForCausalLM(transformers.Gemma2Config(**SMALL, **options)).eval()


def qwen2():
    torch.manual_seed(2)
    config = transformers.Qwen2Config(**SMALL, tie_word_embeddings=True)
    return transformers.Qwen2ForCausalLM(config).eval()


def qwen3():
    torch.manual_seed(3)
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SMALL, head_dim=4)).eval()


def gpt2():
    torch.manual_seed(4)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)).eval()


def granite(scaling=4.0):
    torch.manual_seed(5)
    config = transformers.GraniteConfig(**SMALL, logits_scaling=scaling)
    return transformers.GraniteForCausalLM(config).eval()


def cohere():
    torch.manual_seed(6)
    config = transformers.CohereConfig(**SMALL, logit_scale=0.3)
    return transformers.CohereForCausalLM(config).eval()


def recurrent_gemma():
    torch.manual_seed(7)
    options = {"lru_width": 16, "block_types": ["recurrent", "attention"], "logits_soft_cap": 3.0}
    config = transformers.RecurrentGemmaConfig(**SMALL, **options)
    return transformers.RecurrentGemmaForCausalLM(config).eval()


def xlstm():
    torch.manual_seed(8)
    options = {"hidden_size": 16, "num_heads": 2, "num_hidden_layers": 1}
    config = transformers.xLSTMConfig(vocab_size=VOCABULARY, output_logit_soft_cap=3.0, **options)
    found = transformers.xLSTMForCausalLM(config).eval()
    torch.nn.init.normal_(found.lm_head.weight, std=0.4)
    return found


def llama4():
    torch.manual_seed(9)
    options = {"head_dim": 4, "intermediate_size_mlp": 24, "num_local_experts": 2}
    config = transformers.Llama4TextConfig(**SMALL, **options)
    return transformers.Llama4ForCausalLM(config).eval()


FAMILIES = [llama, qwen2, qwen3, gemma, gpt2, granite, cohere, recurrent_gemma, xlstm, llama4]


@pytest.fixture(scope="module")
def model():
    return llama()


def drawn(sizes, seed=0):
    """Ready ids, with about a third of the labels masked."""
    rng = np.random.default_rng(seed)
    found = []
    for size in sizes:
        ids = rng.integers(3, VOCABULARY, size)
        labels = np.where(rng.random(size) < 0.3, -100, ids)
        labels[-1] = ids[-1]
        found.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return found


SIZES = [7, 20, 2, 13, 33, 5, 9, 16]


@pytest.fixture(scope="module")
def documents():
    return drawn(SIZES)


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


def assert_same(one, other, exact=True):
    """Two tables that are equal, bit by bit or up to the order of sums."""
    tolerance = 0 if exact else 1e-3
    np.testing.assert_array_equal(one.documents, other.documents)
    np.testing.assert_allclose(one.hidden(), other.hidden(), rtol=tolerance, atol=tolerance)
    for name in ("table", "own_gap", "mean_gap", "gaps", "top"):
        got, wanted = getattr(one.records(), name), getattr(other.records(), name)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(one.records().labels, other.records().labels)
    np.testing.assert_array_equal(one.records().correct, other.records().correct)


# The pass.


@pytest.mark.parametrize("family", FAMILIES)
def test_a_table_holds_what_a_direct_pass_gives(family, documents, tmp_path):
    model = family()
    table = collect(model, documents, tmp_path / "table", batch=64)
    hidden, logits, labels, owners = direct(model, documents)
    records = table.records()
    assert len(table) == len(labels) == len(records)
    np.testing.assert_array_equal(table.documents, owners)
    np.testing.assert_array_equal(records.labels, labels)
    np.testing.assert_allclose(table.hidden(), hidden, rtol=2e-3, atol=1e-4)
    np.testing.assert_array_equal(records.correct, logits.argmax(-1) == labels)
    assert records.classes == VOCABULARY
    for b in (0.3, 1.0, 2.7):
        log_probs = (b * logits.double()).log_softmax(-1)
        curve = records.log_partition(b)
        np.testing.assert_allclose(np.exp(-curve.value), log_probs.max(-1)[0].exp(), atol=2e-5)
        loss = -log_probs.gather(-1, labels[:, None])[:, 0]
        np.testing.assert_allclose(b * records.own_gap + curve.value, loss, atol=1e-4)


@pytest.mark.parametrize("scaling", [0.8, 1.0005])
def test_scales_near_one_are_measured(documents, tmp_path, scaling):
    model = granite(scaling)
    table = collect(model, documents, tmp_path / "table")
    np.testing.assert_allclose(table.records().top, direct(model, documents)[1].amax(-1), rtol=2e-5)


def test_a_model_may_write_over_its_logits(documents, tmp_path):
    model = llama()
    model.register_forward_hook(lambda m, a, out: setattr(out, "logits", out.logits.mul_(0.5)))
    table = collect(model, documents, tmp_path / "table")
    np.testing.assert_allclose(table.records().top, direct(model, documents)[1].amax(-1), rtol=2e-5)


def test_the_softcap_matters_to_gemma(documents, tmp_path):
    """Otherwise the comparison above would not show that it is applied."""
    logits = direct(gemma(), documents)[1]
    assert logits.abs().max() > 2.5
    uncapped = direct(gemma(final_logit_softcapping=None), documents)[1]
    assert uncapped.abs().max() > 6


def test_padding_and_batches_have_no_effect(model, documents, tmp_path):
    alone = collect(model, documents, tmp_path / "alone", batch=1)
    together = collect(model, documents, tmp_path / "together", batch=10_000)
    assert_same(alone, together, exact=False)


def mamba():
    """Its states stay in single precision."""
    torch.manual_seed(10)
    options = {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}
    config = transformers.MambaConfig(vocab_size=VOCABULARY, **options)
    return transformers.MambaForCausalLM(config).eval()


@pytest.mark.parametrize("family", [llama, mamba])
def test_half_precision(family, documents, tmp_path):
    model = family().to(torch.bfloat16)
    table = collect(model, documents, tmp_path / "table", batch=1)
    hidden, logits, labels, _ = direct(model, documents)
    np.testing.assert_allclose(table.hidden(), hidden.float(), rtol=0.02, atol=0.02)
    loss = torch.nn.functional.cross_entropy(logits.float(), labels, reduction="none")
    records = table.records()
    found = records.own_gap + records.log_partition(1.0).value
    np.testing.assert_allclose(found.mean(), loss.mean(), rtol=0.01)


def test_logits_never_exceed_the_chunk(model, documents, tmp_path, monkeypatch):
    limit, seen = 10 * VOCABULARY, []
    monkeypatch.setattr(module, "LOGITS", limit)
    hook = model.lm_head.register_forward_hook(lambda *a: seen.append(a[2].numel()))
    table = collect(model, documents, tmp_path / "table")
    hook.remove()
    assert max(seen) <= limit
    assert len(seen) >= len(table) / 10
    monkeypatch.undo()
    assert_same(table, collect(model, documents, tmp_path / "other"), exact=False)


def test_the_model_is_left_as_it_was(documents, tmp_path):
    model = llama(attention_dropout=0.5).train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    first = collect(model, documents, tmp_path / "a")
    assert_same(first, collect(model, documents, tmp_path / "b"))  # no dropout
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_what_is_beyond_half_precision_is_cut(documents, tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.mul_(1e5)
        model.lm_head.weight.mul_(1e-5)
    hidden = collect(model, documents, tmp_path / "table").hidden()
    assert np.isfinite(hidden).all()
    assert np.abs(hidden).max() == np.finfo(np.float16).max


def test_documents_are_cut_at_length(model, documents, tmp_path):
    short = [{name: part[:8] for name, part in each.items()} for each in documents]
    cut = collect(model, documents, tmp_path / "cut", length=8)
    assert_same(cut, collect(model, short, tmp_path / "short"))
    assert len(cut) < len(collect(model, documents, tmp_path / "whole"))


def test_progress_counts_all_tokens(model, documents, tmp_path):
    seen = []
    table = collect(
        model,
        documents,
        tmp_path / "table",
        batch=40,
        tokens_per_shard=20,
        progress=lambda *counts: seen.append(counts),
    )
    done = [count for count, _ in seen]
    assert done[0] == 0
    assert done == sorted(set(done))
    assert seen[-1] == (len(table), len(table))
    assert {total for _, total in seen} == {len(table)}


def test_a_model_that_makes_logits_in_another_way_is_refused(documents, tmp_path):
    model = llama()
    model.register_forward_hook(lambda m, a, out: setattr(out, "logits", out.logits**3))
    with pytest.raises(ValueError, match="in a way that is not known here"):
        collect(model, documents, tmp_path / "table")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("times", [2, 20])
def test_a_cap_that_is_not_known_is_refused(documents, tmp_path, dtype, times):
    model = llama().to(dtype)
    cap = times * direct(model, documents)[1].abs().max()

    def bend(_, args, output):
        output.logits = torch.tanh(output.logits / cap) * cap

    model.register_forward_hook(bend)
    with pytest.raises(ValueError, match="in a way that is not known here"):
        collect(model, documents, tmp_path / "table")


def xlnet():
    options = {"vocab_size": VOCABULARY, "d_model": 16, "n_layer": 2, "n_head": 4, "d_inner": 24}
    return transformers.XLNetLMHeadModel(transformers.XLNetConfig(**options))


def cpm_ant():
    options = {"vocab_size": VOCABULARY, "hidden_size": 16, "num_attention_heads": 4, "dim_head": 4}
    small = {"dim_ff": 24, "num_hidden_layers": 1, "prompt_types": 4, "prompt_length": 4}
    return transformers.CpmAntForCausalLM(transformers.CpmAntConfig(**options, **small))


@pytest.mark.parametrize("family", [xlnet, cpm_ant])
def test_a_model_that_looks_ahead_is_refused(documents, tmp_path, family):
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="hidden states change with the tokens after them"):
        collect(family(), documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_a_model_with_a_head_is_refused(documents, tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["v_proj"], task_type="CAUSAL_LM")
    for model in (llama(), peft.get_peft_model(llama(), config)):
        fitted = FittedHead.of_temperature(3.0, mark_of(model))
        with attached(model, fitted), pytest.raises(ValueError, match="with a head attached"):
            collect(model, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("family", [llama, qwen2])
@pytest.mark.parametrize("place", ["cpu", "disk"])
def test_weights_that_are_kept_elsewhere(documents, tmp_path, family, place):
    accelerate = pytest.importorskip("accelerate")
    model = family()
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    else:
        accelerate.disk_offload(model, tmp_path / "weights", execution_device="cpu")
    assert mark_of(model) == mark_of(family())
    table = collect(model, documents, tmp_path / "table")
    assert {weight.device.type for weight in model.parameters()} == {"meta"}
    assert_same(table, collect(family(), documents, tmp_path / "table"))  # and the same settings
    assert_same(table, collect(family(), documents, tmp_path / "plain"))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_an_adapter_that_adds_tokens_is_refused(documents, tmp_path, kind):
    peft = pytest.importorskip("peft")
    config = getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)
    tuned = peft.get_peft_model(llama(), config)
    with pytest.raises(ValueError, match="in a way that is not known here"):
        collect(tuned, documents, tmp_path / "table")


def test_a_model_that_overflows_is_refused(documents, tmp_path):
    model = llama()
    with torch.no_grad():
        model.model.norm.weight.mul_(torch.inf)
    with pytest.raises(ValueError, match="NaN or infinite"):
        collect(model, documents, tmp_path / "table")


# Shards, resuming and ranks.


class Killed(Exception):
    pass


def killer(after):
    def progress(done, total):
        if done >= after:
            raise Killed

    return progress


def test_a_killed_run_goes_on_where_it_stopped(model, documents, tmp_path):
    options: Any = {"tokens_per_shard": 20, "batch": 20}
    whole = collect(model, documents, tmp_path / "whole", **options)
    folder = tmp_path / "killed"
    with pytest.raises(Killed):
        collect(model, documents, folder, progress=killer(35), **options)
    shards = sorted(folder.glob("shard-*"))
    assert 0 < len(shards) < len(list((tmp_path / "whole").glob("shard-*")))
    with pytest.raises(ValueError, match="is not finished"):
        open_table(folder)
    rest = folder / f".shard-{len(shards):05d}"  # as an abrupt end leaves it
    rest.mkdir()
    (rest / "hidden.npy").write_bytes(b"half")
    stamps = [(shard / "hidden.npy").stat().st_mtime_ns for shard in shards]
    seen: list[int] = []
    resumed = collect(model, documents, folder, progress=lambda *a: seen.append(a[0]), **options)
    assert_same(resumed, whole)
    assert seen[0] == sum(len(np.load(shard / "top.npy")) for shard in shards)
    assert seen[-1] == len(whole)
    assert stamps == [(shard / "hidden.npy").stat().st_mtime_ns for shard in shards]
    assert not list(folder.glob(".*"))


def test_a_whole_table_is_not_collected_again(model, documents, tmp_path):
    first = collect(model, documents, tmp_path)
    calls = []
    hook = model.model.register_forward_hook(lambda *a: calls.append(a[2]))
    second = collect(model, documents, tmp_path)
    hook.remove()
    assert_same(first, second)
    assert len(calls) <= 3  # the look at how the model makes its logits


def test_ranks_join_to_the_table_of_one_process(model, tmp_path, monkeypatch):
    silent = {"input_ids": [3, 4, 5], "labels": [-100] * 3}
    documents = [silent, *drawn(SIZES), silent]
    documents.insert(4, silent)
    one = collect(model, documents, tmp_path / "one", batch=1)
    monkeypatch.setenv("WORLD_SIZE", "3")
    sizes = []
    for rank in (2, 0, 1):
        monkeypatch.setenv("RANK", str(rank))
        sizes.append(len(collect(model, documents, tmp_path / "three", batch=1)))
    joined = open_table(tmp_path / "three")
    assert_same(one, joined)
    parts = [open_table(tmp_path / "three" / f"rank-{rank}") for rank in range(3)]
    assert joined.sources == tuple(source for part in parts for source in part.sources)
    assert len(set(joined.sources)) == 3
    assert min(sizes) > 0
    assert sum(sizes) == len(one)
    shutil.rmtree(tmp_path / "three" / "rank-1")
    with pytest.raises(ValueError, match="all 3 processes"):
        open_table(tmp_path / "three")


def test_documents_at_the_end_that_do_not_count(model, tmp_path):
    silent = [{"input_ids": [5]}, {"input_ids": [4, 5], "labels": [-100, -100]}]
    long = [{"input_ids": list(range(3, 15))}]
    table = collect(model, long + silent, tmp_path / "table", tokens_per_shard=5)
    assert_same(table, collect(model, long, tmp_path / "long"))


def test_a_rank_without_the_number_of_processes(model, documents, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(ValueError, match=r"RANK must be below WORLD_SIZE, got 1 and 1.*set both"):
        collect(model, documents, tmp_path)


def test_more_processes_than_documents(model, documents, tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    with pytest.raises(ValueError, match="start fewer processes"):
        collect(model, documents[:2], tmp_path)


def test_several_folders_are_one_table(model, documents, tmp_path):
    first = collect(model, documents[:3], tmp_path / "a", batch=1)
    second = collect(model, documents[3:], tmp_path / "b", batch=1)
    both = open_table([tmp_path / "a", tmp_path / "b"])
    assert_same(both, collect(model, documents, tmp_path / "all", batch=1))
    np.testing.assert_array_equal(both.hidden(slice(len(first), None)), second.hidden())
    collect(gemma(), documents[:1], tmp_path / "c")
    with pytest.raises(ValueError, match="belongs to another model"):
        open_table([tmp_path / "a", tmp_path / "c"])


# Rows of a table.


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
    mark = ModelMark("tiny", 2, 4, "0" * 16, None)
    half = np.ones((4, 2), np.float16)
    np.testing.assert_array_equal(TokenTable.of(half, records, [0] * 4, mark).hidden(), half)
    table = TokenTable.of(np.ones((4, 2)) * 1e9, records, [0, 0, 3, 3], mark)
    assert table.hidden().max() == np.finfo(np.float16).max
    np.testing.assert_array_equal(table.records(table.documents == 3).correct, [True, False])
    for hidden, numbers in ((np.ones((4, 3)), [0] * 4), (np.ones((4, 2)), [0] * 3)):
        with pytest.raises(ValueError, match="must be"):
            TokenTable.of(hidden, records, numbers, mark)
    with pytest.raises(ValueError, match="must not decrease"):
        TokenTable.of(np.ones((4, 2)), records, [1, 0, 0, 0], mark)


# Documents.

WORDS = [
    *("user", "assistant", "system", "hello", "there", "how", "are", "you"),
    *("fine", "thanks", "good", "bye", "what", "is", "it"),
]
# <nl> is the line break after a turn, which belongs to the answer only where nothing else ends it
CHATML = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> <nl> "
    "{% endfor %}{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)
MARKED = (
    "{% for m in messages %}<|start|> {{ m['role'] }} {% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }} <|end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }} <|end|>{% endif %} <nl> {% endfor %}"
)
FORGETFUL = (  # only the last answer has thoughts, as in Qwen3
    "{% for m in messages %}<|start|> {{ m['role'] }} "
    "{% if loop.last and m['role'] == 'assistant' %}<think> {% endif %}"
    "{{ m['content'] }} <|end|> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% endif %}"
)


PHI3 = (  # with an end of all text
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <|end|> <nl> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% else %}</s>{% endif %}"
)
LLAMA3 = (  # as it came out at first: always ready for an answer
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] | trim }} <|end|> "
    "{% endfor %}<|start|> assistant "
)
ENDLESS = (  # special tokens begin turns, and none ends them
    "{% for m in messages %}<|start|> {{ m['role'] }} {{ m['content'] }} <nl> {% endfor %}"
    "{% if add_generation_prompt %}<|start|> assistant {% else %}</s>{% endif %}"
)


def made_tokenizer(around):
    names = ["<pad>", "<s>", "</s>", "<unk>", "<|start|>", "<|end|>", "<nl>", "<think>", *WORDS]
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    )
    inner.decoder = tokenizers.decoders.Replace("<nl>", "\n")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.add_special_tokens(["<s>", "</s>", "<|start|>", "<|end|>"])
    inner.post_processor = tokenizers.processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


@pytest.fixture(scope="module")
def tokenizer():
    return made_tokenizer("<s> $A")


CHAT = [
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "how are you"},
    {"role": "user", "content": "fine thanks"},
    {"role": "assistant", "content": "good bye"},
]


def words(tokenizer, table):
    return " ".join(tokenizer.convert_ids_to_tokens(table.records().labels.tolist()))


def test_every_token_of_a_text_counts_but_the_first(model, tokenizer, tmp_path):
    table = collect(model, ["hello there", "what is it"], tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == "hello there what is it"
    np.testing.assert_array_equal(table.documents, [0, 0, 1, 1, 1])


def test_only_the_answer_of_a_pair_counts(model, tokenizer, tmp_path):
    pairs = [("hello there", "how are you"), ["what is it", "fine"]]
    table = collect(model, pairs, tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == "how are you fine"
    ids = [[1, 11, 12, 13, 14, 15], [1, 20, 21, 22, 16]]  # one <s> only
    ready = [
        {"input_ids": row, "labels": [-100] * at + row[at:]}
        for row, at in zip(ids, (3, 4), strict=True)
    ]
    assert_same(table, collect(model, ready, tmp_path / "ready"))


@pytest.mark.parametrize("text", ["hello there", "<s> hello there", "<s>"])
def test_a_text_begins_once(tokenizer, text):
    wanted = [1, 11, 12] if "hello" in text else [1]
    plain, pair = encoded([text, (text, "<s> you")], tokenizer, 99)
    assert plain.ids.tolist() == wanted
    assert pair.ids.tolist() == [*wanted, 1, 15]


@pytest.mark.parametrize("around", ["<s> $A </s>", "$A </s>"])
def test_nothing_ends_a_prompt(model, tokenizer, around):
    ending = made_tokenizer(around)
    start = [1] if "<s>" in around else []
    pairs = ("hello </s>", "you"), ("", "you"), ("<s> hello", "you")
    text, pair, empty, rendered = encoded(["it", *pairs], ending, 99)
    assert rendered.ids.tolist() == [1, 11, 15]
    assert text.ids.tolist() == [*start, 22, 2]  # a text as the tokenizer has it
    assert pair.ids.tolist() == [*start, 11, 2, 15]
    assert pair.labels.tolist() == [-100] * len(start) + [-100, -100, 15]
    assert empty.ids.tolist() == [*start, 15]
    plain = tokenizer if start else made_tokenizer("$A")
    (found,), (wanted,) = (ask(model, each, ["what is it"], most=4) for each in (ending, plain))
    assert found.pieces == wanted.pieces
    np.testing.assert_array_equal(found.probs, wanted.probs)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (PHI3, "how are you <|end|> good bye <|end|>"),
        (LLAMA3, "how are you <|end|> good bye <|end|>"),
        (ENDLESS, "how are you good bye <nl> </s>"),
        (CHATML, "how are you <|end|> good bye <|end|>"),
        (MARKED, "how are you <|end|> good bye <|end|>"),
        (FORGETFUL, "<think> good bye <|end|>"),
        (CHATML.replace(" <|end|>", ""), "how are you <nl> good bye <nl>"),
    ],
)
def test_only_the_assistant_counts_in_a_chat(model, tokenizer, tmp_path, template, said):
    tokenizer.chat_template = template
    table = collect(model, [CHAT], tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == said


@pytest.mark.parametrize("template", [CHATML, PHI3, LLAMA3])
@pytest.mark.parametrize(
    ("turns", "said"),
    [
        (CHAT[:3], "how are you <|end|>"),
        (CHAT[1:], "how are you <|end|> good bye <|end|>"),
        (CHAT[1:3], "how are you <|end|>"),
        ([CHAT[0], {"role": "assistant", "content": ""}, *CHAT[2:]], "<|end|> good bye <|end|>"),
        (
            [CHAT[0], {"role": "assistant", "content": " are <|end|> you "}, CHAT[2]],
            "are <|end|> you <|end|>",
        ),
        ([*CHAT[:2], *CHAT[:2]], "how are you <|end|> how are you <|end|>"),
        ([*CHAT[:2], CHAT[3]], "how are you <|end|> good bye <|end|>"),
    ],
    ids=["ends with the user", "begins with it", "both", "empty", "special", "twice", "two turns"],
)
def test_answers_are_found_wherever_they_are(tokenizer, template, turns, said):
    tokenizer.chat_template = template
    (found,) = encoded([turns], tokenizer, 99)
    kept = found.labels[found.labels != -100]
    assert " ".join(tokenizer.convert_ids_to_tokens(kept.tolist())) == said
    np.testing.assert_array_equal(kept, found.ids[found.labels != -100])


@pytest.mark.parametrize("template", [CHATML, PHI3, LLAMA3])
def test_keys_without_a_value_change_nothing(tokenizer, template):
    tokenizer.chat_template = template
    filled = [{**turn, "tool_calls": None, "name": ""} for turn in CHAT]
    wanted, found = encoded([CHAT, filled], tokenizer, 99)
    np.testing.assert_array_equal(found.labels, wanted.labels)


def test_a_template_that_wants_the_user_first(tokenizer):
    tokenizer.chat_template = (
        "{% if messages | selectattr('role', 'equalto', 'user') | list | length == 0 %}"
        "{{ raise_exception('no user') }}{% endif %}" + CHATML
    )
    (found,) = encoded([CHAT[1:]], tokenizer, 99)  # the first answer cannot be told apart
    kept = found.labels[found.labels != -100].tolist()
    assert " ".join(tokenizer.convert_ids_to_tokens(kept)) == "good bye <|end|>"


def test_calls_of_tools_count(tokenizer):
    tokenizer.chat_template = CHATML.replace(
        "<|end|>", "{% if m['calls'] %}<|start|> {{ m['calls'] }} {% endif %}<|end|>"
    ).replace(" <nl>", "")
    calling = [CHAT[0], {**CHAT[1], "calls": "what is"}, CHAT[2]]
    for turns in (calling, calling[:2]):
        (found,) = encoded([turns], tokenizer, 99)
        kept = found.labels[found.labels != -100].tolist()
        wanted = "how are you <|start|> what is <|end|>"
        assert " ".join(tokenizer.convert_ids_to_tokens(kept)) == wanted


def splitting(names, pattern):
    """A tokenizer of these names, cut out by a pattern, which puts nothing between them."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({name: i for i, name in enumerate(names)})
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
    inner.decoder = tokenizers.decoders.Fuse()
    inner.add_special_tokens(["<end>"])
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner)


@pytest.mark.parametrize(("answer", "said"), [("how", "how<end>"), ("\n\nhow", "how<end>")])
def test_a_token_of_prompt_and_answer_does_not_count(answer, said):
    names = ["\n", "\n\n\n", "user", "assistant", "how", "you", "<end>"]
    breaking = splitting(names, r"\n+")
    breaking.chat_template = (
        "{% for m in messages %}{{ m['role'] + '\n' + m['content'] + '<end>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant\n' }}{% endif %}"
    )
    chat: list[Any] = [
        {"role": "user", "content": "you"},
        {"role": "assistant", "content": answer},
    ]
    (found,) = encoded([chat], breaking, 99)
    assert breaking.decode(found.labels[found.labels != -100]) == said
    breaking.chat_template = breaking.chat_template.replace("m['content']", "m['content'][0].text")
    parts = [{**turn, "content": [{"text": turn["content"]}]} for turn in chat]
    (same,) = encoded([parts], breaking, 99)
    np.testing.assert_array_equal(same.labels, found.labels)


def test_words_of_answers_have_their_blanks():
    names = ["user:", "assistant:", " how", " you", "<end>"]
    blank = splitting(names, " [a-z]+")
    blank.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '<end>' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    )
    roles = ("assistant", "user", "assistant")
    chat = [{"role": role, "content": "how"} for role in roles]
    (found,) = encoded([chat], blank, 99)
    assert found.labels.tolist() == [-100, 2, 4, -100, -100, -100, -100, 2, 4]


def test_chats_and_texts_mix(model, tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    chat = [{"role": "system", "content": "it is"}, *CHAT[:2]]
    table = collect(model, ["hello", chat, ("you", "are")], tmp_path, tokenizer=tokenizer)
    assert words(tokenizer, table) == "hello how are you <|end|> are"
    np.testing.assert_array_equal(table.documents, [0, 1, 1, 1, 1, 2])


def test_a_chat_without_answer_is_refused(model, tokenizer, tmp_path):
    tokenizer.chat_template = CHATML
    with pytest.raises(ValueError, match="no turn of the assistant was found in document 1"):
        collect(model, ["hello there", CHAT[:1]], tmp_path, tokenizer=tokenizer)


# Bad input.


@pytest.mark.parametrize(
    ("documents", "error", "message"),
    [
        ([], ValueError, "must not be empty"),
        ([{"input_ids": [5, 6, 7], "labels": [5, -100, -100]}], ValueError, "no token of the 1"),
        ([{"input_ids": [5]}], ValueError, "no token"),
        ([{"input_ids": []}], ValueError, "no token"),
        ([{"input_ids": [0.5, 1.0]}], TypeError, "input_ids of document 0 must be integers"),
        ([{"input_ids": [1, 2], "labels": [1]}], ValueError, r"must be \(t,\) both"),
        ([{"labels": [1]}], ValueError, "must have input_ids"),
        ([{"input_ids": [1, VOCABULARY]}], ValueError, "the tokenizer of this model"),
        ([{"input_ids": [1, -1]}], ValueError, "the tokenizer of this model"),
        (["text"], ValueError, "needs a tokenizer"),
    ],
)
def test_bad_documents(model, tmp_path, documents, error, message):
    with pytest.raises(error, match=message):
        collect(model, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_documents_of_other_kinds(model, tokenizer, tmp_path):
    others: list[Any] = [3, [], ["a", "b", "c"], [{"role": "user"}]]
    for document in others:
        with pytest.raises(TypeError, match="document 0 must be a string"):
            collect(model, [document], tmp_path / "table", tokenizer=tokenizer)
    with pytest.raises(ValueError, match="no token"):
        collect(model, [""], tmp_path / "table", tokenizer=tokenizer)


def test_more_tokens_than_positions(tmp_path):
    with pytest.raises(ValueError, match="length must be at most 64"):
        collect(gpt2(), drawn([65]), tmp_path / "table")
    assert len(collect(gpt2(), drawn([65]), tmp_path / "table", length=64)) > 0


def test_models_without_output_embeddings(documents, tmp_path):
    for model in (llama().model, torch.nn.Linear(3, 3)):
        with pytest.raises(ValueError, match="with output embeddings is wanted"):
            collect(model, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("option", ["batch", "tokens_per_shard", "length"])
def test_counts(model, documents, tmp_path, option):
    none: Any = {option: 0}
    with pytest.raises(ValueError, match=f"{option} must be"):
        collect(model, documents, tmp_path / "table", **none)


def test_folders_with_other_things(model, documents, tmp_path, monkeypatch):
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
        collect(qwen2(), documents, tmp_path)
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
        collect(llama().to(torch.bfloat16), documents, tmp_path)
    tuned = llama()
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
    peft = pytest.importorskip("peft")
    options = {"r": 2, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=["v_proj", "up_proj"], **options)
    adapted = peft.get_peft_model(llama(), config)
    adapted.add_adapter("other", config)
    with torch.no_grad():  # the numbers that are looked at stay when the adapter is merged
        for name, weight in adapted.named_parameters():
            if "lora_B.default" in name:
                weight[0] = 0
    before = collect(adapted, documents, tmp_path / "before")
    assert_same(collect(copy.deepcopy(adapted), documents, tmp_path / "before"), before)
    change(adapted)
    with pytest.raises(ValueError, match="a table of other settings"):
        collect(adapted, documents, tmp_path / "before")
    after = collect(adapted, documents, tmp_path / "after")
    if "merged" in request.node.name:
        assert_same(after, before, exact=False)
    else:
        assert np.abs(after.hidden() - before.hidden()).max() > 0.05
    if "disabled" in request.node.name:
        assert_same(after, collect(llama(), documents, tmp_path / "plain"))


def test_nothing_is_written_for_a_model_that_is_refused(documents, tmp_path):
    broken = llama()
    with torch.no_grad():
        broken.model.norm.weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN or infinite"):
        collect(broken, documents, tmp_path / "table")
    assert not (tmp_path / "table").exists()


@pytest.mark.parametrize("label", [VOCABULARY, -7])
def test_labels_that_are_no_tokens_are_named_with_their_document(model, tmp_path, label):
    wrong = [{"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 3], "labels": [-100, 2, label]}]
    with pytest.raises(ValueError, match=rf"labels of document 1 must be .* got {label}"):
        collect(model, wrong, tmp_path / "table")
    assert not (tmp_path / "table").exists()


def test_a_table_counts_once(model, documents, tmp_path):
    collect(model, documents, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match=r"b holds the same documents as .*a: a table counts once"):
        open_table([tmp_path / "a", tmp_path / "b"])


@pytest.mark.parametrize("content", ["[]", '{"format": 1}', '{"format": 1, "mark": {}}'])
def test_a_damaged_header(tmp_path, content):
    (tmp_path / "table.json").write_text(content)
    with pytest.raises(ValueError, match=r"table\.json (is damaged|has format)"):
        open_table(tmp_path)


def test_a_file_is_no_table(tmp_path):
    (tmp_path / "questions.txt").write_text("Who?")
    with pytest.raises(ValueError, match="is no token table"):
        open_table(tmp_path / "questions.txt")


# ------------------------------------------------------------------------------- states of prompts


@pytest.mark.parametrize("shard", [1 << 16, 12])
def test_prompts_change_nothing_but_the_states_that_are_kept(model, documents, tmp_path, shard):
    plain = collect(model, documents, tmp_path / "plain", tokens_per_shard=shard)
    table = collect(model, documents, tmp_path / "whole", tokens_per_shard=shard, prompts=True)
    assert_same(table, plain)
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
    for number, text in zip(order, texts, strict=True):
        ids, labels = (np.array(documents[number][key]) for key in ("input_ids", "labels"))
        found = model(input_ids=torch.tensor(ids)[None], output_hidden_states=True)
        np.testing.assert_allclose(text.states, found.hidden_states[-1][0, :-1], atol=2e-3)
        np.testing.assert_array_equal(text.places, np.flatnonzero(labels[1:] != -100))


def test_texts_of_tables_without_prompts(model, tmp_path):
    plain = [{"input_ids": document["input_ids"]} for document in drawn(SIZES)]
    table = collect(model, plain, tmp_path, tokens_per_shard=12)
    assert table.whole  # nothing is masked
    (text,) = table.texts(table.documents == 3)
    np.testing.assert_array_equal(text.states, table.hidden(table.documents == 3))
    np.testing.assert_array_equal(text.places, np.arange(SIZES[3] - 1))


@torch.no_grad()
def test_a_decoder_head_sees_on_tables_what_it_sees_in_the_model(model, documents, tmp_path):
    table = collect(model, documents, tmp_path, prompts=True)
    torch.manual_seed(0)
    head = make_head("decoder", width=16, attention_heads=2)
    torch.nn.init.normal_(head.get_parameter("last.weight"), std=0.3)
    fitted = FittedHead(head, table.mark, "given")
    claims = token_claims(table, fitted)
    for number, document in enumerate(documents):
        with attached(model, fitted):
            logits = model(input_ids=torch.tensor(document["input_ids"])[None]).logits[0, :-1]
        kept = torch.tensor(document["labels"])[1:] != -100
        wanted = logits.softmax(-1).amax(-1)[kept]
        np.testing.assert_allclose(claims.confidence[table.documents == number], wanted, rtol=5e-3)


def test_a_decoder_head_refuses_tables_without_prompts(model, documents, tmp_path):
    table = collect(model, documents, tmp_path / "plain")
    with pytest.raises(ValueError, match="collect again with prompts=True"):
        fit_head(table, "decoder")
    head = FittedHead(make_head("decoder", width=16, attention_heads=2), table.mark, "given")
    with pytest.raises(ValueError, match="collect again with prompts=True"):
        token_claims(table, head)
    with pytest.raises(ValueError, match="other settings"):
        collect(model, documents, tmp_path / "plain", prompts=True)


def test_folders_that_are_no_tables(model, documents, tmp_path):
    with pytest.raises(ValueError, match="is no token table"):
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
    with pytest.raises(ValueError, match="rows, got 3"):
        open_table(tmp_path)
    (tmp_path / "shard-00000" / "hidden.npy").unlink()
    with pytest.raises(ValueError, match="is damaged or missing"):
        open_table(tmp_path)


# Marks.


def test_marks_tell_models_apart():
    mine = mark_of(llama())
    assert (mine.hidden_size, mine.vocabulary, mine.softcap) == (16, VOCABULARY, None)
    mine.check(mark_of(llama()), "the head")
    for first, second in product((torch.float32, torch.bfloat16, torch.float16), repeat=2):
        mark_of(llama().to(first)).check(mark_of(llama().to(first).to(second)), "the head")
    assert [mark_of(family()).softcap for family in (gemma, recurrent_gemma, xlstm)] == [3.0] * 3
    halves = [mark_of(llama().to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    for half in halves:
        mine.check(half, "the head")
    with pytest.raises(ValueError, match="load it in float32"):
        halves[0].check(halves[1], "the head")
    for other in (qwen2(), qwen3(), gemma(), gpt2()):
        with pytest.raises(ValueError, match=r"the head belongs to another model.*digest"):
            mine.check(mark_of(other), "the head")
    changed = llama()
    with torch.no_grad():
        changed.lm_head.weight[-1] += 0.1
    with pytest.raises(ValueError, match="digest"):
        mine.check(mark_of(changed), "the head")
    with pytest.raises(ValueError, match=r"softcap 5\.0 where LlamaForCausalLM has None"):
        mine.check(ModelMark("x", 16, VOCABULARY, mine.digest, 5.0), "the head")


def test_one_text_is_no_list_of_documents(model, tmp_path):
    with pytest.raises(TypeError, match=r"got the text 'chats\.jsonl': put it into a list"):
        collect(model, "chats.jsonl", tmp_path / "table")
    assert not (tmp_path / "table").exists()
