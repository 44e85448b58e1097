# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector's settings in ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses

from beluga.connectors.settings import PoolSettings
from beluga.errors import ConnectorError

LOADS = ("auto", "sync", "async")
ROLES = ("kv_both", "kv_producer", "kv_consumer")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(PoolSettings):
    """The pool's settings, and those of vLLM's connector.

    ``load`` "sync" loads before the forward that needs the blocks, which gives the fastest first
    token; "async" loads concurrently with forwards of other requests; "auto" decides per request,
    so that no forward waits for more than a few milliseconds. ``save`` is false for an engine that
    only reads. ``save_queue`` is the largest number of blocks that wait to be saved; further ones
    are skipped.

    ``prefill_b_ms`` and ``prefill_c_ms`` are the prefill time per token, and per pair of tokens
    (:class:`beluga.tiers.BreakEven`). With them, blocks below the pool are fetched only if they
    come sooner than they are computed; without them, they always are.

    ``announce`` is false for an engine that does not announce the pool's blocks in its own KV
    events. ``events_replay`` is the endpoint of ``beluga serve --events-replay`` to which token ids
    are sent, for llm-d; ``events_token`` is the file of ``--events-token``.
    """

    load: str = "auto"
    save: bool = True
    save_queue: int = 4096
    kv_role: str = "kv_both"  # vLLM's own setting, which the connector fills in
    prefill_b_ms: float = 0.0
    prefill_c_ms: float = 0.0
    announce: bool = True
    events_replay: str = ""
    events_token: str = ""

    @property
    def loads(self) -> bool:
        """Whether blocks are loaded: a producer only stores."""
        return self.kv_role != "kv_producer"

    @property
    def saves(self) -> bool:
        """Whether blocks are saved: a consumer only loads."""
        return self.save and self.kv_role != "kv_consumer"

    def __post_init__(self) -> None:
        super(VllmSettings, self).__post_init__()
        if self.load not in LOADS:
            raise ConnectorError(
                f"beluga's setting load is {self.load!r}; it must be {', '.join(LOADS)}"
            )
        if self.kv_role not in ROLES:
            raise ConnectorError(f"kv_role is {self.kv_role!r}; it must be {', '.join(ROLES)}")
        if self.save_queue <= 0:
            raise ConnectorError("beluga's setting save_queue must be greater than 0")
        if self.prefill_b_ms < 0 or self.prefill_c_ms < 0:
            raise ConnectorError(
                "beluga's settings prefill_b_ms and prefill_c_ms must be at least 0"
            )
