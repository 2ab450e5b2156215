"""All training losses against direct definitions in float64, and what holds for each of them."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax
from torch.nn import functional as F

from calibrant.losses import LOSSES
from calibrant.losses.entries import RegularisedLoss, brier, ce
from calibrant.losses.focal import dual_focal, flsd, focal
from calibrant.losses.regularisers import mdca, soft_ece
from calibrant.losses.smoothing import acls, cpc, ecp, ls, mbls
from tests.support.losses import STATEFUL, STATISTICS, called, gradient, made, value

# Direct definitions, example by example in plain Python.


def direct_focal(z, y, gamma):
    p = softmax(z)[y]
    return -((1 - p) ** gamma) * math.log(p)


def direct_dual(z, y, gamma):
    p = softmax(z)
    lower = [q for q in p if q < p[y]]
    return -((1 - p[y] + max(lower, default=0.0)) ** gamma) * math.log(p[y])


def direct_mbls(z, y, margin, weight):
    excess = sum(max(z.max() - v - margin, 0) for v in z) / len(z)
    return -log_softmax(z)[y] + weight * excess


def direct_acls(z, y, margin, weight):
    top = z.argmax()
    rest = [max(z[top] - z[k] - margin, 0) ** 2 for k in range(len(z)) if k != top]
    return -log_softmax(z)[y] + weight * (max(z[top] - margin, 0) ** 2 + 0.1 * np.mean(rest))


def direct_cpc(z, y):
    others = [k for k in range(len(z)) if k != y]
    first = np.mean([-math.log(expit(z[y] - z[j])) for j in others])
    pairs = [-0.5 * math.log(expit(z[i] - z[j])) for i in others for j in others if i != j]
    return -log_softmax(z)[y] + first + np.mean(pairs)


DIRECT: dict[str, Any] = {
    "ce": (ce, {}, lambda z, y: -log_softmax(z)[y]),
    "brier": (brier, {}, lambda z, y: sum((p - (k == y)) ** 2 for k, p in enumerate(softmax(z)))),
    "ls": (
        ls,
        {"alpha": 0.2},
        lambda z, y: -0.8 * log_softmax(z)[y] - 0.2 * np.mean(log_softmax(z)),
    ),
    "ecp": (
        ecp,
        {"weight": 0.3},
        lambda z, y: -log_softmax(z)[y] + 0.3 * sum(softmax(z) * log_softmax(z)),
    ),
    "focal": (focal, {"gamma": 2.5}, lambda z, y: direct_focal(z, y, 2.5)),
    "flsd": (flsd, {}, lambda z, y: direct_focal(z, y, 5 if softmax(z)[y] < 0.2 else 3)),
    "dual_focal": (dual_focal, {"gamma": 2.0}, lambda z, y: direct_dual(z, y, 2.0)),
    "mbls": (
        mbls,
        {"margin": 2.0, "weight": 0.4},
        lambda z, y: direct_mbls(z, y, 2.0, 0.4),
    ),
    "acls": (acls, {"margin": 1.0, "weight": 0.3}, lambda z, y: direct_acls(z, y, 1.0, 0.3)),
    "cpc": (cpc, {}, direct_cpc),
}


@pytest.mark.parametrize("name", DIRECT)
def test_each_example_costs_what_the_definition_says(name, data):
    function, options, slow = DIRECT[name]
    expected = [slow(z, y) for z, y in zip(data[0].numpy(), data[1].numpy(), strict=True)]
    np.testing.assert_allclose(function(*data, **options).numpy(), expected, rtol=1e-9)


def test_every_loss_has_a_definition_here():
    assert set(LOSSES) == {*DIRECT, *STATISTICS, *STATEFUL}


@pytest.mark.parametrize("name", LOSSES)
def test_every_line_of_the_table_has_a_summary(name):
    assert len(LOSSES[name].summary) > 15
    assert LOSSES[name].summary.endswith(".") or "math" in LOSSES[name].summary


def test_names_are_understood_in_any_case_and_by_alias():
    assert [LOSSES.name(name) for name in ("Focal", "label smoothing", "FLSD-53")] == [
        "focal",
        "ls",
        "flsd",
    ]
    with pytest.raises(ValueError, match=r"unknown loss 'fokal': did you mean focal\? choose from"):
        LOSSES.name("fokal")


# Special cases.


@pytest.mark.parametrize(
    "same",
    [
        lambda z, y: focal(z, y, gamma=0.0),
        lambda z, y: dual_focal(z, y, gamma=0.0),
        lambda z, y: ls(z, y, alpha=0.0),
        lambda z, y: ecp(z, y, weight=0.0),
        lambda z, y: mbls(z, y, margin=1e4),
        lambda z, y: acls(z, y, margin=1e4),
        lambda z, y: cpc(z, y, discrimination=0.0, exclusion=0.0),
    ],
)
def test_special_cases_are_cross_entropy(same, data):
    expected = F.cross_entropy(data[0], data[1], reduction="none")
    torch.testing.assert_close(same(*data), expected)


def test_label_smoothing_is_torchs(data):
    expected = F.cross_entropy(data[0], data[1], label_smoothing=0.1)
    assert value(LOSSES["ls"](alpha=0.1)(*data)) == pytest.approx(value(expected))


def test_a_batch_statistic_stands_beside_a_loss(data):
    found = LOSSES["mdca"](weight=0.5, base=LOSSES["focal"]())(*data)
    assert value(found) == pytest.approx(value(focal(*data).mean() + 0.5 * mdca(*data)))
    assert value(LOSSES["mdca"](weight=0.5, base="focal")(*data)) == value(found)


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_takes_the_sizes_of_the_data(name, data):
    loss = LOSSES[name](classes=5, examples=50)
    assert math.isfinite(value(called(loss, *data)))


def test_sizes_that_a_loss_needs_are_asked_for():
    with pytest.raises(TypeError, match=r"CRL needs the number of examples: pass examples="):
        LOSSES["crl"](classes=10)
    with pytest.raises(TypeError, match=r"FeDLaS needs the number of classes: pass classes="):
        LOSSES["fedlas_mbls"]()


# What holds for all of them.

NAMES = list(LOSSES)


@pytest.mark.parametrize("name", NAMES)
def test_ignored_rows_count_for_nothing(name, data):
    logits, labels = data
    more = torch.cat([logits, torch.full((6, 5), 50.0, dtype=torch.float64)])
    ignored = torch.cat([labels, torch.full((6,), -100)])
    width = 7
    features = torch.randn(
        46, width, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    index = torch.arange(46)
    torch.manual_seed(0)
    whole = made(name)(more, ignored, features, index)
    torch.manual_seed(0)
    alone = made(name)(logits, labels, features[:40], index[:40])
    if name == "crl":  # the last pair of a batch is another one
        assert value(whole) == pytest.approx(value(alone), rel=0.05)
    else:
        assert value(whole) == pytest.approx(value(alone), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_a_batch_of_ignored_rows_is_zero_with_zero_gradient(name):
    logits = torch.randn(4, 5, requires_grad=True)
    loss = called(made(name), logits, torch.full((4,), -100))
    loss.backward()
    assert abs(value(loss)) < 2e-5
    assert gradient(logits).abs().max() < 1e-6


@pytest.mark.parametrize("name", NAMES)
def test_one_example_is_enough(name):
    loss = called(made(name), torch.randn(1, 5), torch.tensor([2]))
    assert torch.isfinite(loss)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "crl"])
def test_tokens_are_rows(name, data):
    logits, labels = data
    torch.manual_seed(0)
    flat = called(made(name), logits, labels)
    torch.manual_seed(0)
    shaped = called(made(name), logits.reshape(8, 5, 5), labels.reshape(8, 5))
    assert value(shaped) == pytest.approx(value(flat), rel=1e-9)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gradients_are_finite_in_both_tails_and_every_precision(name, dtype):
    logits = torch.tensor(
        [[1000.0, 0, 0, 0, 0], [0, 1000, 0, 0, 0], [30, -30, 0, 0, 0], [0, 0, 0, 0, 0]],
        dtype=dtype,
        requires_grad=True,
    )
    labels = torch.tensor([0, 0, 1, 2])
    loss = called(made(name), logits, labels)
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(gradient(logits)).all()


@pytest.mark.parametrize("name", NAMES)
def test_float32_agrees_with_float64(name, rng):
    logits = torch.from_numpy(rng.normal(size=(30, 5)) * 20)
    labels = torch.from_numpy(rng.integers(0, 5, 30))
    torch.manual_seed(0)
    wide = called(made(name), logits, labels)
    torch.manual_seed(0)
    narrow = called(made(name), logits.float(), labels)
    assert value(narrow) == pytest.approx(value(wide), rel=2e-5)


@pytest.mark.parametrize("gamma", [0.0, 0.3, 1.0, 2.0])
def test_focal_gradient_where_the_label_is_certain(gamma):
    """1 - p is 0 in float32, and a power below 1 of it has no derivative there."""
    logits = torch.tensor([[200.0, 0.0]], requires_grad=True)
    focal(logits, torch.tensor([0]), gamma=gamma).sum().backward()
    assert torch.isfinite(gradient(logits)).all()


# acls takes no gradient from the largest logit in one of its terms: see below
@pytest.mark.parametrize("name", [n for n in NAMES if n not in (*STATEFUL, "acls")])
def test_gradcheck(name, rng):
    labels = torch.from_numpy(rng.integers(0, 4, 6))
    loss = LOSSES[name]()
    logits = torch.from_numpy(rng.normal(size=(6, 4)) * 2).requires_grad_()
    assert torch.autograd.gradcheck(lambda z: loss(z, labels), (logits,))


def test_acls_has_the_gradient_of_its_definition_with_the_largest_logit_held(data):
    logits, labels = data
    best = logits.amax(-1, keepdim=True)
    free = logits.clone().requires_grad_()
    top = free.amax(-1)
    gap = (best - free - 1.0).clamp(min=0).square().sum(-1) / 4
    down = (top - 1.0).clamp(min=0).square()
    (F.cross_entropy(free, labels) + 0.1 * (down + 0.1 * gap).mean()).backward()
    found = logits.clone().requires_grad_()
    acls(found, labels, margin=1.0, weight=0.1).mean().backward()
    torch.testing.assert_close(found.grad, free.grad)


@pytest.mark.parametrize("name", ["mmce", "fedlas_ls", "adafocal"])
def test_it_compiles_into_one_graph(name, data):
    loss = made(name).double()
    expected = called(loss.eval(), *data)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(called(compiled, *data), expected)


# Input that cannot be right.


@pytest.mark.parametrize("name", NAMES)
def test_wrong_shapes_are_refused(name):
    loss = made(name)
    with pytest.raises(ValueError, match=r"logits must be \(..., classes\) and labels"):
        loss(
            torch.zeros(4, 5), torch.zeros(3, dtype=torch.long), torch.zeros(3, 2), torch.arange(3)
        )
    with pytest.raises(TypeError, match="whole numbers"):
        loss(torch.zeros(4, 5), torch.zeros(4), torch.zeros(4, 2), torch.arange(4))


def test_modules_show_their_function_and_options():
    loss = LOSSES["soft_ece"](weight=0.5, base=LOSSES["focal"](gamma=1.0))
    assert isinstance(loss, RegularisedLoss)
    assert loss.statistic is soft_ece
    assert loss.extra_repr() == "soft_ece, weight=0.5"
    assert LOSSES["mmce"](width=0.2).extra_repr() == "mmce, weight=0.2, width=0.2"
    assert loss.base.extra_repr() == "focal, gamma=1.0"
    with pytest.raises(ValueError, match=r"unknown loss 'fokal': did you mean focal\?"):
        LOSSES["soft_ece"](base="fokal")


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="focal has no option 'beta': its options are gamma"):
        LOSSES["focal"](beta=1.0)
    with pytest.raises(TypeError, match="mmce has no option 'gamma'"):
        LOSSES["mmce"](gamma=1.0)
    with pytest.raises(TypeError, match="base must be a Module, or text, or None, got 3"):
        LOSSES["mmce"](base=3)
    with pytest.raises(ValueError, match="gamma must be at least 0"):
        focal(torch.zeros(1, 2), torch.tensor([0]), gamma=-1.0)
