"""Heads on live models: every way to generate against teacher forcing."""

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from calibrant.llm.heads.attach import attached
from tests.support.generation import (
    HEAD_KINDS,
    MASK,
    MODES,
    PROMPT,
    build,
    error_of_call,
    forced,
    generated,
    largest_error,
    random_fitted,
    sharpness,
)
from tests.support.language_models import (
    transformers,
    with_adapter,
)

ATTACHED = ("Llama", "Qwen2", "Gemma2", "GPT2")


@pytest.fixture(scope="module")
def models():
    return {family: build(family) for family in ATTACHED}


@pytest.fixture(scope="module")
def llama():
    return build()


@pytest.fixture
def whole():
    """A prompt without padding, and its mask."""
    return {"prompt": PROMPT[1:], "attention_mask": MASK[1:]}


# every pair of head, mode and family, but not every triple
GENERATIONS = [
    (ATTACHED[(i + j) % 4], kind, mode)
    for i, kind in enumerate(HEAD_KINDS)
    for j, mode in enumerate(MODES)
]


@pytest.mark.parametrize(("family", "kind", "mode"), GENERATIONS)
def test_generation_is_exact(models, family, kind, mode):
    model = models[family]
    fit = random_fitted(model, kind)
    if kind == "ats" and mode == "static":
        with pytest.raises(ValueError, match="not a static one"):
            generated(model, fit, **MODES[mode])
        return
    assert largest_error(model, fit, generated(model, fit, **MODES[mode])) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_prompt_lookup_is_exact(llama, kind):
    # one text only; tokens are proposed, judged together and partly taken back
    fit = random_fitted(llama, kind)
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


@pytest.mark.parametrize("family", ATTACHED)
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_plain_call_is_exact(models, family, kind):
    model = models[family]
    fit = random_fitted(model, kind)
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


@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_bfloat16(kind):
    model = build("Llama").bfloat16()
    fit = random_fitted(model, kind)
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


@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_model_is_unchanged_after_the_block(llama, kind):
    def hooks():
        return [
            (len(m._forward_hooks), len(m._forward_pre_hooks), sorted(vars(m)))
            for m in llama.modules()
        ]

    fit = random_fitted(llama, kind)
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
    fit = random_fitted(llama, "linear")
    with attached(llama, fit):
        with pytest.raises(ValueError, match="already"), attached(llama, fit):
            pass
        with pytest.raises(TypeError, match="return_dict=True"):
            llama(PROMPT, return_dict=False)
    with attached(llama, fit):  # the failed attempt did not take away the first
        pass
    torch.manual_seed(9)
    other = transformers.LlamaForCausalLM(llama.config)
    with pytest.raises(ValueError, match=r"the head belongs to another model.*digest"):
        attached(other, fit).__enter__()
    with pytest.raises(ValueError, match="output embeddings"):
        attached(llama.model, fit).__enter__()


def test_ats_refuses_a_cache_it_has_not_seen(llama):
    fit = random_fitted(llama, "ats")
    cache = llama(PROMPT[1:, :4], use_cache=True).past_key_values
    with attached(llama, fit), pytest.raises(ValueError, match="must have seen all"):
        llama(PROMPT[1:, 4:], past_key_values=cache)
    assert "reorder_cache" not in vars(cache)


def test_ats_frees_caches(llama):
    with attached(llama, random_fitted(llama, "ats")):
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
@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_wrapped_base_model(llama, kind, call):
    fit, wrapper = random_fitted(llama, kind), Wrapper(llama, call)
    with attached(llama, fit):
        wanted = llama(PROMPT, logits_to_keep=2).logits
    with attached(wrapper, fit):
        for _ in range(2):
            assert torch.equal(wrapper(PROMPT, logits_to_keep=2).logits, wanted)
        assert torch.equal(llama(PROMPT, logits_to_keep=2).logits, wanted)
    assert not wrapper._forward_hooks


@pytest.fixture(scope="module")
def lora():
    return with_adapter(build(), "q_proj", "v_proj", "down_proj")


