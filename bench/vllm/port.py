# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The address of this harness's servers: the loopback address, with a free port."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """Return a free TCP port of the loopback address."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
