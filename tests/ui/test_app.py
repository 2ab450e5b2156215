"""The server as a client sees it: what it refuses, takes, runs and gives back."""

import asyncio
import errno
import io
import json
import socket
import tempfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

import calibrant as cal
from calibrant.ui.app import RESULTS, _make_app
from calibrant.ui.guard import PAGE_POLICY, REPORT_POLICY, Guard
from tests.ui.conftest import npz


@pytest.fixture(scope="module")
def tags():
    """Three over-confident tags, for which few methods are compared."""
    rng = np.random.default_rng(4)
    honest = rng.normal(size=(200, 3))
    return {"logits": 3 * honest, "labels": (honest + rng.logistic(size=honest.shape) > 0) * 1}


@pytest.fixture(scope="module")
def finished(client, tags):
    """A job that is done."""
    upload, _ = client.looked("predictions.npz", npz(**tags))
    chosen = {"method": "pooled", "estimand": "multilabel"}
    answer = client.post("/api/jobs", {"file": upload["file"], **chosen})
    assert answer.status == 202
    return client.finished(answer.json()["job"])


def homes():
    return sorted(Path(tempfile.gettempdir()).glob("calibrant-ui-*"))


# what is refused


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"host": "evil.example"}, "host name"),
        ({"origin": "https://evil.example"}, "another site"),
        ({"sec_fetch_site": "cross-site", "origin": None}, "another site"),
        ({"x_calibrant_token": None}, "token of the page"),
        ({"cookie": None}, "lacks its token"),
    ],
)
@pytest.mark.parametrize("path", ["/api/files", "/api/sample", "/api/jobs", "/api/jobs/1/stop"])
def test_requests_from_elsewhere_are_refused(client, path, headers, reason):
    answer = client.post(path, **headers)
    assert answer.status == 403
    assert reason in answer.body.decode()


def test_methods_that_are_not_for_a_path_are_refused(client):
    assert client.get("/api/files").status == 405
    assert client.send("DELETE", "/api/jobs").status == 405
    assert client.send("OPTIONS", "/api/files", x_calibrant_token=None).status == 403


@pytest.mark.parametrize(
    "path",
    [
        "/page/../app.py",
        "/page/..%2fapp.py",
        "/page/index.html",
        "/results/0000000000000000/report.html",
        "/results/../../etc/passwd",
        "/api/jobs/unknown",
        "/etc/passwd",
        "//etc/passwd",
    ],
)
def test_nothing_else_can_be_read(client, path):
    assert client.get(path).status == 404


def test_results_have_fixed_names(client, finished):
    for name in ("../report.html", "..%2freport.html", "predictions.npz", "config.json", ""):
        assert client.get(f"/results/{finished['id']}/{name}").status == 404


@pytest.mark.parametrize("path", ["/", "/page/page.css", "/api/jobs/unknown", "/unknown"])
def test_every_answer_has_the_headers_that_restrict_it(client, path):
    headers = client.get(path).headers
    assert headers["content-security-policy"] == PAGE_POLICY
    assert "frame-ancestors 'none'" in PAGE_POLICY
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-store"
    assert headers["cross-origin-resource-policy"] == "same-origin"


def test_the_page_hands_out_the_secret_to_its_own_origin_only(client):
    answer = client.get(f"/?token={client.guard.token}", cookie=None)
    cookie = answer.headers["set-cookie"]
    assert cookie.startswith(f"{client.guard.cookie}={client.guard.token};")
    assert "HttpOnly" in cookie
    assert "SameSite=Strict" in cookie
    assert f'data-token="{client.guard.token}"' in answer.body.decode()
    assert client.guard.token not in client.get("/", cookie=None).body.decode()


# uploads


def test_a_file_that_says_it_is_too_large_is_refused_unread(client):
    answer = client.send("POST", "/api/files", x_file_name="x.npz", content_length="2000001")
    assert answer.status == 413
    assert "--max-upload" in answer.json()["error"]


