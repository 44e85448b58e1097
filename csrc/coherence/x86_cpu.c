/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The features of an x86-64 CPU, by cpuid.
 */
#ifdef __x86_64__

#include <cpuid.h>

#include "api/coherence.h"
#include "coherence/cpu_isa.h"

/* Return XCR0: the state that the operating system saves for each thread. */
__attribute__((target("xsave"))) static uint64_t bl_cpu_saved_state(void)
{
    return __builtin_ia32_xgetbv(0);
}

uint32_t bl_cpu_read(void)
{
    enum { STATE_AVX = 0x06, STATE_AVX512 = 0xe6 };
    uint32_t a, b, c, d, found = 0;
    uint64_t state = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
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
    return found;
}

#endif
