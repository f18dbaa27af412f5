// Products of eight rows of weights with 1 to 8 rows of rounded inputs (activations.h), for AVX2.
//
// The weights are interleaved (interleave.h): a vector has four columns of eight rows, so that each 32-bit lane sums up
// one row, and the inputs of these columns are broadcast. A group of weights is decoded to unsigned bytes once and
// multiplied with every row of inputs. A row of inputs is summed in the same order however many rows there are, so its
// results have the same bits.
#pragma once
#include <immintrin.h>
#include <stdint.h>
#include <string.h>

#include "activations.h"

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL8 _Pragma("clang loop unroll(full)")
#else
#define UNROLL8 _Pragma("GCC unroll 8")
#endif
#define EACH_ROW UNROLL8 for (int r = 0; r < N; r++)
#define KERNEL(NAME)                                                                                                   \
    INLINE void NAME(                                                                                                  \
        const uint8_t * at, const struct activations * in, int64_t columns, const int N, float * out, int64_t stride)

INLINE __m256i load(const void * at) { return _mm256_loadu_si256((const __m256i *)at); }
INLINE __m256 halves_at(const void * at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at)); }
INLINE __m256i four_columns(const int8_t * at) {
    int32_t columns;
    memcpy(&columns, at, 4);
    return _mm256_set1_epi32(columns);
}
INLINE __m256i masked(__m256i value, int bits) { return _mm256_and_si256(value, _mm256_set1_epi8((char)bits)); }
// Moves bits of each byte: `from` > 0 to the right, < 0 to the left; `bits` are those wanted.
INLINE __m256i moved(__m256i value, const int from, const int bits) {
    return masked(
        from > 0 ? _mm256_srli_epi16(value, from) : from < 0 ? _mm256_slli_epi16(value, -from) : value, bits);
}

// Sums of the products of `count` vectors of unsigned weights with inputs, times `scale`. A sum of `most` products of
// pairs fits into 16 bits.
INLINE __m256i dot_unsigned(
    const __m256i * weights, const int count, const int most, const int8_t * inputs, __m256i scale
) {
    __m256i sum = _mm256_setzero_si256();
    UNROLL8 for (int first = 0; first < count; first += most) {
        __m256i pairs = _mm256_maddubs_epi16(weights[first], four_columns(inputs + 4 * first));
        UNROLL8 for (int v = first + 1; v < first + most; v++)
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[v], four_columns(inputs + 4 * v)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scale));
    }
    return sum;
}
// The same for signed weights, whose products fill 16 bits.
INLINE __m256i dot_signed(const __m256i * weights, const int count, const int8_t * inputs, __m256i scale) {
    __m256i sum = _mm256_setzero_si256();
    UNROLL8 for (int v = 0; v < count; v++) {
        const __m256i pairs = _mm256_maddubs_epi16(
            _mm256_abs_epi8(weights[v]), _mm256_sign_epi8(four_columns(inputs + 4 * v), weights[v]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scale));
    }
    return sum;
}

INLINE void store(float * out, int64_t stride, const __m256 * sums, const int N) {
    EACH_ROW _mm256_storeu_ps(out + r * stride, sums[r]);
}

// ---- legacy types: blocks of 32 weights

INLINE void read_nibbles(const uint8_t * at, __m256i * weights) {
    UNROLL8 for (int i = 0; i < 4; i++) {
        const __m256i two = load(at + 32 * i);
        weights[i] = masked(two, 15);
        weights[4 + i] = moved(two, 4, 15);
    }
}
INLINE void read_fifth_bits(const uint8_t * at, __m256i * weights) {
    const __m256i bits = load(at);
    UNROLL8 for (int v = 0; v < 8; v++) weights[v] = _mm256_or_si256(weights[v], moved(bits, v - 4, 16));
}

