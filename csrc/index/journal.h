/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * A ring in DRAM that reports stored and removed named blocks to another thread of the server's
 * process.
 */
#ifndef BL_INDEX_JOURNAL_H
#define BL_INDEX_JOURNAL_H

#include "index/state.h"

/* Record that a block was committed with a name, or that a named block was removed. */
void bl_journal_stored(bl_index *index, uint32_t number, const bl_name *name);
void bl_journal_removed(bl_index *index, uint32_t number);
void bl_journal_destroy(bl_index *index);

#endif
