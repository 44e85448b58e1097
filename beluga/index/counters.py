# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The call for the counters of a pool's lower tiers (served by ``beluga/tiers/counters.py``)."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from beluga.errors import BadReplyError, NoMethodError
from beluga.rpc import METHOD_COUNTERS

if TYPE_CHECKING:
    from beluga.rpc import Client

COUNTERS_METHOD = METHOD_COUNTERS
"""The number of this call. It is in the range of :meth:`beluga.rpc.Server.handle`."""


def fetch_counters(client: Client) -> dict[str, object] | None:
    """Return the counters of the server's lower tiers, or None if it has no such tiers.

    Raises :class:`~beluga.errors.RpcError`, also for an incomplete reply.
    """
    try:
        text = client.call(COUNTERS_METHOD)
    except NoMethodError:  # a server of an earlier version
        return None
    if not text:
        return None
    try:
        counters = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadReplyError("the counters of the lower tiers are not JSON") from error
    if not isinstance(counters, dict):
        raise BadReplyError("the counters of the lower tiers are not a dictionary")
    return counters
