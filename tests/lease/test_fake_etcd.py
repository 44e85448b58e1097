# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The lease in etcd against a fake gateway, on a virtual clock. test_etcd.py, which is slow, tests
the same on a real etcd; this file adds answers that a real one does not give on purpose.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator
from typing import Any

import pytest
from json_server import JsonServer, running
from support.virtual_clock import Clock

from beluga.errors import LeaseError
from beluga.lease import EtcdLease, KubernetesLease, open_lease


class Etcd(JsonServer):
    """Keys that exist as long as their leases, which end by the clock."""

    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.clock = clock
        self.ends: dict[str, tuple[float, int]] = {}  # the end of each lease, and its TTL
        self.keys: dict[str, str] = {}  # the lease of each key
        self.requested: list[str] = []
        self.renewal: bytes | None = None  # the answer to each renewal, of a proxy in between

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert method == "POST"
        self.requested.append(path)
        now = self.clock.now_s
        for lease in [name for name, (end, _) in self.ends.items() if end <= now]:
            self._revoke(lease)
        return 200, getattr(self, "_" + path.rsplit("/", 1)[1])(body)

    def _grant(self, body: dict[str, Any]) -> dict[str, Any]:
        lease = str(len(self.requested))
        self.ends[lease] = (self.clock.now_s + body["TTL"], body["TTL"])
        return {"ID": lease, "TTL": str(body["TTL"])}

    def _keepalive(self, body: dict[str, Any]) -> dict[str, Any] | bytes:
        lease = body["ID"]
        if self.renewal is not None:
            return self.renewal
        if lease not in self.ends:
            return {"result": {"ID": lease}}
        ttl = self.ends[lease][1]
        self.ends[lease] = (self.clock.now_s + ttl, ttl)
        return {"result": {"ID": lease, "TTL": str(ttl)}}

    def _revoke(self, body: dict[str, Any] | str) -> dict[str, Any]:
        lease = body if isinstance(body, str) else body["ID"]
        self.ends.pop(lease, None)
        self.keys = {key: holder for key, holder in self.keys.items() if holder != lease}
        return {}

    def _txn(self, body: dict[str, Any]) -> dict[str, Any]:
        (compare,) = body["compare"]
        assert (compare["target"], compare["result"]) == ("CREATE", "EQUAL")
        put = body["success"][0]["requestPut"]
        assert compare["key"] == put["key"]
        assert put["lease"] in self.ends
        absent = put["key"] not in self.keys
        if absent != (compare["create_revision"] == "0"):
            return {}
        self.keys[put["key"]] = put["lease"]
        return {"succeeded": True}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("beluga.lease.etcd.time", clock)
    return clock


@pytest.fixture
def etcd(clock: Clock) -> Iterator[Etcd]:
    with running(Etcd(clock)) as server:
        yield server


def lease(etcd: Etcd, name: str = "pool", *, ttl_s: int = 30) -> EtcdLease:
    return EtcdLease(etcd.url, name, ttl_s=ttl_s, timeout_s=20)


def test_a_lease_in_etcd_has_one_holder_at_a_time(etcd: Etcd) -> None:
    one, other = lease(etcd), lease(etcd)
    assert one.acquire(0)
    assert not other.acquire(0)
    assert one.renew()
    assert not other.renew()
    one.release()
    assert other.acquire(0)
    assert not one.renew()
    assert list(etcd.keys) == [base64.b64encode(b"beluga/pool").decode()]


def test_a_process_that_does_not_get_the_lock_leaves_no_lease(etcd: Etcd) -> None:
    one, other = lease(etcd), lease(etcd)
    assert one.acquire(0)
    assert not other.acquire(0)
    assert len(etcd.ends) == 1


def test_a_renewal_keeps_the_lease(etcd: Etcd) -> None:
    one = lease(etcd)
    assert one.acquire(0)
    first = dict(etcd.ends)
    assert not one.acquire(0.3)  # the candidate's own key is still there
    assert etcd.requested.count("/v3/lease/grant") == 1
    assert first.keys() != etcd.ends.keys()  # a lease is released after a wait without success


def test_a_lease_that_has_ended_is_not_kept_alive_again(etcd: Etcd, clock: Clock) -> None:
    one = lease(etcd, ttl_s=2)
    assert one.acquire(0)
    clock.now_s += 3
    assert not one.renew()
    requested = len(etcd.requested)
    assert not one.renew()
    assert len(etcd.requested) == requested


