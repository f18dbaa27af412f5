// Rounding of inputs and unpacking of scales with AVX2, for x8_avx2.h and x8_avx512.h.
#pragma once
#include <immintrin.h>
#include <stdint.h>

#include "activations.h"

INLINE __m256i load256(const void * at) { return _mm256_loadu_si256((const __m256i *)at); }
// Shifts the bits of each byte to the right, or to the left if `right` < 0; `bits` are those wanted.
INLINE __m256i shift_bits256(__m256i value, const int right, const int bits) {
    const __m256i shifted = right > 0 ? _mm256_srli_epi16(value, right) : _mm256_slli_epi16(value, -right);
    return _mm256_and_si256(shifted, _mm256_set1_epi8((char)bits));
}
INLINE void store256(uint8_t * out, __m256i one, __m256i other) {
    _mm256_store_si256((__m256i *)out, _mm256_or_si256(one, other));
}

// Unpacks 128 numbers of six bits from 96 bytes (pack_six in interleave.h).
INLINE void unpack_six_256(const uint8_t * at, uint8_t * out) {
    const __m256i first = load256(at), second = load256(at + 32), upper = load256(at + 64);
    store256(out, shift_bits256(first, 0, 15), shift_bits256(upper, -4, 48));
    store256(out + 32, shift_bits256(second, 0, 15), shift_bits256(upper, -2, 48));
    store256(out + 64, shift_bits256(first, 4, 15), shift_bits256(upper, 0, 48));
    store256(out + 96, shift_bits256(second, 4, 15), shift_bits256(upper, 2, 48));
}
// Unpacks 64 numbers from 48 bytes.
INLINE void unpack_six_of_xs_256(const uint8_t * at, uint8_t * out) {
    const __m256i lower = load256(at);
    const __m256i upper = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)(at + 32)));
    const __m256i shifted = _mm256_blend_epi32(upper, _mm256_srli_epi16(upper, 2), 0xf0);
    store256(out, shift_bits256(lower, 0, 15), shift_bits256(shifted, -4, 48));
    store256(out + 32, shift_bits256(lower, 4, 15), shift_bits256(shifted, 0, 48));
}

INLINE __m256 most_of(__m256 one, __m256 other) {
    return _mm256_max_ps(one, _mm256_andnot_ps(_mm256_set1_ps(-0.f), other));
}
INLINE float greatest(__m256 all) {
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    four = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
}
INLINE float find_largest(const float * from, int count) {
    __m256 most = _mm256_setzero_ps();
    for (int i = 0; i < count; i += 8) most = most_of(most, _mm256_loadu_ps(from + i));
    return greatest(most);
}
INLINE float round_to_half(float value) { return _cvtsh_ss(_cvtss_sh(value, 0)); }
INLINE int16_t sum_of_half(__m128i bytes) {
    const __m128i twice = _mm_sad_epu8(_mm_xor_si128(bytes, _mm_set1_epi8(-128)), _mm_setzero_si128());
    return (int16_t)(_mm_cvtsi128_si32(twice) + _mm_extract_epi16(twice, 4) - 16 * 128);
}
// Rounds 32 inputs times `factor` to bytes; sums: those of each half.
INLINE void round_32(const float * from, float factor, int8_t * out, int16_t * sums) {
    __m256i four[4];
    for (int i = 0; i < 4; i++)
        four[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(from + 8 * i), _mm256_set1_ps(factor)));
    const __m256i first = _mm256_packs_epi32(four[0], four[1]), second = _mm256_packs_epi32(four[2], four[3]);
    const __m256i values = _mm256_permutevar8x32_epi32(
        _mm256_packs_epi16(first, second), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)out, values);
    sums[0] = sum_of_half(_mm256_castsi256_si128(values)), sums[1] = sum_of_half(_mm256_extracti128_si256(values, 1));
}

#include "rounding.h"
