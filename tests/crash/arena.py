# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""One pool, its server and its clients, and what must hold after one of them has died. After every
round: all calls have ended; no session, grant, pin or held space of dead processes is left; `beluga
pool check` with payload is clean; every block that can be fetched is intact; every stored block
that may not be evicted is present; the runtime directory contains only locked files of live
processes.
"""

import time
from pathlib import Path

import numpy as np
from herd import WAIT_S, Member, StuckError
from worker import PERMANENT, Message, is_named, names, serve, use

from beluga.index import check_pool, read_names
from beluga.pool import Pool

MIB = 1 << 20
CLIENTS = 2


class Arena:
    """With ``small``, blocks are evicted all the time; otherwise all of them fit, and none may be
    lost.
    """

    def __init__(self, directory: Path, *, small: bool, coherence: str) -> None:
        self.small = small
        self._paths = [directory / "a", directory / "b"]
        self._pool = Pool.create(
            self._paths,
            device_size=(12 if small else 64) * MIB,
            coherence=coherence,
            sparse=True,
            max_blocks=64 if small else 512,
            lane_count=16,
            slot_count=8,
            bulk_size=4096,
        )
        self.stored: set[int] = set()  # numbers that no client removes
        self.torn_entries = 0  # upper limit of those that the last killed server has left
        self._droppable = 0  # how many of those the present server may have found
        self.server = self.start()
        self.clients = [self.client(slot) for slot in range(CLIENTS)]

    def start(self, **first: object) -> Member:
        """Start a server that is about to take the pool over."""
        self._droppable, self.torn_entries = self.torn_entries, 0
        self.server = Member(serve, self._paths, first)
        if self.server.receive() is None and "arm" not in first:
            raise StuckError(f"a server died of {self.server.ended} while it took over")
        return self.server

    def client(self, slot: int, **first: object) -> Member:
        """Start a client that is about to attach."""
        member = Member(use, self._paths, {"slot": slot, **first})
        if member.receive() is None and "arm" not in first:
            raise StuckError(f"a client died of {member.ended} while it attached")
        return member

    def replace_dead(self) -> None:
        """Replace the processes that died or were stopped."""
        for member in (self.server, *self.clients):
            member.poll()
        if self.server.stopped or self.server.ended is not None:
            self.server.kill()
            self.server = self.start()
        for slot, member in enumerate(self.clients):
            if member.stopped or member.ended is not None:
                member.kill()
                self.clients[slot] = self.client(slot)

    def remember(self, answer: Message) -> None:
        """Record the blocks that a client reported as stored."""
        if not self.small:
            self.stored.update(number for number in answer["stored"] if number < PERMANENT)

    def verify(self) -> int:
        """Check everything that must hold between rounds. Returns how many blocks were fetched, all
        intact.
        """
        for member in self.clients:
            member.request({"ping": 1})  # an idle client does not detect a new server
        self._settle()
        report = check_pool(self._pool, payload=True)
        if report.finding_count:
            raise AssertionError(f"pool check: {'; '.join(report.findings[:5])}")
        there = self.clients[0].request({"audit": 1})["there"]
        if lost := self.stored - set(there):
            raise AssertionError(f"blocks {sorted(lost)} were stored and are lost")
        if len(there) != report.block_count:
            raise AssertionError(
                f"{report.block_count} blocks are committed, but {len(there)} can be fetched"
            )
        self._check_names(report.half)
        return len(there)

    def _check_names(self, half: int) -> None:
        """Check that each name belongs to its block, and that no acknowledged name is lost."""
        records = read_names(self._pool, half)["name"]
        message = set(records["block_hash"].tolist())
        right = names(sorted(message))
        tokens = records["tokens_hash"][np.argsort(records["block_hash"])]
        if not np.array_equal(tokens, right["tokens_hash"]):
            raise AssertionError("a name is not the one that its block was put with")
        if lost := {number for number in self.stored if is_named(number)} - message:
            raise AssertionError(f"the names of blocks {sorted(lost)} were stored and are lost")

    def empty(self) -> None:
        """Remove every block, and check that all stripes are free."""
        self.stored.clear()
        stat = self.clients[0].request({"clear": 1})
        if stat["free_stripe_count"] != stat["stripe_count"] or stat["used_bytes"]:
            raise AssertionError(f"stripes leak: {stat}")

    def close(self) -> None:
        """End all processes in order: they leave no blocks behind."""
        for member in self.clients:
            member.request({"close": 1})
            member.kill()
        self.server.request({"stop": 1})
        self.server.kill()
        self.start()  # a start removes the files of processes that died before they had a lane
        end = time.monotonic() + WAIT_S
        # The files of the running server: its lock, socket, word and doorbell, and its remover's
        # lock.
        while len(files := list(self._pool.runtime_dir.glob("*-" + 16 * "[0-9a-f]"))) > 5:
            if time.monotonic() > end:
                raise AssertionError(f"files of processes that have ended: {files}")
            time.sleep(0.005)
        self.server.request({"stop": 1})
        self.server.kill()
        self._pool.close()

    def kill(self) -> None:
        """Kill all processes, so that the run can continue after a failure."""
        for member in (*self.clients, self.server):
            member.kill()

    def _settle(self) -> None:
        """Wait until the sessions, grants, pins and space of dead processes are released."""
        end = time.monotonic() + WAIT_S
        while True:
            stat = self.server.request({"stat": 1})
            if stat["failure"]:
                raise AssertionError(f"the server stopped: {stat['failure']}")
            wrong = {
                name: stat[name]
                for name in ("grant_count", "pinned_count", "held_bytes", "inherited_count")
                if stat[name]
            }
            # one more: the remover of the server's process
            if stat["live_count"] != len(self.clients) + 1:
                wrong["live_count"] = stat["live_count"]
            if not wrong:
                break
            if time.monotonic() > end:
                raise StuckError(f"after {WAIT_S:.0f} s there is still {wrong}")
            time.sleep(0.001)
        if stat["damaged_count"] > self._droppable:
            raise AssertionError(f"a takeover dropped {stat['damaged_count']} entries")
