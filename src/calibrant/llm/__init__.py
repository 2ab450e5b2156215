"""Language models: token tables, heads that set a temperature per token, calibrated answers."""

from calibrant.llm.answers.asking import (
    Answer,
    ask,
    ask_choices,
    ask_choices_each,
    ask_each,
    ask_true,
    chat_prompt,
)
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.choices import (
    choice_logits,
    choice_logits_from_likelihoods,
    choice_logits_from_top,
    choice_sets,
    choice_tokens,
    p_true,
)
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.evaluate import ClaimsEvaluation, evaluate_answers
from calibrant.llm.answers.questions import (
    GradedAnswers,
    Question,
    choice_prompt,
    exact_match,
    read_answers,
    read_mmlu,
    read_questions,
    read_truthfulqa,
    short_prompt,
    subset,
    verdict_prompt,
)
from calibrant.llm.answers.topk import Bounds, log_partition_bounds, top_confidence, top_logprobs
from calibrant.llm.fingerprint import ModelMark, mark_of
from calibrant.llm.heads.attach import Report, attached, report
from calibrant.llm.heads.daca import Agreement, daca, daca_of_records
from calibrant.llm.heads.fit import Claims, FittedHead, fit_head, token_claims
from calibrant.llm.heads.official import read_official
from calibrant.llm.huggingface import load_model
from calibrant.llm.tokens.collect import collect
from calibrant.llm.tokens.evaluate import compare_tokens, evaluate_tokens
from calibrant.llm.tokens.reading import read_documents
from calibrant.llm.tokens.tables import TokenTable, open_table

__all__ = [
    "Agreement",
    "Answer",
    "AnswerCalibrator",
    "Bounds",
    "Claims",
    "ClaimsEvaluation",
    "FittedHead",
    "GradedAnswers",
    "ModelMark",
    "Question",
    "Report",
    "TokenTable",
    "answer_confidence",
    "ask",
    "ask_choices",
    "ask_choices_each",
    "ask_each",
    "ask_true",
    "attached",
    "chat_prompt",
    "choice_logits",
    "choice_logits_from_likelihoods",
    "choice_logits_from_top",
    "choice_prompt",
    "choice_sets",
    "choice_tokens",
    "collect",
    "compare_tokens",
    "daca",
    "daca_of_records",
    "evaluate_answers",
    "evaluate_tokens",
    "exact_match",
    "fit_head",
    "load_model",
    "log_partition_bounds",
    "mark_of",
    "open_table",
    "p_true",
    "read_answers",
    "read_documents",
    "read_mmlu",
    "read_official",
    "read_questions",
    "read_truthfulqa",
    "report",
    "short_prompt",
    "subset",
    "token_claims",
    "top_confidence",
    "top_logprobs",
    "verdict_prompt",
]
