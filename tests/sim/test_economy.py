# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The economy report finds needless flushes and fences, and does not list needed ones."""

from __future__ import annotations

from economy import thrift
from simulator import play, site


def test_a_poll_is_redundant_and_a_publication_is_not() -> None:
    found = {(t.site.function, t.site.verb, t.site.index): t for t in thrift(5, ("lane",))}
    polled = found["bl_round_refetch", "invalidate", 1]
    sent = found["bl_bulk_send", "fence_store", 0]
    assert 0 < polled.idle <= polled.done
    assert polled.idle > polled.done // 2
    assert sent.done > 0
    assert sent.idle == 0


def test_a_fence_after_already_fenced_writes_is_redundant() -> None:
    run = play("store_buffering", 3)
    number = site("bl_litmus_store_load", "invalidate")
    assert run.hits[number] > 0
    assert run.idle[number] > 0  # a line that is examined for the first time is not cached
    assert run.idle[site("bl_litmus_store_load", "fence_store")] == 0
