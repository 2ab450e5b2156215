"""uqlm and lm-polygraph beside our signals: their formulas, and their ways to probabilities.

Both need much that is not needed here, so install them into an environment of their own. What is
not installed is left out.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from importlib.util import find_spec

import numpy as np

from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.signals import (
    agreement,
    clusters,
    semantic_entropy,
    top_token_confidence,
)

CASES = 300
Signals = Mapping[str, np.ndarray]
Rival = Callable[[Signals, np.ndarray, Signals], np.ndarray]
Difference = tuple[str, str, float]


@cache
def rivals() -> dict[str, Rival]:
    """Return the ways to probabilities that are installed, by name."""
    found: dict[str, Rival] = {}
    if find_spec("uqlm"):
        found["uqlm: best by AUROC, Platt"] = uqlm_best
        found["uqlm: tuned ensemble"] = lambda *data: uqlm_ensemble(*data, calibrate=False)
        found["uqlm: tuned ensemble, Platt"] = lambda *data: uqlm_ensemble(*data, calibrate=True)
    if find_spec("lm_polygraph"):
        found["lm-polygraph: geometric, isotonic PCC"] = polygraph_isotonic
    return found


def uqlm_best(train: Signals, right: np.ndarray, test: Signals) -> np.ndarray:
    from sklearn.metrics import roc_auc_score

    best = max(train, key=lambda name: roc_auc_score(right, train[name]))
    return uqlm_platt(train[best], right, test[best])


def uqlm_platt(train: np.ndarray, right: np.ndarray, test: np.ndarray) -> np.ndarray:
    from uqlm.calibration.score_calibrator import ScoreCalibrator
    from uqlm.utils.results import UQResult

    calibrator = ScoreCalibrator(method="platt")
    calibrator.fit(UQResult({"data": {"score": train}}), right)
    result = UQResult({"data": {"score": test}})
    calibrator.transform(result)
    return np.asarray(result.data["calibrated_score"])


def uqlm_ensemble(
    train: Signals, right: np.ndarray, test: Signals, *, calibrate: bool
) -> np.ndarray:
    from uqlm.utils.tuner import Tuner

    names = list(train)
    tuned = Tuner().tune_params([train[name] for name in names], right)
    before, after = (
        sum(w * half[name] for w, name in zip(tuned["weights"], names, strict=True))
        for half in (train, test)
    )
    # rounding may lead out of [0, 1]
    before, after = np.clip(before, 0, 1), np.clip(after, 0, 1)
    return uqlm_platt(before, right, after) if calibrate else after


def polygraph_isotonic(train: Signals, right: np.ndarray, test: Signals) -> np.ndarray:
    from lm_polygraph.normalizers.isotonic_pcc import IsotonicPCCNormalizer

    normaliser = IsotonicPCCNormalizer()
    doubts = [-np.log(np.maximum(half["geometric"], 1e-300)) for half in (train, test)]
    normaliser.fit(right.astype(float), doubts[0])
    return np.clip(np.asarray(normaliser.transform(doubts[1])), 0, 1)


# ---------------------------------------------------------------------------------- the formulas


def formulas() -> list[tuple[str, ...]]:
    """Return the largest difference of each formula over random material."""
    largest: dict[tuple[str, str], float] = {}
    rng = np.random.default_rng(0)
    for _ in range(CASES):
        texts, logs, top = drawn(rng)
        for check, installed in ((of_uqlm, "uqlm"), (of_polygraph, "lm_polygraph")):
            if find_spec(installed):
                for formula, theirs, gap in check(texts, logs, top):
                    key = formula, theirs
                    largest[key] = max(largest.get(key, 0.0), gap)
    rows = [(*key, f"{gap:.0e}" if gap else "0") for key, gap in largest.items()]
    return [("ours", "theirs", "largest difference"), *rows]


def drawn(rng: np.random.Generator) -> tuple[list[str], list[np.ndarray], np.ndarray]:
    """An answer and samples, log-probabilities of the tokens of each, and top tokens of one."""
    texts = list(rng.choice(["Lima", "Cusco", "Rome", "Lima, Peru"], size=rng.integers(3, 12)))
    logs = [np.log(rng.beta(4, 1, size=rng.integers(1, 30))) for _ in texts]
    top = np.sort(np.log(rng.dirichlet(np.ones(40), size=4)), axis=1)[:, ::-1][:, :15]
    return [str(text) for text in texts], logs, top


def of_uqlm(texts: list[str], logs: list[np.ndarray], top: np.ndarray) -> Iterator[Difference]:
    from uqlm.black_box.match import MatchScorer
    from uqlm.nli import entropy_utils as theirs
    from uqlm.white_box.single_logprobs import SingleLogprobsScorer
    from uqlm.white_box.top_logprobs import TopLogprobsScorer

    (match,) = MatchScorer().evaluate([texts[0]], [texts[1:]])
    ours = agreement(texts[0], texts[1:], str.__eq__)
    yield "agreement_exact", "uqlm exact_match", abs(match - ours)
    grouped = clusters(texts, str.__eq__)
    results = [[{"logprob": one} for one in tokens] for tokens in logs]
    _, uniform = theirs.compute_response_probabilities(results, len(texts))
    shares = theirs.compute_cluster_probabilities(uniform, grouped)
    entropy = theirs.compute_semantic_entropy(shares)
    yield "semantic_entropy", "uqlm semantic entropy", abs(entropy - semantic_entropy(grouped))
    (scaled,) = theirs.normalize_entropy([entropy], len(texts) - 1)
    gap = abs(scaled - semantic_entropy(grouped, normalised=True))
    yield "semantic_entropy, normalised", "uqlm semantic entropy, normalised", gap
    ours = {
        rule: answer_confidence([np.exp(logs[0])], rule)[0] for rule in ("geometric", "minimum")
    }
    scores = SingleLogprobsScorer().evaluate(results[:1])
    yield (
        "geometric",
        "uqlm sequence_probability",
        abs(scores["sequence_probability"][0] - ours["geometric"]),
    )
    yield "minimum", "uqlm min_probability", abs(scores["min_probability"][0] - ours["minimum"])
    positions = [{"top_logprobs": [{"logprob": one} for one in row]} for row in top]
    (margin,) = TopLogprobsScorer().evaluate([positions])["probability_margin"]
    mine = top_token_confidence([dict(zip(map(str, range(15)), row, strict=True)) for row in top])
    yield "top_margin", "uqlm probability_margin", abs(margin - mine["top_margin"])


def of_polygraph(texts: list[str], logs: list[np.ndarray], _: np.ndarray) -> Iterator[Difference]:
    from lm_polygraph.estimators.max_probability import MaximumSequenceProbability
    from lm_polygraph.estimators.perplexity import Perplexity
    from lm_polygraph.estimators.semantic_entropy import SemanticEntropy

    stats = {"greedy_log_likelihoods": [logs[0]]}
    for rule, estimator in (("geometric", Perplexity()), ("product", MaximumSequenceProbability())):
        ours = -np.log(answer_confidence([np.exp(logs[0])], rule)[0])
        yield f"-log {rule}", f"lm-polygraph {estimator}", abs(estimator(stats)[0] - ours)
    grouped = clusters(texts, str.__eq__)
    cluster_of = {number: i for i, cluster in enumerate(grouped) for number in cluster}
    classes = {
        "class_to_sample": [grouped],
        "sample_to_class": [[cluster_of[n] for n in range(len(texts))]],
    }
    estimator = SemanticEntropy(class_probability_estimation="frequency")
    (entropy,) = estimator({"sample_texts": [texts], "semantic_classes_entail": classes})
    gap = abs(entropy - semantic_entropy(grouped))
    yield "semantic_entropy", f"lm-polygraph {estimator}", gap
