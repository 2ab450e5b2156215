"""Calibrated confidences of generated texts against teacher forcing."""

import pytest
import torch

from calibrant.llm.answers.asking import ask
from calibrant.llm.heads.attach import _calibrated_generation, attached
from tests.support.generation import (
    HEAD_KINDS,
    MASK,
    PROMPT,
    build,
    forced,
    generated,
    random_fitted,
)
from tests.support.language_models import word_tokenizer


@pytest.fixture(scope="module")
def llama():
    return build()


GAPS = torch.tensor([[5, 6, 0, 0, 7, 8, 9], [0, 11, 12, 0, 13, 14, 15]])


def without_gaps(model, fit, row, written=()):
    """Calibrated log-probabilities of the text of a row, by the model without hooks."""
    text = torch.cat([row[row != 0], torch.as_tensor(written, dtype=torch.long)])[None]
    return forced(model, fit, text, torch.ones_like(text))[0][0]


@pytest.mark.parametrize("mode", [{}, {"use_cache": False}], ids=["greedy", "no cache"])
@pytest.mark.parametrize("kind", ["linear", "ats"])
def test_padding_in_the_middle_is_ignored(llama, kind, mode):
    fit, mask = random_fitted(llama, kind), (GAPS != 0).long()
    given = {"prompt": GAPS, "attention_mask": mask, **mode}
    output = generated(llama, fit, **given)
    plain = generated(llama, **given, output_hidden_states=True)
    told = _calibrated_generation(fit.head, plain, mask, [2])
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


def test_incomplete_prompts_are_refused(llama):
    fit, whole = random_fitted(llama, "ats"), {"prompt": PROMPT[1:], "attention_mask": MASK[1:]}
    output = generated(llama, **whole, output_hidden_states=True, prefill_chunk_size=4)
    with pytest.raises(ValueError, match="all 6 tokens of the prompt, got 2"):
        _calibrated_generation(fit.head, output, MASK[1:], [2])
    _calibrated_generation(random_fitted(llama, "linear").head, output, MASK[1:], [2])


# every pair of head and family
REPORTS = [(family, kind) for family in ("Llama", "Qwen2", "Gemma2", "GPT2") for kind in HEAD_KINDS]


@pytest.mark.parametrize(("family", "kind"), REPORTS)
def test_calibrated_generation_equals_teacher_forcing(family, kind):
    model = build(family)
    fit = random_fitted(model, kind)
    output = generated(model, output_hidden_states=True)
    told = _calibrated_generation(fit.head, output, MASK, [2])
    wanted, b = forced(model, fit, output.sequences, MASK)
    first = PROMPT.shape[1]
    wanted, b = wanted[:, first - 1 : -1], b[:, first - 1 : -1]
    chosen = wanted.gather(-1, output.sequences[:, first:, None])[..., 0]
    there = told.written
    assert there[:, 0].all()
    assert torch.equal(told.tokens, output.sequences[:, first:])
    torch.testing.assert_close(told.log_probs[there], chosen[there], rtol=0, atol=1e-4)
    torch.testing.assert_close(told.sharpness[there], b[there], rtol=1e-4, atol=1e-4)


def test_end_of_a_text(llama):
    head = random_fitted(llama, "linear").head
    output = generated(llama, output_hidden_states=True)
    output.sequences[0, 7], output.sequences[1, 8] = 2, 50
    written = _calibrated_generation(head, output, MASK, [50]).written
    assert written[0].all()
    assert written[1].tolist() == [True, True, True, False, False, False]
    assert _calibrated_generation(head, output, MASK, [2, 50]).written.sum() == 5


def test_a_model_with_a_head_is_refused(llama):
    fit = random_fitted(llama, "linear")
    with attached(llama, fit), pytest.raises(ValueError, match="ask outside of attached"):
        ask(llama, word_tokenizer(["word"]), ["word"], fitted=fit)
