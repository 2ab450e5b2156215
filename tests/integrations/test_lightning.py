import warnings
from importlib import import_module

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calibrant as cal
from tests.support.evaluations import check_scalars, expected_scalars

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
def callback_of(lightning):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return import_module("calibrant.integrations.lightning").CalibrationCallback


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
