# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The admin endpoint answers by its routes, over its socket and over TCP, and refuses the rest. A
server is live while its poll loop makes progress, and ready while it serves.
"""

import http.client
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path

import pytest
from support import stuck_server
from support.blocks import eventually

from beluga import Client, Pool
from beluga import http_server as listening
from beluga.admin import (
    Admin,
    AdminRequest,
    AdminResponse,
    ServerHealth,
    json_response,
    read_address,
    request,
    request_json,
    server,
)
from beluga.admin.local_socket import standing_by as names_of_standbys
from beluga.errors import AdminError, CacheError, CallTimeoutError, NoServerError
from beluga.listening import Token
from beluga.rpc import METHOD_USER
from tests.exporter.scraped import status_of


def echo(request: AdminRequest) -> AdminResponse:
    return json_response({"query": dict(request.query), "body": request.json()})


def fail(request: AdminRequest) -> AdminResponse:
    raise {"value": ValueError("no such value"), "ours": CacheError("no room"), "bug": KeyError(1)}[
        request.query["how"]
    ]


ROUTES = {
    ("GET", "/echo"): echo,
    ("POST", "/echo"): echo,
    ("GET", "/metrics"): lambda _: AdminResponse(b"figures"),
    ("GET", "/healthz"): lambda _: AdminResponse(b"alive"),
    ("GET", "/fail"): fail,
}

Make = Callable[..., Admin]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    made: list[Admin] = []

    def start(directory: Path | None = tmp_path, address: str = "") -> Admin:
        parsed = read_address(address) if address else None
        made.append(Admin(ROUTES, directory=directory, address=parsed))
        made[-1].start()
        return made[-1]

    yield start
    for admin in made:
        admin.stop()


def over_tcp(admin: Admin, method: str = "GET", path: str = "/echo", **headers: str) -> int:
    """Return the status of an answer over TCP."""
    host, port = admin.url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    connection = http.client.HTTPConnection(host, int(port), timeout=30)
    try:
        connection.request(method, path, headers={"Host": f"{host}:{port}"} | headers)
        return connection.getresponse().status
    finally:
        connection.close()


@contextmanager
def connected(folder: Path, request: str = "") -> Iterator[socket.socket]:
    """A connection to the socket of an endpoint, over which a request was sent."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(30)
        peer.connect(str(folder / "admin.sock"))
        if request:
            peer.sendall(f"{request} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
        yield peer


class Hang:
    """The route /hang, which waits until the test goes on."""

    def __init__(self) -> None:
        self.inside, self.going_on = threading.Semaphore(0), threading.Event()

    def __call__(self, _: AdminRequest) -> AdminResponse:
        self.inside.release()
        self.going_on.wait()
        return AdminResponse(b"done")


@pytest.fixture
def hang(monkeypatch: pytest.MonkeyPatch) -> Iterator[Hang]:
    hang = Hang()
    monkeypatch.setitem(ROUTES, ("GET", "/hang"), hang)
    yield hang
    hang.going_on.set()


def test_the_socket_answers_reads_and_changes(make: Make, tmp_path: Path) -> None:
    make().claim()
    assert request_json(tmp_path, "/echo?a=1&b=x%20y", dict) == {
        "query": {"a": "1", "b": "x y"},
        "body": None,
    }
    assert request_json(tmp_path, "/echo", dict, {"on": True})["body"] == {"on": True}
    assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o600
    with pytest.raises(
        AdminError, match="no route GET /none; routes: GET /echo, GET /endpoint, GET /fail"
    ):
        request(tmp_path, "/none")


@pytest.mark.parametrize(
    ("how", "text"), [("value", "no such value"), ("ours", "no room"), ("bug", "the server's log")]
)
def test_error_responses_have_one_line(make: Make, tmp_path: Path, how: str, text: str) -> None:
    make().claim()
    with pytest.raises(AdminError, match=text):
        request(tmp_path, f"/fail?how={how}")
    assert request_json(tmp_path, "/echo", dict)


def test_tcp_only_reads(make: Make) -> None:
    admin = make(address="0")
    assert over_tcp(admin) == HTTPStatus.OK
    assert over_tcp(admin, "POST") == HTTPStatus.FORBIDDEN
    assert over_tcp(admin, "PUT") == HTTPStatus.FORBIDDEN
    assert over_tcp(admin, path="/none") == HTTPStatus.NOT_FOUND


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", ""])
def test_a_foreign_host_name_is_rejected(make: Make, host: str) -> None:
    """A request with another host name is refused, even if the name resolves to this machine."""
    admin = make(address="0")
    assert over_tcp(admin, Host=host) == HTTPStatus.MISDIRECTED_REQUEST
    assert over_tcp(admin, path="/metrics", Host=host) == HTTPStatus.MISDIRECTED_REQUEST


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "[::1]:9", "[::1]", "10.0.0.7:9466"])
def test_addresses_and_names_of_this_machine_are_accepted(make: Make, host: str) -> None:
    assert over_tcp(make(address="0"), Host=host) == HTTPStatus.OK


