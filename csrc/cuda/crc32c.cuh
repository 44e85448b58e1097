/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Computes CRC-32C with the lanes of a group. CRCs are linear: a lane computes the CRC of its own
 * words, shifting over the other lanes' words in between (by a table), then shifts its result over
 * the rest of the tile and of the chunk (a product mod P); the results are xored together.
 *
 * Tables, in this order (made by engines/cuda/crc.py): BL_SLICES x 256, byte b then k zeros; 4 x
 * 256, byte k of a CRC shifted over one word of each lane; 32 powers x^(8*16*n); 32 powers
 * x^(8*2^n). Polynomials are reflected: x^0 is the highest bit.
 */
#ifndef BL_CUDA_CRC32C_CUH
#define BL_CUDA_CRC32C_CUH

enum bl_crc_table {
    BL_CRC_ADVANCE = BL_SLICES * 256,
    BL_CRC_WORDS = (BL_SLICES + 4) * 256,
    BL_CRC_BYTES = BL_CRC_WORDS + 32
};

BL_DEVICE uint32_t bl_crc_multiply(uint32_t a, uint32_t b)
{
    uint32_t product = 0;
#pragma unroll 1
    for (int bit = 31; bit >= 0; bit--) {
        product ^= b & (0u - ((a >> bit) & 1));
        b = (b >> 1) ^ (0x82f63b78u & (0u - (b & 1)));
    }
    return product;
}

/* Return x^(8 * count) mod P. */
BL_DEVICE uint32_t bl_crc_power(const uint32_t *tables, uint32_t count)
{
    uint32_t power = 0x80000000u;
    for (int bit = 0; count > 0; bit++, count >>= 1)
        if (count & 1)
            power = bl_crc_multiply(power, tables[BL_CRC_BYTES + bit]);
    return power;
}

/* Return the CRC of one word. */
template <int WIDTH> BL_DEVICE uint32_t bl_crc_word(const uint32_t *tables, bl_word<WIDTH> word)
{
    uint32_t crc = 0;
#pragma unroll
    for (int byte = 0; byte < WIDTH; byte++) {
        uint32_t value = (word.part[byte / 4] >> (8 * (byte % 4))) & 0xff;
        crc ^= tables[(WIDTH - 1 - byte) * 256 + value];
    }
    return crc;
}

/* Return x^(8 * the bytes of a word of each lane), where no table has that product. */
template <int LANES, int WIDTH> BL_DEVICE uint32_t bl_crc_stride(const uint32_t *tables)
{
    return WIDTH == 16 ? 0 : bl_crc_power(tables, LANES * WIDTH);
}

/* Shift a CRC over the words of the other lanes. */
template <int WIDTH>
BL_DEVICE uint32_t bl_crc_advance(const uint32_t *tables, uint32_t crc, uint32_t stride)
{
    if (WIDTH < 16)
        return bl_crc_multiply(crc, stride);
    const uint32_t *advance = tables + BL_CRC_ADVANCE;
    return advance[crc & 0xff] ^ advance[256 + ((crc >> 8) & 0xff)] ^
           advance[512 + ((crc >> 16) & 0xff)] ^ advance[768 + (crc >> 24)];
}

#endif
