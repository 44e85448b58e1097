# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The routing policies, one file each, and their shared helpers (C: ``csrc/routing/cost.c``).

``registry`` makes a policy by its name on the command line.
"""
