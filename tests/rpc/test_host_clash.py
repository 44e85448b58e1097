# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Two machines are configured with one host number: the second one is refused."""

from __future__ import annotations

import pytest
from other_machine import OtherMachine
from support.forge import LINE, read

from beluga._ffi import lib
from beluga.errors import BadValueError, HostClashError
from beluga.pool import Pool
from beluga.rpc import Client, Server

# In a pool of hardware coherence a second machine is refused whatever its number is
# (test_second_host.py).
pytestmark = pytest.mark.parametrize("coherence", ["software"], indirect=True)


def request_line(pool: Pool) -> bytes:
    """Return host 0's last lobby request."""
    return bytes(read(pool, lib.BL_LOBBY_OFFSET, LINE))


def test_a_client_is_refused_while_another_machine_has_its_number(pool: Pool) -> None:
    with Server(pool) as server:
        assert OtherMachine(pool, host=0, boot_id=(1, 2)).attach(nonce=77) == 0
        before = request_line(pool)
        with pytest.raises(HostClashError, match="--host N"):
            Client(pool, timeout_s=0.2)
        assert request_line(pool) == before  # only the other machine may write this line
        assert server.stat().attach_count == 1
        with Client(pool, host=1) as client:
            client.ping()


def test_another_machine_is_refused_while_a_client_has_its_number(pool: Pool) -> None:
    with Server(pool), Client(pool, host=3) as client:
        other = OtherMachine(pool, host=3, boot_id=(1, 2))
        assert other.attach(nonce=77) == -lib.BL_ERROR_HOST_CLASH
        client.ping()
        assert client.stat().reattach_count == 0


def test_a_number_is_free_again_when_its_machine_has_detached(pool: Pool) -> None:
    with Server(pool):
        with Client(pool):
            pass
        assert OtherMachine(pool, host=0, boot_id=(1, 2)).attach(nonce=77) == 0


@pytest.mark.parametrize("host", [64, 1 << 31])
def test_a_host_number_out_of_range_is_refused(pool: Pool, host: int) -> None:
    with Server(pool), pytest.raises(BadValueError, match="from 0 to 63"):
        Client(pool, host=host)
