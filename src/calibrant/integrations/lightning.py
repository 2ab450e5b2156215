"""A callback for Lightning that logs calibration after each validation and test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import BatchSampler, DistributedSampler

from calibrant._core.checks import IGNORED
from calibrant._core.messages import comma_separated, needed
from calibrant.integrations.logged import PREFIX, scalars
from calibrant.metrics.accumulator import Accumulator
from calibrant.metrics.evaluation import Evaluation


def _callback_classes() -> list[type]:
    """Return ``Callback`` of both packages of Lightning, since trainers check its class.

    ``lightning`` and ``pytorch_lightning`` are copies of each other, with classes of their own.
    """
    classes = []
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with suppress(ImportError):
            classes.append(import_module(name).Callback)
    if not classes:
        with needed("this callback needs Lightning", "'calibrant[lightning]'"):
            import_module("lightning.pytorch")
    return classes


class CalibrationCallback(*_callback_classes()):  # type: ignore[misc]  # known at run time
    """Log the calibration of each validation and test run, and keep it in ``evaluations``.

    Batches are added to an accumulator as they come, so that logits are not kept. With several
    processes, metrics are those of all examples, and examples that a ``DistributedSampler``
    repeated count once. Sanity checks before a fit are left out.

    Names begin with ``val_calibration/`` and ``test_calibration/``, so that a checkpoint may
    ``monitor="val_calibration/ece"``. If there are several data loaders, Lightning's
    ``/dataloader_idx_1`` and so on is appended.

    Parameters
    ----------
    columns : callable, optional
        ``columns(outputs, batch)`` returns a dictionary with the arguments of
        :meth:`Accumulator.update`: ``logits`` or ``probs``, ``labels``, and perhaps
        ``sample_weight`` or ``by``. By default ``validation_step`` and ``test_step`` return one.
    accumulator : Accumulator, optional
        Its form is used: ``Accumulator(pairs=True)`` logs all metrics, at 9 bytes per example.
    prefix : str
        Name after ``val_`` and ``test_``.
    log : callable, optional
        Called in the first process with ``(evaluation, step)`` after each run, to log more than
        scalars, such as a figure.

    Attributes
    ----------
    evaluations : dict
        The last :class:`Evaluation` of each name, such as ``val_calibration``.

    Examples
    --------
    ::

        class Classifier(LightningModule):
            def validation_step(self, batch, batch_idx):
                images, labels = batch
                return {"logits": self(images), "labels": labels}


        trainer = Trainer(callbacks=[CalibrationCallback()])
    """

    def __init__(
        self,
        columns: Callable[[Any, Any], Mapping[str, Any]] | None = None,
        *,
        accumulator: Accumulator | None = None,
        prefix: str = PREFIX,
        log: Callable[[Evaluation, int], object] | None = None,
    ) -> None:
        self.columns = columns or _named
        self.accumulator = accumulator or Accumulator()
        self.prefix = prefix
        self._log = log  # Lightning gives its callbacks a log of their own
        self.evaluations: dict[str, Evaluation] = {}
        self._streams: list[Accumulator] = []

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the batches of earlier runs."""
        self._streams = [self.accumulator.like() for _ in trainer.num_val_batches]

    def on_test_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Forget the batches of earlier runs."""
        self._streams = [self.accumulator.like() for _ in trainer.num_test_batches]

    def on_validation_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Add the outputs of a batch; after it come its number and that of its loader."""
        if not trainer.sanity_checking:
            self._add(trainer.val_dataloaders, *batch)

    def on_test_batch_end(self, trainer: Any, pl_module: Any, *batch: Any) -> None:
        """Add the outputs of a batch, as in validation."""
        self._add(trainer.test_dataloaders, *batch)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics."""
        if not trainer.sanity_checking:
            self._finish(trainer, pl_module, f"val_{self.prefix}")

    def on_test_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log the metrics."""
        self._finish(trainer, pl_module, f"test_{self.prefix}")

    def _add(
        self, loaders: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Add a batch of one of the loaders, which may be a mapping, a list, or only one."""
        several = list(loaders.values()) if isinstance(loaders, Mapping) else loaders
        several = several if isinstance(several, (list, tuple)) else [several]
        columns = dict(self.columns(outputs, batch))
        labels = _ignore_repeated(columns["labels"], several[dataloader_idx], batch_idx)
        columns["labels"] = labels
        self._streams[dataloader_idx].update(**columns)

    def _finish(self, trainer: Any, pl_module: Any, name: str) -> None:
        several = len(self._streams) > 1
        for i, stream in enumerate(self._streams):
            if dist.is_available() and dist.is_initialized():
                stream.all_reduce()
            evaluation, ending = stream.compute(), f"/dataloader_idx_{i}" if several else ""
            self.evaluations[name + ending] = evaluation
            values = {key + ending: value for key, value in scalars(evaluation, name).items()}
            # every process has the same values; their mean satisfies Lightning's check
            pl_module.log_dict(values, sync_dist=True, add_dataloader_idx=False)
            if self._log is not None and trainer.is_global_zero:
                self._log(evaluation, trainer.global_step)
        self._streams = []


def _named(outputs: Any, batch: Any) -> Mapping[str, Any]:
    if isinstance(outputs, Mapping) and "labels" in outputs:
        known = ("logits", "probs", "labels", "sample_weight", "by")
        return {name: outputs[name] for name in known if name in outputs}
    got = type(outputs).__name__
    if isinstance(outputs, Mapping):
        got = f"the keys {comma_separated(map(str, outputs))}"
    raise TypeError(
        "validation_step and test_step must return a dictionary with logits and labels, got "
        f"{got}: return one, or pass CalibrationCallback(lambda outputs, batch: ...)"
    )


def _ignore_repeated(labels: Any, loader: Any, batch_idx: int) -> Any:
    """Return labels of a batch, with those of examples that a sampler repeated ignored.

    A ``DistributedSampler`` repeats examples if their number is no multiple of the number of
    processes; counted twice, they would change every metric. Labels are left alone if they are
    not one (row) for each example of the batch, since it is not known where those examples are.
    """
    batches = getattr(loader, "batch_sampler", None)
    sampler = getattr(batches, "sampler", None)
    # a subclass may order its batches in another way
    if type(batches) is not BatchSampler or not isinstance(sampler, DistributedSampler):
        return labels
    start, targets = batch_idx * batches.batch_size, torch.as_tensor(labels)
    if len(targets) != min(batches.batch_size, len(sampler) - start):
        return labels
    local = torch.arange(start, start + len(targets), device=targets.device)
    dataset: Any = sampler.dataset
    repeated = local * sampler.num_replicas + sampler.rank >= len(dataset)
    return targets.masked_fill(repeated.reshape(-1, *[1] * (targets.ndim - 1)), IGNORED)
