"""Logs that the real tools write about a tiny random model: the files in tests/files/logs.

python -m tests.support.recorded_logs lm_eval      # needs lm-eval
python -m tests.support.recorded_logs inspect      # needs inspect-ai
"""

import contextlib
import gc
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

FILES = Path(__file__).parents[1] / "files" / "logs"
COLOURS = ("red", "blue", "one", "two")
DRAWN = {"do_sample": True, "temperature": 1.0}
CHOICES = [
    {"question": f"what is it {COLOURS[i % 4]}", "choices": list(COLOURS), "answer": (3 * i) % 4}
    for i in range(8)
]


def lm_eval_tasks():
    """Tasks of the three kinds, with documents from memory."""
    import datasets
    from lm_eval.api.task import ConfigurableTask

    common = {
        "custom_dataset": lambda **_: {"test": datasets.Dataset.from_list(CHOICES)},
        "test_split": "test",
        "doc_to_text": "Question: {{question}} Answer:",
        "num_fewshot": 0,
    }
    chosen = {
        "task": "quiz_choice",
        "output_type": "multiple_choice",
        "doc_to_choice": "choices",
        "doc_to_target": "answer",
        "metric_list": [
            {"metric": name, "aggregation": "mean", "higher_is_better": True}
            for name in ("acc", "acc_norm")
        ],
    }
    exact = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}
    written = {
        "task": "quiz_written",
        "output_type": "generate_until",
        "doc_to_target": "{{choices[answer]}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 3, **DRAWN},
        "repeats": 3,
        "metric_list": [exact],
        "filter_list": [
            {"name": "whole", "filter": [{"function": "take_first"}]},
            {
                "name": "word",
                "filter": [
                    {"function": "regex", "regex_pattern": r"(\w+)"},
                    {"function": "take_first"},
                ],
            },
        ],
    }
    likely = {
        "task": "quiz_likely",
        "output_type": "loglikelihood",
        "doc_to_target": "{{choices[answer]}}",
        "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
    }
    return [ConfigurableTask(config={**common, **each}) for each in (chosen, written, likely)]


def tiny_harness():
    """The tiny model as the harness wants it."""
    from lm_eval.models.huggingface import HFLM

    from tests.support.language_models import quiz_model, quiz_tokenizer

    return HFLM(pretrained=quiz_model(), tokenizer=quiz_tokenizer(), batch_size=4, max_length=64)


def write_lm_eval(folder):
    """Run the harness as ``lm_eval --log_samples --output_path`` does; return its folder."""
    import lm_eval
    from lm_eval.loggers import EvaluationTracker

    tracker = EvaluationTracker(output_path=str(folder))
    results = lm_eval.simple_evaluate(
        tiny_harness(),
        tasks=lm_eval_tasks(),
        log_samples=True,
        evaluation_tracker=tracker,
        bootstrap_iters=0,
    )
    samples = results.pop("samples")
    tracker.save_results_aggregated(results=results, samples=samples)
    for name in results["configs"]:
        tracker.save_results_samples(task_name=name, samples=samples[name])
    return next(Path(folder).rglob("results_*.json")).parent


def write_inspect(folder, suffix="eval", scorer=None):
    """Run Inspect with its mock model; return the log."""
    from inspect_ai import Task, eval as run
    from inspect_ai.dataset import Sample
    from inspect_ai.model import (
        ChatCompletionChoice,
        ChatMessageAssistant,
        Logprob,
        Logprobs,
        ModelOutput,
        ModelUsage,
        TopLogprob,
        get_model,
    )
    from inspect_ai.scorer import match
    from inspect_ai.solver import generate

    words = ["Lima", "Quito", "Lima", "Bogota", "Lima", "Quito"]
    chances = [-0.1, -0.9, -0.3, -1.2, -0.05, -0.7]

    def output(word, logprob):
        top = [TopLogprob(token=t, logprob=p) for t, p in ((word, logprob), ("La", logprob - 4))]
        content = [Logprob(token=word, logprob=logprob, top_logprobs=top)]
        message = ChatMessageAssistant(content=word, source="generate")
        choice = ChatCompletionChoice(message=message, logprobs=Logprobs(content=content))
        usage = ModelUsage(input_tokens=9, output_tokens=1)  # or the mock fetches a tokenizer
        return ModelOutput(model="mockllm", choices=[choice], usage=usage)

    model = get_model("mockllm/model", custom_outputs=list(map(output, words, chances)))
    questions = [
        Sample(id=f"q{i}", input=f"Capital of Peru, please ({i})?", target="Lima")
        for i in range(len(words))
    ]
    task = Task(dataset=questions, solver=generate(), scorer=scorer or match(), name="capitals")
    run(
        task,
        model=model,
        log_dir=str(folder),
        log_format=suffix,
        logprobs=True,
        display="none",
        max_samples=1,
        max_connections=1,
    )
    gc.collect()  # of streams that Inspect leaves open, while the caller ignores warnings
    return next(Path(folder).glob(f"*.{suffix}"))


def without_machine(text):
    """Leave out paths, and the versions and hardware of the machine."""
    about = json.loads(text)
    kept = ("results", "configs", "versions", "n-shot", "config", "model_source", "model_name")
    about = {name: about[name] for name in kept if name in about}
    return re.sub(r"/[\w./-]*site-packages/", "", json.dumps(about, indent=1, default=str))


def without_events(text):
    """Leave out the events of samples, which are long and not read."""
    log = json.loads(text)
    for sample in log["samples"]:
        del sample["events"], sample["events_data"]
    return json.dumps(log, indent=1)


def record(tool):
    """Replace the files of a tool in tests/files/logs."""
    FILES.mkdir(parents=True, exist_ok=True)
    # Inspect records the repository of the working folder
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        if tool == "inspect":
            shutil.copy(write_inspect(Path(folder) / "eval"), FILES / "log.eval")
            made = write_inspect(Path(folder) / "json", "json")
            (FILES / "log.json").write_text(without_events(made.read_text("utf-8")), "utf-8")
            return
        made = write_lm_eval(folder)
        target = FILES / "lm_eval"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for file in sorted(made.iterdir()):
            text = file.read_text("utf-8")
            shown = without_machine(text) if file.suffix == ".json" else text
            (target / file.name).write_text(shown, "utf-8")


if __name__ == "__main__":
    for name in sys.argv[1:] or ("lm_eval", "inspect"):
        record(name)
