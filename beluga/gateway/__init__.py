# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The gateway: the router as a service in front of engines with OpenAI's API. ``beluga gateway``
starts it.

KV events, prefill queues on NATS and uvloop are packages of the extra ``router``.
"""

from beluga.gateway.service import Service, run, serve
from beluga.gateway.settings import (
    Address,
    Callers,
    EngineSpec,
    Limits,
    Prefill,
    Settings,
    read_engines,
    read_queues,
    read_thresholds,
)

__all__ = [
    "Address",
    "Callers",
    "EngineSpec",
    "Limits",
    "Prefill",
    "Service",
    "Settings",
    "read_engines",
    "read_queues",
    "read_thresholds",
    "run",
    "serve",
]
