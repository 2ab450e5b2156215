"""Estimates of NannyML's CBPE for the tasks of ``estimate.py``; needs ``pip install nannyml``.

    python benchmarks/studies/estimate_cbpe.py TASKS [--bundled]

Writes the estimated accuracy of every batch beside each task. ``--bundled`` first adds tasks from
the datasets that nannyml brings: chunks of their analysis period, with their features. nannyml
pins old libraries: give it an environment of its own, in which calibrant is not needed.
"""

import argparse
import csv
import os
import warnings
from pathlib import Path

import numpy as np
import pandas as pd

warnings.simplefilter("ignore")
os.environ.setdefault("NML_DISABLE_USAGE_LOGGING", "1")
import nannyml as nml  # noqa: E402  # after the settings that it reads

CHUNK = 2000
MOST = 20
"""Batches of each dataset, spread over its analysis period."""


def bundled(folder):
    loans = nml.load_synthetic_car_loan_dataset()
    save_binary(folder / "nannyml_car_loans.npz", loans, "repaid", "y_pred_proba", "y_pred")
    census = nml.load_us_census_ma_employment_data()
    columns = "employed", "predicted_probability", "prediction"
    save_binary(folder / "nannyml_census_employment.npz", census, *columns)
    cards = nml.load_synthetic_multiclass_classification_dataset()
    names = [name for name in cards[0].columns if name.startswith("y_pred_proba_")]
    classes = [name.removeprefix("y_pred_proba_") for name in names]
    save(folder / "nannyml_credit_cards.npz", *merged(cards), "y_true", names, classes)


def merged(data):
    reference, analysis, targets = data[:3]
    return reference, analysis.merge(targets, on="id")


def save_binary(path, data, target, positive, predicted):
    frames = [frame.assign(other=1 - frame[positive]) for frame in merged(data)]
    save(path, *frames, target, ["other", positive], [0, 1])


def save(path, reference, analysis, target, probs, classes):
    skipped = {target, *probs, "id", "timestamp", "year", "period", "y_pred", "prediction"}
    names = [name for name in reference.columns if name not in skipped and name in analysis.columns]
    number = {name: i for i, name in enumerate(classes)}

    def arrays(frame):
        coded = [codes(frame[name], reference[name]) for name in names]
        rows = frame[probs].to_numpy(float)
        labels = frame[target].map(number).to_numpy(int)
        return rows / rows.sum(1, keepdims=True), labels, np.stack(coded, 1)

    half = np.random.default_rng(0).permutation(len(reference))
    fit, held_out = np.split(half, [len(half) // 2])
    whole = arrays(reference)
    task = {"fit_probs": whole[0][fit], "fit_labels": whole[1][fit]}
    keys = ("probs", "labels", "features")
    task |= {f"reference_{k}": v[held_out] for k, v in zip(keys, whole, strict=True)}
    later = arrays(analysis)
    starts = np.linspace(0, len(analysis) - CHUNK, MOST).astype(int)
    for i, start in enumerate(starts):
        part = slice(start, start + CHUNK)
        task |= {f"batch_time.{i:02d}_{k}": v[part] for k, v in zip(keys, later, strict=True)}
    np.savez_compressed(path, **task)


def codes(values, known):
    """Numbers for a column; those of text are places in the list of known values."""
    if values.dtype.kind in "if":
        return values.fillna(known.median()).to_numpy(float)
    order = {name: i for i, name in enumerate(sorted(known.dropna().astype(str).unique()))}
    return values.astype(str).map(order).fillna(-1).to_numpy(float)


def frame_of(probs, labels=None):
    classes = probs.shape[1]
    if classes == 2:
        frame = pd.DataFrame({"p": probs[:, 1], "predicted": (probs[:, 1] > 0.5).astype(int)})
    else:
        frame = pd.DataFrame({f"p{k}": probs[:, k] for k in range(classes)})
        frame["predicted"] = probs.argmax(1)
    return frame if labels is None else frame.assign(label=labels)


def estimate(path):
    task = np.load(path)
    names = [key for key in task.files if key.startswith("batch_") and key.endswith("_probs")]
    labelled = [
        np.concatenate([task[f"fit_{key}"], task[f"reference_{key}"]])
        for key in ("probs", "labels")
    ]
    classes, size = labelled[0].shape[1], len(task[names[0]])
    columns = "p" if classes == 2 else {k: f"p{k}" for k in range(classes)}
    kind = "classification_binary" if classes == 2 else "classification_multiclass"
    estimator = nml.CBPE(
        metrics=["accuracy"],
        y_pred_proba=columns,
        y_pred="predicted",
        y_true="label",
        problem_type=kind,
        chunk_size=size,
    )
    estimator.fit(frame_of(*labelled))
    analysis = pd.concat([frame_of(task[name][:size]) for name in names], ignore_index=True)
    found = estimator.estimate(analysis).filter(period="analysis").to_df()["accuracy"]
    with path.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("batch", "value", "low", "high"))
        ends = ("value", "lower_confidence_boundary", "upper_confidence_boundary")
        for name, row in zip(names, found[list(ends)].to_numpy(), strict=True):
            batch = name.removeprefix("batch_").removesuffix("_probs")
            writer.writerow((batch, *(f"{x:.5f}" for x in row)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bundled", action="store_true")
    options = parser.parse_args()
    if options.bundled:
        bundled(options.folder)
    for path in sorted(options.folder.glob("*.npz")):
        print(path.stem, flush=True)
        estimate(path)
