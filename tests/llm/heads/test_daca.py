"""The label-free temperature of DACA."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from calibrant.llm.heads.daca import daca


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
    everywhere = torch.linspace(1, 8, 100)
    values = [
        float(F.cross_entropy(torch.from_numpy(chat) / t, torch.from_numpy(base).softmax(-1)))
        for t in everywhere
    ]
    # tokens on which they differ would ask for more doubt
    assert float(everywhere[int(np.argmin(values))]) > found.temperature + 0.1


def test_daca_masked_and_refused():
    logits = np.array([[2.0, 1.0, -np.inf], [0.5, 1.0, -np.inf]])
    assert daca(logits, 2 * logits).temperature == pytest.approx(2, rel=1e-3)
    with pytest.raises(ValueError, match="masks a token"):
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
    with pytest.warns(UserWarning, match="no temperature"):
        daca(np.zeros((5, 3)), np.array([[2.0, 1.0, 0.0]] * 5))
