# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A link: attached or not, an attempt ends soon and never raises."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator

import numpy as np
import pytest

from beluga import MetaServer, Namespace, Pool
from beluga.connectors.link import Attachment, Link
from beluga.connectors.settings import PoolSettings, settings_of
from beluga.errors import ConnectorError, NoSpaceError
from beluga.transfer import EngineKind, PlannedEngine, TransferClass, why_no_dsa
from tests.transfer import stand_in

NAMESPACE = Namespace.of("test")
DIGESTS = [bytes([i]) * 32 for i in range(4)]
LONG_S = 60.0  # for what takes milliseconds on a machine that is not busy


def put(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).put(DIGESTS, np.ones((4, 4096), dtype=np.uint8)).stored


def lookup(attachment: Attachment) -> int:
    return attachment.cache(NAMESPACE).lookup(DIGESTS)


@pytest.fixture
def link(pool_name: str) -> Iterator[Link]:
    settings = PoolSettings(pool=pool_name, timeout_ms=300, retry_s=0.05)
    link = Link(settings, name="test", logger=logging.getLogger("test.link"), prefault=True)
    yield link
    link.close()


def until_attached(link: Link) -> None:
    deadline = time.monotonic() + LONG_S
    while not link.attached:
        assert time.monotonic() < deadline, "the link does not attach"
        time.sleep(0.01)


def test_an_attempt_reaches_the_pool(server: MetaServer, link: Link) -> None:
    assert link.wait(LONG_S)
    assert link.attempt("putting", put) == 4
    assert link.attempt("looking up", lookup) == 4
    assert link.failure_count == 0


def test_without_a_server_an_attempt_fails_at_once_and_a_server_is_found_when_it_comes(
    link: Link, pool: Pool
) -> None:
    assert not link.wait(0.4)
    assert link.attempt("looking up", lookup) is None
    with MetaServer(pool):
        until_attached(link)
        assert link.attempt("looking up", lookup) == 0


def test_a_server_that_goes_costs_one_wait_and_comes_back(link: Link, pool: Pool) -> None:
    with MetaServer(pool):
        assert link.wait(LONG_S)
        assert link.attempt("putting", put) == 4
    assert link.attempt("looking up", lookup) is None
    assert link.failure_count >= 1
    assert not link.attached
    with MetaServer(pool):
        until_attached(link)
        assert link.attempt("looking up", lookup) == 4


def test_an_error_of_one_call_leaves_the_session(server: MetaServer, link: Link) -> None:
    def full(_: Attachment) -> int:
        raise NoSpaceError("no room")

    assert link.wait(LONG_S)
    assert link.attempt("putting", full) is None
    assert link.failure_count == 1
    assert link.attached


def test_warnings_come_once_a_minute(
    server: MetaServer, link: Link, caplog: pytest.LogCaptureFixture
) -> None:
    def full(_: Attachment) -> int:
        raise NoSpaceError("no room")

    assert link.wait(LONG_S)
    for _ in range(5):
        link.attempt("putting", full)
    (record,) = caplog.records
    assert re.fullmatch(r"beluga test: putting: no room \(after \d+ ms\)", record.message)


def test_a_mistake_of_ours_is_not_hidden(server: MetaServer, link: Link) -> None:
    def wrong(_: Attachment) -> int:
        raise ZeroDivisionError

    assert link.wait(LONG_S)
    with pytest.raises(ZeroDivisionError):
        link.attempt("dividing", wrong)


def test_settings_are_checked() -> None:
    assert settings_of(PoolSettings, {"timeout_ms": 7, "retry_s": 2}).timeout_ms == 7
    with pytest.raises(ConnectorError, match="knows no setting tiemout_ms"):
        settings_of(PoolSettings, {"tiemout_ms": 7})
    with pytest.raises(ConnectorError, match="verify is 'yes'; it must be bool"):
        settings_of(PoolSettings, {"verify": "yes"})
    with pytest.raises(ConnectorError, match="timeout_ms is True"):
        settings_of(PoolSettings, {"timeout_ms": True})
    with pytest.raises(ConnectorError, match="greater than 0"):
        settings_of(PoolSettings, {"timeout_ms": 0})
    with pytest.raises(ConnectorError, match="engine is 'gpu'; it must be auto or cpu or dsa"):
        settings_of(PoolSettings, {"engine": "gpu"})


def test_an_engine_that_is_not_there_is_refused_at_start() -> None:
    if why_no_dsa() is None:
        pytest.skip("there is a DSA")
    with pytest.raises(ConnectorError, match="setting engine is dsa, but ") as caught:
        settings_of(PoolSettings, {"engine": "dsa"})
    assert "\n" not in str(caught.value)


def test_a_link_counts_what_a_dsa_carries_once(
    server: MetaServer, pool_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in.install(monkeypatch)
    small, large = np.ones((1, 1000), np.uint8), np.ones((3, 300_000), np.uint8)
    attachment = Attachment(PoolSettings(pool=pool_name, timeout_ms=5000))
    cache = attachment.cache(NAMESPACE)
    assert isinstance(cache.engine, PlannedEngine)
    assert cache.put(DIGESTS[:1], small).stored == 1
    assert cache.put(DIGESTS[1:], large).stored == 3
    assert attachment.cache(Namespace.of("another")).lookup(DIGESTS) == 0
    assert attachment.carried()[TransferClass.OFFLOAD].bytes == small.nbytes + large.nbytes
    assert cache.engine.stat.plans[EngineKind.DSA] == 1
    attachment.close()
