// The search of quant/methods (group_sums.py, group_scales.py, superblock_scales.py) with one group in each lane: the
// same steps in the same order, with many starts in the time of one in numpy. scripts/build/llama.cmake builds it into
// libggml-base, where multiply-adds may be contracted, so that its bytes may differ between CPUs. Called by
// quant/native/ggml.py.
#include <math.h>

#include "ggml.h"

#define LANES 16
#include "lanes.h"

#define MOST 32         // values in a group
#define NOTHING 1e-36f  // as in group_sums.py
#define SINGULAR 1e-5f
#define LARGE 3e38f
#define UPPER ((I){0, 0, 0, 0, 0, 0, 0, 0, -1, -1, -1, -1, -1, -1, -1, -1})  // the second of two blocks of eight groups

typedef int16_t H __attribute__((vector_size(2 * LANES)));

// Settings of the search; quant/native/ggml.py has the same structure. `least` says that groups have a minimum, which
// is at most `most`; integer scales from `below` to `above` are used if `groups` is above 1.
struct grid {
    int32_t size, groups, low, high, least, below, above, rounds, starts, looks;
    float most, spread;
    const float * start;
    const int32_t * around;  // for each look the number of offsets, then the offsets
};

// `bottom` is the best minimum if all values have level 0.
struct tile {
    F x[MOST], w[MOST], wx[MOST], weight, along, bottom;
};

struct sums {
    F plain, square, along;
};

BY_PARTS(I, less, a < b)
BY_PARTS(I, at_most, a <= b)
BY_PARTS(I, same, a == b)
static inline F inverted(F x) { return x / (x * x + NOTHING); }
static inline F root(F x) {
#if defined(__AVX512F__)
    return (F)_mm512_sqrt_ps((__m512)x);
#else
    float * at = (float *)&x;
    for (int lane = 0; lane < LANES; ++lane) at[lane] = sqrtf(at[lane]);
    return x;
#endif
}
static inline F clip(F x, float low, float high) { return smaller(larger(x, all(low)), all(high)); }
// Rounds numbers within 2^22: a float that is large enough has no fraction. Breaks if the compiler may reorder floats.
#define ROUNDING 12582912.f
static inline F whole(F x) { return (x + ROUNDING) - ROUNDING; }
static inline F rounded(F x, float low, float high) { return whole(clip(x, low, high)); }

// The sum over the groups of each block, added in order and written to all of the block's lanes.
static inline F over_block(F x, int groups) {
    if (groups == 1) return x;
    float sum = 0, next = 0;
    for (int lane = 0; lane < LANES / 2; ++lane) sum += x[lane];
    if (groups == LANES) {
        for (int lane = LANES / 2; lane < LANES; ++lane) sum += x[lane];
        return all(sum);
    }
    for (int lane = LANES / 2; lane < LANES; ++lane) next += x[lane];
    return either(UPPER, all(next), all(sum));
}

