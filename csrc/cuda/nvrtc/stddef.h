/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The subset of <stddef.h> that the shared headers need, for NVRTC, which has no system headers.
 */
#ifndef BL_NVRTC_STDDEF_H
#define BL_NVRTC_STDDEF_H

typedef unsigned long size_t;

#endif
