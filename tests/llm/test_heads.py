"""Heads, objectives, training from tables, files, and the label-free temperature."""

import dataclasses
import math
import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import calibrant as cal
from calibrant._core.chunks import examples
from calibrant._core.logpartition import tabulate
from calibrant.llm.fingerprint import ModelMark
from calibrant.llm.heads import fit as fit_module
from calibrant.llm.heads.daca import daca, daca_of_records
from calibrant.llm.heads.fit import (
    FittedHead,
    fit_head,
    paired_gain,
    predicted,
    split_documents,
    token_claims,
)
from calibrant.llm.heads.modules import (
    HEADS,
    DecoderHead,
    Memory,
    ShapeHead,
    bounded,
    make_head,
    shape_features,
    shape_features_of_logits,
)
from calibrant.llm.heads.objectives import OBJECTIVES, loss, selective
from calibrant.llm.tokens.tables import TokenTable

MARK = ModelMark("tiny", 16, 40, "0123456789abcdef", None)
ADAPTIVE = ("linear", "mlp", "shape", "decoder")


def inputs_of(head, generator=0):
    torch.manual_seed(generator)
    width = {"shape": 12}.get(head.wants, 16)
    return torch.randn(2, 5, width)


def random_head(kind, **options):
    torch.manual_seed(0)
    head = make_head(kind, width=16, start=0.2, **options)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return head


# ------------------------------------------------------------------------------------------ heads


@pytest.mark.parametrize("kind", HEADS)
def test_start_is_one_temperature(kind):
    head = make_head(kind, width=16, start=-0.7)
    assert torch.equal(head(inputs_of(head)), torch.full((2, 5), -0.7))


@pytest.mark.parametrize(("kind", "options"), [*((k, {}) for k in HEADS), ("mlp", {"units": 5})])
def test_config_makes_the_same_form(kind, options):
    head = random_head(kind, **options)
    again = type(head)(**head.config())
    again.load_state_dict(head.state_dict())
    given = inputs_of(head)
    assert torch.equal(again(given), head(given))


def test_unknown_heads_and_options():
    with pytest.raises(ValueError, match="head must be one of"):
        make_head("lstm", width=16)
    with pytest.raises(ValueError, match="activation must be one of"):
        make_head("mlp", width=16, activation="tanh")
    with pytest.raises(ValueError, match="attention_heads"):
        make_head("decoder", width=16, attention_heads=3)


def test_linear_and_mlp_by_hand():
    hidden = torch.randn(7, 16, dtype=torch.float64)
    centred = hidden - hidden.mean(-1, keepdim=True)
    normed = centred / (centred.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
    linear = random_head("linear").double()
    wanted = normed @ linear.last.weight[0] + linear.last.bias
    torch.testing.assert_close(linear(hidden), wanted)
    for activation in ("swiglu", "relu"):
        mlp = random_head("mlp", units=6, activation=activation).double()
        first = normed @ mlp.first.weight.T + mlp.first.bias
        if activation == "swiglu":
            inner = first[:, :6] * torch.sigmoid(first[:, :6]) * first[:, 6:]
        else:
            inner = torch.where(first > 0, first, 0)
        wanted = inner @ mlp.last.weight[0] + mlp.last.bias
        torch.testing.assert_close(mlp(hidden), wanted)


def test_bounds():
    assert bounded(torch.tensor([-9.0, 0.5, 9.0])).tolist() == [-3.0, 0.5, 3.0]
    assert bounded(torch.zeros(1, dtype=torch.bfloat16)).dtype == torch.float32


@pytest.mark.parametrize("classes", [3, 40, 2000])
def test_shape_features_agree(classes):
    rng = np.random.default_rng(0)
    logits = (rng.normal(size=(50, classes)) * rng.uniform(0.2, 8, (50, 1))).astype(np.float32)
    logits[:5, 0] = -np.inf
    logits[5] = np.where(np.arange(classes) == 1, 90, 0)  # no doubt at all
    labels = logits.argmax(-1)
    wanted = shape_features_of_logits(torch.from_numpy(logits))
    got = shape_features(tabulate(examples(logits, labels)))
    assert wanted.shape == (50, 12)
    assert torch.isfinite(wanted).all()
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-3)
    # and both with the definition, one row at a time
    row = np.sort(logits[20].astype(np.float64))[::-1]
    gaps = row[0] - row
    rest = [np.log(np.exp(-0.05 * 2**k * gaps[1:]).sum()) for k in range(7)]
    leading = np.append(gaps[1:5], [20] * 4)[:4]
    by_hand = [*np.maximum(rest, -12), *np.log1p(np.minimum([gaps.mean(), *leading], 20))]
    np.testing.assert_allclose(wanted[20], by_hand, rtol=1e-4, atol=1e-4)


