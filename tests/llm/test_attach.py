"""Heads on live models: every way to generate against teacher forcing."""

import copy
import gc
import threading
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import calibrant as cal
from calibrant.llm.fingerprint import mark_of
from calibrant.llm.heads.attach import attached, report
from calibrant.llm.heads.fit import FittedHead, fit_head
from calibrant.llm.heads.modules import make_head, shape_features_of_logits
from calibrant.llm.heads.official import read_official
from calibrant.llm.tokens.collect import collect

transformers = pytest.importorskip("transformers")

SMALL = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.3,
}
GEMMA = {**SMALL, "head_dim": 8, "final_logit_softcapping": 3.0, "sliding_window": 4}
GPT2 = {
    **{name: SMALL[name] for name in ("vocab_size", "bos_token_id", "eos_token_id")},
    **{"n_embd": 32, "n_layer": 2, "n_head": 4, "pad_token_id": 0, "initializer_range": 0.3},
}
FAMILIES = {
    "Llama": SMALL,
    "Qwen2": {**SMALL, "tie_word_embeddings": True},
    "Gemma2": GEMMA,
    "GPT2": GPT2,
}
HEADS = ("global", "linear", "mlp", "shape", "decoder")
PROMPT = torch.tensor([[0, 0, 0, 5, 6, 7], [11, 12, 13, 14, 15, 16]])
MASK = (PROMPT != 0).long()


def build(family):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
    name = f"{family}LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, name)(config).eval()


@pytest.fixture(scope="module", params=FAMILIES)
def model(request):
    return build(request.param)


@pytest.fixture(scope="module")
def llama():
    return build("Llama")


def fitted(model, kind):
    """A head whose sharpness differs from token to token, from about 0.5 to 5.

    Rounding of the model itself, 5e-6 in its log-probabilities, grows with the sharpness: at 20 it
    would reach 3e-4 without any fault of the head (4e-5 with the model in double precision).
    """
    torch.manual_seed(1)
    options = {"attention_heads": 4} if kind == "decoder" else {}
    head = make_head(kind, width=32, start=0.4, **options)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15 if kind == "shape" else 0.1)
    return FittedHead(head, mark_of(model), "given")


def sharpness(head, output, mask=None):
    """Of a teacher-forced pass, ``(batch, tokens)``."""
    hidden = output.hidden_states[-1].float()
    if head.kind == "decoder":
        u = head(hidden, present=mask)
    else:
        u = head(shape_features_of_logits(output.logits) if head.kind == "shape" else hidden)
    return u.clamp(-3, 3).exp()


@torch.no_grad()
def forced(model, fitted, sequences, mask):
    """Calibrated log-probabilities of each next token, by the model without hooks."""
    mask = torch.cat([mask, torch.ones_like(sequences[:, mask.shape[1] :])], 1)
    # generate counts positions without the padding
    position = (mask.cumsum(1) - 1).clamp(min=0)
    output = model(sequences, attention_mask=mask, position_ids=position, output_hidden_states=True)
    b = sharpness(fitted.head, output, mask.bool())
    return (output.logits.float() * b[..., None]).log_softmax(-1), b


def generated(model, fitted=None, **how):
    torch.manual_seed(3)
    common = {"max_new_tokens": 6, "return_dict_in_generate": True, "output_logits": True}
    arguments = {"attention_mask": MASK, "do_sample": False, **common, **how}
    prompt = arguments.pop("prompt", PROMPT)
    if fitted is None:
        return model.generate(prompt, **arguments)
    with attached(model, fitted):
        return model.generate(prompt, **arguments)


def largest_error(model, fitted, output):
    """Between the logits of generate and teacher forcing, over all written tokens."""
    steps = len(output.logits)
    beams = getattr(output, "beam_indices", None)
    repeats = len(output.sequences) // len(PROMPT)
    mask = MASK.repeat_interleave(repeats, 0)
    wanted, b = forced(model, fitted, output.sequences, mask)
    assert b.std() > 0.01 or fitted.head.kind == "global"
    worst, seen = 0.0, 0
    for row in range(len(output.sequences)):
        for step in range(steps):
            place = row if beams is None else int(beams[row, step])
            at = PROMPT.shape[1] + step
            if place < 0 or (output.sequences[row, PROMPT.shape[1] : at] == 2).any():
                continue
            got = output.logits[step][place].log_softmax(-1)
            worst = max(worst, float((got - wanted[row, at - 1]).abs().max()))
            seen += 1
    assert seen >= steps
    return worst


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "beam": {"num_beams": 3, "num_return_sequences": 3},
    "two beams": {"num_beams": 2, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
    "static": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", HEADS)
def test_generation_is_exact(model, kind, mode):
    fit = fitted(model, kind)
    if kind == "decoder" and mode == "static":
        with pytest.raises(ValueError, match="not a static one"):
            generated(model, fit, **MODES[mode])
        return
    assert largest_error(model, fit, generated(model, fit, **MODES[mode])) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "decoder"])