def test_any_host_name_is_accepted_on_a_public_listener(make: Make) -> None:
    admin = make(address="0.0.0.0:0")
    service = "beluga-server.cluster.local"
    assert over_tcp(admin, path="/metrics", Host=service) == HTTPStatus.OK
    assert over_tcp(admin, path="/healthz", Host=service) == HTTPStatus.OK
    assert over_tcp(admin, Host=service) == HTTPStatus.MISDIRECTED_REQUEST


def test_other_origins_cannot_read_a_response(make: Make) -> None:
    admin = make(address="0")
    connection = http.client.HTTPConnection("127.0.0.1", int(admin.url.rstrip("/").split(":")[2]))
    connection.request("GET", "/echo", headers={"Origin": "http://evil.example"})
    answer = connection.getresponse()
    connection.close()
    assert answer.getheader("Access-Control-Allow-Origin") is None
    assert "default-src 'none'" in str(answer.getheader("Content-Security-Policy"))
    assert answer.getheader("X-Content-Type-Options") == "nosniff"


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ("Content-Length: x", HTTPStatus.BAD_REQUEST),
        ("Content-Length: 0\r\nContent-Length: 9", HTTPStatus.BAD_REQUEST),
        ("Transfer-Encoding: chunked", HTTPStatus.LENGTH_REQUIRED),
        ("Content-Length: 9999999999", HTTPStatus.REQUEST_ENTITY_TOO_LARGE),
    ],
)
def test_bodies_that_cannot_be_read_are_refused(
    make: Make, tmp_path: Path, headers: str, status: HTTPStatus
) -> None:
    make().claim()
    with connected(tmp_path) as peer:
        peer.sendall(f"POST /echo HTTP/1.1\r\nHost: x\r\n{headers}\r\n\r\n".encode())
        assert peer.recv(100).split()[1] == str(int(status)).encode()


def test_an_endpoint_that_cannot_run_refuses_clients_and_ends(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """OpenSSL, for example, fails where getrandom() is not permitted."""

    def fails(*_: object) -> None:
        raise OSError("no random numbers")

    monkeypatch.setattr(listening, "accept", fails)
    admin = make(address="127.0.0.1:0")
    assert eventually(lambda: admin.url == "")
    assert "the admin endpoint does not work: OSError: no random numbers" in caplog.text
    assert list(tmp_path.glob("*.sock")) == []
    with pytest.raises(NoServerError):
        request(tmp_path, "/echo")
    admin.stop()


def test_a_new_connection_replaces_the_slowest_one(make: Make, tmp_path: Path) -> None:
    make().claim()
    with ExitStack() as stack:
        slowest, *_ = [stack.enter_context(connected(tmp_path)) for _ in range(69)]
        last = stack.enter_context(connected(tmp_path))
        assert slowest.recv(1) == b""
        last.sendall(b"GET /echo HTTP/1.1\r\nHost: x\r\n\r\n")
        assert last.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_client_waiting_for_its_response_stays_connected(
    make: Make, tmp_path: Path, hang: Hang
) -> None:
    make().claim()
    with ExitStack() as stack:
        first = stack.enter_context(connected(tmp_path, "GET /hang"))
        hang.inside.acquire()
        count = server._CONNECTIONS_MAX + 5
        silent = [stack.enter_context(connected(tmp_path)) for _ in range(count)]
        # the slowest call comes first, although the other one was made earlier
        assert silent[0].recv(1) == b""
        hang.going_on.set()
        assert first.recv(100).startswith(b"HTTP/1.1 200 ")


def test_a_connection_that_stalls_too_long_is_closed(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "PATIENCE_S", 0.01)
    monkeypatch.setattr(listening, "_OVERDUE_LOOK_S", 0.01)
    make().claim()
    with connected(tmp_path) as silent:
        assert silent.recv(1) == b""


def raw(admin: Admin, request: str) -> bytes:
    """Return all bytes received over TCP until the connection is closed."""
    host, port = admin.url.removeprefix("http://").rstrip("/").rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=30) as peer:
        peer.sendall(request.encode())
        return b"".join(iter(lambda: peer.recv(4096), b""))