def test_shape_head_standardises():
    torch.manual_seed(0)
    features = torch.randn(100, 12) * 5 + 3
    features[:, 2] = 4.0  # a feature that never changes must not divide by zero
    head = ShapeHead()
    head.standardise(features)
    torch.nn.init.ones_(head.last.weight)
    found = head(features).detach()
    assert abs(float(found.mean())) < 1e-4
    assert torch.isfinite(found).all()


# -------------------------------------------------------------------------------- the decoder head


def test_decoder_is_a_layer_of_llama():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama import modeling_llama as llama

    head = random_head("decoder", attention_heads=4, inner=24)
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


def test_decoder_memory_equals_one_pass():
    head = random_head("decoder")
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
def test_decoder_does_not_see_padding(left):
    head = random_head("decoder")
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


def test_decoder_is_causal_and_capped():
    head = random_head("decoder", cap=1.5)
    hidden = inputs_of(head)
    changed = hidden.clone()
    changed[:, 3:] += 1
    assert torch.equal(head(changed)[:, :3], head(hidden)[:, :3])
    assert not torch.equal(head(changed)[:, 4], head(hidden)[:, 4])
    torch.nn.init.constant_(head.last.bias, 50)
    torch.testing.assert_close(head(hidden).exp(), torch.full((2, 5), 1.5))


# -------------------------------------------------------------------------------------- objectives


def tokens(n=60, classes=12, seed=0):
    rng = np.random.default_rng(seed)
    logits = 2.5 * rng.normal(size=(n, classes)).astype(np.float32)
    labels = (logits + 2 * rng.gumbel(size=logits.shape)).argmax(-1)
    weight = rng.uniform(0.5, 2, n)
    u = rng.uniform(-1.5, 1.0, n)
    return logits, labels, weight, u


def by_logits(name, logits, labels, weight, u, *, alpha=0.5, over=None, weighting="paper", m=0):
    """Objectives by their definitions, from all logits, for autograd."""
    scaled = logits * u.exp()[:, None]
    logs, share = scaled.log_softmax(-1), weight / weight.sum()
    right = logits.argmax(-1) == labels
    own = F.nll_loss(logs, labels, reduction="none")
    p = logs.amax(-1).exp()
    if name == "nll":
        return (share * own).sum()
    if name == "bce":
        return (share * F.binary_cross_entropy(p, right.to(p), reduction="none")).sum()
    if name == "brier":
        return (share * (p - right.to(p)) ** 2).sum()
    if name == "smart":
        centres = (torch.arange(15, dtype=p.dtype) + 0.5) / 15
        part = (-((p[:, None] - centres) ** 2) / (2 * 0.05**2)).softmax(-1)
        mass = (share[:, None] * part).sum(0)
        gap = (share[:, None] * part * (p - right.to(p))[:, None]).sum(0) / mass
        return (mass * ((gap**2 + 1e-6).sqrt() - 1e-3)).sum()
    first = logs if over is None else logs.gather(-1, logits.topk(over).indices)
    flat = -first.mean(-1)
    if weighting == "paper":
        return (share * torch.where(right, (1 - alpha) * own, alpha * flat)).sum()
    good, bad = weight[right], weight[~right]
    n_good, n_bad = good.sum(), bad.sum() + m
    hard = (good * own[right]).sum() / n_good
    smooth = (bad * flat[~right]).sum() / n_bad
    total = (1 - alpha) * n_bad * hard + alpha * n_good * smooth
    return total / ((1 - alpha) * n_bad + alpha * n_good)


CASES = [
    ("nll", {}, {}),
    ("bce", {}, {}),
    ("brier", {}, {}),
    ("smart", {}, {}),
    ("selective", {"alpha": 0.3}, {"alpha": 0.3}),
    ("selective", {"alpha": 0.3, "over": 5}, {"alpha": 0.3, "over": 5}),
    (
        "selective",
        {"alpha": 0.3, "weighting": "official"},
        {"alpha": 0.3, "weighting": "official"},
    ),
    (
        "selective",
        {"alpha": 0.7, "weighting": "official", "ignored": 25},
        {"alpha": 0.7, "weighting": "official", "m": 25},
    ),
]


