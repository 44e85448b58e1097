# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Other sites' pages, other names, other content types, tricky paths and missing tokens are refused
by each listener that they can reach. Forms of HTTP that few clients use: requests behind a running
one, trailers, whole URLs as targets, odd paths and hosts, HEAD, long first lines, deep JSON.
"""

from __future__ import annotations

import http.client
import json
import resource
import socket
import ssl
import subprocess
import threading
import urllib.error
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest
from attacked import ANSWER_S, FILES, Engine, Listener, Site, Start, status_of

TCP = ("clients", "operators", "admin port")
CHAT = b'{"model": "m", "messages": []}'
CANCEL = "/v1/responses/resp_1/cancel"


@pytest.mark.parametrize("name", TCP)
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_a_foreign_host_name_is_rejected(served: Site, name: str, host: str) -> None:
    path = {"clients": "/v1/models", "operators": "/workers", "admin port": "/live"}[name]
    assert served.http[name].request("GET", path, Host=host)[0] == 421
    assert served.http[name].request("GET", path, Host="localhost")[0] == 200
    assert served.http[name].request("GET", path, Host="[::1]:7")[0] == 200
    assert served.http[name].request("POST", path, b"{}", Host=host)[0] in (403, 421)
    twice = f"GET /metrics HTTP/1.1\r\nHost: localhost\r\nHost: {host}\r\n\r\n"
    assert status_of(served.http[name].raw(twice.encode())) in (400, 421)


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}],
)
def test_a_page_of_another_site_changes_nothing(served: Site, headers: dict[str, str]) -> None:
    operators = served.http["operators"]
    (worker,) = json.loads(operators.request("GET", "/workers")[2])
    for method, path, body in (
        ("POST", f"/workers/{worker['id']}/drain", None),
        ("DELETE", f"/workers/{worker['id']}", None),
        ("POST", "/workers", b'{"url": "http://127.0.0.1:9"}'),
    ):
        kind = {} if body is None else {"Content_Type": "application/json"}
        assert operators.request(method, path, body, **kind, **headers)[0] == 403
    answer = operators.request("GET", "/workers", **headers)
    assert "Access-Control-Allow-Origin" not in answer[1]
    assert [pool["draining"] for pool in json.loads(answer[2])] == [False]
    assert served.http["admin port"].request("POST", "/drain", b"", **headers)[0] == 403


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded"])
def test_forms_are_not_parsed_as_json(served: Site, kind: str) -> None:
    clients, operators = served.http["clients"], served.http["operators"]
    assert clients.request("POST", "/v1/chat/completions", CHAT, Content_Type=kind)[0] == 415
    assert (
        operators.request("POST", "/workers", b'{"url": "http://a"}', Content_Type=kind)[0] == 415
    )
    assert served.engine.seen == []


def test_a_page_of_another_site_sends_no_form_without_a_key(served: Site) -> None:
    """Browsers send a preflight for JSON and for keys, and engines answer it."""
    clients = served.http["clients"]
    form = {"Content_Type": "multipart/form-data; boundary=x", "Origin": "http://evil.example"}
    assert clients.request("POST", "/v1/audio/transcriptions", b"--x--", **form)[0] == 403
    untyped = {"Origin": "http://evil.example"}
    assert clients.request("POST", "/v1/chat/completions", CHAT, **untyped)[0] == 403
    assert served.engine.seen == []
    keyed = form | {"Authorization": "Bearer k"}
    assert clients.request("POST", "/v1/audio/transcriptions", b"--x--", **keyed)[0] == 200


@pytest.mark.parametrize(
    "headers",
    [{"Origin": "http://evil.example"}, {"Origin": "null"}, {"Sec_Fetch_Site": "cross-site"}],
)
@pytest.mark.parametrize("body", [None, b""])
def test_a_page_of_another_site_sends_no_empty_request_without_a_key(
    served: Site, headers: dict[str, str], body: bytes | None
) -> None:
    """A browser sends a POST without a body to another site, and no preflight request."""
    clients = served.http["clients"]
    assert clients.request("POST", CANCEL, body, **headers)[0] == 403
    assert served.engine.seen == []
    keyed = headers | {"Authorization": "Bearer k"}
    for sent in (keyed, {}, {"Content_Type": "application/x-www-form-urlencoded"}):
        assert clients.request("POST", CANCEL, body, **sent)[0] == 200
    assert clients.request("DELETE", "/v1/responses/resp_1", **headers)[0] == 200  # engines decide
    assert served.engine.seen == [("POST", CANCEL)] * 3 + [("DELETE", "/v1/responses/resp_1")]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter/",
        "/v1//load_lora_adapter",
        "//v1/load_lora_adapter",
        "/v1/./load_lora_adapter",
        "/v1/models/../load_lora_adapter",
        "/v1/models/%2e%2e/load_lora_adapter",
        "/v1/%6coad_lora_adapter",
        "/v1/load_lora_adapter;x",
        "/v1/LOAD_lora_adapter",
        "/v1/..%2fsleep",
        "/v1/%252e%252e/sleep",
        "/v1/../sleep",
        "/v1/\\..\\sleep",
        "http://127.0.0.1/v1/../sleep",
        "/sleep",
        "/collective_rpc",
    ],
)
def test_no_spelling_of_a_path_reaches_operator_routes(served: Site, path: str) -> None:
    clients = served.http["clients"]
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = clients.raw(f"{head}Content-Length: 2\r\n\r\n{{}}".encode())
    assert answer.split()[1] in (b"400", b"404", b"405")
    assert served.engine.seen == []


@pytest.mark.parametrize("path", ["/workers/", "//workers", "/./workers", "/x/../workers"])
def test_operator_routes_have_one_spelling(served: Site, path: str) -> None:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    body = '{"url": "http://127.0.0.1:9"}'
    answer = served.http["operators"].raw(
        f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    )
    assert answer.split()[1] in (b"404", b"405")


def test_routes_open_to_any_host_name_give_no_access_to_others(served: Site) -> None:
    for path in ("/metrics/../live", "/live/", "/%6cive", "/healthz/../live"):
        answer = served.http["admin port"].raw(
            f"GET {path} HTTP/1.1\r\nHost: evil.example\r\n\r\n".encode()
        )
        assert answer.split()[1] in (b"404", b"421")


def test_no_response_shows_an_engine_address(served: Site) -> None:
    clients, engine = served.http["clients"], served.engine
    authority = engine.url.removeprefix("http://")
    engine.headers = {
        "Location": f"{engine.url}/v1/x?a=1",
        "Link": f"<http://{authority}/v1/y>; rel=next, <https://other.example/z>",
        "Content-Location": f"//{authority}/v1/z",
        "Alt-Svc": 'h2=":9000"',
    }
    _, headers, _ = clients.request("GET", "/v1/anything/")
    assert authority not in str(headers)
    assert headers["Location"] == "/v1/x?a=1"
    assert headers["Link"] == "</v1/y>; rel=next, <https://other.example/z>"
    assert "Alt-Svc" not in headers
    assert engine.seen == [("GET", "/v1/anything")]


def test_operators_on_other_machines_need_a_token(run: Any, tmp_path: Path) -> None:
    ended = run("gateway", "--admin", "0.0.0.0:0", "--port", 0)
    assert ended.returncode != 0
    assert "give --admin-token FILE" in ended.stderr
    (tmp_path / "short").write_text("12345\n")
    ended = run("gateway", "--admin", "0.0.0.0:0", "--port", 0, "--admin-token", tmp_path / "short")
    assert ended.returncode != 0
    assert "12345" not in ended.stderr


SECRET = "-".join(["of", "the", "operators"] * 3)


def test_a_token_is_required_and_never_printed(start: Start, shm: Path) -> None:
    from beluga.pool import Pool

    (shm / "token").write_text(SECRET + "\n")
    Pool.create([shm / "a"], device_size=64 << 20, sparse=True).close()
    with Engine().running() as engine:
        gateway = start(
            *("gateway", "--worker", engine.url, "--port", 0, "--admin", "0.0.0.0:0", "--json"),
            *("--admin-token", shm / "token"),
        )
        server = start(
            *("serve", "--pool", shm / "a", "--admin", "0.0.0.0:0", "--json"),
            *("--admin-token", shm / "token"),
        )
        result = json.loads(gateway.stdout.readline())
        serving = json.loads(server.stdout.readline())
        listeners = (
            Listener(
                "operators", ("127.0.0.1", int(result["admin"].rpartition(":")[2])), gateway, ""
            ),
            Listener(
                *("admin port", ("127.0.0.1", int(serving["url"].rstrip("/").rpartition(":")[2]))),
                *(server, ""),
            ),
        )
        for listener, path in zip(listeners, ("/workers", "/live"), strict=True):
            for wrong in ("", f"Bearer {SECRET[:-1]}", f"Bearer {SECRET}x", SECRET, "Basic !"):
                status, headers, body = listener.request("GET", path, Authorization=wrong)
                assert status == 401
                assert SECRET not in f"{headers}{body!r}"
            assert listener.request("GET", path, Authorization=f"Bearer {SECRET}")[0] == 200
        assert listeners[1].request("GET", "/healthz")[0] == 200
        assert listeners[1].request("GET", "/metrics")[0] == 401
        for child in (gateway, server):
            line = Path(f"/proc/{child.pid}/cmdline").read_bytes()
            assert SECRET.encode() not in line
            child.terminate()
            assert SECRET not in "".join(child.communicate())


def certificate(folder: Path) -> tuple[str, ssl.SSLContext]:
    """Return the setting of a server's new certificate, and the context of its clients."""
    ended = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", folder / "key", "-out", folder / "cert", "-subj", "/CN=localhost"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        capture_output=True,
        check=False,
    )
    assert ended.returncode == 0
    pair = f"{folder / 'cert'},{folder / 'key'}"
    return pair, ssl.create_default_context(cafile=str(folder / "cert"))


