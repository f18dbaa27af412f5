// Conversions between F16 numbers, stored as uint16_t, and floats. They round to the nearest, ties to
// even, as ggml does, with instructions of the CPU where it has them.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

static inline float half_to_float(uint16_t stored) {
#if defined(__F16C__)
    return _cvtsh_ss(stored);
#else
    const uint32_t sign = (uint32_t)(stored & 0x8000) << 16, magnitude = stored & 0x7fff;
    float value;
    uint32_t bits;
    if (magnitude >= 0x7c00) {  // infinity, or NaN, which becomes quiet
        bits = 0x7f800000 | magnitude << 13 | (magnitude > 0x7c00 ? 0x400000 : 0);
    } else if (magnitude >= 0x400) {
        bits = (magnitude << 13) + (112u << 23);
    } else {  // subnormal: a multiple of 2^-24
        value = (float)magnitude * 0x1p-24f;
        memcpy(&bits, &value, sizeof(bits));
    }
    bits |= sign;
    memcpy(&value, &bits, sizeof(value));
    return value;
#endif
}

static inline uint16_t float_to_half(float value) {
#if defined(__F16C__)
    return (uint16_t)_cvtss_sh(value, 0);
#else
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t sign = bits >> 16 & 0x8000;
    uint32_t magnitude = bits & 0x7fffffff;
    if (magnitude > 0x7f800000) {  // NaN
        magnitude = 0x7e00 | (magnitude >> 13 & 0x3ff);
    } else if (magnitude >= 0x47800000) {  // 65536 and above
        magnitude = 0x7c00;
    } else if (magnitude >= 0x38800000) {  // a carry out of the fraction increments the exponent
        magnitude = (magnitude - (112u << 23) + 0xfff + (magnitude >> 13 & 1)) >> 13;
    } else {  // subnormal: the last bit of a float near 0.5 is 2^-24
        memcpy(&value, &magnitude, sizeof(value));
        value += 0.5f;
        memcpy(&magnitude, &value, sizeof(magnitude));
        magnitude -= 0x3f000000;
    }
    return (uint16_t)(sign | magnitude);
#endif
}
