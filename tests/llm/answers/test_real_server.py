"""A real server with the interface of OpenAI: that of llama.cpp, where xllamacpp is installed."""

import pytest

from calibrant.llm.answers.requesting import Asked, RequestPlan, request_answers
from calibrant.llm.answers.rows import read_answers
from calibrant.llm.models.services import service_for

pytest.importorskip("openai")
llama = pytest.importorskip("xllamacpp")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(request):
    """The address of a server of SmolLM2-135M-Instruct, which tests/llm/test_smol.py downloads."""
    files = list(request.config.cache.mkdir("smollm2").glob("**/*.gguf"))
    if not files:
        pytest.skip("the model is not in the cache of pytest: run tests/llm/test_smol.py once")
    options = llama.CommonParams()
    options.model.path = str(files[0])
    options.n_ctx, options.n_parallel, options.port = 2048, 2, 0
    options.cpuparams.n_threads = 1
    server = llama.Server(options)
    yield f"{server.listening_address}/v1"
    del server  # which ends it


def test_answers_of_llama_cpp_with_every_signal(url, tmp_path):
    out = tmp_path / "answers.jsonl"
    plan = RequestPlan("smol", samples=2, stated=True, p_true=True, max_tokens=24)
    asked = [
        Asked([{"role": "user", "content": f"What is the capital of {country}?"}], (city,))
        for country, city in (("France", "Paris"), ("Italy", "Rome"))
    ]
    with service_for("smol", url=url) as service:
        assert request_answers(asked, service, plan, out) == 2
        assert request_answers(asked, service, plan, out) == 0
    answers = read_answers(out)
    for row in answers.rows:
        assert row["answer"]
        assert all(0 < prob <= 1 for prob in row["token_probs"])
        assert len(row["samples"]) == 2
        assert 0 <= row["signals"]["p_true"] <= 1
    confidence, source = answers.confidences()
    assert ((confidence > 0) & (confidence <= 1)).all()
    assert source.confidence == "geometric"
