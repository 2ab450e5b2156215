"""Logits of a model: those of a data loader in memory, or of shards of inputs in files."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from calibrant._core.checks import IGNORED, check_whole, warn_of_probs, warnings_at_caller
from calibrant._core.class_names import ClassNumbers, LabelError
from calibrant._core.engines import current_work
from calibrant._core.messages import comma_separated, printable
from calibrant._core.torch_models import (
    device_of,
    evaluating,
    layer_inputs,
    logits_of,
    moved,
    name_of,
    own_device,
    own_rank,
    taken_apart,
)
from calibrant.data.dataset import Dataset
from calibrant.data.files import open_inputs
from calibrant.data.formats import Array, OutputFolder
from calibrant.data.shards import (
    LABEL_NAMES,
    Column,
    Columns,
    NoGoodShard,
    Place,
    Report,
    located,
    read_all,
)
from calibrant.deploy.calibrated_model import Layer
from calibrant.deploy.models import (
    Classifier,
    _array_classifier,
    _forget_classifier,
    _load_classifier,
    _ModelName,
)
from calibrant.workflows.apply import empty_array, write_columns
from calibrant.workflows.receipts import WrittenShards, shard_jobs, warn_of_orphans, write_shards

_FORMATS = (".npz", ".safetensors", ".parquet", ".arrow", ".feather")
"""Formats of inputs in which logits are written; others become ``.npz``."""


@warnings_at_caller()
def collect(
    model: nn.Module,
    loader: Iterable[Any],
    *,
    last_layer: Layer | None = None,
    device: torch.device | str | None = None,
) -> tuple[Tensor, ...]:
    """Collect logits and labels for the fit of a calibrator.

    The model runs without gradients in ``eval`` mode, and its layers return to their modes.

    Parameters
    ----------
    model : nn.Module
        With outputs as for :func:`calibrated`.
    loader : iterable of batches
        A ``DataLoader``, for instance. A batch is ``(inputs, labels)``, or ``(input, input, ...,
        labels)``, or a dictionary with ``labels`` whose other items are the inputs by name.
    last_layer : nn.Module or str, optional
        Also return the inputs of this layer.
    device : optional
        The model is moved there. By default it stays where its parameters are.

    Returns
    -------
    logits : (n, ..., classes)
    labels : (n, ...)
    features : (n, ..., width)
        With ``last_layer``. All are on the CPU. If batches have texts of different lengths, only
        tokens with a label are returned, one per row.

    Examples
    --------
    >>> network = nn.Linear(2, 3)
    >>> loader = [(torch.randn(4, 2), torch.tensor([0, 1, 2, 0])) for _ in range(5)]
    >>> logits, labels = collect(network, loader)
    >>> logits.shape, labels.shape
    (torch.Size([20, 3]), torch.Size([20]))
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be an nn.Module, got {type(model).__name__}: pass the model first, then "
            "the loader"
        )
    if device is not None:
        model.to(device)
    place = device_of(model, device or "cpu")
    layer = None if last_layer is None else name_of(model, last_layer)
    batches: list[list[Tensor]] = []
    with evaluating(model), torch.no_grad():
        for batch in loader:
            inputs, named, labels = taken_apart(batch)
            inputs, named = moved(inputs, place), moved(named, place)
            targets = torch.as_tensor(labels)
            if targets.ndim == 0:
                raise ValueError(
                    "labels of a batch must be (n, ...), got a single one: examples of a dataset "
                    "become batches in torch.utils.data.DataLoader(dataset, batch_size=64)"
                )
            with layer_inputs(model, layer) if layer else nullcontext() as features:
                logits = logits_of(model(*inputs, **named))
                found = [logits, targets, *([features()] if features else [])]
            batches.append([values.detach().cpu() for values in found])
    if not batches:
        raise ValueError("the loader must have at least one batch, got none")
    if len({labels.shape[1:] for _, labels, *_ in batches}) > 1:
        for arrays in batches:
            flat = arrays[1].reshape(-1)
            rows = [arrays[0].flatten(0, -2), flat, *(x.flatten(0, -2) for x in arrays[2:])]
            arrays[:] = [values[flat != IGNORED] for values in rows]
    whole = tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    warn_of_probs(whole[0], "if they are, collect the outputs of the layer before")
    return whole


