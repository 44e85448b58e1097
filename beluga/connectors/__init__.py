# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Connectors of inference engines to the pool. Only an engine's own connector imports its package.

* ``connection``: a session with the pool that reconnects; every failure is a miss.
* ``records``: small records in the pool, and how a cache that several processes share is cleared.
* ``releases``: the supported releases of engines.
* ``settings``: the pool's settings in an engine's own configuration.
* ``vllm``: vLLM's KV connector; ``lmcache``: LMCache's storage plugins; ``sglang``: SGLang's
  HiCache storage backend.
"""

from beluga.connectors.releases import RELEASES, Releases

__all__ = ["RELEASES", "Releases"]
