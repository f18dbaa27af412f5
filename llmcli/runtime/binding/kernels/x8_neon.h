// Vectors of eight rows of weights for NEON with dot products: two registers, of four rows each. Rounding of inputs and
// unpacking of scales.
#pragma once
#include <arm_neon.h>
#include <math.h>
#include <string.h>

#define KERNEL_ROWS 8
#define ALIGNED __attribute__((aligned(16)))

typedef struct { uint8x16_t first, second; } Bytes;
typedef struct { int32x4_t first, second; } Sums, Scales;
typedef struct { int16x8_t first, second; } Pairs;
typedef struct { float32x4_t first, second; } Floats;
typedef int8x16_t Table;

#define BOTH(TYPE, EXPRESSION_1, EXPRESSION_2) ((TYPE){EXPRESSION_1, EXPRESSION_2})

INLINE Bytes load(const uint8_t * at, int64_t gap) {
    (void)gap;
    return BOTH(Bytes, vld1q_u8(at), vld1q_u8(at + 16));
}
INLINE Bytes mask_bits(Bytes value, int bits) {
    const uint8x16_t mask = vdupq_n_u8((uint8_t)bits);
    return BOTH(Bytes, vandq_u8(value.first, mask), vandq_u8(value.second, mask));
}
INLINE Bytes shift_left(Bytes value, const int count) {
    const int8x16_t by = vdupq_n_s8((int8_t)count);
    return BOTH(Bytes, vshlq_u8(value.first, by), vshlq_u8(value.second, by));
}
INLINE Bytes shift_right(Bytes value, const int count) { return shift_left(value, -count); }
INLINE Bytes join_bits(Bytes one, Bytes other) {
    return BOTH(Bytes, vorrq_u8(one.first, other.first), vorrq_u8(one.second, other.second));
}
INLINE Table load_table(const int8_t * values) { return vld1q_s8(values); }
INLINE Bytes look_up_bytes(Table table, Bytes which) {
    return BOTH(
        Bytes, vreinterpretq_u8_s8(vqtbl1q_s8(table, which.first)), vreinterpretq_u8_s8(vqtbl1q_s8(table, which.second)));
}

INLINE Floats broadcast_value(float value) { return BOTH(Floats, vdupq_n_f32(value), vdupq_n_f32(value)); }
INLINE Floats zero_floats(void) { return broadcast_value(0.f); }
INLINE Floats broadcast(const float * at) { return broadcast_value(*at); }
INLINE Floats multiply_floats(Floats one, Floats other) {
    return BOTH(Floats, vmulq_f32(one.first, other.first), vmulq_f32(one.second, other.second));
}
INLINE Floats add_product(Floats one, Floats other, Floats to) {
    return BOTH(
        Floats, vfmaq_f32(to.first, one.first, other.first), vfmaq_f32(to.second, one.second, other.second));
}
INLINE Floats subtract_product(Floats one, Floats other, Floats from) {
    return BOTH(
        Floats, vfmsq_f32(from.first, one.first, other.first), vfmsq_f32(from.second, one.second, other.second));
}
INLINE Floats to_floats(Sums sums) { return BOTH(Floats, vcvtq_f32_s32(sums.first), vcvtq_f32_s32(sums.second)); }
INLINE void store_floats(float * out, Floats values) {
    vst1q_f32(out, values.first);
    vst1q_f32(out + 4, values.second);
}
INLINE Floats load_halves(const uint8_t * at, int64_t gap) {
    (void)gap;
    const float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(at));
    return BOTH(Floats, vcvt_f32_f16(vget_low_f16(halves)), vcvt_f32_f16(vget_high_f16(halves)));
}
// 2^(exponent - 128) of four numbers
INLINE float32x4_t power_of_two(uint32x4_t exponent) {
    const uint32x4_t normal = vshlq_n_u32(vsubq_u32(exponent, vdupq_n_u32(1)), 23);
    const uint32x4_t small = vshlq_u32(vdupq_n_u32(0x00200000), vreinterpretq_s32_u32(exponent));
    return vreinterpretq_f32_u32(vbslq_u32(vcgtq_u32(exponent, vdupq_n_u32(1)), normal, small));
}
INLINE Floats load_powers(const uint8_t * at, int64_t gap) {
    (void)gap;
    const uint16x8_t exponents = vmovl_u8(vld1_u8(at));
    return BOTH(
        Floats, power_of_two(vmovl_u16(vget_low_u16(exponents))), power_of_two(vmovl_u16(vget_high_u16(exponents))));
}

