"""Train a small network on digits, calibrate it, save it, and export it.

Run it with ``python examples/pytorch_example.py``; it takes seconds, and needs scikit-learn for
the data.
"""

import sys
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import calibrant as cal
from calibrant.deploy import calibrated, collect, export


def loaders():
    """Digits to train on, to calibrate on and to measure on."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32)[order] / 16
    images += 0.3 * torch.randn(images.shape)  # without noise there is little to be unsure of
    labels = torch.tensor(labels)[order]
    parts = zip(images.split([300, 700, 797]), labels.split([300, 700, 797]), strict=True)
    return [DataLoader(TensorDataset(*part), batch_size=50) for part in parts]


def train(network, loader, epochs=30):
    """Train it long on few images, which makes it too sure of itself."""
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for _ in range(epochs):
        for images, labels in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(network(images), labels).backward()
            optimizer.step()


def main(folder):
    """Print the figures before and after, and return them."""
    torch.manual_seed(0)
    folder = Path(folder)
    train_loader, val_loader, test_loader = loaders()
    network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    train(network, train_loader)

    # Learn from images that the network has not seen in training ...
    calibrator = cal.Auto().fit(*collect(network, val_loader))
    print(calibrator.reasons_)

    # ... put what was learned behind the network, and measure on yet others.
    model = calibrated(network, calibrator).eval()
    before = cal.evaluate(*collect(network, test_loader))
    after = cal.evaluate(*collect(model, test_loader))
    for name in ("accuracy", "ece", "nll"):
        print(f"{name:<8} {before[name].value:.4f} -> {after[name].value:.4f}")

    # The weights of both are in the state of the model. The calibrator alone is a folder too.
    torch.save(model.state_dict(), folder / "model.pt")
    cal.save(calibrator, folder / "calibrator")
    again = calibrated(
        nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10)),
        cal.load(folder / "calibrator"),
    )
    again.load_state_dict(torch.load(folder / "model.pt"))
    images, _ = next(iter(test_loader))
    assert torch.equal(again.eval()(images), model(images))

    # One file that runs without calibrant: images in, probabilities out.
    program = folder / "model.pt2"
    export(calibrator, program, model=network.eval(), example=images, probabilities=True)
    probs = torch.export.load(program).module()(images)
    assert torch.allclose(probs, model(images).softmax(-1), atol=1e-5)
    print(f"saved in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return before, after


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
