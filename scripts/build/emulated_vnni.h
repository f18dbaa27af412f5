// Stands in for the instructions of AVX-512 and VNNI that products.c uses, on a CPU with AVX2: a vector of 512 bits is
// two of 256. Included before products.c (gcc -include) by check_c_portability.py. With EMULATE_AVX512 the kernels for
// AVX-512 are compiled, without it those for AVX-VNNI.
#pragma once
#include <immintrin.h>
#include <stdint.h>

static inline __m256i emulated_dpbusd(__m256i sum, __m256i weights, __m256i inputs) {
    int32_t totals[8];
    uint8_t first[32];
    int8_t second[32];
    _mm256_storeu_si256((__m256i *)totals, sum);
    _mm256_storeu_si256((__m256i *)first, weights);
    _mm256_storeu_si256((__m256i *)second, inputs);
    for (int i = 0; i < 32; i++) totals[i / 4] += first[i] * second[i];
    return _mm256_loadu_si256((const __m256i *)totals);
}

#if !defined(EMULATE_AVX512)
#define __AVXVNNI__ 1
#define _mm256_dpbusd_avx_epi32 emulated_dpbusd
#else
#define __AVX512VNNI__ 1

typedef struct { __m256i half[2]; } whole;
typedef struct { __m256 half[2]; } whole_floats;
#define __m512i whole
#define __m512 whole_floats

#define ONE(TO, NAME, FROM, ...) \
    static inline TO whole_##NAME(FROM x) { \
        TO out; \
        for (int i = 0; i < 2; i++) out.half[i] = __VA_ARGS__; \
        return out; \
    }
#define TWO(TO, NAME, SECOND, ...) \
    static inline TO whole_##NAME(TO x, SECOND y) { \
        TO out; \
        for (int i = 0; i < 2; i++) out.half[i] = __VA_ARGS__; \
        return out; \
    }
#define THREE(TO, NAME, ...) \
    static inline TO whole_##NAME(TO x, TO y, TO z) { \
        TO out; \
        for (int i = 0; i < 2; i++) out.half[i] = __VA_ARGS__; \
        return out; \
    }
#define X x.half[i]
#define Y y.half[i]
#define Z z.half[i]
#define EIGHT(V) ((i) ? _mm256_extracti128_si256(V, 1) : _mm256_castsi256_si128(V))
#define FOUR(V) ((i) ? _mm_srli_si128(V, 8) : (V))

ONE(whole, set1_epi8, char, _mm256_set1_epi8(x))
ONE(whole, set1_epi16, short, _mm256_set1_epi16(x))
ONE(whole, set1_epi32, int, _mm256_set1_epi32(x))
ONE(whole_floats, set1_ps, float, _mm256_set1_ps(x))
ONE(whole, broadcast_i32x4, __m128i, _mm256_broadcastsi128_si256(x))
ONE(whole_floats, cvtepi32_ps, whole, _mm256_cvtepi32_ps(X))
ONE(whole_floats, castsi512_ps, whole, _mm256_castsi256_ps(X))
ONE(whole_floats, cvtph_ps, __m256i, _mm256_cvtph_ps(EIGHT(x)))
ONE(whole, cvtepu8_epi16, __m256i, _mm256_cvtepu8_epi16(EIGHT(x)))
ONE(whole, cvtepi8_epi16, __m256i, _mm256_cvtepi8_epi16(EIGHT(x)))
ONE(whole, cvtepu8_epi32, __m128i, _mm256_cvtepu8_epi32(FOUR(x)))
TWO(whole, and_si512, whole, _mm256_and_si256(X, Y))
TWO(whole, or_si512, whole, _mm256_or_si256(X, Y))
TWO(whole, xor_si512, whole, _mm256_xor_si256(X, Y))
TWO(whole, add_epi32, whole, _mm256_add_epi32(X, Y))
TWO(whole, sub_epi32, whole, _mm256_sub_epi32(X, Y))
TWO(whole, sub_epi16, whole, _mm256_sub_epi16(X, Y))
TWO(whole, madd_epi16, whole, _mm256_madd_epi16(X, Y))
TWO(whole, mullo_epi32, whole, _mm256_mullo_epi32(X, Y))
TWO(whole, sllv_epi32, whole, _mm256_sllv_epi32(X, Y))
TWO(whole, shuffle_epi8, whole, _mm256_shuffle_epi8(X, Y))
TWO(whole, srli_epi16, unsigned, _mm256_srli_epi16(X, (int)y))
TWO(whole, slli_epi16, unsigned, _mm256_slli_epi16(X, (int)y))
TWO(whole, slli_epi32, unsigned, _mm256_slli_epi32(X, (int)y))
TWO(whole, srai_epi32, unsigned, _mm256_srai_epi32(X, (int)y))
TWO(whole, cmpgt_epi32_mask, whole, _mm256_cmpgt_epi32(X, Y))
TWO(whole_floats, mul_ps, whole_floats, _mm256_mul_ps(X, Y))
THREE(whole_floats, fmadd_ps, _mm256_fmadd_ps(X, Y, Z))
THREE(whole_floats, fnmadd_ps, _mm256_fnmadd_ps(X, Y, Z))
THREE(whole, dpbusd_epi32, emulated_dpbusd(X, Y, Z))
THREE(whole, mask_blend_epi32, _mm256_blendv_epi8(Y, Z, X))

