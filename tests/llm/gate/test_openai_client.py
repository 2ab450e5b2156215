"""The client of OpenAI with a gate, before a server that answers as told."""

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from calibrant.llm import fit_gate
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.gate import serving
from calibrant.llm.gate.openai_client import gated
from calibrant.llm.gate.serving import LiveGate
from calibrant.llm.gate.watch import WatchFile
from tests.support.fake_upstream import MODEL, SURE, UNSURE, Upstream
from tests.support.graded_answers import graded_answers
from tests.support.local_server import local_server

openai = pytest.importorskip("openai")
KEY = "sk-a-secret-of-the-client"
NO_RETRY: Any = {"api_key": KEY, "max_retries": 0, "timeout": 20}


@pytest.fixture(scope="module")
def served(token_gate):
    """The upstream, and a client with the gate."""
    upstream = Upstream()
    with local_server(upstream.app) as port:
        base = f"http://127.0.0.1:{port}/v1"
        with openai.OpenAI(base_url=base, **NO_RETRY) as client:
            yield SimpleNamespace(client=gated(client, token_gate), upstream=upstream, base=base)


def chat(served, said, **options):
    messages = [{"role": "user", "content": said}]
    return served.client.chat.completions.create(model=MODEL, messages=messages, **options)


def streamed(served, said, **options):
    """Chunks, and the verdict that one of them has."""
    chunks = list(chat(served, said, stream=True, **options))
    (verdict,) = (chunk.calibrant for chunk in chunks if hasattr(chunk, "calibrant"))
    return chunks, verdict


def test_a_sure_answer_is_accepted_with_its_promise(served, token_gate):
    answer = chat(served, "sure")
    assert answer.choices[0].message.content == "Lima"
    said = answer.calibrant
    assert said["calibrated"] == pytest.approx(
        token_gate.calibrator.predict(answer_confidence([np.exp(SURE)]))[0]
    )
    assert said["verdict"] == "accept"
    assert said["threshold"] == token_gate.bands[0].accept.threshold <= said["calibrated"]
    assert said["promise"] == token_gate.promise()
    unsure = chat(served, "unsure").calibrant
    assert unsure["verdict"] == "person"
    wanted = token_gate.calibrator.predict(answer_confidence([np.exp(UNSURE)]))[0]
    assert unsure["calibrated"] == pytest.approx(wanted)


def test_the_client_that_is_passed_is_not_changed(served, token_gate):
    with openai.OpenAI(base_url=served.base, **NO_RETRY) as client:
        before = client.chat.completions, client.completions, client.responses
        client_with_gate = gated(client, token_gate)
        assert type(client_with_gate) is openai.OpenAI
        assert before == (client.chat.completions, client.completions, client.responses)
        plain = SimpleNamespace(client=client)
        assert not hasattr(chat(plain, "sure"), "calibrant")
        assert served.upstream.seen[-1][1].get("logprobs") is None
        assert chat(SimpleNamespace(client=client_with_gate), "sure").calibrant == (
            chat(served, "sure").calibrant
        )


@pytest.mark.parametrize("form", ["chat", "completions", "responses"])
def test_clients_with_one_kind_of_requests(served, token_gate, form):
    with openai.OpenAI(base_url=served.base, **NO_RETRY) as client:
        some = gated(SimpleNamespace(**{form: getattr(client, form)}), token_gate)
        options: Any = {
            "chat": {"messages": [{"role": "user", "content": "sure"}]},
            "completions": {"prompt": "sure"},
            "responses": {"input": "sure"},
        }
        resource = some.chat.completions if form == "chat" else getattr(some, form)
        answer = resource.create(model=MODEL, **options[form])
        assert answer.calibrant["verdict"] == "accept"


def test_raw_responses_are_as_they_came(served):
    client, messages = served.client, [{"role": "user", "content": "sure"}]
    for raw in (
        client.chat.completions.with_raw_response,
        client.with_raw_response.chat.completions,
    ):
        answer = raw.create(model=MODEL, messages=messages).parse()
        assert answer.choices[0].message.content == "Lima"
        assert not hasattr(answer, "calibrant")
        assert "logprobs" not in served.upstream.seen[-1][1]


