"""Training of image networks by the recipe of the papers."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.train.images import ImageSplit, Pixels, TrainingSplits, fingerprint
from benchmarks.train.networks import NETWORKS
from benchmarks.train.ranks import average_gradients, ranks, share_buffers
from benchmarks.train.recipe import Recipe
from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant._core.engines import Progress
from calibrant._core.torch_models import own_device, save_state
from calibrant.losses.entries import summed_over_ranks
from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.focal import AdaFocal

LEARNED, PROGRESS = ("network", "loss", "optimiser"), ("epoch", "best", "log", "signs")
"""Attributes of a trainer in its checkpoint."""


class Outputs(NamedTuple):
    """Outputs of a network for a split, on the CPU in float32."""

    logits: Tensor
    features: Tensor
    labels: Tensor


class Trainer:
    """Trains a network; can be stopped at any time and continued after its last whole epoch.

    Under ``torchrun`` (see :func:`benchmarks.train.ranks.joining`) every process takes its
    share of each batch, gradients are averaged, and the first process writes the files. Moving
    averages of batch normalisation are those of the first process.

    ``folder`` has the checkpoint and ``log.csv``; a run that was stopped there is continued.
    ``log`` has the figures of each of the ``epoch`` completed epochs.
    """

    def __init__(
        self,
        splits: TrainingSplits,
        classes: int,
        recipe: Recipe,
        folder: str | os.PathLike[str],
        *,
        device: str | None = None,
    ) -> None:
        _check_splits(splits, classes)
        self.recipe, self.folder, self.ranks = recipe, Path(folder), ranks()
        self.checkpoint = self.folder / "checkpoint.pt"
        self.first = self.ranks.rank == 0  # this process writes the files
        self.device = own_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.splits = {name: self._on_device(s) for name, s in splits._asdict().items()}
        self.images, self.labels = self.splits["train"]
        mean, deviation = channel_moments(splits.train.images)
        self.mean, self.deviation = mean.to(self.device), deviation.to(self.device)
        origin = {"data": fingerprint(*splits), "processes": self.ranks.size}
        self.settings = {**asdict(recipe), **origin}
        torch.manual_seed(recipe.seed)
        network = NETWORKS[recipe.network](classes=classes, channels=mean.shape[1])
        self.network = network.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs miss it
        self.loss = recipe.make_loss(classes, len(splits.train.labels)).to(self.device)
        parameters = [*self.network.parameters(), *self.loss.parameters()]
        decay, momentum = recipe.decay, recipe.momentum
        self.optimiser = torch.optim.SGD(parameters, recipe.rate, momentum, weight_decay=decay)
        model: Any = self.network
        if self.ranks.size > 1:
            model = nn.parallel.DistributedDataParallel(model)
        self.model = torch.compile(model) if recipe.compiled else model
        self.epoch, self.best = 0, -1.0
        self.signs: Tensor | None = None  # of FeDLaS in the last epoch
        self.log: list[dict[str, float]] = []
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self._resume()

    def run(self, progress: Progress | None = None) -> None:
        """Train to the end, and write the log and a checkpoint after each epoch."""
        while self.epoch < self.recipe.epochs:
            start = time.perf_counter()
            figures = self._train_epoch(progress)
            share_buffers(self.network)
            val = self.outputs("val")
            if isinstance(self.loss, AdaFocal):
                self.loss.observe(val.logits.to(self.device), val.labels.to(self.device))
            self.epoch += 1
            figures = {"epoch": self.epoch, **figures, "val_accuracy": _accuracy(val)}
            self.log.append({**figures, "seconds": time.perf_counter() - start})
            if self.first:
                self._save()
                rows = ({k: f"{value:.6g}" for k, value in epoch.items()} for epoch in self.log)
                write_csv(self.folder / "log.csv", list(self.log[-1]), rows)

    def _train_epoch(self, progress: Progress | None) -> dict[str, float]:
        recipe, examples = self.recipe, len(self.labels)
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.rate_at(self.epoch)
        self.network.train()
        self.loss.train()
        total = torch.zeros((), device=self.device)
        gate = GateStatistics(self.loss, examples) if isinstance(self.loss, FeDLaS) else None
        steps = math.ceil(examples / recipe.batch)
        # seeded by the epoch, so that a continued run takes the same steps
        random = torch.Generator().manual_seed(1_000_003 * recipe.seed + self.epoch)
        for step, (index, share) in enumerate(self._batches(random), 1):
            total += self._step(index, share, random) * len(index)
            if gate is not None:
                gate.update(index)
            if progress is not None:
                progress(self.epoch * steps + step, recipe.epochs * steps)
        mean = float(summed_over_ranks(total)) / examples
        if not math.isfinite(mean):
            raise ValueError(f"the loss became {mean} in epoch {self.epoch + 1}: lower the rate")
        figures = {"loss": mean, "rate": recipe.rate_at(self.epoch)}
        if gate is not None:
            figures |= gate.compute(self.signs)
            self.signs = gate.signs
        return figures

    def _batches(self, random: torch.Generator) -> Iterator[tuple[Tensor, float]]:
        """Yield the indices for this process, and the weight of their mean among all processes."""
        rank, size = self.ranks
        order = torch.randperm(len(self.labels), generator=random)
        if size > 1:
            random.manual_seed(random.initial_seed() + 1_000_000_007 * (rank + 1))
        for batch in order.to(self.device).split(self.recipe.batch):
            if len(batch) >= size:  # a last batch with fewer images than processes is left out
                index = batch[rank::size]
                yield index, len(index) * size / len(batch)

    def _step(self, index: Tensor, share: float, random: torch.Generator) -> Tensor:
        """Take a step with the training examples at an index, and return their mean loss."""
        images = self.standardised(self.images[index])
        if self.recipe.augment:
            images = shift_and_mirror(images, random)
        loss = self._loss(images, index, random)
        self.optimiser.zero_grad(set_to_none=True)
        (loss * share).backward()
        average_gradients(self.loss.parameters())
        nn.utils.clip_grad_norm_(self.network.parameters(), self.recipe.clip)
        self.optimiser.step()
        return loss.detach()

    def _loss(self, images: Tensor, index: Tensor, random: torch.Generator) -> Tensor:
        if not self.recipe.mixup:
            return self._loss_of(images, [index])[0]
        seed = int(torch.randint(1 << 62, (), generator=random))  # torch's Beta takes no generator
        share = float(np.random.default_rng(seed).beta(self.recipe.mixup, self.recipe.mixup))
        order = torch.randperm(len(index), generator=random).to(self.device)
        mixed = share * images + (1 - share) * images[order]
        own, other = self._loss_of(mixed, [index, index[order]])
        return share * own + (1 - share) * other

    def _loss_of(self, images: Tensor, indices: list[Tensor]) -> list[Tensor]:
        """Return the losses of a batch with the labels at each of the indices."""
        with self._precision():
            logits, features = self.model(images)
        return [self.loss(logits, self.labels[index], features, index) for index in indices]

    def _precision(self) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.half)

    def standardised(self, images: Tensor) -> Tensor:
        """Subtract the mean of each channel of the training images, and divide by its deviation."""
        scaled = (images.float() / 255 - self.mean) / self.deviation
        return scaled.contiguous(memory_format=torch.channels_last)

    @torch.no_grad()
    def outputs(self, split: str | ImageSplit, chunk: int = 1000) -> Outputs:
        """Return logits and features of a split, or of other images of the same shape."""
        images, labels = self.splits[split] if isinstance(split, str) else self._on_device(split)
        self.network.eval()
        chunks = []
        for some in images.split(chunk):
            with self._precision():
                chunks.append(self.network(self.standardised(some)))
        logits, features = (torch.cat(arrays).float().cpu() for arrays in zip(*chunks, strict=True))
        return Outputs(logits, features, labels.cpu())

    def predictions(self, others: Mapping[str, ImageSplit] | None = None) -> dict[str, Any]:
        """Return the arrays of a prediction file: val, test, other splits, and the last layer."""
        arrays: dict[str, Any] = {}
        splits: dict[str, str | ImageSplit] = {"val": "val", "test": "test", **(others or {})}
        for name, split in splits.items():
            outputs = self.outputs(split)
            arrays[f"{name}_logits"] = outputs.logits.numpy()
            arrays[f"{name}_labels"] = outputs.labels.numpy()
            arrays[f"{name}_features"] = outputs.features.half().numpy()
        arrays["head_weight"] = self.network.last.weight.detach().cpu().numpy()
        arrays["head_bias"] = self.network.last.bias.detach().cpu().numpy()
        return arrays

    def _on_device(self, split: ImageSplit) -> tuple[Tensor, ...]:
        return tuple(torch.as_tensor(values).to(self.device) for values in split)

    def use_best(self) -> None:
        """Load the weights with the best validation accuracy."""
        state = torch.load(self.folder / "best.pt", map_location=self.device, weights_only=True)
        self.network.load_state_dict(state)

    def _save(self) -> None:
        accuracy = self.log[-1]["val_accuracy"]
        if accuracy > self.best:
            self.best = accuracy
            save_state(self.network.state_dict(), self.folder / "best.pt")
        state: dict[str, Any] = {"recipe": self.settings}
        state |= {name: getattr(self, name) for name in PROGRESS}
        state |= {name: getattr(self, name).state_dict() for name in LEARNED}
        save_state(state, self.checkpoint)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        saved = state["recipe"]
        changed = [name for name, value in saved.items() if self.settings.get(name) != value]
        if changed:
            values = ", ".join(repr(saved[name]) for name in changed)
            raise ValueError(
                f"{self.folder} has a run with another {' and '.join(changed)} ({values}): remove "
                "it, or use another folder"
            )
        for name in LEARNED:
            getattr(self, name).load_state_dict(state[name])
        for name in PROGRESS:
            setattr(self, name, state[name])


def channel_moments(images: Pixels) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of each channel ``(1, channels, 1, 1)``, for values in [0, 1]."""
    planes = images.swapaxes(0, 1).reshape(images.shape[1], -1)
    # from counts of the 256 values: exact, and without a copy in floating point
    counts = np.stack([np.bincount(plane, minlength=256) for plane in planes]) / planes.shape[1]
    values = np.arange(256) / 255
    mean = counts @ values
    deviation = np.sqrt(np.maximum(counts @ values**2 - mean**2, 0))
    deviation[deviation == 0] = 1.0  # constant channels
    moments = torch.tensor(np.stack([mean, deviation]), dtype=torch.float32)
    return moments[0].reshape(1, -1, 1, 1), moments[1].reshape(1, -1, 1, 1)


