"""The gate as tools of the Model Context Protocol."""

from __future__ import annotations

import os
from typing import Any

from calibrant.llm.answers.graded import Row
from calibrant.llm.gate.gate import Gate
from calibrant.llm.gate.verdicts import Verdict
from calibrant.llm.gate.watch import WatchFile

INSTRUCTIONS = (
    "Judges answers of a language model by their confidence: accept them, verify them, or hand "
    "them to a person. Do not present an answer as settled unless its verdict is accept."
)


def make_server(gate: Gate, state: str | os.PathLike[str] | None = None) -> Any:
    """Return a server of the Model Context Protocol with the tools of a gate.

    Parameters
    ----------
    gate : Gate
    state : path, optional
        File of the drift watch: answers are noted there, and a withdrawn promise is respected.
    """
    file = None if state is None else WatchFile(state, gate)
    server = _empty_server()

    def check_answer(
        question: str,
        answer: str,
        token_probs: list[float] | None = None,
        confidence: float | None = None,
        source: str = "",
        model: str = "",
        kind: str = "",
        turn: int = 1,
        id: str = "",
    ) -> dict[str, Any]:
        """Judge an answer: accept it, verify it, or hand it to a person.

        Pass the probabilities of the tokens of the answer, or its confidence together with the
        source of that confidence, whichever the gate was fitted on (see gate_promise). Returns
        verdict ("accept", "verify" or "person"), confidence (the calibrated probability that the
        answer is right), threshold, promise and reason. An id allows a grade to be added later.
        """
        row: Row = {"question": question, "answer": answer, "kind": kind, "turn": turn}
        row |= {"source": source, "model": model}
        if token_probs is not None:
            row["token_probs"] = token_probs
        if confidence is not None:
            row["confidence"] = confidence
        return _checked(gate, file, row, id)

    def gate_promise() -> dict[str, Any]:
        """Return what the gate promises, and the source of the confidences that it is for."""
        return {
            "accept": gate.promise("accept"),
            "verify": gate.promise("verify"),
            "withdrawn": "" if file is None else file.read().withdrawn,
            "source": gate.source._asdict(),
        }

    for tool in (check_answer, gate_promise):
        server.add_tool(tool)
    return server


def _empty_server() -> Any:
    try:
        from mcp.server.mcpserver import MCPServer
    except ImportError as error:
        remedy = "pip install 'calibrant[mcp]'"
        raise ImportError(f"calibrant llm gate mcp needs mcp 2.0 or later: {remedy}") from error
    return MCPServer("calibrant-gate", instructions=INSTRUCTIONS, log_level="WARNING")


def _checked(gate: Gate, file: WatchFile | None, row: Row, key: str) -> dict[str, Any]:
    if "confidence" in row and gate.source.confidence and not row["source"]:
        problem = "a confidence needs its source, for instance that of gate_promise"
        return Verdict.unknown(problem).to_dict()
    withdrawn = "" if file is None else file.read().withdrawn
    verdict = gate.check_one(row, withdrawn)
    independent = gate.terms.unit == "answer" or row["turn"] == 1
    if file is not None and verdict.confidence is not None and independent:
        confidence = [verdict.confidence]
        file.update(lambda watch: watch.note(confidence, [key]))
    return verdict.to_dict()
