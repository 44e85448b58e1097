# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Replay of request traces through a new pool, with a check of every fetched byte."""

from beluga.replay.process import ReplayOptions
from beluga.replay.run import Result, replay
from beluga.replay.trace import (
    DEFAULT_BLOCK_TOKENS,
    Conversations,
    TraceRequest,
    default_requests,
    ideal_hit_rate,
    make_workload,
    read_trace,
)

__all__ = [
    "DEFAULT_BLOCK_TOKENS",
    "Conversations",
    "ReplayOptions",
    "Result",
    "TraceRequest",
    "default_requests",
    "ideal_hit_rate",
    "make_workload",
    "read_trace",
    "replay",
]
