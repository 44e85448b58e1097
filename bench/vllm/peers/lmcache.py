# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache in its multiprocess mode: a server, and engines that share its memory.

Its in-process connector has no CPU backend. Its chunk is vLLM's block, so that it can find as much
of a prompt as our connector.
"""

from __future__ import annotations

import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from beluga.child import command

from ..arm import MEMORY, Arm, Setting, wait_a_while
from ..port import HOST, free_port
from ..process import Child, environment_of
from .environment import peers_python

_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
_START_S = 120.0


@contextmanager
def lmcache_arm(setting: Setting) -> Iterator[Arm]:
    """Yield the arm. Raises PeerUnavailableError if the package is missing, and ChildError if it
    fails.
    """
    python = peers_python(_MODULE)
    port, http_port = free_port(), free_port()
    name = f"beluga-demo-{port}"
    environment = {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_LOG_LEVEL": "WARNING"}
    gib = -(-setting.pool_bytes // (1 << 30))
    words: list[object] = [*command("lmcache.cli.main", python=python), "server"]
    words += ["--host", HOST, "--port", port]
    words += [
        "--l1-size-gb",
        gib,
        "--eviction-policy",
        "LRU",
        "--chunk-size",
        setting.block_tokens,
    ]
    words += ["--supported-transfer-mode", "engine_driven", "--shm-name", name]
    words += ["--http-host", HOST, "--http-port", http_port, "--disable-observability"]
    try:
        with Child(
            [str(word) for word in words],
            log=setting.folder / "lmcache-server.log",
            environment=environment_of(setting.folder) | environment,
        ) as child:
            child.wait_for(lambda: _answers(http_port), _START_S, "answer over HTTP")
            yield Arm(
                name="lmcache",
                setting=setting,
                python=python,
                environment=environment,
                wait=wait_a_while,
                connector={
                    "kv_connector": "LMCacheMPConnector",
                    "kv_connector_module_path": _MODULE,
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {
                        "lmcache.mp.host": f"tcp://{HOST}",
                        "lmcache.mp.port": port,
                    },
                },
            )
    finally:
        for left in MEMORY.glob(f"*{name}*"):
            left.unlink(missing_ok=True)


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, OSError):
        return False
    return True