def test_what_is_no_client_is_refused(token_gate):
    with pytest.raises(TypeError, match="must have chat, completions, responses, got namespace"):
        gated(SimpleNamespace(embeddings=None), token_gate)


def test_log_probabilities_are_requested_and_taken_out_again(served):
    assert chat(served, "sure").choices[0].logprobs is None
    assert served.upstream.seen[-1][1]["logprobs"] is True
    kept = chat(served, "sure", logprobs=True, top_logprobs=2)
    assert [one.logprob for one in kept.choices[0].logprobs.content] == SURE
    assert served.upstream.seen[-1][1]["top_logprobs"] == 2
    chunks, _ = streamed(served, "sure")
    assert all(c.choices[0].logprobs is None for c in chunks)
    chunks, _ = streamed(served, "sure", logprobs=True)
    shown = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs]
    assert [one.content[0].logprob for one in shown] == SURE


def test_the_chunk_with_the_end_has_the_verdict(served):
    chunks, said = streamed(served, "sure")
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Lima"  # each has a choice
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].calibrant == said == chat(served, "sure").calibrant
    usage = {"include_usage": True}
    *_, last, more = chat(served, "sure", stream=True, stream_options=usage)
    assert more.usage.total_tokens == 3
    assert last.calibrant == said


def test_chunks_come_one_by_one_and_a_closed_stream_ends(served):
    start = time.monotonic()
    with chat(served, "endless", stream=True) as stream:
        next(stream)
        assert time.monotonic() - start < 2
        assert stream.response.status_code == 200  # all else is that of the stream
    end = time.monotonic() + 10
    while served.upstream.open_streams and time.monotonic() < end:
        time.sleep(0.05)
    assert served.upstream.open_streams == 0  # the server is not left writing


def test_several_choices_have_a_verdict_each(served):
    both = chat(served, "mixed", n=2).calibrant
    assert [one["verdict"] for one in both["choices"]] == ["accept", "person"]
    assert [one["index"] for one in both["choices"]] == [0, 1]
    assert both["verdict"] == "person"
    assert streamed(served, "mixed", n=2)[1] == both


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("tool", "it is a tool call, not an answer"),
        ("refusal", "it is a refusal"),
        ("filtered", "lacks a part that a content filter removed"),
        ("empty", "the answer is empty"),
        ("without", "the service returned no log-probabilities"),
        ("partial", "a part of it was not scored"),
        ("garbled", "a part of it was not scored"),
        ("length", "cut off at the largest number of tokens"),
        ("nan", "is not a number up to 0"),
        ("huge", "is not a number up to 0"),
        ("lies", "is not a number up to 0"),
    ],
)
def test_what_was_not_scored_wholly_is_for_a_person(served, said, reason):
    for verdict in (chat(served, said).calibrant, streamed(served, said)[1]):
        assert verdict["verdict"] == "person"
        assert reason in verdict["reason"]
        assert verdict["calibrated"] is None
        assert verdict["promise"] == ""


def test_responses(served, token_gate):
    options: Any = {"model": MODEL, "input": "sure"}
    whole = served.client.responses.create(**options)
    assert whole.output_text == "Lima"
    assert whole.calibrant["verdict"] == "accept"
    wanted = token_gate.calibrator.predict(answer_confidence([np.exp(SURE)]))[0]
    assert whole.calibrant["calibrated"] == pytest.approx(wanted)
    assert whole.output[0].content[0].logprobs == []
    *deltas, last = served.client.responses.create(**options, stream=True)
    assert "".join(event.delta for event in deltas) == "Lima"
    assert all(event.logprobs == [] for event in deltas)
    assert last.response.calibrant == whole.calibrant
    include = ["message.output_text.logprobs"]
    kept = served.client.responses.create(**options, include=include)
    assert [one.logprob for one in kept.output[0].content[0].logprobs] == SURE
    cut = served.client.responses.create(model=MODEL, input="length")
    assert "cut off" in cut.calibrant["reason"]
    *_, last = served.client.responses.create(model=MODEL, input="length", stream=True)
    assert last.response.calibrant == cut.calibrant


