// Products of KERNEL_ROWS rows of weights with 1 to 8 rows of rounded inputs (activations.h), in the words that a header
// for an instruction set defines: x8_avx2.h, x8_avx512.h or x8_neon.h.
//
// The weights are interleaved (interleave.h): a vector has four columns of KERNEL_ROWS rows, so that each 32-bit lane
// sums up one row, and the inputs of these columns are broadcast. A group of weights is decoded to bytes once and
// multiplied with every row of inputs. A row of inputs is summed in the same order however many rows there are, so its
// results have the same bits.
//
// A header defines the types
//   Bytes   4 bytes of each row of weights
//   Sums    a number of 32 bits of each row; Floats: a float
//   Pairs   two numbers of 16 bits of each row
//   Scales  an integer scale of each row, in the form in which sums are multiplied with it
//   Table   16 bytes to look up
// and the functions that the kernels below call. `gap` is the distance between the first and the second eight rows in
// memory, where a vector has 16.
#pragma once
#include <stdint.h>

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
        const uint8_t * at, int64_t gap, const struct activations * in, int64_t columns, const int N, float * out)

#if defined(__AVX512VNNI__)
#include "x8_avx512.h"
#elif defined(__AVX2__)
#include "x8_avx2.h"
#elif defined(__ARM_FEATURE_DOTPROD)
#include "x8_neon.h"
#endif

// Writes the results of N rows of inputs, KERNEL_ROWS floats each.
INLINE void store(float * out, const Floats * sums, const int N) {
    EACH_ROW store_floats(out + r * KERNEL_ROWS, sums[r]);
}
// Moves bits of each byte: `from` > 0 to the right, < 0 to the left; `bits` are those wanted.
INLINE Bytes move_bits(Bytes value, const int from, const int bits) {
    return mask_bits(from > 0 ? shift_right(value, from) : from < 0 ? shift_left(value, -from) : value, bits);
}
// Adds a product of float scales: total + scale of the weights * scale of the inputs * dots.
INLINE Floats add_scaled(Floats total, Floats weights, const float * inputs, Sums dots) {
    return add_product(multiply_floats(weights, broadcast(inputs)), to_floats(dots), total);
}

// ---- legacy types: blocks of 32 weights

INLINE void read_nibbles(const uint8_t * at, int64_t gap, Bytes * weights) {
    UNROLL8 for (int i = 0; i < 4; i++) {
        const Bytes two = load(at + 32 * i, gap);
        weights[i] = mask_bits(two, 15);
        weights[4 + i] = move_bits(two, 4, 15);
    }
}
INLINE void read_fifth_bits(const uint8_t * at, int64_t gap, Bytes * weights) {
    const Bytes bits = load(at, gap);
    UNROLL8 for (int v = 0; v < 8; v++) weights[v] = join_bits(weights[v], move_bits(bits, v - 4, 16));
}
INLINE void look_up(const uint8_t * at, int64_t gap, Table table, Bytes * weights) {
    read_nibbles(at, gap, weights);
    UNROLL8 for (int v = 0; v < 8; v++) weights[v] = look_up_bytes(table, weights[v]);
}
INLINE void read_bytes(const uint8_t * at, int64_t gap, Bytes * weights) {
    UNROLL8 for (int v = 0; v < 8; v++) weights[v] = load(at + 32 * v, gap);
}

// READ fills `weights` with unsigned numbers, of which MOST products fit into 16 bits; OFFSET is subtracted, or, if it
// is 0, the minima at byte 16 are added.
#define UNSIGNED_32(NAME, BYTES, MOST, OFFSET, READ)                                                                   \
    KERNEL(NAME) {                                                                                                     \
        Floats sums[8];                                                                                                \
        EACH_ROW sums[r] = zero_floats();                                                                              \
        for (int64_t b = 0; b < columns / 32; b++, at += BYTES) {                                                      \
            Bytes weights[8];                                                                                          \
            READ;                                                                                                      \
            const Floats d = load_halves(at, gap);                                                                     \
            EACH_ROW {                                                                                                 \
                const Sums dots = dot_unsigned(weights, 8, MOST, in[r].values + 32 * b, unit_scales());                \
                const Floats sum = broadcast(in[r].sums + b);                                                          \
                Floats scaled = multiply_floats(to_floats(dots), broadcast(in[r].scales + b));                         \
                if (OFFSET) scaled = subtract_product(broadcast_value(OFFSET), sum, scaled);                           \
                sums[r] = add_product(d, scaled, sums[r]);                                                             \
                if (!OFFSET) sums[r] = add_product(load_halves(at + 16, gap), sum, sums[r]);                           \
            }                                                                                                          \
        }                                                                                                              \
        store(out, sums, N);                                                                                           \
    }