def test_prompt_lookup_is_exact(llama, kind):
    # one text only; tokens are proposed, judged together and partly taken back
    fit = fitted(llama, kind)
    prompt = torch.tensor([[5, 6, 7, 5, 6, 7, 5, 6]])
    output = generated(
        llama,
        fit,
        prompt=prompt,
        attention_mask=torch.ones_like(prompt),
        prompt_lookup_num_tokens=3,
        max_new_tokens=8,
    )
    wanted, _ = forced(llama, fit, output.sequences, torch.ones_like(prompt))
    got = torch.stack(output.logits, 1).log_softmax(-1)
    assert (got - wanted[:, prompt.shape[1] - 1 : -1]).abs().max() < 1e-4


@pytest.mark.parametrize("kind", HEADS)
def test_plain_call_is_exact(model, kind):
    fit = fitted(model, kind)
    tokens = PROMPT[1:]
    plain = model(tokens, output_hidden_states=True)
    wanted = plain.logits * sharpness(fit.head, plain)[..., None]
    with attached(model, fit) as same:
        assert same is model
        got = model(tokens).logits
        kept = model(tokens, logits_to_keep=2).logits
        chosen = model(tokens, logits_to_keep=torch.tensor([1, 3])).logits
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept, wanted[:, -2:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(chosen, wanted[:, [1, 3]], rtol=1e-4, atol=1e-4)
    assert (got.argmax(-1) == plain.logits.argmax(-1)).all()


@pytest.mark.parametrize("kind", ["linear", "decoder"])
def test_bfloat16(kind):
    model = build("Llama").bfloat16()
    fit = fitted(model, kind)
    output = generated(model, fit)
    assert output.logits[0].dtype == torch.float32
    # Looser, since a kernel may round one token and many together differently, by 1 part in 256 of
    # a logit; where the model's own logits agree, so do the calibrated ones.
    assert largest_error(model, fit, output) < 0.1
    # with the states of the very same step there is no such error
    states: dict[str, torch.Tensor] = {}
    hook = model.lm_head.register_forward_hook(
        lambda m, args, out: states.update(hidden=args[0], logits=out)
    )
    with attached(model, fit):
        got = model(PROMPT[1:]).logits
    hook.remove()
    b = fit.head(states["hidden"].float()).clamp(-3, 3).exp()
    assert torch.equal(got, states["logits"].float() * b[..., None])


@pytest.mark.parametrize("kind", ["linear", "decoder"])
def test_model_is_as_before(llama, kind):
    def hooks():
        return [
            (len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for m in llama.modules()
        ]

    fit = fitted(llama, kind)
    before, tokens = hooks(), PROMPT[1:]
    weights = {name: value.clone() for name, value in llama.state_dict().items()}
    plain = llama(tokens).logits
    with attached(llama, fit):
        assert not torch.equal(llama(tokens).logits, plain)
    with pytest.raises(KeyError, match="inside"), attached(llama, fit):
        raise KeyError("inside")
    assert hooks() == before
    assert torch.equal(llama(tokens).logits, plain)
    assert all(torch.equal(weights[name], value) for name, value in llama.state_dict().items())
    assert list(weights) == list(llama.state_dict())


def test_refusals(llama):
    fit = fitted(llama, "linear")
    with attached(llama, fit):
        with pytest.raises(ValueError, match="already"), attached(llama, fit):
            pass
        with pytest.raises(ValueError, match="without a head"):
            report(llama, fit, None)
        with pytest.raises(TypeError, match="return_dict=True"):
            llama(PROMPT, return_dict=False)
    with attached(llama, fit):  # the failed attempt did not take away the first
        pass
    torch.manual_seed(9)
    other = transformers.LlamaForCausalLM(llama.config)
    with pytest.raises(ValueError, match=r"the head belongs to another model.*digest"):
        attached(other, fit).__enter__()
    with pytest.raises(ValueError, match="output_hidden_states=True"):
        report(llama, fit, generated(llama))
    with pytest.raises(ValueError, match="output embeddings"):
        attached(llama.model, fit).__enter__()


def test_decoder_refuses_a_cache_it_has_not_seen(llama):
    fit = fitted(llama, "decoder")
    cache = llama(PROMPT[1:, :4], use_cache=True).past_key_values
    with attached(llama, fit), pytest.raises(ValueError, match="must have seen all tokens"):
        llama(PROMPT[1:, 4:], past_key_values=cache)
    assert "reorder_cache" not in vars(cache)


def test_decoder_lets_caches_go(llama):
    with attached(llama, fitted(llama, "decoder")):
        output = llama(PROMPT[1:], use_cache=True)
        cache = weakref.ref(output.past_key_values)
        assert "reorder_cache" in vars(cache())
        gc.disable()  # it must not need the garbage collector, which may come late
        try:
            del output
            assert cache() is None
        finally:
            gc.enable()


class Wrapper(nn.Module):
    """As PEFT has it; up to version 0.20 it did not call the model, but its forward."""

    def __init__(self, inside, call):
        super().__init__()
        self.inside = inside
        self.call = call

    def get_base_model(self):
        return self.inside

    def forward(self, *args, **named):
        run = self.inside if self.call == "model" else self.inside.forward
        return run(*args, **named)


@pytest.mark.parametrize("call", ["model", "forward"])
@pytest.mark.parametrize("kind", HEADS)
def test_wrapped_base_model(llama, kind, call):
    fit, wrapper = fitted(llama, kind), Wrapper(llama, call)
    with attached(llama, fit):
        wanted = llama(PROMPT, logits_to_keep=2).logits
    with attached(wrapper, fit):
        for _ in range(2):
            assert torch.equal(wrapper(PROMPT, logits_to_keep=2).logits, wanted)
        assert torch.equal(llama(PROMPT, logits_to_keep=2).logits, wanted)
    assert not wrapper._forward_hooks


# ------------------------------------------------------------------------------ adapters of PEFT


def adapted(*targets, family="Llama", **more):
    """A model with a random adapter, which changes the logits by about as much as they differ."""
    peft = pytest.importorskip("peft")
    inside = build(family)
    torch.manual_seed(5)
    options = {"r": 4, "lora_alpha": 8, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    config = peft.LoraConfig(target_modules=list(targets), **options, **more)
    return peft.get_peft_model(inside, config).eval()


@pytest.fixture(scope="module")
def lora():
    return adapted("q_proj", "v_proj", "down_proj")


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beam", "no cache", "static"])
@pytest.mark.parametrize("kind", ["linear", "shape", "decoder"])
def test_generation_with_an_adapter_is_exact(lora, kind, mode):
    fit = fitted(lora, kind)
    how = {**MODES[mode], "output_scores": True}
    if kind == "decoder" and mode == "static":
        with pytest.raises(ValueError, match="not a static one"):
            generated(lora, fit, **how)
        return
    output = generated(lora, fit, **how)
    merged = copy.deepcopy(lora).merge_and_unload()
    assert largest_error(lora, fit, output) < 1e-4
    assert largest_error(merged, fit, output) < 1e-4
    assert largest_error(build("Llama"), fit, output) > 0.1
    if mode == "greedy":  # no step in between
        for scores, logits in zip(output.scores, output.logits, strict=True):
            assert torch.equal(scores, logits)


@pytest.mark.parametrize("kind", ["linear", "shape", "decoder"])
def test_plain_call_with_an_adapter_is_exact(lora, kind):
    fit = fitted(lora, kind)
    tokens = PROMPT[1:]
    with torch.no_grad():
        plain = lora(tokens, output_hidden_states=True)
        wanted = plain.logits * sharpness(fit.head, plain)[..., None]
        with attached(lora, fit) as same:
            assert same is lora
            got, kept = lora(tokens).logits, lora(input_ids=tokens, logits_to_keep=2).logits
            with lora.disable_adapter():
                base = lora(tokens).logits
        assert torch.equal(lora(tokens).logits, plain.logits)
        with attached(build("Llama"), fit) as alone:
            torch.testing.assert_close(base, alone(tokens).logits)
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kept, wanted[:, -2:], rtol=1e-4, atol=1e-4)


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
    model = adapted(*targets, family=family, modules_to_save=trained)
    if trained:
        with torch.no_grad():
            model.get_output_embeddings().weight.mul_(1.5)
    documents = [{"input_ids": ids} for ids in ([1, 5, 6, 7, 8], [1, 9, 8], list(range(1, 30)))]
    table = collect(model, documents, tmp_path / "adapted")
    base = collect(build(family), documents, tmp_path / "base")
    merged = collect(copy.deepcopy(model).merge_and_unload(), documents, tmp_path / "merged")
    for name in ("table", "own_gap"):
        got, same, other = (getattr(t.records(), name) for t in (table, merged, base))
        np.testing.assert_allclose(got, same, rtol=1e-4, atol=1e-4)
        assert abs(got - other).max() > 0.1
    np.testing.assert_allclose(table.hidden(), merged.hidden(), rtol=2e-3, atol=2e-3)
    with pytest.raises(ValueError, match=r"another (model|folder)"):
        collect(build(family), documents, tmp_path / "adapted")


# ------------------------------------------------------- ways to run a model that go around hooks


@pytest.fixture
def whole():
    """A prompt without padding, and its mask."""
    return {"prompt": PROMPT[1:], "attention_mask": MASK[1:]}


def error_of_call(model, fitted, tokens, logits):
    """Largest error of the calibrated log-probabilities of texts without padding."""
    wanted, _ = forced(model, fitted, tokens, torch.ones_like(tokens))
    return float((logits.log_softmax(-1) - wanted).abs().max())


@pytest.mark.parametrize("kind", ["global", "linear", "decoder"])
@torch.no_grad()
def test_compiled_model_is_exact(kind):
    config = transformers.LlamaConfig(**{**SMALL, "num_hidden_layers": 1})  # compiles sooner
    model, tokens = transformers.LlamaForCausalLM(config).eval(), PROMPT[1:]
    compiled: Any = torch.compile(model, backend="eager")
    fit, plain = fitted(model, kind), model(tokens).logits
    for given in (model, compiled):  # the second after a call without hooks
        with attached(given, fit) as same:
            assert same is given
            calls = [compiled(text).logits for text in (tokens, tokens + 1)]
            with pytest.raises(ValueError, match="already"), attached(compiled, fit):
                pass
        assert torch.equal(compiled(tokens).logits, plain)
        for text, logits in zip((tokens, tokens + 1), calls, strict=True):
            assert error_of_call(model, fit, text, logits) < 1e-4
    with attached(compiled, fit):
        output = compiled.generate(
            PROMPT,
            attention_mask=MASK,
            max_new_tokens=4,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    assert largest_error(model, fit, output) < 1e-4
    told = report(compiled, fit, model.generate(tokens, max_new_tokens=2, **REPORTED))
    assert told.tokens.shape == (1, 2)


REPORTED = {
    name: True for name in ("return_dict_in_generate", "output_logits", "output_hidden_states")
}


@pytest.mark.parametrize("kind", ["linear", "shape"])
def test_generation_that_compiles_is_exact(kind, whole):
    """With a static cache ``generate`` compiles the model itself, on a GPU without being asked."""
    model = build("Llama")
    how = transformers.CompileConfig(backend="eager", fullgraph=False, mode=None)
    how._compile_all_devices = True
    whole |= {"cache_implementation": "static", "compile_config": how}
    before = generated(model, **whole)
    assert hasattr(model, "_compiled_call")
    fit = fitted(model, kind)
    output, after = generated(model, fit, **whole), generated(model, **whole)
    wanted, _ = forced(model, fit, output.sequences, MASK[1:])
    got = torch.stack(output.logits, 1).log_softmax(-1)
    assert (got - wanted[:, PROMPT.shape[1] - 1 : -1]).abs().max() < 1e-4
    for old, new in zip(before.logits, after.logits, strict=True):
        assert torch.equal(old, new)


@torch.no_grad()
def test_compiled_model_with_an_adapter_is_exact():
    model = adapted("q_proj", "v_proj")
    fit, tokens = fitted(model, "linear"), PROMPT[1:]
    compiled: Any = torch.compile(model, backend="eager")
    with attached(compiled, fit):
        called = compiled(tokens).logits
    assert error_of_call(model, fit, tokens, called) < 1e-4
    model.base_model.model = torch.compile(model.base_model.model, backend="eager")
    with attached(model, fit):
        again = model(tokens).logits
    assert torch.allclose(again, called, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "mlp", "decoder"])
def test_states_that_were_not_seen(llama, kind, monkeypatch):
    """A call whose hooks did not run must not take the states of the one before."""
    with attached(llama, fitted(llama, kind)):
        llama(PROMPT)
        output = llama(PROMPT)
        output.logits = torch.zeros(2, 6, 101)
        monkeypatch.setattr(llama, "forward", lambda *args, **named: copy.copy(output))
        with pytest.raises(RuntimeError, match="attach before the first compiled call"):
            llama(PROMPT)


@pytest.mark.parametrize("kind", HEADS)
def test_logits_to_keep_by_position_or_unknown(llama, kind, monkeypatch):
    fit, tokens = fitted(llama, kind), PROMPT[1:]
    with torch.no_grad(), attached(llama, fit):
        wanted = llama(tokens).logits
        run = llama.forward

        def short(input_ids, logits_to_keep=0):
            return run(input_ids, logits_to_keep=logits_to_keep)

        monkeypatch.setattr(llama, "forward", short)
        kept = llama(tokens, 1).logits
        monkeypatch.setattr(llama, "forward", lambda input_ids, logits_to_keep: run(input_ids))
        everything = llama(tokens, logits_to_keep=1).logits
    torch.testing.assert_close(kept, wanted[:, -1:])
    torch.testing.assert_close(everything, wanted)


def test_logits_made_in_parts_are_refused(llama, monkeypatch):
    with attached(llama, fitted(llama, "linear")):
        output = llama(PROMPT)

        def parts(input_ids):
            for row in output.logits.new_ones(2, 1, 32):
                llama.lm_head(row)
            return copy.copy(output)

        monkeypatch.setattr(llama, "forward", parts)
        with pytest.raises(ValueError, match=r"each of the \(2, 6\) logits, got states \(1,\)"):
            llama(PROMPT)


@pytest.mark.parametrize("outer", ["model", "forward"])
@pytest.mark.parametrize("kind", ["linear", "decoder", "global"])
def test_threads_do_not_disturb_each_other(llama, kind, outer):
    """Each waits for the others in the middle of its calls, so that their hooks run in between."""
    fit, wrapper = fitted(llama, kind), Wrapper(llama, outer)
    texts = [PROMPT[1:, : 6 - n] + 7 * n for n in range(3)]
    together, found = threading.Barrier(3, timeout=60), {}

    def wait(*_):
        together.wait()

    def run(n):
        with torch.no_grad():
            first = wrapper(texts[n][:, :2], use_cache=True)
            rest = wrapper(texts[n][:, 2:], past_key_values=first.past_key_values).logits
            found[n] = torch.cat([first.logits, rest], 1)

    with attached(wrapper, fit):
        # after the hooks of the head on these modules
        waits = [m.register_forward_hook(wait) for m in (llama.model, llama.lm_head, llama)]
        waits.append(llama.lm_head.register_forward_pre_hook(wait))
        waits.append(llama.model.register_forward_pre_hook(wait))
        threads = [threading.Thread(target=run, args=(n,)) for n in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for hook in waits:
            hook.remove()
    for n, text in enumerate(texts):
        assert error_of_call(llama, fit, text, found[n]) < 1e-4


def test_copies_within_a_block(llama, whole):
    fit = fitted(llama, "decoder")
    rows = PROMPT[1:, :4].repeat(3, 1) + torch.arange(3)[:, None]
    with torch.no_grad(), attached(llama, fit):
        twin = copy.deepcopy(llama)
        cache = llama(rows, use_cache=True).past_key_values
        other, used = copy.deepcopy(cache), copy.deepcopy(cache)
        with pytest.raises(ValueError, match="must have seen all tokens"):
            llama(rows, past_key_values=used)
    with pytest.raises(ValueError, match="do not copy a model"), attached(twin, fit):
        pass
    with pytest.raises(ValueError, match="without a head"):
        report(twin, fit, None)
    keys = cache.layers[0].keys.clone()
    for copied in (other, used):
        copied.reorder_cache(torch.tensor([2, 2, 0]))
        assert torch.equal(copied.layers[0].keys[..., :4, :], keys[[2, 2, 0]])
    assert torch.equal(cache.layers[0].keys, keys)


# ----------------------------------------------------------- texts that the decoder head must know


def other_model(family, **settings):
    torch.manual_seed(0)
    known = {"vocab_size": 101, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    config = getattr(transformers, f"{family}Config")(**known, **settings)
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


MAMBA = {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.3}
RWKV = {"hidden_size": 32, "num_hidden_layers": 2, "context_length": 64}
RECURRENT_GEMMA = {
    **{name: SMALL[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "lru_width": 32},
    **{"block_types": ["recurrent", "attention"], "attention_window_size": 8},
}
RECURRENT: dict[str, Any] = {"Mamba": MAMBA, "Rwkv": RWKV, "RecurrentGemma": RECURRENT_GEMMA}


@pytest.mark.parametrize("family", RECURRENT)
def test_decoder_on_a_recurrent_model(family, whole):
    model = other_model(family, **RECURRENT[family])
    fit = fitted(model, "decoder")
    with pytest.raises(ValueError, match=r"past_key_values, got .*: pass use_cache=False"):
        generated(model, fit, **whole)
    output = generated(model, fit, **whole, use_cache=False)
    plain = model(output.sequences, use_cache=False, output_hidden_states=True)
    b = sharpness(fit.head, plain)[..., None]
    wanted = (plain.logits * b).log_softmax(-1)[:, PROMPT.shape[1] - 1 : -1]
    assert (torch.stack(output.logits, 1).log_softmax(-1) - wanted).abs().max() < 1e-3
    with attached(model, fit):  # a whole text in one call
        called = model(output.sequences).logits
    torch.testing.assert_close(called, plain.logits * b, rtol=1e-3, atol=1e-3)


def test_decoder_refuses_a_state_of_earlier_tokens(whole):
    model = other_model("Mamba", **MAMBA)
    with attached(model, fitted(model, "decoder")):
        state = model(PROMPT[1:]).cache_params
        with pytest.raises(ValueError, match="got cache_params"):
            model(PROMPT[1:, :1], cache_params=state, use_cache=False)


def test_decoder_refuses_a_cache_that_is_not_returned(llama, monkeypatch):
    fit, tokens, run = fitted(llama, "decoder"), PROMPT[1:], llama.model.forward

    def forgetful(**named):
        output = run(**named)
        output.past_key_values = None
        return output

    with torch.no_grad(), attached(llama, fit):
        cache = llama(tokens[:, :3], use_cache=True).past_key_values
        monkeypatch.setattr(llama.model, "forward", forgetful)
        whole = llama(tokens).logits
        with pytest.raises(ValueError, match="got past_key_values"):
            llama(tokens[:, 3:], past_key_values=cache)
        with pytest.raises(ValueError, match="got use_cache=True"):
            llama(tokens, use_cache=True)
    assert error_of_call(llama, fit, tokens, whole) < 1e-4


def test_decoder_refuses_a_cache_that_does_not_count(llama, monkeypatch):
    """As one whose first layer is recurrent may be: the head would forget the text at each call."""
    cache = transformers.DynamicCache()
    monkeypatch.setattr(cache, "get_seq_length", lambda *_, **named: 0)
    fit = fitted(llama, "decoder")
    with attached(llama, fit), pytest.raises(ValueError, match="a cache that counts its tokens"):
        llama(PROMPT[1:], past_key_values=cache)


OPT = {
    **{"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "max_position_embeddings": 64, "init_std": 0.3},
}
BART = {
    **{"d_model": 32, "decoder_layers": 2, "encoder_layers": 2, "decoder_attention_heads": 4},
    **{"decoder_ffn_dim": 48, "max_position_embeddings": 64, "init_std": 0.3, "is_decoder": True},
}


@pytest.mark.parametrize("mode", ["greedy", "beam", "no cache"])
@pytest.mark.parametrize(("family", "settings"), [("OPT", OPT), ("Bart", BART)])
def test_models_that_call_a_decoder_in_their_base_model(family, settings, mode, whole):
    model = other_model(family, **settings)
    fit = fitted(model, "decoder")
    output = generated(model, fit, **whole, **MODES[mode])
    for text, beams in zip(
        output.sequences, output.get("beam_indices", [[0] * 6] * 3), strict=False
    ):
        with torch.no_grad():
            plain = model(text[None], output_hidden_states=True)
        wanted = plain.logits[0] * sharpness(fit.head, plain)[0, :, None]
        for step, beam in enumerate(beams):
            if beam >= 0 and not (text[6 : 6 + step] == 2).any():
                got = output.logits[step][beam].log_softmax(-1)
                assert (got - wanted[5 + step].log_softmax(-1)).abs().max() < 1e-4


class Bare(nn.Module):
    """A model with nothing below its output embeddings that could be heard."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(32, 101)

    def get_output_embeddings(self):
        return self.head

    get_decoder = get_output_embeddings

    @property
    def base_model(self):
        return self


def test_model_without_a_backbone_is_refused():
    model = Bare()
    with pytest.raises(ValueError, match="no decoder or base_model"):
        attached(model, fitted(model, "decoder")).__enter__()


GAPS = torch.tensor([[5, 6, 0, 0, 7, 8, 9], [0, 11, 12, 0, 13, 14, 15]])


def without_gaps(model, fit, row, written=()):
    """Calibrated log-probabilities of the text of a row, by the model without hooks."""
    text = torch.cat([row[row != 0], torch.as_tensor(written, dtype=torch.long)])[None]
    return forced(model, fit, text, torch.ones_like(text))[0][0]


@pytest.mark.parametrize("mode", ["greedy", "no cache"])
@pytest.mark.parametrize("kind", ["linear", "decoder"])
def test_padding_in_the_middle_is_not_there(llama, kind, mode):
    fit, mask = fitted(llama, kind), (GAPS != 0).long()
    given = {"prompt": GAPS, "attention_mask": mask, **MODES[mode]}
    output = generated(llama, fit, **given)
    told = report(
        llama, fit, generated(llama, **given, output_hidden_states=True), attention_mask=mask
    )
    for row, text in enumerate(output.sequences):
        wanted = without_gaps(llama, fit, GAPS[row], text[7:])[-7:-1]
        got = torch.stack(output.logits, 1)[row].log_softmax(-1)
        assert (got - wanted).abs().max() < 1e-4
        assert torch.equal(told.tokens[row], text[7:])  # greedy: calibration keeps the order
        torch.testing.assert_close(
            told.log_probs[row], wanted.gather(-1, text[7:, None])[:, 0], rtol=0, atol=1e-4
        )
    with torch.no_grad(), attached(llama, fit):
        position = (mask.cumsum(1) - 1).clamp(min=0)
        called = llama(GAPS, attention_mask=mask, position_ids=position).logits.log_softmax(-1)
    for row, logits in zip(GAPS, called, strict=True):
        assert (logits[row != 0] - without_gaps(llama, fit, row)).abs().max() < 1e-4


def test_decoder_refuses_packed_texts(llama):
    packed, position = PROMPT[1:], torch.tensor([[0, 1, 2, 0, 1, 2]])
    for mask in (None, torch.ones_like(packed)):
        with attached(llama, fitted(llama, "decoder")):
            with pytest.raises(ValueError, match="one text in each row"):
                llama(packed, position_ids=position, attention_mask=mask, use_cache=False)
            llama(packed, position_ids=2 * torch.arange(6)[None], attention_mask=mask)
    fit = fitted(llama, "linear")
    with torch.no_grad(), attached(llama, fit):
        logits = llama(packed, position_ids=position, use_cache=False).logits
    for text, found in zip(packed.reshape(2, 1, 3), logits.reshape(2, 1, 3, -1), strict=True):
        assert error_of_call(llama, fit, text, found) < 1e-4


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("mode", ["greedy", "beam", "no cache", "lookup", "static"])
def test_report_by_the_decoder_head(llama, whole, mode, masked):
    """A mask is not needed where there is no padding."""
    fit = fitted(llama, "decoder")
    how = {"lookup": {"prompt_lookup_num_tokens": 2}, **MODES}[mode]
    output = generated(llama, **whole, output_hidden_states=True, **how)
    told = report(llama, fit, output, attention_mask=MASK[1:] if masked else None)
    repeated = MASK[1:].repeat(len(output.sequences), 1)
    wanted = forced(llama, fit, output.sequences, repeated)[0][:, 5:-1]
    chosen = wanted.gather(-1, output.sequences[:, 6:, None])[..., 0]
    there = told.written
    torch.testing.assert_close(told.log_probs[there], chosen[there], rtol=0, atol=1e-4)


@pytest.mark.parametrize("masked", [True, False])
def test_report_refuses_a_prompt_that_it_cannot_see(llama, whole, masked):
    fit, mask = fitted(llama, "decoder"), MASK[1:] if masked else None
    whole["output_hidden_states"] = True
    cache = llama(PROMPT[1:, :4], use_cache=True).past_key_values
    for how, got in (({"prefill_chunk_size": 4}, 2), ({"past_key_values": cache}, 2)):
        output = generated(llama, **whole, **how)
        with pytest.raises(ValueError, match=f"all 6 tokens of the prompt, got {got} and 6"):
            report(llama, fit, output, attention_mask=mask)
        report(llama, fitted(llama, "linear"), output)
    output = generated(llama, **whole)
    with pytest.raises(ValueError, match="got 6 and 4"):
        report(llama, fit, output, attention_mask=MASK[1:, :4])


def test_report_of_embedded_prompts(llama, whole):
    fit = fitted(llama, "decoder")
    whole["output_hidden_states"] = True
    wanted = report(llama, fit, generated(llama, **whole))
    embedded = llama.get_input_embeddings()(PROMPT[1:])
    output = generated(llama, **{**whole, "prompt": None}, inputs_embeds=embedded)
    got = report(llama, fit, output, attention_mask=MASK[1:])
    torch.testing.assert_close(got.log_probs, wanted.log_probs)
    with pytest.raises(ValueError, match="with inputs_embeds, pass attention_mask"):
        report(llama, fit, output)


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beam"])
@pytest.mark.parametrize("kind", HEADS)
def test_report_refuses_what_was_generated_with_a_head(model, kind, mode):
    fit = fitted(model, kind)
    with attached(model, fit):
        output = generated(model, output_hidden_states=True, **MODES[mode])
    with pytest.raises(ValueError, match="or generate outside of attached"):
        report(model, fit, output, attention_mask=MASK)


@pytest.mark.parametrize("kind", HEADS)
def test_weights_that_are_kept_elsewhere(kind):
    accelerate = pytest.importorskip("accelerate")
    model, other = build("Llama"), build("Llama")
    fit = fitted(model, kind)
    accelerate.cpu_offload(other, execution_device="cpu")
    with attached(model, fit), attached(other, fit):
        wanted, got = (one(PROMPT[1:]).logits for one in (model, other))
    torch.testing.assert_close(got, wanted)
    assert {weight.device.type for weight in other.parameters()} == {"meta"}


@pytest.mark.parametrize("mode", ["greedy", "sampling", "beam", "two beams"])
@pytest.mark.parametrize("kind", HEADS)
def test_report(model, kind, mode):
    fit = fitted(model, kind)
    output = generated(model, output_hidden_states=True, **MODES[mode])
    told = report(model, fit, output, attention_mask=MASK)
    mask = MASK.repeat_interleave(len(output.sequences) // 2, 0)
    wanted, b = forced(model, fit, output.sequences, mask)
    first = PROMPT.shape[1]
    wanted, b = wanted[:, first - 1 : -1], b[:, first - 1 : -1]
    chosen = wanted.gather(-1, output.sequences[:, first:, None])[..., 0]
    there = told.written
    assert there[:, 0].all()
    assert torch.equal(told.tokens, output.sequences[:, first:])
    torch.testing.assert_close(told.log_probs[there], chosen[there], rtol=0, atol=1e-4)
    torch.testing.assert_close(
        told.confidence[there], wanted.amax(-1).exp()[there], rtol=0, atol=1e-4
    )
    torch.testing.assert_close(told.sharpness[there], b[there], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "decoder"])
def test_report_of_beams_that_ended_before_the_search_did(llama, kind):
    """A search goes on while a worse beam may still win; texts and beams are then cut."""
    fit, longer = fitted(llama, kind), 0
    prompt = torch.tensor([[47, 36, 70, 70, 94, 22]])
    whole = torch.ones_like(prompt)
    for end in range(7):
        ends = list(range(3 + end, 100, 7))  # many tokens that end a text: one comes soon
        how = {"num_beams": 3, "max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0}
        given = {"prompt": prompt, "attention_mask": whole, "output_hidden_states": True}
        output = generated(llama, **given, **how)
        told = report(llama, fit, output, attention_mask=whole)
        wanted, _ = forced(llama, fit, output.sequences, whole)
        new = output.sequences[:, prompt.shape[1] :]
        chosen = wanted[:, prompt.shape[1] - 1 : -1].gather(-1, new[..., None])[..., 0]
        assert torch.equal(told.tokens, new)
        there = told.written
        torch.testing.assert_close(told.log_probs[there], chosen[there], rtol=0, atol=1e-3)
        longer += len(output.logits) > new.shape[1]
    assert longer


def test_report_takes_the_end_that_generate_was_given(llama):
    fit = fitted(llama, "linear")
    output = generated(llama, output_hidden_states=True)
    output.sequences[0, 7], output.sequences[1, 8] = 2, 50
    written = report(llama, fit, output, eos_token_id=50).written
    assert written[0].all()
    assert written[1].tolist() == [True, True, True, False, False, False]
    assert report(llama, fit, output, eos_token_id=[2, 50]).written.sum() == 5


def test_report_knows_where_a_text_ends(llama):
    fit = fitted(llama, "linear")
    output = generated(llama, output_hidden_states=True)
    output.sequences[0, 7] = 2
    written = report(llama, fit, output).written
    assert written[0].tolist() == [True, True, False, False, False, False]
    assert written[1].all()


def test_from_texts_to_a_calibrated_model(tmp_path):
    """Texts that the model wrote at temperature 1.6: that is what must be found, and no more."""
    model = build("Qwen2")
    torch.manual_seed(0)
    prompts = torch.randint(3, 100, (120, 4))
    how = {"do_sample": True, "top_k": 0, "temperature": 1.6, "eos_token_id": None}
    texts = model.generate(prompts, max_new_tokens=30, **how).tolist()
    documents = [{"input_ids": t, "labels": [-100] * 4 + t[4:]} for t in texts]
    fit = fit_head(collect(model, documents, tmp_path / "table"), "linear", "nll", epochs=4)
    assert not fit.kept, fit.reasons
    assert fit.settings["temperature"] == pytest.approx(1.6, rel=0.05)
    cal.save(fit, tmp_path / "head")
    plain = model(prompts).logits
    with attached(model, cal.load(tmp_path / "head")):
        sharper = model(prompts).logits * fit.settings["temperature"]
    torch.testing.assert_close(sharper, plain, rtol=1e-5, atol=1e-5)


# ----------------------------------------------------------------------------- the official heads


@pytest.fixture
def official(tmp_path):
    torch.manual_seed(4)
    names = {f"self_attn.{n}_proj": (32, 32) for n in "qkvo"}
    names |= {"mlp.gate_proj": (40, 32), "mlp.up_proj": (40, 32), "mlp.down_proj": (32, 40)}
    state = {f"transformer.{name}.weight": torch.randn(s) * 0.3 for name, s in names.items()}
    for name in ("input_layernorm", "post_attention_layernorm"):
        state[f"transformer.{name}.weight"] = 1 + 0.3 * torch.randn(32)
    state["linear_head.weight"] = torch.randn(1, 32) * 0.03
    state["linear_head.bias"] = torch.tensor([2.5])
    save_file(state, tmp_path / "calibration_head.safetensors")
    return tmp_path, state


def by_hand(state, hidden, heads):
    """The official head for one text ``(tokens, width)``, one position after another."""
    w = {name.removeprefix("transformer.").removesuffix(".weight"): v for name, v in state.items()}

    def norm(x, name):
        return x / (x.pow(2).mean() + 1e-6).sqrt() * w[name]

    def turned(x, at):
        size = len(x) // heads
        found = x.clone()
        for head in range(heads):
            for i in range(size // 2):
                a, b = head * size + i, head * size + i + size // 2
                angle = torch.tensor(at / 10000 ** (2 * i / size))
                found[a] = x[a] * angle.cos() - x[b] * angle.sin()
                found[b] = x[b] * angle.cos() + x[a] * angle.sin()
        return found

    normed = [norm(h, "input_layernorm") for h in hidden]
    keys = [turned(w["self_attn.k_proj"] @ x, at) for at, x in enumerate(normed)]
    values = [w["self_attn.v_proj"] @ x for x in normed]
    told = []
    for at, h in enumerate(hidden):
        query = turned(w["self_attn.q_proj"] @ normed[at], at)
        size, parts = len(h) // heads, []
        for head in range(heads):
            own = slice(head * size, (head + 1) * size)
            score = torch.stack([query[own] @ k[own] for k in keys[: at + 1]]) / size**0.5
            parts.append(sum(p * v[own] for p, v in zip(score.softmax(0), values, strict=False)))
        x = h + w["self_attn.o_proj"] @ torch.cat(parts)
        n = norm(x, "post_attention_layernorm")
        gate = w["mlp.gate_proj"] @ n
        x = x + w["mlp.down_proj"] @ (gate * gate.sigmoid() * (w["mlp.up_proj"] @ n))
        told.append((w["linear_head"] @ x)[0] + state["linear_head.bias"][0])
    return torch.stack(told).exp().clip(max=10)


def test_official_head(llama, official):
    folder, state = official
    fit = read_official(folder, llama)
    hidden = llama(PROMPT[1:], output_hidden_states=True).hidden_states[-1].detach()
    wanted = by_hand(state, hidden[0], heads=4)
    assert wanted.max() == 10  # the cap is tried too
    assert wanted.min() < 5
    torch.testing.assert_close(fit.head(hidden)[0].exp(), wanted, rtol=1e-4, atol=1e-4)
    with attached(llama, fit):
        got = llama(PROMPT[1:]).logits[0]
    b = wanted.clamp(min=torch.tensor(-3.0).exp())[:, None]
    torch.testing.assert_close(got, llama(PROMPT[1:]).logits[0] * b, rtol=1e-3, atol=1e-3)


def test_official_head_of_another_number_of_attention_heads(llama, official):
    folder, _ = official
    (folder / "config.json").write_text('{"num_attention_heads": 8}')
    assert read_official(folder, llama).head.attention_heads == 8
    assert read_official(folder, llama, attention_heads=2).head.attention_heads == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda state: state.pop("transformer.mlp.up_proj.weight"), "missing mlp.up_proj.weight"),
        (lambda state: state.update({"more": torch.ones(1)}), "unknown more"),
        (lambda state: state.update({"linear_head.weight": torch.ones(1, 16)}), "width 32.*got 16"),
        (
            lambda state: state.update({"transformer.mlp.up_proj.weight": torch.ones(4, 4)}),
            "does not fit",
        ),
    ],
)
def test_official_head_that_does_not_fit(llama, official, change, message):
    folder, state = official
    change(state)
    save_file(state, folder / "calibration_head.safetensors")
    with pytest.raises(ValueError, match=message):
        read_official(folder, llama)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("[]", "must hold an object, got a list"),
        ("{", "is not JSON"),
        ('{"num_attention_heads": 0}', "must be 1 or more, got 0"),
        ('{"num_attention_heads": "4"}', "must be 1 or more, got '4'"),
        ('{"feature_key": "maxlogit"}', "feature_key='maxlogit', and only heads with 'hidden_st"),
        ('{"normalize_logits": true}', "normalize_logits=True, and only heads with False"),
    ],
)
def test_official_head_with_another_configuration(llama, official, config, message):
    folder, _ = official
    (folder / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        read_official(folder, llama)


def test_official_head_that_is_not_there(llama, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"calibration_head\.safetensors"):
        read_official(tmp_path, llama)
    (tmp_path / "calibration_head.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="damaged"):
        read_official(tmp_path, llama)
