"""Cost of fits, calls and metrics, as ratios to one pass over the same logits in the same run.

    python benchmarks/speed.py
    python benchmarks/speed.py --processor --out docs/data/speed.csv
    python benchmarks/speed.py --device cuda --out speed.csv

One pass is ``torch.logsumexp``: machines differ, ratios travel. Every row is the least of several
rounds, between which passes are measured, so that other work on the machine slows both. With
``--processor`` it is the processor time of one thread, for machines that are busy. Peers are
measured where they are installed: scikit-learn, torchmetrics and probmetrics. Training steps,
MaC-Cal and a language model of the shape of SmolLM2-135M, with random weights, are measured on
CUDA only, in milliseconds. Asserts nothing.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch starts its threads
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import argparse
import csv
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from typing import NamedTuple, TypeAlias

import numpy as np
import torch
from support import peak_beyond_logits, timed

import calibrant as cal

CALLS = ("ts", "smart", "sms", "isotonic", "auto")
FITS = ("ts", "smart", "sms", "isotonic", "auto")
SIZES = {
    "cpu": {
        "call": [(20_000, 1000), (50_000, 100)],
        "fit": [(20_000, 1000), (50_000, 100), (5000, 10)],
        "measure": [(50_000, 100), (5000, 10), (2000, 2)],
    },
    "cuda": {kind: [(100_000, 1000)] for kind in ("call", "fit", "measure")},
}
LOSSES = ("ce", "focal", "mbls", "soft_ece", "fedlas_ls", "fedlas_mbls")
ROUNDS = 3


Timer: TypeAlias = Callable[[Callable[[], object], str, int], float]


class Row(NamedTuple):
    """Least time of a piece of work."""

    work: str
    rows: int
    classes: int
    passes: float
    milliseconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--only", default="", help="pieces of work whose names begin so")
    parser.add_argument("--processor", action="store_true", help="processor time of one thread")
    parser.add_argument("--out", help="a .csv file for the rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    clock = time.process_time if options.processor else time.perf_counter
    if options.processor:
        torch.set_num_threads(1)
    print(f"{options.device}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'':<36}{'rows':>8}{'classes':>9}{'passes':>10}{'ms':>11}")
    found = []
    for row in measured(options.device, options.only, partial(timed, clock=clock)):
        found.append(row)
        print(
            f"{row.work:<36}{row.rows:>8}{row.classes:>9}{row.passes:>10.1f}"
            f"{row.milliseconds:>11.3f}",
            flush=True,
        )
    if options.out:
        with open(options.out, "w", newline="") as file:
            table = csv.writer(file, lineterminator="\n")
            table.writerow(["device", *Row._fields])
            table.writerows([options.device, *cells(row)] for row in found)
    if options.device == "cpu" and not options.only:
        small = "cal.SMART(steps=3).fit(torch.randn(2000, 10), torch.randint(10, (2000,)))"
        work = "cal.SMART(steps=20).fit(logits, labels)"
        print(
            f"memory of a SMART fit beyond the logits: "
            f"{peak_beyond_logits(small, work, 20_000, 1000):.0%} of them"
        )


def cells(row: Row) -> list[str]:
    """Return a row for people: rounded, and empty where there are no passes."""
    passes = "" if math.isnan(row.passes) else f"{row.passes:.1f}"
    return [row.work, f"{row.rows:,}", f"{row.classes:,}", passes, f"{row.milliseconds:,.4g}"]


def measured(device: str, only: str, timed: Timer) -> Iterator[Row]:
    """Yield all rows for a device."""
    makers = {"call": calls, "fit": fits, "measure": measures}
    for kind, sizes in SIZES[device].items():
        for size in sizes:
            logits, labels = predictions(*size, device)
            for name, work in makers[kind](logits, labels):
                if name.startswith(only):
                    yield compared(name, work, logits, timed)
    for name, work in one_row(device):
        if name.startswith(only):
            yield Row(name, 1, 100, math.nan, 1000 * timed(work, device, 50))
    if device == "cuda":
        for name, rows, classes, work in chain(training(), language_model()):
            if name.startswith(only):
                timed(work, device, 1)
                yield Row(name, rows, classes, math.nan, 1000 * timed(work, device, ROUNDS))


def predictions(rows: int, classes: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Over-confident logits, by more in some rows and classes, so that ``auto`` averages methods.

    Labels are drawn from the softmax of about their halves, with a bias of each class.
    """
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((rows, classes), dtype=np.float32)
    sharpness = np.exp(rng.normal(0, 0.5, (rows, 1))) / 2
    bias = 0.5 * rng.standard_normal(classes)
    labels = (sharpness * logits + bias + rng.gumbel(size=logits.shape)).argmax(-1)
    return torch.from_numpy(logits).to(device), torch.from_numpy(labels).to(device)


def compared(name: str, work: Callable[[], object], logits: torch.Tensor, timed: Timer) -> Row:
    """Least time of some work, and of one pass measured in turn with it."""
    device = logits.device.type
    one_pass = least = math.inf
    timed(work, device, 1)
    for _ in range(ROUNDS):  # a busy machine then slows both
        one_pass = min(one_pass, timed(lambda: torch.logsumexp(logits, -1), device, 7))
        least = min(least, timed(work, device, 1 if least > 1 else 3))
    return Row(name, *logits.shape, least / one_pass, 1000 * least)


Work = Iterator[tuple[str, Callable[[], object]]]