def test_completions(served):
    options = {"model": MODEL, "prompt": "sure"}
    whole = served.client.completions.create(**options)
    assert (whole.choices[0].text, whole.choices[0].logprobs) == ("Lima", None)
    assert whole.calibrant["verdict"] == "accept"
    *_, last = served.client.completions.create(**options, stream=True)
    assert last.calibrant == whole.calibrant
    kept = served.client.completions.create(**options, logprobs=0)
    assert kept.choices[0].logprobs.token_logprobs == SURE
    echoed = served.client.completions.create(**options, echo=True)
    assert echoed.calibrant["reason"] == "the answer begins with the prompt (echo)"


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, "AuthenticationError"), (429, "RateLimitError"), (500, "APIError")],
)
def test_errors_of_the_service_pass(served, status, error):
    for options in ({}, {"stream": True}):
        with pytest.raises(getattr(openai, error), match="it went wrong") as raised:
            chat(served, f"status {status}", **options)
        assert raised.value.status_code == status


def test_a_stream_that_breaks_raises_after_its_verdict(served):
    seen = []
    with pytest.raises(Exception, match=r"onnection|closed|incomplete") as raised:
        seen.extend(chat(served, "cut", stream=True))
    assert "calibrant" not in type(raised.value).__module__
    assert seen[-1].calibrant["verdict"] == "person"
    assert seen[-1].calibrant["reason"] == "the answer was cut off before its end"


def test_a_stream_without_an_end_is_for_a_person(served):
    chunks, said = streamed(served, "no end")
    assert (said["verdict"], said["reason"]) == ("person", "the answer was cut off before its end")
    assert chunks[-1].choices[0].delta.content is None


class Chunk(SimpleNamespace):
    """A chunk as the client makes one, whatever a service sends."""

    def model_dump(self, **_):
        return {"model": MODEL, "choices": self.sent}


@pytest.mark.parametrize("damage", [["x"], 5, [{"delta": ["x"]}], [{"delta": {"content": 2.5}}]])
def test_a_chunk_of_another_form_breaks_no_stream(token_gate, damage):
    end = [{"index": 0, "delta": {"content": "Lima"}, "finish_reason": "stop"}]
    chunks = [Chunk(sent=damage, choices=[]), Chunk(sent=end, choices=[])]
    call = serving.Call(LiveGate(token_gate), {"messages": []}, "chat", {})
    assert list(serving._chunks_with_verdict(chunks, call)) == chunks
    assert chunks[1].calibrant["verdict"] == "person"
    assert "a chunk has another form than OpenAI's" in chunks[1].calibrant["reason"]


def test_requests_at_the_same_time(served, token_gate):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=served.base, **NO_RETRY) as plain:
            client = gated(plain, token_gate)

            async def one(i):
                said = "sure" if i % 2 else "unsure"
                options: Any = {"model": MODEL, "messages": [{"role": "user", "content": said}]}
                if i % 3:
                    answer: Any = await client.chat.completions.create(**options)
                    return answer.calibrant["verdict"]
                async with await client.chat.completions.create(**options, stream=True) as stream:
                    return [chunk async for chunk in stream][-1].calibrant["verdict"]

            return await asyncio.gather(*map(one, range(30)))

    assert asyncio.run(all_of_them()) == ["accept" if i % 2 else "person" for i in range(30)]


@pytest.fixture
def client_of(served):
    """Return a function that makes a client with a gate."""
    clients = []

    def make(gate, **options):
        clients.append(openai.OpenAI(base_url=served.base, **NO_RETRY))
        return SimpleNamespace(client=gated(clients[-1], gate, **options))

    yield make
    for client in clients:
        client.close()


def test_answers_from_elsewhere_are_for_a_person(make_gate, client_of):
    about = {"prompt": "chat", "sampling": "temperature=0"}
    assert (
        chat(client_of(make_gate(**about)), "sure", temperature=0).calibrant["verdict"] == "accept"
    )
    cases: Any = (
        (make_gate("another"), {}, "model another, not fake-model"),
        (make_gate(**about), {}, "sampling temperature=0, not default"),
        (make_gate(**about), {"temperature": 1}, "sampling temperature=0, not temperature=1"),
        (make_gate(prompt="plain"), {}, "prompt plain, not chat"),
        *(
            (make_gate(**about), {"temperature": 0, name: value}, f"temperature=0, {name}=")
            for name, value in (
                ("stop", ["."]),
                ("logit_bias", {"11": 5}),
                ("reasoning_effort", "low"),
                ("response_format", {"type": "json_object"}),
            )
        ),
    )
    for gate, options, reason in cases:
        answer = chat(client_of(gate), "sure", **options).calibrant
        assert answer["verdict"] == "person"
        assert reason in answer["reason"]