@pytest.mark.parametrize(("name", "options", "slow"), CASES)
def test_objective_against_autograd(name, options, slow):
    logits, labels, weight, u = tokens()
    records = tabulate(examples(logits, labels, weight))
    leaf = torch.tensor(u, requires_grad=True)
    given = torch.from_numpy(logits).double(), torch.from_numpy(labels), torch.from_numpy(weight)
    wanted = by_logits(name, *given, leaf, **slow)
    wanted.backward()
    ours = torch.tensor(u, requires_grad=True)
    found = loss(partial(OBJECTIVES[name], **options), records, ours)
    (3 * found).backward()
    assert found.dtype == torch.float64
    assert abs(float(found.detach() - wanted.detach())) < 1e-5
    assert leaf.grad is not None
    assert ours.grad is not None
    assert float(leaf.grad.abs().max()) > 1e-4
    torch.testing.assert_close(ours.grad / 3, leaf.grad, rtol=1e-3, atol=2e-6)


@pytest.mark.parametrize(("name", "options", "slow"), CASES)
def test_objective_against_differences(name, options, slow):
    logits, labels, weight, u = tokens(8)
    records = tabulate(examples(logits, labels, weight))
    measure = partial(OBJECTIVES[name], **options)
    gradient = measure(records, u).gradient
    for i in range(8):
        step = 1e-3 * (np.arange(8) == i)
        slope = (measure(records, u + step).value - measure(records, u - step).value) / 2e-3
        assert abs(slope - gradient[i]) < 2e-5 + 2e-3 * abs(gradient[i])


def test_gradient_reaches_any_head():
    logits, labels, weight, _ = tokens(40, 40)
    records = tabulate(examples(logits, labels, weight))
    head = random_head("mlp").double()
    hidden = torch.randn(40, 16, dtype=torch.float64)
    loss(OBJECTIVES["nll"], records, head(hidden)).backward()
    got = [p.grad.clone() for p in head.parameters()]
    head.zero_grad()
    u = head(hidden)
    z, y, w = (torch.from_numpy(a) for a in (logits.astype(float), labels, weight))
    by_logits("nll", z, y, w, u).backward()
    for ours, theirs in zip(got, head.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs.grad, rtol=1e-3, atol=1e-5)


def test_selective_with_one_group_only():
    logits, _, _, u = tokens()
    records = tabulate(examples(logits, logits.argmax(-1)))
    value, gradient = selective(records, u, weighting="official")
    assert value == 0
    assert not gradient.any()
    assert selective(records, u, alpha=0.0).value == pytest.approx(OBJECTIVES["nll"](records, u)[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": 1.5}, "alpha must lie between 0 and 1, got 1.5"),
        ({"over": 11}, "from 1 to 10, got 11"),
        ({"over": "top"}, "'vocabulary' or a number"),
        ({"weighting": "batch"}, "weighting must be one of"),
    ],
)
def test_selective_refuses(options, message):
    logits, labels, _, u = tokens()
    with pytest.raises(ValueError, match=message):
        selective(tabulate(examples(logits, labels)), u, **options)


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


# ---------------------------------------------------------------------------------------- training