def test_both_servers_support_tls(start: Start, shm: Path) -> None:
    from beluga.pool import Pool

    pair, context = certificate(shm)
    Pool.create([shm / "a"], device_size=64 << 20, sparse=True).close()
    with Engine().running() as engine:
        gateway = start(
            *("gateway", "--worker", engine.url, "--port", 0, "--admin", "127.0.0.1:0", "--json"),
            *("--tls", pair),
        )
        server = start(*("serve", "--pool", shm / "a", "--admin", 0, "--json", "--admin-tls", pair))
        result, ready = json.loads(gateway.stdout.readline()), json.loads(server.stdout.readline())
        for url in (
            f"{result['url']}/health",
            f"{result['admin']}/workers",
            f"{ready['url']}healthz",
        ):
            assert url.startswith("https://127.0.0.1:")
            silent = Listener("", ("127.0.0.1", int(url.split(":")[2].split("/")[0])), server, "")
            requested = urlopen(url, timeout=30, context=context)  # noqa: S310
            with silent.connect(), requested as answer:
                assert answer.status == 200  # a stalled handshake does not block clients
            with pytest.raises((urllib.error.URLError, OSError)):
                urlopen(url.replace("https", "http"), timeout=30)  # noqa: S310


def test_stalled_handshakes_do_not_block_others(start: Start, shm: Path) -> None:
    """They are not counted yet, and end only after 10 s."""
    pair, context = certificate(shm)
    gateway = start(
        *("gateway", "--worker", "http://127.0.0.1:9", "--port", 0, "--json", "--tls", pair),
        *("--admin", ""),  # the default port may be in use
    )
    resource.prlimit(gateway.pid, resource.RLIMIT_NOFILE, (FILES, FILES))
    url = json.loads(gateway.stdout.readline())["url"]
    port = int(url.rpartition(":")[2])
    with ExitStack() as stack:
        for _ in range(2 * FILES):
            stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
        with urlopen(f"{url}/health", timeout=8, context=context) as answer:  # noqa: S310
            assert answer.status == 200