def test_a_request_with_two_host_headers_is_rejected(make: Make) -> None:
    head = "GET /echo HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n"
    assert raw(make(address="0"), head).split()[1] in (b"400", b"421")


def test_the_body_of_a_rejected_request_is_not_parsed_as_a_request(make: Make) -> None:
    second = "GET /echo HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    head = f"POST /echo HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(second)}\r\n\r\n"
    answer = raw(make(address="0"), head + second)
    assert answer.startswith(b"HTTP/1.1 403 ")
    assert answer.count(b"HTTP/1.1 ") == 1


def test_health_is_answered_while_routes_hang_and_others_are_refused(
    make: Make, monkeypatch: pytest.MonkeyPatch, hang: Hang
) -> None:
    monkeypatch.setattr(server, "_TURN_S", 0.05)
    admin = make(address="0")
    with ThreadPoolExecutor(server._TURNS) as threads:
        hung = [threads.submit(over_tcp, admin, path="/hang") for _ in range(server._TURNS)]
        try:
            for _ in hung:
                hang.inside.acquire()
            assert over_tcp(admin, path="/healthz") == HTTPStatus.OK
            assert over_tcp(admin) == HTTPStatus.SERVICE_UNAVAILABLE
        finally:
            hang.going_on.set()
        assert [future.result() for future in hung] == [HTTPStatus.OK] * len(hung)
    assert over_tcp(admin) == HTTPStatus.OK


def test_without_a_server_commands_fail_with_one_line(tmp_path: Path) -> None:
    with pytest.raises(NoServerError, match="start 'beluga serve'"):
        request(tmp_path, "/echo")


def test_a_standby_takes_over_the_socket_of_a_killed_server(make: Make, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "admin.sock"))
    standby = make()
    with pytest.raises(NoServerError):
        request(tmp_path, "/echo")
    (name,) = names_of_standbys(tmp_path)
    assert request(tmp_path, "/echo", name=name).body
    standby.claim()
    assert request_json(tmp_path, "/echo", dict)
    assert names_of_standbys(tmp_path) == []


def test_a_server_that_ends_leaves_its_successors_socket(make: Make, tmp_path: Path) -> None:
    first, second = make(), make()
    first.claim()
    second.claim()
    first.stop()
    assert request_json(tmp_path, "/echo", dict)
    second.stop()
    assert list(tmp_path.iterdir()) == []


