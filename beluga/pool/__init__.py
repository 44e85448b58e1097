# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool (``csrc/pool/``): its devices are specified, checked, formatted and mapped. Blocks are a
layer above.
"""

from beluga.choices import BLOCK_COUNT_MAX, LANE_COUNT_MAX
from beluga.pool.default import (
    default_specs,
    emulated_paths,
    refuse_missing,
    remove_default,
    stored_specs,
    storing_default,
)
from beluga.pool.devdax import DaxNode, dax_nodes
from beluga.pool.device import examine
from beluga.pool.layout import geometry_for
from beluga.pool.missing import runtime_dir_of_missing
from beluga.pool.pool import DeviceView, Pool
from beluga.pool.pool_files import PoolFile, find_pools
from beluga.pool.room import filesystem, limits, room
from beluga.pool.runtime import refuse_in_use
from beluga.pool.scratch import scratch_folder
from beluga.pool.spec import STRIPE_SIZE, DeviceSpec, SpecLike, parse_size, show_size
from beluga.pool.superblock import COHERENCE_MODES, Geometry
from beluga.pool.survey import survey

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
