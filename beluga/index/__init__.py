# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The block index (``csrc/index/index.c``): where each block is, and which sessions write or read
it.

:class:`IndexServer` is a server with the index; :class:`IndexClient` makes its calls in a session.
Most programs need :class:`beluga.kvcache.KVCache` instead.
"""

from beluga.index.check import CheckReport, check_devices, check_pool
from beluga.index.client import (
    BLOCK_RECORD,
    BlockState,
    Grant,
    IndexClient,
    Lookup,
    Pins,
    RemovalReason,
)
from beluga.index.counters import COUNTERS_METHOD, fetch_counters
from beluga.index.repair import repair_pool
from beluga.index.server import EVICTIONS, REFUSALS, IndexServer
from beluga.index.stat import HintStat, IndexStat, LowerStat, Tenant
from beluga.index.tables import (
    CHANGE,
    COMMITTED,
    ENTRY,
    EPOCH_SHIFT,
    FREE,
    NAME,
    NAME_PARENT,
    REMOVED,
    STORED,
    chain_names,
    names_at,
    read_entries,
    read_names,
)
from beluga.index.views import (
    OTHERS,
    TENANT,
    Field,
    Sessions,
    SessionView,
    TenantShare,
    check_shares,
    digest_of,
    fetch_sessions,
    fingerprint_of,
)
from beluga.index.work import (
    LOWER_NOTE,
    LOWER_RECORD,
    LowerWork,
    Removal,
    TaskClient,
    TaskRecord,
    Work,
)

__all__ = [
    "BLOCK_RECORD",
    "CHANGE",
    "COMMITTED",
    "COUNTERS_METHOD",
    "ENTRY",
    "EPOCH_SHIFT",
    "EVICTIONS",
    "FREE",
    "LOWER_NOTE",
    "LOWER_RECORD",
    "NAME",
    "NAME_PARENT",
    "OTHERS",
    "REFUSALS",
    "REMOVED",
    "STORED",
    "TENANT",
    "BlockState",
    "CheckReport",
    "Field",
    "Grant",
    "HintStat",
    "IndexClient",
    "IndexServer",
    "IndexStat",
    "Lookup",
    "LowerStat",
    "LowerWork",
    "Pins",
    "Removal",
    "RemovalReason",
    "SessionView",
    "Sessions",
    "TaskClient",
    "TaskRecord",
    "Tenant",
    "TenantShare",
    "Work",
    "chain_names",
    "check_devices",
    "check_pool",
    "check_shares",
    "digest_of",
    "fetch_counters",
    "fetch_sessions",
    "fingerprint_of",
    "names_at",
    "read_entries",
    "read_names",
    "repair_pool",
]
