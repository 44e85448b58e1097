# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Eras: all users of a namespace have the same one, any of them can end it, and none comes back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from beluga import MetaServer, Namespace
from beluga.connectors import era
from beluga.connectors.connection import Attachment
from beluga.connectors.era import Era
from beluga.connectors.settings import PoolSettings
from beluga.errors import CacheError
from beluga.meta import MetaClient

MODEL = Namespace.of("model")


@pytest.fixture
def sessions(server: MetaServer, pool_name: str) -> Iterator[list[Attachment]]:
    made = [Attachment(PoolSettings(pool=pool_name, timeout_ms=5000)) for _ in range(2)]
    yield made
    for session in made:
        session.close()


def test_all_of_a_namespace_are_in_the_same_era(sessions: list[Attachment]) -> None:
    first = Era(MODEL).now(sessions[0])
    assert len(first) == era.SIZE
    assert Era(MODEL).now(sessions[1]) == first
    assert Era(Namespace.of("other")).now(sessions[1]) != first


def test_who_clears_ends_it_for_all_and_once(sessions: list[Attachment]) -> None:
    one, other = Era(MODEL), Era(MODEL)
    first = one.now(sessions[0])
    one.clear()
    assert other.now(sessions[1]) == first  # the clear was requested and happens with the next call
    second = one.now(sessions[0])
    assert second != first
    assert other.now(sessions[1]) == second
    assert one.now(sessions[0]) == second


def test_a_record_that_is_lost_is_a_new_era(sessions: list[Attachment]) -> None:
    one = Era(MODEL)
    first = one.now(sessions[0])
    sessions[1].cache(one._namespace).remove(era._RECORD)
    assert one.now(sessions[0]) != first


def test_a_record_that_another_is_writing_is_waited_for_by_nobody(
    sessions: list[Attachment],
) -> None:
    one = Era(MODEL)
    cache, writer = sessions[1].cache(one._namespace), MetaClient(sessions[1].client)
    keys = cache.keys(era._RECORD)
    grants = writer.reserve(keys, length=era.SIZE, fingerprint=cache.fingerprint)
    with pytest.raises(CacheError, match="beginning an era"):
        one.now(sessions[0])
    writer.abort(grants)
    assert len(one.now(sessions[0])) == era.SIZE
