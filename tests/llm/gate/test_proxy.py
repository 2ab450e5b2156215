"""The proxy, by the client of OpenAI, before a server that answers as told."""

import asyncio
import json
import math
import time
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from calibrant.llm import fit_gate
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.answers.graded import AnswerRows
from calibrant.llm.gate import proxy as proxies
from calibrant.llm.gate.judging import Judge
from calibrant.llm.gate.proxy import Settings, check_upstream, make_proxy
from calibrant.llm.gate.watch import WatchFile
from tests.support.fake_upstream import MODEL, SURE, UNSURE, Upstream
from tests.support.graded_answers import graded_answers
from tests.support.local_server import local_server

KEY = "sk-a-secret-of-the-client"
NO_RETRY: Any = {"api_key": KEY, "max_retries": 0, "timeout": 20}


def make_gate(model=MODEL, **options):
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(1500):
        probs = rng.beta(6, 1, 2)
        right = rng.random() < answer_confidence([probs])[0]
        rows.append({"token_probs": probs.tolist(), "correct": bool(right), "model": model})
    return fit_gate(AnswerRows.of(rows), max_error=0.1, **options)


@pytest.fixture(scope="module")
def gate():
    return make_gate()


@pytest.fixture(scope="module")
def served(gate, tmp_path_factory):
    """The upstream, the proxy before it, and a client."""
    state = tmp_path_factory.mktemp("gate") / "watch.json"
    upstream, judge = Upstream(), Judge(gate, state)
    with local_server(upstream.app) as behind:

        def make(port):
            address = f"http://127.0.0.1:{behind}/v1"
            return make_proxy(
                judge, Settings(address, "127.0.0.1", port, timeout=0.5, max_body=10_000)
            )

        with local_server(make) as port:
            base = f"http://127.0.0.1:{port}/v1"
            client = openai.OpenAI(base_url=base, **NO_RETRY)
            yield SimpleNamespace(
                client=client, upstream=upstream, judge=judge, base=base, port=port, state=state
            )
            client.close()


def chat(served, said, **options):
    messages = [{"role": "user", "content": said}]
    return served.client.chat.completions.create(model=MODEL, messages=messages, **options)


def streamed(served, said, **options):
    """Chunks, and the verdict of the last one."""
    chunks = list(chat(served, said, stream=True, **options))
    return chunks[:-1], chunks[-1].calibrant


def test_a_sure_answer_is_accepted_with_its_promise(served, gate):
    answer = chat(served, "sure")
    assert answer.choices[0].message.content == "Lima"
    said = answer.calibrant
    wanted = gate.calibrator.predict([np.exp(SURE)])[0]
    assert said["confidence"] == pytest.approx(wanted)
    assert said["verdict"] == "accept"
    assert said["threshold"] == gate.bands[0].accept.threshold <= said["confidence"]
    assert said["promise"] == gate.promise()
    assert "is at least" in said["reason"]
    unsure = chat(served, "unsure").calibrant
    assert unsure["verdict"] == "person"
    assert unsure["confidence"] == pytest.approx(gate.calibrator.predict([np.exp(UNSURE)])[0])


def test_log_probabilities_are_requested_and_taken_out_again(served):
    assert chat(served, "sure").choices[0].logprobs is None
    assert served.upstream.seen[-1][1]["logprobs"] is True
    kept = chat(served, "sure", logprobs=True, top_logprobs=2)
    assert [one.logprob for one in kept.choices[0].logprobs.content] == SURE
    assert served.upstream.seen[-1][1]["top_logprobs"] == 2
    chunks, _ = streamed(served, "sure")
    assert all(c.choices[0].logprobs is None for c in chunks if c.choices)
    chunks, _ = streamed(served, "sure", logprobs=True)
    shown = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert [one.content[0].logprob for one in shown] == SURE


def test_a_stream_ends_with_the_verdict(served):
    chunks, said = streamed(served, "sure")
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Lima"
    assert said == {**chat(served, "sure").calibrant}
    last = list(chat(served, "sure", stream=True, stream_options={"include_usage": True}))
    assert last[-2].usage.total_tokens == 3
    assert last[-1].choices == []
    assert last[-1].id == "r-1"


def test_chunks_come_one_by_one(served):
    stream = chat(served, "endless", stream=True)
    start = time.monotonic()
    next(iter(stream))
    assert time.monotonic() - start < 2
    stream.close()
    end = time.monotonic() + 10
    while served.upstream.open_streams and time.monotonic() < end:
        time.sleep(0.05)
    assert served.upstream.open_streams == 0  # the upstream is not left writing


