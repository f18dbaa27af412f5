// Encoders of Q4_K, Q5_K and Q6_K without importance. They write the same bytes as ggml
// (quantize_row_*_ref in ggml/src/ggml-quants.c), but process many groups at once: sums within a
// group depend on one another, groups do not. Each lane does ggml's operations in ggml's order;
// variables have ggml's names. This file is compiled with -ffp-contract=off, because ggml is compiled
// for any x86-64, without contracted multiply-adds. ggml.py uses these encoders where they write the
// bytes of the installed ggml. Called by quant/native/ggml.py.
#include <math.h>

#include "half.h"
#include "lanes.h"

// The blocks of ggml-common.h. d and dmin are F16 numbers.
#define QK_K 256
typedef struct {
    uint16_t d, dmin;
    uint8_t scales[12], qs[QK_K / 2];
} block_q4_K;
typedef struct {
    uint16_t d, dmin;
    uint8_t scales[12], qh[QK_K / 8], qs[QK_K / 2];
} block_q5_K;
typedef struct {
    uint8_t ql[QK_K / 2], qh[QK_K / 4];
    int8_t scales[QK_K / 16];
    uint16_t d;
} block_q6_K;

#define GROUP_MAX_EPS 1e-15f  // a group whose values are all smaller is stored as zeros

static inline I clamp_lanes(I x, int low, int high) {
    x = (x & ~(x < low)) | (low & (x < low));
    return (x & ~(x > high)) | (high & (x > high));
}
static inline F magnitude(F x) { return (F)((I)x & 0x7fffffff); }

// ggml's nearest_int: after the addition, the low bits of the float are the rounded number, because
// the float is too large to have a fraction.
static inline I nearest(F x) { return ((I)(x + 12582912.f) & 0x007fffff) - 0x00400000; }
static inline int nearest_scalar(float x) {
    float value = x + 12582912.f;
    int bits;
    memcpy(&bits, &value, sizeof(bits));
    return (bits & 0x007fffff) - 0x00400000;
}

// Transposes x[group][i] to out[i] with one group in each lane. Lanes without a group are zero.
static void read_groups(const float * x, int groups, int size, F * out) {
    for (int i = 0; i < size; ++i) {
        for (int lane = 0; lane < LANES; ++lane) {
            out[i][lane] = lane < groups ? x[lane * size + i] : 0.f;
        }
    }
}

// make_qkx2_quants: returns the scale of 32 values in each lane, weighted by w, and writes -minimum
// to the_min. The code of value i is codes[lane * 32 + i], in 0..nmax.
static F scale_and_min(int nmax, const F * x, const F * w, uint8_t * codes, F * the_min,
                       float rmin, float rdelta, int steps) {
    F min = x[0], max = x[0], sum_w = w[0], sum_x = w[0] * x[0], level[32];
    for (int i = 1; i < 32; ++i) {
        min = select_lanes(x[i] < min, x[i], min);
        max = select_lanes(x[i] > max, x[i], max);
        sum_w += w[i];
        sum_x += w[i] * x[i];
    }
    const F zero = {0};
    min = select_lanes(min > 0, zero, min);
    const I is_constant = max == min;
    F iscale = (float)nmax / (max - min), scale = 1 / iscale, error = zero;
    F best_iscale = iscale, best_from = min, from = min;
    for (int i = 0; i < 32; ++i) {
        F l = __builtin_convertvector(clamp_lanes(nearest(iscale * (x[i] - from)), 0, nmax), F);
        F difference = scale * l + from - x[i];
        error += w[i] * (difference * difference);
    }
    for (int step = 0; step <= steps; ++step) {
        iscale = (rmin + rdelta * step + nmax) / (max - from);
        F sum_l = zero, sum_l2 = zero, sum_xl = zero;
        for (int i = 0; i < 32; ++i) {
            I code = clamp_lanes(nearest(iscale * (x[i] - from)), 0, nmax);
            F l = level[i] = __builtin_convertvector(code, F);
            F wl = w[i] * l;
            sum_l += wl;
            sum_l2 += wl * l;
            sum_xl += wl * x[i];
        }
        F D = sum_w * sum_l2 - sum_l * sum_l;
        F this_scale = (sum_w * sum_xl - sum_x * sum_l) / D;
        F this_min = (sum_l2 * sum_x - sum_l * sum_xl) / D;
        this_scale = select_lanes(this_min > 0, sum_xl / sum_l2, this_scale);
        this_min = select_lanes(this_min > 0, zero, this_min);
        F this_error = zero;
        for (int i = 0; i < 32; ++i) {
            F difference = this_scale * level[i] + this_min - x[i];
            this_error += w[i] * (difference * difference);
        }
        I better = (D > 0) & (this_error < error);
        best_iscale = select_lanes(better, iscale, best_iscale);
        best_from = select_lanes(better, from, best_from);
        error = select_lanes(better, this_error, error);
        scale = select_lanes(better, this_scale, scale);
        from = select_lanes(better, this_min, from);
    }
    for (int i = 0; i < 32; ++i) {
        I l = clamp_lanes(nearest(best_iscale * (x[i] - best_from)), 0, nmax) & ~is_constant;
        for (int lane = 0; lane < LANES; ++lane) codes[lane * 32 + i] = (uint8_t)l[lane];
    }
    *the_min = -from;
    return select_lanes(is_constant, zero, scale);
}

