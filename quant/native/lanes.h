// Shared by our C files: vectors with as many floats as a register of this CPU, or LANES floats if
// that is defined. Operations work on all lanes at once.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define EXPORT __attribute__((visibility("default")))
#if defined(__AVX512F__)
#define WIDTH 16  // floats in a register
#elif defined(__AVX2__)
#define WIDTH 8
#else
#define WIDTH 4
#endif
#if !defined(LANES)
#define LANES WIDTH
#endif

// LANES floats, and LANES integers. A comparison gives -1 in the lanes where it is true, else 0.
typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

// Returns a vector with the same value in every lane.
static inline F splat(float value) { return value - (F){0}; }
// Returns `yes` in the lanes where `which` is true, `no` in the others.
static inline F select_lanes(I which, F yes, F no) {
    return (F)((which & (I)yes) | (~which & (I)no));
}

// A vector of register width. GCC splits wider vectors through memory, and comparisons into single
// lanes, so that loops over an F are written as loops over its parts of this width.
typedef float W __attribute__((vector_size(4 * WIDTH)));

// Returns the part of a vector that begins with lane `first`.
static inline W load_part(const F * x, int first) {
    W out;
    memcpy(&out, (const float *)x + first, sizeof(out));
    return out;
}
// Overwrites the part of a vector that begins with lane `first`.
static inline void store_part(void * x, int first, W value) {
    memcpy((float *)x + first, &value, sizeof(value));
}
// Defines a function of two vectors. `result` is its value for two parts `a` and `b`.
#define DEFINE_BY_PARTS(type, name, result)                                                   \
    static inline type name(F x, F y) {                                                       \
        type out;                                                                             \
        for (int first = 0; first < LANES; first += WIDTH) {                                  \
            const W a = load_part(&x, first), b = load_part(&y, first);                       \
            store_part(&out, first, (W)(result));                                             \
        }                                                                                     \
        return out;                                                                           \
    }

// The minimum and the maximum of two parts. If one of the two is NaN, the result is the second.
#if defined(__AVX512F__)
static inline W min_part(W a, W b) { return (W)_mm512_min_ps((__m512)a, (__m512)b); }
static inline W max_part(W a, W b) { return (W)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
static inline W min_part(W a, W b) { return (W)_mm256_min_ps((__m256)a, (__m256)b); }
static inline W max_part(W a, W b) { return (W)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__)
static inline W min_part(W a, W b) { return (W)_mm_min_ps((__m128)a, (__m128)b); }
static inline W max_part(W a, W b) { return (W)_mm_max_ps((__m128)a, (__m128)b); }
#else
typedef int32_t WI __attribute__((vector_size(4 * WIDTH)));
static inline W select_part(WI which, W yes, W no) {
    return (W)((which & (WI)yes) | (~which & (WI)no));
}
static inline W min_part(W a, W b) { return select_part(a < b, a, b); }
static inline W max_part(W a, W b) { return select_part(a > b, a, b); }
#endif
DEFINE_BY_PARTS(F, min_lanes, min_part(a, b))
DEFINE_BY_PARTS(F, max_lanes, max_part(a, b))

static inline F load(const float * x) {
    F out;
    memcpy(&out, x, sizeof(out));
    return out;
}
static inline void store(float * x, F value) { memcpy(x, &value, sizeof(value)); }

// Returns whether a comparison is true in any lane.
static inline int any_lane(I which) {
#if defined(__AVX512F__) && LANES == 16
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= which[lane];
    return found != 0;
#endif
}
