// Shared by our C files: vectors with as many floats as a register of this CPU, or LANES floats if that is defined.
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

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));

static inline F all(float value) { return value - (F){0}; }
static inline F either(I which, F yes, F no) { return (F)((which & (I)yes) | (~which & (I)no)); }

// A vector of register width. GCC splits wider vectors through memory, and comparisons into single lanes.
typedef float W __attribute__((vector_size(4 * WIDTH)));

static inline W some(const F * x, int first) {
    W out;
    memcpy(&out, (const float *)x + first, sizeof(out));
    return out;
}
static inline void put(void * x, int first, W value) { memcpy((float *)x + first, &value, sizeof(value)); }
#define BY_PARTS(kind, name, made)                                                               \
    static inline kind name(F x, F y) {                                                          \
        kind out;                                                                                \
        for (int first = 0; first < LANES; first += WIDTH) {                                     \
            const W a = some(&x, first), b = some(&y, first);                                    \
            put(&out, first, (W)(made));                                                         \
        }                                                                                        \
        return out;                                                                              \
    }

// If one of the two is NaN, the result is the second.
#if defined(__AVX512F__)
static inline W lower(W a, W b) { return (W)_mm512_min_ps((__m512)a, (__m512)b); }
static inline W upper(W a, W b) { return (W)_mm512_max_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
static inline W lower(W a, W b) { return (W)_mm256_min_ps((__m256)a, (__m256)b); }
static inline W upper(W a, W b) { return (W)_mm256_max_ps((__m256)a, (__m256)b); }
#elif defined(__SSE2__)
static inline W lower(W a, W b) { return (W)_mm_min_ps((__m128)a, (__m128)b); }
static inline W upper(W a, W b) { return (W)_mm_max_ps((__m128)a, (__m128)b); }
#else
static inline W lower(W a, W b) { return a < b ? a : b; }
static inline W upper(W a, W b) { return a > b ? a : b; }
#endif
BY_PARTS(F, smaller, lower(a, b))
BY_PARTS(F, larger, upper(a, b))

static inline F load(const float * x) {
    F out;
    memcpy(&out, x, sizeof(out));
    return out;
}
static inline void store(float * x, F value) { memcpy(x, &value, sizeof(value)); }

// Returns whether a comparison is true in any lane.
static inline int any(I which) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)which, (__m512i)which) != 0;
#else
    int found = 0;
    for (int lane = 0; lane < LANES; ++lane) found |= which[lane];
    return found != 0;
#endif
}
