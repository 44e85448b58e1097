# SPDX-License-Identifier: Apache-2.0
# Copyright The Beluga Authors
"""``csrc/format/dsa.h`` equals the kernel's ``<linux/idxd.h>``, byte for byte."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from beluga import _build, _core

GCC, OBJDUMP = shutil.which("gcc") or "", shutil.which("objdump") or ""
HEADER = Path("/usr/include/linux/idxd.h")

# Ours, theirs.
FIELDS = {
    ("bl_dsa_descriptor", "struct dsa_hw_desc"): {
        "record": "completion_addr",
        "source": "src_addr",
        "pattern": "pattern",
        "list": "desc_list_addr",
        "target": "dst_addr",
        "source2": "src2_addr",
        "size": "xfer_size",
        "count": "desc_count",
        "interrupt": "int_handle",
        "reserved": "rsvd1",
        "expected": "expected_res",
        "target2": "dest2",
        "seed": "crc_seed",
        "seed_reserved": "crc_rsvd",
        "seed_address": "seed_addr",
        "specific": "op_specific",
    },
    ("bl_dsa_record", "struct dsa_completion_record"): {
        "status": "status",
        "result": "result",
        "reserved": "rsvd",
        "completed": "bytes_completed",
        "fault_address": "fault_addr",
        "crc": "crc_val",
        "specific": "op_specific",
    },
}

CONSTANTS = {
    "BL_DSA_NOOP": "DSA_OPCODE_NOOP",
    "BL_DSA_BATCH": "DSA_OPCODE_BATCH",
    "BL_DSA_DRAIN": "DSA_OPCODE_DRAIN",
    "BL_DSA_MEMMOVE": "DSA_OPCODE_MEMMOVE",
    "BL_DSA_FILL": "DSA_OPCODE_MEMFILL",
    "BL_DSA_COMPARE": "DSA_OPCODE_COMPARE",
    "BL_DSA_DUALCAST": "DSA_OPCODE_DUALCAST",
    "BL_DSA_CRCGEN": "DSA_OPCODE_CRCGEN",
    "BL_DSA_COPY_CRC": "DSA_OPCODE_COPY_CRC",
    "BL_DSA_CFLUSH": "DSA_OPCODE_CFLUSH",
    **{
        f"BL_DSA_{name}": f"IDXD_OP_FLAG_{name}"
        for name in ("FENCE", "BOF", "CRAV", "RCR", "CR", "CC", "STORD", "DRDBK", "DSTS")
    },
    "BL_DSA_NONE": "DSA_COMP_NONE",
    "BL_DSA_SUCCESS": "DSA_COMP_SUCCESS",
    "BL_DSA_SUCCESS_PRED": "DSA_COMP_SUCCESS_PRED",
    "BL_DSA_PAGE_FAULT": "DSA_COMP_PAGE_FAULT_NOBOF",
    **{
        f"BL_DSA_{name}": f"DSA_COMP_{name}"
        for name in (
            *("BATCH_FAIL", "BATCH_PAGE_FAULT", "BAD_OPCODE", "INVALID_FLAGS", "NOZERO_RESERVE"),
            *("XFER_ERANGE", "DESC_CNT_ERANGE", "OVERLAP_BUFFERS", "DCAST_ERR", "DESCLIST_ALIGN"),
            *("CRA_ALIGN", "ADDR_ALIGN", "HW_ERR1", "STATUS_MASK", "STATUS_WRITE"),
        )
    },
}
OURS_ALONE = {"BL_DSA_SEED_READ"}  # the header has the bit for another device only

PROGRAM = """
#include <stddef.h>
#include <stdio.h>
#include <string.h>
#include <linux/idxd.h>
#include "format/dsa.h"
#define SAME(what, ours, theirs) \\
    if ((ours) != (theirs)) printf("%s: %ld, not %ld\\n", what, (long)(ours), (long)(theirs))
