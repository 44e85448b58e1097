# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Addresses that the endpoint listens on, and names of this machine that a browser may use."""

from __future__ import annotations

import ipaddress
import socket

from beluga.errors import AdminError

LOOPBACK = "127.0.0.1"


def read_address(text: str) -> tuple[str, int]:
    """Return the host and the port of ``[HOST:]PORT``; an IPv6 address stands in brackets.

    Raises AdminError.
    """
    host, _, port = text.rpartition(":")
    if not (port.isdecimal() and port.isascii()) or int(port) > 65535:
        raise AdminError(f"{text!r} names no port; give [HOST:]PORT, such as 9466")
    return host.removeprefix("[").removesuffix("]") or LOOPBACK, int(port)


def is_ipv6(host: str) -> bool:
    """Return whether a host is a literal IPv6 address."""
    try:
        return ipaddress.ip_address(host).version == 6
    except ValueError:
        return False


def url_host(host: str) -> str:
    """Return a host as it stands in a URL."""
    return f"[{host}]" if is_ipv6(host) else host


class KnownHosts:
    """The hosts that a ``Host`` header may name: addresses, ``localhost``, this machine's own
    names, and the name that the endpoint was told to listen on.

    A page of another site can let its own name resolve to this machine's address (DNS rebinding).
    Then the browser sends that name, which is none of these.
    """

    def __init__(self, listening: str) -> None:
        machine = socket.gethostname().lower()
        self._names = {"localhost", machine, machine.partition(".")[0], listening.lower()}

    def __contains__(self, header: str) -> bool:
        host = header.rpartition(":")[0] if header.rpartition(":")[2].isdecimal() else header
        host = host.removeprefix("[").removesuffix("]").lower().removesuffix(".")
        try:
            ipaddress.ip_address(host)
        except ValueError:
            return host in self._names
        return True
