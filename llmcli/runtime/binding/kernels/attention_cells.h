// The arithmetic of attention (attention.c) over a few decoded cells: scores, their exponentials, and weighted sums.
//
// A sum is added up in the same order for any number of heads, so that a token's result does not depend on how many are
// computed together.
#pragma once
#include <math.h>
#include <string.h>
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "exponential.h"
#include "ggml_backend.h"

#define CHUNK 256  // cells with a softmax of their own
#define KEYS 4     // cells whose keys are multiplied at a time

#define INLINE static inline __attribute__((always_inline))
#define FOR(I, N) _Pragma("GCC unroll 8") for (int I = 0; I < (N); I++)

typedef void (*Decode)(const uint8_t * from, int64_t count, float * out);

INLINE float half_at(const void * at) {
#if defined(__ARM_FEATURE_DOTPROD)
    __fp16 value;
    memcpy(&value, at, 2);
    return value;
#else
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
#endif
}
static void decode_f16(const uint8_t * from, int64_t count, float * out) {
#if defined(__ARM_FEATURE_DOTPROD)
    for (int64_t i = 0; i < count; i += 4)
        vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * i))));
#else
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
#endif
}
static void decode_q8_0(const uint8_t * from, int64_t count, float * out) {
    for (int64_t b = 0; b < count / 32; b++, from += 34, out += 32) {
        const float d = half_at(from);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)from[2 + i];
    }
}
static void decode_q4_0(const uint8_t * from, int64_t count, float * out) {
    for (int64_t b = 0; b < count / 32; b++, from += 18, out += 32) {
        const float d = half_at(from);
        for (int i = 0; i < 16; i++) {
            out[i] = d * (float)((from[2 + i] & 15) - 8);
            out[16 + i] = d * (float)((from[2 + i] >> 4) - 8);
        }
    }
}
static Decode decoder(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16: return decode_f16;
        case GGML_TYPE_Q8_0: return decode_q8_0;
        case GGML_TYPE_Q4_0: return decode_q4_0;
        default: return NULL;
    }
}

// The sums of the lanes of four vectors.
INLINE void store_four_sums(const F * of, float * out) {
#if defined(__ARM_FEATURE_DOTPROD)
    const float32x4_t first = vpaddq_f32((float32x4_t)of[0], (float32x4_t)of[1]);
    vst1q_f32(out, vpaddq_f32(first, vpaddq_f32((float32x4_t)of[2], (float32x4_t)of[3])));
#else
    __m256 part[4];
    for (int i = 0; i < 4; i++) {
#if WIDTH == 16
        part[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)of[i]), _mm512_extractf32x8_ps((__m512)of[i], 1));
#else
        part[i] = (__m256)of[i];
#endif
    }
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(part[0], part[1]), _mm256_hadd_ps(part[2], part[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#endif
}

// How many of `left` heads are computed together: as many as the sums of which fit into registers.
INLINE int64_t group_of(int64_t left) {
    if (left == 4 || left == 2) return 2;
    return left < 3 ? left : 3;
}

// Multiplies `heads` queries with KEYS keys.
INLINE void multiply_some_keys(const float * query, const float * keys, int64_t size, const int heads, float * out) {
    F sums[3][KEYS];
    FOR(h, heads) FOR(c, KEYS) sums[h][c] = splat(0);
    for (int64_t d = 0; d < size; d += LANES) {
        F part[3];
        FOR(h, heads) part[h] = load(query + h * size + d);
        FOR(c, KEYS) {
            const F key = load(keys + c * size + d);
            FOR(h, heads) sums[h][c] += part[h] * key;
        }
    }
    FOR(h, heads) store_four_sums(sums[h], out + h * CHUNK);
}
INLINE void multiply_keys(const float * query, const float * keys, int64_t size, int64_t heads, float * out) {
    for (int64_t h = 0; h < heads; h += group_of(heads - h)) {
        const float * from = query + h * size;
        switch (group_of(heads - h)) {
            case 3: multiply_some_keys(from, keys, size, 3, out + h * CHUNK); break;
            case 2: multiply_some_keys(from, keys, size, 2, out + h * CHUNK); break;
            default: multiply_some_keys(from, keys, size, 1, out + h * CHUNK);
        }
    }
}

// Adds `count` values of size `size`, times the weights of `heads` heads, to their sums, `vectors` at a time.
INLINE void add_vectors(
    const float * weights, const float * values, int count, int64_t size, const int heads, const int vectors, float * out
) {
    F sums[3][4];
    FOR(h, heads) FOR(v, vectors) sums[h][v] = load(out + h * size + v * LANES);
    for (int c = 0; c < count; c++) {
        F weight[3];
        FOR(h, heads) weight[h] = splat(weights[h * CHUNK + c]);
        FOR(v, vectors) {
            const F value = load(values + c * size + v * LANES);
            FOR(h, heads) sums[h][v] += weight[h] * value;
        }
    }
    FOR(h, heads) FOR(v, vectors) store(out + h * size + v * LANES, sums[h][v]);
}
INLINE void add_some_values(
    const float * weights, const float * values, int count, int64_t size, const int heads, float * out
) {
    int64_t d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) add_vectors(weights, values + d, count, size, heads, 4, out + d);
    for (; d < size; d += LANES) add_vectors(weights, values + d, count, size, heads, 1, out + d);
}
INLINE void add_values(
    const float * weights, const float * values, int count, int64_t size, int64_t heads, float * out
) {
    for (int64_t h = 0; h < heads; h += group_of(heads - h)) {
        const float * from = weights + h * CHUNK;
        switch (group_of(heads - h)) {
            case 3: add_some_values(from, values, count, size, 3, out + h * size); break;
            case 2: add_some_values(from, values, count, size, 2, out + h * size); break;
            default: add_some_values(from, values, count, size, 1, out + h * size);
        }
    }
}

// Limits scores that were divided by the cap: cap * tanh(score).
static void limit_scores(float * scores, int count, float cap) {
    for (int c = 0; c < count; c += LANES) {
        // below 88 / 2, where the exponential is finite; tanh is 1 from 9 on
        const F x = min_lanes(max_lanes(load(scores + c), splat(-40)), splat(40));
        store(scores + c, splat(cap) - splat(2 * cap) / (exponential(x + x) + splat(1)));
    }
}

// Replaces the scores of a head by their exponentials relative to the greatest.
static void exponentiate(float * scores, int count, float * most, float * weight) {
    for (int c = count; c % LANES; c++) scores[c] = -INFINITY;
    F top = splat(-INFINITY), sum = splat(0);
    for (int c = 0; c < count; c += LANES) top = max_lanes(top, load(scores + c));
    *most = top[0];
    for (int i = 1; i < LANES; i++) *most = top[i] > *most ? top[i] : *most;
    for (int c = 0; c < count; c += LANES) {
        const F each = exponential(load(scores + c) - splat(*most));
        store(scores + c, each);
        sum += each;
    }
    *weight = 0;
    for (int i = 0; i < LANES; i++) *weight += sum[i];
}