def simulated(
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
    mark = ModelMark("tiny", width, classes, "0123456789abcdef", None)
    return TokenTable.of(hidden, tabulate(examples(logits, labels)), number, mark)


@pytest.mark.parametrize("objective", ["nll", "bce", "brier", "selective"])
def test_linear_head_finds_the_truth(objective):
    table = simulated()
    fitted = fit_head(table, "linear", objective, epochs=12, batch=256)
    assert fitted.kept, fitted.reasons
    assert fitted.head.kind == "linear"
    score = "nll" if objective == "nll" else "brier"
    figures = fitted.figures
    assert figures["head"][score] < figures["global"][score] < figures["before"][score]
    assert figures["head"]["auroc"] > figures["global"]["auroc"]
    weight = fitted.head.last.weight[0]  # type: ignore[union-attr, index]
    cosine = F.cosine_similarity(weight, torch.tensor([0.8, -0.6, *[0.0] * 14]), dim=0)
    if objective != "selective":  # which pulls elsewhere
        assert float(cosine) > 0.9
    else:
        assert fitted.settings["alpha"] in fit_module.ALPHAS


def test_global_temperature_is_found():
    fitted = fit_head(simulated(strength=0), "global", "nll")
    assert fitted.settings["temperature"] == pytest.approx(2.0, rel=0.05)
    assert torch.allclose(fitted.head.bias.exp(), torch.tensor(0.5), rtol=0.05)  # type: ignore[operator]
    assert set(fitted.figures) == {"before", "global"}
    assert not any(p.requires_grad for p in fitted.head.parameters())


@pytest.mark.parametrize("kind", ["linear", "mlp", "shape", "decoder"])
def test_nothing_to_find(kind):
    table = simulated(60, strength=0, seed=3)
    fitted = fit_head(table, kind, "nll", epochs=6, batch=256)
    assert not fitted.kept
    assert fitted.head.kind == "global"
    assert "the global temperature is kept" in fitted.reasons
    assert set(fitted.figures) == {"before", "global", "head"}


def test_wide_states_are_learned_with_care():
    fitted = fit_head(simulated(160, width=512), "linear", "nll", batch=256)
    assert fitted.kept, fitted.reasons
    assert fitted.settings["epoch"] > 1
    assert fitted.figures["global"]["nll"] - fitted.figures["head"]["nll"] > 0.1


@pytest.mark.parametrize(("mean", "kept"), [(0.03, True), (0.01, False), (-0.03, False)])
def test_kept_by_more_than_the_standard_error(monkeypatch, mean, kept):
    gain = fit_module.Gain(mean, 0.02, 12)
    monkeypatch.setattr(fit_module, "paired_gain", lambda *_: gain)
    fitted = fit_head(simulated(30), "linear", "nll", epochs=2, batch=128)
    assert fitted.settings["epoch"] > 0
    assert fitted.kept is kept
    assert fitted.head.kind == ("linear" if kept else "global")
    way = "lower" if mean > 0 else "higher"
    assert (
        f"is {abs(mean):.2g} {way} than with one temperature, with a standard error of 0.02"
        in fitted.reasons
    )


def test_best_epoch_counts():
    """Steps that are far too long spoil the head, so that the start remains the best."""
    fitted = fit_head(simulated(60, strength=0), "mlp", "nll", epochs=3, batch=64, rate=0.1)
    assert fitted.settings["epoch"] == 0
    assert "no epoch of the mlp head" in fitted.reasons
    assert fitted.figures["head"] == pytest.approx(fitted.figures["global"], rel=1e-5)


def test_global_temperature_has_the_best_score_of_its_kind():
    table = simulated()
    told = {name: fit_head(table, "global", name).figures["global"] for name in ("nll", "bce")}
    assert told["nll"]["nll"] < told["bce"]["nll"]
    assert told["bce"]["brier"] < told["nll"]["brier"]


def test_decoder_on_documents_of_several_lengths():
    lengths = [3, 7, 1, 5]
    records = tabulate(examples(*tokens(16, 40)[:2]))
    hidden = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float16)
    table = TokenTable.of(hidden, records, np.repeat(np.arange(4), lengths), MARK)
    head = random_head("decoder")
    rows = np.r_[10:16, 0:10]  # in another order of documents
    got = predicted(head, table, rows, table.records(rows))
    alone = [head(torch.from_numpy(h)[None].float())[0] for h in np.split(hidden, [3, 10, 11])]
    wanted = bounded(torch.cat([*alone[2:], *alone[:2]]))
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


def test_rarely_kept_by_chance():
    """Over seeds of data without anything to find, even with noise that documents share."""
    kept = [
        fit_head(
            simulated(40, 15, strength=0, seed=seed, own=0.7),
            "linear",
            "bce",
            epochs=3,
            batch=128,
            rate=0.01,
            seed=seed,
        ).kept
        for seed in range(20)
    ]
    assert sum(kept) <= 4


