# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The endpoint's listen addresses."""

from __future__ import annotations

import ipaddress

from beluga.conventions import ADMIN_PORT
from beluga.errors import AdminError

LOOPBACK = "127.0.0.1"


def read_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``[HOST:]PORT``; an IPv6 address stands in brackets.

    Raises AdminError.
    """
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and port.isascii()) or int(port) > 65535:
        raise AdminError(f"{text!r} has no port; use [HOST:]PORT, such as {ADMIN_PORT}")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def is_ipv6(host: str) -> bool:
    """Return whether a host is a literal IPv6 address."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def url_host(host: str) -> str:
    """Return a host in the form of a URL."""
    return f"[{host}]" if is_ipv6(host) else host
