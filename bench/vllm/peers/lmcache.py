# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""LMCache in its multiprocess mode: a server, and engines that share its memory.

Its in-process connector has no CPU backend. Its chunk is vLLM's block, so that it can find as much
of a prompt as our connector.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from beluga.child import command

from ..arm import MEMORY, Arm, Setting, wait_a_while
from ..port import HOST, free_port
from ..process import Child, environment_of
from .environment import peers_python

_MODULE = "lmcache.integration.vllm.lmcache_mp_connector"
_START_S = 120.0


@dataclass(frozen=True, slots=True)
class LMCache:
    """A running server, and the arm of engines on it."""

    child: Child
    http_port: int
    arm: Arm

    def forget(self) -> None:
        """Drop all data in the server's memory. The data of its lower tiers stays."""
        request = urllib.request.Request(
            f"http://{HOST}:{self.http_port}/cache/clear",
            data=json.dumps({"tier": "l1"}).encode(),
            headers={"Content-Type": "application/json"},
        )
        urllib.request.urlopen(request, timeout=60).close()  # noqa: S310


@contextmanager
def lmcache_arm(setting: Setting) -> Iterator[Arm]:
    """Yield the arm. Raises PeerUnavailableError if the package is missing, and ChildError if it
    fails.
    """
    with lmcache(setting) as server:
        yield server.arm


@contextmanager
def lmcache(setting: Setting, name: str = "lmcache", *below: str) -> Iterator[LMCache]:
    """Yield a server whose lower tiers are ``below``: values of its ``--l2-adapter``. Raises as
    :func:`lmcache_arm` does.
    """
    python = peers_python(_MODULE)
    port, http_port = free_port(), free_port()
    memory = f"beluga-demo-{port}"
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
    words += ["--supported-transfer-mode", "engine_driven", "--shm-name", memory]
    words += ["--http-host", HOST, "--http-port", http_port, "--disable-observability"]
    words += [word for adapter in below for word in ("--l2-adapter", adapter)]
    try:
        with Child(
            [str(word) for word in words],
            log=setting.folder / f"{name}-server.log",
            environment=environment_of(setting.folder) | environment,
        ) as child:
            child.wait_for(lambda: _answers(http_port), _START_S, "answer over HTTP")
            arm = Arm(
                name=name,
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
            yield LMCache(child, http_port, arm)
    finally:
        for left in MEMORY.glob(f"*{memory}*"):
            left.unlink(missing_ok=True)


def _answers(port: int) -> bool:
    try:
        urllib.request.urlopen(f"http://{HOST}:{port}/", timeout=5).close()
    except urllib.error.HTTPError:
        return True
    except (urllib.error.URLError, OSError):
        return False
    return True
