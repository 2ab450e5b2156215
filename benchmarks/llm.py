"""Training a head from a token table, against autograd over full logits of the same tokens.

The language model is a stand-in: one random layer under an output embedding of the size of
SmolLM2's. Both ways train the same linear head with the same batches and start; autograd gets its
hidden states from the table too, so that no pass of the model counts against it. Each way runs in a
process of its own, where its peak of memory is measured (Linux). Prints a table; asserts nothing.
"""

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from support import seconds
from torch.nn.functional import cross_entropy

from calibrant.calibrators.objectives import nll
from calibrant.llm import open_table
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.fitted import _make_head
from calibrant.llm.heads.modules import bounded
from calibrant.llm.heads.tables import TokenTable

VOCABULARY, WIDTH = 49_152, 576
DOCUMENTS, LENGTH = 16, 257
BATCH, EPOCHS, FEW = 1024, 3, 8
SHARPNESS = 3.0
"""Standard deviation of the logits, about that of a trained model."""


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        tokens, once = prepare(Path(folder))
        found = {way: measured(way, folder) for way in WAYS}
    table, logits = found["table"], found["logits"]
    print(
        f"{tokens} tokens, vocabulary {VOCABULARY}, width {WIDTH}, batches of {BATCH}, "
        f"{torch.get_num_threads()} threads\n"
    )
    print(f"{'linear head':<28}{'s per epoch':>14}{'peak MB':>10}")
    for name, way in (("autograd, full logits", logits), ("token table", table)):
        print(f"{name:<28}{way['seconds']:>14.3f}{way['peak'] / 1e6:>10.1f}")
    ratios = (logits["seconds"] / table["seconds"], logits["peak"] / table["peak"])
    print(f"{'ratio':<28}{ratios[0]:>14.0f}{ratios[1]:>10.0f}\n")
    print(f"collecting the table, once: {once / logits['seconds']:.1f} epochs of autograd")
    off = np.abs(np.subtract(table["weight"], logits["weight"])).max()
    size = np.abs(logits["weight"]).max()
    print(f"largest difference of the trained weights: {off / size:.1e} of the largest weight")


def prepare(folder: Path) -> tuple[int, float]:
    """Collect a table with the stand-in and save its output embedding; tokens and seconds."""
    model = stand_in()
    rng = np.random.default_rng(0)
    documents = [{"input_ids": row} for row in rng.integers(VOCABULARY, size=(DOCUMENTS, LENGTH))]
    start = time.perf_counter()
    table = collect(model, documents, folder / "table")
    taken = time.perf_counter() - start
    np.save(folder / "embedding.npy", model.get_output_embeddings().weight.detach().numpy())
    return len(table), taken


def stand_in() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=9,
    )
    model = LlamaForCausalLM(config)
    torch.nn.init.normal_(model.get_output_embeddings().weight, std=SHARPNESS / WIDTH**0.5)
    return model


def measured(way: str, folder: str) -> dict[str, float]:
    """Run one way in a process of its own."""
    command = [sys.executable, __file__, way, folder]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(json.loads(done.stdout))


def trained(way: str, folder: Path) -> dict[str, object]:
    """Train the head for an epoch: its weights, the peak beyond the start, and the time."""
    table = open_table(folder / "table")
    embedding = torch.from_numpy(np.load(folder / "embedding.npy"))
    epoch = partial(WAYS[way], table, embedding)
    epoch(FEW)  # what torch loads on its first step is not what is measured
    with open("/proc/self/clear_refs", "w") as peak:
        peak.write("5")  # forget the peak so far
    before = memory("VmRSS")
    head = epoch(len(table))
    beyond = memory("VmHWM") - before
    taken = seconds(lambda: epoch(len(table)), EPOCHS)
    weights = torch.cat([weight.detach().reshape(-1) for weight in head.parameters()])
    return {"seconds": taken, "peak": beyond, "weight": weights.tolist()}


def memory(field: str) -> int:
    with open("/proc/self/status") as status:
        return 1024 * next(int(line.split()[1]) for line in status if line.startswith(field))


def from_table(table: TokenTable, embedding: torch.Tensor, tokens: int) -> torch.nn.Module:
    def measure(rows: slice, hidden: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        gradient = nll(table.records(rows), u.detach().double().numpy()).gradient
        return u @ torch.from_numpy(gradient).to(u)  # whose gradient is that of the likelihood

    return one_epoch(table, tokens, measure)


def from_logits(table: TokenTable, embedding: torch.Tensor, tokens: int) -> torch.nn.Module:
    labels = torch.from_numpy(table.records().labels)

    def measure(rows: slice, hidden: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        return cross_entropy(u.exp()[:, None] * (hidden @ embedding.T), labels[rows])

    return one_epoch(table, tokens, measure)


Measure = Callable[[slice, torch.Tensor, torch.Tensor], torch.Tensor]
WAYS = {"table": from_table, "logits": from_logits}


def one_epoch(table: TokenTable, tokens: int, measure: Measure) -> torch.nn.Module:
    """Train a new head on each of the first tokens once; ``measure`` is the loss of a batch."""
    head = _make_head("linear", width=WIDTH)
    optimiser = torch.optim.AdamW(head.parameters(), lr=1e-3)
    for first in range(0, tokens, BATCH):
        rows = slice(first, min(first + BATCH, tokens))
        hidden = torch.from_numpy(table.hidden(rows).astype(np.float32))
        optimiser.zero_grad()
        measure(rows, hidden, bounded(head(hidden))).backward()
        optimiser.step()
    return head


if __name__ == "__main__":
    if sys.argv[1:]:
        print(json.dumps(trained(sys.argv[1], Path(sys.argv[2]))))
    else:
        main()
