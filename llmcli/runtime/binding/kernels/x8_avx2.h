// Vectors of eight rows of weights for AVX2, and for AVX-VNNI where the processor has it.
#pragma once
#include <string.h>

#include "x86_inputs.h"

#define KERNEL_ROWS 8
#define ALIGNED __attribute__((aligned(32)))

typedef __m256i Bytes, Sums, Pairs, Table;
typedef __m256 Floats;

INLINE Bytes load(const uint8_t * at, int64_t gap) {
    (void)gap;
    return load256(at);
}
INLINE Bytes mask_bits(Bytes value, int bits) { return _mm256_and_si256(value, _mm256_set1_epi8((char)bits)); }
INLINE Bytes shift_right(Bytes value, const int count) { return _mm256_srli_epi16(value, count); }
INLINE Bytes shift_left(Bytes value, const int count) { return _mm256_slli_epi16(value, count); }
INLINE Bytes join_bits(Bytes one, Bytes other) { return _mm256_or_si256(one, other); }
INLINE Table load_table(const int8_t * values) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)values));
}
INLINE Bytes look_up_bytes(Table table, Bytes which) { return _mm256_shuffle_epi8(table, which); }

INLINE Floats zero_floats(void) { return _mm256_setzero_ps(); }
INLINE Floats broadcast_value(float value) { return _mm256_set1_ps(value); }
INLINE Floats broadcast(const float * at) { return _mm256_broadcast_ss(at); }
INLINE Floats multiply_floats(Floats one, Floats other) { return _mm256_mul_ps(one, other); }
INLINE Floats add_product(Floats one, Floats other, Floats to) { return _mm256_fmadd_ps(one, other, to); }
INLINE Floats subtract_product(Floats one, Floats other, Floats from) { return _mm256_fnmadd_ps(one, other, from); }
INLINE Floats to_floats(Sums sums) { return _mm256_cvtepi32_ps(sums); }
INLINE void store_floats(float * out, Floats values) { _mm256_storeu_ps(out, values); }
INLINE Floats load_halves(const uint8_t * at, int64_t gap) {
    (void)gap;
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)at));
}
// 2^(exponent - 128) of eight bytes
INLINE Floats load_powers(const uint8_t * at, int64_t gap) {
    (void)gap;
    const __m256i exponent = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(exponent, _mm256_set1_epi32(1)), 23);
    const __m256i small = _mm256_sllv_epi32(_mm256_set1_epi32(0x00200000), exponent);
    return _mm256_castsi256_ps(_mm256_blendv_epi8(small, normal, _mm256_cmpgt_epi32(exponent, _mm256_set1_epi32(1))));
}

INLINE Sums zero_sums(void) { return _mm256_setzero_si256(); }
INLINE Sums add(Sums one, Sums other) { return _mm256_add_epi32(one, other); }
INLINE Sums negate_shifted(Sums value, const int count) {
    return _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_slli_epi32(value, count));
}

INLINE Pairs load_unsigned_pairs(const uint8_t * at, int64_t gap) {
    (void)gap;
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)at));
}
INLINE Pairs load_signed_pairs(const uint8_t * at, int64_t gap) {
    (void)gap;
    return _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)at));
}
INLINE Pairs subtract_32(Pairs pairs) { return _mm256_sub_epi16(pairs, _mm256_set1_epi16(32)); }
INLINE Pairs take_upper_nibbles(Pairs pairs) { return _mm256_srli_epi16(pairs, 4); }
INLINE Pairs take_lower_nibbles(Pairs pairs) { return _mm256_and_si256(pairs, _mm256_set1_epi16(15)); }
// Sums of the products of each row's two numbers with two sums of inputs.
INLINE Sums dot_sums(Pairs pairs, const int16_t * sums) {
    int32_t two;
    memcpy(&two, sums, 4);
    return _mm256_madd_epi16(pairs, _mm256_set1_epi32(two));
}

