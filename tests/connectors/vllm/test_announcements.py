# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The announcements of blocks: their contents, their time, and the limit of pending ones."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from vllm_parts import BLOCK_TOKENS, request

from beluga.connectors.vllm import events
from beluga.connectors.vllm.events import Announcements
from beluga.connectors.vllm.steps import StepReport, StoredCounts

TOKENS = list(range(5 * BLOCK_TOKENS))


def announcements(ranks: int = 1) -> Announcements:
    return Announcements(rank_count=lambda: ranks, block_size=BLOCK_TOKENS)


def stored(*digests: bytes) -> StepReport:
    return StepReport(stored={digest: StoredCounts(1, 1) for digest in digests})


def test_a_block_is_announced_with_its_tokens_its_parent_and_its_adapter() -> None:
    announcer = announcements()
    made = request("r", TOKENS, lora=SimpleNamespace(lora_name="a"))
    announcer.ordered(b"digest", made, 2, ("a",))
    announcer.reported(stored(b"digest"))
    (announcement,) = announcer.take()
    assert (announcement.block_hash, announcement.parent_hash) == (
        made.block_hashes[2],
        made.block_hashes[1],
    )
    assert announcement.token_ids == TOKENS[2 * BLOCK_TOKENS : 3 * BLOCK_TOKENS]
    assert (announcement.lora_name, announcement.extra_keys) == ("a", ("a",))
    assert announcer.take() == []


def test_pending_blocks_of_others_do_not_block_a_load() -> None:
    announcer = announcements()
    announcer.ordered(b"mine", request("r", TOKENS), 0, None)
    announcer.reported(stored(b"another's", b"mine"))
    assert len(announcer.take()) == 1


def test_blocks_are_announced_when_the_last_rank_has_stored_them_and_once() -> None:
    announcer = announcements(ranks=2)
    made = request("r", TOKENS)
    for block in (0, 1):
        announcer.ordered(made.block_hashes[block], made, block, None)
    announcer.reported(stored(*made.block_hashes[:2]))
    assert announcer.take() == []
    announcer.reported(stored(made.block_hashes[1]))
    (announcement,) = announcer.take()
    assert announcement.block_hash == made.block_hashes[1]
    announcer.reported(stored(made.block_hashes[1]))
    assert announcer.take() == []


def test_the_oldest_are_dropped_when_too_many_are_pending(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "PENDING_MAX", 3)
    announcer, made = announcements(), request("r", TOKENS)
    for block in range(4):
        announcer.ordered(made.block_hashes[block], made, block, None)
    announcer.reported(stored(*made.block_hashes))
    assert [announcement.block_hash for announcement in announcer.take()] == made.block_hashes[1:4]
