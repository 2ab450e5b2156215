"""Loading models: whole ones only, no code of theirs, and GGUF files with their first token."""

import builtins
import json
import re

import huggingface_hub
import numpy as np
import pytest
import torch

from calibrant.llm.answers.asking import chat_prompt
from calibrant.llm.heads.documents import _encode_documents, _prompt_ids
from calibrant.llm.models import loading
from calibrant.llm.models.loading import _load_tokenizer, _load_weights, load_model
from tests.support.language_models import tiny_model, transformers, word_tokenizer

WORDS = ["<pad>", "<s>", "</s>", "<unk>", "user", "assistant", "a", "b"]
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant {% endif %}"
)


@pytest.fixture
def folder(tmp_path):
    tiny_model().save_pretrained(tmp_path)
    word_tokenizer(WORDS).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.filterwarnings("ignore")  # of transformers
@pytest.mark.parametrize("change", ["missing", "mismatched"])
def test_a_checkpoint_without_all_weights_is_refused(folder, change):
    safetensors = pytest.importorskip("safetensors.torch")
    file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
    weights = safetensors.load_file(file)
    assert load_model(folder)[0].config.vocab_size == 300
    weights[name] = torch.zeros(3, 3)
    if change == "missing":
        del weights[name]
    safetensors.save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"must have all weights of Llama.*{re.escape(name)}: "):
        load_model(folder)


def test_code_of_a_model_is_not_run(folder, monkeypatch):
    """Not even if an answer to the question of transformers is on standard input."""
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "evil", "auto_map": dict.fromkeys(("AutoConfig",), "evil.Config")}
        )
    )
    (folder / "evil.py").write_text(f"open({str(folder / 'done')!r}, 'w')\nclass Config: pass\n")
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    with pytest.raises(ValueError, match="trust_remote_code=True"):
        _load_weights(folder)
    assert not (folder / "done").exists()


@pytest.mark.parametrize("trusted", [False, True])
def test_trust_is_passed_on(folder, monkeypatch, trusted):
    asked = []

    def recorded(path, *, trust_remote_code, **options):
        asked.append(trust_remote_code)
        report: dict[str, list[str]] = {"missing_keys": [], "mismatched_keys": []}
        return (tiny_model(), report) if options else word_tokenizer(WORDS)

    for kind in (transformers.AutoTokenizer, transformers.AutoModelForCausalLM):
        monkeypatch.setattr(kind, "from_pretrained", recorded)
    load_model(folder, trust_remote_code=trusted)
    assert asked == [trusted, trusted]


def gguf_file(path, kind="gpt2", **metadata):
    """A file of settings and two tensors."""
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(["a", "bc", "\u2581"])
    writer.add_token_scores([0.5, 1.0, 2.0])
    writer.add_array("nested", [[1, 2], [3]])
    writer.add_float64("other", 0.5)
    for name, value in metadata.items():
        getattr(writer, name)(value)
    for name in ("first", "second"):
        writer.add_tensor(name, np.ones((8, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("kind", "metadata", "starts"),
    [
        ("gpt2", {"add_add_bos_token": True}, True),
        ("gpt2", {"add_add_bos_token": False}, False),
        ("gpt2", {}, False),
        ("llama", {"add_add_bos_token": False}, False),
        ("llama", {}, True),  # as llama.cpp reads a file that says nothing
    ],
)
def test_texts_of_gguf_models_begin_as_the_file_says(tmp_path, monkeypatch, kind, metadata, starts):
    file = gguf_file(tmp_path / "model.gguf", kind, **metadata)
    plain = word_tokenizer(WORDS)
    plain.chat_template = TEMPLATE
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: plain)
    tokenizer = _load_tokenizer(file)
    start = [1] if starts else []
    text, pair, chat = _encode_documents(["a b", ("a", "b"), CHAT], tokenizer, 99)
    assert text.ids.tolist() == [*start, 6, 7]
    assert pair.ids.tolist() == [*start, 6, 7]
    assert chat.ids.tolist() == [*start, 4, 6, 5, 7]
    np.testing.assert_array_equal(chat.labels[:-1], -100)
    assert _prompt_ids(tokenizer, "a") == [*start, 6]
    assert _prompt_ids(tokenizer, chat_prompt(tokenizer, "a")) == [*start, 4, 6, 5]


@pytest.mark.parametrize("template", ["{{ bos_token }}" + TEMPLATE, "{{ raise_exception('no') }}"])
def test_templates_that_begin_chats_themselves_are_kept(tmp_path, monkeypatch, template):
    file = gguf_file(tmp_path / "model.gguf", add_add_bos_token=True)
    plain = word_tokenizer(WORDS, around="<s> $A")
    plain.chat_template = template
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: plain)
    assert _load_tokenizer(file).chat_template == template


def test_a_first_token_that_cannot_be_added_is_told(tmp_path, monkeypatch):
    file = gguf_file(tmp_path / "model.gguf", add_add_bos_token=True)
    monkeypatch.setattr(loading, "_adds_start", lambda tokenizer: False)
    plain = word_tokenizer(WORDS)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: plain)
    with pytest.warns(UserWarning, match=r"model\.gguf asks for a beginning-of-text token"):
        _load_tokenizer(file)


def test_damaged_gguf_files_are_named(tmp_path):
    file = gguf_file(tmp_path / "model.gguf")
    whole, reader = file.read_bytes(), pytest.importorskip("gguf").GGUFReader(file)
    first, second = reader.tensors
    cuts = [6, 40, int(first.field.offset), int(first.data_offset), int(second.data_offset)]
    unknown = whole.replace(b"nested\x09", b"nested\x63")  # a kind of value that there is not
    for damaged in (*(whole[:cut] for cut in cuts), unknown):
        file.write_bytes(damaged)
        with pytest.raises(
            ValueError, match=r"model\.gguf is damaged or cut off: download it again"
        ):
            _load_tokenizer(file)
    file.write_bytes(b"GGML" + whole[4:])
    with pytest.raises(ValueError, match=r"model\.gguf is not a GGUF file"):
        _load_weights(file)


def test_errors_name_the_model(tmp_path, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match=r"the model org/none cannot be loaded: .*cached files"):
        _load_tokenizer("org/none")
    file = gguf_file(tmp_path / "model.gguf", "strange")
    with pytest.raises(ValueError, match=r"the model .*model\.gguf cannot be loaded: "):
        _load_weights(file)


def test_folders_around_a_model_name_it(tmp_path):
    cached = tmp_path / "models--org--name"
    snapshot = cached / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    with pytest.raises(OSError, match=rf"has no config\.json; pass {re.escape(str(snapshot))}$"):
        _load_tokenizer(cached)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(OSError, match=r"has no config\.json; pass \S+model\.gguf$"):
        _load_tokenizer(tmp_path)
