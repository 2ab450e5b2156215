"""Train with FeDLaS in Lightning.

Run it with ``python examples/losses_lightning_example.py``; it takes seconds, and needs lightning
and, for the data, scikit-learn.
"""

import lightning as L
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calibrant as cal
from calibrant.integrations.lightning import CalibrationCallback


def loaders():
    """Digits to train on and to measure on."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32)[order] / 16
    images += 0.3 * torch.randn(images.shape)  # without noise there is little to be unsure of
    labels = torch.tensor(labels)[order]
    parts = zip(images.split([800, 997]), labels.split([800, 997]), strict=True)
    return [DataLoader(TensorDataset(*part), batch_size=50) for part in parts]


class Classifier(L.LightningModule):
    """A small network; the loss is part of the module, so its gate learns and is kept with it."""

    def __init__(self, loss="fedlas_ls"):
        super().__init__()
        self.network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
        self.loss = cal.LOSSES[loss](classes=10)

    def forward(self, images):
        """Give the logits; the loss is not needed here."""
        return self.network(images)

    def training_step(self, batch, _):
        """Give the loss, and log how far the gate lowers the smoothing."""
        images, labels = batch
        with cal.layer_inputs(self.network, "2") as features:
            logits = self(images)
        value = self.loss(logits, labels, features())
        self.log("smoothing", self.loss.last[1].mean(), on_epoch=True, on_step=False)
        return value

    def test_step(self, batch, batch_idx):
        """Give what the callback measures."""
        images, labels = batch
        return {"logits": self(images), "labels": labels}

    def configure_optimizers(self):
        """Give the optimizer: ``parameters`` has those of the network and of the gate."""
        return torch.optim.Adam(self.parameters(), lr=0.01)


def main():
    """Print and return the figures, and the module."""
    L.seed_everything(0, verbose=False)
    train_loader, test_loader = loaders()
    classifier = Classifier()
    callback = CalibrationCallback()
    trainer = L.Trainer(
        callbacks=[callback],
        max_epochs=20,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(classifier, train_loader)
    smoothing = float(trainer.callback_metrics["smoothing"])
    trainer.test(classifier, test_loader, verbose=False)
    result = callback.evaluations["test_calibration"]
    print(f"accuracy {result['accuracy'].value:.3f}  ECE {result['ece'].value:.3f}")
    print(f"smoothing {smoothing:.3f}; without the gate {classifier.loss.alpha}")
    return result, classifier


if __name__ == "__main__":
    main()
