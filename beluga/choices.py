# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The words and defaults of settings that the help of commands shows.

They are apart from the modules that implement them, because the help needs neither these nor numpy.
"""

EVICTIONS = ("lru", "s3fifo", "cost")
"""The eviction policies of a server (csrc/index/evict.h)."""

OFFLOADS = ("drop", "wait")
"""What happens to a block that would be evicted before it was offered to the lower tiers."""

ADMISSIONS = ("adaptive", "always", "second-touch", "sketch")
"""The policies by which lower tiers admit blocks (beluga/tiers/admission.py)."""

COHERENCE_MODES = ("hardware", "software")
"""The coherence of a pool's devices."""

LANE_COUNT_MAX = 4096
BLOCK_COUNT_MAX = (1 << 32) - 1
"""Limits of a new pool."""

SILENT_S = 2.0
"""A server of another machine is replaced once its heartbeat has not moved for this many seconds.

A server of this machine whose process lives is replaced after 15 times as long.
"""