// Rounds the eight scales and minimums of a superblock to six bits, packs them into ggml's twelve
// bytes, writes d and dmin, and computes the codes again with the rounded scales.
static void pack_scales(const float * x, const float * scales, const float * mins, int nmax,
                        uint8_t * packed, uint16_t * d_out, uint16_t * dmin_out,
                        uint8_t * codes) {
    float max_scale = 0, max_min = 0;
    for (int j = 0; j < 8; ++j) {
        if (scales[j] > max_scale) max_scale = scales[j];
        if (mins[j] > max_min) max_min = mins[j];
    }
    const float inv_scale = max_scale > 0 ? 63.f / max_scale : 0.f;
    const float inv_min = max_min > 0 ? 63.f / max_min : 0.f;
    uint8_t ls[8], lm[8];
    for (int j = 0; j < 8; ++j) {
        ls[j] = nearest_scalar(inv_scale * scales[j]);
        lm[j] = nearest_scalar(inv_min * mins[j]);
        if (ls[j] > 63) ls[j] = 63;
        if (lm[j] > 63) lm[j] = 63;
    }
    for (int j = 0; j < 4; ++j) {
        packed[j] = ls[j] | (ls[j + 4] >> 4) << 6;
        packed[j + 4] = lm[j] | (lm[j + 4] >> 4) << 6;
        packed[j + 8] = (ls[j + 4] & 0xF) | (lm[j + 4] & 0xF) << 4;
    }
    *d_out = float_to_half(max_scale / 63.f);
    *dmin_out = float_to_half(max_min / 63.f);
    const float d0 = half_to_float(*d_out), m0 = half_to_float(*dmin_out);
    for (int j = 0; j < 8; ++j) {
        const float d = d0 * ls[j], dm = m0 * lm[j];
        if (!d) continue;
        for (int i = 0; i < 32; ++i) {
            int l = nearest_scalar((x[32 * j + i] + dm) / d);
            codes[32 * j + i] = (uint8_t)(l < 0 ? 0 : l > nmax ? nmax : l);
        }
    }
}

// Computes scales, minimums and first codes of one or two superblocks with `groups` groups in
// total. The output arrays have space for two superblocks.
static void search(const float * x, int groups, int nmax, float rmin, int steps,
                   float * scales, float * mins, uint8_t * codes) {
    for (int first = 0; first < groups; first += LANES) {
        F values[32], weights[32], sum = {0}, min;
        read_groups(x + 32 * first, groups - first, 32, values);
        for (int i = 0; i < 32; ++i) sum += values[i] * values[i];
        for (int lane = 0; lane < LANES; ++lane) sum[lane] = sqrtf(sum[lane] / 32);
        for (int i = 0; i < 32; ++i) weights[i] = sum + magnitude(values[i]);
        F scale = scale_and_min(nmax, values, weights, codes + 32 * first, &min, rmin, 0.1f, steps);
        memcpy(scales + first, &scale, sizeof(scale));
        memcpy(mins + first, &min, sizeof(min));
    }
}

EXPORT void llmcli_encode_q4_K(const float * x, void * out, int64_t count) {
    block_q4_K * y = out;
    float scales[16], mins[16];
    uint8_t codes[2 * QK_K];
    for (int64_t blocks_left = count / QK_K; blocks_left > 0; blocks_left -= 2, x += 2 * QK_K) {
        const int blocks = blocks_left > 1 ? 2 : 1;
        search(x, 8 * blocks, 15, -1.f, 20, scales, mins, codes);
        for (int b = 0; b < blocks; ++b, ++y) {
            uint8_t * L = codes + b * QK_K;
            pack_scales(x + b * QK_K, scales + 8 * b, mins + 8 * b, 15, y->scales, &y->d, &y->dmin,
                        L);
            for (int j = 0; j < QK_K; j += 64) {
                for (int l = 0; l < 32; ++l) y->qs[j / 2 + l] = L[j + l] | (L[j + l + 32] << 4);
            }
        }
    }
}