def test_several_choices_have_a_verdict_each(served):
    both = chat(served, "mixed", n=2).calibrant
    assert [one["verdict"] for one in both["choices"]] == ["accept", "person"]
    assert [one["index"] for one in both["choices"]] == [0, 1]
    assert both["verdict"] == "person"
    _, again = streamed(served, "mixed", n=2)
    assert again == both


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("tool", "it is a tool call, not an answer"),
        ("refusal", "the model refused to answer"),
        ("empty", "the answer is empty"),
        ("without", "the upstream returned no log-probabilities"),
        ("nan", "some log-probabilities of the upstream are no numbers"),
        ("lies", "some log-probabilities of the upstream are above 0"),
    ],
)
def test_what_has_no_confidence_is_for_a_person(served, said, reason):
    for verdict in (chat(served, said).calibrant, streamed(served, said)[1]):
        assert verdict["verdict"] == "person"
        assert reason in verdict["reason"]
        assert verdict["confidence"] is None
        assert verdict["promise"] == ""


@pytest.mark.parametrize(
    ("status", "error"),
    [(401, openai.AuthenticationError), (429, openai.RateLimitError), (500, openai.APIError)],
)
def test_errors_of_the_upstream_pass(served, status, error):
    for options in ({}, {"stream": True}):
        with pytest.raises(error, match="it went wrong") as raised:
            chat(served, f"status {status}", **options)
        assert raised.value.status_code == status
        assert raised.value.response.headers["retry-after"] == "7"
        assert raised.value.request_id == "r1"


def test_a_slow_upstream_is_given_up(served):
    with pytest.raises(openai.APIStatusError, match="did not answer in time") as raised:
        chat(served, "slow")
    assert raised.value.status_code == 504


def test_a_dead_upstream_is_told(gate):
    settings = Settings("http://127.0.0.1:9/v1", "127.0.0.1", 1)
    answer = asyncio.run(in_process(gate, settings, "/v1/chat/completions", b"{}"))
    assert answer.status_code == 502
    assert "cannot be reached: ConnectError" in answer.json()["error"]["message"]


async def in_process(gate, settings, path, body, **headers):
    """Send a request to a proxy without a server."""
    app = make_proxy(Judge(gate), settings)
    host = f"http://{settings.host}:{settings.port}"
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=host) as client,
    ):
        return await client.post(path, content=body, headers=headers)


def test_a_cut_stream_raises_in_the_client_after_its_verdict(served):
    chunks = []
    with pytest.raises(openai.APIError, match="the stream of the upstream broke"):
        chunks += chat(served, "cut", stream=True)
    raw = httpx.post(
        f"{served.base}/chat/completions",
        json={"stream": True, "messages": [{"role": "user", "content": "cut"}]},
    )
    events = [json.loads(x[6:]) for x in raw.text.split("\n") if x.startswith("data: ")]
    assert events[-2]["calibrant"]["reason"] == "the answer was cut off before its end"
    assert events[-2]["calibrant"]["verdict"] == "person"


def test_a_stream_without_an_end_is_for_a_person(served):
    _, said = streamed(served, "no end")
    assert (said["verdict"], said["reason"]) == ("person", "the answer was cut off before its end")


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


def test_models_pass(served):
    assert [one.id for one in served.client.models.list()] == [MODEL]
    assert served.client.models.retrieve(MODEL).id == MODEL


def test_the_key_of_the_client_is_passed_on_and_kept_nowhere(served, capfd):
    raw = served.client.chat.completions.with_raw_response.create(
        model=MODEL,
        messages=[{"role": "user", "content": "sure"}],
        extra_headers={"X-Calibrant-Kind": "k", "X-Trace": "t"},
    )
    headers, _ = served.upstream.seen[-1]
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["x-trace"] == "t"
    assert "x-calibrant-kind" not in headers
    assert raw.headers["x-calibrant-verdict"] == "accept"
    served.judge.flush()
    assert KEY not in served.state.read_bytes().decode("latin-1")
    assert KEY not in raw.text
    assert KEY not in "".join(capfd.readouterr())


def test_requests_at_the_same_time(served):
    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=served.base, **NO_RETRY) as client:

            async def one(i):
                said = "sure" if i % 2 else "unsure"
                options: Any = {"model": MODEL, "messages": [{"role": "user", "content": said}]}
                if i % 3:
                    answer: Any = await client.chat.completions.create(**options)
                    return answer.calibrant["verdict"]
                stream: Any = await client.chat.completions.create(**options, stream=True)
                return [chunk async for chunk in stream][-1].calibrant["verdict"]

            return await asyncio.gather(*map(one, range(30)))

    wanted = ["accept" if i % 2 else "person" for i in range(30)]
    assert asyncio.run(all_of_them()) == wanted


def test_bad_requests(served):
    address = f"{served.base}/chat/completions"
    for body, status, message in (
        (b"{", 400, "must be JSON"),
        (b"[" * 100_000, 413, "larger than 10,000 bytes"),
        (b"[" * 9000, 400, "must be JSON"),
        (b"[1]", 400, "must be a JSON object"),
    ):
        answer = httpx.post(address, content=body)
        assert answer.status_code == status
        assert message in answer.json()["error"]["message"]
    for path in ("embeddings", "../admin", "chat"):
        answer = httpx.post(f"{served.base}/{path}", json={})
        assert answer.status_code == 404
        assert "this gate serves" in answer.json()["error"]["message"]
    assert httpx.get(address).status_code == 405
    seen = len(served.upstream.seen)
    assert httpx.get(f"{served.base}/models/..%2f..%2fadmin").status_code == 404
    assert len(served.upstream.seen) == seen


