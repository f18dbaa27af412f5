// The search of `--method search` in C (quant/methods: group_sums.py, group_scales.py,
// superblock_scales.py), with one group in each lane: the same steps in the same order as in
// Python, with many starts in the time that numpy takes for one. Multiply-adds may be contracted here,
// so that the bytes may differ between CPUs. Called by quant/native/ggml.py.
#include <math.h>

#include "half.h"

#define LANES 16
#include "lanes.h"

#define MAX_GROUP_VALUES 32
// The next three as in group_sums.py.
#define ZERO_GUARD 1e-36f
#define MIN_DETERMINANT 1e-5f
#define LARGEST_F32 3e38f
// The lanes of the second block, if the lanes have two blocks of eight groups.
#define SECOND_BLOCK ((I){0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1})

typedef int16_t H __attribute__((vector_size(2 * LANES)));

// Settings of the search; _CSearchSettings in quant/native/ggml.py has the same fields. A block has
// `groups` groups of `group_values` values. Levels are from `low` to `high`. If `has_minimum`, a
// group has a minimum, which is at most `max_minimum`. If `groups` is above 1, a group has an
// integer scale from `scale_low` to `scale_high`.
struct settings {
    int32_t group_values, groups, low, high, has_minimum, scale_low, scale_high, rounds;
    int32_t start_count, pass_count;
    float max_minimum, value_spread;
    const float * starts;
    const int32_t * offsets;  // for each pass the number of offsets, then the offsets
};

// The values x and weights w of LANES groups, one group in each lane. `weight_sum` is the sum of w,
// `product_sum` that of w x. `single_minimum` is the best minimum if all values have level 0.
struct tile {
    F x[MAX_GROUP_VALUES], w[MAX_GROUP_VALUES], wx[MAX_GROUP_VALUES];
    F weight_sum, product_sum, single_minimum;
};

// The sums of w L, w L^2 and w L x over the levels L of each group (LevelSums in group_sums.py).
struct level_sums {
    F levels, squares, products;
};

DEFINE_BY_PARTS(I, less, a < b)
DEFINE_BY_PARTS(I, at_most, a <= b)
DEFINE_BY_PARTS(I, equal, a == b)
// Returns 1 / x, but 0 for x near zero.
static inline F invert(F x) { return x / (x * x + ZERO_GUARD); }
static inline F square_root(F x) {
#if defined(__AVX512F__)
    return (F)_mm512_sqrt_ps((__m512)x);
#else
    float * values = (float *)&x;
    for (int lane = 0; lane < LANES; ++lane) values[lane] = sqrtf(values[lane]);
    return x;
#endif
}
static inline F clip(F x, float low, float high) {
    return min_lanes(max_lanes(x, splat(low)), splat(high));
}
// Adding and subtracting this number rounds numbers within 2^22 to integers, because a float that
// is large enough has no fraction. It breaks if the compiler may reorder floats.
#define ROUNDING 12582912.f
static inline F round_lanes(F x) { return (x + ROUNDING) - ROUNDING; }
static inline F clip_and_round(F x, float low, float high) {
    return round_lanes(clip(x, low, high));
}

// Returns the sum over the groups of each block, in all lanes of the block. Lanes are added in
// order.
static inline F sum_block(F x, int groups) {
    if (groups == 1) return x;
    float sum = 0, second_sum = 0;
    for (int lane = 0; lane < LANES / 2; ++lane) sum += x[lane];
    if (groups == LANES) {
        for (int lane = LANES / 2; lane < LANES; ++lane) sum += x[lane];
        return splat(sum);
    }
    for (int lane = LANES / 2; lane < LANES; ++lane) second_sum += x[lane];
    return select_lanes(SECOND_BLOCK, splat(second_sum), splat(sum));
}

static inline F round_to_f16(F x) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(
        _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    for (int first = 0; first < LANES; first += 8) {
        float * part = (float *)&x + first;
        const __m128i stored = _mm256_cvtps_ph(_mm256_loadu_ps(part), _MM_FROUND_TO_NEAREST_INT);
        _mm256_storeu_ps(part, _mm256_cvtph_ps(stored));
    }
    return x;
#else
    for (int lane = 0; lane < LANES; ++lane) {
        x[lane] = half_to_float(float_to_half(x[lane]));
    }
    return x;
#endif
}

