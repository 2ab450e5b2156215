"""A real proxy of LiteLLM on this machine with the gate, where LiteLLM is installed."""

import asyncio
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import calibrant as cal
from calibrant.llm.answers.confidence import answer_confidence
from calibrant.llm.gate.watch import WatchFile
from tests.support.fake_upstream import MODEL, SURE, Upstream
from tests.support.local_server import local_server

openai = pytest.importorskip("openai")
if any(find_spec(name) is None for name in ("litellm", "orjson", "apscheduler")):
    pytest.skip("needs pip install 'litellm[proxy]'", allow_module_level=True)
pytestmark = pytest.mark.slow

CALLBACK = """
from calibrant.llm.gate.litellm_callback import GateCallback
gate = GateCallback({gate!r})
"""


@contextmanager
def litellm_proxy(folder, upstream_port, **settings):
    """Run LiteLLM before an upstream; yields its address and the key for it."""
    key = f"sk-{secrets.token_hex(32)}"
    parameters = {"api_base": f"http://127.0.0.1:{upstream_port}/v1", "api_key": "none"}
    dead = {"api_base": "http://127.0.0.1:9/v1", "api_key": "none"}
    models = [
        {"model_name": MODEL, "litellm_params": {"model": f"openai/{MODEL}", **parameters}},
        {"model_name": "dead", "litellm_params": {"model": f"openai/{MODEL}", **dead}},
        {
            "model_name": "text",
            "litellm_params": {"model": f"text-completion-openai/{MODEL}", **parameters},
        },
    ]
    config = {"model_list": models, "litellm_settings": {"num_retries": 0, **settings}}
    (folder / "config.yaml").write_text(json.dumps(config))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    environment = {
        **os.environ,
        **{"LITELLM_MASTER_KEY": key, "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    }
    start = ["-c", "from litellm import run_server; run_server()", "--config", "config.yaml"]
    command = [sys.executable, *start, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("w") as log:
        options: Any = {"cwd": folder, "stdout": log, "stderr": log, "env": environment}
        process = subprocess.Popen(command, **options)
    try:
        end, address = time.monotonic() + 120, f"http://127.0.0.1:{port}"
        while True:
            assert process.poll() is None, (folder / "log").read_text()[-2000:]
            assert time.monotonic() < end
            try:
                urllib.request.urlopen(f"{address}/health/liveliness").close()
                break
            except OSError:
                time.sleep(0.2)
        yield f"{address}/v1", key
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="module")
def served(token_gate, tmp_path_factory):
    """The upstream, LiteLLM with the gate before it, and a client."""
    folder = tmp_path_factory.mktemp("litellm")
    cal.save(token_gate, folder / "gate")
    (folder / "my_gate.py").write_text(CALLBACK.format(gate=str(folder / "gate")))
    upstream = Upstream()
    with (
        local_server(upstream.app) as behind,
        litellm_proxy(folder, behind, callbacks="my_gate.gate") as (base, key),
        openai.OpenAI(base_url=base, api_key=key, max_retries=0, timeout=30) as client,
    ):
        yield SimpleNamespace(client=client, upstream=upstream, base=base, key=key, behind=behind)


def chat(served, said, **options):
    messages = [{"role": "user", "content": said}]
    options = {"model": MODEL, **options}
    return served.client.chat.completions.create(messages=messages, **options)


def test_whole_answers_have_the_verdict_in_body_and_header(served, token_gate):
    messages = [{"role": "user", "content": "sure"}]
    raw = served.client.chat.completions.with_raw_response.create(model=MODEL, messages=messages)
    answer = raw.parse()
    assert raw.headers["x-calibrant-verdict"] == "accept"
    assert answer.choices[0].message.content == "Lima"
    assert answer.choices[0].logprobs is None
    wanted = token_gate.calibrator.predict(answer_confidence([np.exp(SURE)]))[0]
    assert answer.calibrant["calibrated"] == pytest.approx(wanted)
    assert answer.calibrant["promise"] == token_gate.promise()
    assert served.upstream.seen[-1][1]["logprobs"] is True
    kept = chat(served, "sure", logprobs=True)
    assert [one.logprob for one in kept.choices[0].logprobs.content] == SURE
    both = chat(served, "mixed", n=2).calibrant
    assert [one["verdict"] for one in both["choices"]] == ["accept", "person"]


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ("unsure", "is below"),
        ("tool", "it is a tool call, not an answer"),
        ("empty", "the answer is empty"),
        ("without", "the service returned no log-probabilities"),
        ("partial", "a part of it was not scored"),
        ("length", "cut off at the largest number of tokens"),
        ("lies", "is not a number up to 0"),
    ],
)
def test_what_is_not_accepted(served, said, reason):
    *_, last = (c for c in chat(served, said, stream=True) if hasattr(c, "calibrant"))
    for verdict in (chat(served, said).calibrant, last.calibrant):
        assert verdict["verdict"] == "person"
        assert reason in verdict["reason"]