def test_decoder_finds_what_earlier_tokens_say():
    """The true sharpness of a token depends on the state before it, which only a sequence shows."""
    rng = np.random.default_rng(0)
    documents, each = 150, 24
    n = documents * each
    hidden = rng.normal(size=(n, 16))
    mood = np.sign(rng.normal(size=documents))
    hidden[::each, 0] = 6 * mood  # the first token alone tells
    logits = (3 * rng.normal(size=(n, 40))).astype(np.float32)
    true = np.exp(0.9 * np.repeat(mood, each))[:, None] / 2
    labels = (true * logits + rng.gumbel(size=logits.shape)).argmax(-1)
    table = TokenTable.of(
        hidden, tabulate(examples(logits, labels)), np.repeat(np.arange(documents), each), MARK
    )
    options = {"attention_heads": 2}
    fitted = fit_head(table, "decoder", "nll", epochs=12, batch=256, rate=3e-3, options=options)
    assert fitted.kept, fitted.reasons
    assert not fit_head(table, "linear", "nll", epochs=3, batch=256).kept


def test_shape_head_finds_shapes():
    rng = np.random.default_rng(1)
    n = 6000
    logits = rng.normal(size=(n, 40)).astype(np.float32)
    spread = rng.uniform(1, 5, (n, 1)).astype(np.float32)
    labels = (2 * logits + rng.gumbel(size=logits.shape)).argmax(-1)  # whatever the spread
    table = TokenTable.of(
        rng.normal(size=(n, 16)),
        tabulate(examples(spread * logits, labels)),
        np.arange(n) // 20,
        MARK,
    )
    fitted = fit_head(table, "shape", "nll", epochs=8, batch=256)
    assert fitted.kept, fitted.reasons
    gain = fitted.figures["global"]["nll"] - fitted.figures["head"]["nll"]
    assert gain > 0.05


def test_same_seed_same_head():
    table = simulated(30)
    told: list[tuple[int, int]] = []
    first, again = (
        fit_head(
            table,
            "mlp",
            "bce",
            epochs=2,
            batch=128,
            seed=5,
            options={"units": 4},
            progress=lambda done, total: told.append((done, total)),
        )
        for _ in range(2)
    )
    assert first.figures == again.figures
    assert told[:2] == [(1, 2), (2, 2)]
    assert fit_head(table, "mlp", "bce", epochs=2, seed=6).figures != first.figures


def test_small_chunks_change_nothing_but_the_order(monkeypatch):
    table = simulated(60)
    monkeypatch.setattr(fit_module, "CHUNK", 100)
    monkeypatch.setattr(fit_module, "ENOUGH", 500)
    fitted = fit_head(table, "linear", "nll", epochs=12, batch=64, rate=0.01)
    assert fitted.kept
    rows = np.concatenate(
        list(fit_module._whole(DecoderHead(width=16), table, np.arange(len(table)), 60))
    )
    assert rows.tolist() == list(range(len(table)))


def test_documents_go_together_as_padding_allows():
    lengths = np.array([3, 30, 2, 2, 9, 1])
    documents = np.repeat(np.arange(6), lengths)
    records = tabulate(examples(np.eye(3)[documents % 3], documents % 3))
    mark = dataclasses.replace(MARK, vocabulary=3)
    table = TokenTable.of(np.zeros((len(documents), 16)), records, documents, mark)
    found = [set(documents[rows]) for rows in fit_module._documents(table, np.arange(6), 18)]
    assert found == [{0}, {1}, {2, 3}, {4, 5}]  # 9 + 9 = 18


def test_one_temperature_takes_no_options():
    table = simulated(30)
    for wrong in ({"alpha": 0.5}, {"options": {"units": 3}}, {"objective_options": {"over": 5}}):
        with pytest.raises(ValueError, match=r"alpha belongs to|has no options"):
            fit_head(table, "global", "selective", **wrong)
    with pytest.raises(ValueError, match="alpha belongs to"):
        fit_head(table, "linear", "nll", alpha=0.5)
    assert fit_head(table, "global", "selective").objective == "brier"


def test_an_unknown_option_of_a_head_is_named():
    with pytest.raises(ValueError, match="mlp head has no option hidden; it has units, activation"):
        fit_head(simulated(30), "mlp", options={"hidden": 3})


def test_a_device_that_is_not_there():
    with pytest.raises(ValueError, match=r"device 'gpu' cannot be used here .*: try cpu"):
        fit_head(simulated(30), "linear", device="gpu")


