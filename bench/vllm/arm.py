# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The arms of the comparison: an arm is a method for one engine to reuse KV that another one has
computed.

This module has the two arms without packages of other projects; ``peers`` has the rest. An arm is a
context manager: what it needs (a pool, a server) runs inside.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beluga.child import command
from beluga.pool import STRIPE_SIZE, Pool, scratch_folder

from .model import SIZES, Size
from .process import Child, Engine, environment_of, options_of

MEMORY = Path("/dev/shm")  # noqa: S108  the files lie in a fresh directory of mode 0700
BLOCK_TOKENS = 128  # the block size of vLLM's CPU backend
_DEVICE_COUNT = 2
_POOL_PROMPTS = 8
_START_S = 60.0
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The settings that all arms share. ``folder`` is for logs and files, ``python`` has vLLM.

    ``tokens`` is the length of the longest prompt. ``pool_tokens`` is how many tokens a pool has
    space for, by default those of several prompts. ``interleave`` is for a pool on several devices,
    ``timeout_ms`` limits our connector's waits for its server, and ``link`` is the connector's
    setting.
    """

    folder: Path
    model: Path
    size_name: str
    tokens: int
    python: str = sys.executable
    block_tokens: int = BLOCK_TOKENS
    pool_tokens: int | None = None
    interleave: bool = True
    timeout_ms: int = 500
    link: str = "auto"

    @property
    def size(self) -> Size:
        """The model's shape."""
        return SIZES[self.size_name]

    @property
    def hit_tokens(self) -> int:
        """The most tokens of a prompt that can be hits: whole blocks, with one token left to
        compute.
        """
        return whole_blocks(self.tokens, self.block_tokens)

    @property
    def hit_bytes(self) -> int:
        """The bytes of these tokens."""
        return self.hit_tokens * self.size.token_bytes()

    @property
    def pool_bytes(self) -> int:
        """The size of a pool."""
        tokens = self.pool_tokens or _POOL_PROMPTS * self.hit_tokens
        return tokens * self.size.token_bytes()


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """Return the most tokens of a prompt that can be hits: whole blocks, with one token left to
    compute.
    """
    return (tokens - 1) // block_tokens * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """Starts engines of one kind.

    ``wait`` returns when that many more tokens can be found, which an engine has computed since its
    counters had the given values, or when it has given up saving some.
    """

    name: str
    setting: Setting
    connector: Mapping[str, Any] | None = None
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    wait: Callable[[Engine, Mapping[str, float], int], None] = lambda *_: None

    def engine(self, role: str) -> Engine:
        """Start an engine, which is not ready yet."""
        setting = self.setting
        return Engine(
            options_of(
                setting.model,
                setting.size,
                tokens=setting.tokens,
                connector=self.connector,
                block_tokens=setting.block_tokens,
            ),
            log=setting.folder / f"{self.name}-{role}.log",
            python=self.python or setting.python,
            environment=self.environment,
            wrapper=self.wrapper,
        )


@contextmanager
def plain_arm(setting: Setting) -> Iterator[Arm]:
    """Yield vLLM alone, which computes every prompt or finds it in its own prefix cache."""
    yield Arm(name="plain", setting=setting)


@contextmanager
def beluga_arm(setting: Setting) -> Iterator[Arm]:
    """Yield our connector over a new pool of two emulated devices, with its server."""
    with beluga_pool(setting) as paths:
        yield arm_on(paths, setting)


def arm_on(paths: Sequence[Path], setting: Setting, name: str = "beluga") -> Arm:
    """Return the arm of our connector over a pool on these devices."""
    return Arm(
        name=name,
        setting=setting,
        connector=beluga_connector(paths, setting.timeout_ms, setting.link),
        wait=lambda engine, before, tokens: _wait_for_save(engine, before, tokens, setting),
    )


def beluga_connector(
    paths: Sequence[Path], timeout_ms: int = 500, link: str = "auto"
) -> dict[str, Any]:
    """Return the value of vLLM's ``--kv-transfer-config`` for a pool on these devices."""
    return {
        "kv_connector": "BelugaConnector",
        "kv_connector_module_path": "beluga.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "pool": ":".join(map(str, paths)),
            "timeout_ms": timeout_ms,
            "link": link,
        },
    }


@contextmanager
def beluga_pool(setting: Setting) -> Iterator[list[Path]]:
    """Yield the devices of a new pool with space for several prompts, and run a server on it."""
    with served_pool(setting) as (paths, _):
        yield paths


@contextmanager
def served_pool(
    setting: Setting, name: str = "beluga", *options: str
) -> Iterator[tuple[list[Path], Child]]:
    """Yield the devices of a new pool with space for several prompts, and the server on it, which
    has these options of ``beluga serve``.
    """
    with scratch_folder("vllm", MEMORY) as directory:
        paths = [directory / str(number) for number in range(_DEVICE_COUNT)]
        device_size = setting.pool_bytes // _DEVICE_COUNT + (64 << 20)
        device_size = -(-device_size // STRIPE_SIZE) * STRIPE_SIZE
        Pool.create(paths, device_size=device_size, interleave=setting.interleave).close()
        with _server(setting, paths, name, options) as child:
            yield paths, child


@contextmanager
def _server(
    setting: Setting, paths: Sequence[Path], name: str, options: Sequence[str]
) -> Iterator[Child]:
    pool = [word for path in paths for word in ("--pool", str(path))]
    with Child(
        command("beluga.cli.main", "serve", *pool, *options),
        log=setting.folder / f"{name}-serve.log",
        environment=environment_of(setting.folder),
    ) as child:
        child.wait_for(lambda: "serving" in child.log(), _START_S, "pool server")
        yield child


def _wait_for_save(
    engine: Engine, before: Mapping[str, float], tokens: int, setting: Setting
) -> None:
    """Wait until the engine's connector has saved that many tokens since ``before``, or stopped
    trying.
    """
    size = tokens * setting.size.token_bytes()
    block_bytes = float(setting.block_tokens * setting.size.token_bytes())
    weights = {"save_bytes": 1.0, "save_skipped_blocks": block_bytes}
    value = size + sum(weights[name] * before[name] for name in weights)
    if not engine.call("settle", weights=weights, value=value, within_s=_SETTLE_S)["settled"]:
        raise engine.failed(f"has not saved {size} bytes within {_SETTLE_S:.0f} s")


def wait_a_while(engine: Engine, _before: Mapping[str, float], _tokens: int) -> None:
    """Wait briefly, for connectors that do not report when they have saved."""
    for _ in range(10):
        engine.call("idle")
        time.sleep(0.1)
