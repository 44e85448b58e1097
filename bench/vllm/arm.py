# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What is compared: an arm is a way for one engine to find what another one has computed.

Here are the two without other people's packages; ``peers`` has the rest. An arm is entered as a
context: what it needs (a pool, a server) runs until it is left.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from beluga.pool import STRIPE_SIZE, Pool

from .model import SIZES, Size
from .process import Child, Engine, environment_of, options_of

MEMORY = Path("/dev/shm")  # noqa: S108  the files lie in a fresh directory of mode 0700
BLOCK_TOKENS = 128  # of vLLM's CPU backend
_DEVICE_COUNT = 2
_POOL_PROMPTS = 6
_START_S = 60.0
_SETTLE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all arms have alike. ``folder`` is for logs and files, ``python`` has vLLM."""

    folder: Path
    model: Path
    size_name: str
    tokens: int
    python: str = sys.executable

    @property
    def size(self) -> Size:
        """The model's shape."""
        return SIZES[self.size_name]

    @property
    def hit_tokens(self) -> int:
        """Of a prompt, when all is found that can be: whole blocks, and one token is computed."""
        return (self.tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS

    @property
    def hit_bytes(self) -> int:
        """What those tokens weigh."""
        return self.hit_tokens * self.size.token_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """How to start its engines; ``wait`` returns when what an engine has computed can be found."""

    name: str
    setting: Setting
    connector: Mapping[str, Any] | None = None
    python: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    wrapper: Sequence[str] = ()
    wait: Callable[[Engine, Mapping[str, float]], None] = lambda _engine, _before: None

    def engine(self, role: str) -> Engine:
        """A new engine, still coming up."""
        setting = self.setting
        return Engine(
            options_of(
                setting.model, setting.size, tokens=setting.tokens, connector=self.connector
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
            connector=beluga_connector(paths),
            wait=lambda engine, before: _wait_for_save(engine, before, setting),
        )


def beluga_connector(paths: Sequence[Path]) -> dict[str, Any]:
    """The value of vLLM's ``--kv-transfer-config`` for a pool on these devices."""
    return {
        "kv_connector": "BelugaConnector",
        "kv_connector_module_path": "beluga.connectors.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"pool": ":".join(map(str, paths))},
    }


@contextmanager
def beluga_pool(setting: Setting) -> Iterator[list[Path]]:
    """The devices of a new pool with room for several prompts, and a server on it."""
    directory = Path(tempfile.mkdtemp(prefix="beluga-vllm-", dir=MEMORY))
    try:
        paths = [directory / str(number) for number in range(_DEVICE_COUNT)]
        device_size = _POOL_PROMPTS * setting.hit_bytes // _DEVICE_COUNT + (64 << 20)
        with Pool.create(paths, device_size=-(-device_size // STRIPE_SIZE) * STRIPE_SIZE):
            pass
        with _server(setting, paths):
            yield paths
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _server(setting: Setting, paths: Sequence[Path]) -> Iterator[None]:
    options = [word for path in paths for word in ("--pool", str(path))]
    with Child(
        [sys.executable, "-m", "beluga.cli.main", "serve", *options],
        log=setting.folder / "beluga-serve.log",
        environment=environment_of(setting.folder),
    ) as child:
        child.wait_for(lambda: "serving" in child.log(), _START_S, "pool server")
        yield


def _wait_for_save(engine: Engine, before: Mapping[str, float], setting: Setting) -> None:
    """Until the engine's connector has saved a prompt since ``before``, or says that it gave up."""
    block_bytes = float(BLOCK_TOKENS * setting.size.token_bytes())
    weights = {"save_bytes": 1.0, "save_skipped_blocks": block_bytes}
    value = setting.hit_bytes + sum(weights[name] * before[name] for name in weights)
    if not engine.ask("settle", weights=weights, value=value, within_s=_SETTLE_S)["settled"]:
        raise engine.failed(f"has not saved {setting.hit_bytes} bytes within {_SETTLE_S:.0f} s")


def wait_a_while(engine: Engine, _before: Mapping[str, float]) -> None:
    """For connectors that do not say when they have saved."""
    for _ in range(10):
        engine.ask("idle")
        time.sleep(0.1)
