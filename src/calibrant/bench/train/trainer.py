"""Train image networks by the recipe of the papers, and write what they predict."""

from __future__ import annotations

import csv
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from calibrant._core.atomic_files import replacing
from calibrant._core.checks import IGNORED
from calibrant.bench.train.images.sets import Part, Parts, digest_of
from calibrant.bench.train.networks import NETWORKS, Network
from calibrant.bench.train.ranks import average_gradients, chosen_device, ranks, spread_buffers
from calibrant.losses.base import summed_over_ranks
from calibrant.losses.fedlas import FeDLaS
from calibrant.losses.focal import AdaFocal
from calibrant.losses.registry import LOSSES, loss_name

Told = Callable[[int, int], object]
"""Told (steps done, steps in all)."""
PAPERS: dict[str, dict[str, Any]] = {"fedlas_ls": {"theta": 0.95}, "fedlas_mbls": {"theta": 0.95}}
"""Options of losses where the papers' for CIFAR-10 differ from our defaults."""


@dataclass(frozen=True)
class Recipe:
    """How a network is trained; the defaults are those of the papers.

    Attributes
    ----------
    network, loss : str
        Names from ``NETWORKS`` and ``LOSSES``.
    loss_options : dict, optional
        Those of the papers by default.
    epochs : int
    milestones : tuple of float
        Shares of the epochs after which the learning rate is divided by ten.
    batch : int
    rate, momentum, decay : float
        Of stochastic gradient descent.
    clip : float
        Largest norm of the gradient of the network.
    augment : bool
        Shift by up to four pixels and mirror.
    mixup : float
        Mix pairs of images and their losses with shares from a Beta distribution with these
        parameters (Zhang et al. 2018); 0 mixes nothing.
    seed : int
    half : bool
        Compute in bfloat16 where that keeps precision.
    compiled : bool
        Compile the network first.
    """

    network: str = "resnet18"
    loss: str = "ce"
    loss_options: dict[str, Any] = field(default_factory=dict)
    epochs: int = 350
    milestones: tuple[float, ...] = (150 / 350, 250 / 350)
    batch: int = 128
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 5e-4
    clip: float = 2.0
    augment: bool = True
    mixup: float = 0.0
    seed: int = 0
    half: bool = False
    compiled: bool = False

    def __post_init__(self) -> None:
        """Check the names and numbers, and fill in the options of the papers."""
        for kind, name, known in (
            ("network", self.network, NETWORKS),
            ("loss", self.loss, LOSSES),
        ):
            if name not in known:
                raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(known)}")
        for name, value in (("epochs", self.epochs), ("batch", self.batch)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 <= self.mixup < math.inf:
            raise ValueError(f"mixup must be at least 0, got {self.mixup}")
        options = {**PAPERS.get(self.loss, {}), **self.loss_options}
        object.__setattr__(self, "loss_options", options)  # the class is frozen
        object.__setattr__(self, "milestones", tuple(self.milestones))

    def rate_at(self, epoch: int) -> float:
        """Learning rate of an epoch, counted from 0."""
        starts = (max(1, round(share * self.epochs)) for share in self.milestones)
        passed = sum(epoch >= start for start in starts)
        return self.rate * 0.1**passed


class Outputs(NamedTuple):
    """What a network says about images, on the CPU in float32."""

    logits: Tensor
    features: Tensor
    labels: Tensor


class _Both(nn.Module):
    """Logits and features in one call, which wrappers for speed and for several ranks want."""

    def __init__(self, network: Network) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.network.features(images)
        with torch.autocast(features.device.type, enabled=False):
            # steps of bfloat16 would show in the confidence
            return self.network.last(features.float()), features


class Trainer:
    """One network, one loss, one set of images; can stop after any epoch and go on later.

    Under ``torchrun`` (see :func:`calibrant.bench.train.ranks.joining`) every process takes its share
    of each batch, gradients are averaged, and the first process writes the files. Moving figures
    of batch normalisation are those of the first process, as usual.

    Parameters
    ----------
    parts : Parts
    classes : int
    recipe : Recipe
    folder : path
        Holds the checkpoint and the log; a run that was stopped in it goes on.
    device : str, optional
    tensorboard : bool
        Write the log for TensorBoard as well.

    Attributes
    ----------
    network : Network
    loss : nn.Module
    epoch : int
        Epochs that are done.
    log : list of dict
        Figures of each of them.
    """

    def __init__(
        self,
        parts: Parts,
        classes: int,
        recipe: Recipe,
        folder: str | os.PathLike[str],
        *,
        device: str | None = None,
        tensorboard: bool = False,
    ) -> None:
        _check_parts(parts, classes)
        self.recipe = recipe
        self.folder = Path(folder)
        self.ranks = ranks()
        self.about = {
            **asdict(recipe),
            "data": digest_of(*parts),
            "processes": self.ranks.size,
        }
        self.device = chosen_device(device)
        torch.manual_seed(recipe.seed)
        channels = parts.train.images.shape[1]
        network = NETWORKS[recipe.network](classes=classes, channels=channels)
        self.network = network.to(self.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stubs miss it
        self.loss = make_loss(recipe, classes, len(parts.train.labels)).to(self.device)
        self.parts = {name: _on_device(part, self.device) for name, part in parts._asdict().items()}
        self.mean, self.deviation = (x.to(self.device) for x in channel_figures(parts.train.images))
        self.optimiser = torch.optim.SGD(
            [*self.network.parameters(), *self.loss.parameters()],
            lr=recipe.rate,
            momentum=recipe.momentum,
            weight_decay=recipe.decay,
        )
        self.both: Any = _Both(self.network)
        if self.ranks.size > 1:
            self.both = nn.parallel.DistributedDataParallel(self.both)
        if recipe.compiled:
            self.both = torch.compile(self.both)
        self.epoch = 0
        self.best = -1.0
        self.signs: Tensor | None = None
        self.log: list[dict[str, float]] = []
        self.board = _board(self.folder) if tensorboard and self.first else None
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.checkpoint.exists():
            self._resume()

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.ranks.rank == 0

    @property
    def checkpoint(self) -> Path:
        """Where a run that was stopped goes on from."""
        return self.folder / "checkpoint.pt"

    def run(self, progress: Told | None = None) -> None:
        """Train to the end; every epoch is logged and kept."""
        while self.epoch < self.recipe.epochs:
            start = time.perf_counter()
            found = self._train_epoch(progress)
            spread_buffers(self.network)
            val = self.outputs("val")
            found["val_accuracy"] = _accuracy(val)
            if isinstance(self.loss, AdaFocal):
                self.loss.observe(val.logits.to(self.device), val.labels.to(self.device))
            self.epoch += 1
            self.log.append({"epoch": self.epoch, **found, "seconds": time.perf_counter() - start})
            if self.first:
                self._keep(found["val_accuracy"])

    def _keep(self, accuracy: float) -> None:
        if accuracy > self.best:
            self.best = accuracy
            _write(self.folder / "best.pt", self.network.state_dict())
        self._save()
        with replacing(self.folder / "log.csv") as path, open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(self.log[-1]), lineterminator="\n")
            writer.writeheader()
            for row in self.log:
                writer.writerow({k: f"{v:.6g}" for k, v in row.items()})
        if self.board is not None:
            for name, value in self.log[-1].items():
                self.board.add_scalar(name, value, self.epoch)
            self.board.flush()

    def _train_epoch(self, progress: Told | None) -> dict[str, float]:
        recipe, train = self.recipe, self.parts["train"]
        for group in self.optimiser.param_groups:
            group["lr"] = recipe.rate_at(self.epoch)
        self.network.train()
        self.loss.train()
        total, gate = torch.zeros((), device=self.device), _Gate(self.loss, len(train.labels))
        steps = math.ceil(len(train.labels) / recipe.batch)
        # of the epoch alone, so that a run that goes on later takes the same steps
        random = torch.Generator().manual_seed(1_000_003 * recipe.seed + self.epoch)
        for step, (index, share) in enumerate(self._batches(random)):
            images = self._scaled(train.images[index])
            if recipe.augment:
                images = augmented(images, random)
            loss = self._loss(images, index, random)
            self.optimiser.zero_grad(set_to_none=True)
            (loss * share).backward()
            average_gradients(self.loss.parameters())
            nn.utils.clip_grad_norm_(self.network.parameters(), recipe.clip)
            self.optimiser.step()
            total += loss.detach() * len(index)
            gate.see(index)
            if progress is not None:
                progress(self.epoch * steps + step + 1, recipe.epochs * steps)
        value = float(summed_over_ranks(total)) / len(train.labels)
        if not math.isfinite(value):
            raise ValueError(
                f"the loss became {value} in epoch {self.epoch + 1}: a lower rate may help"
            )
        figures = gate.figures(self.signs)
        self.signs = gate.signs
        return {"loss": value, "rate": recipe.rate_at(self.epoch), **figures}

    def _loss(self, images: Tensor, index: Tensor, random: torch.Generator) -> Tensor:
        """Loss of a batch, mixed with itself in another order where the recipe says so."""
        labels = self.parts["train"].labels
        if not self.recipe.mixup:
            with self._precision():
                logits, features = self.both(images)
            return cast(Tensor, self.loss(logits, labels[index], features, index))
        share = _beta(self.recipe.mixup, random)
        other = torch.randperm(len(index), generator=random).to(self.device)
        with self._precision():
            logits, features = self.both(share * images + (1 - share) * images[other])
        own, others = (
            self.loss(logits, labels[which], features, which) for which in (index, index[other])
        )
        return cast(Tensor, share * own + (1 - share) * others)

    def _batches(self, random: torch.Generator) -> Iterator[tuple[Tensor, float]]:
        """Yield indices of this process, and what their mean counts beside those of the others."""
        rank, size = self.ranks
        order = torch.randperm(len(self.parts["train"].labels), generator=random)
        if size > 1:
            random.manual_seed(random.initial_seed() + 1_000_000_007 * (rank + 1))
        for batch in order.to(self.device).split(self.recipe.batch):
            if len(batch) >= size:  # a last one that is too small for all is left out
                index = batch[rank::size]
                yield index, len(index) * size / len(batch)

    @torch.no_grad()
    def outputs(self, name: str | Part, size: int = 1000) -> Outputs:
        """Logits and features of a part, or of other images of the same shape."""
        part = self.parts[name] if isinstance(name, str) else _on_device(name, self.device)
        self.network.eval()
        logits, features = [], []
        for start in range(0, len(part.labels), size):
            with self._precision():
                found = _Both(self.network)(self._scaled(part.images[start : start + size]))
            logits.append(found[0].float().cpu())
            features.append(found[1].float().cpu())
        return Outputs(torch.cat(logits), torch.cat(features), part.labels.cpu())

    def use_best(self) -> None:
        """Take the weights with the best validation accuracy."""
        state = torch.load(self.folder / "best.pt", map_location=self.device, weights_only=True)
        self.network.load_state_dict(state)

    def predictions(self, others: Mapping[str, Part] | None = None) -> dict[str, Any]:
        """Arrays of a prediction file: val, test and other splits, and the last layer."""
        arrays: dict[str, Any] = {}
        wanted: dict[str, str | Part] = {"val": "val", "test": "test", **(others or {})}
        for name, part in wanted.items():
            found = self.outputs(part)
            arrays[f"{name}_logits"] = found.logits.numpy()
            arrays[f"{name}_labels"] = found.labels.numpy()
            arrays[f"{name}_features"] = found.features.half().numpy()
        arrays["weight"] = self.network.last.weight.detach().cpu().numpy()
        arrays["bias"] = self.network.last.bias.detach().cpu().numpy()
        return arrays

    def _precision(self) -> AbstractContextManager[Any]:
        if not self.recipe.half:
            return nullcontext()
        return torch.autocast(self.device.type, torch.bfloat16)

    def _scaled(self, images: Tensor) -> Tensor:
        scaled = (images.float() / 255 - self.mean) / self.deviation
        return scaled.contiguous(memory_format=torch.channels_last)

    def _save(self) -> None:
        state = {
            "recipe": self.about,
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
        changed = [name for name, value in state["recipe"].items() if self.about.get(name) != value]
        if changed:
            raise ValueError(
                f"{self.folder} holds a run with another {' and '.join(changed)} "
                f"({', '.join(repr(state['recipe'][name]) for name in changed)}): name another "
                "folder, or remove that one"
            )
        self.network.load_state_dict(state["network"])
        self.loss.load_state_dict(state["loss"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.epoch, self.best, self.log = state["epoch"], state["best"], state["log"]
        self.signs = state["signs"]


def _check_parts(parts: Parts, classes: int) -> None:
    for name, part in parts._asdict().items():
        if len(part.labels) == 0:
            raise ValueError(f"the {name} part must have images, got none")
        labels = part.labels[part.labels != IGNORED]
        wrong = labels[(labels < 0) | (labels >= classes)]
        if wrong.size:
            raise ValueError(
                f"labels of the {name} part must be from 0 to {classes - 1}, or {IGNORED} to be "
                f"ignored, for classes={classes}: got {wrong[0]}"
            )


def channel_figures(images: np.ndarray[Any, Any]) -> tuple[Tensor, Tensor]:
    """Mean and deviation of each channel, both ``(1, channels, 1, 1)``, of values from 0 to 1."""
    planes = images.swapaxes(0, 1).reshape(images.shape[1], -1)
    # counts of the 256 values: as exact as it gets, and without a copy in floating point
    counts = np.stack([np.bincount(plane, minlength=256) for plane in planes]) / planes.shape[1]
    values = np.arange(256) / 255
    mean = counts @ values
    deviation = np.sqrt(np.maximum(counts @ values**2 - mean**2, 0))
    deviation[deviation == 0] = 1.0  # a channel without contrast
    return tuple(
        torch.tensor(x, dtype=torch.float32).reshape(1, -1, 1, 1) for x in (mean, deviation)
    )  # type: ignore[return-value]  # two of them


def _board(folder: Path) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError(
            f"a log for TensorBoard needs it ({error}): pip install tensorboard"
        ) from error
    return SummaryWriter(str(folder))


class _Tensors(NamedTuple):
    images: Tensor
    labels: Tensor


def _on_device(part: Part, device: torch.device) -> _Tensors:
    return _Tensors(*(torch.as_tensor(values).to(device) for values in part))


def _write(path: Path, state: Any) -> None:
    """Write to a temporary name first: a kill leaves the old file or the new one."""
    with replacing(path) as temporary:
        torch.save(state, temporary)


def _accuracy(found: Outputs) -> float:
    return float((found.logits.argmax(-1) == found.labels).double().mean())


def make_loss(recipe: Recipe, classes: int, samples: int) -> nn.Module:
    """The loss of a recipe; some need to know the number of classes or of examples."""
    needed = {"fedlas_ls": {"classes": classes}, "fedlas_mbls": {"classes": classes}}
    needed["crl"] = {"samples": samples}
    options = {**needed.get(recipe.loss, {}), **recipe.loss_options}
    if isinstance(options.get("base"), str) and not recipe.loss.startswith("fedlas"):
        options["base"] = LOSSES[loss_name(options["base"])]()
    try:
        return LOSSES[recipe.loss](**options)
    except TypeError as error:
        raise ValueError(f"options of the loss {recipe.loss}: {error}") from error


def augmented(images: Tensor, random: torch.Generator, shift: int = 4) -> Tensor:
    """Shift every image by up to ``shift`` pixels and mirror half of them, ``(n, c, h, w)``."""
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
    which = torch.arange(count, device=images.device)[:, None, None]
    found = padded.permute(0, 2, 3, 1)[which, rows[:, :, None], columns[:, None, :]]
    return found.permute(0, 3, 1, 2)


def _beta(parameter: float, random: torch.Generator) -> float:
    """A draw from a symmetric Beta distribution, from the seed of an epoch."""
    seed = int(torch.randint(1 << 62, (), generator=random))
    return float(np.random.default_rng(seed).beta(parameter, parameter))


class _Gate:
    """What the gate of FeDLaS does in an epoch; nothing for other losses."""

    def __init__(self, loss: nn.Module, samples: int) -> None:
        self.loss = loss if isinstance(loss, FeDLaS) else None
        self.signs: Tensor | None = None
        if self.loss is not None:
            device = self.loss.mean_.device
            self.signs = torch.zeros(samples, dtype=torch.int8, device=device)
            self.lowered = torch.zeros((), device=device)
            self.ratio = torch.zeros((), device=device)

    def see(self, index: Tensor) -> None:
        """Note the gate's answers about the last batch."""
        if self.loss is None or self.signs is None:
            return
        signs, weights = self.loss.last
        self.signs[index] = signs.to(torch.int8)
        self.lowered += (weights < self.loss.alpha).sum()
        self.ratio += weights.sum() / self.loss.alpha

    def figures(self, before: Tensor | None) -> dict[str, float]:
        """Shares of the samples, and how many changed their sign since the last epoch."""
        if self.loss is None or self.signs is None:
            return {}
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
