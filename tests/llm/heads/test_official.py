"""Heads that the authors of ATS published."""

import pytest
import torch
from safetensors.torch import save_file

from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.official import read_official
from tests.support.generation import (
    PROMPT,
    build,
)


@pytest.fixture(scope="module")
def llama():
    return build()


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
        ('{"feature_key": "maxlogit"}', "feature_key='hidden_states', got 'maxlogit'"),
        ('{"normalize_logits": true}', "normalize_logits=False, got True"),
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