// Returns the levels that are nearest to x, given 1 / scale and -minimum / scale.
static inline F nearest_level(const struct settings * s, F x, F inverse, F offset) {
    return clip_and_round(x * inverse + offset, s->low, s->high);
}

// Returns the sums for the nearest levels. The last two parameters are constants, so that the
// compiler makes a loop for each case.
__attribute__((always_inline)) static inline struct level_sums sums_of_case(
    const struct settings * s, const struct tile * t, F scale, F minimum, const int group_values,
    const int has_minimum) {
    const F inverse = invert(scale), offset = has_minimum ? -minimum * inverse : splat(0);
    const W low = (float)s->low - (W){0}, high = (float)s->high - (W){0};
    struct level_sums sums = {splat(0), splat(0), splat(0)};
    for (int first = 0; first < LANES; first += WIDTH) {
        const W inverse_part = load_part(&inverse, first), offset_part = load_part(&offset, first);
        W levels = {0}, squares = {0}, products = {0};
        for (int i = 0; i < group_values; ++i) {
            const W exact = load_part(&t->x[i], first) * inverse_part + offset_part;
            const W clipped = min_part(max_part(exact, low), high);
            const W l = (clipped + ROUNDING) - ROUNDING, wl = load_part(&t->w[i], first) * l;
            if (has_minimum) levels += wl;
            squares += wl * l;
            products += load_part(&t->wx[i], first) * l;
        }
        store_part(&sums.levels, first, levels);
        store_part(&sums.squares, first, squares);
        store_part(&sums.products, first, products);
    }
    return sums;
}

// GroupSums.sums
static struct level_sums nearest_sums(const struct settings * s, const struct tile * t, F scale,
                                      F minimum) {
    if (s->has_minimum) {
        return s->group_values == 32 ? sums_of_case(s, t, scale, minimum, 32, 1)
                                     : sums_of_case(s, t, scale, minimum, 16, 1);
    }
    return s->group_values == 32 ? sums_of_case(s, t, scale, minimum, 32, 0)
                                 : sums_of_case(s, t, scale, minimum, 16, 0);
}

// GroupSums.best_scales: returns the best scale, and writes the best minimum if groups have one.
static inline F best_scales(const struct settings * s, const struct tile * t,
                            struct level_sums sums, F * minimum) {
    if (!s->has_minimum) return sums.products * invert(sums.squares);
    const F product = t->weight_sum * sums.squares;
    const F determinant = product - sums.levels * sums.levels, inverse = invert(determinant);
    F scale = (t->weight_sum * sums.products - t->product_sum * sums.levels) * inverse;
    F best_minimum = (sums.squares * t->product_sum - sums.levels * sums.products) * inverse;
    const I unusable = ~(less(MIN_DETERMINANT * product, determinant) &
                         at_most(best_minimum, splat(s->max_minimum)));
    if (any_lane(unusable)) {
        scale = select_lanes(unusable, sums.products * invert(sums.squares), scale);
        const I is_zero = equal(sums.squares, splat(0));
        const F level_minimum = select_lanes(is_zero, t->single_minimum, splat(0));
        best_minimum = select_lanes(unusable, level_minimum, best_minimum);
    }
    *minimum = best_minimum;
    return scale;
}

// GroupSums.error
static F scale_error(const struct settings * s, const struct tile * t, F scale, F minimum,
                     struct level_sums sums) {
    const F error = scale * (scale * sums.squares - 2 * sums.products);
    return s->has_minimum ? error + minimum * (2 * scale * sums.levels + minimum * t->weight_sum -
                                               2 * t->product_sum)
                          : error;
}

// LevelSums.where
static struct level_sums select_sums(I which, struct level_sums yes, struct level_sums no) {
    return (struct level_sums){select_lanes(which, yes.levels, no.levels),
                               select_lanes(which, yes.squares, no.squares),
                               select_lanes(which, yes.products, no.products)};
}

