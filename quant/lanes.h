// What our C files share: vectors of as many floats as this CPU's registers hold, unless LANES says otherwise.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#if defined(LANES)
#elif defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

static inline F all(float value) { return value - (F){0}; }
static inline F either(I which, F yes, F no) { return (F)((which & (I)yes) | (~which & (I)no)); }

// Where one of the two is NaN, the second.
#if defined(__AVX512F__) && LANES == 16
static inline F smaller(F a, F b) { return (F)_mm512_min_ps((__m512)a, (__m512)b); }
static inline F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
#else
static inline F smaller(F a, F b) { return either(a < b, a, b); }
static inline F larger(F a, F b) { return either(a > b, a, b); }
#endif

static inline F load(const float * x) {
    F out;
    memcpy(&out, x, sizeof(out));
    return out;
}
static inline void store(float * x, F value) { memcpy(x, &value, sizeof(value)); }

// Whether a comparison holds in any lane.
static inline int any(I which) {
#if defined(__AVX512F__) && LANES == 16
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= which[lane];
    return found != 0;
#endif
}