def test_always_keeps_what_the_last_epoch_gave():
    table = simulated(60)
    paper: dict[str, Any] = {"alpha": 1.0, "epochs": 2, "batch": 64, "rate": 0.5}
    chosen = fit_head(table, "linear", "selective", **paper)
    assert not chosen.kept
    always = fit_head(table, "linear", "selective", always=True, **paper)
    assert always.kept
    assert always.head.kind == "linear"
    assert always.settings["epoch"] == 2
    assert "is kept, as asked for whatever comes out: " in always.reasons
    assert "higher" in always.reasons
    assert "whatever" not in chosen.reasons
    with pytest.raises(ValueError, match="alpha is an argument of its own"):
        fit_head(table, "linear", "selective", objective_options={"alpha": 0.3})
    assert always.figures["head"]["brier"] > always.figures["global"]["brier"]


def test_split_is_by_document():
    documents = np.repeat(np.arange(50), 7)
    parts = split_documents(documents, seed=3)
    owners = [set(documents[part]) for part in parts]
    assert [len(owner) for owner in owners] == [35, 5, 10]
    assert sum(map(len, parts)) == 350
    assert not owners[0] & owners[1] | owners[0] & owners[2] | owners[1] & owners[2]
    assert set(documents[split_documents(documents, seed=4).judge]) != owners[2]


def test_paired_gain_against_the_bootstrap():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 30, 200)
    documents = np.repeat(np.arange(200), sizes)
    shared = rng.normal(size=200)[documents]
    before = rng.normal(size=len(documents)) + shared + 0.3
    after = rng.normal(size=len(documents))
    weight = rng.uniform(0.5, 2, len(documents))
    gain = paired_gain(before, after, documents, weight)
    assert gain.mean == pytest.approx(np.average(before - after, weights=weight))
    total = np.bincount(documents, weight * (before - after))
    mass = np.bincount(documents, weight)
    drawn = rng.integers(0, 200, (2000, 200))
    means = total[drawn].sum(1) / mass[drawn].sum(1)
    assert gain.error == pytest.approx(means.std(), rel=0.1)
    assert paired_gain(before[:1], after[:1], documents[:1], weight[:1]).error == math.inf


def test_paired_gain_of_unequal_documents():
    rng = np.random.default_rng(1)
    lengths = np.array([1, 2, 500, 30, 4, 2000])
    documents = np.repeat(np.arange(6), lengths)
    change = rng.normal(size=6)[documents] + rng.normal(size=lengths.sum())
    weight = rng.uniform(0.5, 2, lengths.sum())
    gain = paired_gain(change, np.zeros_like(change), documents, weight)
    without = [
        np.average(change[documents != one], weights=weight[documents != one]) for one in range(6)
    ]
    wanted = math.sqrt(5 / 6 * sum((mean - gain.mean) ** 2 for mean in without))
    assert gain.error == pytest.approx(wanted)
    # one document that holds everything says nothing about others
    weight[documents != 5] = 0
    assert paired_gain(change, np.zeros_like(change), documents, weight).error == math.inf


def test_paired_gain_seldom_finds_what_is_not_there():
    rng = np.random.default_rng(2)
    found, times = 0, 3000
    for _ in range(times):
        mass = rng.lognormal(3, 2, 20)
        gain = paired_gain(rng.normal(size=20), np.zeros(20), np.arange(20), mass)
        found += gain.mean > gain.error
    assert found / times < 0.23  # 0.16 with many documents, 0.165 with 20 of one length


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head": "lstm"}, "head must be one of"),
        ({"objective": "mse"}, "objective must be one of"),
        ({"batch": 0}, "epochs and batch must be at least 1, got 40 and 0"),
        ({"alpha": 0.1}, "alpha belongs to the selective objective"),
    ],
)
def test_fit_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        fit_head(simulated(6, 5), **arguments)


def test_fit_refuses_few_documents():
    with pytest.raises(ValueError, match=r"at least 5 documents are wanted.*got 4"):
        fit_head(simulated(4, 5))


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("kind", HEADS)
def test_a_loaded_head_gives_the_same_temperatures(tmp_path, kind):
    head = random_head(kind)
    cal.save(FittedHead(head, MARK, "bce"), tmp_path / "head")
    given = inputs_of(head)
    assert torch.equal(cal.load(tmp_path / "head").head(given), head(given))


def test_a_head_that_is_not_finite_is_not_saved(tmp_path):
    head = make_head("linear", width=16)
    head.last.bias.data.fill_(math.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(ValueError, match=r"FittedHead could not .* last\.bias holds NaN"):
        cal.save(FittedHead(head, MARK, "bce"), tmp_path / "head")
    assert not (tmp_path / "head").exists()


def test_temperatures_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"between 0\.05 and 20"):
        FittedHead.of_temperature(50.0, MARK)


