from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import calibrant as cal
from tests.support.evaluations import check_scalars, predictions

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers  # whose Trainer takes seconds to import

from calibrant.integrations.huggingface import CalibrationCallback, CalibrationMetrics

STREAM = {"prefix": "eval_calibration/", "stream": True}


class Network(nn.Module):
    def __init__(self, classes=3):
        super().__init__()
        self.layer = nn.Linear(4, classes)

    def forward(self, inputs, labels):
        logits = self.layer(inputs)
        loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
        return {"loss": loss, "logits": logits, "hidden": inputs}


def examples(rng, n=37, shape=()):
    """Inputs and labels; texts of different lengths are padded by the Trainer."""
    inputs = torch.tensor(rng.normal(size=(n, *shape, 4)), dtype=torch.float32)
    labels = torch.tensor(rng.integers(3, size=(n, *shape)))
    labels[::9] = -100
    return [{"inputs": x, "labels": y} for x, y in zip(inputs, labels, strict=True)]


def trainer_of(network, data, folder, metrics, callbacks=(), **arguments):
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        gradient_accumulation_steps=2,
        num_train_epochs=1,
        learning_rate=0.1,
        eval_strategy="epoch",
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        **arguments,
    )
    return transformers.Trainer(
        network,
        settings,
        train_dataset=data,
        eval_dataset=data,
        compute_metrics=metrics,
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize(
    "arguments",
    [{}, {"batch_eval_metrics": True}, {"eval_do_concat_batches": False}],
    ids=["whole", "batches", "list"],
)
def test_the_trainer_reports_the_calibration_of_all_examples(rng, tmp_path, arguments):
    data, network, seen = examples(rng), Network(), []
    metrics = CalibrationMetrics()
    callback = CalibrationCallback(metrics, lambda *result: seen.append(result))
    trainer = trainer_of(network, data, tmp_path, metrics, [callback], **arguments)
    trainer.train()
    inputs, labels = (torch.stack([one[key] for one in data]) for key in ("inputs", "labels"))
    with torch.no_grad():
        logits = network.layer(inputs)
    (logged,) = (row for row in trainer.state.log_history if "eval_loss" in row)
    check_scalars(logged, logits, labels, **STREAM)
    ((evaluation, step),) = seen
    assert evaluation is metrics.evaluation
    assert step == trainer.state.global_step == 3
    check_scalars(trainer.evaluate(), logits, labels, **STREAM)  # starts anew


def test_next_tokens_of_a_language_model(rng, tmp_path):
    from tests.support.language_models import tiny_model

    model = tiny_model(vocabulary=30)
    texts = torch.tensor(rng.integers(3, 30, size=(10, 6)))
    targets = texts.clone()
    targets[:, :2] = -100  # the prompt
    data = [{"input_ids": x, "labels": y} for x, y in zip(texts, targets, strict=True)]
    metrics = CalibrationMetrics(next_token=True)
    trainer = trainer_of(model, data, tmp_path, metrics, batch_eval_metrics=True)
    logged = trainer.evaluate()
    with torch.no_grad():
        logits = model(texts).logits
    rows, labels = [], []
    for i in range(10):
        for place in range(2, 6):
            rows.append(logits[i, place - 1].double().numpy())
            labels.append(int(texts[i, place]))
    check_scalars(logged, np.stack(rows), labels, **STREAM)
    assert logged["eval_calibration/n"] == 40
    assert logged["eval_calibration/nll"] == pytest.approx(logged["eval_loss"], rel=1e-4)


def test_more_metrics_with_pairs(rng):
    logits, labels = predictions(rng)
    names = ["ece", "auroc"]
    form = cal.Accumulator(pairs=True, metrics=names)
    metrics = CalibrationMetrics(accumulator=form, prefix="own")
    # models with several outputs give a tuple
    logged = metrics(transformers.EvalPrediction((logits, None), labels))
    check_scalars(logged, logits, labels, prefix="own/", metrics=names)


def test_only_the_first_process_logs_and_only_what_was_measured(rng):
    seen: list = []
    metrics = CalibrationMetrics()
    callback = CalibrationCallback(metrics, lambda *result: seen.append(result))
    first, other = (SimpleNamespace(is_world_process_zero=x, global_step=1) for x in (True, False))
    callback.on_evaluate(None, first, None)
    metrics(transformers.EvalPrediction(*predictions(rng)))
    callback.on_evaluate(None, other, None)
    assert not seen
    callback.on_evaluate(None, first, None)
    assert seen == [(metrics.evaluation, 1)]