def test_sockets_of_killed_standbys_are_removed(make: Make, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as killed:
        killed.bind(str(tmp_path / "admin-dead.sock"))
    make()
    assert len(list(tmp_path.glob("admin-*.sock"))) == 1
    assert not (tmp_path / "admin-dead.sock").exists()


def test_directories_with_long_names_have_sockets(make: Make, tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 100) / ("e" * 100)
    deep.mkdir(parents=True)
    make(deep).claim()
    assert request_json(deep, "/echo", dict)


def test_a_group_that_may_use_the_directory_may_use_the_socket(make: Make, tmp_path: Path) -> None:
    tmp_path.chmod(0o2770)
    make().claim()
    assert stat.S_IMODE((tmp_path / "admin.sock").stat().st_mode) == 0o660


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_have_sockets_is_only_logged(make: Make, tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    make()


def test_a_missing_directory_is_only_logged(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    admin = make(tmp_path / "gone")
    admin.claim()
    assert "no admin socket" in caplog.text


def test_stopping_closes_connections(make: Make, tmp_path: Path) -> None:
    admin = make()
    admin.claim()
    with connected(tmp_path, "GET /echo") as peer:
        assert peer.recv(10000)
        admin.stop()
        assert peer.recv(1) == b""


@pytest.mark.parametrize(
    ("host", "token", "warned"),
    [
        *[("127.0.0.1", False, False), ("::1", False, False)],
        *[("0.0.0.0", False, True), ("0.0.0.0", True, False)],  # noqa: S104  it is closed at once
    ],
)
def test_a_port_that_other_machines_read_without_a_token_is_logged(
    host: str, token: bool, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    secret = Token("of-the-operators") if token else None
    Admin(ROUTES, address=(host, 0), token=secret).stop()
    assert [record.levelname for record in caplog.records] == ["WARNING"] * warned
    assert ("give --admin-token FILE" in caplog.text) is warned


def test_a_port_in_use_is_a_one_line_error(make: Make) -> None:
    admin = make(address="0")
    port = int(admin.url.rstrip("/").split(":")[2])
    with pytest.raises(AdminError, match=f"cannot have 127.0.0.1 port {port}") as error:
        Admin(ROUTES, address=("127.0.0.1", port))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("9466", ("127.0.0.1", 9466)),
        ("0.0.0.0:80", ("0.0.0.0", 80)),  # noqa: S104  only read
        ("[::1]:0", ("::1", 0)),
        ("rack-7:9466", ("rack-7", 9466)),
    ],
)
def test_read_address_parses_host_and_port(text: str, address: tuple[str, int]) -> None:
    assert read_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", ":x", "65536", "-1", "9466/metrics", "٣"])
def test_an_invalid_address_is_rejected(text: str) -> None:
    with pytest.raises(AdminError, match=r"use \[HOST:\]PORT|give 0 to 65535"):
        read_address(text)


WAIT_S = 60.0


def statuses(health: ServerHealth) -> list[int]:
    """Return what both routes answer."""
    routes = health.routes()
    return [routes["GET", path](AdminRequest(path)).status for path in ("/healthz", "/readyz")]


def test_a_server_without_progress_is_not_alive() -> None:
    now = [100.0]
    health = ServerHealth(still_s=10.0, clock=lambda: now[0])
    assert statuses(health) == [200, 503]  # the server begins
    now[0] += 1000.0
    assert statuses(health) == [200, 503]
    health.record_progress(serves=False)  # the server stands by
    assert statuses(health) == [200, 503]
    health.record_start()
    now[0] += 1000.0
    assert statuses(health) == [200, 503]
    health.record_progress(serves=True)
    now[0] += 9.0
    assert statuses(health) == [200, 200]
    now[0] += 1.0
    assert statuses(health) == [503, 503]
    assert b"no progress for 10 s" in health.routes()["GET", "/healthz"](AdminRequest("")).body
    health.record_progress(serves=True)
    assert statuses(health) == [200, 200]


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stuck"
    path.touch()
    yield path
    path.unlink(missing_ok=True)


def test_a_hanging_poll_loop_is_detected_while_the_process_responds(shm: Path, stuck: Path) -> None:
    device = str(shm / "device")
    Pool.create([device], device_size=16 << 20).close()
    with subprocess.Popen(
        [sys.executable, stuck_server.__file__, device], stdout=subprocess.PIPE, text=True
    ) as server:
        try:
            assert server.stdout is not None
            url = server.stdout.readline().strip()
            assert eventually(lambda: status_of(f"{url}readyz") == 200, WAIT_S)
            assert status_of(f"{url}healthz") == 200
            with Pool.open([device]) as pool, Client(pool, timeout_s=WAIT_S) as client:
                with pytest.raises(CallTimeoutError):
                    client.call(METHOD_USER, str(stuck).encode(), timeout_s=0.3)
                assert eventually(lambda: status_of(f"{url}healthz") == 503, WAIT_S)
                assert status_of(f"{url}readyz") == 503
                stuck.unlink()
                assert eventually(lambda: status_of(f"{url}healthz") == 200, WAIT_S)
        finally:
            stuck.unlink(missing_ok=True)
            server.terminate()
