"""Train a classifier with Lightning, calibrate it, and keep both.

Run it with ``python examples/lightning_example.py``; it takes seconds, and needs lightning and,
for the data, scikit-learn.
"""

import sys
import tempfile
from pathlib import Path

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calibrant as cal
from calibrant.deploy import CalibratedModel, calibrated, collect


def loaders():
    """Digits to train on, to calibrate on and to measure on."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32)[order] / 16
    images += 0.3 * torch.randn(images.shape)  # without noise there is little to be unsure of
    labels = torch.tensor(labels)[order]
    parts = zip(images.split([300, 700, 797]), labels.split([300, 700, 797]), strict=True)
    return [DataLoader(TensorDataset(*part), batch_size=50) for part in parts]


class Classifier(L.LightningModule):
    """A small network; ``forward`` gives logits, which is all that is asked of it."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))

    def forward(self, images):
        """Give the logits."""
        return self.network(images)

    def training_step(self, batch, _):
        """Give the loss."""
        images, labels = batch
        return nn.functional.cross_entropy(self(images), labels)

    def configure_optimizers(self):
        """Give the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main(folder):
    """Print the figures before and after, and return them."""
    L.seed_everything(0, verbose=False)
    train_loader, val_loader, test_loader = loaders()
    classifier = Classifier()
    trainer = L.Trainer(
        max_epochs=30,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(classifier, train_loader)

    # Learn from images that the network has not seen in training, measure on yet others.
    calibrator = cal.TemperatureScaling().fit(*collect(classifier, val_loader))
    logits, labels = collect(classifier, test_loader)
    effect = cal.effect(calibrator, {"logits": logits.numpy(), "labels": labels.numpy()})
    print(f"temperature {calibrator.temperature_:.2f}")
    for name in ("accuracy", "ece", "nll"):
        print(f"{name:<8} {effect.before[name].value:.4f} -> {effect.after[name].value:.4f}")

    # Lightning keeps the network, calibrant the calibrator and a card with the figures.
    folder = Path(folder)
    model = calibrated(classifier, calibrator)
    trainer.save_checkpoint(folder / "network.ckpt", weights_only=True)
    model.save_pretrained(folder, figures=effect)
    network = Classifier.load_from_checkpoint(folder / "network.ckpt", weights_only=True)
    again = CalibratedModel.from_pretrained(folder, model=network)
    images, _ = next(iter(test_loader))
    assert torch.equal(again.eval()(images), model.eval()(images))
    print(f"saved in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return effect.before, effect.after


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