static inline F halves(F x) {
#if defined(__AVX512F__)
    return (F)_mm512_cvtph_ps(_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
#elif defined(__F16C__)
    for (int first = 0; first < LANES; first += 8) {
        float * at = (float *)&x + first;
        _mm256_storeu_ps(at, _mm256_cvtph_ps(_mm256_cvtps_ph(_mm256_loadu_ps(at), _MM_FROUND_TO_NEAREST_INT)));
    }
    return x;
#else
    for (int lane = 0; lane < LANES; ++lane) x[lane] = ggml_fp16_to_fp32(ggml_fp32_to_fp16(x[lane]));
    return x;
#endif
}

static inline F level(const struct grid * g, F x, F inverse, F offset) {
    return rounded(x * inverse + offset, g->low, g->high);
}

__attribute__((always_inline)) static inline struct sums sums_of(
    const struct grid * g, const struct tile * t, F scale, F least, const int size, const int with_least) {
    const F inverse = inverted(scale), offset = with_least ? -least * inverse : all(0);
    const W low = (float)g->low - (W){0}, high = (float)g->high - (W){0};
    struct sums s = {all(0), all(0), all(0)};
    for (int first = 0; first < LANES; first += WIDTH) {
        const W by = some(&inverse, first), from = some(&offset, first);
        W plain = {0}, square = {0}, along = {0};
        for (int i = 0; i < size; ++i) {
            const W near = lower(upper(some(&t->x[i], first) * by + from, low), high);
            const W l = (near + ROUNDING) - ROUNDING, wl = some(&t->w[i], first) * l;
            if (with_least) plain += wl;
            square += wl * l;
            along += some(&t->wx[i], first) * l;
        }
        put(&s.plain, first, plain);
        put(&s.square, first, square);
        put(&s.along, first, along);
    }
    return s;
}

static struct sums sums(const struct grid * g, const struct tile * t, F scale, F least) {
    if (g->least) return g->size == 32 ? sums_of(g, t, scale, least, 32, 1) : sums_of(g, t, scale, least, 16, 1);
    return g->size == 32 ? sums_of(g, t, scale, least, 32, 0) : sums_of(g, t, scale, least, 16, 0);
}

static inline F best(const struct grid * g, const struct tile * t, struct sums s, F * least) {
    if (!g->least) return s.along * inverted(s.square);
    const F both = t->weight * s.square, apart = both - s.plain * s.plain, inverse = inverted(apart);
    F scale = (t->weight * s.along - t->along * s.plain) * inverse;
    F own = (s.square * t->along - s.plain * s.along) * inverse;
    const I alone = ~(less(SINGULAR * both, apart) & at_most(own, all(g->most)));
    if (any(alone)) {
        scale = either(alone, s.along * inverted(s.square), scale);
        own = either(alone, either(same(s.square, all(0)), t->bottom, all(0)), own);
    }
    *least = own;
    return scale;
}

static F error(const struct grid * g, const struct tile * t, F scale, F least, struct sums s) {
    const F error = scale * (scale * s.square - 2 * s.along);
    return g->least ? error + least * (2 * scale * s.plain + least * t->weight - 2 * t->along) : error;
}

static struct sums chosen(I which, struct sums a, struct sums b) {
    return (struct sums){either(which, a.plain, b.plain), either(which, a.square, b.square),
                         either(which, a.along, b.along)};
}

// group_scales.py
static F fitted(const struct grid * g, const struct tile * t, F * the_least, struct sums * the_sums) {
    F low = t->x[0], high = t->x[0], span, found = all(0), error_found = all(0), least_found = all(0);
    for (int i = 1; i < g->size; ++i) {
        low = smaller(low, t->x[i]);
        high = larger(high, t->x[i]);
    }
    if (g->least) {
        low = clip(low, -LARGE, g->most);
        span = (high - low) / (float)g->high;
    } else {
        span = either(less(-low, high), high, low) / (float)g->low;
    }
    for (int start = 0; start < g->starts; ++start) {
        F scale = span / g->start[start], least = low;
        struct sums s = {all(0), all(0), all(0)};
        for (int round = 0; round < g->rounds; ++round) {
            s = sums(g, t, scale, least);
            scale = best(g, t, s, &least);
        }
        const F off = error(g, t, scale, least, s);
        const I better = start ? less(off, error_found) : ~(I){0};
        error_found = either(better, off, error_found);
        found = either(better, scale, found);
        least_found = either(better, least, least_found);
        *the_sums = chosen(better, s, *the_sums);
    }
    *the_least = least_found;
    return found;
}

// superblock_scales.py, with d and m in all lanes of a block.
struct steps {
    F d, m, scales, mins;
};

static struct steps refitted(const struct grid * g, const struct tile * t, struct steps p, struct sums s) {
    const F square = over_block(p.scales * p.scales * s.square, g->groups);
    const F along = over_block(p.scales * s.along, g->groups);
    struct steps tried = p;
    I sound;
    if (!g->least) {
        tried.d = halves(along * inverted(square));
        sound = ~same(tried.d, all(0));
    } else {
        const F cross = over_block(p.scales * p.mins * s.plain, g->groups);
        const F weight = over_block(p.mins * p.mins * t->weight, g->groups);
        const F down = over_block(p.mins * t->along, g->groups);
        const F inverse = inverted(square * weight - cross * cross);
        tried.d = halves((along * weight - down * cross) * inverse);
        tried.m = halves((along * cross - down * square) * inverse);
        sound = less(all(0), tried.d) & at_most(all(0), tried.m);
    }
    const F before = over_block(error(g, t, p.d * p.scales, -(p.m * p.mins), s), g->groups);
    const F after = over_block(error(g, t, tried.d * tried.scales, -(tried.m * tried.mins), s), g->groups);
    const I better = sound & less(after, before);
    p.d = either(better, tried.d, p.d);
    p.m = either(better, tried.m, p.m);
    return p;
}

static struct steps first_steps(const struct grid * g, const struct tile * t, F scale, F least, struct sums s) {
    struct steps p = {all(0), all(0), all(0), all(0)};
    F top = scale, down = -least;
    for (int first = 0; first < LANES; first += g->groups) {
        float most = scale[first], under = scale[first], deepest = down[first];
        for (int lane = first; lane < first + g->groups; ++lane) {
            most = scale[lane] > most ? scale[lane] : most;
            under = scale[lane] < under ? scale[lane] : under;
            deepest = down[lane] > deepest ? down[lane] : deepest;
        }
        const float d = g->below ? (most > -under ? most : under) / g->below : most / g->above;
        for (int lane = first; lane < first + g->groups; ++lane) {
            top[lane] = d;
            p.m[lane] = g->least ? deepest / g->above : 0;
        }
    }
    p.d = halves(top);
    p.m = halves(p.m);
    p.scales = rounded(scale * inverted(p.d), g->below, g->above);
    if (g->least) p.mins = rounded(down * inverted(p.m), g->below, g->above);
    return refitted(g, t, p, s);
}

static void better_steps(const struct grid * g, const struct tile * t, struct steps * p, F * off, struct sums * s,
                         F scales, struct sums own) {
    const F scale = p->d * scales;
    F mins = p->mins;
    if (g->least) mins = rounded((scale * own.plain - t->along) / t->weight * inverted(p->m), g->below, g->above);
    const F tried = error(g, t, scale, -(p->m * mins), own);
    const I which = less(tried, *off);
    p->scales = either(which, scales, p->scales);
    p->mins = either(which, mins, p->mins);
    *off = either(which, tried, *off);
    *s = chosen(which, own, *s);
}

static struct steps improved(const struct grid * g, const struct tile * t, struct steps p, const int32_t * around,
                             int neighbours) {
    const struct steps begun = p;
    const F least = -(p.m * p.mins);
    struct sums s = sums(g, t, p.d * p.scales, least);
    F off = error(g, t, p.d * p.scales, least, s), ignored;
    for (int n = 0; n < neighbours; ++n) {
        const F scales = clip(begun.scales + (float)around[n], g->below, g->above);
        better_steps(g, t, &p, &off, &s, scales, sums(g, t, begun.d * scales, least));
    }
    const F turned = best(g, t, s, &ignored) * inverted(p.d);
    const struct sums frozen = s;
    if (g->least) {
        const F under = rounded(turned - 0.5f, g->below, g->above);
        better_steps(g, t, &p, &off, &s, under, frozen);
        better_steps(g, t, &p, &off, &s, clip(under + 1, g->below, g->above), frozen);
    } else {
        better_steps(g, t, &p, &off, &s, rounded(turned, g->below, g->above), frozen);
    }
    return refitted(g, t, p, s);
}

// Transposes sixteen rows of sixteen: lane i of row j becomes lane j of row i. Done in registers, which is faster than
// reading lane by lane.
static inline void turn(F rows[LANES]) {
#if !defined(__AVX512F__)
    float * at = (float *)rows;
    for (int row = 0; row < LANES; ++row) {
        for (int lane = 0; lane < row; ++lane) {
            const float kept = at[row * LANES + lane];
            at[row * LANES + lane] = at[lane * LANES + row];
            at[lane * LANES + row] = kept;
        }
    }
#else
    const I lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    for (int step = LANES / 2; step; step /= 2) {
        const I upper = (lane & step) != 0, first = lane + (upper & (LANES - step)), second = first + step;
        for (int row = 0; row < LANES; ++row) {
            if (row & step) continue;
            const F a = rows[row], b = rows[row + step];
            rows[row] = __builtin_shuffle(a, b, first);
            rows[row + step] = __builtin_shuffle(a, b, second);
        }
    }
#endif
}

// Reads the tile that begins with `group`; lanes after the last group repeat that group.
static void gather(const struct grid * g, struct tile * t, const float * x, const float * w, int64_t group,
                   int64_t groups, int64_t period) {
    const int size = g->size;
    int64_t own[LANES], beside[LANES], column = group % period;  // offsets of each lane's values and weights
    for (int lane = 0; lane < LANES; ++lane) {
        if (lane && group + lane < groups) column = column + 1 == period ? 0 : column + 1;
        own[lane] = (group + lane < groups ? group + lane : groups - 1) * size;
        beside[lane] = column * size;
    }
    for (int i = 0; i < size; i += LANES) {
        for (int lane = 0; lane < LANES; ++lane) {
            t->x[i + lane] = load(x + own[lane] + i);
            t->w[i + lane] = load(w + beside[lane] + i);
        }
        turn(t->x + i);
        turn(t->w + i);
    }
    if (g->spread > 0) {
        F mean = all(0);
        for (int i = 0; i < size; ++i) mean += t->x[i] * t->x[i];
        mean = over_block(mean, g->groups) / (float)(size * g->groups);
        mean = inverted(root(mean));
        for (int i = 0; i < size; ++i) {
            F ratio = t->x[i] * mean;
            ratio = ratio * ratio + g->spread;
            t->w[i] *= root(ratio);
        }
    }
    t->weight = t->along = all(0);
    for (int i = 0; i < size; ++i) {
        t->wx[i] = t->w[i] * t->x[i];
        t->weight += t->w[i];
        t->along += t->wx[i];
    }
    t->bottom = clip(t->along / t->weight, -LARGE, g->most);
}

// Searches scales for values x [blocks, groups of a block, size] with weights w, which repeat after `period` groups.
// Outputs: levels of the shape of x, d and m [blocks], scales and mins [blocks, groups of a block].
EXPORT void llmcli_search(const struct grid * g, const float * x, const float * w, int64_t blocks, int64_t period,
                          int16_t * levels, float * d, float * m, int16_t * scales, int16_t * mins) {
    const int64_t groups = blocks * g->groups;
    for (int64_t group = 0; group < groups; group += LANES) {
        struct tile t;
        struct sums s = {all(0), all(0), all(0)};
        struct steps p;
        F least;
        gather(g, &t, x, w, group, groups, period);
        const F scale = fitted(g, &t, &least, &s);
        if (g->groups == 1) {
            p = (struct steps){halves(scale), g->least ? -halves(least) : all(0), all(1), all(1)};
        } else {
            p = first_steps(g, &t, scale, least, s);
            const int32_t * around = g->around;
            for (int look = 0; look < g->looks; ++look, around += 1 + around[0]) {
                p = improved(g, &t, p, around + 1, around[0]);
            }
        }
        const F inverse = inverted(p.d * p.scales), offset = p.m * p.mins * inverse;
        const int here = groups - group < LANES ? groups - group : LANES;
        for (int i = 0; i < g->size; i += LANES) {
            F turned[LANES];
            for (int j = 0; j < LANES; ++j) turned[j] = level(g, t.x[i + j], inverse, offset);
            turn(turned);
            for (int lane = 0; lane < here; ++lane) {
                const H codes = __builtin_convertvector(turned[lane], H);
                memcpy(levels + (group + lane) * g->size + i, &codes, sizeof(codes));
            }
        }
        for (int lane = 0; lane < here; ++lane) {
            const int64_t own = group + lane;
            d[own / g->groups] = p.d[lane];
            if (g->least) m[own / g->groups] = g->groups == 1 ? -p.m[lane] : p.m[lane];
            if (g->groups > 1) scales[own] = (int16_t)p.scales[lane];
            if (g->groups > 1 && g->least) mins[own] = (int16_t)p.mins[lane];
        }
    }
}
