"""Calibrated confidences of a text that was generated without a head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from calibrant.llm.heads.ats import ATSHead
from calibrant.llm.heads.attach import log_sharpness_of_tokens, on_device
from calibrant.llm.heads.modules import Head, bounded


class CalibratedGeneration(NamedTuple):
    """Calibrated probabilities of generated texts, each ``(n, tokens)``.

    Attributes
    ----------
    tokens : integers
    log_probs : float
        Of these tokens.
    sharpness : float
        Factor of the logits.
    written : bool
        False after the end of a text.
    """

    tokens: Tensor
    log_probs: Tensor
    sharpness: Tensor
    written: Tensor


@torch.no_grad()
def _calibrated_generation(
    head: Head, output: Any, mask: Tensor, ends: Sequence[int]
) -> CalibratedGeneration:
    """Calibrate the texts that a model generated greedily; they do not change.

    Several heads can be compared on one output, with its logits and hidden states.

    Parameters
    ----------
    head : Head
    output : GenerateOutput
        Of ``model.generate(..., num_beams=1, return_dict_in_generate=True, output_logits=True,
        output_hidden_states=True)``, with no head attached.
    mask : (n, prompt)
        Attention mask of the prompts.
    ends : sequence of int
        Tokens that end a text.
    """
    logits = torch.stack(output.logits, 1)
    tokens = output.sequences[:, mask.shape[1] :]
    ended = torch.isin(tokens, torch.as_tensor(ends, device=tokens.device).long()).int()
    written = (ended.cumsum(1) - ended) == 0  # up to the token that ends the text
    states = [step[-1].to(logits.device) for step in output.hidden_states]
    head = on_device(head, logits.device)
    if isinstance(head, ATSHead):
        if states[0].shape[1] != mask.shape[1]:
            raise ValueError(
                f"the ATS head needs the states of all {mask.shape[1]} tokens of the prompt, got "
                f"{states[0].shape[1]}: generate without past_key_values and prefill_chunk_size"
            )
        # without a cache each step has the states of the whole text
        hidden = torch.cat([states[0], *(step[:, -1:] for step in states[1:])], 1).float()
        present = nn.functional.pad(mask.to(hidden.device), (0, len(states) - 1), value=1)
        u = head(hidden, present=present)[:, -len(states) :]
    else:
        hidden = torch.stack([state[:, -1] for state in states], 1)
        u = log_sharpness_of_tokens(head, hidden, logits)
    sharpness = bounded(u).exp()
    log_probs = (logits.float() * sharpness[..., None]).log_softmax(-1)
    chosen = log_probs.gather(-1, tokens.to(logits.device)[..., None])[..., 0]
    return CalibratedGeneration(tokens, chosen, sharpness, written)
