# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The ports and paths that units, manifests, monitoring, documents and defaults share.

``tests/deploy/test_conventions.py`` compares every file that has one of them.
"""

from __future__ import annotations

from pathlib import Path

ADMIN_PORT = 9466
"""The server's admin port: metrics, health and the page. A second server of a host has the next."""

STANDBY_ADMIN_PORT = ADMIN_PORT + 1

GATEWAY_PORT = 8080
GATEWAY_ADMIN_PORT = 8081

RUNTIME_ROOT = Path("/run/beluga")
"""The runtime directories of all pools, if the processes of a host belong to several users."""

EMULATED_ROOT = Path("/dev/shm/beluga")  # noqa: S108  its name only; units and the chart make it
"""The files of an emulated pool that a group shares. A user's own default pool lies beside it, in
``/dev/shm/beluga-UID``.
"""

SETTINGS = Path("/etc/beluga")
"""The machine's settings: ``beluga.toml``, and ``beluga.env`` of the units."""

STATE = Path("/var/lib/beluga")
"""What units keep: measurements, a mounted pool, disk tiers."""

EVENTS_USER = b"beluga"
"""The user of ZMQ's PLAIN mechanism; the password is the token of ``--events-token``."""
