"""The gate: accept an answer, verify it, or hand it to a person.

A guarantee holds for answers like those it was found with. Two tests watch for others, each a
:class:`~calibrant.monitor.Monitor`:

- of grades: calibrated confidences and whether the answers were right, against those of the fit;
- of confidences alone: the share of answers above a confidence, against that share at the fit. Of
  each answer one of ``_CUTS`` shares is looked at, in turn, so that the answers are independent
  bets.

While the answers do not change, the probability of ever raising an alarm is at most
``false_alarms``, half of it for each test. After an alarm the guarantee is withdrawn until a new
gate is fitted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from calibrant._core import checks
from calibrant._core.checks import FloatArray, warnings_at_caller
from calibrant._core.messages import comma_separated, printable_name
from calibrant._core.showing import as_html, frame, one_line, threshold_text
from calibrant.artifacts.objects import class_of, kind_of
from calibrant.decide.probabilities import check_share
from calibrant.decide.threshold_results import Threshold
from calibrant.llm.answers.calibrator import _check_state, _finite_numbers
from calibrant.llm.answers.rows import (
    AnswerRows,
    Row,
    Source,
    SourceError,
    _unpacked_cell,
    is_cut_off,
    json_digest,
)
from calibrant.llm.answers.signal_calibrator import SignalCalibrator
from calibrant.llm.answers.signals import signals_of
from calibrant.monitor import Monitor

if TYPE_CHECKING:
    import pandas as pd


_CUTS = 8
"""Confidences at which shares are compared."""
_SHARES = (_CUTS - np.arange(_CUTS) - 0.5) / _CUTS
"""Shares of answers above the cuts, one in the middle of each bin of a monitor."""
_BINS, _MIN_FOR_ALL_BINS = 10, 1000
"""Bins of the test of grades, half of them for fewer graded answers than many."""
_WINDOW = 100
"""Answers between the beginnings of drift that are tested for."""
_TOLERANCE = 0.05
"""Largest change of a share of answers that is not drift."""


class DriftReference(NamedTuple):
    """Confidences and outcomes at the fit, in the form in which monitors compare with them.

    ``cuts`` are rising confidences; the monitors ``grades`` and ``confidences`` have no examples.
    """

    cuts: FloatArray
    grades: Monitor
    confidences: Monitor

    @classmethod
    def of(cls, confidence: FloatArray, correct: FloatArray, false_alarms: float) -> DriftReference:
        """Make the reference of independent graded answers, ``(n,)``, in random order."""
        half = len(confidence) // 2
        # confidences for the cuts, and others for the shares above them
        cuts = np.quantile(confidence[:half], 1 - _SHARES)
        settings: dict[str, Any] = {"false_alarms": false_alarms / 2, "window": _WINDOW}
        # every answer counts at every cut: the limits of a monitor hold for each bin by itself
        over = confidence[half:, None] >= cuts
        shares = np.broadcast_to(_SHARES, over.shape).ravel(), over.ravel()
        watched = Monitor(reference=shares, bins=_CUTS, tolerance=_TOLERANCE, **settings)
        bins = _BINS if len(confidence) >= _MIN_FOR_ALL_BINS else _BINS // 2
        grades = Monitor(reference=(confidence, correct), bins=bins, **settings)
        return cls(cuts, grades, watched)

    def state(self) -> dict[str, Any]:
        """Return everything for JSON."""
        watched = {name: getattr(self, name).state() for name in ("grades", "confidences")}
        return {"cuts": self.cuts.tolist(), **watched}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> DriftReference:
        """Make the reference of what :meth:`state` returned."""
        _check_state(state, cls._fields, cls)
        cuts = _finite_numbers(state["cuts"], _CUTS, "cuts")
        if not ((cuts >= 0) & (cuts <= 1)).all():
            raise ValueError(f"cuts must be in [0, 1], got {state['cuts']!r:.80}")
        grades, confidences = (Monitor.from_state(state[name]) for name in cls._fields[1:])
        return cls(cuts, grades, confidences)


Unit = Literal["answer", "turn", "conversation"]
Decision = Literal["accept", "verify", "person"]
DECISIONS: tuple[Decision, ...] = ("accept", "verify", "person")
"""Decisions, the most careful one last."""
_PROMISES = {
    "answer": "at most {} of the accepted answers are wrong",
    "turn": "at most {} of the accepted turns are wrong, averaged over conversations",
    "conversation": "at most {} of the conversations with accepted turns have a wrong one "
    "among these",
}


class Terms(NamedTuple):
    """What a gate guarantees.

    ``max_error`` is the largest share of wrong answers, turns or conversations, ``certainty`` the
    probability that all guarantees hold, ``unit`` what they count, and what is independent.
    ``verifier_misses`` is the largest share of the wrong answers in the band to verify that a
    verifier lets through; None if there is no verifier.
    """

    max_error: float
    certainty: float = 0.95
    unit: Unit = "answer"
    verifier_misses: float | None = None

    def check(self) -> Terms:
        """Return the terms; raise if nothing can be guaranteed by them."""
        check_share(self.max_error, "max_error", "0.05 allows 5 % of wrong answers")
        check_share(self.certainty, "certainty", "0.95 means 95 %")
        checks.check_choice("unit", self.unit, get_args(Unit))
        if self.verifier_misses is not None:
            example = "0.2 is a verifier that misses one wrong answer in five"
            check_share(self.verifier_misses, "verifier_misses", example)
            if self.unit == "conversation":
                raise ValueError(
                    "verifier_misses must be left out with unit='conversation': a verifier that "
                    "misses some of several wrong turns spoils more conversations than that share"
                )
        return self

    @property
    def max_to_verify(self) -> float:
        """Largest share of wrong answers in the band to verify."""
        return min(1.0, self.max_error / (self.verifier_misses or 1.0))

    def promises(self) -> dict[Decision, str]:
        """Return what is guaranteed about each decision, in words."""
        error, certain = _percent(self.max_error), _percent(self.certainty)
        texts: dict[Decision, str] = dict.fromkeys(DECISIONS, "")
        texts["accept"] = f"With {certain} certainty, {_PROMISES[self.unit].format(error)}."
        if self.verifier_misses is not None:
            wrong = _PROMISES[self.unit].replace("accepted ", "").replace(" are", " to verify are")
            texts["verify"] = (
                f"With {certain} certainty, {wrong.format(_percent(self.max_to_verify))}: "
                f"a verifier that misses at most {_percent(self.verifier_misses)} of the wrong "
                f"ones leaves at most {error} wrong."
            )
        return texts


class Band(NamedTuple):
    """Thresholds for some kinds of questions.

    ``verify`` is the threshold of answers that are not accepted, None without a verifier;
    ``kinds`` are those for which the guarantees hold together, None for any.
    """

    accept: Threshold
    verify: Threshold | None = None
    kinds: tuple[str, ...] | None = None

    def decide(self, confidence: float) -> tuple[Decision, float, str]:
        """Return the decision about a confidence, the threshold that decided, and the reason."""
        said = f"the confidence {threshold_text(confidence)}"
        if confidence >= self.accept.threshold:
            return "accept", self.accept.threshold, f"{said} is at least {self._text('accept')}"
        if self.verify is not None and confidence >= self.verify.threshold:
            why = f"{said} is below {self._text('accept')} and at least {self._text('verify')}"
            return "verify", self.verify.threshold, why
        lowest = "accept" if self.verify is None else "verify"
        return "person", getattr(self, lowest).threshold, f"{said} is below {self._text(lowest)}"

    def _text(self, name: str) -> str:
        limit: float = getattr(self, name).threshold
        return "every threshold" if math.isinf(limit) else threshold_text(limit)

    def name(self) -> str:
        """Return the kinds in words."""
        return (
            "all" if self.kinds is None else comma_separated(kind or "none" for kind in self.kinds)
        )

    def state(self) -> dict[str, Any]:
        """Return the thresholds for JSON."""
        return {
            "accept": self.accept.state(),
            "verify": self.verify and self.verify.state(),
            "kinds": None if self.kinds is None else list(self.kinds),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Band:
        """Make a band of what :meth:`state` returned."""
        _check_state(state, cls._fields, cls)
        verify, kinds = state["verify"], state["kinds"]
        return cls(
            Threshold.from_state(state["accept"]),
            None if verify is None else Threshold.from_state(verify),
            None if kinds is None else tuple(map(str, kinds)),
        )


class Verdict(NamedTuple):
    """What to do with an answer.

    ``calibrated`` is the calibrated probability that the answer is right, None if it is unknown,
    ``threshold`` the one that decided, ``promise`` what is guaranteed about all answers with this
    verdict, empty if nothing is.
    """

    verdict: Decision
    calibrated: float | None
    threshold: float | None
    promise: str
    reason: str

    @classmethod
    def unknown(cls, reason: str) -> Verdict:
        """Return the verdict on an answer whose confidence is unknown."""
        return cls("person", None, None, "", printable_name(reason))

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON: an infinite threshold is None."""
        values = self._asdict()
        if self.threshold is not None and math.isinf(self.threshold):
            values["threshold"] = None
        return values


