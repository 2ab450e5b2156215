"""Language models: token tables, heads that set a temperature per token, calibrated answers."""

from calibrant.llm.answering import (
    Answer,
    ask,
    ask_choices,
    ask_choices_each,
    ask_each,
    ask_true,
    chat_prompt,
    load_model,
)
from calibrant.llm.answers import AnswerCalibrator, answer_confidence
from calibrant.llm.attach import Report, attached, report
from calibrant.llm.choices import (
    choice_logits,
    choice_logits_from_likelihoods,
    choice_logits_from_top,
    choice_sets,
    choice_tokens,
    p_true,
)
from calibrant.llm.collect import collect
from calibrant.llm.daca import Agreement, daca, daca_of_records
from calibrant.llm.evaluate import (
    ClaimsEvaluation,
    compare_tokens,
    evaluate_answers,
    evaluate_tokens,
)
from calibrant.llm.files import load_head, save_head
from calibrant.llm.fit import Claims, FittedHead, fit_head, token_claims
from calibrant.llm.marks import ModelMark, mark_of
from calibrant.llm.official import read_official
from calibrant.llm.questions import (
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
from calibrant.llm.reading import read_documents
from calibrant.llm.tables import TokenTable, open_table
from calibrant.llm.topk import Bounds, log_partition_bounds, top_confidence, top_logprobs

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
    "load_head",
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
    "save_head",
    "short_prompt",
    "subset",
    "token_claims",
    "top_confidence",
    "top_logprobs",
    "verdict_prompt",
]
