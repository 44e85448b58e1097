# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A queue of a DSA in software, with injected faults if a test wants them
(``tests/native/dsa_soft.h``).

It executes the same descriptors as a device on a thread of this process, which ends with its
process, like a device's work for a process.
"""

from collections.abc import Mapping
from typing import Any

from native._sim import ffi as sim_ffi
from native._sim import lib as sim_lib

from beluga import _core
from beluga._ffi import ffi
from beluga.pool import Pool
from beluga.transfer import DsaEngine
from beluga.transfer.dsa import Portal, limits_of

_NO_FAULTS: Mapping[str, int] = {}


def soft_queue(
    limits: Any,
    faults: Mapping[str, int] = _NO_FAULTS,
    *,
    pool: Any = ffi.NULL,
    core: Any = _core,
) -> Any:
    """Return a ``bl_dsa_queue *`` of ``core``, a build of the C core with ``ffi`` and ``lib``, for
    limits of it. A failing device of ``pool``, a ``bl_pool *``, is a page fault.
    """

    def of(kind: str, pointer: Any) -> Any:
        return sim_ffi.cast(kind, int(core.ffi.cast("uintptr_t", pointer)))

    def function(name: str) -> Any:
        return of("void *", core.ffi.addressof(core.lib, name))

    executor = sim_ffi.new("bl_dsa_executor *")
    executor.pool = of("bl_pool *", pool)
    executor.refusal = sim_ffi.cast(sim_ffi.typeof(executor.refusal), function("bl_dsa_refusal"))
    executor.execute = sim_ffi.cast(sim_ffi.typeof(executor.execute), function("bl_dsa_execute"))
    out = sim_ffi.new("bl_dsa_queue **")
    storm = sim_ffi.new("bl_dsa_faults *", dict(faults))
    code = sim_lib.bl_dsa_soft_open(executor, of("bl_dsa_limits *", limits), storm, out)
    assert code == 0
    return core.ffi.cast("bl_dsa_queue *", int(sim_ffi.cast("uintptr_t", out[0])))


def soft_portal(pool: Pool | None = None, faults: Mapping[str, int] = _NO_FAULTS) -> Portal:
    """Open such a queue as :func:`~beluga.transfer.dsa.open_device` opens a
    device's. Without ``pool`` a failing device of it ends the process.
    """
    limits = limits_of(size_max=2 << 20, batch_max=32, depth=32)
    if pool is None:
        queue = soft_queue(limits, faults)
    else:
        with pool.using() as handle:
            queue = soft_queue(limits, faults, pool=handle)
    return Portal(queue, limits, text="software queue")


def soft_engine(pool: Pool, **options: Any) -> DsaEngine:
    """Open an engine on such a queue."""
    return DsaEngine(pool, soft_portal(pool), **options)
