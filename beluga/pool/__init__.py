# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool (``csrc/pool/``): its devices are specified, checked, formatted and mapped. Blocks are a
layer above.
"""

from beluga.choices import BLOCK_COUNT_MAX, LANE_COUNT_MAX
from beluga.pool.create import filesystem, limits, room
from beluga.pool.device import (
    STRIPE_SIZE,
    DaxNode,
    DeviceSpec,
    SpecLike,
    dax_nodes,
    examine,
    parse_size,
    show_size,
)
from beluga.pool.layout import COHERENCE_MODES, Geometry, geometry_for
from beluga.pool.pool import DeviceView, Pool
from beluga.pool.runtime import (
    default_specs,
    emulated_paths,
    refuse_in_use,
    refuse_missing,
    remove_default,
    runtime_dir_of_missing,
    stored_specs,
    storing_default,
)
from beluga.pool.survey import PoolFile, find_pools, scratch_folder, survey

__all__ = [
    "BLOCK_COUNT_MAX",
    "COHERENCE_MODES",
    "LANE_COUNT_MAX",
    "STRIPE_SIZE",
    "DaxNode",
    "DeviceSpec",
    "DeviceView",
    "Geometry",
    "Pool",
    "PoolFile",
    "SpecLike",
    "dax_nodes",
    "default_specs",
    "emulated_paths",
    "examine",
    "filesystem",
    "find_pools",
    "geometry_for",
    "limits",
    "parse_size",
    "refuse_in_use",
    "refuse_missing",
    "remove_default",
    "room",
    "runtime_dir_of_missing",
    "scratch_folder",
    "show_size",
    "stored_specs",
    "storing_default",
    "survey",
]
