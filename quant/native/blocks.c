// Two conversions that are slow in numpy: F16 rows are widened to floats, and search results are
// packed into blocks. The layouts are documented in quant/formats/legacy.py and k_quants.py, whose
// pack() is the reference. Called by quant/native/ggml.py.
#include "half.h"
#include "lanes.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

// A search result (ScaleSearchResult in ggml.py): levels [blocks, values] counted from the code of
// zero, d and m [blocks], integer scales and minimums [blocks, groups].
struct search_result {
    const int16_t * levels;
    const float *d, *m;
    const int16_t *scales, *mins;
};

static inline void store_f16(uint8_t * out, float x) {
    const uint16_t stored = float_to_half(x);
    memcpy(out, &stored, sizeof(stored));
}

// Packs the lower four bits of each code, two to a byte: of each 2 * step values, l and l + step
// share a byte.
static inline void pack_four_bits(const uint8_t * codes, uint8_t * out, int count, int step) {
    for (int first = 0; first < count; first += 2 * step, out += step) {
        for (int l = 0; l < step; ++l) {
            out[l] = (codes[first + l] & 15) | codes[first + step + l] << 4;
        }
    }
}

// Packs two bits of each code, from bit `shift` on: byte l of each 32 bytes contains the values l,
// l + 32, l + 64 and l + 96.
static inline void pack_two_bits(const uint8_t * codes, uint8_t * out, int shift) {
    for (int first = 0; first < 256; first += 128, out += 32) {
        for (int l = 0; l < 32; ++l) {
            const uint8_t * c = codes + first + l;
            out[l] = (c[0] >> shift & 3) | (c[32] >> shift & 3) << 2 | (c[64] >> shift & 3) << 4 |
                     (c[96] >> shift) << 6;
        }
    }
}

// Packs bit `shift` of each code: bit j of byte l belongs to value 32 j + l.
static inline void pack_one_bit(const uint8_t * codes, uint8_t * out, int shift) {
    for (int l = 0; l < 32; ++l) {
        uint8_t bits = 0;
        for (int j = 0; j < 8; ++j) bits |= (codes[32 * j + l] >> shift & 1) << j;
        out[l] = bits;
    }
}

// Adds `zero`, the code of zero, to each level.
static inline void levels_to_codes(const int16_t * levels, uint8_t * codes, int count, int zero) {
    for (int i = 0; i < count; ++i) codes[i] = (uint8_t)(levels[i] + zero);
}

// Q4_0, Q4_1, Q5_0, Q5_1
__attribute__((always_inline)) static inline void pack_legacy(
    const struct search_result * result, uint8_t * out, int64_t blocks, const int has_minimum,
    const int has_fifth_bit) {
    for (int64_t b = 0; b < blocks; ++b) {
        uint8_t codes[32];
        const int zero = has_minimum ? 0 : has_fifth_bit ? 16 : 8;
        levels_to_codes(result->levels + 32 * b, codes, 32, zero);
        store_f16(out, result->d[b]);
        out += 2;
        if (has_minimum) {
            store_f16(out, result->m[b]);
            out += 2;
        }
        if (has_fifth_bit) {
            uint32_t bits = 0;
            for (int i = 0; i < 32; ++i) bits |= (uint32_t)(codes[i] >> 4) << i;
            memcpy(out, &bits, sizeof(bits));
            out += 4;
        }
        pack_four_bits(codes, out, 32, 16);
        out += 16;
    }
}

EXPORT void llmcli_pack_q4_0(const struct search_result * result, uint8_t * out, int64_t blocks) {
    pack_legacy(result, out, blocks, 0, 0);
}
EXPORT void llmcli_pack_q4_1(const struct search_result * result, uint8_t * out, int64_t blocks) {
    pack_legacy(result, out, blocks, 1, 0);
}
EXPORT void llmcli_pack_q5_0(const struct search_result * result, uint8_t * out, int64_t blocks) {
    pack_legacy(result, out, blocks, 0, 1);
}
EXPORT void llmcli_pack_q5_1(const struct search_result * result, uint8_t * out, int64_t blocks) {
    pack_legacy(result, out, blocks, 1, 1);
}