def calls(logits: torch.Tensor, labels: torch.Tensor) -> Work:
    for name in CALLS:
        fitted = cal.CALIBRATORS[name]().fit(logits[:5000], labels[:5000])
        yield f"call {name}{_chosen(fitted)}", lambda fitted=fitted: fitted(logits)


def _chosen(fitted: cal.Calibrator) -> str:
    """Return what ``auto`` has chosen, in brackets."""
    return f" ({type(fitted.chosen_).__name__})" if isinstance(fitted, cal.Auto) else ""


def fits(logits: torch.Tensor, labels: torch.Tensor) -> Work:
    for name in FITS:
        yield f"fit {name}", lambda kind=cal.CALIBRATORS[name]: kind().fit(logits, labels)
    if logits.device.type == "cpu":
        yield from peer_fits(logits, labels)


def peer_fits(logits: torch.Tensor, labels: torch.Tensor) -> Work:
    try:  # the solver that CalibratedClassifierCV(method="temperature") calls
        from sklearn.calibration import _TemperatureScaling

        arrays = logits.numpy(), labels.numpy()
        yield "fit ts, scikit-learn", lambda: _TemperatureScaling().fit(*arrays)
    except ImportError:
        pass
    try:
        from probmetrics.calibrators import get_calibrator
        from probmetrics.distributions import CategoricalLogits
    except ImportError:
        return
    for name, theirs in (("ts", "temp-scaling"), ("sms", "sms")):
        yield (
            f"fit {name}, probmetrics",
            lambda theirs=theirs: get_calibrator(theirs).fit_torch(
                CategoricalLogits(logits), labels
            ),
        )


def measures(logits: torch.Tensor, labels: torch.Tensor) -> Work:
    yield "ece", lambda: cal.ece(logits, labels)
    try:
        from torchmetrics.functional.classification import multiclass_calibration_error

        classes = logits.shape[-1]
        yield "ece, torchmetrics", lambda: multiclass_calibration_error(logits, labels, classes)
    except ImportError:
        pass
    yield "evaluate, no intervals", lambda: cal.evaluate(logits, labels, level=None)
    yield "evaluate", lambda: cal.evaluate(logits, labels)


def one_row(device: str) -> Work:
    logits, labels = predictions(5000, 100, device)
    for name in ("ts", "smart", "isotonic", "auto"):
        fitted = cal.CALIBRATORS[name]().fit(logits, labels)
        yield f"call {name}{_chosen(fitted)}, one row", lambda fitted=fitted: fitted(logits[:1])


Sized = Iterator[tuple[str, int, int, Callable[[], object]]]


def training() -> Sized:
    """Yield a step of each loss behind a last layer, in bfloat16, and a fit of MaC-Cal."""
    rows, classes, width = 1024, 1000, 512
    torch.manual_seed(0)
    features = torch.randn(rows, width, device="cuda")
    labels = torch.randint(classes, (rows,), device="cuda")
    index = torch.arange(rows, device="cuda")
    layer = torch.nn.Linear(width, classes, device="cuda")

    def step(loss: torch.nn.Module) -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            value = loss(layer(features), labels, features, index)
        value.backward()

    for name in LOSSES:
        loss = cal.LOSSES[name](classes=classes, examples=rows).cuda()
        yield f"step {name}", rows, classes, lambda loss=loss: step(loss)
        compiled = torch.compile(loss)
        yield f"step {name}, compiled", rows, classes, lambda loss=compiled: step(loss)
    many, wanted = torch.randn(50_000, width, device="cuda"), torch.randint(100, (50_000,))
    yield "fit maccal, 10 epochs", 50_000, 100, lambda: cal.MaCCal(epochs=10).fit(many, wanted)


def language_model() -> Sized:
    """Yield temperature heads from the pass of a language model to its generations."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from calibrant.llm.heads.attach import attached
    from calibrant.llm.heads.collect import collect
    from calibrant.llm.heads.fit import fit_head
    from calibrant.llm.heads.tables import TokenTable

    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(vocab_size=49_152, **shape, **heads)
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    texts = torch.randint(3, config.vocab_size, (64, 257)).cuda()
    documents = [{"input_ids": text} for text in texts.tolist()]
    size = texts[:, 1:].numel(), config.vocab_size

    def forward() -> None:
        with torch.inference_mode():
            for batch in texts.split(8):
                model(batch)

    def collected() -> TokenTable:
        with tempfile.TemporaryDirectory() as folder:
            return collect(model, documents, f"{folder}/table", batch=2056)

    yield "llm forward", *size, forward
    yield "llm collect", *size, collected
    prompt = {"input_ids": texts[:8, :32], "attention_mask": torch.ones_like(texts[:8, :32])}
    how = {"min_new_tokens": 64, "max_new_tokens": 64, "do_sample": False}
    made = 8 * 64, config.vocab_size
    yield "llm generate", *made, lambda: model.generate(**prompt, **how)
    with tempfile.TemporaryDirectory() as folder:
        table = collect(model, documents, f"{folder}/table", batch=2056)
        for kind in ("linear", "ats"):
            fit = partial(fit_head, table, kind, epochs=5, keep_always=True, device="cuda")
            yield f"llm fit {kind}, 5 epochs", *size, fit
            with attached(model, fit()):
                yield f"llm generate, {kind} head", *made, lambda: model.generate(**prompt, **how)


if __name__ == "__main__":
    main()
