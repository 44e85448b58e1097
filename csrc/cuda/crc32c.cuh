/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * Computes CRC-32C with the lanes of a group, as arithmetic on polynomials mod P. They are
 * reflected: x^0 is the highest bit. A message M has the checksum M * x^32, apart from its
 * inversions, which the CPU adds. Each lane evaluates the 32-bit parts of its words by Horner's
 * rule, with the factor x^(8 * the bytes of a word of each lane). At the end it joins its parts,
 * and multiplies by the power of the bytes that follow its last word in the span. The lanes'
 * results are xored, and one lane multiplies by the power of the bytes that follow the span in the
 * chunk.
 *
 * Tables, in this order (made by transfer/spans.c): 4 x 256 products of byte k with the factor
 * of Horner's rule, for words of 16 bytes; 4 x 256 products with x^32; 32 powers
 * x^(32 + 8 * 16 * n); 32 powers x^(8 * 2^n).
 */
#ifndef BL_CUDA_CRC32C_CUH
#define BL_CUDA_CRC32C_CUH

enum bl_crc_table {
    BL_CRC_STEP = 0,
    BL_CRC_PART = 4 * 256,
    BL_CRC_WORDS = 2 * 4 * 256,
    BL_CRC_BYTES = BL_CRC_WORDS + 32,
    BL_TABLE_WORDS = BL_CRC_BYTES + 32
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

/* Return the product of value and the factor that TABLE is for. */
template <int TABLE> BL_DEVICE uint32_t bl_crc_times(const uint32_t *tables, uint32_t value)
{
    const uint32_t *table = tables + TABLE;
    return table[value & 0xff] ^ table[256 + ((value >> 8) & 0xff)] ^
           table[512 + ((value >> 16) & 0xff)] ^ table[768 + (value >> 24)];
}

/* Return the factor of one step of Horner's rule; 0 where a table has it. */
template <int LANES, int WIDTH> BL_DEVICE uint32_t bl_crc_stride(const uint32_t *tables)
{
    return WIDTH == 16 ? 0 : bl_crc_power(tables, LANES * WIDTH);
}

/* Take one step of Horner's rule: multiply the sum by the factor, and add a word. */
template <int WIDTH>
BL_DEVICE void bl_crc_step(const uint32_t *tables, uint32_t stride, bl_word<WIDTH> *sum,
                           bl_word<WIDTH> word)
{
#pragma unroll
    for (int i = 0; i < (WIDTH + 3) / 4; i++) {
        uint32_t moved = WIDTH == 16 ? bl_crc_times<BL_CRC_STEP>(tables, sum->part[i])
                                     : bl_crc_multiply(sum->part[i], stride);
        sum->part[i] = moved ^ word.part[i];
    }
}

/* Return a lane's part of the span's checksum. */
template <int LANES, int WIDTH>
BL_DEVICE uint32_t bl_crc_end(const uint32_t *tables, const bl_word<WIDTH> &sum, uint32_t length,
                              uint32_t lane)
{
    uint32_t count = length / WIDTH, ragged = length - count * WIDTH;
    if (count <= lane)
        return 0;
    uint32_t value = sum.part[0], after = (count - 1 - lane) % LANES;
#pragma unroll
    for (int i = 1; i < WIDTH / 4; i++)
        value = bl_crc_times<BL_CRC_PART>(tables, value) ^ sum.part[i];
    uint32_t power = WIDTH == 16 ? tables[BL_CRC_WORDS + after]
                                 : bl_crc_power(tables, after * WIDTH + (WIDTH < 4 ? WIDTH : 4));
    if (ragged > 0)
        power = bl_crc_multiply(power, bl_crc_power(tables, ragged));
    return bl_crc_multiply(value, power);
}

#endif
