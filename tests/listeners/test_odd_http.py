# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Forms of HTTP that few clients use: requests behind a running one, trailers, whole URLs as
targets, odd paths and hosts, HEAD, long first lines, deep JSON.
"""

from __future__ import annotations

import http.client
import socket
import threading
from contextlib import ExitStack, suppress

import pytest
from attacked import ANSWER_S, Listener, Site, status_of

MIB = 1 << 20
SERVER = ("admin port", "local socket")
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


@pytest.mark.parametrize("name", SERVER)
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


@pytest.mark.parametrize("name", SERVER)
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


@pytest.mark.parametrize("name", SERVER)
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
