"""Train a text classifier with the Trainer of Hugging Face, calibrate it, and keep both.

Run it with ``python examples/hf_trainer_example.py``; it takes seconds, needs transformers and
accelerate, and no network: the model is a small BERT with random weights, the texts are made up.
"""

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import calibrant as cal
from calibrant.deploy import CalibratedModel, calibrated

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


def main(folder):
    """Print the figures before and after, and return them."""
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
    network = BertForSequenceClassification(config)
    arguments = TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=12,
        per_device_train_batch_size=50,
        per_device_eval_batch_size=500,
        learning_rate=5e-3,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=network, args=arguments, train_dataset=texts(400, seed=0))
    trainer.train()

    # predict gives logits; the texts are new to the network, those to measure on yet others.
    val, test = trainer.predict(texts(1000, seed=1)), trainer.predict(texts(1000, seed=2))
    calibrator = cal.TemperatureScaling().fit(val.predictions, val.label_ids)
    effect = cal.effect(calibrator, {"logits": test.predictions, "labels": test.label_ids})
    print(f"temperature {calibrator.temperature_:.2f}")
    for name in ("accuracy", "ece", "nll"):
        print(f"{name:<8} {effect.before[name].value:.4f} -> {effect.after[name].value:.4f}")

    # The folder has the model as transformers writes it, the calibrator and a card.
    folder = Path(folder)
    model = calibrated(network, calibrator).eval()
    model.save_pretrained(folder, figures=effect)
    again = CalibratedModel.from_pretrained(folder).eval()
    words = torch.stack([text["input_ids"] for text in texts(8, seed=2)])
    with torch.no_grad():
        assert torch.equal(again(words).logits, model(words).logits)
    print(f"saved in {folder}: {', '.join(sorted(path.name for path in folder.iterdir()))}")
    return effect.before, effect.after


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
