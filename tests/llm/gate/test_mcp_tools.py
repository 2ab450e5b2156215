"""The tools, by the client of the protocol's own package."""

import os
import sys
from pathlib import Path

import anyio
import numpy as np
import pytest

import calibrant as cal
from calibrant.llm import fit_gate
from calibrant.llm.gate.mcp_tools import make_server
from calibrant.llm.gate.watch import WatchFile
from tests.support.graded_answers import graded_answers


@pytest.fixture(scope="module")
def gate():
    answers = graded_answers(np.random.default_rng(0), 900, source="judge", model="m")
    return fit_gate(answers, max_error=0.2)


def called(server, *calls):
    """Results of calls of tools by name and arguments."""
    from mcp import Client

    async def all_of_them():
        async with Client(server) as client:
            listed = {tool.name for tool in (await client.list_tools()).tools}
            return listed, [await client.call_tool(name, values) for name, values in calls]

    listed, results = anyio.run(all_of_them)
    assert listed == {"check_answer", "gate_promise"}
    return [result.structured_content for result in results]


def about(**values):
    said = {"question": "Capital of Peru?", "answer": "Lima", "source": "judge"}
    return "check_answer", {**said, **values}


def test_verdicts_are_those_of_the_gate(gate):
    sure, unsure, promised = called(
        make_server(gate), about(confidence=0.999), about(confidence=0.3), ("gate_promise", {})
    )
    wanted = gate.check_one({"confidence": 0.999, "source": "judge"}).to_dict()
    assert sure == wanted
    assert (sure["verdict"], unsure["verdict"]) == ("accept", "person")
    assert promised["accept"] == gate.promise() == sure["promise"]
    assert promised["source"]["confidence"] == "judge"


def test_what_cannot_be_judged_is_for_a_person(gate):
    results = called(
        make_server(gate),
        about(confidence=0.99, source="self"),
        about(confidence=0.99, source=""),
        about(confidence=0.99, model="another"),
        about(confidence=1.5),
        about(),
    )
    reasons = ("not self", "needs its source", "model m, not another", "in [0, 1]", "token_probs")
    for result, reason in zip(results, reasons, strict=True):
        assert (result["verdict"], result["confidence"]) == ("person", None)
        assert reason in result["reason"]


def test_answers_are_noted_and_a_withdrawn_promise_is_respected(gate, tmp_path):
    state = tmp_path / "watch.json"
    server = make_server(gate, state)
    (first,) = called(server, about(confidence=0.999, id="a"))
    assert first["verdict"] == "accept"
    file = WatchFile(state, gate)
    assert {*file.read().pending.waiting} == {"a"}
    file.update(lambda watch: watch.note(np.full(900, 0.01)))
    later, promised = called(server, about(confidence=0.999), ("gate_promise", {}))
    assert later["verdict"] == "person"
    assert later["reason"] == promised["withdrawn"] != ""


@pytest.mark.slow
def test_the_command_speaks_on_standard_input_and_output(gate, tmp_path):
    from mcp import StdioServerParameters

    cal.save(gate, tmp_path / "gate")
    arguments = ["-m", "calibrant", "llm", "gate", "mcp", str(tmp_path / "gate")]
    assert cal.__file__ is not None
    env = {**os.environ, "PYTHONPATH": str(Path(cal.__file__).parents[1])}
    command = StdioServerParameters(command=sys.executable, args=arguments, env=env)
    (sure,) = called(command, about(confidence=0.999))
    assert sure["verdict"] == "accept"


def test_a_missing_library_is_explained(gate, monkeypatch):
    monkeypatch.setitem(sys.modules, "mcp.server.mcpserver", None)
    with pytest.raises(ImportError, match=r"pip install 'calibrant\[mcp\]'"):
        make_server(gate)
