"""Training losses against direct definitions in float64, special cases and gradients."""

import math
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax
from torch import nn
from torch.nn import functional as F

import calibrant as cal
from calibrant.losses import LOSSES, loss_name
from calibrant.losses.base import brier, ce
from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.focal import AdaFocal, dual_focal, flsd, focal
from calibrant.losses.regularisers import CRL, avuc, mdca, mmce, soft_ece
from calibrant.losses.smoothing import acls, cpc, ecp, ls, mbls


def gradient(tensor: torch.Tensor) -> torch.Tensor:
    assert tensor.grad is not None
    return tensor.grad


def value(number):
    return float(torch.as_tensor(number).detach())


STATISTICS = ("mmce", "mdca", "soft_ece", "avuc")
STATEFUL = ("adafocal", "crl", "fedlas_ls", "fedlas_mbls")


def made(name, classes=5, examples=50, **options):
    needed = {
        "fedlas_ls": {"classes": classes},
        "fedlas_mbls": {"classes": classes},
        "crl": {"examples": examples},
    }
    return LOSSES[name](**needed.get(name, {}), **options)


def called(loss, logits, labels, width=7):
    """Any loss, with all that it may want."""
    flat = torch.arange(labels.numel()) % 50
    features = torch.linspace(-2, 3, labels.numel() * width, dtype=torch.float64)
    return loss(logits, labels, features.reshape(*labels.shape, width), flat)


@pytest.fixture
def data(rng):
    logits = torch.from_numpy(rng.normal(size=(40, 5)) * 3)
    return logits, torch.from_numpy(rng.integers(0, 5, 40))


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
    assert [loss_name(name) for name in ("Focal", "label smoothing", "FLSD-53")] == [
        "focal",
        "ls",
        "flsd",
    ]
    with pytest.raises(ValueError, match=r"unknown loss 'fokal': did you mean focal\? choose from"):
        loss_name("fokal")


def pairs_of(data):
    probs = softmax(data[0].numpy(), -1)
    return probs.max(-1), (probs.argmax(-1) == data[1].numpy()).astype(float)


def test_mmce_is_the_double_sum(data):
    c, a = pairs_of(data)
    kernel = np.exp(-np.abs(c[:, None] - c) / 0.4)
    plain = math.sqrt(
        np.mean(
            [
                [(x - a[i]) * (y - a[j]) * kernel[i, j] for j, y in enumerate(c)]
                for i, x in enumerate(c)
            ]
        )
    )
    assert value(mmce(*data, weighted=False)) == pytest.approx(plain, rel=1e-6)
    right, wrong = np.flatnonzero(a), np.flatnonzero(1 - a)
    m, n = len(right), len(wrong)
    both = (
        sum((1 - c[i]) * (1 - c[j]) * kernel[i, j] for i in right for j in right) / m**2
        + sum(c[i] * c[j] * kernel[i, j] for i in wrong for j in wrong) / n**2
        - 2 * sum((1 - c[i]) * c[j] * kernel[i, j] for i in right for j in wrong) / (m * n)
    )
    assert value(mmce(*data)) == pytest.approx(math.sqrt(both), rel=1e-6)
    again = (
        sum((1 - c[i]) * (1 - c[j]) * kernel[i, j] for i in right for j in right) / m**4
        + sum(c[i] * c[j] * kernel[i, j] for i in wrong for j in wrong) / n**4
        - 2 * sum((1 - c[i]) * c[j] * kernel[i, j] for i in right for j in wrong) / (m * n) ** 2
    )
    assert value(mmce(*data, twice=True)) == pytest.approx(math.sqrt(again + 1e-10), rel=1e-6)


def test_mmce_of_answers_of_one_kind_is_zero():
    logits = torch.tensor([[3.0, 0.0], [2.0, 0.0]], requires_grad=True)
    found = mmce(logits, torch.tensor([0, 0]))
    found.backward()
    assert value(found) == 0
    assert not gradient(logits).any()


def test_mdca_compares_every_class(data):
    probs = softmax(data[0].numpy(), -1).mean(0)
    share = np.bincount(data[1].numpy(), minlength=5) / 40
    assert value(mdca(*data)) == pytest.approx(np.abs(probs - share).mean())