// READ fills `weights` with unsigned numbers, of which MOST products fit; OFFSET is subtracted, or, if it is 0, the
// minima at byte 16 are added.
#define UNSIGNED_32(NAME, BYTES, MOST, OFFSET, READ)                                                                   \
    KERNEL(NAME) {                                                                                                     \
        __m256 sums[8];                                                                                                \
        EACH_ROW sums[r] = _mm256_setzero_ps();                                                                        \
        for (int64_t b = 0; b < columns / 32; b++, at += BYTES) {                                                      \
            __m256i weights[8];                                                                                        \
            READ;                                                                                                      \
            const __m256 d = halves_at(at);                                                                            \
            EACH_ROW {                                                                                                 \
                const __m256i dots =                                                                                   \
                    dot_unsigned(weights, 8, MOST, in[r].values + 32 * b, _mm256_set1_epi16(1));                       \
                const __m256 sum = _mm256_broadcast_ss(in[r].sums + b);                                                \
                __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(dots), _mm256_broadcast_ss(in[r].scales + b));        \
                if (OFFSET) scaled = _mm256_fnmadd_ps(_mm256_set1_ps(OFFSET), sum, scaled);                            \
                sums[r] = _mm256_fmadd_ps(d, scaled, sums[r]);                                                         \
                if (!OFFSET) sums[r] = _mm256_fmadd_ps(halves_at(at + 16), sum, sums[r]);                              \
            }                                                                                                          \
        }                                                                                                              \
        store(out, stride, sums, N);                                                                                   \
    }
UNSIGNED_32(x8_q4_0, 144, 8, 8, read_nibbles(at + 16, weights))
UNSIGNED_32(x8_q4_1, 160, 8, 0, read_nibbles(at + 32, weights))
UNSIGNED_32(x8_q5_0, 176, 4, 16, (read_nibbles(at + 48, weights), read_fifth_bits(at + 16, weights)))
UNSIGNED_32(x8_q5_1, 192, 4, 0, (read_nibbles(at + 64, weights), read_fifth_bits(at + 32, weights)))

#define IQ4_TABLE                                                                                                      \
    _mm256_setr_epi8(                                                                                                  \
        -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, -127, -104, -83, -65, -49, -35, -22, \
        -10, 1, 13, 25, 38, 53, 69, 89, 113)
#define FP4_TABLE                                                                                                      \
    _mm256_setr_epi8(                                                                                                  \
        0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12, 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
INLINE void look_up(const uint8_t * at, __m256i table, __m256i * weights) {
    read_nibbles(at, weights);
    UNROLL8 for (int v = 0; v < 8; v++) weights[v] = _mm256_shuffle_epi8(table, weights[v]);
}
INLINE void read_bytes(const uint8_t * at, __m256i * weights) {
    UNROLL8 for (int v = 0; v < 8; v++) weights[v] = load(at + 32 * v);
}
// 2^(exponent - 128) of eight bytes
INLINE __m256 powers_at(const uint8_t * at) {
    const __m256i exponent = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponent);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(1))));
}
#define SIGNED_32(NAME, BYTES, SCALES, READ)                                                                           \
    KERNEL(NAME) {                                                                                                     \
        __m256 sums[8];                                                                                                \
        EACH_ROW sums[r] = _mm256_setzero_ps();                                                                        \
        for (int64_t b = 0; b < columns / 32; b++, at += BYTES) {                                                      \
            __m256i weights[8];                                                                                        \
            READ;                                                                                                      \
            const __m256 d = SCALES(at);                                                                               \
            EACH_ROW {                                                                                                 \
                const __m256i dots = dot_signed(weights, 8, in[r].values + 32 * b, _mm256_set1_epi16(1));              \
                const __m256 scale = _mm256_mul_ps(d, _mm256_broadcast_ss(in[r].scales + b));                          \
                sums[r] = _mm256_fmadd_ps(scale, _mm256_cvtepi32_ps(dots), sums[r]);                                   \
            }                                                                                                          \
        }                                                                                                              \
        store(out, stride, sums, N);                                                                                   \
    }
SIGNED_32(x8_q8_0, 272, halves_at, read_bytes(at + 16, weights))
SIGNED_32(x8_iq4_nl, 144, halves_at, look_up(at + 16, IQ4_TABLE, weights))
SIGNED_32(x8_mxfp4, 136, powers_at, look_up(at + 8, FP4_TABLE, weights))

