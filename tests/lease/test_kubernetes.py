# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The lease in Kubernetes, against a fake of the API server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from json_server import JsonServer, running
from support.virtual_clock import Clock

from beluga.errors import LeaseError
from beluga.lease import KubernetesLease, open_lease

LEASES = "/apis/coordination.k8s.io/v1/namespaces/pods/leases"


class Api(JsonServer):
    """Leases by name; each change must name the version that it changes."""

    def __init__(self) -> None:
        super().__init__()
        self.leases: dict[str, dict[str, Any]] = {}
        self.version = 0

    def answer(self, method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        name = path.removeprefix(LEASES).strip("/")
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


@pytest.fixture
def api() -> Iterator[Api]:
    with running(Api()) as server:
        yield server


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("beluga.lease.kubernetes.time", clock)
    return clock


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("secret\n")
    return tmp_path


def lease(api: Api, account: Path, *, duration_s: int = 60) -> KubernetesLease:
    return KubernetesLease(
        "pods/pool", server=api.url, account=account, duration_s=duration_s, timeout_s=20
    )


def test_a_lease_has_one_holder_at_a_time(api: Api, account: Path) -> None:
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


def test_a_stalled_holder_is_replaced(api: Api, account: Path, clock: Clock) -> None:
    one, other = lease(api, account, duration_s=10), lease(api, account)
    assert one.acquire(0)
    assert not other.acquire(0)  # this version of the record is new to this candidate
    clock.now_s += 10.0
    assert not other.acquire(0)  # the record is unchanged for exactly its duration
    clock.now_s += 0.1
    assert other.acquire(0)
    assert not one.renew()


def test_waiting_ends_in_time(api: Api, account: Path, clock: Clock) -> None:
    one, other = lease(api, account), lease(api, account)
    assert one.acquire(0)
    start = clock.now_s
    assert not other.acquire(0.5)
    assert clock.now_s - start == pytest.approx(0.5)
    assert max(clock.slept) <= 0.2


def test_the_record_is_readable_by_other_clients(api: Api, account: Path) -> None:
    one, other = lease(api, account, duration_s=7), lease(api, account, duration_s=8)
    assert one.acquire(0)
    first = api.leases["pool"]
    assert (first["apiVersion"], first["kind"]) == ("coordination.k8s.io/v1", "Lease")
    assert first["metadata"]["name"] == "pool"
    assert first["spec"]["holderIdentity"].startswith("beluga-")
    assert first["spec"]["leaseDurationSeconds"] == 7
    assert first["spec"]["leaseTransitions"] == 1
    assert first["spec"]["acquireTime"] == first["spec"]["renewTime"]
    assert one.renew()
    again = api.leases["pool"]["spec"]
    # the lease was held without a break
    assert again["acquireTime"] == first["spec"]["acquireTime"]
    assert again["renewTime"] > first["spec"]["renewTime"]
    assert again["leaseTransitions"] == 1
    one.release()
    # A release is not a transition.
    assert api.leases["pool"]["spec"]["leaseTransitions"] == 1
    assert other.acquire(0)
    taken = api.leases["pool"]["spec"]
    assert taken["leaseTransitions"] == 2
    assert taken["acquireTime"] == taken["renewTime"] > first["spec"]["acquireTime"]


def test_another_clients_record_without_a_duration_gets_the_default(
    api: Api, account: Path, clock: Clock
) -> None:
    api.leases["pool"] = {"metadata": {"resourceVersion": "7"}, "spec": {"holderIdentity": "x"}}
    one = lease(api, account, duration_s=10)
    assert not one.acquire(0)
    clock.now_s += 9.9
    assert not one.acquire(0)
    clock.now_s += 0.2
    assert one.acquire(0)
    assert api.leases["pool"]["spec"]["leaseTransitions"] == 1


@pytest.mark.parametrize("status", [401, 500])
def test_a_refusal_has_a_reason(api: Api, account: Path, status: int) -> None:
    api.status = status
    with pytest.raises(LeaseError, match=f"reading the lease: {status} not today"):
        lease(api, account).acquire(0)


@pytest.mark.parametrize("answer", [{}, {"spec": None}, {"spec": "mine"}, [1]])
def test_an_answer_without_a_lease_is_an_error(api: Api, account: Path, answer: object) -> None:
    api.answer = lambda *_: (200, answer)  # type: ignore[assignment,method-assign,return-value]
    with pytest.raises(LeaseError, match="denies reading the lease: 200"):
        lease(api, account).acquire(0)


def test_the_slower_creator_does_not_hold_the_lease(api: Api, account: Path) -> None:
    one, other = lease(api, account), lease(api, account)
    assert one.acquire(0)
    assert other._create() is False


def test_a_lease_that_may_not_be_made_is_an_error(api: Api, account: Path) -> None:
    def refuse(method: str, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        return (404, {}) if method == "GET" else (403, {"message": "forbidden"})

    api.answer = refuse  # type: ignore[method-assign]
    with pytest.raises(LeaseError, match="refuses the lease: 403 forbidden"):
        lease(api, account).acquire(0)


def test_without_a_token_no_request_is_sent(api: Api, tmp_path: Path) -> None:
    with pytest.raises(LeaseError, match="no token"):
        lease(api, tmp_path).acquire(0)
    assert api.tokens == set()


@pytest.mark.parametrize("text", ["", "\n", None])
def test_during_its_replacement_the_old_token_is_used(
    api: Api, account: Path, text: str | None
) -> None:
    one = lease(api, account)
    assert one.acquire(0)
    if text is None:
        (account / "token").unlink()
    else:
        (account / "token").write_text(text)
    assert one.renew()
    (account / "token").write_text("newer")
    assert one.renew()
    assert api.tokens == {"Bearer secret", "Bearer newer"}


def test_an_empty_token_file_counts_as_missing(api: Api, account: Path) -> None:
    (account / "token").write_text("\n")
    with pytest.raises(LeaseError, match="no token: it is empty"):
        lease(api, account).acquire(0)
    assert api.tokens == set()


def test_releasing_a_lease_of_another_holder_has_no_effect(api: Api, account: Path) -> None:
    one, other = lease(api, account), lease(api, account)
    assert one.acquire(0)
    version = api.version
    other.release()
    assert api.version == version
    assert one.renew()


def test_a_holder_that_renews_is_not_replaced(api: Api, account: Path, clock: Clock) -> None:
    one, other = lease(api, account, duration_s=2), lease(api, account)
    assert one.acquire(0)
    for _ in range(10):
        clock.now_s += 1.5
        assert not other.acquire(0)  # each read gets a new version
        assert one.renew()


def test_one_of_two_concurrent_writers_gets_the_lease(api: Api, account: Path) -> None:
    one, other = lease(api, account), lease(api, account)
    assert one.acquire(0)
    one.release()
    stale = one._read()
    assert stale is not None
    assert other.acquire(0)
    assert not one._write(stale, "one")
    assert other.renew()


def test_a_lease_is_held_to_its_end_while_the_api_is_unreachable(
    api: Api, account: Path, clock: Clock
) -> None:
    one, brief = lease(api, account), KubernetesLease("pods/x", server=api.url, account=account)
    assert one.acquire(0)
    clock.now_s += 50.0
    assert one.renew()
    api.status = 503
    clock.now_s += 59.9  # within the 60 seconds of the last renewal
    assert one.renew()
    assert not brief.renew()
    with pytest.raises(LeaseError, match="503 not today"):
        brief.acquire(0)
    clock.now_s += 0.2
    assert not one.renew()


def test_a_released_lease_is_not_held_while_the_api_is_unreachable(api: Api, account: Path) -> None:
    one = lease(api, account)
    assert one.acquire(0)
    api.status = 503
    one.release()
    assert not one.renew()


def test_a_lost_lease_is_not_held_while_the_api_is_unreachable(api: Api, account: Path) -> None:
    one = lease(api, account)
    assert one.acquire(0)
    api.leases["pool"]["spec"]["holderIdentity"] = "another"
    assert not one.renew()
    api.status = 503
    assert not one.renew()


def test_a_missing_api_is_an_error(account: Path) -> None:
    nobody = KubernetesLease("pods/pool", server="http://127.0.0.1:9", account=account)
    with pytest.raises(LeaseError, match="does not answer"):
        nobody.acquire(0)
    assert not nobody.renew()


@pytest.mark.parametrize(
    "url",
    ["etcd://", "etcd://host", "k8s://pods", "k8s:///pool", "zk://host/a", "", "etcd://a:b/c"],
)
def test_a_url_that_names_no_lease_is_refused(url: str) -> None:
    with pytest.raises(LeaseError, match=r"is not a lease; give etcd://|Port could not"):
        open_lease(url)


def test_outside_a_pod_there_is_no_default_lease(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(LeaseError, match="no Kubernetes here"):
        open_lease("k8s://pods/pool")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "127.0.0.1")
    with pytest.raises(LeaseError, match="no certificate"):
        KubernetesLease("pods/pool", account=tmp_path)
