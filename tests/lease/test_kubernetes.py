# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The lock as a Kubernetes Lease, against a server that keeps leases as the API server does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from beluga.errors import LeaseError
from beluga.lease import KubernetesLease, open_lease

LEASES = "/apis/coordination.k8s.io/v1/namespaces/pods/leases"


class Api(ThreadingHTTPServer):
    """Leases by name; each change must name the version that it changes."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.leases: dict[str, dict[str, Any]] = {}
        self.version = 0
        self.status = 0  # answer everything with it
        self.lock = threading.Lock()
        self.tokens: set[str] = set()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = path.removeprefix(LEASES).strip("/")
        if self.status:
            return self.status, {"message": "not today"}
        if method == "GET" or (method == "PUT" and name not in self.leases):
            return (200, self.leases[name]) if name in self.leases else (404, {})
        if method == "POST":
            name = body["metadata"]["name"]
            if name in self.leases:
                return 409, {}
        elif (
            body["metadata"]["resourceVersion"] != self.leases[name]["metadata"]["resourceVersion"]
        ):
            return 409, {}
        self.version += 1
        body["metadata"]["resourceVersion"] = str(self.version)
        self.leases[name] = body
        return 201 if method == "POST" else 200, body


class Handler(BaseHTTPRequestHandler):
    server: Api

    def _answer(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        body = json.loads(self.rfile.read(size)) if size else {}
        with self.server.lock:
            self.server.tokens.add(self.headers.get("Authorization", ""))
            status, answer = self.server.answer(self.command, self.path, body)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = _answer  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Quietly."""


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path


def lease(api: Api, account: Path, *, duration_s: int = 60) -> KubernetesLease:
    return KubernetesLease(
        "pods/pool", server=api.url, account=account, duration_s=duration_s, timeout_s=20
    )


def test_one_holds_it_at_a_time(api: Api, account: Path) -> None:
    one, other = lease(api, account), lease(api, account)
    assert one.acquire(0)
    assert not other.acquire(0.3)
    assert one.renew()
    assert not other.renew()
    one.release()
    assert api.leases["pool"]["spec"]["holderIdentity"] == ""
    assert other.acquire(0)
    assert not one.renew()
    assert api.leases["pool"]["spec"]["leaseTransitions"] == 2
    assert api.tokens == {"Bearer secret"}


def test_a_holder_that_stands_still_is_followed(api: Api, account: Path) -> None:
    one, other = lease(api, account, duration_s=1), lease(api, account)
    assert one.acquire(0)
    assert other.acquire(60)
    assert not one.renew()


def test_a_holder_that_renews_is_not_followed(api: Api, account: Path) -> None:
    one, other = lease(api, account, duration_s=2), lease(api, account)
    assert one.acquire(0)
    for _ in range(10):
        assert not other.acquire(0)  # each look sees another version than the one before
        assert one.renew()


def test_of_two_that_write_at_once_one_wins(api: Api, account: Path) -> None:
    one, other = lease(api, account), lease(api, account)
    assert one.acquire(0)
    one.release()
    stale = one._read()
    assert stale is not None
    assert other.acquire(0)
    assert not one._write(stale, "one")
    assert other.renew()


def test_while_the_api_is_away_it_is_held_to_its_end(api: Api, account: Path) -> None:
    one, brief = lease(api, account), KubernetesLease("pods/x", server=api.url, account=account)
    assert one.acquire(0)
    api.status = 503
    assert one.renew()
    assert not brief.renew()
    with pytest.raises(LeaseError, match="503 not today"):
        brief.acquire(0)
    one.release()
    assert not one.renew()


def test_an_api_that_is_not_there_is_an_error(account: Path) -> None:
    nobody = KubernetesLease("pods/pool", server="http://127.0.0.1:9", account=account)
    with pytest.raises(LeaseError, match="does not answer"):
        nobody.acquire(0)
    assert not nobody.renew()


@pytest.mark.parametrize(
    "url",
    ["etcd://", "etcd://host", "k8s://pods", "k8s:///pool", "zk://host/a", "", "etcd://a:b/c"],
)
def test_a_url_that_names_no_lease_is_refused(url: str) -> None:
    with pytest.raises(LeaseError):
        open_lease(url)


def test_outside_of_a_pod_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LeaseError, match="no Kubernetes here"):
        open_lease("k8s://pods/pool")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with pytest.raises(LeaseError, match="no certificate"):
        KubernetesLease("pods/pool", account=tmp_path)