def test_a_file_that_turns_out_too_large_is_refused(client):
    """Sent in chunks, it has no length to begin with."""
    with socket.create_connection(("127.0.0.1", client.guard.port), timeout=30) as connection:
        headers = {**client.usual, "x-file-name": "x.npz", "transfer-encoding": "chunked"}
        lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
        connection.sendall(f"POST /api/files HTTP/1.1\r\n{lines}\r\n".encode())
        block = b"%x\r\n%s\r\n" % (100_000, b"0" * 100_000)
        for _ in range(21):
            connection.sendall(block)
        assert connection.recv(100).startswith(b"HTTP/1.1 413")


def test_an_upload_that_breaks_off_leaves_no_file(client, content):
    (home,) = homes()[-1:]
    before = set(home.iterdir())
    headers = {**client.usual, "x-file-name": "x.npz", "content-length": str(len(content))}
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    with socket.create_connection(("127.0.0.1", client.guard.port), timeout=30) as connection:
        connection.sendall(f"POST /api/files HTTP/1.1\r\n{lines}\r\n".encode() + content[:1000])
    client.get("/")  # the server goes on
    for _ in range(200):
        if set(home.iterdir()) <= before:
            break
        client.get("/")
    assert set(home.iterdir()) <= before


def test_a_full_disk_is_explained(client, content, monkeypatch):
    (home,) = homes()[-1:]
    before = set(home.iterdir())

    def full(path, mode):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "open", full)
    answer = client.upload("x.npz", content)
    monkeypatch.undo()
    assert answer.status == 500
    assert "No space left on device" in answer.json()["error"]
    assert set(home.iterdir()) <= before


def test_kinds_of_files_that_are_not_read_are_refused(client):
    answer = client.upload("model.pt", b"PK\x03\x04")
    assert answer.status == 415
    assert "could run any code" in answer.json()["error"]
    assert client.send("POST", "/api/files", b"x").status == 415


