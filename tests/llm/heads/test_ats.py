"""Adaptive temperature scaling: the transformer head and selective smoothing."""

import numpy as np
import pytest
import torch

from calibrant._core.chunks import examples
from calibrant.calibrators.logpartition import tabulate
from calibrant.llm.heads.ats import Memory, _selective
from calibrant.llm.heads.fit import OBJECTIVES
from tests.llm.heads.test_modules import inputs_of
from tests.llm.heads.test_objectives import tokens
from tests.support.language_models import random_head


def test_ats_is_a_layer_of_llama():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama as llama

    head = random_head("ats", attention_heads=4, inner=24)
    config = transformers.LlamaConfig(
        hidden_size=16,
        intermediate_size=24,
        num_attention_heads=4,
        num_key_value_heads=4,
        rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    layer = llama.LlamaDecoderLayer(config, 0)
    names = {name: value for name, value in head.state_dict().items() if "last" not in name}
    layer.load_state_dict(names)
    hidden = inputs_of(head)
    position = torch.arange(5)[None]
    turned = llama.LlamaRotaryEmbedding(config)(hidden, position)
    mask = torch.full((5, 5), -torch.inf).triu(1)[None, None]
    found = layer(hidden, attention_mask=mask, position_embeddings=turned)
    wanted = (found @ head.last.weight[0] + head.last.bias).clamp(max=3)
    torch.testing.assert_close(head(hidden), wanted, rtol=1e-4, atol=1e-4)


def test_ats_memory_equals_one_pass():
    head = random_head("ats")
    hidden = inputs_of(head)
    whole, memory = head(hidden), Memory()
    pieces = [head(hidden[:, a:b], memory=memory) for a, b in ((0, 2), (2, 3), (3, 5))]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    assert len(memory) == 5
    memory.crop(3)
    torch.testing.assert_close(head(hidden[:, 3:], memory=memory), whole[:, 3:])
    swapped = Memory()
    head(hidden[:, :4], memory=swapped)
    swapped.select(torch.tensor([1, 0]))
    torch.testing.assert_close(head(hidden.flip(0)[:, 4:], memory=swapped), whole.flip(0)[:, 4:])


@pytest.mark.parametrize("left", [True, False])
def test_ats_does_not_see_padding(left):
    head = random_head("ats")
    hidden = inputs_of(head)
    noise = torch.full((2, 3, 16), 7.0)
    padded = torch.cat([noise, hidden] if left else [hidden, noise], 1)
    present = torch.ones(2, 8, dtype=torch.bool)
    present[:, :3] = not left
    present[:, 5:] = left
    at = slice(3, None) if left else slice(5)
    found = head(padded, present=present)
    assert torch.isfinite(found).all()
    torch.testing.assert_close(found[:, at], head(hidden))


def test_ats_is_causal_and_capped():
    head = random_head("ats", cap=1.5)
    hidden = inputs_of(head)
    changed = hidden.clone()
    changed[:, 3:] += 1
    assert torch.equal(head(changed)[:, :3], head(hidden)[:, :3])
    assert not torch.equal(head(changed)[:, 4], head(hidden)[:, 4])
    torch.nn.init.constant_(head.last.bias, 50)
    torch.testing.assert_close(head(hidden).exp(), torch.full((2, 5), 1.5))


def test_selective_with_one_group_only():
    logits, _, _, u = tokens()
    records = tabulate(examples(logits, logits.argmax(-1)))
    value, gradient = _selective(records, u, weighting="official")
    assert value == 0
    assert not gradient.any()
    assert _selective(records, u, alpha=0.0).value == pytest.approx(
        OBJECTIVES["nll"](records, u)[0]
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha must be between 0 and 1, got 1.5"),
        ({"over": 11}, "from 1 to 10, got 11"),
        ({"over": "top"}, "'vocabulary' or a number"),
        ({"weighting": "batch"}, "weighting must be one of"),
    ],
)
def test_selective_refuses(options, message):
    logits, labels, _, u = tokens()
    with pytest.raises(ValueError, match=message):
        _selective(tabulate(examples(logits, labels)), u, **options)


def test_alpha_half_does_not_calibrate():
    """The paper's loss is not proper: at the truth it still pulls towards less confidence."""
    rng = np.random.default_rng(0)
    logits = 3 * rng.normal(size=(20000, 12)).astype(np.float32)
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(-1)  # calibrated
    records = tabulate(examples(logits, labels))
    pulls = {
        name: OBJECTIVES[name](records, 0.0).gradient.sum()
        for name in ("nll", "bce", "brier", "selective")
    }
    assert all(abs(pulls[name]) < 0.02 for name in ("nll", "bce", "brier"))
    assert pulls["selective"] > 0.1