def test_the_chunk_with_the_end_has_the_verdict(served):
    chunks = list(chat(served, "sure", stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Lima"
    assert all(c.choices[0].logprobs is None for c in chunks)
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert chunks[-1].calibrant == chat(served, "sure").calibrant


def test_completions_and_responses(served):
    text = served.client.completions.create(model="text", prompt="sure")
    assert text.calibrant["verdict"] == "accept"
    whole = served.client.responses.create(model=MODEL, input="sure")
    assert whole.output_text == "Lima"
    assert whole.calibrant["verdict"] == "accept"
    *_, last = served.client.completions.create(model="text", prompt="sure", stream=True)
    assert last.calibrant["reason"] == "the service returned no log-probabilities"  # LiteLLM
    *_, last = served.client.responses.create(model=MODEL, input="sure", stream=True)
    assert last.response.calibrant["verdict"] == "accept"


def test_chunks_come_one_by_one_and_a_client_that_leaves_ends_the_stream(served):
    start = time.monotonic()
    with chat(served, "endless", stream=True) as stream:
        next(iter(stream))
        assert time.monotonic() - start < 5
    wait_for(lambda: served.upstream.open_streams == 0)


def wait_for(condition):
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_a_stream_that_breaks_raises_after_its_verdict(served):
    seen = []
    with pytest.raises(openai.APIError):
        seen.extend(chat(served, "cut", stream=True))
    assert seen[-1].calibrant["verdict"] == "person"
    assert seen[-1].calibrant["reason"] == "the answer was cut off before its end"


def test_a_stream_without_an_end_is_for_a_person(served):
    """LiteLLM writes ``finish_reason="stop"`` itself, which is not the end of the answer."""
    chunks = list(chat(served, "sure, no end", stream=True))
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == "Lima"
    (verdict,) = (chunk.calibrant for chunk in chunks if hasattr(chunk, "calibrant"))
    assert verdict["verdict"] == "person"
    assert verdict["reason"] == "the answer was cut off before its end"
    assert not any(choice.finish_reason for chunk in chunks for choice in chunk.choices)


def test_errors_of_the_upstream_pass(served):
    with pytest.raises(openai.RateLimitError, match="it went wrong"):
        chat(served, "status 429")
    for options in ({}, {"stream": True}):
        with pytest.raises(openai.InternalServerError, match="Connection error"):
            list(chat(served, "sure", model="dead", **options))
    assert chat(served, "sure").calibrant["verdict"] == "accept"


def test_a_hundred_clients(served):
    async def one(i):
        options: Any = {"base_url": served.base, "api_key": served.key, "max_retries": 0}
        async with openai.AsyncOpenAI(timeout=60, **options) as client:
            said = [{"role": "user", "content": "sure" if i % 2 else "unsure"}]
            request: Any = {"model": MODEL, "messages": said}
            if i % 3:
                answer: Any = await client.chat.completions.create(**request)
                return answer.calibrant["verdict"]
            stream: Any = await client.chat.completions.create(**request, stream=True)
            return [chunk async for chunk in stream][-1].calibrant["verdict"]

    async def all_of_them():
        return await asyncio.gather(*map(one, range(100)))

    assert asyncio.run(all_of_them()) == ["accept" if i % 2 else "person" for i in range(100)]


def test_it_costs_little_beside_plain_litellm(served, tmp_path):
    with (
        litellm_proxy(tmp_path, served.behind) as (base, key),
        openai.OpenAI(base_url=base, api_key=key, max_retries=0) as client,
    ):
        plain = SimpleNamespace(client=client)
        seconds: dict[str, list[float]] = {"plain": [], "gate": []}
        for _ in range(60):
            for name, at in (("plain", plain), ("gate", served)):
                start = time.perf_counter()
                chat(at, "sure")
                seconds[name].append(time.perf_counter() - start)
    medians = {name: 1000 * statistics.median(values[10:]) for name, values in seconds.items()}
    print(f"milliseconds of a request: {medians}")
    assert medians["gate"] - medians["plain"] < 25


def test_the_state_is_that_of_the_watch(token_gate, tmp_path, monkeypatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    from calibrant.llm.gate.litellm_callback import GateCallback

    file = WatchFile(tmp_path / "watch.json", token_gate)
    assert "is missing" in GateCallback(token_gate, state=file.path).live.withdrawn
    file.start()
    assert GateCallback(token_gate, state=file.path).live.withdrawn == ""
