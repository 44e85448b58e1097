# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What is compared: an arm is a way for one engine to find what another one has computed.

Here are the two without other people's packages; ``peers`` has the rest. An arm is entered as a
context: what it needs (a pool, a server) runs until it is left.
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
BLOCK_TOKENS = 128  # of vLLM's CPU backend
_DEVICE_COUNT = 2
_POOL_PROMPTS = 8
_START_S = 60.0
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all arms have alike. ``folder`` is for logs and files, ``python`` has vLLM.

    ``tokens`` is the length of the longest prompt, ``pool_tokens`` how many a pool has room for: of
    several prompts, if nothing is said. ``interleave`` is for a pool on several devices, and
    ``timeout_ms`` bounds our connector's waits for its server; ``link`` is its setting so named.
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
        """Of a prompt, when all is found that can be: whole blocks, and one token is computed."""
        return whole_blocks(self.tokens, self.block_tokens)

    @property
    def hit_bytes(self) -> int:
        """What those tokens weigh."""
        return self.hit_tokens * self.size.token_bytes()

    @property
    def pool_bytes(self) -> int:
        """The room of a pool."""
        tokens = self.pool_tokens or _POOL_PROMPTS * self.hit_tokens
        return tokens * self.size.token_bytes()


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """How many tokens of a prompt can be found: whole blocks, but for one token to compute."""
    return (tokens - 1) // block_tokens * block_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How to start its engines.

    ``wait`` returns when so many tokens can be found that an engine has computed since its figures
    were those, or when it has given up saving some.
    """

    name: str
    setting: Setting
    connector: Mapping[str, Any] | None = None
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    wait: Callable[[Engine, Mapping[str, float], int], None] = lambda *_: None

    def engine(self, role: str) -> Engine:
        """A new engine, still coming up."""
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
    """vLLM alone: it computes, or has it in its own prefix cache."""
    yield Arm(name="plain", setting=setting)


@contextmanager
def beluga_arm(setting: Setting) -> Iterator[Arm]:
    """Our connector over a new pool of two emulated devices, with its server."""
    with beluga_pool(setting) as paths:
        yield Arm(
            name="beluga",
            setting=setting,
            connector=beluga_connector(paths, setting.timeout_ms, setting.link),
            wait=lambda engine, before, tokens: _wait_for_save(engine, before, tokens, setting),
        )


def beluga_connector(
    paths: Sequence[Path], timeout_ms: int = 500, link: str = "auto"
) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config`` for a pool on these devices."""
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
    """The devices of a new pool with room for several prompts, and a server on it."""
    with scratch_folder("vllm", MEMORY) as directory:
        paths = [directory / str(number) for number in range(_DEVICE_COUNT)]
        device_size = setting.pool_bytes // _DEVICE_COUNT + (64 << 20)
        device_size = -(-device_size // STRIPE_SIZE) * STRIPE_SIZE
        Pool.create(paths, device_size=device_size, interleave=setting.interleave).close()
        with _server(setting, paths):
            yield paths


@contextmanager
def _server(setting: Setting, paths: Sequence[Path]) -> Iterator[None]:
    options = [word for path in paths for word in ("--pool", str(path))]
    with Child(
        command("beluga.cli.main", "serve", *options),
        log=setting.folder / "beluga-serve.log",
        environment=environment_of(setting.folder),
    ) as child:
        child.wait_for(lambda: "serving" in child.log(), _START_S, "pool server")
        yield


def _wait_for_save(
    engine: Engine, before: Mapping[str, float], tokens: int, setting: Setting
) -> None:
    """Until the engine's connector has saved them since ``before``, or says that it gave up."""
    size = tokens * setting.size.token_bytes()
    block_bytes = float(setting.block_tokens * setting.size.token_bytes())
    weights = {"save_bytes": 1.0, "save_skipped_blocks": block_bytes}
    value = size + sum(weights[name] * before[name] for name in weights)
    if not engine.ask("settle", weights=weights, value=value, within_s=_SETTLE_S)["settled"]:
        raise engine.failed(f"has not saved {size} bytes within {_SETTLE_S:.0f} s")


def wait_a_while(engine: Engine, _before: Mapping[str, float], _tokens: int) -> None:
    """For connectors that do not say when they have saved."""
    for _ in range(10):
        engine.ask("idle")
        time.sleep(0.1)
