"""Generation of tiny models with a head, and the same by teacher forcing."""

from typing import Any

import torch
from torch import nn

from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.fitted import FittedHead, _make_head
from calibrant.llm.heads.modules import _shape_features_of_logits
from calibrant.llm.models.huggingface import fingerprint_of
from tests.support.language_models import tiny_model

HEAD_KINDS = ("global", "linear", "mlp", "shape", "ats")


PROMPT = torch.tensor([[0, 0, 0, 5, 6, 7], [11, 12, 13, 14, 15, 16]])
MASK = (PROMPT != 0).long()


def build(family="Llama", **more):
    return tiny_model(family, vocabulary=101, width=32, spread=0.3, **more)


def random_fitted(model, kind):
    """A head whose sharpness differs from token to token, from about 0.5 to 5.

    Rounding of the model itself, 5e-6 in its log-probabilities, grows with the sharpness: at 20 it
    would reach 3e-4 without any fault of the head (4e-5 with the model in double precision).
    """
    torch.manual_seed(1)
    options = {"attention_heads": 4} if kind == "ats" else {}
    head = _make_head(kind, width=32, start=0.4, **options)
    for parameter in head.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.15 if kind == "shape" else 0.1)
    return FittedHead(head, fingerprint_of(model), "given")


def sharpness(head, output, mask=None):
    """Of a teacher-forced pass, ``(batch, tokens)``."""
    hidden = output.hidden_states[-1].float()
    if head.kind == "ats":
        u = head(hidden, present=mask)
    else:
        u = head(_shape_features_of_logits(output.logits) if head.kind == "shape" else hidden)
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


def error_of_call(model, fitted, tokens, logits):
    """Largest error of the calibrated log-probabilities of texts without padding."""
    wanted, _ = forced(model, fitted, tokens, torch.ones_like(tokens))
    return float((logits.log_softmax(-1) - wanted).abs().max())
