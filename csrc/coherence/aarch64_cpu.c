/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The features of an aarch64 CPU, from the hardware capabilities that the kernel passes to each
 * process.
 */
#ifdef __aarch64__

#include <sys/auxv.h>

#include "api/coherence.h"
#include "coherence/cpu_isa.h"

uint32_t bl_cpu_read(void)
{
    uint32_t found = BL_CPU_NEON; /* every aarch64 CPU that runs Linux has it */
    if (getauxval(AT_HWCAP) & HWCAP_CRC32)
        found |= BL_CPU_CRC32;
    return found;
}

#endif
