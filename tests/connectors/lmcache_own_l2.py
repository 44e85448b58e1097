# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""A pytest plugin for LMCache's own tests: it replaces LMCache's mock of a second level by our
adapter over the pool BELUGA_TEST_POOL, with a separate tenant secret for each.
"""

from __future__ import annotations

import os
import uuid
from typing import Any

from lmcache.v1.distributed.l2_adapters import mock_l2_adapter

from beluga.connectors.lmcache import BelugaL2Adapter


class MockL2Adapter(BelugaL2Adapter):
    """Our adapter, with the mock's constructor and its views for tests."""

    def __init__(self, config: Any) -> None:
        super().__init__(
            {
                "pool": os.environ["BELUGA_TEST_POOL"],
                "timeout_ms": 20_000,
                "identity": "a test",
                "salt": uuid.uuid4().hex,
            }
        )
        self._max_capacity_bytes = int(config.max_size_gb * (1 << 30))

    def debug_has_key(self, key: Any) -> bool:
        return key in self._connection.attempt("asking", lambda a: self._existing(a, [key]))

    def debug_get_stored_object_count(self) -> int:
        keys = list(self._ledger)
        return len(self._connection.attempt("asking", lambda a: self._existing(a, keys)))

    def debug_get_locked_key_count(self) -> int:
        return len(self._pins)


mock_l2_adapter.MockL2Adapter = MockL2Adapter
