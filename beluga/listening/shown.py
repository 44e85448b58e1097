# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Addresses without secrets, for logs and errors."""

from __future__ import annotations

import re

# The start of an address. A password may contain a comma, too.
_START = re.compile(r"(?:(?<=[,=\s])|^)(?=[a-z][a-z0-9+.-]*://)", re.IGNORECASE)
_USER = re.compile(r"[^\s=,]*@")  # of an address without a scheme
_OPTIONS = re.compile(r"[?#]")


def shown_url(text: str) -> str:
    """Return a text with its addresses without users, passwords and options. Examples:
    ``nats://me:secret@host:4222`` is shown as ``nats://host:4222``, and ``m=tls://token@a,tls://b``
    as ``m=tls://a,tls://b``.
    """
    head, *addresses = _START.split(text)
    if not addresses:
        return _USER.sub("", head)
    return head + "".join(map(_shown, addresses))


def _shown(address: str) -> str:
    """Return an address without its secrets. A password may have any character, so all before the
    last @ is left out; if that follows a ? or #, the rest may be of a password or an option.
    """
    scheme, mark, rest = address.partition("://")
    options = _OPTIONS.search(rest)
    user = rest.rfind("@")
    if options is None:
        return scheme + mark + rest[user + 1 :]
    end = "," if rest.endswith(",") else ""  # another address follows
    if user > options.start():
        return f"{scheme}{mark}...{end}"
    return scheme + mark + rest[user + 1 : options.start()] + end