// fit_group_scales in group_scales.py: returns the best scale of each group, and writes its minimum
// and its sums.
static F fit_group_scales(const struct settings * s, const struct tile * t, F * out_minimum,
                          struct level_sums * out_sums) {
    F low = t->x[0], high = t->x[0], full_scale;
    F best_scale = splat(0), best_error = splat(0), best_minimum = splat(0);
    for (int i = 1; i < s->group_values; ++i) {
        low = min_lanes(low, t->x[i]);
        high = max_lanes(high, t->x[i]);
    }
    if (s->has_minimum) {
        low = clip(low, -LARGEST_F32, s->max_minimum);
        full_scale = (high - low) / (float)s->high;
    } else {
        full_scale = select_lanes(less(-low, high), high, low) / (float)s->low;
    }
    for (int start = 0; start < s->start_count; ++start) {
        F scale = full_scale / s->starts[start], minimum = low;
        struct level_sums sums = {splat(0), splat(0), splat(0)};
        for (int round = 0; round < s->rounds; ++round) {
            sums = nearest_sums(s, t, scale, minimum);
            scale = best_scales(s, t, sums, &minimum);
        }
        const F error = scale_error(s, t, scale, minimum, sums);
        const I better = start ? less(error, best_error) : ~(I){0};
        best_error = select_lanes(better, error, best_error);
        best_scale = select_lanes(better, scale, best_scale);
        best_minimum = select_lanes(better, minimum, best_minimum);
        *out_sums = select_sums(better, sums, *out_sums);
    }
    *out_minimum = best_minimum;
    return best_scale;
}

// SuperblockScales in superblock_scales.py, with d and m in all lanes of a block. The scale of a
// group is d * scales, and its minimum is -m * mins.
struct scales {
    F d, m, scales, mins;
};

// SuperblockSearch._refit. Normal equations of x = d s - m t: s are scales times levels, t are
// mins.
static struct scales refit(const struct settings * s, const struct tile * t, struct scales p,
                           struct level_sums sums) {
    const F ss = sum_block(p.scales * p.scales * sums.squares, s->groups);
    const F sx = sum_block(p.scales * sums.products, s->groups);
    struct scales candidate = p;
    I valid;
    if (!s->has_minimum) {
        candidate.d = round_to_f16(sx * invert(ss));
        valid = ~equal(candidate.d, splat(0));
    } else {
        const F st = sum_block(p.scales * p.mins * sums.levels, s->groups);
        const F tt = sum_block(p.mins * p.mins * t->weight_sum, s->groups);
        const F tx = sum_block(p.mins * t->product_sum, s->groups);
        const F inverse = invert(ss * tt - st * st);
        candidate.d = round_to_f16((sx * tt - tx * st) * inverse);
        candidate.m = round_to_f16((sx * st - tx * ss) * inverse);
        valid = less(splat(0), candidate.d) & at_most(splat(0), candidate.m);
    }
    const F old_error =
        sum_block(scale_error(s, t, p.d * p.scales, -(p.m * p.mins), sums), s->groups);
    const F new_error = sum_block(scale_error(s, t, candidate.d * candidate.scales,
                                              -(candidate.m * candidate.mins), sums),
                                  s->groups);
    const I better = valid & less(new_error, old_error);
    p.d = select_lanes(better, candidate.d, p.d);
    p.m = select_lanes(better, candidate.m, p.m);
    return p;
}

// SuperblockSearch.round_scales
static struct scales round_scales(const struct settings * s, const struct tile * t, F scale,
                                  F minimum, struct level_sums sums) {
    struct scales p = {splat(0), splat(0), splat(0), splat(0)};
    F d_lanes = scale, negated = -minimum;
    for (int first = 0; first < LANES; first += s->groups) {
        float largest = scale[first], smallest = scale[first], largest_negated = negated[first];
        for (int lane = first; lane < first + s->groups; ++lane) {
            largest = scale[lane] > largest ? scale[lane] : largest;
            smallest = scale[lane] < smallest ? scale[lane] : smallest;
            largest_negated = negated[lane] > largest_negated ? negated[lane] : largest_negated;
        }
        const float d = s->scale_low ? (largest > -smallest ? largest : smallest) / s->scale_low
                                     : largest / s->scale_high;
        for (int lane = first; lane < first + s->groups; ++lane) {
            d_lanes[lane] = d;
            p.m[lane] = s->has_minimum ? largest_negated / s->scale_high : 0;
        }
    }
    p.d = round_to_f16(d_lanes);
    p.m = round_to_f16(p.m);
    p.scales = clip_and_round(scale * invert(p.d), s->scale_low, s->scale_high);
    if (s->has_minimum) {
        p.mins = clip_and_round(negated * invert(p.m), s->scale_low, s->scale_high);
    }
    return refit(s, t, p, sums);
}