// ---- k-quants: blocks of 256 weights, whose groups have integer scales

// eight unsigned bytes, each twice as a number of 16 bits
INLINE __m256i twice(const uint8_t * at) {
    const __m256i which = _mm256_setr_epi8(
        0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
    long long eight;
    memcpy(&eight, at, 8);
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), which);
}
// the even or the odd ones of 16 numbers, each twice
INLINE __m256i even_twice(__m256i pairs) {
    return _mm256_or_si256(_mm256_slli_epi32(pairs, 16), _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)));
}
INLINE __m256i odd_twice(__m256i pairs) {
    return _mm256_blend_epi16(_mm256_srli_epi32(pairs, 16), pairs, 0xaa);
}
INLINE __m256i unsigned16(const uint8_t * at) { return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at)); }
INLINE __m256i signed16(const uint8_t * at) { return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at)); }

// Unpacks 128 numbers of six bits from 96 bytes (pack_six in interleave.h).
INLINE void unpack_six(const uint8_t * at, uint8_t * out) {
    const __m256i first = load(at), second = load(at + 32), upper = load(at + 64);
    __m256i * to = (__m256i *)out;
    _mm256_store_si256(to, _mm256_or_si256(masked(first, 15), moved(upper, -4, 48)));
    _mm256_store_si256(to + 1, _mm256_or_si256(masked(second, 15), moved(upper, -2, 48)));
    _mm256_store_si256(to + 2, _mm256_or_si256(moved(first, 4, 15), moved(upper, 0, 48)));
    _mm256_store_si256(to + 3, _mm256_or_si256(moved(second, 4, 15), moved(upper, 2, 48)));
}

// Sums of the minima, or of the scales of weights with an offset, times the sums of the inputs of their groups. `pairs`
// has 16 numbers of 16 bits: those of two groups for each row.
INLINE __m256i dot_sums(__m256i pairs, const int16_t * sums) {
    int32_t two;
    memcpy(&two, sums, 4);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(two));
}

// Q4_K and Q5_K: d, minimum of d, 96 bytes of scales and minima, (fifth bits), nibbles
#define K_MINIMA(NAME, BYTES, QS, FIFTH)                                                                               \
    KERNEL(NAME) {                                                                                                     \
        __m256 sums[8];                                                                                                \
        EACH_ROW sums[r] = _mm256_setzero_ps();                                                                        \
        for (int64_t b = 0; b < columns / 256; b++, at += BYTES) {                                                     \
            uint8_t six[128] __attribute__((aligned(32)));                                                             \
            unpack_six(at + 32, six);                                                                                  \
            __m256i dots[8];                                                                                           \
            EACH_ROW {                                                                                                 \
                __m256i least = _mm256_setzero_si256();                                                                \
                UNROLL8 for (int p = 0; p < 4; p++)                                                                    \
                    least = _mm256_add_epi32(                                                                          \
                        least, dot_sums(unsigned16(six + 64 + 16 * p), in[r].sums32 + 8 * b + 2 * p));                \
                const __m256 scale = _mm256_broadcast_ss(in[r].scales + b);                                            \
                sums[r] = _mm256_fnmadd_ps(                                                                            \
                    _mm256_mul_ps(halves_at(at + 16), scale), _mm256_cvtepi32_ps(least), sums[r]);                     \
                dots[r] = _mm256_setzero_si256();                                                                      \
            }                                                                                                          \
            for (int p = 0; p < 4; p++)                                                                               \
                UNROLL8 for (int u = 0; u < 2; u++) {                                                                 \
                    __m256i weights[8];                                                                               \
                    UNROLL8 for (int i = 0; i < 8; i++) {                                                             \
                        weights[i] = moved(load(at + QS + 256 * p + 32 * i), 4 * u, 15);                              \
                        if (FIFTH) {                                                                                  \
                            const __m256i bits = _mm256_srli_epi16(load(at + 128 + 32 * i), 2 * p);                   \
                            weights[i] = _mm256_or_si256(weights[i], moved(bits, u - 4, 16));                         \
                        }                                                                                             \
                    }                                                                                                 \
                    const __m256i scale = twice(six + 16 * p + 8 * u);                                                \
                    const int64_t first = 256 * b + 64 * p + 32 * u;                                                  \
                    EACH_ROW dots[r] = _mm256_add_epi32(                                                              \
                        dots[r], dot_unsigned(weights, 8, FIFTH ? 4 : 8, in[r].values + first, scale));               \
                }                                                                                                     \
            EACH_ROW sums[r] = _mm256_fmadd_ps(                                                                        \
                _mm256_mul_ps(halves_at(at), _mm256_broadcast_ss(in[r].scales + b)), _mm256_cvtepi32_ps(dots[r]),      \
                sums[r]);                                                                                              \
        }                                                                                                              \
        store(out, stride, sums, N);                                                                                   \
    }
