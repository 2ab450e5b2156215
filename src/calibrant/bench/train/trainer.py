"""Training of image networks by the recipe of the papers."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant._core.chunks import Progress
from calibrant._core.torch_models import own_device
from calibrant.bench.train.augmentation import draw_mixup, shift_and_mirror
from calibrant.bench.train.gate_statistics import GateStatistics
from calibrant.bench.train.images.image_set import ImageSplit, Pixels, TrainingSplits, fingerprint
from calibrant.bench.train.networks import NETWORKS, Network
from calibrant.bench.train.ranks import average_gradients, ranks, share_buffers
from calibrant.bench.train.recipe import Recipe
from calibrant.bench.train.training_log import LogWriter
from calibrant.losses.base import summed_over_ranks
from calibrant.losses.focal import AdaFocal
from calibrant.losses.smoothing import FeDLaS


class Outputs(NamedTuple):
    """Outputs of a network for a split, on the CPU in float32."""

    logits: Tensor
    features: Tensor
    labels: Tensor


class _SplitTensors(NamedTuple):
    images: Tensor
    labels: Tensor


class Trainer:
    """Trains a network; can be stopped at any time and continued after its last whole epoch.

    Under ``torchrun`` (see :func:`calibrant.bench.train.ranks.joining`) every process takes its
    share of each batch, gradients are averaged, and the first process writes the files. Moving
    averages of batch normalisation are those of the first process.

    Parameters
    ----------
    splits : TrainingSplits
    classes : int
    recipe : Recipe
    folder : path
        Folder of the checkpoint and the log. A run that was stopped there is continued.
    device : str, optional
    tensorboard : bool
        Also write a log for TensorBoard.

    Attributes
    ----------
    epoch : int
        Number of completed epochs.
    log : list of dict
        Figures of each completed epoch.
    """

    def __init__(
        self,
        splits: TrainingSplits,
        classes: int,
        recipe: Recipe,
        folder: str | os.PathLike[str],
        *,
        device: str | None = None,
        tensorboard: bool = False,
    ) -> None:
        _check_splits(splits, classes)
        self.recipe, self.folder, self.ranks = recipe, Path(folder), ranks()
        self.checkpoint = self.folder / "checkpoint.pt"
        self.first = self.ranks.rank == 0  # this process writes the files
        self.device = own_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.splits = {name: self._on_device(s) for name, s in splits._asdict().items()}
        mean, deviation = channel_moments(splits.train.images)
        self.mean, self.deviation = mean.to(self.device), deviation.to(self.device)
        self.settings = {
            **asdict(recipe),
            "data": fingerprint(*splits),
            "processes": self.ranks.size,
        }
        torch.manual_seed(recipe.seed)
        network = NETWORKS[recipe.network](classes=classes, channels=mean.shape[1])
        self.network = network.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs miss it
        self.loss = recipe.make_loss(classes, len(splits.train.labels)).to(self.device)
        self.optimiser = torch.optim.SGD(
            [*self.network.parameters(), *self.loss.parameters()],
            lr=recipe.rate,
            momentum=recipe.momentum,
            weight_decay=recipe.decay,
        )
        self.model = self._wrapped()
        self.epoch, self.best = 0, -1.0
        self.signs: Tensor | None = None  # of FeDLaS in the last epoch
        self.log: list[dict[str, float]] = []
        self.log_writer = LogWriter(self.folder, tensorboard and self.first)
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self._resume()

    def _wrapped(self) -> Any:
        model: Any = _WithFeatures(self.network)
        if self.ranks.size > 1:
            model = nn.parallel.DistributedDataParallel(model)
        return torch.compile(model) if self.recipe.compiled else model

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
                self.log_writer.write(self.log)

    def _train_epoch(self, progress: Progress | None) -> dict[str, float]:
        recipe, examples = self.recipe, len(self.splits["train"].labels)
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
        order = torch.randperm(len(self.splits["train"].labels), generator=random)
        if size > 1:
            random.manual_seed(random.initial_seed() + 1_000_000_007 * (rank + 1))
        for batch in order.to(self.device).split(self.recipe.batch):
            if len(batch) >= size:  # a last batch with fewer images than processes is left out
                index = batch[rank::size]
                yield index, len(index) * size / len(batch)

    def _step(self, index: Tensor, share: float, random: torch.Generator) -> Tensor:
        """Take a step with the training examples at an index, and return their mean loss."""
        images = self.standardised(self.splits["train"].images[index])
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
        share, order = draw_mixup(self.recipe.mixup, len(index), random)
        order = order.to(self.device)
        mixed = share * images + (1 - share) * images[order]
        own, other = self._loss_of(mixed, [index, index[order]])
        return share * own + (1 - share) * other

    def _loss_of(self, images: Tensor, indices: list[Tensor]) -> list[Tensor]:
        """Return the losses of a batch with the labels at each of the indices."""
        labels = self.splits["train"].labels
        with self._precision():
            logits, features = self.model(images)
        return [self.loss(logits, labels[index], features, index) for index in indices]

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.recipe.half:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

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
                chunks.append(_WithFeatures(self.network)(self.standardised(some)))
        logits, features = (
            torch.cat([values.float().cpu() for values in column])
            for column in zip(*chunks, strict=True)
        )
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
        arrays["weight"] = self.network.last.weight.detach().cpu().numpy()
        arrays["bias"] = self.network.last.bias.detach().cpu().numpy()
        return arrays

    def _on_device(self, split: ImageSplit) -> _SplitTensors:
        return _SplitTensors(*(torch.as_tensor(values).to(self.device) for values in split))

    def use_best(self) -> None:
        """Load the weights with the best validation accuracy."""
        state = torch.load(self.folder / "best.pt", map_location=self.device, weights_only=True)
        self.network.load_state_dict(state)

    def _save(self) -> None:
        accuracy = self.log[-1]["val_accuracy"]
        if accuracy > self.best:
            self.best = accuracy
            _write(self.folder / "best.pt", self.network.state_dict())
        state = {
            "recipe": self.settings,
            "epoch": self.epoch,
            "best": self.best,
            "log": self.log,
            "network": self.network.state_dict(),
            "loss": self.loss.state_dict(),
            "optimiser": self.optimiser.state_dict(),
            "signs": self.signs,
        }
        _write(self.checkpoint, state)

    def _resume(self) -> None:
        state = torch.load(self.checkpoint, map_location=self.device, weights_only=True)
        saved = state["recipe"]
        changed = [name for name, value in saved.items() if self.settings.get(name) != value]
        if changed:
            raise ValueError(
                f"{self.folder} has a run with another {' and '.join(changed)} "
                f"({', '.join(repr(saved[name]) for name in changed)}): remove it, or use another "
                "folder"
            )
        for module in ("network", "loss", "optimiser"):
            getattr(self, module).load_state_dict(state[module])
        for name in ("epoch", "best", "log", "signs"):
            setattr(self, name, state[name])


class _WithFeatures(nn.Module):
    """Returns logits and features in one call, as wrappers for several processes need."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.network.features(images)
        with torch.autocast(features.device.type, enabled=False):
            # bfloat16 is too coarse for confidences
            return self.network.last(features.float()), features


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
            raise ValueError(
                f"labels of the {name} split must be from 0 to {classes - 1}, or {IGNORED} to be "
                f"ignored, got {wrong[0]}"
            )


def _accuracy(outputs: Outputs) -> float:
    return float((outputs.logits.argmax(-1) == outputs.labels).double().mean())


def _write(path: Path, state: Any) -> None:
    with replacing(path) as temporary:
        torch.save(state, temporary)