@pytest.mark.parametrize(
    ("kind", "mode"),
    [
        *(("linear", "greedy"), ("linear", "static"), ("shape", "sampling"), ("ats", "beam")),
    ],
)
def test_generation_with_an_adapter_is_exact(lora, kind, mode):
    fit = random_fitted(lora, kind)
    how = {**MODES[mode], "output_scores": True}
    output = generated(lora, fit, **how)
    merged = copy.deepcopy(lora).merge_and_unload()
    assert largest_error(lora, fit, output) < 1e-4
    assert largest_error(merged, fit, output) < 1e-4
    assert largest_error(build("Llama"), fit, output) > 0.1
    if mode == "greedy":  # no step in between
        for scores, logits in zip(output.scores, output.logits, strict=True):
            assert torch.equal(scores, logits)


@torch.no_grad()
def test_compiled_model_is_exact():
    model, tokens = build(num_hidden_layers=1), PROMPT[1:]  # one layer compiles sooner
    compiled: Any = torch.compile(model, backend="eager")
    fit, plain = random_fitted(model, "ats"), compiled(tokens).logits
    with attached(model, fit):  # after a compiled call without hooks
        calls = [compiled(text).logits for text in (tokens, tokens + 1)]
        with pytest.raises(ValueError, match="already"), attached(compiled, fit):
            pass
    assert torch.equal(compiled(tokens).logits, plain)
    for text, logits in zip((tokens, tokens + 1), calls, strict=True):
        assert error_of_call(model, fit, text, logits) < 1e-4


@torch.no_grad()
def test_compiled_generation_is_exact():
    model, prompt = build(num_hidden_layers=1), PROMPT[1:]
    compiled: Any = torch.compile(model, backend="eager")
    fit = random_fitted(model, "linear")
    options = {"max_new_tokens": 2, "return_dict_in_generate": True, "output_logits": True}
    with attached(compiled, fit):
        output = compiled.generate(prompt, do_sample=False, **options)
    wanted, _ = forced(model, fit, output.sequences, torch.ones_like(prompt))
    got = torch.stack(output.logits, 1).log_softmax(-1)
    assert (got - wanted[:, prompt.shape[1] - 1 : -1]).abs().max() < 1e-4