K_MINIMA(x8_q4_K, 1152, 128, 0)
K_MINIMA(x8_q5_K, 1408, 384, 1)

// Groups of 16 weights, which are unsigned numbers less 2^SHIFT, and of which MOST products fit. PAIRS(p): the scales
// of the groups 2p and 2p + 1. WEIGHT(p, u, i): the columns 64 p + 32 u + 4 i.
#define K_OFFSET(NAME, BYTES, PREPARE, PAIRS, WEIGHT, SHIFT, MOST)                                                     \
    KERNEL(NAME) {                                                                                                     \
        __m256 sums[8];                                                                                                \
        EACH_ROW sums[r] = _mm256_setzero_ps();                                                                        \
        for (int64_t b = 0; b < columns / 256; b++, at += BYTES) {                                                     \
            PREPARE                                                                                                    \
            __m256i dots[8];                                                                                          \
            EACH_ROW {                                                                                                \
                __m256i less = _mm256_setzero_si256();                                                                \
                UNROLL8 for (int p = 0; p < 8; p++)                                                                   \
                    less = _mm256_add_epi32(less, dot_sums(PAIRS(p), in[r].sums16 + 16 * b + 2 * p));                 \
                dots[r] = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(less, SHIFT));                   \
            }                                                                                                         \
            for (int p = 0; p < 4; p++)                                                                               \
                UNROLL8 for (int u = 0; u < 2; u++) {                                                                 \
                    __m256i weights[8];                                                                               \
                    UNROLL8 for (int i = 0; i < 8; i++) weights[i] = WEIGHT(p, u, i);                                 \
                    const __m256i pairs = PAIRS(2 * p + u), even = even_twice(pairs), odd = odd_twice(pairs);         \
                    EACH_ROW {                                                                                        \
                        const int8_t * values = in[r].values + 256 * b + 64 * p + 32 * u;                             \
                        dots[r] = _mm256_add_epi32(dots[r], dot_unsigned(weights, 4, MOST, values, even));            \
                        dots[r] = _mm256_add_epi32(dots[r], dot_unsigned(weights + 4, 4, MOST, values + 16, odd));    \
                    }                                                                                                 \
                }                                                                                                     \
            EACH_ROW sums[r] = _mm256_fmadd_ps(                                                                        \
                _mm256_mul_ps(halves_at(at), _mm256_broadcast_ss(in[r].scales + b)),                                   \
                _mm256_cvtepi32_ps(dots[r]), sums[r]);                                                                \
        }                                                                                                              \
        store(out, stride, sums, N);                                                                                   \
    }

// d, 128 bytes of scales, 512 bytes of upper bits, 1024 bytes of nibbles
#define Q6_K_PAIRS(P) signed16(at + 16 + 16 * (P))
#define Q6_K_WEIGHT(P, U, I)                                                                                          \
    _mm256_or_si256(                                                                                                  \
        masked(_mm256_srli_epi16(load(at + 656 + 512 * ((P) / 2) + 256 * (U) + 32 * (I)), 4 * ((P) % 2)), 15),        \
        moved(_mm256_srli_epi16(load(at + 144 + 256 * ((P) / 2) + 32 * (I)), 4 * ((P) % 2)), 2 * (U) - 4, 48))
