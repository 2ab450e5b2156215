"""Requests that do not come from the page are refused, one header at a time."""

import asyncio

import pytest

from calibrant.ui.guard import Guard, Guarded, is_loopback

GUARD = Guard("127.0.0.1", 8321, token="secret")
OWN = {
    "host": "127.0.0.1:8321",
    "origin": "http://127.0.0.1:8321",
    "sec-fetch-site": "same-origin",
    "cookie": "other=1; calibrant-8321=secret",
    "x-calibrant-token": "secret",
}


def scope(method="POST", path="/api/jobs", query="", **changed):
    headers = {**OWN, **{name.replace("_", "-"): value for name, value in changed.items()}}
    return {
        "type": "http",
        "method": method,
        "path": path,
        "query_string": query.encode(),
        "headers": [(n.encode(), v.encode()) for n, v in headers.items() if v is not None],
    }


def reason_for(request):
    return GUARD.refusal(request) or "none"


def test_a_request_of_the_page_passes():
    assert GUARD.refusal(scope()) is None
    assert GUARD.refusal(scope("GET", x_calibrant_token=None, origin=None)) is None


def test_a_refusal_waits_for_the_body():
    """Closing a connection on bytes that are not read resets it, and the answer may be lost."""
    seen = []

    async def receive():
        seen.append("read")
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        seen.append(message.get("status", message["type"]))

    async def app(*_):
        pytest.fail("a refused request has reached the application")

    asyncio.run(Guarded(app, GUARD)(scope(cookie=None), receive, send))
    assert seen == ["read", 403, "http.response.body"]


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:8321", "127.0.0.1", "127.0.0.1:80", "10.0.0.7:8321", "", None],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_another_host_name_is_refused(host, method):
    """As a site sends it that has pointed its own name to this machine."""
    assert "host name" in reason_for(scope(method, host=host, origin=f"http://{host}"))


@pytest.mark.parametrize("host", ["localhost:8321", "LOCALHOST:8321", "[::1]:8321"])
def test_other_names_of_this_machine_are_its_own(host):
    assert GUARD.refusal(scope(host=host, origin=f"http://{host}")) is None


@pytest.mark.parametrize(
    "sender",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": "http://127.0.0.1:9999"},
        {"origin": "https://127.0.0.1:8321"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "none"},
    ],
)
def test_requests_of_other_sites_change_nothing(sender):
    assert "another site" in reason_for(scope(**sender))


@pytest.mark.parametrize("token", [None, "", "secre", "secret2", "sécret"])
def test_a_change_needs_the_token_of_the_page(token):
    headers = None if token is None else token.encode().decode("latin-1")
    assert "token of the page" in reason_for(scope(x_calibrant_token=headers))


@pytest.mark.parametrize(
    ("path", "query"),
    [
        ("/", ""),
        ("/", "token=wrong"),
        ("/api/jobs/1", "token=secret"),
        ("/results/1/report.html", ""),
    ],
)
@pytest.mark.parametrize(
    "cookie", [None, "calibrant-8321=wrong", "calibrant-9=secret", "a=\x00;;=="]
)
def test_reading_needs_the_secret_of_the_address(path, query, cookie):
    """Other users of this machine can reach the port, too."""
    assert "lacks its token" in reason_for(scope("GET", path, query, cookie=cookie))


@pytest.mark.parametrize("other", ['chat={"open": true}', "a b=1", "=", "é=é"])
def test_cookies_of_other_servers_on_this_machine_do_not_matter(other):
    """They come with every request, and those that came to be first stand before ours."""
    for cookie in (f"{other}; calibrant-8321=secret", f"calibrant-8321=secret; {other}"):
        assert GUARD.refusal(scope("GET", "/results/1/report.html", cookie=cookie)) is None


def test_the_printed_address_opens_the_page():
    assert GUARD.address == "http://127.0.0.1:8321/?token=secret"
    assert GUARD.refusal(scope("GET", "/", "token=secret", cookie=None)) is None
    assert GUARD.refusal(scope("GET", "/page/page.css", cookie=None)) is None


def test_the_secret_is_new_at_each_start_and_never_printed_with_the_guard():
    guards = [Guard("127.0.0.1", 1) for _ in range(2)]
    assert guards[0].token != guards[1].token
    assert len(guards[0].token) >= 32
    assert guards[0].token not in repr(guards[0])


@pytest.mark.parametrize(
    ("host", "is_own"),
    [
        ("192.168.1.5:80", True),
        ("[fe80::1]:80", True),
        ("evil.example:80", False),
        ("box:80", False),
    ],
)
def test_a_server_for_other_machines_answers_to_addresses_and_not_to_names(host, is_own):
    assert Guard("0.0.0.0", 80).is_own(host) is is_own


def test_a_server_for_other_machines_answers_to_the_name_it_was_given():
    assert Guard("box.lan", 80).is_own("Box.lan:80")
    assert Guard("::", 80).address.startswith("http://127.0.0.1:80/")
    assert Guard("::1", 80).address.startswith("http://[::1]:80/")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        *[("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("LocalHost", True)],
        *[("0.0.0.0", False), ("::", False), ("192.168.1.5", False), ("box.lan", False)],
    ],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected
