# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool: its devices are specified, checked, formatted and mapped. Blocks are a layer above."""

from beluga.pool.default import (
    default_specs,
    emulated_paths,
    forget,
    refuse_gone,
    remembered,
    remembering,
)
from beluga.pool.devdax import DaxNode, dax_nodes
from beluga.pool.device import examine
from beluga.pool.found import FoundFile, find_pools
from beluga.pool.gone import runtime_dir_of_gone
from beluga.pool.layout import BLOCK_COUNT_MAX, LANE_COUNT_MAX, geometry_for
from beluga.pool.pool import DeviceView, Pool
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
    "FoundFile",
    "Geometry",
    "Pool",
    "SpecLike",
    "dax_nodes",
    "default_specs",
    "emulated_paths",
    "examine",
    "filesystem",
    "find_pools",
    "forget",
    "geometry_for",
    "limits",
    "parse_size",
    "refuse_gone",
    "refuse_in_use",
    "remembered",
    "remembering",
    "room",
    "runtime_dir_of_gone",
    "scratch_folder",
    "show_size",
    "survey",
]
