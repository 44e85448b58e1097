# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The call by which a pool's server tells the counters of the tiers below its pool
(``beluga/tiers/counters.py`` answers it).
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from beluga.errors import BadReplyError, NoMethodError
from beluga.rpc import METHOD_COUNTERS

if TYPE_CHECKING:
    from beluga.rpc import Client

COUNTERS_METHOD = METHOD_COUNTERS
"""The call that answers with the counters. :meth:`beluga.rpc.Server.handle` names the range."""


def ask_counters(client: Client) -> dict[str, object] | None:
    """Ask a pool's server for the counters of its lower tiers; None if it has no such tiers.

    Raises :class:`~beluga.errors.RpcError`, also if the answer is not whole.
    """
    try:
        text = client.call(COUNTERS_METHOD)
    except NoMethodError:  # a server of an earlier version
        return None
    if not text:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise BadReplyError("the counters of the lower tiers are not JSON") from error
    if not isinstance(found, dict):
        raise BadReplyError("the counters of the lower tiers are no dictionary")
    return found
