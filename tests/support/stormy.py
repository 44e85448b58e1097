# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Software queues of a DSA with injected faults: ``csrc/dsa/faults.h``, in the build ``_sim``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from beluga._sim import ffi as sim_ffi
from beluga._sim import lib as sim_lib

from beluga._ffi import ffi
from beluga.transfer.dsa import Portal, limits_of


def stormy_queue(limits: Any, faults: Mapping[str, int]) -> Any:
    """Return a ``bl_dsa_queue *`` of ``_core``, for limits of ``_core``."""
    own = sim_ffi.cast("bl_dsa_limits *", int(ffi.cast("uintptr_t", limits)))
    out = sim_ffi.new("bl_dsa_queue **")
    storm = sim_ffi.new("bl_dsa_faults *", dict(faults))
    assert sim_lib.bl_dsa_faults_open(own, storm, out) == 0
    return ffi.cast("bl_dsa_queue *", int(sim_ffi.cast("uintptr_t", out[0])))


def stormy_portal(faults: Mapping[str, int]) -> Portal:
    """Like :func:`~beluga.transfer.dsa.open_software`, with these faults."""
    limits = limits_of(size_max=2 << 20, batch_max=32, depth=32)
    return Portal(stormy_queue(limits, faults), limits, is_device=False, text="software queue")
