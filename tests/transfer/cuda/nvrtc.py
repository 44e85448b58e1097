# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""Compiles the kernels by NVRTC without a GPU, and reads the machine code."""

from __future__ import annotations

import ctypes
import dataclasses
import re
import subprocess
from pathlib import Path
from typing import Any

from beluga.transfer.cuda import driver as source

CUPY_ADDS = ("-ftz=true", "--device-as-default-execution-space")  # the places in cupy 13 and 14


@dataclasses.dataclass
class Kernel:
    """One kernel's machine code."""

    registers: int
    instructions: list[str]  # including predicates

    def named(self, pattern: str) -> list[str]:
        return [text for text in self.instructions if re.search(pattern, text)]

    def loads_ahead(self) -> int:
        """The most 128-bit loads, not predicated, between two stores or branches."""
        best = count = 0
        for text in self.instructions:
            if re.search(r"\b(STG|BRA|EXIT)\b", text):
                count = 0
            elif re.match(r"LDG\S*\.128\b", text):
                count += 1
                best = max(best, count)
        return best


class Nvrtc:
    """NVRTC and nvdisasm, as ``scripts/dev/setup-cuda-tools`` puts them into ``folder``."""

    def __init__(self, folder: Path) -> None:
        self._library = ctypes.CDLL(str(next(folder.glob("nvidia/*/lib/libnvrtc.so.*"))))
        self._disassembler = next(folder.glob("nvidia/*/bin/nvdisasm"))

    def compile(self, architecture: int) -> bytes:
        """Compile a cubin with the options that the engine gives to cupy, and those of cupy."""
        program, size = ctypes.c_void_p(), ctypes.c_size_t()
        text = source.kernel_text().encode()
        self._call("CreateProgram", ctypes.byref(program), text, b"kv_copy.cu", 0, None, None)
        options = [*source.NVRTC_OPTIONS, *CUPY_ADDS, f"-arch=sm_{architecture}"]
        given = (ctypes.c_char_p * len(options))(*[option.encode() for option in options])
        status = self._library.nvrtcCompileProgram(program, len(options), given)
        if status:
            self._call("GetProgramLogSize", program, ctypes.byref(size))
            log = ctypes.create_string_buffer(size.value)
            self._call("GetProgramLog", program, log)
            raise AssertionError(log.value.decode())
        self._call("GetCUBINSize", program, ctypes.byref(size))
        cubin = ctypes.create_string_buffer(size.value)
        self._call("GetCUBIN", program, cubin)
        self._call("DestroyProgram", ctypes.byref(program))
        return cubin.raw

    def kernels(self, cubin: Path) -> dict[str, Kernel]:
        listing = subprocess.run(
            [self._disassembler, cubin], capture_output=True, text=True, check=True
        ).stdout
        registers = re.findall(
            r"EIATTR_REGCOUNT\n.*?index@\((\w+)\)\n.*?\.word\s+(0x\w+)", listing, re.DOTALL
        )
        bodies = re.split(r"^\.text\.(\w+):$", listing, flags=re.MULTILINE)
        code = {
            name: re.findall(r"/\*[0-9a-f]{4,5}\*/\s+(?:\{\s*)?(.*?)\s*;", body)
            for name, body in zip(bodies[1::2], bodies[2::2], strict=True)
        }
        return {name: Kernel(int(count, 16), code[name]) for name, count in registers}

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, f"nvrtc{name}")(*arguments)
        assert status == 0, f"nvrtc{name}: {status}"
