# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Where servers of this harness listen: on the loopback address, on a port free just now."""

from __future__ import annotations

import socket

HOST = "127.0.0.1"


def free_port() -> int:
    """A TCP port of the loopback address that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])
