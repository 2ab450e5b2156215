"""Logs of simulated answers, whose chances to be right are known."""

import json
import math

import numpy as np


def service_log(n=300, *, power=3.0, seed=0, kinds=("a", "b"), shifts=(1.0, 1.0)):
    """Lines of requests with responses: an answer of one token, right with its chance's power."""
    rng = np.random.default_rng(seed)
    chances = rng.uniform(0.4, 1, n)
    lines = []
    for i, chance in enumerate(chances):
        kind = i % len(kinds)
        token = {"token": "Lima", "logprob": math.log(chance), "top_logprobs": []}
        message = {"role": "assistant", "content": f"Lima {i}"}
        choice = {"message": message, "logprobs": {"content": [token]}, "finish_reason": "stop"}
        lines.append(
            {
                "id": f"q{i}",
                "request": {"messages": [{"role": "user", "content": f"Question {i} <b>?"}]},
                "response": {"model": "tiny", "choices": [choice]},
                "correct": bool(rng.random() < shifts[kind] * chance**power),
                "kind": kinds[kind],
            }
        )
    return lines


def harness_samples(n=120, seed=0):
    """Samples of lm-evaluation-harness about three options, with a preference for the first."""
    rng = np.random.default_rng(seed)
    honest = 2 * rng.normal(size=(n, 3))
    labels = (honest + rng.gumbel(size=honest.shape)).argmax(-1)
    likelihoods = honest + np.array([3.0, 0, 0]) - 9
    for i, (row, label) in enumerate(zip(likelihoods, labels, strict=True)):
        asked = {f"gen_args_{k}": {"arg_0": "Q", "arg_1": f" {c}"} for k, c in enumerate("ABC")}
        replies = [[str(value), "False"] for value in row]
        yield {
            **{"doc_id": i, "doc": {"question": f"Question {i}"}, "target": str(label)},
            **{"arguments": asked, "resps": [[r] for r in replies], "filtered_resps": replies},
            **{"filter": "none", "metrics": ["acc"], "acc": float(row.argmax() == label)},
        }


def write_lines(file, lines):
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file
