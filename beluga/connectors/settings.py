# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""The settings for the pool in an engine's own configuration, common to all engines."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any

from beluga.errors import ConnectorError, TransferError
from beluga.transfer import ENGINES, engine_names, parse_settings

T = typing.TypeVar("T")

LINK_OFF = "off"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """The pool's settings: which pool to use, and how long the engine waits for it.

    * ``pool``: device paths joined by ``:``; None is the default pool.
    * ``host``: this machine's number, for devdax.
    * ``timeout_ms``: the limit of every wait of the engine for the pool's server.
    * ``retry_s``: how long the pool is not used after a failure; every lookup is then a miss.
    * ``onboard_ms``: how long a request waits for blocks from a lower tier
      (``beluga serve --disk``); 0 means no wait.
    * ``identity``: an operator's name for the model's weights, instead of a digest of their bytes:
      any text that two engines share only if they have loaded the same weights.
    * ``salt``: a tenant's secret. Only engines with the same salt share blocks.
    * ``tenant``: the tenant's name, which selects its share (``beluga serve --share``). Only
      engines with the same tenant share blocks.
    * ``check_checksums``: check the checksums of every loaded byte.
    * ``load_threads``: the number of threads that copy a load; None means one per core, at most 4.
      Saves are not urgent and use one thread.
    * ``link``: the link scheduler, which gives loads of all engine processes of this host priority
      over saves. ``auto`` assumes the usual speed of such memory; a number is a speed in GB/s
      (``20``, or ``46.2/33`` for loads and saves); ``off`` disables it.
    * ``engine``: the copy engine for blocks in host memory: ``auto`` (CPU, or another one where it
      is faster), ``cpu`` or ``dsa``. A GPU copies the blocks in its own memory.
    """

    pool: str | None = None
    host: int | None = None
    timeout_ms: int = 500
    retry_s: float = 1.0
    onboard_ms: int = 2000
    identity: str = ""
    salt: str = ""
    tenant: str = ""
    check_checksums: bool = True
    load_threads: int | None = None
    link: str = "auto"
    engine: str = "auto"

    def __post_init__(self) -> None:
        if self.timeout_ms <= 0 or self.retry_s <= 0:
            raise ConnectorError("timeout_ms and retry_s must be greater than 0")
        if self.onboard_ms < 0:
            raise ConnectorError("onboard_ms must be at least 0")
        if self.load_threads is not None and self.load_threads <= 0:
            raise ConnectorError("load_threads must be greater than 0")
        if self.link != LINK_OFF:
            try:
                parse_settings(self.link)
            except TransferError as error:
                raise ConnectorError(f"beluga's setting link: {error}") from None
        names = engine_names("host")
        if self.engine not in names:
            raise ConnectorError(
                f"beluga's setting engine is {self.engine!r}; it must be {' or '.join(names)}"
            )
        entry = ENGINES.get(self.engine)  # ``auto`` has no entry
        if entry is not None and (why := entry.why_none()) is not None:
            raise ConnectorError(f"beluga's setting engine is {self.engine}, but {why}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(PoolSettings):
    """The settings of a storage plugin, whose keys identify the tokens and little else. ``variant``
    is any text for properties that change the bytes but are not passed to plugins.

    Examples are a model's revision, and fp8_e4m3 against fp8_e5m2, which both appear as bytes.
    """

    variant: str = ""


def settings_of(kind: type[T], given: Mapping[str, Any]) -> T:
    """Convert ``given`` to a settings dataclass. Raises ConnectorError for an unknown name or a
    wrong type.
    """
    wanted = typing.get_type_hints(kind)
    if unknown := sorted(given.keys() - wanted.keys()):
        raise ConnectorError(
            f"beluga has no setting {', '.join(unknown)}; choose from {', '.join(wanted)}"
        )
    for name, value in given.items():
        allowed = typing.get_args(wanted[name]) or (wanted[name],)
        ok = isinstance(value, allowed) or (float in allowed and type(value) is int)
        if not ok or (isinstance(value, bool) and bool not in allowed):
            names = " or ".join(getattr(choice, "__name__", str(choice)) for choice in allowed)
            raise ConnectorError(f"beluga's setting {name} is {value!r}; it must be {names}")
    return kind(**given)
