# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""What the verbs execute: which instructions, on which addresses, in which order.

The simulator replaces the verbs' instructions, so its mutants do not cover them. Here each
instruction in a copy of ``csrc/coherence`` is preceded by a call that prints it, ``traced.c`` calls
the verbs, and what it prints is compared. Mutants of the instructions must change it. The program
of aarch64 is cross-compiled and runs under qemu-user where both are installed
(``scripts/dev/setup-aarch64``).
"""

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from beluga.coherence import features

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent
CSRC = ROOT / "csrc"
MACHINE = platform.machine()

ASSEMBLY = re.compile(r'__asm__ volatile\("([^"]+)"([^;]*?)\);')
STREAMED = re.compile(r"_mm_stream_si128\((\w+), (\w+)\);")
# The operand that is an address comes last; x86-64 has it as memory.
ADDRESS = re.compile(r'"r"\((\w+)\)(?=[^"]*(?:"memory")?\s*$)|"\+m"\(.*\)(\w+)\)|"m"\(\*(\w+)\)')


@dataclass(frozen=True)
class Machine:
    """How to compile and run for an architecture, and the expected output."""

    compiler: tuple[str, ...]
    emulator: tuple[str, ...]
    expected: dict[str, str]


def lines(word: str, *addresses: int) -> str:
    return " ".join(f"{word}@{address}" for address in addresses)


QUARTERS = lines("movntdq", 64, 80, 96, 112)
X86 = {
    "stream_line": QUARTERS,
    "publish_line": f"{QUARTERS} sfence",
    "load_line": lines("movdqa", 64, 80, 96, 112),
    "contents": "0",
    "stream": lines("movntdq", *range(64, 192, 16)),
    "stream_crc": lines("movntdq", *range(0, 256, 16)),
    "sum": "1",
    "refetch": f"mfence {lines('clflushopt', 64, 128)} mfence",
    "ragged": lines("clflushopt", 64, 128),
    "fence_store": "sfence",
    "fence_full": "mfence",
    "settle": "sfence",
    "write_back": "clwb@64",
    "drop": "mfence clflushopt@64 mfence",
    "ntstore_copy": f"clwb@0 {QUARTERS} clwb@128 sfence",
    "coherent": "sfence mfence mfence",
    "coherent stream": QUARTERS,
}
PAIRS = lines("stnp", 64, 80, 96, 112)
AARCH64 = {
    "stream_line": f"{PAIRS} dc civac@64",
    "publish_line": f"{PAIRS} dc civac@64 dsb sy",
    "load_line": "",
    "contents": "0",
    "stream": f"{lines('stnp', 64, 96, 128, 160)} {lines('dc civac', 64, 128)}",
    "stream_crc": f"{lines('stnp', *range(0, 256, 16))} {lines('dc civac', 0, 64, 128, 192)}",
    "sum": "1",
    "refetch": f"dsb sy {lines('dc civac', 64, 128)} dsb sy",
    "ragged": lines("dc civac", 64, 128),
    "fence_store": "dsb sy",
    "fence_full": "dsb sy",
    "settle": "dmb ishst",
    "write_back": "dc cvac@64",
    "drop": "dsb sy dc civac@64 dsb sy",
    "ntstore_copy": f"dc cvac@0 {lines('stnp', 64, 96)} dc civac@64 dc cvac@128 dsb sy",
    "small cache lines": lines("dc civac", 64, 96),
    "faults": "0 -1028 -1028 -1028",
    "sizes": "32 64",
    "coherent": "dsb sy dsb sy dsb sy",
    "coherent stream": lines("stnp", 64, 96),
}
ROOT_FILES = ROOT / "build/aarch64/debian"
CROSS_LIBRARIES = ROOT_FILES, Path("/usr/aarch64-linux-gnu/include/stdio.h")
if MACHINE == "aarch64":
    CROSS = Machine(("gcc",), (), AARCH64)
else:
    sysroot = (f"--sysroot={ROOT_FILES}",) if ROOT_FILES.exists() else ()
    CROSS = Machine(
        ("aarch64-linux-gnu-gcc", "-static", *sysroot),
        ("qemu-aarch64-static", "-cpu", "neoverse-n1"),
        AARCH64,
    )
MACHINES = {"x86_64": Machine(("gcc",), (), X86), "aarch64": CROSS}

# A file of csrc/coherence, the start of the changed text, and its replacement.
Mutant = tuple[str, str, str]
MUTANTS: dict[str, dict[str, Mutant]] = {
    "x86_64": {
        "no store fence": ("x86.h", '"sfence"', '"nop"'),
        "store fence for a full one": ("x86.h", '"mfence"', '"sfence"'),
        "write back for a drop": ("x86.h", '"clflushopt %0"', '"clwb %0"'),
        "a drop ends early": ("x86.h", "(const char *)address + size : line;", "line + 1 : line;"),
        "no drop": ("x86.h", "            bl_clflushopt(line);", "            (void)line;"),
        "a cached store": (
            *("x86.h", "_mm_stream_si128(target, value)"),
            "_mm_store_si128(target, value)",
        ),
        "a plain load": ("x86.h", '__asm__ volatile("movdqa %1, %0"', '__asm__("movdqa %1, %0"'),
        "a quarter is missing": ("x86.h", "    bl_nt16(target + 3, d);", "    (void)d;"),
        "the copy stores a quarter twice": ("x86_copy.c", "target + 48, d", "target + 32, d"),
        "coherent devices are flushed": (
            *("coherence.h", "if (!memory->coherent[place.device])\n            bl_flush_lines"),
            "if (1)\n            bl_flush_lines",
        ),
        "refetch without its first fence": (
            *("coherence.h", "        bl_fence_full(memory);", "        (void)0;"),
        ),
    },
    "aarch64": {
        "the store fence orders only": ("aarch64.h", '"dsb sy"', '"dmb sy"'),
        "the store fence waits for stores only": ("aarch64.h", '"dsb sy"', '"dsb st"'),
        "the full fence is of one domain": (
            *("aarch64.h", 'bl_full_fence_now(void) { __asm__ volatile("dsb sy"'),
            'bl_full_fence_now(void) { __asm__ volatile("dsb ish"',
        ),
        "write back for a drop": ("aarch64.h", '"dc civac, %0"', '"dc cvac, %0"'),
        "no drop": ("aarch64.h", "        bl_dc_civac(line);", "        (void)line;"),
        "no dc after streaming": (
            "aarch64.h",
            "    bl_flush_lines(address, size, step);",
            "    (void)address, (void)size, (void)step;",
        ),
        "a drop ends early": (
            *("aarch64.h", "(const char *)address + size : line;", "line + 1 : line;"),
        ),
        "a drop begins a line late": (
            "aarch64.h",
            "(uintptr_t)(BL_LINE_SIZE - 1));",
            "(uintptr_t)(BL_LINE_SIZE - 1)) + BL_LINE_SIZE;",
        ),
        "a larger step": ("aarch64.h", "return size < BL_LINE_SIZE ? size", "return 1 ? 128"),
        "cache lines in bytes": (
            "aarch64.h",
            "return 4u << (cache_type",
            "return 1u << (cache_type",
        ),
        "larger write backs are allowed": ("aarch64.h", ": 2048;", ": 64;"),
        "larger cache lines are allowed": (
            *("aarch64.h", "bl_cache_line_size(cache_type) > BL_LINE_SIZE ||", "0 ||"),
        ),
        "a quarter is missing": (
            *("aarch64.h", "    bl_stnp16(target + 48, word[6], word[7]);", "    ;"),
        ),
        "a quarter is another's": ("aarch64.h", "target + 32, word[4]", "target + 32, word[2]"),
        "the copy stores a half twice": ("aarch64_copy.c", "target + 32, c, d", "target, c, d"),
        "the sum leaves a word out": (
            *("aarch64_crc32c.c", "bl_crc_step(bl_crc_step(crc, low), high)"),
            "bl_crc_step(crc, low)",
        ),
        "coherent devices are flushed": (
            *("coherence.h", "if (!memory->coherent[place.device])\n        bl_streamed"),
            "if (1)\n        bl_streamed",
        ),
    },
}


def missing(name: str) -> str:
    """Return why this machine cannot run that architecture's program, or nothing."""
    if name == "x86_64" and name != MACHINE:
        return "this CPU is no x86-64"
    if name == "x86_64" and not {"clflushopt", "clwb"} <= features():
        return "this CPU has no clflushopt or no clwb"
    machine = MACHINES[name]
    tools = [machine.compiler[0], *machine.emulator[:1]]
    lacking = [tool for tool in tools if shutil.which(tool) is None]
    if name != MACHINE and not any(map(Path.exists, CROSS_LIBRARIES)):
        lacking.append(f"a C library for {name}")
    return f"needs {', '.join(lacking)} (scripts/dev/setup-aarch64)" if lacking else ""


