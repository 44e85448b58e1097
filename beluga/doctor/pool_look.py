# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool under examination, if there is one: its devices, and its server."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import cached_property

from beluga.errors import BelugaError, NoDefaultPoolError, NoServerError
from beluga.pool import DeviceSpec, DeviceView, Pool, SpecLike, default_specs, stored_specs
from beluga.rpc import Client

_WAIT_S = 2.0


@dataclass(frozen=True, slots=True)
class PoolInspection:
    """The state of an open pool. ``failure`` is why there is no session with its server."""

    devices: tuple[DeviceView, ...]
    one_host: bool
    lane_count: int
    epoch: int | None  # of the server that replied
    failure: BelugaError | OSError | None


class PoolLook:
    """A pool by the paths of its devices, which may be wrong. It is opened on first use."""

    def __init__(
        self,
        paths: tuple[SpecLike, ...] = (),
        *,
        host: int | None = None,
        failure: BelugaError | None = None,
        fix: str = "",
    ) -> None:
        self.paths = tuple(map(str, paths))
        self.host = host
        self.failure = failure  # why there is no default pool
        self.fix = fix  # the command that fixes that

    @classmethod
    def named(cls, paths: list[str] | None, host: int | None) -> PoolLook:
        """Return the pool of these paths, or the default pool, if there is one."""
        if paths:
            return cls(tuple(paths), host=host)
        try:
            known = stored_specs()
        except BelugaError as error:  # the stored default pool is damaged
            return cls(host=host, failure=error, fix="beluga umount")
        try:
            return cls(tuple(default_specs()), host=host)
        except NoDefaultPoolError as error:
            if not known:
                return cls(host=host)
            again = " ".join(shlex.quote(str(spec)) for spec in known)
            return cls(host=host, failure=error, fix=f"beluga mount --create {again}")
        except BelugaError as error:
            return cls(host=host, failure=error, fix="unset BELUGA_POOL")

    @property
    def options(self) -> str:
        """The pool's devices as options of a command."""
        return " ".join(f"--pool {shlex.quote(path)}" for path in self.paths)

    @property
    def operands(self) -> str:
        """The pool's devices as operands of a command."""
        return " ".join(map(shlex.quote, self.paths))

    @cached_property
    def specs(self) -> list[DeviceSpec]:
        """The devices, without invalid specifications."""
        found = []
        for path in self.paths:
            try:
                found.append(DeviceSpec.parse(path))
            except BelugaError:
                continue
        return found

    @cached_property
    def facts(self) -> PoolInspection | BelugaError | OSError:
        """The pool's state, or why it cannot be opened. A session is opened briefly."""
        try:
            with Pool.open(self.paths) as pool:
                epoch, failure = _attach(pool, self.host)
                lane_count = pool.geometry.lane_count
                return PoolInspection(pool.devices, pool.one_host, lane_count, epoch, failure)
        except (BelugaError, OSError) as error:
            return error


def _attach(pool: Pool, host: int | None) -> tuple[int | None, BelugaError | OSError | None]:
    """Attach to the pool's server and detach."""
    if pool.one_host and not pool.has_runtime_dir:  # A session would create it, for this user.
        return None, NoServerError("no process of this host has used the pool yet")
    try:
        with Client(pool, host=host, timeout_s=_WAIT_S) as client:
            return client.stat().epoch, None
    except (BelugaError, OSError) as error:
        return None, error