// SuperblockSearch._accept_better: replaces scales, errors and sums in the groups where
// `new_scales` lower the error.
static void accept_better(const struct settings * s, const struct tile * t, struct scales * p,
                          F * error, struct level_sums * sums, F new_scales,
                          struct level_sums new_sums) {
    const F scale = p->d * new_scales;
    F mins = p->mins;
    if (s->has_minimum) {
        mins = clip_and_round(
            (scale * new_sums.levels - t->product_sum) / t->weight_sum * invert(p->m),
            s->scale_low, s->scale_high);
    }
    const F new_error = scale_error(s, t, scale, -(p->m * mins), new_sums);
    const I better = less(new_error, *error);
    p->scales = select_lanes(better, new_scales, p->scales);
    p->mins = select_lanes(better, mins, p->mins);
    *error = select_lanes(better, new_error, *error);
    *sums = select_sums(better, new_sums, *sums);
}

// SuperblockSearch.improve
static struct scales improve(const struct settings * s, const struct tile * t, struct scales p,
                             const int32_t * offsets, int offset_count) {
    const struct scales initial = p;
    const F minimum = -(p.m * p.mins);
    struct level_sums sums = nearest_sums(s, t, p.d * p.scales, minimum);
    F error = scale_error(s, t, p.d * p.scales, minimum, sums), ignored;
    for (int n = 0; n < offset_count; ++n) {
        const F scales = clip(initial.scales + (float)offsets[n], s->scale_low, s->scale_high);
        accept_better(s, t, &p, &error, &sums, scales,
                      nearest_sums(s, t, initial.d * scales, minimum));
    }
    const F exact = best_scales(s, t, sums, &ignored) * invert(p.d);
    const struct level_sums fixed_sums = sums;
    if (s->has_minimum) {
        const F integer = clip_and_round(exact - 0.5f, s->scale_low, s->scale_high);
        accept_better(s, t, &p, &error, &sums, integer, fixed_sums);
        accept_better(s, t, &p, &error, &sums,
                      clip(integer + 1, s->scale_low, s->scale_high), fixed_sums);
    } else {
        accept_better(s, t, &p, &error, &sums,
                      clip_and_round(exact, s->scale_low, s->scale_high), fixed_sums);
    }
    return refit(s, t, p, sums);
}

#if defined(__AVX512F__)
// Returns the lanes `which` of `a` (0 to 15) and `b` (16 to 31).
static inline F shuffle(F a, I which, F b) {
    return (F)_mm512_permutex2var_ps((__m512)a, (__m512i)which, (__m512)b);
}
#endif

// Transposes sixteen rows of sixteen lanes: lane i of row j becomes lane j of row i. This is done
// in registers, which is faster than reading lane by lane.
static inline void transpose(F rows[LANES]) {
#if !defined(__AVX512F__)
    float * values = (float *)rows;
    for (int row = 0; row < LANES; ++row) {
        for (int lane = 0; lane < row; ++lane) {
            const float saved = values[row * LANES + lane];
            values[row * LANES + lane] = values[lane * LANES + row];
            values[lane * LANES + row] = saved;
        }
    }
#else
    const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int step = LANES / 2; step; step /= 2) {
        const I upper = (lane & step) != 0, first = lane + (upper & (LANES - step));
        const I second = first + step;
        for (int row = 0; row < LANES; ++row) {
            if (row & step) continue;
            const F a = rows[row], b = rows[row + step];
            rows[row] = shuffle(a, first, b);
            rows[row + step] = shuffle(a, second, b);
        }
    }
#endif
}

