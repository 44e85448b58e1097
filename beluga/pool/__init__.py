# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The pool: its devices are named, checked, formatted and mapped. Nothing here knows about
blocks.
"""

from beluga.pool.default import default_specs, emulated_paths, forget, remembered, remembering
from beluga.pool.layout import geometry_for
from beluga.pool.pool import DeviceView, Pool
from beluga.pool.room import filesystem, room
from beluga.pool.scratch import scratch_folder
from beluga.pool.spec import STRIPE_SIZE, DeviceSpec, SpecLike, parse_size, show_size
from beluga.pool.superblock import COHERENCE_MODES, Geometry
from beluga.pool.survey import survey

__all__ = [
    "COHERENCE_MODES",
    "STRIPE_SIZE",
    "DeviceSpec",
    "DeviceView",
    "Geometry",
    "Pool",
    "SpecLike",
    "default_specs",
    "emulated_paths",
    "filesystem",
    "forget",
    "geometry_for",
    "parse_size",
    "remembered",
    "remembering",
    "room",
    "scratch_folder",
    "show_size",
    "survey",
]
