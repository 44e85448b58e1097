/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Every access of a kernel to pool and engine memory, as PTX; host.cuh is the CPU counterpart.
 * Loads bypass L1 and use the read-only path, since published blocks and the sources of puts are
 * not written while a kernel runs. Stores to the pool have a streaming hint. The asm is volatile,
 * so that loads stay ahead of the stores that follow them.
 */
#ifndef BL_CUDA_PTX_CUH
#define BL_CUDA_PTX_CUH

#include "job.cuh"

#define BL_DEVICE __device__ __forceinline__

BL_DEVICE void bl_span_note(uint64_t) {} /* host.cuh records it */

/* Load a span's description, which lies in pinned memory of the host. */
BL_DEVICE bl_span bl_span_load(const bl_span *span)
{
    bl_span found;
    asm volatile("ld.global.nc.L1::no_allocate.v2.u64 {%0, %1}, [%2];"
                 : "=l"(found.pool), "=l"(found.engine)
                 : "l"(span));
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(found.length), "=r"(found.power), "=r"(found.extra), "=r"(found.chunk)
                 : "l"(&span->length));
    return found;
}

BL_DEVICE bl_word<16> bl_load(uint64_t address, bl_word<16> word)
{
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(word.part[0]), "=r"(word.part[1]), "=r"(word.part[2]), "=r"(word.part[3])
                 : "l"(address));
    return word;
}

BL_DEVICE bl_word<8> bl_load(uint64_t address, bl_word<8> word)
{
    asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
                 : "=r"(word.part[0]), "=r"(word.part[1])
                 : "l"(address));
    return word;
}

BL_DEVICE bl_word<4> bl_load(uint64_t address, bl_word<4> word)
{
    asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];"
                 : "=r"(word.part[0])
                 : "l"(address));
    return word;
}

BL_DEVICE bl_word<1> bl_load(uint64_t address, bl_word<1> word)
{
    asm volatile("ld.global.nc.L1::no_allocate.u8 %0, [%1];" : "=r"(word.part[0]) : "l"(address));
    return word;
}

/* With TO_POOL the store is streamed. */
template <bool TO_POOL> BL_DEVICE void bl_store(uint64_t address, bl_word<16> word)
{
    if (TO_POOL)
        asm volatile("st.global.cs.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address),
                     "r"(word.part[0]), "r"(word.part[1]), "r"(word.part[2]), "r"(word.part[3])
                     : "memory");
    else
        asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(address), "r"(word.part[0]),
                     "r"(word.part[1]), "r"(word.part[2]), "r"(word.part[3])
                     : "memory");
}

template <bool TO_POOL> BL_DEVICE void bl_store(uint64_t address, bl_word<8> word)
{
    asm volatile("st.global.cs.v2.u32 [%0], {%1, %2};" ::"l"(address), "r"(word.part[0]),
                 "r"(word.part[1])
                 : "memory");
}

template <bool TO_POOL> BL_DEVICE void bl_store(uint64_t address, bl_word<4> word)
{
    asm volatile("st.global.cs.u32 [%0], %1;" ::"l"(address), "r"(word.part[0]) : "memory");
}

template <bool TO_POOL> BL_DEVICE void bl_store(uint64_t address, bl_word<1> word)
{
    asm volatile("st.global.cs.u8 [%0], %1;" ::"l"(address), "r"(word.part[0]) : "memory");
}

/* Combine the parts of a group's lanes, and store the span's part of its chunk's checksum. The
 * store goes to pinned memory of the host, where it is complete when the kernel is. */
template <int LANES>
BL_DEVICE void bl_sum_put(uint32_t *sum, uint32_t value, uint32_t power, uint32_t lane,
                          uint32_t (*multiply)(uint32_t, uint32_t))
{
    uint32_t in_warp = threadIdx.x % 32;
    uint32_t mask = LANES == 32 ? 0xffffffffu : 0xffffu << (in_warp & 16);
#if __CUDA_ARCH__ >= 800
    value = __reduce_xor_sync(mask, value);
#else
    for (int step = LANES / 2; step > 0; step /= 2)
        value ^= __shfl_xor_sync(mask, value, step);
#endif
    if (lane == 0)
        *sum = multiply(value, power);
}

#endif
