# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The lease in a real etcd from Debian, on loopback."""

from __future__ import annotations

import base64
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.blocks import eventually

from beluga.errors import LeaseError
from beluga.lease import EtcdLease, Lease, open_lease
from beluga.pool import Pool

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.slow

Command = subprocess.Popen[str]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Etcd:
    """An etcd with its own port."""

    def __init__(self, directory: Path, scheme: str = "http", *options: str) -> None:
        self.scheme, self.port = scheme, free_port()
        client, peer = f"{scheme}://127.0.0.1:{self.port}", f"http://127.0.0.1:{free_port()}"
        self._log = (directory / "log").open("w")
        self.process = subprocess.Popen(
            [
                shutil.which("etcd") or "",
                f"--data-dir={directory / 'data'}",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                *options,
            ],
            stdout=self._log,
            stderr=self._log,
        )

    def url(self, name: str) -> str:
        return f"{self.scheme.replace('http', 'etcd')}://127.0.0.1:{self.port}/{name}"

    def lease(self, name: str, *, ttl_s: int = 30) -> EtcdLease:
        base = f"{self.scheme}://127.0.0.1:{self.port}"
        return EtcdLease(base, name, ttl_s=ttl_s, timeout_s=20)

    def request(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        return self.lease("any")._request(path, body)

    def revoke(self, name: str) -> None:
        """End the etcd lease of the holder of this one."""
        key = base64.b64encode(f"beluga/{name}".encode()).decode()
        held = self.request("/v3/kv/range", {"key": key})["kvs"][0]["lease"]
        self.request("/v3/lease/revoke", {"ID": held})

    def answers(self) -> bool:
        lease = self.lease("probe")
        try:
            held = lease.acquire(0)
        except LeaseError:
            return False
        lease.release()
        return held

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    installer = ROOT / "scripts" / "dev/setup-packages"
    if (
        not shutil.which("etcd")
        and subprocess.run([installer, "etcd-server"], check=False).returncode
    ):
        pytest.skip("there is no etcd, and it cannot be installed here")
    server = Etcd(tmp_path_factory.mktemp("etcd"))
    try:
        assert eventually(server.answers, 60)
        yield server
    finally:
        server.end()


def test_a_lease_has_one_holder_at_a_time(etcd: Etcd) -> None:
    one, other = etcd.lease("one"), etcd.lease("one")
    assert one.acquire(0)
    assert not other.acquire(0.3)
    assert one.renew()
    assert not other.renew()
    one.release()
    assert other.acquire(20)
    assert not one.renew()
    other.release()


def test_locks_with_different_names_are_separate(etcd: Etcd) -> None:
    one, other = etcd.lease("a"), etcd.lease("b")
    assert one.acquire(0)
    assert other.acquire(0)


def test_a_lease_without_renewal_ends(etcd: Etcd) -> None:
    one, other = etcd.lease("silent", ttl_s=2), etcd.lease("silent")
    assert one.acquire(0)
    assert other.acquire(60)  # etcd must detect the end of the first one
    assert not one.renew()


def test_a_url_selects_the_lease_service(etcd: Etcd) -> None:
    lease: Lease = open_lease(etcd.url("by-url"))
    assert lease.acquire(20)
    assert not etcd.lease("by-url").acquire(0)
    lease.release()


@pytest.fixture
def pool(tmp_path: Path) -> list[str]:
    device = str(tmp_path / "device")
    Pool.create([device], device_size=32 << 20, sparse=True).close()
    return ["--pool", device]


def prints(command: Command, text: str) -> bool:
    """Wait for a line that begins with ``text``. Returns whether it came before the command
    ended.
    """
    assert command.stderr
    return any(line.startswith(text) for line in command.stderr)


def test_a_standby_with_a_lock_replaces_a_server_that_dies_with_it(
    etcd: Etcd,
    pool: list[str],
    start: Callable[..., Command],
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    stand_by = ("serve", "--standby", "--lease", etcd.url("standby"), *pool)
    first = start(*stand_by)
    assert prints(first, "took over, epoch 1")
    assert not etcd.lease("standby").acquire(0)
    assert run("put", "key", "-", *pool, stdin="some bytes").returncode == 0
    second = start(*stand_by)
    assert prints(second, "standing by")
    first.kill()
    assert prints(second, "took over, epoch 2")  # etcd must detect the end of the first one
    assert not etcd.lease("standby").acquire(0)
    assert run("get", "key", *pool).stdout == "some bytes"


def test_a_server_that_loses_its_lease_becomes_a_standby_every_time(
    etcd: Etcd, pool: list[str], start: Callable[..., Command]
) -> None:
    stand_by = ("serve", "--lease", etcd.url("losses"), *pool)
    one = start(*stand_by)
    assert prints(one, "took over, epoch 1")
    other = start(*stand_by)
    assert prints(other, "standing by")
    for epoch in (2, 3, 4):
        etcd.revoke("losses")
        assert prints(one, "the lease is lost; this server has stopped; standing by again")
        assert prints(other, f"took over, epoch {epoch}")
        one, other = other, one


def test_a_lease_works_over_tls_with_a_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, etcd: Etcd
) -> None:
    assert etcd.process.poll() is None  # etcd is installed and runs
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    made = subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-addext", "extendedKeyUsage=serverAuth,clientAuth"),
            *("-keyout", key, "-out", certificate),
        ],
        check=False,
        capture_output=True,
    )
    assert made.returncode == 0, made.stderr
    monkeypatch.setenv("ETCDCTL_CACERT", str(certificate))
    secure = Etcd(tmp_path, "https", f"--cert-file={certificate}", f"--key-file={key}")
    try:
        assert eventually(secure.answers, 60)
        secure.request("/v3/auth/user/add", {"name": "root", "password": "secret"})
        secure.request("/v3/auth/user/grant", {"user": "root", "role": "root"})
        secure.request("/v3/auth/enable", {})
        with pytest.raises(LeaseError, match="ETCDCTL_USER"):
            secure.lease("pool").acquire(0)
        monkeypatch.setenv("ETCDCTL_USER", "root:wrong")
        with pytest.raises(LeaseError, match="refuses the user root"):
            secure.lease("pool").acquire(0)
        monkeypatch.setenv("ETCDCTL_USER", "root:secret")
        lease = open_lease(secure.url("pool"))
        assert lease.acquire(20)
        assert lease.renew()
        monkeypatch.delenv("ETCDCTL_CACERT")
        with pytest.raises(LeaseError, match="certificate"):
            open_lease(secure.url("pool")).acquire(0)
    finally:
        secure.end()


def test_a_standby_waits_for_an_unreachable_lock(
    pool: list[str], start: Callable[..., Command]
) -> None:
    standby = start("serve", "--standby", "--lease", "etcd://127.0.0.1:9/away", *pool)
    assert prints(standby, "standing by")
    assert standby.stderr
    assert "does not answer" in standby.stderr.readline()
    with pytest.raises(subprocess.TimeoutExpired):
        standby.wait(1)
    standby.terminate()
    assert standby.wait(60) == 0


def test_a_standby_without_the_lock_does_not_touch_the_pool(
    etcd: Etcd,
    pool: list[str],
    start: Callable[..., Command],
    run: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    lock = etcd.lease("not-mine", ttl_s=300)
    assert lock.acquire(20)
    standby = start("serve", "--standby", "--lease", etcd.url("not-mine"), *pool)
    assert prints(standby, "standing by")
    time.sleep(1)  # the server renews five times per second
    assert "no server answers" in run("ping", *pool, "--timeout", "0.1").stderr
    lock.release()
    assert prints(standby, "took over, epoch 1")
