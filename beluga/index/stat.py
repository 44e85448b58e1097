# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The counters of the block index."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from beluga._ffi import core


@dataclasses.dataclass(frozen=True, slots=True)
class IndexStat:
    """The fields of ``bl_index_stat`` (``csrc/format/pool_format.h``): bytes, and counts since
    takeover.
    """

    block_count: int
    block_count_max: int
    block_bytes: int
    grant_count: int
    pinned_count: int
    lookup_count: int
    hit_count: int
    commit_count: int
    abort_count: int
    evict_count: int
    remove_count: int
    refuse_count: int
    damaged_count: int
    stripe_count: int
    free_stripe_count: int
    extent_count: int
    free_run_bytes: int
    used_bytes: int
    held_bytes: int
    data_bytes: int
    retired_stripe_count: int
    table_evict_count: int

    @classmethod
    def of(cls, struct: core.bl_index_stat) -> IndexStat:
        """Convert a cffi ``bl_index_stat *``."""
        return cls(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, slots=True)
class Tenant:
    """The fields of ``bl_tenant`` (``csrc/api/index.h``): the committed blocks of one namespace and
    one length. Length 0 sums up the tenants that did not fit into the table.
    """

    fingerprint: int
    length: int
    block_count: int
    commit_count: int
    hit_count: int
    evict_count: int

    @classmethod
    def of(cls, struct: core.bl_tenant) -> Tenant:
        """Convert a cffi ``bl_tenant``."""
        return cls(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(cls)})


@dataclasses.dataclass(frozen=True, slots=True)
class HintStat:
    """The fields of ``bl_hint_stat`` (``csrc/api/index.h``): hints of blocks, since takeover."""

    hint_count: int
    favored_bytes: int
    given_count: int
    absent_count: int
    refuse_count: int
    expire_count: int

    @classmethod
    def of(cls, struct: core.bl_hint_stat) -> HintStat:
        """Convert a cffi ``bl_hint_stat *``."""
        return cls(**{field.name: getattr(struct, field.name) for field in dataclasses.fields(cls)})