INLINE void unpack_six(const uint8_t * at, int64_t gap, uint8_t * out) {
    (void)gap;
    unpack_six_256(at, out);
}
INLINE void unpack_six_of_xs(const uint8_t * at, int64_t gap, uint8_t * out) {
    (void)gap;
    unpack_six_of_xs_256(at, out);
}

INLINE __m256i four_columns(const int8_t * at) {
    int32_t columns;
    memcpy(&columns, at, 4);
    return _mm256_set1_epi32(columns);
}

#if defined(__AVXVNNI__)
typedef __m256i Scales;  // numbers of 32 bits

INLINE Scales unit_scales(void) { return _mm256_set1_epi32(1); }
INLINE Scales load_scales(const uint8_t * at, int64_t gap) {
    (void)gap;
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)at));
}
INLINE Scales subtract_32_from_scales(Scales scales) { return _mm256_sub_epi32(scales, _mm256_set1_epi32(32)); }
INLINE Scales even_scales(Pairs pairs) { return _mm256_srai_epi32(_mm256_slli_epi32(pairs, 16), 16); }
INLINE Scales odd_scales(Pairs pairs) { return _mm256_srai_epi32(pairs, 16); }

INLINE Sums add_dots(Sums sum, Bytes weights, __m256i inputs) { return _mm256_dpbusd_avx_epi32(sum, weights, inputs); }
INLINE Sums multiply_sums(Sums sums, Scales scales) { return _mm256_mullo_epi32(sums, scales); }
INLINE Sums broadcast_sum(int value) { return _mm256_set1_epi32(value); }
INLINE Bytes flip_signs(Bytes value) { return _mm256_xor_si256(value, _mm256_set1_epi8(-128)); }

#include "x8_vnni.h"
#else
typedef __m256i Scales;  // each twice, as numbers of 16 bits

INLINE Scales unit_scales(void) { return _mm256_set1_epi16(1); }
INLINE Scales load_scales(const uint8_t * at, int64_t gap) {
    (void)gap;
    const __m256i which = _mm256_setr_epi8(
        0, -1, 0, -1, 1, -1, 1, -1, 2, -1, 2, -1, 3, -1, 3, -1, 4, -1, 4, -1, 5, -1, 5, -1, 6, -1, 6, -1, 7, -1, 7, -1);
    long long eight;
    memcpy(&eight, at, 8);
    return _mm256_shuffle_epi8(_mm256_set1_epi64x(eight), which);
}
INLINE Scales subtract_32_from_scales(Scales scales) { return subtract_32(scales); }
INLINE Scales even_scales(Pairs pairs) {
    return _mm256_or_si256(_mm256_slli_epi32(pairs, 16), _mm256_and_si256(pairs, _mm256_set1_epi32(0xffff)));
}
INLINE Scales odd_scales(Pairs pairs) { return _mm256_blend_epi16(_mm256_srli_epi32(pairs, 16), pairs, 0xaa); }

// Sums of the products of `count` vectors of unsigned weights with inputs, times the scales. A sum of `most` products of
// pairs fits into 16 bits.
INLINE Sums dot_unsigned(const Bytes * weights, const int count, const int most, const int8_t * inputs, Scales scales) {
    Sums sum = _mm256_setzero_si256();
    UNROLL8 for (int first = 0; first < count; first += most) {
        __m256i pairs = _mm256_maddubs_epi16(weights[first], four_columns(inputs + 4 * first));
        UNROLL8 for (int v = first + 1; v < first + most; v++)
            pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(weights[v], four_columns(inputs + 4 * v)));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales));
    }
    return sum;
}
// The same for eight vectors of signed weights, whose products fill 16 bits.
INLINE Sums dot_signed(const Bytes * weights, const int8_t * inputs, const int16_t * total, Scales scales) {
    (void)total;
    Sums sum = _mm256_setzero_si256();
    UNROLL8 for (int v = 0; v < 8; v++) {
        const __m256i pairs = _mm256_maddubs_epi16(
            _mm256_abs_epi8(weights[v]), _mm256_sign_epi8(four_columns(inputs + 4 * v), weights[v]));
        sum = _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, scales));
    }
    return sum;
}
#endif