def collect_shards(
    model: str | os.PathLike[str] | nn.Module,
    data: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    inputs: Sequence[str] | None = None,
    labels: str | None = None,
    last_layer: str | None = None,
    weights: str | os.PathLike[str] | None = None,
    batch_size: int = 32,
    length: int | None = None,
    device: str | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    skip_bad: bool = False,
) -> WrittenShards:
    """Run a classifier over shards of inputs, and write a file of logits for each.

    The files have ``logits``, ``labels`` where there are any, and the other columns of the input,
    but for those that the model has read. Each takes its name when it is complete. A run that was
    interrupted is repeated with the same call: finished shards are kept as long as the input, the
    weights of the model, the settings and the output are unchanged. Under ``torchrun`` each process
    takes a share of the shards.

    Parameters
    ----------
    model : str, path or nn.Module
        A Hugging Face folder, or a name on the hub, of a classifier of texts or images;
        ``"package.module:factory"``, where the factory returns an ``nn.Module``; a ``.pt2`` file of
        ``torch.export``; or a module, unless :func:`calibrant.use` has set an executor,
        each process of which loads the model once.
    data : path
        A file, a folder or a glob of shards: ``.npz``, ``.npy``, ``.safetensors``, ``.parquet`` or
        ``.arrow``, and for texts also ``.csv`` and ``.jsonl``.
    out : path
        A folder, created where its parent exists, or an address such as ``s3://bucket/logits``.
        Files have the names of the input, and its format if that holds arrays, else ``.npz``.
    inputs : sequence of str, optional
        Columns that the model takes, in this order: by default ``inputs``, for models of texts
        ``text`` and of images ``pixel_values``. Two columns of text are pairs.
    labels : str, optional
        Column of labels: numbers of classes, or their names in the configuration of the model. By
        default ``labels``, ``label``, ``y_true``, ``y`` or ``target``, if there is one.
    last_layer : str, optional
        Also write the inputs of this layer, as ``features``.
    weights : path, optional
        A ``.safetensors`` file with the state dict of what a factory returns.
    batch_size : int
        Examples that the model gets at a time, and that are in memory.
    length : int, optional
        Texts are truncated to this number of tokens. By default as many as the model takes.
    device : str, optional
        A torch device; with ``cuda`` each process of ``torchrun`` gets its own GPU.
    dtype : str
        Precision of the model; ``auto`` leaves it as it is. Logits are float32 or wider.
    trust_remote_code : bool
        Run code that comes with the model. A ``.pt2`` file may hold some.
    skip_bad : bool
        Leave out shards that cannot be read or that the model refuses: ``skipped`` of the result
        has their errors by path.

    Examples
    --------
    >>> import tempfile
    >>> from calibrant.data import open_dataset
    >>> network = nn.Linear(4, 3)
    >>> with tempfile.TemporaryDirectory() as home:
    ...     os.mkdir(f"{home}/raw")
    ...     for i in range(2):
    ...         np.savez(f"{home}/raw/{i}.npz", inputs=np.eye(4), labels=[0, 1, 2, 2])
    ...     collect_shards(network, f"{home}/raw", f"{home}/logits").describe()
    ...     open_dataset(f"{home}/logits").split().logits.shape
    'wrote 2 shards'
    (8, 3)
    """
    check_whole("batch_size", batch_size)
    rank, ranks = own_rank()
    executor = current_work().executor
    with ExitStack() as stack:
        named: _ModelName | Classifier
        if isinstance(model, nn.Module):
            kind = type(model).__name__
            if executor is not None:
                raise ValueError(
                    "with an executor the model must be a name, so that each process can load it, "
                    f"got a {kind}"
                )
            for option, value in {"weights": weights, "length": length, "dtype": dtype}.items():
                if value not in (None, "auto"):
                    raise ValueError(
                        f"{option} is for models that are loaded by a name, got a {kind}"
                    )
            stack.enter_context(evaluating(model))
            named = _array_classifier(model if device is None else model.to(own_device(device)))
        else:
            name, file = os.fspath(model), None if weights is None else os.fspath(weights)
            call = uuid.uuid4().hex
            named = _ModelName(name, file, length, device, dtype, trust_remote_code, call)
            stack.callback(_forget_classifier)  # else it would keep the memory of a GPU
        run = _Collection.of(named, inputs, labels, last_layer, batch_size)
        if executor is not None:
            _forget_classifier()
        dataset = open_inputs(data, skip_bad=skip_bad)
        shards, skipped = _usable(dataset, run, skip_bad)
        folder = OutputFolder(os.fspath(out))
        jobs = shard_jobs(dataset, shards, folder, run.settings, rows=run.rows, formats=_FORMATS)
        if rank == 0:
            warn_of_orphans(jobs)
        write = partial(_write, run)
        result = write_shards(jobs[rank::ranks], write, maker="model", skip_bad=skip_bad)
    skipped |= result.skipped
    if len(skipped) == len(dataset.skipped) + len(dataset.files):
        raise NoGoodShard(dataset.path, next(iter(skipped.values())))
    return replace(result, skipped=skipped)


