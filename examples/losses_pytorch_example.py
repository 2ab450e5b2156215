"""Train in a plain loop with the losses that need more than logits and labels.

Run it with ``python examples/losses_pytorch_example.py``; it takes seconds, and needs
scikit-learn for the data.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import calibrant as cal


def data():
    """Digits to train on, to watch and to measure on."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels))
    images = torch.tensor(images, dtype=torch.float32)[order] / 16
    images += 0.3 * torch.randn(images.shape)  # without noise there is little to be unsure of
    return list(
        zip(
            images.split([600, 400, 797]),
            torch.tensor(labels)[order].split([600, 400, 797]),
            strict=True,
        )
    )


def trained(name, train, val):
    """Train a small network with a loss by its name."""
    images, labels = train
    network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    loss = cal.LOSSES[name](classes=10, examples=len(labels))  # losses take what they need
    # The gate of FeDLaS learns with the network; other losses have no parameters.
    optimiser = torch.optim.Adam([*network.parameters(), *loss.parameters()], lr=0.01)
    for _ in range(30):
        network.train()
        for index in torch.randperm(len(labels)).split(50):
            with cal.layer_inputs(network, "2") as features:  # what FeDLaS looks at
                logits = network(images[index])
            # CRL remembers each example by its number; losses take what they need.
            value = loss(logits, labels[index], features(), index)
            optimiser.zero_grad()
            value.backward()
            optimiser.step()
        if name == "adafocal":  # it follows the calibration on images that are held out
            network.eval()
            with torch.no_grad():
                loss.observe(network(val[0]), val[1])
    return network.eval()


def main():
    """Print and return the calibration error of each."""
    torch.manual_seed(0)
    train, val, (images, labels) = data()
    results = {}
    for name in ("ce", "crl", "adafocal", "fedlas_ls"):
        network = trained(name, train, val)
        with torch.no_grad():
            logits = network(images)
        results[name] = cal.evaluate(logits, labels, metrics=["accuracy", "ece"])
        figures = results[name]["accuracy"].value, results[name]["ece"].value
        print(f"{name:<10} accuracy {figures[0]:.3f}  ECE {figures[1]:.3f}")
    return results


if __name__ == "__main__":
    main()