INLINE Sums sums_of(int value) { return BOTH(Sums, vdupq_n_s32(value), vdupq_n_s32(value)); }
INLINE Sums zero_sums(void) { return sums_of(0); }
INLINE Sums add(Sums one, Sums other) {
    return BOTH(Sums, vaddq_s32(one.first, other.first), vaddq_s32(one.second, other.second));
}
INLINE Sums multiply_sums(Sums sums, Scales scales) {
    return BOTH(Sums, vmulq_s32(sums.first, scales.first), vmulq_s32(sums.second, scales.second));
}
INLINE Sums negate_shifted(Sums value, const int count) { return multiply_sums(value, sums_of(-(1 << count))); }

INLINE Pairs load_unsigned_pairs(const uint8_t * at, int64_t gap) {
    (void)gap;
    const uint8x16_t bytes = vld1q_u8(at);
    return BOTH(
        Pairs, vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(bytes))), vreinterpretq_s16_u16(vmovl_high_u8(bytes)));
}
INLINE Pairs load_signed_pairs(const uint8_t * at, int64_t gap) {
    (void)gap;
    const int8x16_t bytes = vld1q_s8((const int8_t *)at);
    return BOTH(Pairs, vmovl_s8(vget_low_s8(bytes)), vmovl_high_s8(bytes));
}
INLINE Pairs subtract_32(Pairs pairs) {
    return BOTH(Pairs, vsubq_s16(pairs.first, vdupq_n_s16(32)), vsubq_s16(pairs.second, vdupq_n_s16(32)));
}
INLINE Pairs take_upper_nibbles(Pairs pairs) {
    return BOTH(Pairs, vshrq_n_s16(pairs.first, 4), vshrq_n_s16(pairs.second, 4));
}
INLINE Pairs take_lower_nibbles(Pairs pairs) {
    return BOTH(Pairs, vandq_s16(pairs.first, vdupq_n_s16(15)), vandq_s16(pairs.second, vdupq_n_s16(15)));
}
// Sums of the products of each row's two numbers with two sums of inputs.
INLINE Sums dot_sums(Pairs pairs, const int16_t * sums) {
    int32_t two;
    memcpy(&two, sums, 4);
    const int16x8_t inputs = vreinterpretq_s16_s32(vdupq_n_s32(two));
#define DOT_SUMS(PAIRS)                                                                                                \
    vpaddq_s32(vmull_s16(vget_low_s16(PAIRS), vget_low_s16(inputs)), vmull_high_s16(PAIRS, inputs))
    return BOTH(Sums, DOT_SUMS(pairs.first), DOT_SUMS(pairs.second));
#undef DOT_SUMS
}

INLINE Scales unit_scales(void) { return sums_of(1); }
INLINE Scales load_scales(const uint8_t * at, int64_t gap) {
    (void)gap;
    const int16x8_t scales = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(at)));
    return BOTH(Scales, vmovl_s16(vget_low_s16(scales)), vmovl_high_s16(scales));
}
INLINE Scales subtract_32_from_scales(Scales scales) { return add(scales, sums_of(-32)); }
INLINE Scales even_scales(Pairs pairs) {
    const int16x8_t even = vuzp1q_s16(pairs.first, pairs.second);
    return BOTH(Scales, vmovl_s16(vget_low_s16(even)), vmovl_high_s16(even));
}
INLINE Scales odd_scales(Pairs pairs) {
    const int16x8_t odd = vuzp2q_s16(pairs.first, pairs.second);
    return BOTH(Scales, vmovl_s16(vget_low_s16(odd)), vmovl_high_s16(odd));
}

