# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The counters of the block index, which ``csrc/api/figures.h`` declares: bytes, and counts since
takeover.
"""

from __future__ import annotations

from beluga.figures import Counters, counters


@counters("bl_index_stat")
class IndexStat(Counters):
    """The block table and its space."""


@counters("bl_tenant")
class Tenant(Counters):
    """The committed blocks of one namespace and one length. Length 0 sums up the tenants that did
    not fit into the table.
    """


@counters("bl_hint_stat")
class HintStat(Counters):
    """Hints of blocks."""


@counters("bl_lower_stat")
class LowerStat(Counters):
    """The work of lower tiers."""
