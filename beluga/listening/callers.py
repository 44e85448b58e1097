# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Checks callers: the host name of a request, and whether another site's page sent it.

A page of another site reaches listeners on the loopback address in two ways. It may send a request
whose answer it cannot read, such as a POST that changes something. Or its own host name resolves to
this machine (DNS rebinding); then the browser treats both as one site. The first request has the
other site's Origin, the second one a Host that is not a name of this machine.
"""

from __future__ import annotations

import ipaddress
import re
import socket
from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

_OTHER_SITES = {"cross-site", "same-site"}  # of Sec-Fetch-Site; another port is another origin
ANY_NAME = "*"
_SINGLE_LABEL = re.compile(r"[a-z0-9_-]{1,63}")


def is_loopback(host: str) -> bool:
    """Return whether only this machine can connect to an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def host_of(header: str) -> str:
    """Return the host of a ``Host`` header, without its port and brackets."""
    host, colon, port = header.rpartition(":")
    name = host if colon and port.isdecimal() else header
    return name.removeprefix("[").removesuffix("]").lower()


class KnownHosts:
    """The allowed values of a ``Host`` header: addresses, ``localhost``, this machine's own names,
    the listener's configured name, and the names that an operator allows.

    An address is always allowed: it cannot resolve to anything else.
    """

    def __init__(
        self, listening: str, allowed: Iterable[str] = (), *, single_labels: bool = False
    ) -> None:
        """``*`` among the allowed names allows all. With ``single_labels`` names without a dot are
        allowed, too, such as a container's. No site on the internet has one, but a name with a
        final dot may be a top-level domain.
        """
        machine = socket.gethostname().lower()
        allowed = {name.lower().removesuffix(".") for name in allowed}
        self._any = ANY_NAME in allowed
        self._single_labels = single_labels
        self._names = {"localhost", machine, machine.partition(".")[0], listening.lower(), *allowed}
        self._last: object = None  # the last allowed header: most requests have the same

    def __contains__(self, header: str) -> bool:
        if header == self._last:
            return True
        known = self._allows(host_of(header))
        if known:
            self._last = header
        return known

    def _allows(self, host: str) -> bool:
        name = host.removesuffix(".")
        try:
            ipaddress.ip_address(name)
        except ValueError:
            single = self._single_labels and _SINGLE_LABEL.fullmatch(host) is not None
            return self._any or single or name in self._names or name.endswith(".localhost")
        return True


def from_other_site(headers: Mapping[str, str], allowed: Iterable[str] = ()) -> bool:
    """Return whether a browser sent this request for a page of another origin. ``allowed`` are
    origins such as ``https://chat.example``.

    Programs send no Origin, and browsers send one with each POST.
    """
    origin = headers.get("Origin")
    if origin is None:
        return headers.get("Sec-Fetch-Site") in _OTHER_SITES
    if origin in allowed:
        return False
    try:
        return urlsplit(origin).netloc.lower() != headers.get("Host", "").lower()
    except ValueError:
        return True