UNSIGNED_32(x8_q4_0, 144, 8, 8, read_nibbles(at + 16, gap, weights))
UNSIGNED_32(x8_q4_1, 160, 8, 0, read_nibbles(at + 32, gap, weights))
UNSIGNED_32(x8_q5_0, 176, 4, 16, (read_nibbles(at + 48, gap, weights), read_fifth_bits(at + 16, gap, weights)))
UNSIGNED_32(x8_q5_1, 192, 4, 0, (read_nibbles(at + 64, gap, weights), read_fifth_bits(at + 32, gap, weights)))

static const int8_t iq4_values[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
static const int8_t fp4_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

#define SIGNED_32(NAME, BYTES, SCALES, READ)                                                                           \
    KERNEL(NAME) {                                                                                                     \
        Floats sums[8];                                                                                                \
        EACH_ROW sums[r] = zero_floats();                                                                              \
        for (int64_t b = 0; b < columns / 32; b++, at += BYTES) {                                                      \
            Bytes weights[8];                                                                                          \
            READ;                                                                                                      \
            const Floats d = SCALES(at, gap);                                                                          \
            EACH_ROW {                                                                                                 \
                const Sums dots = dot_signed(weights, in[r].values + 32 * b, in[r].sums32 + b, unit_scales());         \
                sums[r] = add_scaled(sums[r], d, in[r].scales + b, dots);                                              \
            }                                                                                                          \
        }                                                                                                              \
        store(out, sums, N);                                                                                           \
    }
SIGNED_32(x8_q8_0, 272, load_halves, read_bytes(at + 16, gap, weights))
SIGNED_32(x8_iq4_nl, 144, load_halves, look_up(at + 16, gap, load_table(iq4_values), weights))
SIGNED_32(x8_mxfp4, 136, load_powers, look_up(at + 8, gap, load_table(fp4_values), weights))

// ---- k-quants: blocks of 256 weights, whose groups have integer scales

// Q4_K and Q5_K: d, minimum of d, 96 bytes of scales and minima, (fifth bits), nibbles
#define K_MINIMA(NAME, BYTES, QS, FIFTH)                                                                               \
    KERNEL(NAME) {                                                                                                     \
        Floats sums[8];                                                                                                \
        EACH_ROW sums[r] = zero_floats();                                                                              \
        for (int64_t b = 0; b < columns / 256; b++, at += BYTES) {                                                     \
            uint8_t six[16 * KERNEL_ROWS] ALIGNED;                                                                     \
            unpack_six(at + 32, gap, six);                                                                             \
            Sums dots[8];                                                                                              \
            EACH_ROW {                                                                                                 \
                Sums least = zero_sums();                                                                              \
                UNROLL8 for (int p = 0; p < 4; p++)                                                                    \
                    least = add(                                                                                       \
                        least,                                                                                         \
                        dot_sums(load_unsigned_pairs(six + 64 + 16 * p, 128), in[r].sums32 + 8 * b + 2 * p));          \
                sums[r] = subtract_product(                                                                            \
                    multiply_floats(load_halves(at + 16, gap), broadcast(in[r].scales + b)), to_floats(least),         \
                    sums[r]);                                                                                          \
                dots[r] = zero_sums();                                                                                 \
            }                                                                                                          \
            for (int p = 0; p < 4; p++)                                                                                \
                UNROLL8 for (int u = 0; u < 2; u++) {                                                                  \
                    Bytes weights[8];                                                                                  \
                    UNROLL8 for (int i = 0; i < 8; i++) {                                                              \
                        weights[i] = move_bits(load(at + QS + 256 * p + 32 * i, gap), 4 * u, 15);                      \
                        if (FIFTH) {                                                                                   \
                            const Bytes bits = shift_right(load(at + 128 + 32 * i, gap), 2 * p);                       \
                            weights[i] = join_bits(weights[i], move_bits(bits, u - 4, 16));                            \
                        }                                                                                              \
                    }                                                                                                  \
                    const Scales scales = load_scales(six + 16 * p + 8 * u, 128);                                      \
                    const int64_t first = 256 * b + 64 * p + 32 * u;                                                   \
                    EACH_ROW dots[r] =                                                                                 \
                        add(dots[r], dot_unsigned(weights, 8, FIFTH ? 4 : 8, in[r].values + first, scales));           \
                }                                                                                                      \
            EACH_ROW sums[r] = add_scaled(sums[r], load_halves(at, gap), in[r].scales + b, dots[r]);                   \
        }                                                                                                              \
        store(out, sums, N);                                                                                           \
    }
K_MINIMA(x8_q4_K, 1152, 128, 0)
K_MINIMA(x8_q5_K, 1408, 384, 1)

// Groups of 16 weights, which are unsigned numbers less 2^SHIFT, and of which MOST products fit. PAIRS(p): the scales
// of the groups 2p and 2p + 1. WEIGHT(p, u, i): the columns 64 p + 32 u + 4 i.
#define K_OFFSET(NAME, BYTES, PREPARE, PAIRS, WEIGHT, SHIFT, MOST)                                                     \
    KERNEL(NAME) {                                                                                                     \
        Floats sums[8];                                                                                                \
        EACH_ROW sums[r] = zero_floats();                                                                              \
        for (int64_t b = 0; b < columns / 256; b++, at += BYTES) {                                                     \
            PREPARE                                                                                                    \
            Sums dots[8];                                                                                              \
            EACH_ROW {                                                                                                 \
                Sums less = zero_sums();                                                                               \
                UNROLL8 for (int p = 0; p < 8; p++)                                                                    \
                    less = add(less, dot_sums(PAIRS(p), in[r].sums16 + 16 * b + 2 * p));                               \
                dots[r] = negate_shifted(less, SHIFT);                                                                 \
            }                                                                                                          \
            for (int p = 0; p < 4; p++)                                                                                \
                UNROLL8 for (int u = 0; u < 2; u++) {                                                                  \
                    Bytes weights[8];                                                                                  \
                    UNROLL8 for (int i = 0; i < 8; i++) weights[i] = WEIGHT(p, u, i);                                  \
                    const Pairs pairs = PAIRS(2 * p + u);                                                              \
                    const Scales even = even_scales(pairs), odd = odd_scales(pairs);                                   \
                    EACH_ROW {                                                                                         \
                        const int8_t * values = in[r].values + 256 * b + 64 * p + 32 * u;                              \
                        dots[r] = add(dots[r], dot_unsigned(weights, 4, MOST, values, even));                          \
                        dots[r] = add(dots[r], dot_unsigned(weights + 4, 4, MOST, values + 16, odd));                  \
                    }                                                                                                  \
                }                                                                                                      \
            EACH_ROW sums[r] = add_scaled(sums[r], load_halves(at, gap), in[r].scales + b, dots[r]);                   \
        }                                                                                                              \
        store(out, sums, N);                                                                                           \
    }

// d, 128 bytes of scales, 512 bytes of upper bits, 1024 bytes of nibbles
#define Q6_K_PAIRS(P) load_signed_pairs(at + 16 + 16 * (P), gap)
#define Q6_K_WEIGHT(P, U, I)                                                                                           \
    join_bits(                                                                                                         \
        mask_bits(shift_right(load(at + 656 + 512 * ((P) / 2) + 256 * (U) + 32 * (I), gap), 4 * ((P) % 2)), 15),       \
        move_bits(shift_right(load(at + 144 + 256 * ((P) / 2) + 32 * (I), gap), 4 * ((P) % 2)), 2 * (U) - 4, 48))
K_OFFSET(x8_q6_K, 1680, , Q6_K_PAIRS, Q6_K_WEIGHT, 5, 2)

// d, 96 bytes of scales, 256 bytes of third bits, 512 bytes of two bits
#define Q3_K_PREPARE                                                                                                   \
    uint8_t six[16 * KERNEL_ROWS] ALIGNED;                                                                             \
    unpack_six(at + 16, gap, six);
#define Q3_K_PAIRS(P) subtract_32(load_unsigned_pairs(six + 16 * (P), 128))
#define Q3_K_WEIGHT(P, U, I)                                                                                           \
    join_bits(                                                                                                         \
        move_bits(shift_right(load(at + 368 + 256 * ((P) / 2) + 32 * (I), gap), 4 * ((P) % 2)), 2 * (U), 3),           \
        move_bits(shift_right(load(at + 112 + 32 * (I), gap), 2 * (P)), (U) - 2, 4))
K_OFFSET(x8_q3_K, 880, Q3_K_PREPARE, Q3_K_PAIRS, Q3_K_WEIGHT, 2, 4)

// d, minimum of d, 128 bytes of scales and minima (four bits each), 512 bytes of two bits
KERNEL(x8_q2_K) {
    Floats sums[8];
    EACH_ROW sums[r] = zero_floats();
    for (int64_t b = 0; b < columns / 256; b++, at += 672) {
        Sums dots[8];
        EACH_ROW {
            Sums least = zero_sums();
            UNROLL8 for (int p = 0; p < 8; p++)
                least = add(
                    least,
                    dot_sums(
                        take_upper_nibbles(load_unsigned_pairs(at + 32 + 16 * p, gap)), in[r].sums16 + 16 * b + 2 * p));
            sums[r] = subtract_product(
                multiply_floats(load_halves(at + 16, gap), broadcast(in[r].scales + b)), to_floats(least), sums[r]);
            dots[r] = zero_sums();
        }
        for (int s = 0; s < 8; s++) {
            Bytes weights[8];
            UNROLL8 for (int i = 0; i < 8; i++)
                weights[i] = mask_bits(shift_right(load(at + 160 + 256 * (s / 4) + 32 * i, gap), 2 * (s % 4)), 3);
            const Pairs pairs = take_lower_nibbles(load_unsigned_pairs(at + 32 + 16 * s, gap));
            const Scales even = even_scales(pairs), odd = odd_scales(pairs);
            EACH_ROW {
                const int8_t * values = in[r].values + 256 * b + 32 * s;
                dots[r] = add(dots[r], dot_unsigned(weights, 4, 4, values, even));
                dots[r] = add(dots[r], dot_unsigned(weights + 4, 4, 4, values + 16, odd));
            }
        }
        EACH_ROW sums[r] = add_scaled(sums[r], load_halves(at, gap), in[r].scales + b, dots[r]);
    }
    store(out, sums, N);
}

// d, 48 bytes of scales, 1024 bytes of nibbles
KERNEL(x8_iq4_xs) {
    Floats sums[8];
    EACH_ROW sums[r] = zero_floats();
    const Table table = load_table(iq4_values);
    for (int64_t b = 0; b < columns / 256; b++, at += 1088) {
        uint8_t six[8 * KERNEL_ROWS] ALIGNED;
        unpack_six_of_xs(at + 16, gap, six);
        Sums dots[8];
        EACH_ROW dots[r] = zero_sums();
        for (int s = 0; s < 8; s++) {
            Bytes weights[8];
            look_up(at + 64 + 128 * s, gap, table, weights);
            const Scales scales = subtract_32_from_scales(load_scales(six + 8 * s, 64));
            EACH_ROW dots[r] = add(
                dots[r], dot_signed(weights, in[r].values + 256 * b + 32 * s, in[r].sums32 + 8 * b + s, scales));
        }
        EACH_ROW sums[r] = add_scaled(sums[r], load_halves(at, gap), in[r].scales + b, dots[r]);
    }
    store(out, sums, N);
}
