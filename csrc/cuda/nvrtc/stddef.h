/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What the shared headers need of <stddef.h>, for NVRTC, which brings no system headers.
 */
#ifndef BL_NVRTC_STDDEF_H
#define BL_NVRTC_STDDEF_H

typedef unsigned long size_t;

#endif
