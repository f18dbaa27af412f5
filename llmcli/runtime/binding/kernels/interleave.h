// The layout of weights for kernels that multiply eight rows at a time: their blocks are interleaved, four bytes of each
// row after another, so that a 32-byte vector holds four columns (or eight, as nibbles) of eight rows. A block of eight
// rows has as many bytes as their blocks had.
//
// What comes first in a block are the scales of the eight rows (float16), then those of the minima; scales of six bits
// are unpacked, ordered as the kernels read them, and packed again.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define BLOCK_ROWS 8

typedef const uint8_t * const Rows[BLOCK_ROWS];  // the addresses of a block in eight rows

#if defined(__AVX2__)
// 32 bytes of each row, four at a time: a transposed matrix of 8 x 8 numbers
static inline void transpose8(uint8_t * out, Rows rows, int at) {
    __m256i row[8], pair[8], four[8];
    for (int r = 0; r < 8; r++) row[r] = _mm256_loadu_si256((const __m256i *)(rows[r] + at));
    for (int r = 0; r < 8; r += 2) {
        pair[r] = _mm256_unpacklo_epi32(row[r], row[r + 1]);
        pair[r + 1] = _mm256_unpackhi_epi32(row[r], row[r + 1]);
    }
    for (int r = 0; r < 8; r += 4)
        for (int i = 0; i < 2; i++) {
            four[r + 2 * i] = _mm256_unpacklo_epi64(pair[r + i], pair[r + 2 + i]);
            four[r + 2 * i + 1] = _mm256_unpackhi_epi64(pair[r + i], pair[r + 2 + i]);
        }
    for (int c = 0; c < 4; c++) {
        const __m256i first = _mm256_permute2x128_si256(four[c], four[4 + c], 0x20);
        const __m256i second = _mm256_permute2x128_si256(four[c], four[4 + c], 0x31);
        _mm256_storeu_si256((__m256i *)(out + 32 * c), first);
        _mm256_storeu_si256((__m256i *)(out + 128 + 32 * c), second);
    }
}
#endif

// `count` bytes of each row, four at a time
static inline uint8_t * interleave4(uint8_t * out, Rows rows, int at, int count) {
#if defined(__AVX2__)
    for (; count >= 32; at += 32, count -= 32, out += 256) transpose8(out, rows, at);
#endif
    for (int i = 0; i < count; i += 4)
        for (int r = 0; r < BLOCK_ROWS; r++, out += 4) memcpy(out, rows[r] + at + i, 4);
    return out;
}
// `count` numbers of two bytes of each row, each number of all rows together; also pairs of bytes
static inline uint8_t * interleave2(uint8_t * out, Rows rows, int at, int count) {
    for (int i = 0; i < count; i++)
        for (int r = 0; r < BLOCK_ROWS; r++, out += 2) memcpy(out, rows[r] + at + 2 * i, 2);
    return out;
}
// Of 32 bits of each row, bit 4v + c becomes bit v of byte c.
static inline uint8_t * interleave_bits(uint8_t * out, Rows rows, int at) {
    for (int r = 0; r < BLOCK_ROWS; r++) {
        uint32_t bits;
        memcpy(&bits, rows[r] + at, 4);
        for (int c = 0; c < 4; c++) {
            uint32_t one = (bits >> c) & 0x11111111;
            one = (one | one >> 3) & 0x03030303;
            one = (one | one >> 6) & 0x000f000f;
            *out++ = (uint8_t)(one | one >> 12);
        }
    }
    return out;
}
// Packs `count` numbers of six bits: their lower four bits as nibbles, then their upper two bits.
static inline uint8_t * pack_six(uint8_t * out, const uint8_t * numbers, int count) {
    const int half = count / 2, quarter = count / 4;
    for (int i = 0; i < half; i++) *out++ = (uint8_t)((numbers[i] & 15) | numbers[half + i] << 4);
    for (int i = 0; i < quarter; i++) {
        uint8_t upper = 0;
        for (int part = 0; part < 4; part++) upper |= (uint8_t)((numbers[part * quarter + i] >> 4) << 2 * part);
        *out++ = upper;
    }
    return out;
}

