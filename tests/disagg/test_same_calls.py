# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The queues are interchangeable: their calls have the parameters and defaults of the interface."""

from __future__ import annotations

import inspect

import pytest

from beluga.disagg.pool_queue import PoolClaim, PoolQueue, PoolTicket
from beluga.disagg.queue import Claim, TaskQueue, Ticket

PAIRS: list[tuple[type, type]] = [(TaskQueue, PoolQueue), (Ticket, PoolTicket), (Claim, PoolClaim)]
try:
    from beluga.disagg.nats_queue import NatsClaim, NatsQueue, NatsTicket
except ImportError:
    pass
else:
    PAIRS += [(TaskQueue, NatsQueue), (Ticket, NatsTicket), (Claim, NatsClaim)]


def calls(kind: type) -> dict[str, list[tuple[str, object]]]:
    """Return the parameters and their defaults of each public call."""
    return {
        name: [(one.name, one.default) for one in inspect.signature(call).parameters.values()]
        for name, call in vars(kind).items()
        if not name.startswith("_") and inspect.iscoroutinefunction(call)
    }


@pytest.mark.parametrize(("interface", "kind"), PAIRS)
def test_queues_implement_the_interface(interface: type, kind: type) -> None:
    promised, made = calls(interface), calls(kind)
    assert promised
    assert {name: made[name] for name in promised} == promised
