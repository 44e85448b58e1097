# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The connector's settings in ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses

from beluga.connectors.settings import PoolSettings
from beluga.errors import ConnectorError

LOADS = ("sync", "async")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class VllmSettings(PoolSettings):
    """The pool's settings, and those of vLLM's connector.

    ``load`` "sync" loads before the forward that needs the blocks, which gives the fastest first
    token; "async" loads beside the forwards of other requests. ``save`` is false for an engine that
    only reads. ``save_queue`` is how many blocks may wait to be saved; more are skipped.
    """

    load: str = "sync"
    save: bool = True
    save_queue: int = 4096

    def __post_init__(self) -> None:
        super(VllmSettings, self).__post_init__()
        if self.load not in LOADS:
            raise ConnectorError(f"beluga's setting load is {self.load!r}; it must be sync, async")
        if self.save_queue <= 0:
            raise ConnectorError("beluga's setting save_queue must be greater than 0")