def truncated(content):
    return content[: len(content) // 2]


def bomb():
    """Four gigabytes of zeros in a few megabytes at most; here only the header says so."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        for key, shape in {"logits": (100_000, 100), "labels": (100_000,)}.items():
            with archive.open(f"{key}.npy", "w") as member:
                np.lib.format.write_array(
                    member, np.zeros(shape, "int64" if key == "labels" else "f8")
                )
    return stream.getvalue()


@pytest.mark.parametrize(
    ("name", "body", "reason"),
    [
        ("cut.npz", truncated, "cut.npz is damaged or incomplete"),
        ("fake.npz", b"MZ\x90\x00 nothing", "fake.npz is damaged or incomplete"),
        ("fake.safetensors", b"\xff" * 64, "fake.safetensors is damaged"),
        ("fake.parquet", b"PAR1 nothing", "fake.parquet is damaged"),
        (
            "pickle.npz",
            lambda _: npz(logits=np.array([{}]), labels=np.zeros(1)),
            "saved as a pickle",
        ),
        ("日本.npz", lambda _: npz(x=np.zeros(3)), "日本.npz has no logits"),
        ("<img src=x>.npz", lambda _: npz(x=np.zeros(3)), "<img src=x>.npz has no logits"),
        ("bomb.npz", lambda _: bomb(), "use the command line"),
    ],
)
def test_files_that_cannot_be_read_are_explained(client, content, name, body, reason):
    upload, job = client.looked(name, body(content) if callable(body) else body)
    assert upload["name"] == name
    assert job["state"] == "failed"
    assert reason in job["error"]
    assert "/" not in job["error"].replace(name, "")  # no path


def test_the_sample_is_at_hand(client):
    upload = client.post("/api/sample").json()
    assert upload["name"] == cal.sample_path().name
    found = client.finished(upload["job"])["result"]
    assert [split["examples"] for split in found["splits"]] == [5000, 10000]


# jobs


def test_a_job_gives_what_it_promises(client, tags, finished, tmp_path):
    assert finished["state"] == "done"
    assert list(finished["files"]) == list(RESULTS)
    for name, size in finished["files"].items():
        answer = client.get(f"/results/{finished['id']}/{name}?download")
        assert (answer.status, len(answer.body)) == (200, size)
        assert answer.headers["content-disposition"] == f'attachment; filename="{name}"'
        (tmp_path / name).write_bytes(answer.body)
    loaded = cal.load(tmp_path / "calibrator.safetensors")
    fitted = cal.fit(tags, method="pooled", estimand="multilabel")
    given = loaded.predict_proba(tags["logits"])
    np.testing.assert_allclose(given, fitted.predict_proba(tags["logits"]), rtol=1e-6)
    assert np.abs(given - 0.5).mean() < np.abs(1 / (1 + np.exp(-tags["logits"])) - 0.5).mean()
    assert json.loads((tmp_path / "report.json").read_text())["subjects"]


def test_the_report_is_shown_in_a_sandbox(client, finished):
    answer = client.get(f"/results/{finished['id']}/report.html")
    assert answer.headers["content-disposition"].startswith("inline")
    assert answer.headers["content-security-policy"] == REPORT_POLICY
    assert REPORT_POLICY.startswith("sandbox ")
    assert "allow-same-origin" not in REPORT_POLICY


@pytest.mark.parametrize(
    ("content", "status"),
    [
        ({"method": "ts"}, 404),
        ({"file": "../../etc/passwd"}, 404),
        ({"file": ["x"]}, 404),
        ([], 400),
    ],
)
def test_jobs_of_unknown_files_are_refused(client, content, status):
    assert client.post("/api/jobs", content).status == status


def test_requests_that_are_no_json_or_too_long_are_refused(client):
    for content in (b"{", b"[" * 9000, b'{"file":' * 1200):
        answer = client.send("POST", "/api/jobs", content)
        assert answer.status == 400
        assert "must be a JSON object" in answer.json()["error"]
    assert client.send("POST", "/api/jobs", b"\xff" * 20_000).status == 413


def test_a_request_that_breaks_off_is_no_error_of_the_server():
    guard, sent = Guard("127.0.0.1", 8321), []
    names = {"host": "127.0.0.1:8321", "x-calibrant-token": guard.token}
    names["cookie"] = f"{guard.cookie}={guard.token}"
    scope = {
        **{"type": "http", "method": "POST", "path": "/api/jobs", "query_string": b""},
        "headers": [(name.encode(), value.encode()) for name, value in names.items()],
    }

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    async def request():
        await _make_app(guard, 1000)(scope, receive, send)

    asyncio.run(request())
    assert sent[0]["status"] == 400


def test_choices_that_do_not_suit_the_file_are_explained(client, content):
    upload, _ = client.looked("p.npz", content)
    assert client.post("/api/jobs", {"file": upload["file"], "path": "/x"}).status == 400
    for chosen, reason in (
        ({"method": "tss"}, "unknown method 'tss': did you mean ts?"),
        ({"fit_split": "vall"}, "p.npz: unknown split 'vall': did you mean val?"),
    ):
        answer = client.post("/api/jobs", {"file": upload["file"], **chosen})
        job = client.finished(answer.json()["job"])
        assert (job["state"], job["files"]) == ("failed", {})
        assert reason in job["error"]


def test_several_jobs_wait_for_each_other_and_can_be_stopped(client, content):
    upload, _ = client.looked("p.npz", content)
    ids = [client.post("/api/jobs", {"file": upload["file"]}).json()["job"] for _ in range(3)]
    states = [client.get(f"/api/jobs/{key}").json()["state"] for key in ids]
    assert states[1:] == ["waiting", "waiting"]
    for key in reversed(ids):
        client.post(f"/api/jobs/{key}/stop")
    assert {client.finished(key)["state"] for key in ids} == {"stopped"}
    assert client.get(f"/results/{ids[0]}/report.html").status == 404
    upload, job = client.looked("p.npz", content)  # by a new process
    assert job["state"] == "done"


def test_too_many_jobs_are_refused(client, content):
    upload, _ = client.looked("p.npz", content)
    answers = [client.post("/api/jobs", {"file": upload["file"]}) for _ in range(8)]
    assert answers[-1].status == 429
    assert "waiting already" in answers[-1].json()["error"]
    assert client.upload("p.npz", content).status == 429
    for answer in answers:
        if answer.status == 202:
            client.post(f"/api/jobs/{answer.json()['job']}/stop")