def test_a_system_message_is_another_form_of_prompt(make_gate, client_of):
    served = client_of(make_gate(prompt="chat"))
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "sure"}]
    said = served.client.chat.completions.create(model=MODEL, messages=messages).calibrant
    assert said["verdict"] == "person"
    assert "prompt chat, not chat, system" in said["reason"]


def test_the_kind_of_a_question_is_a_header(served, token_gate, client_of):
    plain = chat(served, "sure", extra_headers={"X-Calibrant-Kind": "a", "X-Trace": "t"})
    assert plain.calibrant["verdict"] == "accept"
    headers, _ = served.upstream.seen[-1]
    assert headers["x-trace"] == "t"
    assert "x-calibrant-kind" not in headers
    band = token_gate.bands[0]._replace(kinds=("a",))
    gate = type(token_gate)(token_gate.calibrator, [band], token_gate.terms, token_gate.drift)
    own = client_of(gate)
    for kind, verdict in (("a", "accept"), ("b", "person")):
        answer = chat(own, "sure", extra_headers={"X-Calibrant-Kind": kind})
        assert answer.calibrant["verdict"] == verdict


@pytest.fixture
def state(token_gate, tmp_path):
    file = WatchFile(tmp_path / "watch.json", token_gate)
    file.start()
    return file


def test_answers_are_noted_and_grades_withdraw_the_promise(
    token_gate, client_of, state, monkeypatch
):
    monkeypatch.setattr(serving, "_PERIOD", 0.05)
    served = client_of(token_gate, state=state.path)
    for said in ("sure", "tool", "unsure"):
        chat(served, said)
    wait_for(lambda: state.read().confidences.seen == 2)  # not the tool call
    assert "r-1" in state.read().pending.waiting
    assert KEY not in state.path.read_text()
    state.update(lambda watch: watch.observe(np.full(900, 0.99), np.arange(900) % 2))
    wait_for(lambda: chat(served, "sure").calibrant["verdict"] == "person")
    said = chat(served, "sure").calibrant
    assert said["reason"].startswith("the guarantee is withdrawn: the grades contradict")


def wait_for(condition):
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("damage", ["", "{", '{"gate": 1}'])
def test_a_missing_or_damaged_state_promises_nothing(token_gate, state, caplog, damage):
    state.update(lambda watch: watch.note(np.full(900, 0.01)))  # which withdraws it
    assert "the confidences differ" in caplog.text
    if damage:
        state.path.write_text(damage)
    else:
        state.path.unlink()
    with caplog.at_level(logging.ERROR):
        live = LiveGate(token_gate, state.path)
    assert live.withdrawn.startswith("the guarantee is withdrawn: ")
    assert "is unknown; if it was not, start a new file" in live.withdrawn
    assert str(state.path) in caplog.text
    live.note("a", 0.9)
    live.flush()
    assert live.withdrawn
    assert state.path.exists() is bool(damage)
    live.close()


def test_a_promise_that_was_withdrawn_stays_so_in_a_process(token_gate, state):
    live = LiveGate(token_gate, state.path)
    assert live.withdrawn == ""
    state.path.unlink()
    live.flush()
    assert "is missing" in live.withdrawn
    state.start()
    live.flush()
    assert "is missing" in live.withdrawn
    live.close()


def test_notes_survive_a_disk_that_is_full(token_gate, state, monkeypatch, caplog):
    live = LiveGate(token_gate, state.path)
    live.note("a", 0.9)
    with monkeypatch.context() as patch:
        patch.setattr(WatchFile, "update", lambda *_: (_ for _ in ()).throw(OSError("full")))
        live.flush()
    assert "full" in caplog.text
    assert live.withdrawn == ""
    live.close()
    assert state.read().confidences.seen == 1


def test_gates_for_other_confidences_are_refused(rng):
    gate = fit_gate(graded_answers(rng, 300, source="live"), max_error=0.5)
    with pytest.raises(ValueError, match="this gate is for live, which no service returns"):
        LiveGate(gate)