def test_soft_ece_is_the_binned_definition(data):
    c, a = pairs_of(data)
    centres = (np.arange(15) + 0.5) / 15
    part = softmax(-((c[:, None] - centres) ** 2) / (2 * 0.05**2), -1)
    total = 0.0
    for b in range(15):
        n = part[:, b].sum()
        total += n / 40 * ((part[:, b] @ c - part[:, b] @ a) / n) ** 2
    assert value(soft_ece(*data)) == pytest.approx(math.sqrt(total), rel=1e-6)


def test_avuc_adds_up_its_cells(data):
    c, a = pairs_of(data)
    probs = softmax(data[0].numpy(), -1)
    u = -(probs * np.log(probs)).sum(-1)
    cells = dict.fromkeys(("AC", "AU", "IC", "IU"), 0.0)
    for ci, ai, ui in zip(c, a, u, strict=True):
        sure = ui <= 0.4
        weight = (ci if ai else 1 - ci) * (1 - math.tanh(ui) if sure else math.tanh(ui))
        cells[("A" if ai else "I") + ("C" if sure else "U")] += weight
    bad, good = cells["AU"] + cells["IC"], cells["AC"] + cells["IU"]
    assert value(avuc(*data, threshold=0.4)) == pytest.approx(math.log(1 + bad / good))


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


@pytest.mark.parametrize("name", ["focal", "mbls", "mmce", "fedlas_ls", "adafocal"])
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


def test_unknown_options_are_refused():
    with pytest.raises(TypeError, match="focal has no option beta"):
        LOSSES["focal"](beta=1.0)
    with pytest.raises(TypeError, match="mmce has no option gamma"):
        LOSSES["mmce"](gamma=1.0)
    with pytest.raises(TypeError, match="base must be a module such as"):
        LOSSES["mmce"](base="mdca")
    with pytest.raises(ValueError, match="gamma must be at least 0"):
        focal(torch.zeros(1, 2), torch.tensor([0]), gamma=-1.0)


# AdaFocal.


def test_adafocal_follows_the_gap_of_each_bin():
    rng = np.random.default_rng(0)
    confidence = rng.uniform(0.55, 0.99, 4000)
    right = rng.random(4000) < confidence - 0.2  # over-confident by 0.2
    odds = np.log(confidence / (1 - confidence))
    logits = torch.from_numpy(np.stack([odds, np.zeros(4000)], -1))
    loss = AdaFocal(bins=4)
    loss.observe(logits, torch.from_numpy(np.where(right, 0, 1)))
    np.testing.assert_allclose(loss.gamma_, math.exp(0.2), rtol=0.05)
    np.testing.assert_allclose(loss.edges_, np.quantile(confidence, [0.25, 0.5, 0.75]), atol=1e-3)


def test_adafocal_changes_sign_and_stays_within_limits():
    loss = AdaFocal(bins=3)
    gamma = torch.tensor([0.21, -0.21, 19.9])
    moved = loss._moved(gamma, torch.tensor([-0.5, 0.5, 0.5]))
    torch.testing.assert_close(moved, torch.tensor([-0.2, 0.2, 20.0]))


def test_adafocal_with_negative_exponents_is_inverse_focal(data):
    loss = AdaFocal(bins=1).double()
    loss.gamma_.fill_(-1.5)
    p = softmax(data[0].numpy(), -1)[np.arange(40), data[1].numpy()]
    assert value(loss(*data)) == pytest.approx(np.mean(-((1 + p) ** 1.5) * np.log(p)))


# CRL.


def test_crl_ranks_by_history():
    loss = CRL(examples=10, weight=1.0)
    loss.right_[:4] = torch.tensor([4.0, 1.0, 4.0, 0.0])
    loss.seen_[:4] = 4.0
    logits = torch.tensor([[0.2, 0.0], [3.0, 0.0]])  # the second is surer, and was wrong more often
    labels = torch.tensor([0, 0])
    found = value(loss(logits, labels, indices=torch.tensor([0, 1])))
    c = softmax(logits.numpy().astype(float), -1).max(-1)
    plain = value(F.cross_entropy(logits, labels))
    assert found == pytest.approx(plain + (0.75 - (c[0] - c[1])), rel=1e-5)