def test_generation_that_compiles_is_exact(whole):
    """With a static cache ``generate`` compiles the model itself, on a GPU without being asked."""
    model = build(num_hidden_layers=1)
    how = transformers.CompileConfig(backend="eager", fullgraph=False, mode=None)
    how._compile_all_devices = True
    whole |= {"cache_implementation": "static", "compile_config": how, "max_new_tokens": 3}
    before = generated(model, **whole)
    assert hasattr(model, "_compiled_call")
    fit = random_fitted(model, "linear")
    output, after = generated(model, fit, **whole), generated(model, **whole)
    wanted, _ = forced(model, fit, output.sequences, MASK[1:])
    got = torch.stack(output.logits, 1).log_softmax(-1)
    assert (got - wanted[:, PROMPT.shape[1] - 1 : -1]).abs().max() < 1e-4
    for old, new in zip(before.logits, after.logits, strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("kind", ["linear", "mlp", "ats"])
def test_states_that_were_not_seen(llama, kind, monkeypatch):
    """A call whose hooks did not run must not take the states of the one before."""
    with attached(llama, random_fitted(llama, kind)):
        llama(PROMPT)
        output = llama(PROMPT)
        output.logits = torch.zeros(2, 6, 101)
        monkeypatch.setattr(llama, "forward", lambda *args, **named: copy.copy(output))
        with pytest.raises(RuntimeError, match="attach before the first compiled call"):
            llama(PROMPT)


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_logits_to_keep_by_position_or_unknown(llama, kind, monkeypatch):
    fit, tokens = random_fitted(llama, kind), PROMPT[1:]
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


def test_logits_computed_in_parts_are_refused(llama, monkeypatch):
    with attached(llama, random_fitted(llama, "linear")):
        output = llama(PROMPT)

        def parts(input_ids):
            for row in output.logits.new_ones(2, 1, 32):
                llama.lm_head(row)
            return copy.copy(output)

        monkeypatch.setattr(llama, "forward", parts)
        with pytest.raises(ValueError, match=r"states \(2, 6\) like the logits, got \(1,\)"):
            llama(PROMPT)


@pytest.mark.parametrize("outer", ["model", "forward"])
@pytest.mark.parametrize("kind", ["linear", "ats", "global"])
def test_threads_are_independent(llama, kind, outer):
    """Each waits for the others in the middle of its calls, so that their hooks run in between."""
    fit, wrapper = random_fitted(llama, kind), Wrapper(llama, outer)
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


def test_copies_of_models_and_caches(llama, whole):
    fit = random_fitted(llama, "ats")
    rows = PROMPT[1:, :4].repeat(3, 1) + torch.arange(3)[:, None]
    with torch.no_grad(), attached(llama, fit):
        twin = copy.deepcopy(llama)
        cache = llama(rows, use_cache=True).past_key_values
        other, used = copy.deepcopy(cache), copy.deepcopy(cache)
        with pytest.raises(ValueError, match="must have seen all"):
            llama(rows, past_key_values=used)
    with pytest.raises(ValueError, match="do not copy a"), attached(twin, fit):
        pass
    keys = cache.layers[0].keys.clone()
    for copied in (other, used):
        copied.reorder_cache(torch.tensor([2, 2, 0]))
        assert torch.equal(copied.layers[0].keys[..., :4, :], keys[[2, 2, 0]])
    assert torch.equal(cache.layers[0].keys, keys)


@pytest.mark.parametrize("family", ["Mamba", "Rwkv", "RecurrentGemma"])
def test_ats_on_a_recurrent_model(family, whole):
    model = build(family)
    fit = random_fitted(model, "ats")
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


def test_ats_refuses_a_state_of_earlier_tokens(whole):
    model = build("Mamba")
    with attached(model, random_fitted(model, "ats")):
        state = model(PROMPT[1:]).cache_params
        with pytest.raises(ValueError, match="got cache_params"):
            model(PROMPT[1:, :1], cache_params=state, use_cache=False)


def test_ats_refuses_a_cache_that_is_not_returned(llama, monkeypatch):
    fit, tokens, run = random_fitted(llama, "ats"), PROMPT[1:], llama.model.forward

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


def test_ats_refuses_a_cache_that_does_not_count(llama, monkeypatch):
    """As one whose first layer is recurrent may be: the head would forget the text at each call."""
    cache = transformers.DynamicCache()
    monkeypatch.setattr(cache, "get_seq_length", lambda *_, **named: 0)
    fit = random_fitted(llama, "ats")
    with attached(llama, fit), pytest.raises(ValueError, match="a cache that counts its tokens"):
        llama(PROMPT[1:], past_key_values=cache)


@pytest.mark.parametrize(("family", "mode"), [("OPT", "beam"), ("Bart", "no cache")])
def test_models_that_call_a_decoder_in_their_base_model(family, mode, whole):
    model = build(family)
    fit = random_fitted(model, "ats")
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
        attached(model, random_fitted(model, "ats")).__enter__()


def test_ats_refuses_packed_texts(llama):
    packed, position = PROMPT[1:], torch.tensor([[0, 1, 2, 0, 1, 2]])
    for mask in (None, torch.ones_like(packed)):
        with attached(llama, random_fitted(llama, "ats")):
            with pytest.raises(ValueError, match="one text in each row"):
                llama(packed, position_ids=position, attention_mask=mask, use_cache=False)
            llama(packed, position_ids=2 * torch.arange(6)[None], attention_mask=mask)
    fit = random_fitted(llama, "linear")
    with torch.no_grad(), attached(llama, fit):
        logits = llama(packed, position_ids=position, use_cache=False).logits
    for text, found in zip(packed.reshape(2, 1, 3), logits.reshape(2, 1, 3, -1), strict=True):
        assert error_of_call(llama, fit, text, found) < 1e-4


@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_offloaded_weights(kind):
    accelerate = pytest.importorskip("accelerate")
    model, other = build("Llama"), build("Llama")
    fit = random_fitted(model, kind)
    accelerate.cpu_offload(other, execution_device="cpu")
    with attached(model, fit), attached(other, fit):
        wanted, got = (one(PROMPT[1:]).logits for one in (model, other))
    torch.testing.assert_close(got, wanted)
    assert {weight.device.type for weight in other.parameters()} == {"meta"}
