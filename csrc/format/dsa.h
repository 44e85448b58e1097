/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * The descriptor (one line) and completion record (half a line) of the Intel Data Streaming
 * Accelerator. The layout is that of the device; a test compares it with <linux/idxd.h>, whose
 * unions are less specific than the fields here.
 */
#ifndef BL_DSA_FORMAT_H
#define BL_DSA_FORMAT_H

#include <stdint.h>

enum bl_dsa_opcode {
    BL_DSA_NOOP = 0x00,
    BL_DSA_BATCH = 0x01,
    BL_DSA_DRAIN = 0x02,
    BL_DSA_MEMMOVE = 0x03,
    BL_DSA_FILL = 0x04,
    BL_DSA_COMPARE = 0x05,
    BL_DSA_DUALCAST = 0x09,
    BL_DSA_CRCGEN = 0x10,
    BL_DSA_COPY_CRC = 0x11,
    BL_DSA_CFLUSH = 0x20
};

enum bl_dsa_flag {
    BL_DSA_FENCE = 0x0001,      /* in a batch: run after all earlier descriptors, if all
                                 * succeeded */
    BL_DSA_BOF = 0x0002,        /* block on fault: wait for the page, if the queue allows it */
    BL_DSA_CRAV = 0x0004,       /* the record's address is valid */
    BL_DSA_RCR = 0x0008,        /* always write a record, not only after an error */
    BL_DSA_CR = 0x0080,         /* a comparison checks its result against the expected one */
    BL_DSA_CC = 0x0100,         /* writes go to the cache; clear: to memory. A flush with this flag
                                 * writes lines back and leaves them cached */
    BL_DSA_STORD = 0x2000,      /* writes in order */
    BL_DSA_DRDBK = 0x4000,      /* destination readback before the record is written */
    BL_DSA_DSTS = 0x8000,
    BL_DSA_SEED_READ = 0x10000  /* a CRC takes its seed from seed_address; that header lacks this
                                 * flag */
};

enum bl_dsa_status {
    BL_DSA_NONE = 0x00,         /* no result yet */
    BL_DSA_SUCCESS = 0x01,
    BL_DSA_SUCCESS_PRED = 0x02, /* success, but not with the expected result */
    BL_DSA_PAGE_FAULT = 0x03,   /* stopped after bytes_completed */
    BL_DSA_BATCH_FAIL = 0x05,   /* some descriptor did not succeed */
    BL_DSA_BATCH_PAGE_FAULT = 0x06, /* a page of the list is missing */
    BL_DSA_BAD_OPCODE = 0x10,
    BL_DSA_INVALID_FLAGS = 0x11,
    BL_DSA_NOZERO_RESERVE = 0x12,
    BL_DSA_XFER_ERANGE = 0x13,
    BL_DSA_DESC_CNT_ERANGE = 0x14,
    BL_DSA_OVERLAP_BUFFERS = 0x16,
    BL_DSA_DCAST_ERR = 0x17,
    BL_DSA_DESCLIST_ALIGN = 0x18,
    BL_DSA_CRA_ALIGN = 0x1b,
    BL_DSA_ADDR_ALIGN = 0x1c,
    BL_DSA_HW_ERR1 = 0x20,
    BL_DSA_STATUS_MASK = 0x7f,
    BL_DSA_STATUS_WRITE = 0x80  /* set with a page fault: the access was a write */
};

typedef struct bl_dsa_descriptor {
    uint32_t pasid_privilege;   /* 20 bits, 11 reserved, 1: set by the CPU or the kernel */
    uint32_t flags_opcode;      /* 24 bits, 8 bits */
    uint64_t record;            /* address: a multiple of 32 */
    union {
        uint64_t source;
        uint64_t pattern;       /* the pattern of a fill */
        uint64_t list;          /* a batch's descriptors: a multiple of 64 */
    };
    union {
        uint64_t target;
        uint64_t source2;       /* a comparison's second source */
    };
    union {
        uint32_t size;
        uint32_t count;         /* descriptors of a batch: at least 2 */
    };
    uint16_t interrupt;
    uint16_t reserved;
    union {
        uint8_t expected;       /* a comparison's expected result */
        uint64_t target2;       /* a dualcast's second target */
        struct {
            uint32_t seed;
            uint32_t seed_reserved;
            uint64_t seed_address;
        };
        uint8_t specific[24];
    };
} bl_dsa_descriptor;

typedef struct bl_dsa_record {
    uint8_t status;
    uint8_t result;             /* a comparison's result: 1: they differ */
    uint16_t reserved;
    uint32_t completed;         /* bytes; in a batch, descriptors */
    uint64_t fault_address;
    union {
        uint32_t invalid_flags; /* 24 bits */
        uint64_t crc;
        uint8_t specific[16];
    };
} bl_dsa_record;

#endif