def _percent(share: float) -> str:
    return f"{100 * share:.4g} %"


class Gate:
    """A map from confidences to probabilities, thresholds on them, and what these guarantee.

    :func:`fit_gate` makes gates; :func:`calibrant.save` keeps everything in one artifact. There is
    one of the ``bands`` for all kinds of questions, or one for each set of kinds with guarantees of
    its own. ``drift`` is what the answers looked like for which the guarantees were found.
    """

    def __init__(
        self, calibrator: Any, bands: Sequence[Band], terms: Terms, drift: DriftReference
    ) -> None:
        self.calibrator = calibrator
        self.bands = tuple(bands)
        self.terms = terms.check()
        self.drift = drift
        self._by_kind = {kind: band for band in bands for kind in band.kinds or ()}
        if not self.bands or (len(self.bands) > 1 and any(b.kinds is None for b in self.bands)):
            raise ValueError("a gate has one band for any kind of question, or bands with kinds")

    @property
    def source(self) -> Source:
        """Origin of the confidences that the gate is for."""
        source: Source = self.calibrator.source_
        return source

    @property
    def accepts_some(self) -> bool:
        """True if some confidence is accepted."""
        return any(band.accept.coverage > 0 for band in self.bands)

    def check(
        self, answers: AnswerRows | Sequence[Mapping[str, Any]], withdrawn: str = ""
    ) -> list[Verdict]:
        """Return a verdict for each answer, of rows or a list of dictionaries.

        An answer whose confidence cannot be computed, or is not that of its whole text, is handed
        to a person, with the reason; so is every answer if ``withdrawn`` says why nothing is
        guaranteed any more (:attr:`GateWatch.withdrawn`). Raises SourceError if the confidences are
        of another source than those of the fit.
        """
        answers = AnswerRows.of(answers)
        with warnings_at_caller():
            scores = self._scores(answers)
        verdicts, promises = [], self.terms.promises()
        for row, score in zip(answers.rows, scores, strict=True):
            kind = str(row.get("kind") or "")
            band = self._by_kind.get(kind) if self._by_kind else self.bands[0]
            if isinstance(score, str):
                verdicts.append(Verdict.unknown(score))
            elif withdrawn or band is None:
                kind = printable_name(kind or "none")
                unseen = f"nothing is guaranteed about questions of kind {kind}: none was graded"
                verdicts.append(Verdict("person", score, None, "", withdrawn or unseen))
            else:
                decision, limit, reason = band.decide(score)
                verdicts.append(Verdict(decision, score, limit, promises[decision], reason))
        return verdicts

    def check_one(self, row: Row, withdrawn: str = "") -> Verdict:
        """Return the verdict on one answer; one of another source is handed to a person."""
        try:
            return self.check(AnswerRows(["the answer"], [row]), withdrawn)[0]
        except SourceError as error:
            return Verdict.unknown(str(error))

    def _scores(self, answers: AnswerRows) -> list[float | str]:
        """Return the calibrated probability of each answer, or why there is none."""
        fitted, known, always = self.calibrator, self.source.confidence, []
        if isinstance(fitted, SignalCalibrator):
            known, always = "", [name for name in fitted.names_ if fitted.coverage_[name] == 1]
        unnamed = f"its confidence has no source, and the gate is for {known}"
        scores: list[float | str] = [
            _unscored(row)
            or (unnamed if known and "confidence" in row and not row.get("source") else "")
            for row in answers.rows
        ]
        whole = np.flatnonzero([not problem for problem in scores])
        try:
            chances = fitted.predict_rows(answers.where(whole)) if whole.size else ()
            for i, chance in zip(whole.tolist(), chances, strict=True):
                # a map of signals estimates missing ones as well as at the fit only if they are
                # missing as often as there
                found = signals_of([answers.rows[i]]).rows[0]["signals"] if always else {}
                lacking = [name for name in always if found.get(name) is None]
                said = f"it lacks {comma_separated(lacking)}, which every graded answer had"
                scores[i] = said if lacking else float(chance)
        except SourceError:
            raise
        except ValueError as error:
            if len(answers.rows) == 1:
                return [str(error)]
            # one of them has no usable confidence: each for itself
            single = (answers.where(np.array([i])) for i in range(len(scores)))
            return [score for one in single for score in self._scores(one)]
        return scores

    def promise(self, decision: Decision = "accept") -> str:
        """Return the guarantee about answers with a decision, in words; empty if there is none."""
        if decision == "accept" and not self.accepts_some:
            return ""
        text = self.terms.promises()[decision]
        if not text or not self._by_kind:
            return text
        sets = (
            f"{band.name()}{' together' if len(band.kinds or ()) > 1 else ''}"
            for band in self.bands
        )
        return f"{text} It holds for each of: {'; '.join(sets)}."

    def describe(self) -> str:
        """Describe the gate in a line."""
        graded = sum(band.accept.n for band in self.bands)
        return f"gate found with {graded:,} graded {self.terms.unit}s; {self.calibrator.describe()}"

    def __repr__(self) -> str:
        said = self.promise().rstrip(".") or "accepts none"
        return one_line(self, said, *(threshold_text(b.accept.threshold) for b in self.bands))

    _repr_html_ = as_html

    def to_frame(self) -> pd.DataFrame:
        """Return a frame with the thresholds for each set of kinds. Needs pandas."""
        return frame(
            {"kind": band.name(), "decision": decision, **limit._asdict()}
            for band in self.bands
            for decision, limit in (("accept", band.accept), ("verify", band.verify))
            if limit is not None
        )

    def fingerprint(self) -> str:
        """Return the identity of the gate."""
        return json_digest(self.state())

    def state(self) -> dict[str, Any]:
        """Return everything for JSON, the map included."""
        return {
            "map": {"kind": kind_of(self.calibrator), "state": self.calibrator.state()},
            "bands": [band.state() for band in self.bands],
            "terms": self.terms._asdict(),
            "drift": self.drift.state(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Gate:
        """Make a gate of what :meth:`state` returned."""
        _check_state(state, ("map", "bands", "terms", "drift"), cls)
        calibrator = class_of(state["map"]["kind"]).from_state(state["map"]["state"])
        if not isinstance(getattr(calibrator, "source_", None), Source):
            raise ValueError(f"a gate needs a map of answers, got a {type(calibrator).__name__}")
        bands = [Band.from_state(band) for band in state["bands"]]
        drift = DriftReference.from_state(state["drift"])
        return cls(calibrator, bands, Terms(**state["terms"]), drift)


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_SPECIAL = re.compile(r"<[^<>\s]{1,40}>")
"""Tokens that are not text, such as those that end a turn."""


def _unscored(row: Row) -> str:
    """Return why the confidence of an answer is not that of its whole text; empty if it is.

    >>> _unscored({"answer": "Lima, Peru", "tokens": ["Li", "ma"], "token_probs": [0.9, 0.9]})
    'its tokens make up another text than the answer, so that a part of it was not scored'
    """
    if is_cut_off(row):
        return "the answer was cut off at the largest number of tokens"
    answer = row.get("answer")
    if isinstance(answer, str) and not answer.strip():
        return "the answer is empty"
    texts, probs = row.get("tokens", row.get("token_texts")), row.get("token_probs")
    try:
        texts, count = _unpacked_cell(texts), None if probs is None else len(_unpacked_cell(probs))
    except (TypeError, ValueError):
        return "its tokens or token_probs cannot be read"
    if count is None or not isinstance(texts, list):
        return ""
    if len(texts) != count:
        return "it does not have one probability for each of its tokens"
    whole = row.get("completion") or answer  # of which the answer may be a part
    if isinstance(whole, str) and not _covers(list(map(str, texts)), whole):
        return (
            "its tokens make up another text than the answer, so that a part of it was not scored"
        )
    return ""


def _covers(texts: Sequence[str], answer: str) -> bool:
    """Return True if the tokens are those of the answer, with others only at its end.

    Servers trim blanks, and leave out what ends the answer: special tokens, or a last token with a
    stop sequence. Some show a token that ends within a character as replacement characters.
    """
    whole, wanted = "".join(texts), answer.strip()
    if _INCOMPLETE in whole:
        parts = re.split(f"({_INCOMPLETE}+)", _SPECIAL.sub("", whole).strip())
        pattern = "".join(
            f"[^\\x00-\\x7f]{{1,{len(part)}}}" if part.startswith(_INCOMPLETE) else re.escape(part)
            for part in parts
        )
        return re.fullmatch(pattern, wanted) is not None
    start = whole.find(wanted)
    if start < 0 or _SPECIAL.sub("", whole[:start]).strip():
        return False
    after = _SPECIAL.sub("", whole[start + len(wanted) :]).strip()
    return len(after) <= len(texts[-1])