def test_crl_remembers_in_training_only():
    loss = CRL(examples=3)
    logits, labels = torch.tensor([[1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    loss.eval()(logits, labels, indices=torch.tensor([0, 2]))
    assert loss.seen_.sum() == 0
    loss.train()(logits, labels, indices=torch.tensor([0, 2]))
    assert loss.seen_.tolist() == [1, 0, 1]
    assert loss.right_.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="CRL needs indices"):
        loss(logits, labels)


# FeDLaS.


def feature_batch(rng, n=64, classes=5):
    logits = torch.from_numpy(rng.normal(size=(n, classes)) * 3)
    labels = torch.from_numpy(rng.integers(0, classes, n))
    return logits, labels, torch.from_numpy(rng.normal(size=(n, 16)) * 2)


def direct_fedlas(loss, logits, labels, features):
    """The definition in float64, from the state after the batch was taken in."""
    z, y, f = logits.detach().numpy(), labels.numpy(), features.detach().numpy()
    first, _, second = loss.gate
    with torch.no_grad():
        hidden = F.leaky_relu(first(logits.float()), 0.01)
        gate = second(hidden).double().softmax(-1).numpy()
    sign = np.sign(gate[:, 1] - gate[:, 0])
    gamma = (np.abs(f).sum(-1) - value(loss.mean_)) / (value(loss.deviation_) + 1e-3)
    alpha = 2 * loss.alpha * expit(loss.beta * sign * gamma)
    own = -log_softmax(z, -1)[np.arange(len(y)), y]
    if loss.base == "ls":
        penalty = -log_softmax(z, -1).mean(-1)
    else:
        penalty = np.maximum(z.max(-1, keepdims=True) - z - loss.margin, 0).mean(-1)
    return np.mean((1 - alpha) * own + alpha * penalty)


@pytest.mark.parametrize("base", ["ls", "mbls"])
def test_fedlas_is_its_definition(base, rng):
    loss = FeDLaS(5, base=base, margin=2.0)
    given = feature_batch(rng)
    found = value(loss(*given))
    norm = given[2].abs().sum(-1)
    assert value(loss.mean_) == pytest.approx(value(norm.mean()), rel=1e-6)  # the first batch
    assert value(loss.deviation_) == pytest.approx(value(norm.std()), rel=1e-5)
    assert found == pytest.approx(direct_fedlas(loss, *given), rel=1e-6)
    other = feature_batch(rng)
    found = value(loss(*other))
    expected = 0.5 * value(norm.mean()) + 0.5 * value(other[2].abs().sum(-1).mean())
    assert value(loss.mean_) == pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(direct_fedlas(loss, *other), rel=1e-6)


def test_fedlas_without_beta_is_plain_smoothing(rng):
    logits, labels, features = feature_batch(rng)
    found = FeDLaS(5, base="ls", beta=0.0, alpha=0.07)(logits, labels, features)
    assert value(found) == pytest.approx(value(ls(logits, labels, alpha=0.07).mean()))
    found = FeDLaS(5, base="mbls", beta=0.0, alpha=0.1, margin=2.0)(logits, labels, features)
    plain = 0.9 * mbls(logits, labels, margin=2.0, weight=0.1 / 0.9).mean()
    assert value(found) == pytest.approx(value(plain))


def test_the_weight_passes_no_gradient_to_the_backbone_but_one_to_the_gate(rng):
    loss = FeDLaS(5)
    logits, labels, features = feature_batch(rng)
    logits.requires_grad_()
    features.requires_grad_()
    loss.weights(logits, features).sum().backward()
    assert logits.grad is None
    assert features.grad is None
    loss(logits, labels, features).backward()
    assert features.grad is None
    fixed = loss.last[1].double()
    again = logits.detach().requires_grad_()
    own = -again.log_softmax(-1).gather(-1, labels[:, None])[:, 0]
    ((1 - fixed) * own + fixed * -again.log_softmax(-1).mean(-1)).mean().backward()
    torch.testing.assert_close(logits.grad, again.grad)
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in loss.gate.parameters())


def test_the_gate_learns_what_lowers_the_loss(rng):
    """Its gradient asks for less smoothing wherever smoothing costs more than the label."""
    loss = FeDLaS(4, base="ls", beta=4.0, alpha=0.1)
    labels = torch.from_numpy(rng.integers(0, 4, 512))
    logits = (
        6.0 * F.one_hot(labels, 4).float() + torch.from_numpy(rng.normal(size=(512, 4))).float()
    )
    scale = torch.where(labels < 2, 1.0, 3.0)  # the classes say whether norms are small
    features = scale[:, None] * torch.ones(512, 8) + 0.1 * torch.rand(512, 8)
    optimiser = torch.optim.SGD(loss.parameters(), 1.0)
    before = value(loss.weights(logits, features).mean())
    for _ in range(200):
        optimiser.zero_grad()
        loss(logits, labels, features).backward()
        optimiser.step()
    assert value(loss.weights(logits, features).mean()) < 0.5 * min(before, loss.alpha)


def test_weights_stay_within_twice_alpha(rng):
    loss = FeDLaS(5, alpha=0.05)
    logits, _, features = feature_batch(rng)
    weights = loss.weights(logits, 100 * features)
    assert ((weights >= 0) & (weights <= 0.1)).all()


def test_fedlas_state_travels_and_evaluation_does_not_change_it(rng):
    loss = FeDLaS(5)
    given = feature_batch(rng)
    loss(*given)
    other = FeDLaS(5)
    other.load_state_dict(loss.state_dict())
    loss.eval()
    other.eval()
    fresh = feature_batch(rng)
    assert value(loss(*fresh)) == value(other(*fresh))
    assert value(loss.mean_) == pytest.approx(value(given[2].abs().sum(-1).mean()), rel=1e-6)


def test_fedlas_in_a_batch_of_one_or_two_classes(rng):
    loss = FeDLaS(2)
    for _ in range(3):
        found = loss(torch.randn(1, 2), torch.tensor([1]), torch.randn(1, 4))
        assert torch.isfinite(found)
    assert value(loss.deviation_) == 1.0


def test_fedlas_says_what_it_wants():
    loss = FeDLaS(5)
    labels = torch.zeros(3, dtype=torch.long)
    with pytest.raises(ValueError, match="FeDLaS needs features"):
        loss(torch.zeros(3, 5), labels)
    with pytest.raises(ValueError, match=r"FeDLaS needs features .* got \(2, 4\)"):
        loss(torch.zeros(3, 5), labels, torch.zeros(2, 4))
    with pytest.raises(ValueError, match="made for 5 classes, got logits of 4"):
        loss(torch.zeros(3, 4), labels, torch.zeros(3, 4))
    wrong: list[dict[str, Any]] = [{"base": "x"}, {"theta": 0.0}, {"classes": 1}]
    for bad in wrong:
        with pytest.raises(ValueError, match="must be"):
            FeDLaS(**{"classes": 5, **bad})


def test_half_precision_under_autocast(rng):
    loss = FeDLaS(5)
    last = torch.nn.Linear(16, 5)
    with torch.autocast("cpu", torch.bfloat16):
        features = torch.relu(torch.from_numpy(rng.normal(size=(32, 16))).float())
        logits = last(features)
        found = loss(logits, torch.from_numpy(rng.integers(0, 5, 32)), features)
    assert found.dtype == torch.float32
    found.backward()
    assert torch.isfinite(gradient(last.weight)).all()


@pytest.fixture(scope="module")
def learned():
    """Accuracy and ECE on other examples, of a small network that is trained with a loss."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(10, 20, generator=generator)
    labels = torch.randint(10, (5000,), generator=generator)
    inputs = centres[labels] + 1.3 * torch.randn(5000, 20, generator=generator)

    @cache
    def trained(name, **options):
        loss = LOSSES[name](**options)
        torch.manual_seed(0)
        network = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 10))
        optimiser = torch.optim.SGD(network.parameters(), 0.1, momentum=0.9)
        for epoch in range(15):
            optimiser.param_groups[0]["lr"] = 0.1 if epoch < 10 else 0.01
            for part in torch.randperm(2000).split(125):
                optimiser.zero_grad()
                loss(network(inputs[part]), labels[part]).backward()
                nn.utils.clip_grad_norm_(network.parameters(), 2.0)
                optimiser.step()
        with torch.no_grad():
            found = cal.evaluate(
                network(inputs[2000:]), labels[2000:], metrics=["accuracy", "ece"], level=None
            )
        return found["accuracy"].value, found["ece"].value

    return trained


@pytest.mark.parametrize("name", STATISTICS)
def test_statistics_with_their_own_weights_do_not_harm_the_training(learned, name):
    (plain, before), (accuracy, ece) = learned("ce"), learned(name)
    assert accuracy > plain - 0.01
    assert ece < before + 0.005


def test_weights_of_published_code_are_too_much_for_the_formulas(learned):
    accuracy, before = learned("ce")
    assert learned("mmce", weight=2.0)[1] > before + 0.03
    assert learned("avuc", weight=3.0)[0] < accuracy - 0.2
