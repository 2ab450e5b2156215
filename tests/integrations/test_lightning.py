import warnings
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

import calibrant as cal
from tests.support.evaluations import check_scalars, expected_scalars, predictions

pytestmark = [
    # of torch 2.13, used by lightning 2.6
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:The '\\w+_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


@pytest.fixture(scope="module")
def lightning():
    """The library, imported only where its tests run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("lightning", minversion="2.6", exc_type=ImportError)


@pytest.fixture(scope="module")
def module(lightning):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("calibrant.integrations.lightning")


@pytest.fixture(scope="module")
def callback_of(module):
    return module.CalibrationCallback


@pytest.fixture(scope="module")
def ignore_repeated(module):
    return module._ignore_repeated


def network_of(library):
    class Network(library.LightningModule):  # type: ignore[name-defined]
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def training_step(self, batch, _):
            return nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def validation_step(self, batch, _, dataloader_idx=0):
            inputs, labels, weight = batch
            return {"logits": self.layer(inputs), "labels": labels, "sample_weight": weight}

        test_step = validation_step

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return Network()


def loader_of(rng, n):
    inputs = torch.tensor(rng.normal(size=(n, 4)), dtype=torch.float32)
    labels, weight = torch.tensor(rng.integers(3, size=n)), torch.tensor(rng.random(n))
    labels[::9] = -100
    return DataLoader(TensorDataset(inputs, labels, weight), batch_size=8)


def trainer_of(library, callback, **options):
    return library.Trainer(
        callbacks=[callback],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def check(network, trainer, callback, loader, name, ending=""):
    """Metrics in the trainer and in the callback are those of all examples of a loader."""
    inputs, labels, weight = loader.dataset.tensors
    with torch.no_grad():
        logits = network.layer(inputs)
    logged = {
        key.removesuffix(ending): float(value)
        for key, value in trainer.callback_metrics.items()
        if key.endswith(ending)
    }
    options = {"prefix": f"{name}/", "sample_weight": weight, "stream": True}
    check_scalars(logged, logits, labels, tolerance=1e-6, **options)  # Lightning has float32
    exact = expected_scalars(callback.evaluations[name + ending], f"{name}/")
    check_scalars(exact, logits, labels, **options)


@pytest.mark.parametrize("name", ["lightning", "pytorch_lightning"])
def test_validation_and_test_are_measured(rng, callback_of, name):
    seen: list = []
    library = import_module(name)
    callback = callback_of(log=lambda *result: seen.append(result))
    trainer = trainer_of(library, callback, max_epochs=2, accumulate_grad_batches=2)
    network, loader, other = network_of(library), loader_of(rng, 37), loader_of(rng, 19)
    trainer.fit(network, loader, loader)
    check(network, trainer, callback, loader, "val_calibration")
    # twice, and not for the sanity check
    assert [step for _, step in seen] == [3, 6]
    assert seen[1][0] is callback.evaluations["val_calibration"]
    trainer.test(network, other, verbose=False)
    check(network, trainer, callback, other, "test_calibration")


def test_each_of_several_loaders_is_measured(rng, lightning, callback_of):
    callback = callback_of()
    trainer = trainer_of(lightning, callback)
    network, loaders = network_of(lightning), {"a": loader_of(rng, 37), "b": loader_of(rng, 19)}
    trainer.validate(network, loaders, verbose=False)
    for i, loader in enumerate(loaders.values()):
        check(network, trainer, callback, loader, "val_calibration", f"/dataloader_idx_{i}")


def test_columns_come_from_a_function(rng, lightning, callback_of):
    callback = callback_of(
        lambda outputs, batch: {"probs": outputs, "labels": batch[1]},
        accumulator=cal.Accumulator(metrics=["ece"]),
        prefix="own",
    )
    network, loader = network_of(lightning), loader_of(rng, 19)
    network.validation_step = lambda batch, batch_idx: network.layer(batch[0]).softmax(-1)
    trainer = trainer_of(lightning, callback)
    trainer.validate(network, loader, verbose=False)
    inputs, labels, _ = loader.dataset.tensors
    with torch.no_grad():
        ece = cal.ece(network.layer(inputs), labels)
    assert float(trainer.callback_metrics["val_own/ece"]) == pytest.approx(ece, rel=1e-5)


@pytest.mark.parametrize(
    ("returned", "got"), [(None, "NoneType"), ({"loss": 1}, "the keys loss"), (1.0, "float")]
)
def test_outputs_without_labels_are_refused(callback_of, returned, got):
    with pytest.raises(TypeError, match=f"dictionary with logits and labels, got {got}"):
        callback_of().columns(returned, None)


def test_batches_of_all_processes_are_measured(rng, module, callback_of, monkeypatch):
    mine, others = predictions(rng, n=30), predictions(rng, n=20)
    callback = callback_of()
    callback._streams = [callback.accumulator.like().update(*mine)]
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(cal.Accumulator, "all_reduce", lambda stream: stream.update(*others))
    trainer = SimpleNamespace(is_global_zero=True, global_step=1)
    callback.on_test_epoch_end(trainer, SimpleNamespace(log_dict=lambda *_, **__: None))
    both = [np.concatenate(parts) for parts in zip(mine, others, strict=True)]
    expected = cal.evaluate(*both)["nll"].value
    assert callback.evaluations["test_calibration"]["nll"].value == pytest.approx(expected)


# examples that a sampler repeats


def sampled_loader(rank, logits, labels, ranks=2, shuffle=False):
    data = TensorDataset(torch.from_numpy(logits), torch.from_numpy(labels))
    sampler: DistributedSampler = DistributedSampler(
        data, ranks, rank, shuffle=shuffle, drop_last=False
    )
    return DataLoader(data, batch_size=4, sampler=sampler)


@pytest.mark.parametrize("n", [1, 36, 37])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("ranks", [2, 5])
def test_examples_that_a_sampler_repeats_count_once(ignore_repeated, rng, n, ranks, shuffle):
    logits, labels = rng.normal(size=(n, 3)), rng.integers(3, size=n)
    stream = cal.Accumulator(level=None)
    for rank in range(ranks):  # stand for processes
        own, loader = stream.like(), sampled_loader(rank, logits, labels, ranks, shuffle)
        for i, (batch, targets) in enumerate(loader):
            own.update(batch, ignore_repeated(targets, loader, i))
        stream.merge(own)
    result, whole = stream.compute(), cal.evaluate(logits, labels, level=None)
    assert result.n == n
    np.testing.assert_array_equal(result.bins.count, whole.bins.count)
    assert result["nll"].value == pytest.approx(whole["nll"].value, rel=1e-12)


def test_labels_of_tokens_are_ignored_by_text(ignore_repeated, rng):
    logits, labels = rng.normal(size=(3, 3)), rng.integers(3, size=(3, 7))
    loader = sampled_loader(1, logits, labels)
    result = ignore_repeated(torch.from_numpy(labels[[1, 0]]), loader, 0)
    assert (result[1] == -100).all()
    assert result[0].tolist() == labels[1].tolist()


class OtherOrder(BatchSampler):
    pass


@pytest.mark.parametrize("case", ["one process", "flat tokens", "other order", "no loader"])
def test_labels_are_left_alone_where_the_order_is_not_known(ignore_repeated, rng, case):
    logits, labels = predictions(rng, n=3)
    targets, loader = torch.from_numpy(labels[[1, 0]]), sampled_loader(1, logits, labels)
    if case == "one process":
        loader = DataLoader(loader.dataset, batch_size=4)
    elif case == "flat tokens":
        targets = torch.cat([targets, targets])
    elif case == "other order":
        batches = OtherOrder(loader.sampler, 4, drop_last=False)
        loader = DataLoader(loader.dataset, batch_sampler=batches)
    assert ignore_repeated(targets, None if case == "no loader" else loader, 0) is targets
