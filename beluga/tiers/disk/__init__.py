# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The disk tier: blocks in one file on a disk, or striped over several disks."""

from beluga.tiers.disk.file import adopt_disk
from beluga.tiers.disk.spread import SpreadTier
from beluga.tiers.disk.tier import DiskTier

__all__ = ["DiskTier", "SpreadTier", "adopt_disk"]