@pytest.mark.parametrize(
    "answer",
    [
        *(b"<html>log in</html>", b"", b"{}", b"[]", b"null", b"[" * 100_000),
        *(b'{"result": null}', b'{"result": "a"}', b'{"result": {"TTL": "a"}}'),
        *(b'{"result": {"TTL": null}}', b'{"result": {"TTL": NaN}}', b'{"result": {"TTL": 1e999}}'),
    ],
)
def test_a_renewal_that_etcd_does_not_answer_ends_no_lease(
    etcd: Etcd, clock: Clock, answer: bytes
) -> None:
    """A proxy or a login page answers in its place; the lease is valid until it expires."""
    one = lease(etcd, ttl_s=30)
    assert one.acquire(0)
    etcd.renewal = answer
    clock.now_s += 29
    assert one.renew()
    etcd.renewal = None
    assert one.renew()
    etcd.renewal = answer
    clock.now_s += 31
    assert not one.renew()


def test_waiting_for_etcd_ends_in_time(etcd: Etcd, clock: Clock) -> None:
    assert lease(etcd).acquire(0)
    start = clock.now_s
    assert not lease(etcd).acquire(0.5)
    assert clock.now_s - start == pytest.approx(0.5)
    assert max(clock.slept) <= 0.2


def test_a_waiter_gets_the_lease_when_the_holder_ends(etcd: Etcd, clock: Clock) -> None:
    one, other = lease(etcd, ttl_s=2), lease(etcd)
    assert one.acquire(0)
    start = clock.now_s
    assert other.acquire(60)
    assert clock.now_s - start == pytest.approx(2, abs=0.21)
    assert not one.renew()


def test_a_renewed_lease_does_not_end(etcd: Etcd, clock: Clock) -> None:
    one, other = lease(etcd, ttl_s=2), lease(etcd)
    assert one.acquire(0)
    for _ in range(3):
        clock.now_s += 1.5
        assert one.renew()
        assert not other.acquire(0)


def test_a_lease_is_held_to_its_end_while_etcd_is_unreachable(etcd: Etcd, clock: Clock) -> None:
    one = lease(etcd, ttl_s=10)
    assert one.acquire(0)
    clock.now_s += 5
    assert one.renew()
    etcd.status = 503
    clock.now_s += 9.9
    assert one.renew()  # within ten seconds of the last renewal
    clock.now_s += 0.2
    assert not one.renew()


def test_a_lease_that_is_never_renewed_is_held_for_one_ttl(etcd: Etcd, clock: Clock) -> None:
    one = lease(etcd, ttl_s=10)
    assert one.acquire(0)
    etcd.status = 503
    clock.now_s += 9.9
    assert one.renew()
    clock.now_s += 0.2
    assert not one.renew()


def test_a_released_lease_is_not_held_while_etcd_is_unreachable(etcd: Etcd) -> None:
    one = lease(etcd)
    assert one.acquire(0)
    etcd.status = 503
    one.release()
    assert not one.renew()


def test_releasing_a_lease_that_is_not_held_sends_nothing(etcd: Etcd) -> None:
    one = lease(etcd)
    one.release()
    assert not one.renew()
    assert etcd.requested == []


def test_a_lease_that_etcd_ended_is_requested_again(etcd: Etcd, clock: Clock) -> None:
    one = lease(etcd, ttl_s=2)
    assert one.acquire(0)
    clock.now_s += 3
    assert not one.renew()
    assert one.acquire(0)


def test_an_etcd_error_has_the_reason(etcd: Etcd) -> None:
    etcd.status = 401
    with pytest.raises(LeaseError, match="etcd refuses /v3/lease/grant: 401 not now"):
        lease(etcd).acquire(0)


@pytest.mark.parametrize(
    "answer",
    [{}, {"ID": ""}, [1], b"no json", b"", b'{"ID": "1", "why": "' + b"a" * (1 << 20) + b'"}'],
)
def test_an_etcd_without_a_lease_grant_is_an_error(etcd: Etcd, answer: object) -> None:
    etcd.answer = lambda *_: (200, answer)  # type: ignore[method-assign]
    with pytest.raises(LeaseError, match="granted no lease"):
        lease(etcd).acquire(0)


class Guarded(Etcd):
    """An etcd with users: a token is valid for a number of calls."""

    good_for = 2

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        if path == "/v3/auth/authenticate":
            if body != {"name": "beluga", "password": "secret"}:
                return 400, {"error": "etcdserver: authentication failed, invalid user ID"}
            self.left = self.good_for
            return 200, {"token": "token-1"}
        if getattr(self, "left", 0) <= 0:
            return 401, {"error": "etcdserver: invalid auth token"}
        self.left -= 1
        return super().answer(method, path, body)


