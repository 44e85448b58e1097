/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Which streaming copy: the widest that the CPU has and bl_cpu_limit has left.
 *
 * The line-to-line move comes after the vector paths: it is weakly ordered like them and its one
 * gift, a line that cannot be torn, is nothing that the protocol counts on, while its load and
 * store cannot be scheduled apart. It is for a CPU without AVX2, and for who forces it.
 */
#include "copy.h"

#include "api.h"

void bl_copy_stream(void *target, const void *source, size_t size)
{
    uint32_t features = bl_cpu_features();
    if (features & BL_CPU_AVX512)
        bl_copy_avx512(target, source, size);
    else if (features & BL_CPU_AVX2)
        bl_copy_avx2(target, source, size);
    else if (features & BL_CPU_MOVDIR64B)
        bl_copy_movdir64b(target, source, size);
    else
        bl_copy_sse2(target, source, size);
}

const char *bl_copy_isa(void)
{
    uint32_t features = bl_cpu_features();
    return features & BL_CPU_AVX512      ? "avx512"
           : features & BL_CPU_AVX2      ? "avx2"
           : features & BL_CPU_MOVDIR64B ? "movdir64b"
                                         : "sse2";
}