def _check_splits(splits: TrainingSplits, classes: int) -> None:
    for name, split in splits._asdict().items():
        if len(split.labels) == 0:
            raise ValueError(f"the {name} split must have images, got none")
        labels = split.labels[split.labels != IGNORED]
        wrong = labels[(labels < 0) | (labels >= classes)]
        if wrong.size:
            allowed = f"from 0 to {classes - 1}, or {IGNORED} to be ignored"
            raise ValueError(f"labels of the {name} split must be {allowed}, got {wrong[0]}")


class GateStatistics:
    """Signs of the gate for each training example ``(n,)``, and its smoothing, in one epoch."""

    def __init__(self, loss: FeDLaS, examples: int) -> None:
        device = loss.mean_.device
        self.loss = loss
        self.signs = torch.zeros(examples, dtype=torch.int8, device=device)
        self.lowered, self.ratio = (torch.zeros((), device=device) for _ in range(2))

    def update(self, index: Tensor) -> None:
        """Add the last batch, which had the training examples at an index."""
        signs, weights = self.loss.last
        self.signs[index] = signs.to(torch.int8)
        self.lowered += (weights < self.loss.alpha).sum()
        self.ratio += weights.sum() / self.loss.alpha

    def compute(self, before: Tensor | None) -> dict[str, float]:
        """Return fractions of the examples; ``before`` has the signs of the last epoch."""
        for values in (self.signs, self.lowered, self.ratio):
            summed_over_ranks(values)
        count = len(self.signs)
        flips = math.nan if before is None else float((self.signs != before).float().mean())
        return {
            "gate_positive": float((self.signs > 0).float().mean()),
            "gate_flips": flips,
            "smoothing_lowered": float(self.lowered) / count,
            "smoothing_ratio": float(self.ratio) / count,
        }


def write_csv(path: Path, columns: Sequence[str], rows: Iterable[Mapping[str, str]]) -> None:
    """Replace a file by rows under a header."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _accuracy(outputs: Outputs) -> float:
    return float((outputs.logits.argmax(-1) == outputs.labels).double().mean())


def shift_and_mirror(images: Tensor, random: torch.Generator, shift: int = 4) -> Tensor:
    """Shift each image ``(n, c, h, w)`` by up to ``shift`` pixels and mirror half of them."""
    count, _, height, width = images.shape
    down, right = (
        torch.randint(0, 2 * shift + 1, (count, 1), generator=random).to(images.device)
        for _ in range(2)
    )
    mirrored = (torch.rand((count, 1), generator=random) < 0.5).to(images.device)
    rows = down + torch.arange(height, device=images.device)
    columns = torch.arange(width, device=images.device).expand(count, width)
    columns = right + torch.where(mirrored, columns.flip(-1), columns)
    padded = F.pad(images, (shift,) * 4)
    image = torch.arange(count, device=images.device)[:, None, None]
    moved = padded.permute(0, 2, 3, 1)[image, rows[:, :, None], columns[:, None, :]]
    return moved.permute(0, 3, 1, 2)
