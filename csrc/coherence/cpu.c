/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The features of this CPU. They are read once, when the library is loaded, because the instruction
 * traps under a hypervisor. A feature may be taken away (tests, BELUGA_ISA) but never added.
 */
#include <cpuid.h>

#include "api/coherence.h"


static struct {
    uint32_t found;
    uint32_t allowed;
} bl_cpu = {0, ~0u};

/* Return XCR0: the state that the operating system saves for each thread. */
__attribute__((target("xsave"))) static uint64_t bl_cpu_saved_state(void)
{
    return __builtin_ia32_xgetbv(0);
}

__attribute__((constructor)) static void bl_cpu_find(void)
{
    enum { STATE_AVX = 0x06, STATE_AVX512 = 0xe6 };
    uint32_t a, b, c, d, found = 0;
    uint64_t state = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return;
    if (c & bit_OSXSAVE)
        state = bl_cpu_saved_state();
    if (c & bit_SSE4_2)
        found |= BL_CPU_SSE42;
    if (c & bit_PCLMUL)
        found |= BL_CPU_PCLMUL;
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        if (b & bit_CLFLUSHOPT)
            found |= BL_CPU_CLFLUSHOPT;
        if (b & bit_CLWB)
            found |= BL_CPU_CLWB;
        if ((b & bit_AVX2) && (state & STATE_AVX) == STATE_AVX)
            found |= BL_CPU_AVX2;
        if ((b & bit_AVX512F) && (state & STATE_AVX512) == STATE_AVX512)
            found |= BL_CPU_AVX512;
        if ((c & bit_VPCLMULQDQ) && (found & BL_CPU_AVX512))
            found |= BL_CPU_VPCLMUL;
        if (c & bit_MOVDIR64B)
            found |= BL_CPU_MOVDIR64B;
        if (c & bit_ENQCMD)
            found |= BL_CPU_ENQCMD;
        if (c & bit_WAITPKG)
            found |= BL_CPU_WAITPKG;
    }
    bl_cpu.found = found;
}

uint32_t bl_cpu_features(void) { return bl_cpu.found & bl_cpu.allowed; }

void bl_cpu_limit(uint32_t mask) { bl_cpu.allowed = mask; }
