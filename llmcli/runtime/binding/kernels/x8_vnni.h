// Dot products for processors with an instruction that adds four products of unsigned and signed bytes to a sum of 32
// bits (`add_dots` of x8_avx2.h and x8_avx512.h).
#pragma once

// Sums of the products of `count` vectors of unsigned weights with inputs, times the scales.
INLINE Sums dot_unsigned(const Bytes * weights, const int count, const int most, const int8_t * inputs, Scales scales) {
    (void)most;
    Sums sum = zero_sums();
    UNROLL8 for (int v = 0; v < count; v++) sum = add_dots(sum, weights[v], four_columns(inputs + 4 * v));
    return multiply_sums(sum, scales);
}
// The same for eight vectors of signed weights, which are made unsigned: `total` is the sum of the inputs.
INLINE Sums dot_signed(const Bytes * weights, const int8_t * inputs, const int16_t * total, Scales scales) {
    Sums sum = broadcast_sum(-128 * *total);
    UNROLL8 for (int v = 0; v < 8; v++) sum = add_dots(sum, flip_signs(weights[v]), four_columns(inputs + 4 * v));
    return multiply_sums(sum, scales);
}
