"""Train a text classifier with FeDLaS in the Trainer of Hugging Face.

Run it with ``python examples/losses_trainer_example.py``; it takes seconds, needs transformers and
accelerate, and no network: the model is a small BERT with random weights, the texts are made up.
"""

import tempfile

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import calibrant as cal
from calibrant.integrations.huggingface import CalibrationMetrics

TOPICS, WORDS, LENGTH = 4, 100, 12


def texts(count, seed):
    """Texts of which every third word or so is one of the topic's own words."""
    rng = np.random.default_rng(seed)
    topics = rng.integers(TOPICS, size=count)
    own = topics[:, None] + TOPICS * rng.integers(WORDS // TOPICS, size=(count, LENGTH))
    words = np.where(rng.random((count, LENGTH)) < 0.3, own, rng.integers(WORDS, size=own.shape))
    return [
        {"input_ids": torch.tensor(text), "labels": torch.tensor(topic)}
        for text, topic in zip(words, topics, strict=True)
    ]


class LossTrainer(Trainer):
    """A Trainer with a loss of calibrant, whose own parameters learn as well."""

    def __init__(self, *args, loss, last_layer, **named):
        super().__init__(*args, **named)
        self.calibration_loss = loss.to(self.args.device)
        self.last_layer = last_layer

    def compute_loss(self, model, inputs, return_outputs=False, **_):
        """Compute the loss from logits, labels and features."""
        labels = inputs.pop("labels")
        with cal.layer_inputs(model, self.last_layer) as features:
            outputs = model(**inputs)
        self.calibration_loss.train(model.training)
        value = self.calibration_loss(outputs.logits, labels, features())
        return (value, outputs) if return_outputs else value

    def create_optimizer(self, *args, **named):
        """Add the parameters of the loss to those of the model."""
        optimiser = super().create_optimizer(*args, **named)
        optimiser.add_param_group({"params": list(self.calibration_loss.parameters())})
        return optimiser


def main(folder):
    """Print and return the figures, and the loss."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=WORDS,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=TOPICS,
    )
    metrics = CalibrationMetrics()
    trainer = LossTrainer(
        model=BertForSequenceClassification(config),
        args=TrainingArguments(
            output_dir=str(folder),
            num_train_epochs=8,
            per_device_train_batch_size=50,
            learning_rate=5e-3,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=texts(800, seed=0),
        eval_dataset=texts(1000, seed=2),
        compute_metrics=metrics,
        loss=cal.LOSSES["fedlas_mbls"](classes=TOPICS),
        last_layer="classifier",
    )
    trainer.train()
    logged = trainer.evaluate()
    print(f"accuracy {logged['eval_calibration/accuracy']:.3f}", end="  ")
    print(f"ECE {logged['eval_calibration/ece']:.3f}")
    return metrics.evaluation, trainer.calibration_loss


if __name__ == "__main__":
    main(tempfile.mkdtemp())