K_OFFSET(x8_q6_K, 1680, , Q6_K_PAIRS, Q6_K_WEIGHT, 5, 2)

// d, 96 bytes of scales, 256 bytes of third bits, 512 bytes of two bits
#define Q3_K_PREPARE                                                                                                   \
    uint8_t six[128] __attribute__((aligned(32)));                                                                     \
    unpack_six(at + 16, six);
#define Q3_K_PAIRS(P) _mm256_sub_epi16(unsigned16(six + 16 * (P)), _mm256_set1_epi16(32))
#define Q3_K_WEIGHT(P, U, I)                                                                                          \
    _mm256_or_si256(                                                                                                  \
        moved(_mm256_srli_epi16(load(at + 368 + 256 * ((P) / 2) + 32 * (I)), 4 * ((P) % 2)), 2 * (U), 3),             \
        moved(_mm256_srli_epi16(load(at + 112 + 32 * (I)), 2 * (P)), (U) - 2, 4))
K_OFFSET(x8_q3_K, 880, Q3_K_PREPARE, Q3_K_PAIRS, Q3_K_WEIGHT, 2, 4)

// d, minimum of d, 128 bytes of scales and minima (four bits each), 512 bytes of two bits
KERNEL(x8_q2_K) {
    __m256 sums[8];
    EACH_ROW sums[r] = _mm256_setzero_ps();
    for (int64_t b = 0; b < columns / 256; b++, at += 672) {
        __m256i dots[8];
        EACH_ROW {
            __m256i least = _mm256_setzero_si256();
            UNROLL8 for (int p = 0; p < 8; p++)
                least = _mm256_add_epi32(
                    least, dot_sums(_mm256_srli_epi16(unsigned16(at + 32 + 16 * p), 4), in[r].sums16 + 16 * b + 2 * p));
            sums[r] = _mm256_fnmadd_ps(
                _mm256_mul_ps(halves_at(at + 16), _mm256_broadcast_ss(in[r].scales + b)), _mm256_cvtepi32_ps(least),
                sums[r]);
            dots[r] = _mm256_setzero_si256();
        }
        for (int s = 0; s < 8; s++) {
            __m256i weights[8];
            UNROLL8 for (int i = 0; i < 8; i++)
                weights[i] = masked(_mm256_srli_epi16(load(at + 160 + 256 * (s / 4) + 32 * i), 2 * (s % 4)), 3);
            const __m256i pairs = _mm256_and_si256(unsigned16(at + 32 + 16 * s), _mm256_set1_epi16(15));
            const __m256i even = even_twice(pairs), odd = odd_twice(pairs);
            EACH_ROW {
                const int8_t * values = in[r].values + 256 * b + 32 * s;
                dots[r] = _mm256_add_epi32(dots[r], dot_unsigned(weights, 4, 4, values, even));
                dots[r] = _mm256_add_epi32(dots[r], dot_unsigned(weights + 4, 4, 4, values + 16, odd));
            }
        }
        EACH_ROW sums[r] = _mm256_fmadd_ps(
            _mm256_mul_ps(halves_at(at), _mm256_broadcast_ss(in[r].scales + b)), _mm256_cvtepi32_ps(dots[r]), sums[r]);
    }
    store(out, stride, sums, N);
}

