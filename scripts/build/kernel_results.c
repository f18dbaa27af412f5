// Calls every exported function of our C files with fixed pseudo-random inputs and prints a line for
// each case: its kind, its name, a hash of the results, and sums of the results.
// check_c_portability.py compares the lines of different compilers and processors.
//
// Kinds: "exact" results are the same on every processor. "lanes" results depend on the number of
// floats in a vector, because rows of logits are divided into strands. "float" results also depend on
// whether the compiler contracts multiply-adds, because that changes the rounding.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../llmcli/runtime/binding/kernels/pass_thread.h"
#include "../../llmcli/runtime/binding/kernels/row.h"
#include "random_bits.h"

struct settings {  // searches.c
    int32_t group_values, groups, low, high, has_minimum, scale_low, scale_high, rounds;
    int32_t start_count, pass_count;
    float max_minimum, value_spread;
    const float * starts;
    const int32_t * offsets;
};
struct grid_layout {  // error_feedback.c
    int32_t columns, group_columns, low, high, scale_low, scale_high, max_min;
};
struct search_result {  // blocks.c
    const int16_t * levels;
    const float *d, *m;
    const int16_t *scales, *mins;
};

int llmcli_cpu_level(void);
int llmcli_cpu_products(void);
void llmcli_encode_q4_K(const float *, void *, int64_t);
void llmcli_encode_q5_K(const float *, void *, int64_t);
void llmcli_encode_q6_K(const float *, void *, int64_t);
void llmcli_pack_q4_0(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q4_1(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q5_0(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q5_1(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q8_0(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q2_K(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q3_K(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q4_K(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q5_K(const struct search_result *, uint8_t *, int64_t);
void llmcli_pack_q6_K(const struct search_result *, uint8_t *, int64_t);
void llmcli_widen(const uint16_t *, float *, int64_t);
void llmcli_search(const struct settings *, const float *, const float *, int64_t, int64_t, int16_t *, float *,
                   float *, int16_t *, int16_t *);
void llmcli_round_block(const struct grid_layout *, const float *, const float *, const float *, int64_t,
                        const float *, const float *, float *, float *, int64_t);
void llmcli_move_codes(const struct grid_layout *, float *, float *, const float *, int64_t, const float *, int64_t);
void llmcli_refit_groups(const struct grid_layout *, const float *, float *, const float *, int64_t,
                         const float *, const float *, float *, float *, int64_t);

// ---- inputs

// A number from -1 to 1, exact in a float.
static float uniform(void) { return (float)((int32_t)(next_bits() >> 8) - (1 << 23)) / (1 << 23); }
// Roughly normal: the sum of four.
static float normal(void) {
    float sum = uniform();
    for (int i = 0; i < 3; ++i) sum += uniform();
    return sum;
}

enum { NORMAL, TINY, SUBNORMAL, ZEROS, CONSTANT, POSITIVE, NEGATIVE, OUTLIERS, HUGE_VALUES, STEPS, SHAPES };
static const char * SHAPE_NAMES[] = {"normal",   "tiny",     "subnormal", "zeros", "constant",
                                     "positive", "negative", "outliers",  "huge",  "steps"};
static float value(int shape, int64_t i) {
    switch (shape) {
        case TINY: return normal() * 1e-20f;
        case SUBNORMAL: return normal() * 1e-40f;
        case ZEROS: return i % 97 == 5 ? -0.f : 0.f;
        case CONSTANT: return 0.37f;
        case POSITIVE: return fabsf(normal());
        case NEGATIVE: return -fabsf(normal());
        case OUTLIERS: return i % 61 == 7 ? 300 * normal() : 0.01f * normal();
        case HUGE_VALUES: return 0x1p27f * normal();
        case STEPS: return (float)(i % 16 - 8);
        default: return normal();
    }
}
static void fill(float * out, int64_t count, int shape, uint64_t number) {
    seed(number);
    for (int64_t i = 0; i < count; ++i) out[i] = value(shape, i);
}

// ---- outputs

static uint64_t hash;
static void begin(void) { hash = 0xcbf29ce484222325u; }
static void add(const void * data, size_t size) {  // FNV-1a
    for (const uint8_t *at = data, *end = at + size; at < end; ++at) hash = (hash ^ *at) * 0x100000001b3u;
}
static void print_case(const char * kind, const char * name, const char * of, int64_t size, double one, double two) {
    printf("%s %s/%s/%lld %016llx %.9g %.9g\n", kind, name, of, (long long)size, (unsigned long long)hash, one, two);
}
static void * room(size_t size) {
    void * out = calloc(1, size ? size : 1);
    if (!out) abort();
    return out;
}

// ---- cases

static void encoders(void) {
    static const struct {
        const char * name;
        void (*encode)(const float *, void *, int64_t);
        size_t bytes;
    } all[] = {{"encode_q4_K", llmcli_encode_q4_K, 144},
               {"encode_q5_K", llmcli_encode_q5_K, 176},
               {"encode_q6_K", llmcli_encode_q6_K, 210}};
    static const int blocks[] = {1, 2, 3, 8, 21};
    for (size_t e = 0; e < 3; ++e) {
        for (int shape = 0; shape < SHAPES; ++shape) {
            for (size_t b = 0; b < 5; ++b) {
                const int64_t count = 256 * blocks[b];
                float * x = room(4 * count);
                uint8_t * out = room(all[e].bytes * blocks[b]);
                fill(x, count, shape, 100 * e + 10 * shape + b);
                all[e].encode(x, out, count);
                begin();
                add(out, all[e].bytes * blocks[b]);
                print_case("exact", all[e].name, SHAPE_NAMES[shape], blocks[b], 0, 0);
                free(x), free(out);
            }
        }
    }
}

typedef struct {
    const char * name;
    void (*pack)(const struct search_result *, uint8_t *, int64_t);
    int bytes;
    struct settings s;
} Format;
#define EFFORT 2, 9, 3  // rounds, starts, passes
static const Format FORMATS[] = {
    {"q4_0", llmcli_pack_q4_0, 18, {32, 1, -8, 7, 0, 0, 0, EFFORT, 0, 1, 0, 0}},
    {"q4_1", llmcli_pack_q4_1, 20, {32, 1, 0, 15, 1, 0, 0, EFFORT, 3e38f, 1, 0, 0}},
    {"q5_0", llmcli_pack_q5_0, 22, {32, 1, -16, 15, 0, 0, 0, EFFORT, 0, 1, 0, 0}},
    {"q5_1", llmcli_pack_q5_1, 24, {32, 1, 0, 31, 1, 0, 0, EFFORT, 3e38f, 0, 0, 0}},
    {"q8_0", llmcli_pack_q8_0, 34, {32, 1, -128, 127, 0, 0, 0, EFFORT, 0, 0, 0, 0}},
    {"q2_K", llmcli_pack_q2_K, 84, {16, 16, 0, 3, 1, 0, 15, EFFORT, 0, 1, 0, 0}},
    {"q3_K", llmcli_pack_q3_K, 110, {16, 16, -4, 3, 0, -32, 31, EFFORT, 0, 2, 0, 0}},
    {"q4_K", llmcli_pack_q4_K, 144, {32, 8, 0, 15, 1, 0, 63, EFFORT, 0, 2, 0, 0}},
    {"q5_K", llmcli_pack_q5_K, 176, {32, 8, 0, 31, 1, 0, 63, EFFORT, 0, 2, 0, 0}},
    {"q6_K", llmcli_pack_q6_K, 210, {16, 16, -32, 31, 0, -128, 127, EFFORT, 0, 0, 0, 0}},
};
#define FORMAT_COUNT (int)(sizeof(FORMATS) / sizeof(*FORMATS))

static int between(int low, int high) { return low + (int)(next_bits() % (uint32_t)(high - low + 1)); }

static void packers(void) {
    static const int counts[] = {1, 2, 7};
    for (int f = 0; f < FORMAT_COUNT; ++f) {
        const struct settings * s = &FORMATS[f].s;
        for (int c = 0; c < 3; ++c) {
            const int blocks = counts[c], values = s->groups * s->group_values;
            int16_t *levels = room(2 * blocks * values), *scales = room(2 * blocks * s->groups);
            int16_t * mins = room(2 * blocks * s->groups);
            float *d = room(4 * blocks), *m = room(4 * blocks);
            uint8_t * out = room(blocks * FORMATS[f].bytes);
            seed(1000 + 10 * f + c);
            for (int i = 0; i < blocks * values; ++i) levels[i] = between(s->low, s->high);
            for (int i = 0; i < blocks * s->groups; ++i) {
                scales[i] = between(s->scale_low, s->scale_high);
                mins[i] = between(s->scale_low, s->scale_high);
            }
            for (int i = 0; i < blocks; ++i) d[i] = value(i % 3, i), m[i] = normal();
            FORMATS[f].pack(&(struct search_result){levels, d, m, scales, mins}, out, blocks);
            begin();
            add(out, blocks * FORMATS[f].bytes);
            print_case("exact", "pack", FORMATS[f].name, blocks, 0, 0);
            free(levels), free(scales), free(mins), free(d), free(m), free(out);
        }
    }
}

static void widening(void) {
    static const int counts[] = {1, 3, 4, 5, 7, 8, 9, 15, 16, 17, 33, 65536};
    static uint16_t halves[65536];
    for (int i = 0; i < 65536; ++i) halves[i] = (uint16_t)(i * 40503u);  // every F16 number once
    for (int c = 0; c < 12; ++c) {
        float * out = room(4 * counts[c]);
        llmcli_widen(halves + (65536 - counts[c]), out, counts[c]);
        begin();
        add(out, 4 * counts[c]);
        print_case("exact", "widen", "all", counts[c], 0, 0);
        free(out);
    }
}

static void searching(void) {
    static const float starts[] = {0.9f, 0.95f, 0.975f, 1.f, 1.025f, 1.05f, 1.1f, -0.95f, -1.f};
    static const int32_t offsets[] = {4, -2, -1, 1, 2, 2, -1, 1, 0};
    static const int counts[] = {1, 2, 3, 16, 17};
    static const int shapes[] = {NORMAL, ZEROS, CONSTANT, POSITIVE, OUTLIERS, STEPS};
    for (int f = 0; f < FORMAT_COUNT; ++f) {
        struct settings s = FORMATS[f].s;
        s.starts = starts, s.offsets = offsets;
        for (int shape = 0; shape < 6; ++shape) {
            for (int c = 0; c < 5; ++c) {
                const int64_t blocks = counts[c], values = s.groups * s.group_values, count = blocks * values;
                const int64_t period = (blocks % 2 ? 1 : 2) * s.groups;
                float *x = room(4 * count), *w = room(4 * period * s.group_values);
                float *d = room(4 * blocks), *m = room(4 * blocks);
                int16_t *levels = room(2 * count), *scales = room(2 * blocks * s.groups);
                int16_t * mins = room(2 * blocks * s.groups);
                fill(x, count, shapes[shape], 5000 + 100 * f + 10 * shape + c);
                for (int64_t i = 0; i < period * s.group_values; ++i) w[i] = 0.01f + fabsf(uniform());
                llmcli_search(&s, x, w, blocks, period, levels, d, m, scales, mins);
                double error = 0, size = 0;
                for (int64_t i = 0; i < count; ++i) {
                    const int64_t block = i / values, group = i / s.group_values;
                    const double weight = w[i % (period * s.group_values)];
                    const double scale = s.groups > 1 ? (double)d[block] * scales[group] : d[block];
                    // m of a block without integer scales is the minimum itself
                    const double least = !s.has_minimum ? 0 : s.groups > 1 ? -(double)m[block] * mins[group] : m[block];
                    const double off = scale * levels[i] + least - x[i];
                    error += weight * off * off, size += weight * x[i] * x[i];
                }
                begin();
                add(levels, 2 * count), add(d, 4 * blocks), add(m, 4 * blocks);
                add(scales, 2 * blocks * s.groups), add(mins, 2 * blocks * s.groups);
                print_case("float", FORMATS[f].name, SHAPE_NAMES[shapes[shape]], blocks, error, size);
                free(x), free(w), free(d), free(m), free(levels), free(scales), free(mins);
            }
        }
    }
}

// GPTQ's loops over the columns of a block, one after another as in a run.
static void feedback(void) {
    enum { ROWS = 64, STRIDE = 300 };
    for (int f = 0; f < FORMAT_COUNT; ++f) {
        const struct settings * s = &FORMATS[f].s;
        const int columns = s->groups * s->group_values, count = columns * ROWS;
        const struct grid_layout layout = {columns,      s->group_values, s->low,       s->high,
                                           s->scale_low, s->scale_high,   s->scale_high};
        float *weights = room(4 * count), *target = room(4 * count), *gradient = room(4 * count);
        float *levels = room(4 * count), *errors = room(4 * count), *moments = room(4 * columns * STRIDE);
        float *step = room(4 * s->groups * ROWS), *minimum = room(4 * s->groups * ROWS);
        float *scales = room(4 * s->groups * ROWS), *mins = room(4 * s->groups * ROWS);
        float *d = room(4 * ROWS), *m = room(4 * ROWS);
        seed(9000 + f);
        for (int i = 0; i < count; ++i) weights[i] = normal(), target[i] = weights[i], gradient[i] = normal();
        for (int i = 0; i < columns * STRIDE; ++i) moments[i] = 0.01f * normal();
        for (int i = 0; i < columns; ++i) moments[i * STRIDE + i] = 2 + uniform();
        for (int i = 0; i < ROWS; ++i) d[i] = 0.01f + fabsf(uniform()) / 64, m[i] = fabsf(uniform()) / 64;
        for (int i = 0; i < s->groups * ROWS; ++i) {
            scales[i] = between(1, s->scale_high > 1 ? s->scale_high : 1), mins[i] = between(0, 15);
            step[i] = d[i % ROWS] * scales[i], minimum[i] = -m[i % ROWS] * mins[i];
        }
        llmcli_round_block(&layout, weights, target, moments, STRIDE, step, s->has_minimum ? minimum : NULL,
                           levels, errors, ROWS);
        llmcli_move_codes(&layout, levels, gradient, moments, STRIDE, step, ROWS);
        if (s->groups > 1) {
            llmcli_refit_groups(&layout, levels, gradient, moments, STRIDE, d, s->has_minimum ? m : NULL, scales,
                                s->has_minimum ? mins : NULL, ROWS);
        }
        double error = 0, size = 0;
        for (int i = 0; i < count; ++i) error += fabs(errors[i]), size += fabs(gradient[i]);
        begin();
        add(levels, 4 * count), add(errors, 4 * count), add(gradient, 4 * count);
        add(scales, 4 * s->groups * ROWS), add(mins, 4 * s->groups * ROWS);
        print_case("float", FORMATS[f].name, "feedback", columns, error, size);
        free(weights), free(target), free(gradient), free(levels), free(errors), free(moments);
        free(step), free(minimum), free(scales), free(mins), free(d), free(m);
    }
}

// A sampler that chooses the second of the candidates if there is one.
static void choose(void * chain, struct candidates * candidates) {
    *(int64_t *)chain += (int64_t)candidates->size;
    candidates->selected = candidates->size > 1 ? 1 : 0;
}

static void rows_of_logits(void) {
    static const int64_t counts[] = {1, 3, 4, 15, 16, 17, 63, 64, 65, 257, 1000, 4096, 4097, 30001, 151936};
    static const char * names[] = {"normal", "holes", "equal", "impossible", "nan"};
    for (int c = 0; c < 15; ++c) {
        const int64_t count = counts[c];
        float *x = room(4 * count), *largest = room(4 * llmcli_maxima(count));
        struct candidate * table = room(sizeof(*table) * (count + 1));
        for (int shape = 0; shape < 5; ++shape) {
            seed(9000 + 10 * c + shape);
            float near = 0;
            for (int64_t i = 0; i < count; ++i) {
                x[i] = shape == 2 ? 1.5f : shape == 3 ? -INFINITY : 6 * normal();
                if (shape == 1 && i % 3) x[i] = -INFINITY;
                if (shape == 4 && i == count / 2) x[i] = NAN;
                if (x[i] > near) near = x[i];
            }
            const double sum = llmcli_look(x, count, near, largest);
            begin();
            if (sum == sum) add(&sum, sizeof(sum));
            print_case("float", "look", names[shape], count, sum == sum ? sum : -1, 0);
            begin();
            const int64_t maxima = llmcli_maxima(count);
            add(largest, 4 * maxima);
            print_case("lanes", "maxima", names[shape], count, maxima, 0);
            for (int known = 0; known < 2; ++known) {
                const int64_t best = llmcli_likeliest(x, count, largest, known);
                begin();
                add(&best, sizeof(best));
                print_case("exact", known ? "likeliest-known" : "likeliest", names[shape], count, best, 0);
                static const int64_t fews[] = {1, 40, 256};
                for (int f = 0; f < 3; ++f) {
                    const int64_t found = llmcli_few(x, count, largest, known, fews[f], table, count + 1);
                    begin();
                    for (int64_t i = 0; i < found; ++i) add(&table[i].id, 4), add(&table[i].logit, 4);
                    print_case("lanes", known ? "few-known" : "few", names[shape], count * 1000 + fews[f], found, 0);
                    int64_t seen = 0;
                    const int64_t id = llmcli_draw(x, count, largest, known, fews[f], table, count + 1, choose, &seen);
                    begin();
                    add(&id, sizeof(id)), add(&seen, sizeof(seen));
                    print_case("lanes", known ? "draw-known" : "draw", names[shape], count * 1000 + fews[f], id, 0);
                }
            }
        }
        float * fresh = room(4 * llmcli_maxima(count));
        for (int64_t at = 0; at < count; at += 1 + count / 50) {
            const float before = x[at];
            x[at] = at % 3 ? 20 * normal() : -INFINITY;
            llmcli_changed(x, count, largest, at, before);
        }
        llmcli_look(x, count, 0, fresh);
        if (memcmp(largest, fresh, 4 * llmcli_maxima(count))) abort();
        free(x), free(largest), free(table), free(fresh);
    }
}

// A sampler like a penalty: lowers each logit by the sum of the tokens that it has read, and counts its candidates.
struct lowering {
    int64_t read, seen;
};
static void lower(void * sampler, struct candidates * candidates) {
    struct lowering * own = sampler;
    own->seen += (int64_t)candidates->size;
    for (size_t i = 0; i < candidates->size; ++i) candidates->data[i].logit -= (float)own->read;
    candidates->selected = candidates->size > 2 ? 2 : (int64_t)candidates->size - 1;
}
static void read_token(void * sampler, int32_t token) { ((struct lowering *)sampler)->read += token; }
static void forget(void * sampler) { ((struct lowering *)sampler)->read = 0; }

// Runs the work twice in turn, as two threads of OpenMP could.
static void run_twice(void (*work)(void *), void * data, unsigned threads, unsigned flags) {
    (void)threads, (void)flags;
    work(data), work(data);
}

static void drawing(void) {
    enum { ROWS = 12 };
    static const int64_t counts[] = {1, 16, 65, 4097, 30001};
    static const int32_t tokens[] = {3, 0, 3, 9, 100000}, banned[] = {2, 5}, bias_tokens[] = {1, 1, 99999};
    static const float biases[] = {4.5f, 2, 1};
    const struct sampler_functions functions = {lower, read_token, forget};
    for (int c = 0; c < 5; ++c) {
        const int64_t count = counts[c];
        float *x = room(4 * count * ROWS), *before = room(4 * count * ROWS);
        for (int threads = 1; threads <= 3; ++threads) {
            struct row_draw draws[ROWS], *pointers[ROWS];
            struct lowering own[ROWS][2];
            void * samplers[ROWS][2];
            for (int row = 0; row < ROWS; ++row) {
                fill(x + row * count, count, NORMAL, 7000 + 100 * c + row);
                own[row][0] = own[row][1] = (struct lowering){5, 0};
                samplers[row][0] = own[row], samplers[row][1] = own[row] + 1;
                const int is_greedy = row % 3 == 0, kind = row % 4;
                draws[row] = (struct row_draw){
                    .logits = x + row * count, .samplers = samplers[row], .tokens = tokens, .biases = biases,
                    .bias_tokens = bias_tokens, .banned = banned, .rest = 1, .sampler_count = is_greedy ? 1 : 2,
                    .token_count = 5, .bias_count = kind & 1 ? 3 : 0, .banned_count = kind & 2 ? 2 : 0,
                    .few = row == 5 ? 0 : 4, .replays = is_greedy, .wants_sum = row % 2, .near = 3,
                };
                pointers[row] = draws + row;
            }
            memcpy(before, x, 4 * count * ROWS);
            llmcli_draw_rows(pointers, ROWS, count, &functions, threads, threads == 2 ? run_twice : NULL);
            begin();
            double sum = 0;
            for (int row = 0; row < ROWS; ++row) {
                // the candidates beyond the few likeliest depend on the strands
                add(&draws[row].token, 8), add(&own[row][0].seen, 8);
                if (draws[row].wants_sum) sum += draws[row].sum;
            }
            if (memcmp(before, x, 4 * count * ROWS)) abort();
            print_case("lanes", "draw-rows", threads == 1 ? "alone" : threads == 2 ? "twice" : "threads", count, 0, 0);
            begin();
            print_case("float", "look", "draw-rows", count * 10 + threads, sum, 0);
        }
        free(x), free(before);
    }
}

static int32_t decode(void * context, struct batch batch) {
    *(int64_t *) context += batch.n_tokens;
    return batch.n_tokens % 3;
}

static void synchronize(void * context) { *(int64_t *) context *= 3; }

static void passes(void) {
    int64_t computed = 0;
    double seconds = 0;
    const struct pass_functions functions = {decode, synchronize};
    struct batch batch = {0};
    struct pass_thread * thread = llmcli_start_pass_thread(&functions, &computed);
    if (!thread) abort();
    begin();
    for (batch.n_tokens = 1; batch.n_tokens < 30; ++batch.n_tokens) {
        llmcli_begin_pass(thread, &batch);
        const int32_t code = llmcli_end_pass(thread, &seconds);
        if (seconds < 0) abort();
        add(&code, sizeof(code)), add(&computed, sizeof(computed));
    }
    llmcli_begin_pass(thread, &batch);
    llmcli_stop_pass_thread(thread);
    add(&computed, sizeof(computed));
    print_case("exact", "pass-thread", "30", 30, 0, 0);
}

int main(void) {
    if (llmcli_cpu_level() < 0 || llmcli_cpu_products() < 0 || llmcli_row_interface() != ROW_INTERFACE) return 1;
    if (llmcli_row_draw_size() != sizeof(struct row_draw) || llmcli_pass_batch_size() != sizeof(struct batch)) return 1;
    encoders();
    packers();
    widening();
    searching();
    feedback();
    rows_of_logits();
    drawing();
    passes();
    return 0;
}
