# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""L8: a router that runs, in front of engines that speak OpenAI's API. ``beluga route`` starts it.

It needs the packages of the extra ``router``.
"""

from beluga.route.service import Service, serve
from beluga.route.settings import (
    Address,
    EngineSpec,
    Limits,
    Prefill,
    Settings,
    read_engines,
    read_queues,
    read_workers_file,
)

__all__ = [
    "Address",
    "EngineSpec",
    "Limits",
    "Prefill",
    "Service",
    "Settings",
    "read_engines",
    "read_queues",
    "read_workers_file",
    "serve",
]
