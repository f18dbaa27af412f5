// Exponentials of all lanes of a vector.
// Infinities and NaN are handled, so it must not be compiled with -ffast-math.
#pragma once
#include "../../../../quant/native/lanes.h"

// e^x within 2 ulp; about 0 where it would be subnormal, infinite or NaN where it is too large, NaN for NaN.
#if defined(__AVX512F__)
// 2^k 2^r with |r| <= 1/2, where a minimax polynomial of degree six suffices. Nine of its steps are multiply-adds.
static inline F exponential(F x) {
    x = max_lanes(splat(-150.f), x);
    const F shifted = x * 1.442695022f + 12582912.f;  // a float this large has no fraction
    const F k = shifted - 12582912.f;
    const F r = x * 1.925962989e-8f + (x * 1.442695022f - k);  // exact, because multiply-adds do not round products
    F p = splat(1.534581200e-4f);
    p = p * r + 1.339993122e-3f;
    p = p * r + 9.618488957e-3f;
    p = p * r + 5.550328777e-2f;
    p = p * r + 2.402264689e-1f;
    p = p * r + 6.931472057e-1f;
    p = p * r + 1.f;
    return (F)_mm512_scalef_ps((__m512)p, (__m512)k);
}
#else
// 2^k e^r with |r| <= ln 2 / 2 (expf of Cephes).
static inline F exponential(F x) {
    const F shifted = x * 1.44269504f + 12582912.f;
    const F k = shifted - 12582912.f;
    const F r = (x - k * 0.693359375f) + k * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
    F p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const F out = (F)(((I)p + ((I)shifted << 23)) & (x >= -87.f));
    return select_lanes(~(x <= 88.f), x + __builtin_inff(), out);
}
#endif