EXPORT void llmcli_encode_q5_K(const float * x, void * out, int64_t count) {
    block_q5_K * y = out;
    float scales[16], mins[16];
    uint8_t codes[2 * QK_K];
    for (int64_t blocks_left = count / QK_K; blocks_left > 0; blocks_left -= 2, x += 2 * QK_K) {
        const int blocks = blocks_left > 1 ? 2 : 1;
        search(x, 8 * blocks, 31, -0.5f, 15, scales, mins, codes);
        for (int b = 0; b < blocks; ++b, ++y) {
            uint8_t * L = codes + b * QK_K;
            pack_scales(x + b * QK_K, scales + 8 * b, mins + 8 * b, 31, y->scales, &y->d, &y->dmin,
                        L);
            memset(y->qh, 0, sizeof(y->qh));
            for (int j = 0; j < QK_K; j += 64) {
                const int bit = j / 32;
                for (int l = 0; l < 32; ++l) {
                    const uint8_t low = L[j + l], high = L[j + l + 32];
                    y->qh[l] |= (low >> 4) << bit | (high >> 4) << (bit + 1);
                    y->qs[j / 2 + l] = (low & 0xF) | (high & 0xF) << 4;
                }
            }
        }
    }
}

// make_qx_quants with x * x as weights: returns the scale of 16 values in each lane. The code of
// value i is codes[lane * 16 + i], in 0..63.
static F scale_without_min(const F * x, int8_t * codes) {
    const F zero = {0};
    F max = zero, amax = zero, w[16], wx[16];
    for (int i = 0; i < 16; ++i) {
        F size = magnitude(x[i]);
        max = select_lanes(size > amax, x[i], max);
        amax = select_lanes(size > amax, size, amax);
        w[i] = x[i] * x[i];
        wx[i] = w[i] * x[i];
    }
    const I is_zero = amax < GROUP_MAX_EPS;
    F best_iscale = zero, scale = zero, best = zero;
    // The scale that covers all values first, then nine below and nine above.
    for (int attempt = 0; attempt < 19; ++attempt) {
        const int is = attempt == 0 ? 0 : attempt < 10 ? attempt - 10 : attempt - 9;
        F iscale = -(32 + 0.1f * is) / max, sumlx = zero, suml2 = zero;
        for (int i = 0; i < 16; ++i) {
            F l = __builtin_convertvector(clamp_lanes(nearest(iscale * x[i]), -32, 31), F);
            sumlx += wx[i] * l;
            suml2 += w[i] * l * l;
        }
        F this_scale = sumlx / suml2;
        I better = suml2 > 0;
        if (attempt == 0) {
            this_scale = select_lanes(suml2 != 0, this_scale, zero);
            better = ~(I){0};
        } else {
            better &= sumlx * sumlx > best * suml2;
        }
        best_iscale = select_lanes(better, iscale, best_iscale);
        scale = select_lanes(better, this_scale, scale);
        best = select_lanes(better, this_scale * sumlx, best);
    }
    for (int i = 0; i < 16; ++i) {
        I l = (clamp_lanes(nearest(best_iscale * x[i]), -32, 31) + 32) & ~is_zero;
        for (int lane = 0; lane < LANES; ++lane) codes[lane * 16 + i] = (int8_t)l[lane];
    }
    return select_lanes(is_zero, zero, scale);
}

EXPORT void llmcli_encode_q6_K(const float * x, void * out, int64_t count) {
    block_q6_K * y = out;
    F values[16];
    float scales[16];
    int8_t L[QK_K];
    for (int64_t blocks_left = count / QK_K; blocks_left > 0; --blocks_left, x += QK_K, ++y) {
        for (int first = 0; first < 16; first += LANES) {
            read_groups(x + 16 * first, LANES, 16, values);
            F scale = scale_without_min(values, L + 16 * first);
            memcpy(scales + first, &scale, sizeof(scale));
        }
        float max_scale = 0, max_size = 0;
        for (int j = 0; j < 16; ++j) {
            if (fabsf(scales[j]) > max_size) {
                max_size = fabsf(scales[j]);
                max_scale = scales[j];
            }
        }
        if (max_size < GROUP_MAX_EPS) {
            memset(y, 0, sizeof(*y));
            continue;
        }
        const float iscale = -128.f / max_scale;
        y->d = float_to_half(1 / iscale);
        for (int j = 0; j < 16; ++j) {
            const int l = nearest_scalar(iscale * scales[j]);
            y->scales[j] = (int8_t)(l > 127 ? 127 : l);
        }
        for (int j = 0; j < 16; ++j) {
            const float d = half_to_float(y->d) * y->scales[j];
            if (!d) continue;
            for (int i = 0; i < 16; ++i) {
                const int l = nearest_scalar(x[16 * j + i] / d);
                L[16 * j + i] = (int8_t)((l < -32 ? -32 : l > 31 ? 31 : l) + 32);
            }
        }
        for (int j = 0; j < QK_K; j += 128) {
            for (int l = 0; l < 32; ++l) {
                const uint8_t a = L[j + l], b = L[j + l + 32], c = L[j + l + 64], e = L[j + l + 96];
                y->ql[j / 2 + l] = (a & 0xF) | (c & 0xF) << 4;
                y->ql[j / 2 + l + 32] = (b & 0xF) | (e & 0xF) << 4;
                y->qh[j / 4 + l] = a >> 4 | b >> 4 << 2 | c >> 4 << 4 | e >> 4 << 6;
            }
        }
    }
}