// The eight scales and eight minima of a block of Q4_K or Q5_K: scales by group, then minima by pairs of groups.
static inline uint8_t * interleave_scales_and_minima(uint8_t * out, Rows rows) {
    uint8_t numbers[128];
    for (int r = 0; r < BLOCK_ROWS; r++) {
        const uint8_t * from = rows[r] + 4;
        for (int s = 0; s < 8; s++) {
            const uint8_t scale = s < 4 ? from[s] & 63 : (uint8_t)((from[s + 4] & 15) | (from[s - 4] >> 6) << 4);
            const uint8_t least = s < 4 ? from[s + 4] & 63 : (uint8_t)(from[s + 4] >> 4 | (from[s] >> 6) << 4);
            numbers[8 * s + r] = scale;
            numbers[64 + 16 * (s / 2) + 2 * r + s % 2] = least;
        }
    }
    return pack_six(out, numbers, 128);
}
// The 16 scales of a block of Q3_K, by pairs of groups.
static inline uint8_t * interleave_q3_K_scales(uint8_t * out, Rows rows) {
    uint8_t numbers[128];
    for (int r = 0; r < BLOCK_ROWS; r++) {
        const uint8_t * from = rows[r] + 96;
        for (int g = 0; g < 16; g++) {
            const uint8_t lower = g < 8 ? from[g] & 15 : from[g - 8] >> 4;
            numbers[16 * (g / 2) + 2 * r + g % 2] = (uint8_t)(lower | ((from[8 + g % 4] >> 2 * (g / 4)) & 3) << 4);
        }
    }
    return pack_six(out, numbers, 128);
}
// The eight scales of a block of IQ4_XS, by group.
static inline uint8_t * interleave_iq4_xs_scales(uint8_t * out, Rows rows) {
    uint8_t numbers[64];
    for (int r = 0; r < BLOCK_ROWS; r++)
        for (int s = 0; s < 8; s++) {
            const uint8_t lower = (rows[r][4 + s / 2] >> 4 * (s % 2)) & 15;
            numbers[8 * s + r] = (uint8_t)(lower | ((rows[r][2 + s / 4] >> 2 * (s % 4)) & 3) << 4);
        }
    return pack_six(out, numbers, 64);
}

static inline void interleave_q4_0(uint8_t * out, Rows rows) {
    interleave4(interleave2(out, rows, 0, 1), rows, 2, 16);
}
static inline void interleave_q4_1(uint8_t * out, Rows rows) {
    interleave4(interleave2(out, rows, 0, 2), rows, 4, 16);
}
static inline void interleave_q5_0(uint8_t * out, Rows rows) {
    interleave4(interleave_bits(interleave2(out, rows, 0, 1), rows, 2), rows, 6, 16);
}
static inline void interleave_q5_1(uint8_t * out, Rows rows) {
    interleave4(interleave_bits(interleave2(out, rows, 0, 2), rows, 4), rows, 8, 16);
}
static inline void interleave_q8_0(uint8_t * out, Rows rows) {
    interleave4(interleave2(out, rows, 0, 1), rows, 2, 32);
}
static inline void interleave_iq4_nl(uint8_t * out, Rows rows) { interleave_q4_0(out, rows); }
static inline void interleave_mxfp4(uint8_t * out, Rows rows) {
    for (int r = 0; r < BLOCK_ROWS; r++) *out++ = rows[r][0];
    interleave4(out, rows, 1, 16);
}
static inline void interleave_q2_K(uint8_t * out, Rows rows) {
    interleave4(interleave2(interleave2(out, rows, 80, 2), rows, 0, 8), rows, 16, 64);
}
static inline void interleave_q3_K(uint8_t * out, Rows rows) {
    out = interleave_q3_K_scales(interleave2(out, rows, 108, 1), rows);
    interleave4(interleave4(out, rows, 0, 32), rows, 32, 64);
}
static inline void interleave_q4_K(uint8_t * out, Rows rows) {
    interleave4(interleave_scales_and_minima(interleave2(out, rows, 0, 2), rows), rows, 16, 128);
}
static inline void interleave_q5_K(uint8_t * out, Rows rows) {
    interleave4(interleave_scales_and_minima(interleave2(out, rows, 0, 2), rows), rows, 16, 160);
}
static inline void interleave_q6_K(uint8_t * out, Rows rows) {
    out = interleave2(interleave2(out, rows, 208, 1), rows, 192, 8);
    interleave4(interleave4(out, rows, 128, 64), rows, 0, 128);
}
static inline void interleave_iq4_xs(uint8_t * out, Rows rows) {
    interleave4(interleave_iq4_xs_scales(interleave2(out, rows, 0, 1), rows), rows, 8, 128);
}