def with_traces(text: str) -> str:
    """Return C in which each instruction is preceded by a call that prints it."""

    def call(found: re.Match[str]) -> str:
        address = ADDRESS.search(found[2])
        place = next(filter(None, address.groups())) if address else "0"
        if found[1].startswith(".byte") or not found[1]:
            return found[0]
        instruction = re.split(",? %", found[1])[0]
        return f'traced("{instruction}", (const volatile void *)({place})); {found[0]}'

    text = ASSEMBLY.sub(call, text)
    return STREAMED.sub(r'traced("movntdq", \1); \g<0>', text)


def build(name: str, folder: Path, change: Mutant | None) -> Path:
    """Compile ``traced.c`` for that architecture, with one change of the sources."""
    for part in ("api", "base", "format", "coherence"):
        shutil.copytree(CSRC / part, folder / part)
    if change is not None:
        file, old, new = change
        path = folder / "coherence" / file
        assert old in path.read_text(), f"{file} has no {old!r}: adapt the mutant"
        path.write_text(path.read_text().replace(old, new, 1))
    for header in ("x86.h", "aarch64.h"):
        path = folder / "coherence" / header
        path.write_text(with_traces(path.read_text()))
    program = folder / "traced"
    flags = ["-std=gnu11", "-O1", "-w", "-DBL_FORMAT_HASH=0ull", f"-I{folder}"]
    command = [*MACHINES[name].compiler, *flags, str(HERE / "traced.c"), "-o", str(program)]
    subprocess.run(command, check=True)
    return program


def run(name: str, program: Path) -> dict[str, str]:
    command = [*MACHINES[name].emulator, str(program)]
    output = subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
    parts = (line.partition(":") for line in output.splitlines() if line)
    return {scene: " ".join(instructions.split()) for scene, _, instructions in parts}


@pytest.mark.parametrize("name", MACHINES)
def test_verbs_execute_their_documented_instructions(name: str, tmp_path: Path) -> None:
    if reason := missing(name):
        pytest.skip(reason)
    assert run(name, build(name, tmp_path / "c", None)) == MACHINES[name].expected


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mutant"), [(name, mutant) for name in MUTANTS for mutant in MUTANTS[name]]
)
def test_mutants_of_the_instructions_are_caught(name: str, mutant: str, tmp_path: Path) -> None:
    if reason := missing(name):
        pytest.skip(reason)
    program = build(name, tmp_path / "c", MUTANTS[name][mutant])
    assert run(name, program) != MACHINES[name].expected