@pytest.mark.parametrize(
    "environment",
    [
        {"ETCDCTL_USER": "beluga:secret"},
        {"ETCDCTL_USER": "beluga", "ETCDCTL_PASSWORD": "secret"},
    ],
)
def test_user_is_authenticated_again_when_the_token_has_ended(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with running(Guarded(clock)) as guarded:
        one = EtcdLease(guarded.url, "pool", ttl_s=30)
        assert one.acquire(0)
        assert all(one.renew() for _ in range(2 * Guarded.good_for))
        assert "token-1" in guarded.tokens


@pytest.mark.parametrize(
    ("user", "expected"),
    [("beluga:wrong", "etcd refuses the user beluga: 400 .*; set ETCDCTL_USER"), ("", "401")],
)
def test_the_wrong_user_gets_an_error_with_a_fix(
    clock: Clock, monkeypatch: pytest.MonkeyPatch, user: str, expected: str
) -> None:
    monkeypatch.setenv("ETCDCTL_USER", user)
    with (
        running(Guarded(clock)) as guarded,
        pytest.raises(LeaseError, match=expected) as refused,
    ):
        EtcdLease(guarded.url, "pool").acquire(0)
    assert "wrong" not in str(refused.value)


def test_members_that_do_not_reply_are_skipped(etcd: Etcd) -> None:
    one = EtcdLease(["http://127.0.0.1:9", etcd.url, "http://127.0.0.1:9"], "pool", ttl_s=30)
    assert one.acquire(0)
    assert one.renew()
    assert one._services[0].base == etcd.url  # from now on it is tried first


def test_a_member_without_a_leader_is_skipped(etcd: Etcd) -> None:
    class Alone(JsonServer):
        def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, Any]:
            return 503, {"error": "etcdserver: no leader"}

    with running(Alone()) as alone:
        assert EtcdLease([alone.url, etcd.url], "pool").acquire(0)
        with pytest.raises(LeaseError, match=r"no leader.*no leader"):
            EtcdLease([alone.url, alone.url], "pool").acquire(0)


def test_no_redirection_is_followed(etcd: Etcd) -> None:
    etcd.answer = lambda *_: (307, {"error": "over there"})  # type: ignore[method-assign]
    with pytest.raises(LeaseError, match="307 over there"):
        lease(etcd).acquire(0)


def test_no_proxy_is_used(etcd: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert lease(etcd).acquire(0)


def test_a_url_has_host_port_and_name(etcd: Etcd) -> None:
    one = open_lease(f"etcd://127.0.0.1:{etcd.server_port}/by-url")
    assert isinstance(one, EtcdLease)
    assert one.acquire(0)
    assert list(etcd.keys) == [base64.b64encode(b"beluga/by-url").decode()]


@pytest.mark.parametrize(
    ("url", "base"),
    [
        ("etcd://somewhere/pool", "http://somewhere:2379"),
        ("etcd://[::1]:4000/pool", "http://[::1]:4000"),
        ("etcd:///pool", "http://127.0.0.1:2379"),
        ("etcds://somewhere/pool", "https://somewhere:2379"),
    ],
)
def test_omitted_parts_of_a_url_have_defaults(url: str, base: str) -> None:
    one = open_lease(url)
    assert isinstance(one, EtcdLease)
    assert [service.base for service in one._services] == [base]


def test_url_names_all_members_of_a_cluster() -> None:
    one = open_lease("etcd://a,b:4000,[::1]/pool")
    assert isinstance(one, EtcdLease)
    assert [service.base for service in one._services] == [
        "http://a:2379",
        "http://b:4000",
        "http://[::1]:2379",
    ]


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("etcd://a:port/pool", {}, "a:port"),
        ("etcd://me:secret@a/pool", {}, "ETCDCTL_USER"),
        ("etcds://a/pool", {"ETCDCTL_CACERT": "/nowhere/ca.pem"}, "/nowhere/ca.pem"),
        ("etcds://a/pool", {"ETCDCTL_CERT": "/nowhere/me.pem"}, "ETCDCTL_KEY"),
    ],
)
def test_url_or_certificate_that_cannot_be_used_is_refused_at_once(
    url: str, environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(LeaseError, match=expected):
        open_lease(url)


def test_a_kubernetes_url_has_namespace_and_lease(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests: list[str] = []
    monkeypatch.setattr(KubernetesLease, "__init__", lambda _, place: requests.append(place))
    open_lease("k8s://pods/pool/")
    assert requests == ["pods/pool"]