// Adds the products of four vectors of weights with the four inputs of each lane of `inputs`.
INLINE Sums dot_four(Sums sum, const Bytes * weights, int8x16_t inputs) {
#define DOT_LANE(LANE)                                                                                                 \
    sum.first = vdotq_laneq_s32(sum.first, vreinterpretq_s8_u8(weights[LANE].first), inputs, LANE);                    \
    sum.second = vdotq_laneq_s32(sum.second, vreinterpretq_s8_u8(weights[LANE].second), inputs, LANE);
    DOT_LANE(0) DOT_LANE(1) DOT_LANE(2) DOT_LANE(3)
#undef DOT_LANE
    return sum;
}
// Sums of the products of `count` vectors of unsigned weights, which are less than 128, with inputs, times the scales.
INLINE Sums dot_unsigned(const Bytes * weights, const int count, const int most, const int8_t * inputs, Scales scales) {
    (void)most;
    Sums sum = zero_sums();
    UNROLL8 for (int v = 0; v < count; v += 4) sum = dot_four(sum, weights + v, vld1q_s8(inputs + 4 * v));
    return multiply_sums(sum, scales);
}
// The same for eight vectors of signed weights.
INLINE Sums dot_signed(const Bytes * weights, const int8_t * inputs, const int16_t * total, Scales scales) {
    (void)total;
    return dot_unsigned(weights, 8, 0, inputs, scales);
}

// Unpacks 128 numbers of six bits from 96 bytes (pack_six in interleave.h).
INLINE void unpack_six(const uint8_t * at, int64_t gap, uint8_t * out) {
    (void)gap;
    for (int i = 0; i < 32; i += 16) {
        const uint8x16_t first = vld1q_u8(at + i), second = vld1q_u8(at + 32 + i), upper = vld1q_u8(at + 64 + i);
        const uint8x16_t nibble = vdupq_n_u8(15), two = vdupq_n_u8(48);
        vst1q_u8(out + i, vorrq_u8(vandq_u8(first, nibble), vandq_u8(vshlq_n_u8(upper, 4), two)));
        vst1q_u8(out + 32 + i, vorrq_u8(vandq_u8(second, nibble), vandq_u8(vshlq_n_u8(upper, 2), two)));
        vst1q_u8(out + 64 + i, vorrq_u8(vshrq_n_u8(first, 4), vandq_u8(upper, two)));
        vst1q_u8(out + 96 + i, vorrq_u8(vshrq_n_u8(second, 4), vandq_u8(vshrq_n_u8(upper, 2), two)));
    }
}
// Unpacks 64 numbers from 48 bytes.
INLINE void unpack_six_of_xs(const uint8_t * at, int64_t gap, uint8_t * out) {
    (void)gap;
    const uint8x16_t first = vld1q_u8(at), second = vld1q_u8(at + 16), upper = vld1q_u8(at + 32);
    const uint8x16_t nibble = vdupq_n_u8(15), two = vdupq_n_u8(48);
    vst1q_u8(out, vorrq_u8(vandq_u8(first, nibble), vandq_u8(vshlq_n_u8(upper, 4), two)));
    vst1q_u8(out + 16, vorrq_u8(vandq_u8(second, nibble), vandq_u8(vshlq_n_u8(upper, 2), two)));
    vst1q_u8(out + 32, vorrq_u8(vshrq_n_u8(first, 4), vandq_u8(upper, two)));
    vst1q_u8(out + 48, vorrq_u8(vshrq_n_u8(second, 4), vandq_u8(vshrq_n_u8(upper, 2), two)));
}

// ---- inputs

INLINE float find_largest(const float * from, int count) {
    float32x4_t most = vdupq_n_f32(0.f);
    for (int i = 0; i < count; i += 4) most = vmaxq_f32(most, vabsq_f32(vld1q_f32(from + i)));
    return vmaxvq_f32(most);
}
INLINE float round_to_half(float value) { return (float)(__fp16)value; }
// Rounds 32 inputs times `factor` to bytes; sums: those of each half.
INLINE void round_32(const float * from, float factor, int8_t * out, int16_t * sums) {
    for (int half = 0; half < 2; half++, from += 16, out += 16) {
        int32x4_t four[4];
        for (int i = 0; i < 4; i++) four[i] = vcvtnq_s32_f32(vmulq_n_f32(vld1q_f32(from + 4 * i), factor));
        const int16x8_t first = vcombine_s16(vqmovn_s32(four[0]), vqmovn_s32(four[1]));
        const int16x8_t second = vcombine_s16(vqmovn_s32(four[2]), vqmovn_s32(four[3]));
        const int8x16_t values = vcombine_s8(vqmovn_s16(first), vqmovn_s16(second));
        vst1q_s8(out, values);
        sums[half] = vaddlvq_s8(values);
    }
}

#include "rounding.h"
