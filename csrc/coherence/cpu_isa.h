/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Reading the features of a CPU: one source file for each architecture.
 */
#ifndef BL_CPU_ISA_H
#define BL_CPU_ISA_H

#include <stdint.h>

/* Return the features (enum bl_cpu_feature) that this CPU has and the operating system enables. */
uint32_t bl_cpu_read(void);

#endif
