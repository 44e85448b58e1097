# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""SGLang's HiCache storage (L3) over the pool.

``pages``    host pages by key, without an import of SGLang
``pools``    the pools of hybrid models in addition to the KV
``weights``  the version of SGLang's weights, and its changes
``backend``  the HiCacheStorage that SGLang loads by name

SGLang is not imported before the backend is accessed.
"""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    if name == "BelugaHiCache":
        from beluga.connectors.sglang.backend import BelugaHiCache

        return BelugaHiCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
