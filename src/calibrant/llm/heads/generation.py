"""Calibrated confidences of a text that was generated without a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant.llm.heads.ats import ATSHead
from calibrant.llm.heads.attach import log_sharpness_of_tokens, matching_model, on_device
from calibrant.llm.heads.fitted import FittedHead
from calibrant.llm.heads.modules import Head, bounded
from calibrant.llm.models.huggingface import SCALES, end_tokens, has_head


class CalibratedGeneration(NamedTuple):
    """Calibrated probabilities of generated texts, each ``(n, tokens)``.

    Attributes
    ----------
    tokens : integers
    log_probs : float
        Of these tokens.
    confidence : float
        Probability of the likeliest token at each position.
    sharpness : float
        Factor of the logits.
    written : bool
        False after the end of a text.
    """

    tokens: Tensor
    log_probs: Tensor
    confidence: Tensor
    sharpness: Tensor
    written: Tensor


def calibrate_generation(
    model: Any,
    fitted: FittedHead,
    output: Any,
    *,
    attention_mask: Tensor | None = None,
    eos_token_id: int | Sequence[int] | None = None,
) -> CalibratedGeneration:
    """Compute the calibrated confidences of an output of ``generate``; the text does not change.

    Parameters
    ----------
    model : PreTrainedModel
        The model that generated, without the head attached. Text that was generated with a head
        is refused (except that of an assistant model, which leaves no trace).
    fitted : FittedHead
    output : GenerateOutput
        Of ``model.generate(..., return_dict_in_generate=True, output_logits=True,
        output_hidden_states=True)``, greedy, sampled or by beams.
    attention_mask : (batch, prompt), optional
        Of the prompts, if they have padding. Only the ATS head needs it.
    eos_token_id : int or sequence of int, optional
        If ``generate`` got another one than that of the generation config.
    """
    inner = matching_model(model, fitted)
    check_plain_output(inner, output)
    ends = list(end_tokens(inner)) if eos_token_id is None else eos_token_id
    return calibrated_output(fitted.head, output, attention_mask, ends)


def check_plain_output(inner: Any, output: Any) -> None:
    """Raise unless an output of ``generate`` has what is needed and no head was attached."""
    states = getattr(output, "hidden_states", None)
    if has_head(inner) or (states is not None and hasattr(states[0][-1], SCALES)):
        raise ValueError(
            "this text was generated with a head attached: use the logits of the output itself, or "
            "generate outside of attached"
        )
    for name in ("logits", "hidden_states"):
        if getattr(output, name, None) is None:
            raise ValueError(
                f"the output of generate has no {name}: call it with return_dict_in_generate=True, "
                "output_logits=True, output_hidden_states=True"
            )


@torch.no_grad()
def calibrated_output(
    head: Head, output: Any, mask: Tensor | None, ends: int | Sequence[int]
) -> CalibratedGeneration:
    """Compute the calibrated confidences of an output that was checked."""
    beams = getattr(output, "beam_indices", None)
    # a beam search may run for longer than the texts that win
    steps = len(output.logits) if beams is None else beams.shape[1]
    tokens = output.sequences[:, -steps:]
    if beams is None:
        rows = torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)
        ended = torch.isin(
            tokens, torch.as_tensor(ends, dtype=torch.long, device=tokens.device)
        ).int()
        written = (ended.cumsum(1) - ended) == 0  # up to the token that ends the text
    else:
        rows, written = beams.clamp(min=0), beams >= 0
    logits = torch.stack([output.logits[step][row] for step, row in enumerate(rows.T)], 1)
    last_layer = [step[-1].to(logits.device) for step in output.hidden_states[:steps]]
    states = [state[row] for state, row in zip(last_layer, rows.T, strict=True)]
    head = on_device(head, logits.device)
    if isinstance(head, ATSHead):
        prompt = output.sequences.shape[1] - steps
        if not prompt and mask is not None:  # it was passed as inputs_embeds
            prompt = mask.shape[1]
        masked = prompt if mask is None else mask.shape[1]
        if not states[0].shape[1] == masked == prompt:
            raise ValueError(
                f"the ATS head needs the states and the mask of all {prompt} tokens of the "
                f"prompt, got {states[0].shape[1]} and {masked}: generate without past_key_values "
                "and prefill_chunk_size; with inputs_embeds, pass attention_mask"
            )
        if mask is not None:  # of each text; the rows of one prompt are next to each other
            repeats = len(output.logits[0]) // len(mask)
            mask = mask.repeat_interleave(repeats, 0)[rows[:, 0].to(mask.device)]
        # without a cache each step has the states of the whole text
        hidden = torch.cat([states[0], *(step[:, -1:] for step in states[1:])], 1).float()
        if mask is not None:
            mask = nn.functional.pad(mask.to(hidden.device), (0, len(states) - 1), value=1)
        u = head(hidden, present=mask)[:, -len(states) :]
    else:
        hidden = torch.stack([state[:, -1] for state in states], 1)
        u = log_sharpness_of_tokens(head, hidden, logits)
    sharpness = bounded(u).exp()
    log_probs = (logits.float() * sharpness[..., None]).log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.to(logits.device)[..., None])[..., 0]
    return CalibratedGeneration(tokens, chosen, log_probs.amax(-1).exp(), sharpness, written)
