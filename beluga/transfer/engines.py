# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The copy engines by name, and the choice of one when a cache is opened.

An engine is one module of this folder and one entry in :data:`ENGINES`. The argument ``engine`` of
``KVCache``, the connectors' setting of that name, ``beluga pool info``, ``beluga bench copy`` and
the errors take the names from here. ``docs/understand/copy-engines.md`` shows how to add one.

``auto`` uses an engine from a number of bytes on: that of its entry, or of the table ``[copy]`` in
beluga.toml, which ``beluga bench copy --save`` writes.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from beluga import config
from beluga.errors import EngineUnavailableError
from beluga.transfer.cpu import CopySettings, CpuEngine
from beluga.transfer.dsa import DsaEngine, queue_of, why_no_queue
from beluga.transfer.engine import CopyEngine, Direction

if TYPE_CHECKING:
    from beluga.pool import Pool

_logger = logging.getLogger(__name__)

CPU = "cpu"
"""The engine that is always available, and that copies when another engine fails."""

AUTO = "auto"
"""The CPU, and for large copies another engine that reaches host memory."""

NEVER = 1 << 62
"""More bytes than any copy has."""


def _always() -> None:
    return None


def _cuda() -> ModuleType:
    return import_module("beluga.transfer.cuda")  # few processes need it


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine.

    ``open`` makes the engine for a pool and for a cache whose gets have this many CPU threads. It
    raises :class:`~beluga.errors.EngineUnavailableError` if the engine cannot be used. ``why_none``
    returns in one line why this machine has no such engine, as far as known without opening one, or
    None. ``memory`` is where blocks have to lie for the engine to reach them: ``auto`` is for
    blocks in host memory.

    ``auto`` uses the engine for puts of at least ``write_bytes`` and gets of at least
    ``read_bytes``. ``device`` returns the device of an open engine.
    """

    name: str
    open: Callable[[Pool, int], CopyEngine]
    why_none: Callable[[], str | None] = _always
    memory: Literal["host", "gpu"] = "host"
    write_bytes: int = NEVER
    read_bytes: int = NEVER
    device: Callable[[CopyEngine], str] = lambda engine: engine.name

    def least_bytes(self, direction: Direction) -> int:
        """Return the bytes from which on ``auto`` uses it in a direction."""
        word = direction.name.lower()
        default = self.write_bytes if direction is Direction.WRITE else self.read_bytes
        return config.copy_settings().get(f"{self.name}-{word}", default)


ENGINES: dict[str, EngineEntry] = {
    entry.name: entry
    for entry in (
        EngineEntry(name=CPU, open=CpuEngine, write_bytes=0, read_bytes=0),
        EngineEntry(
            name="dsa",
            open=lambda pool, threads: DsaEngine(pool),
            why_none=why_no_queue,
            # The Beluga paper, O4: the CPU is faster below 4 KiB, a DSA from 16 KiB on
            write_bytes=16 << 10,
            read_bytes=16 << 10,
            device=queue_of,
        ),
        EngineEntry(
            name="cuda",
            open=lambda pool, threads: _cuda().CudaEngine(pool),
            why_none=lambda: _cuda().why_no_cuda(),
            memory="gpu",
        ),
    )
}
"""All engines by name; the CPU is first."""


def copy_setting_names() -> list[str]:
    """Return the names of the table ``[copy]`` in beluga.toml."""
    engines = [entry.name for entry in ENGINES.values() if entry.name != CPU]
    sizes = [field.name for field in dataclasses.fields(CopySettings)]
    return [*(f"{name}-{way}" for name in engines for way in ("write", "read")), *sizes]


def engine_names(memory: str | None = None) -> tuple[str, ...]:
    """Return the names for ``engine``: ``auto``, and engines that reach ``memory`` (None: any)."""
    return (AUTO, *(name for name, entry in ENGINES.items() if memory in (None, entry.memory)))


@dataclasses.dataclass(frozen=True, slots=True)
class EngineChoice:
    """The engine of a cache: ``engine`` copies from ``write_bytes`` or ``read_bytes`` on, and C
    copies less. Without an engine, C copies everything. If a ``spare`` one fails, C copies in its
    place. The cache closes an engine that was ``made`` for it.
    """

    engine: CopyEngine | None = None
    write_bytes: int = 0
    read_bytes: int = 0
    spare: bool = False
    made: bool = False


def choose_engine(pool: Pool, engine: CopyEngine | str, threads: int) -> EngineChoice:
    """Choose the engine of a cache whose gets have ``threads`` threads of the CPU.

    ``engine`` is an engine, the name of one, or ``auto``: the first one that this process can open
    and that is faster than the CPU for some copies. Raises
    :class:`~beluga.errors.EngineUnavailableError` if a named engine is unavailable, and for other
    names.
    """
    if not isinstance(engine, str):
        return EngineChoice(engine)
    if engine == CPU:
        return EngineChoice()
    if engine != AUTO:
        if engine not in ENGINES:
            names = ", ".join(engine_names())
            raise EngineUnavailableError(f"{engine!r} is not an engine; use {names}")
        return EngineChoice(ENGINES[engine].open(pool, threads), made=True)
    for entry in ENGINES.values():
        write, read = map(entry.least_bytes, (Direction.WRITE, Direction.READ))
        usable = entry.name != CPU and entry.memory == "host" and min(write, read) < NEVER
        if not usable or entry.why_none() is not None:
            continue
        try:
            return EngineChoice(entry.open(pool, threads), write, read, spare=True, made=True)
        except Exception as error:  # after any failure the CPU copies
            _logger.warning("beluga: the CPU copies without %s: %s", entry.name, error)
    return EngineChoice()


@dataclasses.dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine on this machine, for ``beluga pool info``.

    ``auto`` uses it from ``written`` and ``read`` bytes on (None: never), which are ``measured`` or
    its defaults. ``device`` is its device; ``why_none`` is why there is none. ``auto`` is for
    engines that reach the host's ``memory``.
    """

    memory: str
    device: str | None
    why_none: str | None
    measured: bool = False
    written: int | None = None
    read: int | None = None


def engine_facts(pool: Pool, threads: int) -> dict[str, EngineFacts]:
    """Return the facts of each engine except the CPU. Engines are opened; nothing is measured."""
    return {name: _facts(ENGINES[name], pool, threads) for name in ENGINES if name != CPU}


def _facts(entry: EngineEntry, pool: Pool, threads: int) -> EngineFacts:
    if (why := entry.why_none()) is not None or entry.memory != "host":
        return EngineFacts(entry.memory, None, why)
    try:
        engine = entry.open(pool, threads)
    except EngineUnavailableError as error:
        return EngineFacts(entry.memory, None, str(error))
    device = entry.device(engine)
    engine.close()
    written, read = (
        None if size >= NEVER else size
        for size in map(entry.least_bytes, (Direction.WRITE, Direction.READ))
    )
    saved = {f"{entry.name}-write", f"{entry.name}-read"} & config.copy_settings().keys()
    return EngineFacts(entry.memory, device, None, bool(saved), written, read)
