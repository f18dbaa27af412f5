// One look at a row of logits: the sum of its exponentials, for log-probabilities, and the largest of each of its
// columns, in which the likeliest tokens stand (llmcli/runtime/ranked.py). Behind a forward pass a row comes from far
// away, and whoever looks at it twice fetches it twice. scripts/llama.cmake builds it into libggml-base;
// llmcli/runtime/binding/softmax.py calls it. Infinities and NaN matter: not for -ffast-math.
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#if defined(__AVX512F__)
#include <immintrin.h>
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif
#define PIECE 512  // logits that are summed in floats, before the sum is one of doubles
#define AHEAD 1024  // logits that are fetched before they are needed

typedef float F __attribute__((vector_size(4 * LANES)));
typedef int32_t I __attribute__((vector_size(4 * LANES)));
typedef double D __attribute__((vector_size(8 * LANES)));

static inline F all(float value) { return value - (F){0}; }
static inline F either(I which, F yes, F no) { return (F)((which & (I)yes) | (~which & (I)no)); }
#if defined(__AVX512F__)
static inline F larger(F a, F b) { return (F)_mm512_max_ps((__m512)a, (__m512)b); }
#else
static inline F larger(F a, F b) { return either(a > b, a, b); }
#endif
static inline F load(const float * x) {
    F out;
    memcpy(&out, x, sizeof(out));
    return out;
}

// e^x within 2 ulp: 2^k e^r with |r| <= ln 2 / 2, where a polynomial of the sixth degree (expf of Cephes) does.
// Below -87, where floats lose their digits, it is 0; above 88 infinite; of NaN NaN.
static inline F exponential(F x) {
    const F shifted = x * 1.44269504f + 12582912.f;  // a float that is large enough has no fraction
    const F k = shifted - 12582912.f;
    const F r = (x - k * 0.693359375f) + k * 2.12194440e-4f;  // ln 2 in two parts: the first product is exact
    F p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.f;
    const F out = (F)(((I)p + ((I)shifted << 23)) & (x >= -87.f));
    return either(~(x <= 88.f), x + __builtin_inff(), out);
}

static inline double look(const float * x, int64_t count, int64_t across, float near, float * largest, int columns) {
    D total = {0};
    for (int64_t at = 0; at < count; at += across, x += across) {
        const int64_t width = count - at < across ? count - at : across;
        for (int64_t first = 0; first < width; first += PIECE) {
            const int64_t last = width - first < PIECE ? width : first + PIECE;
            F even = {0}, odd = {0};
            int64_t i = first;
            for (; i + 2 * LANES <= last; i += 2 * LANES) {
                __builtin_prefetch(x + i + AHEAD);  // beyond the end it does nothing
                __builtin_prefetch(x + i + AHEAD + LANES);
                const F a = load(x + i), b = load(x + i + LANES);
                if (columns) {
                    const F most_a = larger(load(largest + i), a), most_b = larger(load(largest + i + LANES), b);
                    memcpy(largest + i, &most_a, sizeof(F));
                    memcpy(largest + i + LANES, &most_b, sizeof(F));
                }
                even += exponential(a - near);
                odd += exponential(b - near);
            }
            for (; i < last; i += LANES) {
                const size_t left = last - i < LANES ? last - i : LANES;
                F a = all(-__builtin_inff());
                memcpy(&a, x + i, 4 * left);
                for (size_t lane = 0; columns && lane < left; ++lane) {
                    if (a[lane] > largest[i + lane]) largest[i + lane] = a[lane];
                }
                even += exponential(a - near);
            }
            total += __builtin_convertvector(even, D) + __builtin_convertvector(odd, D);
        }
    }
    double sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
    return sum;
}

// The sum of e^(x - near) over `count` logits; NaN where one of them is. Where `largest` is given it gets the largest
// of each column of the row laid out `across` to a line, the last of which may be shorter; of NaN nothing is said.
EXPORT double llmcli_look(const float * x, int64_t count, int64_t across, float near, float * largest) {
    if (!largest) return look(x, count, count, near, largest, 0);
    for (int64_t i = 0; i < across; ++i) largest[i] = -__builtin_inff();
    return look(x, count, across, near, largest, 1);
}
