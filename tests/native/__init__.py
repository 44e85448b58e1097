# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The C that only tests compile. ``from native._sim import ffi, lib`` builds it where necessary."""

from native import build_sim

build_sim.update()