static inline whole whole_castsi256_si512(__m256i x) { return (whole){{x, _mm256_setzero_si256()}}; }
static inline whole whole_inserti64x4(whole x, __m256i y, int at) {
    x.half[at] = y;
    return x;
}
static inline void whole_storeu_ps(float * out, whole_floats x) {
    for (int i = 0; i < 2; i++) _mm256_storeu_ps(out + 8 * i, X);
}

// without optimization, these are macros
#undef _mm512_inserti64x4
#undef _mm512_srli_epi16
#undef _mm512_slli_epi16
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32
#undef _mm512_cmpgt_epi32_mask
#define _mm512_set1_epi8 whole_set1_epi8
#define _mm512_set1_epi16 whole_set1_epi16
#define _mm512_set1_epi32 whole_set1_epi32
#define _mm512_set1_ps whole_set1_ps
#define _mm512_setzero_si512() whole_set1_epi32(0)
#define _mm512_setzero_ps() whole_set1_ps(0.f)
#define _mm512_broadcast_i32x4 whole_broadcast_i32x4
#define _mm512_cvtepi32_ps whole_cvtepi32_ps
#define _mm512_castsi512_ps whole_castsi512_ps
#define _mm512_castsi256_si512 whole_castsi256_si512
#define _mm512_inserti64x4 whole_inserti64x4
#define _mm512_cvtph_ps whole_cvtph_ps
#define _mm512_cvtepu8_epi16 whole_cvtepu8_epi16
#define _mm512_cvtepi8_epi16 whole_cvtepi8_epi16
#define _mm512_cvtepu8_epi32 whole_cvtepu8_epi32
#define _mm512_and_si512 whole_and_si512
#define _mm512_or_si512 whole_or_si512
#define _mm512_xor_si512 whole_xor_si512
#define _mm512_add_epi32 whole_add_epi32
#define _mm512_sub_epi32 whole_sub_epi32
#define _mm512_sub_epi16 whole_sub_epi16
#define _mm512_madd_epi16 whole_madd_epi16
#define _mm512_mullo_epi32 whole_mullo_epi32
#define _mm512_sllv_epi32 whole_sllv_epi32
#define _mm512_shuffle_epi8 whole_shuffle_epi8
#define _mm512_srli_epi16 whole_srli_epi16
#define _mm512_slli_epi16 whole_slli_epi16
#define _mm512_slli_epi32 whole_slli_epi32
#define _mm512_srai_epi32 whole_srai_epi32
#define _mm512_cmpgt_epi32_mask whole_cmpgt_epi32_mask
#define _mm512_mask_blend_epi32 whole_mask_blend_epi32
#define _mm512_mul_ps whole_mul_ps
#define _mm512_fmadd_ps whole_fmadd_ps
#define _mm512_fnmadd_ps whole_fnmadd_ps
#define _mm512_dpbusd_epi32 whole_dpbusd_epi32
#define _mm512_storeu_ps whole_storeu_ps
#endif
