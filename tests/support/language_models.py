"""Tiny random language models, tokenizers, and token tables of known truth."""

from typing import Any

import numpy as np
import pytest
import torch

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.llm.heads.fitted import _make_head
from calibrant.llm.heads.tables import TokenTable, _as_half, _TableShard
from calibrant.llm.models.huggingface import ModelFingerprint

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

TINY = ModelFingerprint("tiny", 16, 40, "0123456789abcdef", None)
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
GPT2 = {"n_layer": 2, "n_head": 4}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": LAYERS,
    "Qwen2": {**LAYERS, "tie_word_embeddings": True},
    "Qwen3": LAYERS,
    "Gemma2": {**LAYERS, "final_logit_softcapping": 3.0, "sliding_window": 4},
    "GPT2": GPT2,
    "Granite": {**LAYERS, "logits_scaling": 4.0},
    "Cohere": {**LAYERS, "logit_scale": 0.3},
    "RecurrentGemma": {
        **LAYERS,
        **{"block_types": ["recurrent", "attention"], "attention_window_size": 8},
        "logits_soft_cap": 3.0,
    },
    "xLSTM": {"num_heads": 2, "num_hidden_layers": 1, "output_logit_soft_cap": 3.0},
    "Llama4": {**LAYERS, "num_local_experts": 2},
    "Mamba": {"num_hidden_layers": 2, "state_size": 4},
    "Rwkv": {"num_hidden_layers": 2, "context_length": 64},
    "OPT": {"num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64},
    "Bart": {
        **{"decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4},
        **{"max_position_embeddings": 64, "is_decoder": True},
    },
}


def tiny_model(family="Llama", *, vocabulary=300, width=16, spread=0.4, seed=0, **more):
    """A random model; a large spread of its weights keeps it far from uniform, so errors show."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 3 * width // 2}
    match family:
        case "GPT2":
            sizes = {"n_embd": width, "n_positions": 64}
        case "Bart":
            sizes = {"d_model": width, "decoder_ffn_dim": 48, "init_std": spread}
        case "OPT":
            sizes = {"hidden_size": width, "word_embed_proj_dim": width, "ffn_dim": 48}
            sizes["init_std"] = spread
        case "xLSTM" | "Mamba" | "Rwkv":
            sizes = {"hidden_size": width}
        case "Llama4":
            sizes |= {"head_dim": width // 4, "intermediate_size_mlp": 3 * width // 2}
        case "Gemma2" | "Qwen3":
            sizes["head_dim"] = width // 4
        case "RecurrentGemma":
            sizes["lru_width"] = width
    options = {**SPECIAL, **sizes, **FAMILIES[family], **more}
    text = "TextConfig" if family == "Llama4" else "Config"
    config = getattr(transformers, f"{family}{text}")(
        vocab_size=vocabulary, initializer_range=spread, **options
    )
    kind = "LMHeadModel" if family == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{family}{kind}")(config).eval()
    if family == "xLSTM":
        torch.nn.init.normal_(model.lm_head.weight, std=spread)
    return model


def with_adapter(model, *targets, seed=5, **more):
    """A model with a random adapter, which changes the logits by about as much as they differ."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=list(targets), **{**options, **more})
    return peft.get_peft_model(model, config).eval()


# ------------------------------------------------------------------------------------- tokenizers


def word_tokenizer(words, *, around=None, special=(), **names):
    """A tokenizer of words that are separated by spaces; ``around`` is its template of a text."""
    numbers = {word: number for number, word in enumerate(words)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token="<unk>"))
    inner.decoder = tokenizers.decoders.Replace("<nl>", "\n")
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if special:
        inner.add_special_tokens(list(special))
    if around:
        inner.post_processor = tokenizers.processors.TemplateProcessing(
            single=around, special_tokens=[("<s>", 1), ("</s>", 2)]
        )
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", **names}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **named)


