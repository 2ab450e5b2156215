"""Language models: token tables, temperature heads, and calibrated answers.

The names here are those of everyday use; the others are in ``heads``, ``answers`` and ``gate``.
"""

from calibrant.estimate.judge_report import judge_report
from calibrant.estimate.success_rate import success_rate
from calibrant.llm.answers.asking import Answer, ask, chat_prompt
from calibrant.llm.answers.calibrator import AnswerCalibrator
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.fields import documents_of, fields_of
from calibrant.llm.answers.judged import read_judged
from calibrant.llm.answers.logs.reading import Log, read_log
from calibrant.llm.answers.logs.study import study_answers
from calibrant.llm.answers.rows import read_answers
from calibrant.llm.answers.signal_calibrator import SignalCalibrator
from calibrant.llm.answers.signals import signals_of
from calibrant.llm.answers.stated import stated_confidence
from calibrant.llm.answers.streaming import stream
from calibrant.llm.answers.topk import top_confidence
from calibrant.llm.gate.fitting import fit_gate
from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.openai_client import gated
from calibrant.llm.gate.watch import GateWatch
from calibrant.llm.heads.attach import attached
from calibrant.llm.heads.collect import collect
from calibrant.llm.heads.fit import fit_head
from calibrant.llm.heads.fitted import FittedHead, token_predictions
from calibrant.llm.heads.reading import read_documents
from calibrant.llm.heads.tables import open_table
from calibrant.llm.models.loading import load_model
from calibrant.workflows.evaluate_answers import evaluate_answers

__all__ = [
    "Answer",
    "AnswerCalibrator",
    "FittedHead",
    "Gate",
    "GateWatch",
    "Log",
    "SignalCalibrator",
    "answer_confidence",
    "ask",
    "attached",
    "chat_prompt",
    "collect",
    "documents_of",
    "evaluate_answers",
    "fields_of",
    "fit_gate",
    "fit_head",
    "gated",
    "judge_report",
    "load_model",
    "open_table",
    "read_answers",
    "read_documents",
    "read_judged",
    "read_log",
    "signals_of",
    "stated_confidence",
    "stream",
    "study_answers",
    "success_rate",
    "token_predictions",
    "top_confidence",
]
