# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Addresses without secrets, for logs and errors."""

from __future__ import annotations

import re

_SECRET = re.compile(r"(?<=://)[^?#]*@")  # a password may have a slash, too
_BETWEEN = re.compile(r",(?=[a-z]+://)")  # a password may contain a comma, too
_OPTIONS = re.compile(r"[?#].*")


def shown_url(url: str) -> str:
    """Return an address, or several with commas between them, without users, passwords and options.
    Example: ``nats://me:secret@host:4222`` is shown as ``nats://host:4222``.
    """
    return ",".join(_OPTIONS.sub("", _SECRET.sub("", one)) for one in _BETWEEN.split(url))