QUIZ_WORDS = [
    *("<pad>", "<s>", "</s>", "<unk>", "Question:", "Answer:", "A", "B", "C", "D", "A.", "B."),
    *("C.", "D.", "one", "two", "three", "four", "red", "blue", "what", "is", "it", "yes", "no"),
    *("True", "False"),
]
PROMPTS = ["Question: what is it Answer:", "Question: is it red Answer:", "what"]


def quiz_tokenizer():
    plain = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({w: n for n, w in enumerate(QUIZ_WORDS)}, unk_token="<unk>")
    )
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, **special)


def quiz_model():
    return tiny_model(vocabulary=len(QUIZ_WORDS), spread=0.5)


def true_by_hand(model, tokenizer, prompt, temperature=1.0):
    """Probability of True against False as the next word, by a pass without padding."""
    with torch.no_grad():
        logits = model(**tokenizer(prompt, return_tensors="pt")).logits[0, -1].double()
    odds = logits[QUIZ_WORDS.index("True")] - logits[QUIZ_WORDS.index("False")]
    return float(torch.sigmoid(odds / temperature))


# ------------------------------------------------------------------------------- heads and tables


def random_head(kind, *, width=16, start=0.2, spread=0.3, **options):
    torch.manual_seed(0)
    head = _make_head(kind, width=width, start=start, **options)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=spread)
    return head


def memory_table(hidden, records, documents, fingerprint) -> TokenTable:
    """A table in memory, of texts without prompts: states ``(n, width)`` and documents ``(n,)``."""
    numbers = np.asarray(documents, np.int64)
    shard = _TableShard(_as_half(hidden), records, numbers, np.arange(len(numbers)))
    return TokenTable([shard], fingerprint, True)


def simulated_table(
    documents=120, each=25, *, strength=0.8, seed=0, classes=40, base=2.0, own=0.0, width=16
) -> TokenTable:
    """Tokens whose true log-sharpness is ``strength`` times a direction of the hidden state.

    ``own`` is noise that all tokens of a document share.
    """
    rng = np.random.default_rng(seed)
    n = documents * each
    hidden = rng.normal(size=(n, width))
    # two numbers tell it; in wide states all of them do
    way = np.pad([0.8, -0.6], (0, 14)) if width == 16 else (-1) ** np.arange(width) / width**0.5
    direction = hidden @ way
    number = np.repeat(np.arange(documents), each)
    logits = (3 * rng.normal(size=(n, classes))).astype(np.float32)
    true = np.exp(strength * direction + own * rng.normal(size=documents)[number])[:, None]
    labels = (true * logits / base + rng.gumbel(size=logits.shape)).argmax(-1)
    fingerprint = ModelFingerprint("tiny", width, classes, "0123456789abcdef", None)
    return memory_table(hidden, tabulate(examples(logits, labels)), number, fingerprint)


SIZES = [7, 20, 2, 13, 33, 5, 9, 16]


def drawn_documents(sizes=SIZES, seed=0, vocabulary=300):
    """Token ids, with about a third of the labels masked."""
    rng = np.random.default_rng(seed)
    documents = []
    for size in sizes:
        ids = rng.integers(3, vocabulary, size)
        labels = np.where(rng.random(size) < 0.3, -100, ids)
        labels[-1] = ids[-1]
        documents.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    return documents


def assert_same_table(one, other, exact=True):
    """Two tables that are equal, bit by bit or up to the order of sums."""
    tolerance = 0 if exact else 1e-3
    np.testing.assert_array_equal(one.documents, other.documents)
    np.testing.assert_allclose(one.hidden(), other.hidden(), rtol=tolerance, atol=tolerance)
    for name in ("table", "own_gap", "mean_gap", "gaps", "top"):
        got, wanted = getattr(one.records(), name), getattr(other.records(), name)
        np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
    np.testing.assert_array_equal(one.records().labels, other.records().labels)
    np.testing.assert_array_equal(one.records().correct, other.records().correct)
