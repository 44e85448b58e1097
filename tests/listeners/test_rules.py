# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Which connection loses its slot, on a virtual clock; the rules for names and paths; tokens and
certificates.
"""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from beluga import http_server
from beluga.errors import SettingsError
from beluga.http_server import ConnectionSlots
from beluga.listening import (
    KnownHosts,
    Token,
    from_other_site,
    is_loopback,
    plain_path,
    read_tls,
    read_token,
)


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(http_server.time, "monotonic", lambda: self.now)
        self.slots: ConnectionSlots[str] = ConnectionSlots(30.0, lambda: self.now)

    def slowest(self, count: int = 1, lag_min_s: float = 0.0) -> list[str]:
        return [slot.connection for slot in self.slots.slowest(count, lag_min_s)]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_the_client_that_was_silent_longest_loses_its_slot(clock: Clock) -> None:
    for name in ("old", "middle", "new"):
        clock.slots.take(name, "a")
        clock.now += 2
    assert clock.slowest(2) == ["old", "middle"]


def test_a_client_with_a_running_request_keeps_its_connection(clock: Clock) -> None:
    slot = clock.slots.take("one", "a")
    slot.work()
    clock.now += 1000
    assert clock.slowest() == []
    assert clock.slots.overdue() == []
    slot.wait()
    clock.now += 31
    assert [slot.connection for slot in clock.slots.overdue()] == ["one"]


def test_a_trickle_of_bytes_counts_as_silence(clock: Clock) -> None:
    slot = clock.slots.take("drips", "a")
    for _ in range(31):
        clock.now += 1
        slot.move(1)
    assert [slot.connection for slot in clock.slots.overdue()] == ["drips"]


def test_earlier_speed_protects_a_client_only_briefly(clock: Clock) -> None:
    """It sent a mebibyte at once, and then nothing."""
    slot = clock.slots.take("one", "a")
    slot.move(1 << 20)
    clock.now += 31
    assert clock.slots.overdue()


def test_an_active_client_keeps_its_slot(clock: Clock) -> None:
    fast, slow = clock.slots.take("fast", "a"), clock.slots.take("slow", "b")
    for _ in range(100):
        clock.now += 1
        fast.move(100_000)
        slow.move(10)
    assert clock.slowest(2, 0.25) == ["slow"]


def test_the_peer_with_the_most_slow_clients_loses_slots_first(clock: Clock) -> None:
    clock.slots.take("probe", "kubelet")
    clock.now += 1
    for number in range(5):
        clock.slots.take(f"flood{number}", "attacker")
    clock.now += 2
    assert clock.slowest() == ["flood0"]
    clock.slots.leave("flood0")
    assert clock.slowest() == ["flood1"]


def test_a_new_client_is_kept_while_others_stall(clock: Clock) -> None:
    clock.slots.take("lags", "b")
    clock.now += 2
    for number in range(9):
        clock.slots.take(str(number), "a")
    assert clock.slowest() == ["lags"]
    assert clock.slowest(9, 0.25) == ["lags"]


@pytest.mark.parametrize(
    ("host", "recognized"),
    [
        *[(name, True) for name in ("127.0.0.1:80", "[::1]:9", "[::1]", "localhost", "LOCALHOST.")],
        *[(name, True) for name in ("a.localhost", "pool.example", "POOL.example:1", "10.0.0.1")],
        *[
            (name, False)
            for name in ("evil.example", "localhost.evil.example", "", ":80", "gateway")
        ],
        *[(name, False) for name in ("1.2.3.4.evil.example", "1.2.3", "evil.example:")],
    ],
)
def test_names_of_this_machine_are_recognized(host: str, recognized: bool) -> None:
    assert (host in KnownHosts("127.0.0.1", ["pool.example"])) is recognized


def test_all_host_names_are_accepted_if_configured() -> None:
    assert "evil.example" in KnownHosts("127.0.0.1", ["*"])
    assert "gateway:80" in KnownHosts("127.0.0.1", single_labels=True)
    assert "my_gateway-1" in KnownHosts("127.0.0.1", single_labels=True)
    for host in ("ai.", "ai.:80", "a@b", "a:b", "a b", "", "\N{CYRILLIC SMALL LETTER O}", "a" * 64):
        assert host not in KnownHosts("127.0.0.1", single_labels=True)
    assert "localhost." in KnownHosts("127.0.0.1", single_labels=True)
    assert "127.0.0.1." in KnownHosts("127.0.0.1")
    assert "evil.example" not in KnownHosts("127.0.0.1", single_labels=True)


@pytest.mark.parametrize(
    ("headers", "other"),
    [
        ({"Host": "a:1"}, False),
        ({"Host": "a:1", "Origin": "http://a:1"}, False),
        ({"Host": "a:1", "Origin": "http://a:2"}, True),
        ({"Host": "a:1", "Origin": "null"}, True),
        ({"Host": "a:1", "Origin": "http://["}, True),
        ({"Host": "a:1", "Origin": ""}, True),
        ({"Host": "a:1", "Sec-Fetch-Site": "cross-site"}, True),
        ({"Host": "a:1", "Sec-Fetch-Site": "same-origin"}, False),
        ({"Host": "a:1", "Sec-Fetch-Site": "none"}, False),
        ({"Host": "a:1", "Origin": "https://chat.example"}, False),
    ],
)
def test_requests_of_other_origins_are_recognized(headers: dict[str, str], other: bool) -> None:
    assert from_other_site(headers, ["https://chat.example"]) is other


def test_loopback_addresses_are_recognized() -> None:
    assert all(map(is_loopback, ("127.0.0.1", "127.9.9.9", "::1", "localhost")))
    others = ("0.0.0.0", "::", "10.0.0.1", "host.example", "")  # noqa: S104
    assert not any(map(is_loopback, others))


@pytest.mark.parametrize(
    ("raw", "plain"),
    [
        ("/", "/"),
        ("/v1/x", "/v1/x"),
        ("/v1/x/", "/v1/x"),
        ("/v1/%78", "/v1/x"),
        ("/v1/a.b:c", "/v1/a.b:c"),
        *[
            (raw, None)
            for raw in ("", "v1", "//v1", "/v1//", "/v1/.", "/v1/..", "/./v1", "/v1/..;/x")
        ],
        *[
            (raw, None)
            for raw in ("/v1%2fx", "/v1/%252e", "/v1/%00", "/v1/a\\b", "/v1/%5c", "/%0a")
        ],
    ],
)
def test_a_path_has_one_spelling(raw: str, plain: str | None) -> None:
    assert plain_path(raw) == plain


SECRET = "no-one-may-read-this"  # noqa: S105  it is none


def made(folder: Path, *secret: str) -> str:
    """Return the setting of a new certificate."""
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-days", "2"),
            *("-keyout", folder / "key", "-out", folder / "cert", "-subj", "/CN=localhost"),
            *(secret or ("-nodes",)),
        ],
        capture_output=True,
        check=True,
    )
    return f"{folder / 'cert'},{folder / 'key'}"


def test_a_token_is_not_in_its_repr() -> None:
    assert SECRET not in f"{Token(SECRET)!r} {Token(SECRET)} {[Token(SECRET)]}"


def test_a_guessable_token_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("x" * 15 + "\n")
    with pytest.raises(SettingsError, match="has 15 characters; make one of at least 16"):
        read_token(file)
    file.write_text("x" * 16 + "\n")
    assert read_token(file).shown_by("Bearer " + "x" * 16)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32", "utf-8"])
def test_a_token_is_read_after_a_byte_order_mark(tmp_path: Path, encoding: str) -> None:
    """Editors of Windows put one in front, which no client sends."""
    file = tmp_path / "token"
    file.write_bytes(f"{SECRET}\r\nmore\r\n".encode(encoding))
    assert read_token(file).shown_by(f"Bearer {SECRET}")


def test_insecure_tls_versions_are_disabled(tmp_path: Path) -> None:
    assert read_tls(made(tmp_path)).minimum_version == ssl.TLSVersion.TLSv1_2


def test_an_encrypted_key_is_rejected_without_a_prompt(tmp_path: Path) -> None:
    setting = made(tmp_path, "-passout", f"pass:{SECRET}")
    with pytest.raises(SettingsError, match="the key is encrypted"):
        read_tls(setting)