def test_other_bodies_pass_with_the_verdict_in_the_header(served):
    answer = httpx.post(
        f"{served.base}/chat/completions", json={"messages": [{"content": "no json"}]}
    )
    assert answer.text == "<html>"
    assert answer.headers["x-calibrant-verdict"] == "person"


def test_web_sites_are_kept_out(served):
    address, body = f"{served.base}/chat/completions", {"messages": [{"content": "sure"}]}
    for headers in (
        {"host": f"evil.example:{served.port}"},
        {"origin": "https://evil.example"},
        {"sec-fetch-site": "cross-site"},
    ):
        for answer in (
            httpx.post(address, json=body, headers=headers),
            httpx.get(f"{served.base}/models", headers=headers),
        ):
            assert answer.status_code == 403
    assert httpx.post(address, json=body).status_code == 200


def test_other_machines_need_the_token(gate):
    settings = Settings("http://127.0.0.1:9/v1", "0.0.0.0", 80, token="abc")
    path, any_host = "/v1/chat/completions", {"host": "gate.lan"}
    for headers, status in (({}, 403), ({"x-calibrant-token": "abd"}, 403)):
        answer = asyncio.run(in_process(gate, settings, path, b"{}", **headers, **any_host))
        assert answer.status_code == status
    answer = asyncio.run(
        in_process(gate, settings, path, b"{}", **any_host, **{"x-calibrant-token": "abc"})
    )
    assert answer.status_code == 502  # it gets as far as the upstream
    assert "abc" not in repr(settings)


def test_answers_of_another_model_are_not_judged(served, gate):
    judge, answer = served.judge, None
    judge.gate = make_gate("another")
    try:
        answer = chat(served, "sure").calibrant
    finally:
        judge.gate = gate
    assert answer["verdict"] == "person"
    assert "model another, not fake-model" in answer["reason"]


def test_answers_are_noted_and_grades_withdraw_the_promise(served, gate, monkeypatch):
    before = WatchFile(served.state, gate).read().confidences.seen if served.state.exists() else 0
    for said in ("sure", "tool", "unsure"):
        chat(served, said)
    served.judge.flush()
    watch = WatchFile(served.state, gate).read()
    assert watch.confidences.seen >= before + 2  # not the tool call
    assert "r-1" in watch.pending.waiting
    fresh = served.state.with_name("fresh.json")
    monkeypatch.setattr(served.judge, "file", WatchFile(fresh, gate))
    served.judge.flush()
    served.judge.file.update(lambda watch: watch.observe(np.full(900, 0.99), np.arange(900) % 2))
    assert chat(served, "sure").calibrant["verdict"] == "accept"
    served.judge.flush()  # as every few seconds
    try:
        said = chat(served, "sure").calibrant
        assert said["verdict"] == "person"
        assert said["reason"].startswith("the promise is withdrawn: the grades contradict")
    finally:
        served.judge.withdrawn = ""


def test_notes_survive_a_disk_that_is_full(gate, tmp_path, monkeypatch):
    judge = Judge(gate, tmp_path / "watch.json")
    judge._notes = [("a", 0.9)]
    with monkeypatch.context() as patch:
        patch.setattr(WatchFile, "update", lambda *_: (_ for _ in ()).throw(OSError("full")))
        with pytest.raises(OSError, match="full"):
            judge.flush()
    judge.flush()
    assert WatchFile(tmp_path / "watch.json", gate).read().confidences.seen == 1


def test_gates_for_other_confidences_are_refused(rng):
    gate = fit_gate(graded_answers(rng, 300, source="judge"), max_error=0.5)
    with pytest.raises(ValueError, match="this gate is for judge, which no server returns"):
        Judge(gate)


@pytest.mark.parametrize(
    "address", ["localhost:80", "ftp://a/v1", "http://k@a/v1", "http://a/?k=1"]
)
def test_addresses_that_are_none(address):
    with pytest.raises(ValueError, match="the upstream must be an address"):
        check_upstream(address)


def test_the_state_is_updated_while_the_server_runs(gate, tmp_path, monkeypatch):
    monkeypatch.setattr(proxies, "PERIOD", 0.02)
    judge = Judge(gate, tmp_path / "watch.json")
    app = make_proxy(judge, Settings("http://127.0.0.1:9/v1", "127.0.0.1", 1))

    async def wait():
        async with app.router.lifespan_context(app):
            judge._notes.append(("a", 0.9))
            await asyncio.sleep(1)
            assert judge._notes == []
            judge._notes.append(("b", 0.8))

    asyncio.run(wait())
    assert {*WatchFile(tmp_path / "watch.json", gate).read().pending.waiting} == {"a", "b"}
    assert math.isfinite(gate.bands[0].accept.threshold)