# -------------------------------------------------------------------------------------------- daca


def chat_and_base(n=4000, classes=12, seed=0):
    """A calibrated base model, and a chat model that is sharper and has other preferences."""
    rng = np.random.default_rng(seed)
    base = 2 * rng.normal(size=(n, classes))
    chat = 2.5 * (base + np.where(np.arange(n) % 2, 3, 0.3)[:, None] * rng.normal(size=base.shape))
    return base, chat


def test_daca_against_a_slow_search():
    base, chat = chat_and_base()
    found = daca(base.reshape(40, 100, 12), torch.from_numpy(chat).reshape(40, 100, 12))
    agree = base.argmax(-1) == chat.argmax(-1)
    assert (found.agreed, found.tokens) == (agree.sum(), 4000)
    ours, theirs = torch.from_numpy(base[agree]), torch.from_numpy(chat[agree])
    log_t = torch.zeros((), dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.LBFGS([log_t], line_search_fn="strong_wolfe", max_iter=100)

    def closure():
        optimiser.zero_grad()
        value = F.cross_entropy(theirs / log_t.exp(), ours.softmax(-1))
        value.backward()
        return value

    optimiser.step(closure)
    assert found.temperature == pytest.approx(float(log_t.detach().exp()), rel=1e-3)
    everywhere = torch.linspace(1, 8, 500)
    values = [
        float(F.cross_entropy(torch.from_numpy(chat) / t, torch.from_numpy(base).softmax(-1)))
        for t in everywhere
    ]
    # tokens on which they differ would ask for more doubt
    assert float(everywhere[int(np.argmin(values))]) > found.temperature + 0.1


def test_daca_from_records():
    base, chat = chat_and_base()
    agree = base.argmax(-1) == chat.argmax(-1)
    ours, theirs = (tabulate(examples(x, base.argmax(-1))) for x in (base, chat))
    found = daca_of_records(ours, theirs, agree)
    trust = torch.from_numpy(base[agree]).softmax(-1).amax(-1)
    grid = np.linspace(1.5, 5, 1401)
    sharper = torch.from_numpy(chat[agree])
    values = [
        float(F.binary_cross_entropy((sharper / t).softmax(-1).amax(-1), trust)) for t in grid
    ]
    assert found.temperature == pytest.approx(grid[int(np.argmin(values))], abs=5e-3)
    assert found.agreed == agree.sum()


def test_daca_masked_and_refused():
    logits = np.array([[2.0, 1.0, -np.inf], [0.5, 1.0, -np.inf]])
    assert daca(logits, 2 * logits).temperature == pytest.approx(2, rel=1e-3)
    with pytest.raises(ValueError, match="rules out a token"):
        daca(np.nan_to_num(logits, neginf=0.0), logits)
    with pytest.raises(ValueError, match="none of 2 tokens"):
        daca(logits, -np.nan_to_num(logits, neginf=5.0))
    with pytest.raises(ValueError, match=r"got \(2, 3\) and \(1, 3\)"):
        daca(logits, logits[:1])
    for at in (0, 2):
        broken = logits.copy()
        broken[1, at] = np.nan
        with pytest.raises(ValueError, match="base must be logits, got NaN for 1 of 2 tokens"):
            daca(broken, logits)
        with pytest.raises(ValueError, match="chat must be logits, got NaN for 1 of 2 tokens"):
            daca(logits, broken)
    records = tabulate(examples(logits, [0, 1]))
    with pytest.raises(ValueError, match="got 2, 2 and 1"):
        daca_of_records(records, records, np.array([True]))
    with pytest.warns(UserWarning, match="no temperature"):
        daca(np.zeros((5, 3)), np.array([[2.0, 1.0, 0.0]] * 5))


def test_a_table_that_a_head_was_trained_on_is_no_measure_of_it(tmp_path):
    table, other = simulated(60), simulated(60)
    table.sources, other.sources = ("one", "two"), ("three",)
    fitted = fit_head(table, "global")
    cal.save(fitted, tmp_path / "head")
    again = cal.load(tmp_path / "head")
    for head in (fitted, again):
        with pytest.warns(UserWarning, match="was trained on tokens of this table"):
            token_claims(table, head)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            token_claims(other, head)
            token_claims(table)
            token_claims(simulated(60), fit_head(simulated(60), "global"))  # not known of these