# ---- Odd HTTP

MIB = 1 << 20
OF_SERVER = ("admin port", "local socket")
OVER_TCP = {"clients": "/v1/models", "operators": "/workers", "admin port": "/live"}
MANY_HEADERS = b"".join(b"X-%d: %s\r\n" % (n, b"y" * 60_000) for n in range(200))
CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


BEHIND = b"GET /v1/x HTTP/1.1\r\nHost: localhost\r\n"
WHOLE_HEAD = BEHIND + b"".join(b"X-%d: %s\r\n" % (n, b"y" * 60_000) for n in range(15)) + b"\r\n"


@pytest.mark.parametrize("sent", [BEHIND + MANY_HEADERS, WHOLE_HEAD * 13], ids=["one", "many"])
def test_input_after_a_running_request_is_bounded(served: Site, sent: bytes) -> None:
    """Each connection has a response that does not end, and sends 12 MiB of further heads."""
    served.engine.chunks = 1 << 20
    clients = served.http["clients"]
    before = clients.rss()
    with ExitStack() as stack:
        for _ in range(12):
            peer = stack.enter_context(clients.connect())
            peer.sendall(b"GET /v1/large HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert status_of(peer.recv(4096)) == 200
            peer.settimeout(2)  # the connection is no longer read, or is closed
            with suppress(OSError):
                peer.sendall(sent)
        assert clients.request("GET", "/health")[0] == 200
        assert clients.rss() - before < 100 * MIB


@pytest.mark.parametrize(
    ("begin", "piece"),
    [
        (b"2\r\n{}\r\n0\r\n", b"X-A: " + b"y" * 60_000 + b"\r\n"),
        (b"2\r\n{}\r\n0\r\nX-A: ", b"y" * 65_536),
        (b"2;", b"a" * 65_536),
        (b"", b"0" * 65_536),
    ],
    ids=["trailers", "one trailer", "extension", "zeros"],
)
def test_framing_around_a_body_is_bounded(served: Site, begin: bytes, piece: bytes) -> None:
    """None of it is a byte of the body, whose limits are others."""
    with served.http["clients"].connect() as peer:
        peer.sendall(CHUNKED + begin)
        with pytest.raises(ConnectionError):
            for _ in range(1000):
                peer.sendall(piece)
    assert served.engine.seen == []


def test_a_body_of_small_chunks_is_accepted(served: Site) -> None:
    """Their lengths have more bytes than a head may have."""
    text = b'{"model": "m", "prompt": "%s"}' % (b"a" * (4 * MIB))
    size = 10
    chunks = b"".join(
        b"%06x\r\n%s\r\n" % (len(part), part)
        for part in (text[at : at + size] for at in range(0, len(text), size))
    )
    assert len(chunks) - len(text) > 2 * MIB
    with served.http["clients"].connect() as peer:
        peer.sendall(CHUNKED + chunks + b"0\r\n\r\n")
        assert status_of(peer.recv(4096)) == 200
    assert len(served.engine.seen) == 1


def test_pipelined_requests_get_all_responses(served: Site) -> None:
    """Their heads have more bytes together than one may have."""
    count, head = 3000, b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nX-A: " + b"a" * 700
    with served.http["clients"].connect() as peer:
        peer.settimeout(ANSWER_S)
        sends = threading.Thread(target=peer.sendall, args=((head + b"\r\n\r\n") * count,))
        sends.start()
        answers = peer.makefile("rb")
        for _ in range(count):
            answer = http.client.HTTPResponse(_Made(answers))
            answer.begin()
            assert answer.status == 200
            answer.read()
        sends.join()


class _Made(socket.socket):
    """A connection whose file is shared by its responses."""

    def __init__(self, file: object) -> None:
        self._shared = file

    def makefile(self, *_: object, **__: object) -> object:  # type: ignore[override]
        return _LeftOpen(self._shared)


class _LeftOpen:
    def __init__(self, file: object) -> None:
        self._file = file

    def __getattr__(self, name: str) -> object:
        return getattr(self._file, name)

    def close(self) -> None:
        """Leave the file open for the next response."""


def requested(listener: Listener, target: str, host: str = "localhost") -> int:
    return status_of(listener.raw(f"GET {target} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()))


@pytest.mark.parametrize("name", OVER_TCP)
def test_the_host_of_a_whole_url_is_checked(served: Site, name: str) -> None:
    listener, path = served.http[name], OVER_TCP[name]
    assert requested(listener, f"http://localhost{path}") == 200
    assert requested(listener, f"http://127.0.0.1:80{path}") == 200
    assert requested(listener, f"http://evil.example{path}") == 421
    assert requested(listener, f"http://evil.example:80{path}") == 421
    assert requested(listener, f"http://localhost{path}", host="evil.example") == 421


@pytest.mark.parametrize("name", OF_SERVER)
@pytest.mark.parametrize(
    "target",
    [
        *("//live", "///live", "\x01/live", "x:/live", "x:///live", "ftp://localhost/live"),
        *("live", "*", "?live", "http:/live", "http:live", "/live;x", "/live%00", "/LIVE"),
        *("/x/../live", "/./live", "/%6cive", "/live/", "/live%2f"),
    ],
)
def test_the_server_has_one_spelling_of_a_path(served: Site, name: str, target: str) -> None:
    listener = served.http[name]
    assert requested(listener, "/live") == 200
    assert requested(listener, target) in (400, 404)


@pytest.mark.parametrize("name", OVER_TCP)
@pytest.mark.parametrize(
    "host",
    [
        *("localhost.evil.example", "evil.example.", "localhost@evil.example", "evil.example#a.b"),
        *("localhost, evil.example", "localhost evil.example", "localhost/evil.example", ".", ""),
        *("[::1]evil.example", "evil.example:localhost", "ai.", "ai.:80", "a@localhost"),
        *("localhost:80:80", "l\N{CYRILLIC SMALL LETTER O}calhost", "0.0.0.0.evil.example"),
    ],
)
def test_malformed_hosts_are_rejected(served: Site, name: str, host: str) -> None:
    assert requested(served.http[name], OVER_TCP[name], host) == 421


@pytest.mark.parametrize("name", OF_SERVER)
def test_head_returns_the_headers_of_get(served: Site, name: str) -> None:
    with served.http[name].connect() as peer:
        for path, status in (("/healthz", 200), ("/live", 200), ("/nowhere", 404)):
            peer.sendall(f"HEAD {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            answer = http.client.HTTPResponse(peer, method="HEAD")
            answer.begin()
            assert answer.status == status
            assert int(answer.headers["Content-Length"]) > 0
            assert answer.read() == b""
    assert served.http[name].request("HEAD", "/live", Host="evil.example")[0] == (
        421 if name == "admin port" else 200
    )


@pytest.mark.parametrize("name", OF_SERVER)
@pytest.mark.parametrize("line", [b"GET /live?%s HTTP/1.1", b"%s / HTTP/1.1"])
def test_a_first_line_that_is_too_long_gets_an_answer(served: Site, name: str, line: bytes) -> None:
    with served.http[name].connect() as peer:
        peer.sendall(line % (b"A" * (80 << 10)))
        assert status_of(peer.recv(4096)) == 400


@pytest.mark.parametrize("path", ["/quota", "/drain"])
@pytest.mark.parametrize(
    "body",
    [
        *(b"[" * 60_000, b'{"a":' * 12_000, b'{"pins": ' + b"9" * 60_000 + b"}", b"\xff", b"null"),
        *(b'{"pins": NaN}', b'{"pins": 1e3}', b'{"pins": true}', b'{"draining": null}', b"[]"),
    ],
)
def test_malformed_json_is_rejected(served: Site, path: str, body: bytes) -> None:
    assert served.http["local socket"].request("POST", path, body)[0] == 400