// d, 48 bytes of scales, 1024 bytes of nibbles
KERNEL(x8_iq4_xs) {
    __m256 sums[8];
    EACH_ROW sums[r] = _mm256_setzero_ps();
    const __m256i table = IQ4_TABLE;
    for (int64_t b = 0; b < columns / 256; b++, at += 1088) {
        uint8_t six[64] __attribute__((aligned(32)));
        const __m256i lower = load(at + 16);
        const __m256i upper = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(at + 48)));
        const __m256i shifted = _mm256_blend_epi32(upper, _mm256_srli_epi16(upper, 2), 0xf0);
        _mm256_store_si256((__m256i *)six, _mm256_or_si256(masked(lower, 15), moved(shifted, -4, 48)));
        _mm256_store_si256((__m256i *)(six + 32), _mm256_or_si256(moved(lower, 4, 15), moved(shifted, 0, 48)));
        __m256i dots[8];
        EACH_ROW dots[r] = _mm256_setzero_si256();
        for (int s = 0; s < 8; s++) {
            __m256i weights[8];
            look_up(at + 64 + 128 * s, table, weights);
            const __m256i scale = _mm256_sub_epi16(twice(six + 8 * s), _mm256_set1_epi16(32));
            EACH_ROW dots[r] =
                _mm256_add_epi32(dots[r], dot_signed(weights, 8, in[r].values + 256 * b + 32 * s, scale));
        }
        EACH_ROW sums[r] = _mm256_fmadd_ps(
            _mm256_mul_ps(halves_at(at), _mm256_broadcast_ss(in[r].scales + b)), _mm256_cvtepi32_ps(dots[r]), sums[r]);
    }
    store(out, stride, sums, N);
}

// ---- inputs

INLINE __m256 most_of(__m256 one, __m256 other) {
    return _mm256_max_ps(one, _mm256_andnot_ps(_mm256_set1_ps(-0.f), other));
}
INLINE float greatest(__m256 all) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
// Rounds 32 inputs times `factor` to bytes.
INLINE __m256i round32(const float * from, float factor) {
    __m256i four[4];
    for (int i = 0; i < 4; i++)
        four[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8 * i), _mm256_set1_ps(factor)));
    const __m256i first = _mm256_packs_epi32(four[0], four[1]), second = _mm256_packs_epi32(four[2], four[3]);
    return _mm256_permutevar8x32_epi32(
        _mm256_packs_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
// sums of each 16 of 32 bytes, as numbers of 32 bits in lanes 0 and 4
INLINE int sum_of_half(__m128i bytes) {
    const __m128i twice = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return _mm_cvtsi128_si32(twice) + _mm_extract_epi16(twice, 4) - 16 * 128;
}

static void round_row_32(const float * from, int64_t columns, uint8_t * memory) {
    const struct activations row = activations_at(ROUND_32, memory, columns);
    for (int64_t b = 0; b < columns / 32; b++, from += 32) {
        __m256 most = _mm256_setzero_ps();
        for (int i = 0; i < 4; i++) most = most_of(most, _mm256_loadu_ps(from + 8 * i));
        const float largest = greatest(most);
        const float d = _cvtsh_ss(_cvtss_sh(largest / 127.f, 0));
        const __m256i values = round32(from, largest != 0.f ? 127.f / largest : 0.f);
        _mm256_storeu_si256((__m256i *)(row.values + 32 * b), values);
        ((float *)row.scales)[b] = d;
        ((float *)row.sums)[b] =
            d * (float)(sum_of_half(_mm256_castsi256_si128(values)) + sum_of_half(_mm256_extracti128_si256(values, 1)));
    }
}
static void round_row_256(const float * from, int64_t columns, uint8_t * memory) {
    const struct activations row = activations_at(ROUND_256, memory, columns);
    for (int64_t b = 0; b < columns / 256; b++, from += 256) {
        __m256 most = _mm256_setzero_ps();
        for (int i = 0; i < 32; i++) most = most_of(most, _mm256_loadu_ps(from + 8 * i));
        const float largest = greatest(most), factor = largest != 0.f ? 127.f / largest : 0.f;
        for (int i = 0; i < 8; i++) {
            const __m256i values = round32(from + 32 * i, factor);
            _mm256_storeu_si256((__m256i *)(row.values + 256 * b + 32 * i), values);
            const int first = sum_of_half(_mm256_castsi256_si128(values));
            const int second = sum_of_half(_mm256_extracti128_si256(values, 1));
            ((int16_t *)row.sums16)[16 * b + 2 * i] = (int16_t)first;
            ((int16_t *)row.sums16)[16 * b + 2 * i + 1] = (int16_t)second;
            ((int16_t *)row.sums32)[8 * b + i] = (int16_t)(first + second);
        }
        ((float *)row.scales)[b] = largest != 0.f ? 1.f / factor : 0.f;
    }
}
