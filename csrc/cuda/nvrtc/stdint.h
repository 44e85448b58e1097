/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The integers of <stdint.h> for NVRTC, which has no system headers.
 */
#ifndef BL_NVRTC_STDINT_H
#define BL_NVRTC_STDINT_H

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long uint64_t;

#endif