@dataclass(frozen=True)
class _Collection:
    """A model, and the columns that it reads and writes."""

    model: _ModelName | Classifier
    fingerprint: str  # of the model
    inputs: tuple[str, ...]
    labels: str | None
    last_layer: str | None
    batch_size: int

    @classmethod
    def of(
        cls,
        model: _ModelName | Classifier,
        inputs: Sequence[str] | None,
        labels: str | None,
        last_layer: str | None,
        batch_size: int,
    ) -> _Collection:
        """Load the model, and check that it has the layer."""
        loaded = model if isinstance(model, Classifier) else _load_classifier(model)
        if last_layer is not None:
            name_of(loaded.module, last_layer)
        columns = loaded.columns if inputs is None else tuple(inputs)
        if not columns:
            raise ValueError("inputs must name at least one column, got none")
        return cls(model, loaded.fingerprint, columns, labels, last_layer, batch_size)

    @property
    def settings(self) -> str:
        """Everything that decides what is written, besides the input."""
        return json.dumps([self.fingerprint, self.inputs, self.labels, self.last_layer])

    def loaded(self) -> Classifier:
        """Return the model, which must be the same in every process."""
        if isinstance(self.model, Classifier):
            return self.model
        model = _load_classifier(self.model)
        if model.fingerprint != self.fingerprint:
            raise ChildProcessError(
                f"{self.model.name} has other weights in another process: let it load its weights, "
                "or pass them with weights="
            )
        return model

    def rows(self, shard: Dataset) -> int:
        """Return the number of examples of a shard."""
        return shard.files[0][self.inputs[0]].shape[0]

    def label_column(self, columns: Columns) -> str | None:
        """Return the name of the column of labels, if there is one."""
        if self.labels is not None:
            return self.labels
        others = [name for name in columns if name not in self.inputs]
        return next((name for name in LABEL_NAMES if name in others), None)

    def check(self, columns: Columns) -> None:
        """Raise unless the inputs and labels are there, with a row for each example."""
        label = self.label_column(columns)
        wanted = [*self.inputs, *([] if label is None else [label])]
        path = next(iter(columns.values())).path
        for name in wanted:
            if name not in columns:
                raise ValueError(
                    f"{path} has no column {name}, only {comma_separated(columns)}: name those "
                    "that the model takes as inputs, and the column of labels"
                )
            columns[name].check_dtype(numeric=False)
        shapes = {name: columns[name].shape for name in wanted}
        if len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values():
            raise ValueError(
                f"{path}: every column needs one row per example, got "
                f"{comma_separated(f'{name} {shape}' for name, shape in shapes.items())}"
            )


