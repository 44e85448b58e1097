/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The features of this CPU. They are read once, when the library is loaded, because cpuid traps
 * under a hypervisor. A feature can be disabled (by tests and BELUGA_ISA) but not added. The
 * simulator's CPU has none, so that its runs are equal on all machines.
 */
#include "coherence/cpu_isa.h"

#include "api/coherence.h"

static struct {
    uint32_t found;
    uint32_t allowed;
} bl_cpu = {0, ~0u};

#ifndef BL_SIM
__attribute__((constructor)) static void bl_cpu_find(void) { bl_cpu.found = bl_cpu_read(); }
#endif

uint32_t bl_cpu_features(void) { return bl_cpu.found & bl_cpu.allowed; }

void bl_cpu_limit(uint32_t mask) { bl_cpu.allowed = mask; }