EXPORT void llmcli_pack_q8_0(const struct search_result * result, uint8_t * out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b, out += 34) {
        store_f16(out, result->d[b]);
        levels_to_codes(result->levels + 32 * b, out + 2, 32, 0);
    }
}

EXPORT void llmcli_pack_q2_K(const struct search_result * result, uint8_t * out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b, out += 84) {
        uint8_t codes[256];
        levels_to_codes(result->levels + 256 * b, codes, 256, 0);
        for (int j = 0; j < 16; ++j) {
            out[j] = (uint8_t)(result->scales[16 * b + j] | result->mins[16 * b + j] << 4);
        }
        pack_two_bits(codes, out + 16, 0);
        store_f16(out + 80, result->d[b]);
        store_f16(out + 82, result->m[b]);
    }
}

EXPORT void llmcli_pack_q3_K(const struct search_result * result, uint8_t * out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b, out += 110) {
        uint8_t codes[256], scales[16];
        levels_to_codes(result->levels + 256 * b, codes, 256, 4);
        levels_to_codes(result->scales + 16 * b, scales, 16, 32);
        pack_one_bit(codes, out, 2);
        pack_two_bits(codes, out + 32, 0);
        pack_four_bits(scales, out + 96, 16, 8);
        for (int j = 0; j < 4; ++j) {
            out[104 + j] = scales[j] >> 4 | scales[4 + j] >> 4 << 2 | scales[8 + j] >> 4 << 4 |
                           scales[12 + j] >> 4 << 6;
        }
        store_f16(out + 108, result->d[b]);
    }
}

// Q4_K, Q5_K
__attribute__((always_inline)) static inline void pack_q45_k(const struct search_result * result,
                                                             uint8_t * out, int64_t blocks,
                                                             const int has_fifth_bit) {
    for (int64_t b = 0; b < blocks; ++b, out += has_fifth_bit ? 176 : 144) {
        uint8_t codes[256];
        levels_to_codes(result->levels + 256 * b, codes, 256, 0);
        store_f16(out, result->d[b]);
        store_f16(out + 2, result->m[b]);
        const int16_t *scales = result->scales + 8 * b, *mins = result->mins + 8 * b;
        for (int j = 0; j < 4; ++j) {
            out[4 + j] = (uint8_t)(scales[j] | scales[4 + j] >> 4 << 6);
            out[8 + j] = (uint8_t)(mins[j] | mins[4 + j] >> 4 << 6);
            out[12 + j] = (uint8_t)((scales[4 + j] & 15) | (mins[4 + j] & 15) << 4);
        }
        if (has_fifth_bit) pack_one_bit(codes, out + 16, 4);
        pack_four_bits(codes, out + (has_fifth_bit ? 48 : 16), 256, 32);
    }
}

EXPORT void llmcli_pack_q4_K(const struct search_result * result, uint8_t * out, int64_t blocks) {
    pack_q45_k(result, out, blocks, 0);
}
EXPORT void llmcli_pack_q5_K(const struct search_result * result, uint8_t * out, int64_t blocks) {
    pack_q45_k(result, out, blocks, 1);
}

EXPORT void llmcli_pack_q6_K(const struct search_result * result, uint8_t * out, int64_t blocks) {
    for (int64_t b = 0; b < blocks; ++b, out += 210) {
        uint8_t codes[256];
        levels_to_codes(result->levels + 256 * b, codes, 256, 32);
        pack_four_bits(codes, out, 256, 64);
        pack_two_bits(codes, out + 128, 4);
        levels_to_codes(result->scales + 16 * b, out + 192, 16, 0);
        store_f16(out + 208, result->d[b]);
    }
}

// Widens F16 numbers to floats.
EXPORT void llmcli_widen(const uint16_t * x, float * out, int64_t count) {
    int64_t i = 0;
#if defined(__AVX512F__)
    for (; i + 16 <= count; i += 16) {
        _mm512_storeu_ps(out + i, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(x + i))));
    }
#elif defined(__F16C__)
    for (; i + 8 <= count; i += 8) {
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(x + i))));
    }
#elif defined(__aarch64__)
    for (; i + 4 <= count; i += 4) {
        vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(x + i))));
    }
#endif
    for (; i < count; ++i) out[i] = half_to_float(x[i]);
}