def _usable(
    dataset: Dataset, run: _Collection, skip_bad: bool
) -> tuple[list[Dataset], dict[str, str]]:
    """Return a dataset for each file that has the columns, and the errors of others by path."""
    shards, skipped = [], dict(dataset.skipped)
    for file in dataset.files:
        try:
            run.check(file)
            shards.append(replace(dataset, path=file[run.inputs[0]].path, files=[file]))
        except ValueError as problem:
            if not skip_bad:
                raise
            skipped[next(iter(file.values())).path] = str(problem)
    if not shards:
        raise NoGoodShard(dataset.path, next(iter(skipped.values())))
    return shards, skipped


def _write(run: _Collection, shard: Dataset, target: Path, report: Report) -> None:
    """Write the logits of one shard."""
    (columns,) = shard.files
    model, label = run.loaded(), run.label_column(columns)

    def made(folder: Path) -> dict[str, Array]:
        with located(shard.path) as place:
            arrays = _predictions(run, model, columns, folder, place, report)
        if label is not None:
            logits = arrays["logits"]
            classes = logits.shape[1] if logits.ndim == 2 else 2
            arrays["labels"] = _labels(columns[label], model.class_names, classes)
        return arrays

    replaced = ["features"] if run.last_layer else []
    left_out = [*run.inputs, *replaced, *([] if label is None else [label])]
    write_columns(shard, target, made, left_out=left_out)


def _predictions(
    run: _Collection,
    model: Classifier,
    columns: Columns,
    folder: Path,
    place: Place,
    report: Report,
) -> dict[str, Array]:
    """Return the outputs for all rows, in files."""
    rows = columns[run.inputs[0]].shape[0]
    arrays: dict[str, Array] = {}
    place.reading = True
    for batch in zip(*(columns[name].chunks(run.batch_size) for name in run.inputs), strict=True):
        place.reading = False
        for name, values in _of_rows(model, batch, run.last_layer).items():
            if name not in arrays:
                arrays[name] = empty_array(folder, (rows, *values.shape[1:]), values.dtype)
            arrays[name][place.row : place.row + len(values)] = values
        place.row += len(batch[0])
        report(len(batch[0]))
        place.reading = True
    # an empty shard may leave the number of classes open
    return arrays or {"logits": np.zeros((0, len(model.class_names) or 1), np.float32)}


def _of_rows(model: Classifier, batch: Sequence[Array], layer: str | None) -> dict[str, Array]:
    """Return logits and, with a layer, features of a batch."""
    rows, inputs = len(batch[0]), model.encode(batch)
    with torch.no_grad(), ExitStack() as stack:
        features = stack.enter_context(layer_inputs(model.module, layer)) if layer else None
        try:  # whatever a model raises is an error of its inputs
            logits = logits_of(model(inputs))
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(
                f"a batch of {rows} examples does not fit into memory: pass a smaller batch_size "
                f"({error})"
            ) from error
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}".split())[:300]
            raise ValueError(f"the model refused {rows} examples ({reason})") from error
        if logits.isnan().any():
            row = int(logits.isnan().flatten(1).any(1).nonzero()[0])
            raise ValueError(f"logits of example {row} of a batch are NaN: try dtype float32")
        outputs = {"logits": logits.squeeze(-1) if logits.shape[1:] == (1,) else logits}
        if features is not None:
            outputs["features"] = features()
    for name, values in outputs.items():
        if values.ndim == 0 or len(values) != rows:
            raise ValueError(
                f"the model must give a row of {name} for each of {rows} examples, got "
                f"{tuple(values.shape)}"
            )
    wide = {name: x.to(torch.promote_types(x.dtype, torch.float32)) for name, x in outputs.items()}
    return {name: values.cpu().numpy() for name, values in wide.items()}


def _labels(column: Column, names: Sequence[str], classes: int) -> Array:
    """Return labels as numbers of classes; those of text may be their names."""
    values = read_all([column])
    if values.dtype.kind in "iub":
        return values.astype(np.int64)
    if values.dtype.kind != "U":
        return values
    try:
        return ClassNumbers(names or [str(i) for i in range(classes)])(values)
    except LabelError as error:
        problem = f"{column.path}, row {error.row}: {column.key} {error}"
        raise ValueError(printable(problem)) from error