int main(void)
{
@CHECKS@
    bl_dsa_descriptor ours = {.pasid_privilege = 0x12345 | 1u << 31,
                              .flags_opcode = 0xabcdef | 0x11u << 24};
    struct dsa_hw_desc theirs;
    memcpy(&theirs, &ours, sizeof theirs);
    SAME("pasid", 0x12345, theirs.pasid);
    SAME("priv", 1, theirs.priv);
    SAME("flags", 0xabcdef, theirs.flags);
    SAME("opcode", 0x11, theirs.opcode);
    bl_dsa_record record = {.invalid_flags = 0xabcdef};
    struct dsa_completion_record completion;
    memcpy(&completion, &record, sizeof completion);
    SAME("invalid_flags", 0xabcdef, completion.invalid_flags);
    return 0;
}
"""


def checks() -> str:
    lines = []
    for (ours, theirs), fields in FIELDS.items():
        lines.append(f'SAME("{ours}", sizeof({ours}), sizeof({theirs}));')
        for mine, its in fields.items():
            for what in (
                "offsetof({0}, {1})",
                "sizeof((({0} *)0)->{1})",
            ):
                pair = what.format(ours, mine), what.format(theirs, its)
                lines.append(f'SAME("{mine}", {pair[0]}, {pair[1]});')
    lines += [f'SAME("{ours}", {ours}, {theirs});' for ours, theirs in CONSTANTS.items()]
    return "\n".join(lines)


def test_every_constant_is_compared() -> None:
    kinds = ("bl_dsa_opcode", "bl_dsa_flag", "bl_dsa_status")
    names = {name for kind in kinds for name in _core.ffi.typeof(f"enum {kind}").relements}
    assert names == CONSTANTS.keys() | OURS_ALONE


def test_every_field_is_compared() -> None:
    for (ours, _), fields in FIELDS.items():
        names = {name for name, _kind in flat(_core.ffi.typeof(ours))}
        tested_apart = {"pasid_privilege", "flags_opcode", "invalid_flags"}
        assert names - tested_apart == fields.keys() - tested_apart


def flat(kind: object) -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, field in kind.fields:  # type: ignore[attr-defined]
        found += [(name, field)] if name else flat(field.type)
    return found


@pytest.mark.skipif(not HEADER.exists(), reason=f"needs {HEADER} (linux-libc-dev)")
@pytest.mark.skipif(not GCC, reason="needs gcc")
@pytest.mark.parametrize("planted", [False, True], ids=["as-it-is", "wrong"])
def test_layout_and_constants_are_the_kernels(tmp_path: Path, *, planted: bool) -> None:
    source, program = tmp_path / "compare.c", tmp_path / "compare"
    source.write_text(PROGRAM.replace("@CHECKS@", checks()))
    (tmp_path / "format").mkdir()
    shutil.copy(_build.CSRC / "format/dsa.h", tmp_path / "format")
    if planted:
        copy = tmp_path / "format/dsa.h"
        copy.write_text(copy.read_text().replace("BL_DSA_CC = 0x0100", "BL_DSA_CC = 0x0200"))
    command = [GCC, "-Wall", f"-I{tmp_path}", str(source), "-o", str(program)]
    subprocess.run(command, check=True, env={**os.environ, "LC_ALL": "C"})
    differences = subprocess.run([str(program)], check=True, capture_output=True, text=True).stdout
    assert differences == ("BL_DSA_CC: 512, not 256\n" if planted else "")


def test_the_instructions_match_a_disassembler(tmp_path: Path) -> None:
    """Their bytes stand in ``csrc/coherence/x86.h``, for assemblers without them."""
    if not GCC or not OBJDUMP:
        pytest.skip("needs gcc and objdump")
    source, program = tmp_path / "portal.c", tmp_path / "portal.o"
    source.write_text(
        '#define BL_FORMAT_HASH 0\n#include "coherence/coherence.h"\n'
        "int enqueue(void *p, void *d) { return bl_portal_enqueue(p, d); }\n"
        "void move(void *p, void *d) { bl_portal_move(p, d); }\n"
        "void sleep_light(uint64_t *w) { bl_monitor(w, 0, 1000); }\n"
    )
    flags = ["-std=gnu11", "-D_GNU_SOURCE", "-O2", "-w", "-c", f"-I{_build.CSRC}"]
    subprocess.run([GCC, *flags, str(source), "-o", str(program)], check=True)
    listing = subprocess.run(
        [OBJDUMP, "-d", str(program)], check=True, capture_output=True, text=True
    ).stdout
    if "(bad)" in listing:
        pytest.skip("this objdump does not know them")
    assert "enqcmd (%rdx),%rax" in listing
    assert "movdir64b (%rdx),%rax" in listing
    assert "umonitor %rax" in listing
    assert "umwait %ecx" in listing
