/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The policies of index/evict.h.
 */
#ifndef BL_EVICT_POLICY_H
#define BL_EVICT_POLICY_H

enum bl_evict_policy {
    BL_EVICT_LRU,       /* least recently used */
    BL_EVICT_S3FIFO     /* index/s3fifo.h: blocks without a hit pass through a small queue */
};

#endif
