# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Load the C core (``csrc/api/``); all Python code calls C through these names.

``ffi`` and ``lib`` are cffi's. ``core`` is for annotations: ``core.bl_pool`` is a ``bl_pool *``
(``_core.pyi``, which scripts/dev/gen_stubs.py generates from the C headers); only type checkers use
it.

The import disables the instructions that the environment forbids, and arms the crash point that it
names, before any pool is open.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from beluga import config
from beluga.errors import CoreMissingError, InstructionError

if TYPE_CHECKING:
    import numpy as np

try:
    from beluga import _core as core
except ImportError as error:
    if find_spec("beluga._core") is not None:
        raise CoreMissingError(f"the C core cannot be loaded: {error}; build it again") from None
    folder = Path(__file__).parent.parent
    raise CoreMissingError(
        f"{folder} has no C core; run 'pip install .' or scripts/dev/setup-env there"
    ) from None

REBUILD = "it was built from other sources: build it again (pip install . or scripts/dev/setup-env)"

__all__ = ["core", "ffi", "lib", "record_dtype"]

ffi, lib = core.ffi, core.lib

_VECTORS = lib.BL_CPU_AVX2 | lib.BL_CPU_AVX512 | lib.BL_CPU_VPCLMUL
_CRC = lib.BL_CPU_SSE42 | lib.BL_CPU_PCLMUL

# The instructions that each choice needs, and the better ones that it disables.
_ISAS = {
    "sse2": (0, _VECTORS | _CRC | lib.BL_CPU_MOVDIR64B),
    "avx2": (lib.BL_CPU_AVX2, lib.BL_CPU_AVX512 | lib.BL_CPU_VPCLMUL),
    "avx512": (lib.BL_CPU_AVX512, 0),
    "movdir64b": (lib.BL_CPU_MOVDIR64B, _VECTORS),
}
_FLUSHES = {
    "clflush": (0, lib.BL_CPU_CLFLUSHOPT | lib.BL_CPU_CLWB),
    "clflushopt": (lib.BL_CPU_CLFLUSHOPT, lib.BL_CPU_CLWB),
}
if os.uname().machine == "aarch64":
    _ISAS = {
        "stnp": (0, lib.BL_CPU_NEON | lib.BL_CPU_CRC32),
        "neon": (lib.BL_CPU_NEON, 0),
    }
    _FLUSHES = {"civac": (0, 0)}


def _taken_away(variable: str, choice: str | None, choices: dict[str, tuple[int, int]]) -> int:
    if choice is None:
        return 0
    features = lib.bl_cpu_features()
    possible = [name for name, (needs, _) in choices.items() if features & needs == needs]
    if choice not in possible:
        raise InstructionError(
            f"{variable}={choice} is not possible on this CPU; set it to {' or '.join(possible)}"
        )
    return choices[choice][1]


lib.bl_cpu_limit(
    ~(
        _taken_away("BELUGA_ISA", config.isa(), _ISAS)
        | _taken_away("BELUGA_FLUSH", config.flush(), _FLUSHES)
    )
    & 0xFFFFFFFF
)


def record_dtype(name: str) -> np.dtype[np.void]:
    """Return the numpy dtype of a struct that the C headers declare, with its fields' names. Raises
    CoreMissingError if the C core does not have it.
    """
    import numpy as np  # slow to import, and no call needs it

    try:
        kind = ffi.typeof(name)
    except ffi.error:
        raise CoreMissingError(f"the C core has no {name}; {REBUILD}") from None
    return cast("np.dtype[np.void]", np.dtype(_layout(kind)))


def _layout(kind: Any) -> Any:
    if kind.kind == "primitive":
        return kind.cname.removesuffix("_t")
    if kind.kind == "pointer":
        return "uintp"
    if kind.kind == "array":
        return (_layout(kind.item), kind.length)
    return {
        "names": [name for name, _ in kind.fields],
        "formats": [_layout(field.type) for _, field in kind.fields],
        "offsets": [field.offset for _, field in kind.fields],
        "itemsize": ffi.sizeof(kind),
    }


def _arm(point: str) -> None:
    """Arm ``NAME[:PASSAGE][:kill|stop]`` (csrc/coherence/crash_point.h); no line is torn."""
    name, *options = point.split(":")
    action = options.pop() if options and options[-1] in ("kill", "stop") else "kill"
    passage = options.pop() if options else "1"
    numbered = not options and passage.isdecimal()
    if not numbered or lib.bl_crash_arm(name.encode(), int(passage), action == "stop", 0) < 0:
        raise ValueError(f"BELUGA_CRASH={point}: no such point; give NAME[:PASSAGE][:kill|stop]")


if crash_point := config.crash():
    _arm(crash_point)
