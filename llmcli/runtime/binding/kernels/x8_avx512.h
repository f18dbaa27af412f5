// Vectors of 16 rows of weights for AVX-512 with VNNI: two times eight rows, which are `gap` bytes apart in memory.
#pragma once
#include <string.h>

#include "x86_inputs.h"

#define KERNEL_ROWS 16
#define ALIGNED __attribute__((aligned(64)))

typedef __m512i Bytes, Sums, Pairs, Scales, Table;
typedef __m512 Floats;

INLINE __m512i join256(__m256i first, __m256i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(first), second, 1);
}
INLINE __m256i load_both128(const uint8_t * at, int64_t gap) {
    const __m128i first = _mm_loadu_si128((const __m128i *)at), second = _mm_loadu_si128((const __m128i *)(at + gap));
    return _mm256_inserti128_si256(_mm256_castsi128_si256(first), second, 1);
}
INLINE __m128i load_both64(const uint8_t * at, int64_t gap) {
    const __m128i first = _mm_loadl_epi64((const __m128i *)at), second = _mm_loadl_epi64((const __m128i *)(at + gap));
    return _mm_unpacklo_epi64(first, second);
}

INLINE Bytes load(const uint8_t * at, int64_t gap) { return join256(load256(at), load256(at + gap)); }
INLINE Bytes mask_bits(Bytes value, int bits) { return _mm512_and_si512(value, _mm512_set1_epi8((char)bits)); }
INLINE Bytes shift_right(Bytes value, const int count) { return _mm512_srli_epi16(value, (unsigned)count); }
INLINE Bytes shift_left(Bytes value, const int count) { return _mm512_slli_epi16(value, (unsigned)count); }
INLINE Bytes join_bits(Bytes one, Bytes other) { return _mm512_or_si512(one, other); }
INLINE Table load_table(const int8_t * values) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)values));
}
INLINE Bytes look_up_bytes(Table table, Bytes which) { return _mm512_shuffle_epi8(table, which); }

INLINE Floats zero_floats(void) { return _mm512_setzero_ps(); }
INLINE Floats broadcast_value(float value) { return _mm512_set1_ps(value); }
INLINE Floats broadcast(const float * at) { return _mm512_set1_ps(*at); }
INLINE Floats multiply_floats(Floats one, Floats other) { return _mm512_mul_ps(one, other); }
INLINE Floats add_product(Floats one, Floats other, Floats to) { return _mm512_fmadd_ps(one, other, to); }
INLINE Floats subtract_product(Floats one, Floats other, Floats from) { return _mm512_fnmadd_ps(one, other, from); }
INLINE Floats to_floats(Sums sums) { return _mm512_cvtepi32_ps(sums); }
INLINE void store_floats(float * out, Floats values) { _mm512_storeu_ps(out, values); }
INLINE Floats load_halves(const uint8_t * at, int64_t gap) { return _mm512_cvtph_ps(load_both128(at, gap)); }
// 2^(exponent - 128) of 16 bytes
INLINE Floats load_powers(const uint8_t * at, int64_t gap) {
    const __m512i exponent = _mm512_cvtepu8_epi32(load_both64(at, gap)), one = _mm512_set1_epi32(1);
    const __m512i normal = _mm512_slli_epi32(_mm512_sub_epi32(exponent, one), 23);
    const __m512i small = _mm512_sllv_epi32(_mm512_set1_epi32(0x00200000), exponent);
    return _mm512_castsi512_ps(_mm512_mask_blend_epi32(_mm512_cmpgt_epi32_mask(exponent, one), small, normal));
}

INLINE Sums zero_sums(void) { return _mm512_setzero_si512(); }
INLINE Sums add(Sums one, Sums other) { return _mm512_add_epi32(one, other); }
INLINE Sums negate_shifted(Sums value, const int count) {
    return _mm512_sub_epi32(_mm512_setzero_si512(), _mm512_slli_epi32(value, (unsigned)count));
}

INLINE Pairs load_unsigned_pairs(const uint8_t * at, int64_t gap) { return _mm512_cvtepu8_epi16(load_both128(at, gap)); }
INLINE Pairs load_signed_pairs(const uint8_t * at, int64_t gap) { return _mm512_cvtepi8_epi16(load_both128(at, gap)); }
INLINE Pairs subtract_32(Pairs pairs) { return _mm512_sub_epi16(pairs, _mm512_set1_epi16(32)); }
INLINE Pairs take_upper_nibbles(Pairs pairs) { return _mm512_srli_epi16(pairs, 4); }
INLINE Pairs take_lower_nibbles(Pairs pairs) { return _mm512_and_si512(pairs, _mm512_set1_epi16(15)); }
// Sums of the products of each row's two numbers with two sums of inputs.
INLINE Sums dot_sums(Pairs pairs, const int16_t * sums) {
    int32_t two;
    memcpy(&two, sums, 4);
    return _mm512_madd_epi16(pairs, _mm512_set1_epi32(two));
}

INLINE Scales unit_scales(void) { return _mm512_set1_epi32(1); }
INLINE Scales load_scales(const uint8_t * at, int64_t gap) { return _mm512_cvtepu8_epi32(load_both64(at, gap)); }
INLINE Scales subtract_32_from_scales(Scales scales) { return _mm512_sub_epi32(scales, _mm512_set1_epi32(32)); }
INLINE Scales even_scales(Pairs pairs) { return _mm512_srai_epi32(_mm512_slli_epi32(pairs, 16), 16); }
INLINE Scales odd_scales(Pairs pairs) { return _mm512_srai_epi32(pairs, 16); }

INLINE void unpack_six(const uint8_t * at, int64_t gap, uint8_t * out) {
    unpack_six_256(at, out);
    unpack_six_256(at + gap, out + 128);
}
INLINE void unpack_six_of_xs(const uint8_t * at, int64_t gap, uint8_t * out) {
    unpack_six_of_xs_256(at, out);
    unpack_six_of_xs_256(at + gap, out + 64);
}

INLINE __m512i four_columns(const int8_t * at) {
    int32_t columns;
    memcpy(&columns, at, 4);
    return _mm512_set1_epi32(columns);
}
INLINE Sums add_dots(Sums sum, Bytes weights, __m512i inputs) { return _mm512_dpbusd_epi32(sum, weights, inputs); }
INLINE Sums multiply_sums(Sums sums, Scales scales) { return _mm512_mullo_epi32(sums, scales); }
INLINE Sums broadcast_sum(int value) { return _mm512_set1_epi32(value); }
INLINE Bytes flip_signs(Bytes value) { return _mm512_xor_si512(value, _mm512_set1_epi8(-128)); }

#include "x8_vnni.h"
