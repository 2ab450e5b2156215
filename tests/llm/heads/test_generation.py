"""Calibrated confidences of generated texts against teacher forcing."""

import pytest
import torch

from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.generation import calibrate_generation
from tests.support.generation import (
    HEAD_KINDS,
    MASK,
    MODES,
    PROMPT,
    build,
    forced,
    generated,
    random_fitted,
)


@pytest.fixture(scope="module")
def llama():
    return build()


@pytest.fixture
def whole():
    """A prompt without padding, and its mask."""
    return {"prompt": PROMPT[1:], "attention_mask": MASK[1:]}


GAPS = torch.tensor([[5, 6, 0, 0, 7, 8, 9], [0, 11, 12, 0, 13, 14, 15]])


def without_gaps(model, fit, row, written=()):
    """Calibrated log-probabilities of the text of a row, by the model without hooks."""
    text = torch.cat([row[row != 0], torch.as_tensor(written, dtype=torch.long)])[None]
    return forced(model, fit, text, torch.ones_like(text))[0][0]


@pytest.mark.parametrize("mode", ["greedy", "no cache"])
@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_padding_in_the_middle_is_ignored(llama, kind, mode):
    fit, mask = random_fitted(llama, kind), (GAPS != 0).long()
    given = {"prompt": GAPS, "attention_mask": mask, **MODES[mode]}
    output = generated(llama, fit, **given)
    told = calibrate_generation(
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


@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("mode", ["greedy", "beam", "no cache", "lookup", "static"])
def test_ats_head_in_every_mode(llama, whole, mode, masked):
    """A mask is not needed where there is no padding."""
    fit = random_fitted(llama, "ats")
    how = {"lookup": {"prompt_lookup_num_tokens": 2}, **MODES}[mode]
    output = generated(llama, **whole, output_hidden_states=True, **how)
    told = calibrate_generation(llama, fit, output, attention_mask=MASK[1:] if masked else None)
    repeated = MASK[1:].repeat(len(output.sequences), 1)
    wanted = forced(llama, fit, output.sequences, repeated)[0][:, 5:-1]
    chosen = wanted.gather(-1, output.sequences[:, 6:, None])[..., 0]
    there = told.written
    torch.testing.assert_close(told.log_probs[there], chosen[there], rtol=0, atol=1e-4)


@pytest.mark.parametrize("masked", [True, False])
def test_incomplete_prompts_are_refused(llama, whole, masked):
    fit, mask = random_fitted(llama, "ats"), MASK[1:] if masked else None
    whole["output_hidden_states"] = True
    cache = llama(PROMPT[1:, :4], use_cache=True).past_key_values
    for how, got in (({"prefill_chunk_size": 4}, 2), ({"past_key_values": cache}, 2)):
        output = generated(llama, **whole, **how)
        with pytest.raises(ValueError, match=f"all 6 tokens of the prompt, got {got} and 6"):
            calibrate_generation(llama, fit, output, attention_mask=mask)
        calibrate_generation(llama, random_fitted(llama, "linear"), output)
    output = generated(llama, **whole)
    with pytest.raises(ValueError, match="got 6 and 4"):
        calibrate_generation(llama, fit, output, attention_mask=MASK[1:, :4])


def test_embedded_prompts(llama, whole):
    fit = random_fitted(llama, "ats")
    whole["output_hidden_states"] = True
    wanted = calibrate_generation(llama, fit, generated(llama, **whole))
    embedded = llama.get_input_embeddings()(PROMPT[1:])
    output = generated(llama, **{**whole, "prompt": None}, inputs_embeds=embedded)
    got = calibrate_generation(llama, fit, output, attention_mask=MASK[1:])
    torch.testing.assert_close(got.log_probs, wanted.log_probs)
    with pytest.raises(ValueError, match="with inputs_embeds, pass attention_mask"):
        calibrate_generation(llama, fit, output)


@pytest.mark.parametrize(
    ("family", "kind", "mode"),
    [
        *(("Llama", "ats", "greedy"), ("Gemma2", "linear", "beam")),
        *(("GPT2", "global", "sampling"), ("Qwen2", "shape", "beam")),
    ],
)
def test_text_generated_with_a_head_is_refused(family, kind, mode):
    model = build(family)
    fit = random_fitted(model, kind)
    with attached(model, fit):
        output = generated(model, output_hidden_states=True, **MODES[mode])
    with pytest.raises(ValueError, match="or generate outside of attached"):
        calibrate_generation(model, fit, output, attention_mask=MASK)


# every pair of head, mode and family, but not every triple
REPORTS = [
    (("Llama", "Qwen2", "Gemma2", "GPT2")[(i + j) % 4], kind, mode)
    for i, kind in enumerate(HEAD_KINDS)
    for j, mode in enumerate(("greedy", "sampling", "beam", "two beams"))
]


@pytest.mark.parametrize(("family", "kind", "mode"), REPORTS)
def test_calibrated_generation_equals_teacher_forcing(family, kind, mode):
    model = build(family)
    fit = random_fitted(model, kind)
    output = generated(model, output_hidden_states=True, **MODES[mode])
    told = calibrate_generation(model, fit, output, attention_mask=MASK)
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


@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_beams_that_end_before_the_search(llama, kind):
    """A search goes on while a worse beam may still win; texts and beams are then cut."""
    fit, longer = random_fitted(llama, kind), 0
    prompt = torch.tensor([[47, 36, 70, 70, 94, 22]])
    whole = torch.ones_like(prompt)
    for end in range(7):
        ends = list(range(3 + end, 100, 7))  # many tokens that end a text: one comes soon
        how = {"num_beams": 3, "max_new_tokens": 12, "eos_token_id": ends, "pad_token_id": 0}
        given = {"prompt": prompt, "attention_mask": whole, "output_hidden_states": True}
        output = generated(llama, **given, **how)
        told = calibrate_generation(llama, fit, output, attention_mask=whole)
        wanted, _ = forced(llama, fit, output.sequences, whole)
        new = output.sequences[:, prompt.shape[1] :]
        chosen = wanted[:, prompt.shape[1] - 1 : -1].gather(-1, new[..., None])[..., 0]
        assert torch.equal(told.tokens, new)
        there = told.written
        torch.testing.assert_close(told.log_probs[there], chosen[there], rtol=0, atol=1e-3)
        longer += len(output.logits) > new.shape[1]
    assert longer


def test_end_token_of_generate(llama):
    fit = random_fitted(llama, "linear")
    output = generated(llama, output_hidden_states=True)
    output.sequences[0, 7], output.sequences[1, 8] = 2, 50
    written = calibrate_generation(llama, fit, output, eos_token_id=50).written
    assert written[0].all()
    assert written[1].tolist() == [True, True, True, False, False, False]
    assert calibrate_generation(llama, fit, output, eos_token_id=[2, 50]).written.sum() == 5


def test_end_of_a_text(llama):
    fit = random_fitted(llama, "linear")
    output = generated(llama, output_hidden_states=True)
    output.sequences[0, 7] = 2
    written = calibrate_generation(llama, fit, output).written
    assert written[0].tolist() == [True, True, False, False, False, False]
    assert written[1].all()