// Reads the tile that begins with group `group` of `groups`. Lanes after the last group repeat that
// group. Weights repeat after `period` groups.
static void read_tile(const struct settings * s, struct tile * t, const float * x, const float * w,
                      int64_t group, int64_t groups, int64_t period) {
    const int size = s->group_values;
    // For each lane, the positions of its values and of its weights.
    int64_t x_offsets[LANES], w_offsets[LANES], column = group % period;
    for (int lane = 0; lane < LANES; ++lane) {
        if (lane && group + lane < groups) column = column + 1 == period ? 0 : column + 1;
        x_offsets[lane] = (group + lane < groups ? group + lane : groups - 1) * size;
        w_offsets[lane] = column * size;
    }
    for (int i = 0; i < size; i += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            t->x[i + lane] = load(x + x_offsets[lane] + i);
            t->w[i + lane] = load(w + w_offsets[lane] + i);
        }
        transpose(t->x + i);
        transpose(t->w + i);
    }
    if (s->value_spread > 0) {
        F inverse = splat(0);
        for (int i = 0; i < size; ++i) inverse += t->x[i] * t->x[i];
        inverse = sum_block(inverse, s->groups) / (float)(size * s->groups);
        inverse = invert(square_root(inverse));
        for (int i = 0; i < size; ++i) {
            F ratio = t->x[i] * inverse;
            ratio = ratio * ratio + s->value_spread;
            t->w[i] *= square_root(ratio);
        }
    }
    t->weight_sum = t->product_sum = splat(0);
    for (int i = 0; i < size; ++i) {
        t->wx[i] = t->w[i] * t->x[i];
        t->weight_sum += t->w[i];
        t->product_sum += t->wx[i];
    }
    t->single_minimum = clip(t->product_sum / t->weight_sum, -LARGEST_F32, s->max_minimum);
}

// Searches scales for values x [blocks, groups of a block, values of a group] with weights w, which
// repeat after `period` groups. Outputs: levels in the shape of x, d and m [blocks], scales and
// mins [blocks, groups of a block]. Outputs that the format does not have are not written.
EXPORT void llmcli_search(const struct settings * s, const float * x, const float * w,
                          int64_t blocks, int64_t period, int16_t * levels, float * d, float * m,
                          int16_t * scales, int16_t * mins) {
    const int64_t groups = blocks * s->groups;
    for (int64_t group = 0; group < groups; group += LANES) {
        struct tile t;
        struct level_sums sums = {splat(0), splat(0), splat(0)};
        struct scales p;
        F minimum;
        read_tile(s, &t, x, w, group, groups, period);
        const F scale = fit_group_scales(s, &t, &minimum, &sums);
        if (s->groups == 1) {
            p = (struct scales){round_to_f16(scale),
                                s->has_minimum ? -round_to_f16(minimum) : splat(0), splat(1),
                                splat(1)};
        } else {
            p = round_scales(s, &t, scale, minimum, sums);
            const int32_t * offsets = s->offsets;
            for (int pass = 0; pass < s->pass_count; ++pass, offsets += 1 + offsets[0]) {
                p = improve(s, &t, p, offsets + 1, offsets[0]);
            }
        }
        const F inverse = invert(p.d * p.scales), offset = p.m * p.mins * inverse;
        const int used_lanes = groups - group < LANES ? groups - group : LANES;
        for (int i = 0; i < s->group_values; i += LANES) {
            F rows[LANES];
            for (int j = 0; j < LANES; ++j) rows[j] = nearest_level(s, t.x[i + j], inverse, offset);
            transpose(rows);
            for (int lane = 0; lane < used_lanes; ++lane) {
                const H codes = __builtin_convertvector(rows[lane], H);
                memcpy(levels + (group + lane) * s->group_values + i, &codes, sizeof(codes));
            }
        }
        for (int lane = 0; lane < used_lanes; ++lane) {
            const int64_t g = group + lane;
            d[g / s->groups] = p.d[lane];
            if (s->has_minimum) m[g / s->groups] = s->groups == 1 ? -p.m[lane] : p.m[lane];
            if (s->groups > 1) scales[g] = (int16_t)p.scales[lane];
            if (s->groups > 1 && s->has_minimum) mins[g] = (int16_t)p.mins[lane];
        }
    }
}
