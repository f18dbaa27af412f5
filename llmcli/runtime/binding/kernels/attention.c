// Attention of tokens over the cells of a KV cache in F16, Q8_0 or Q4_0, at the speed of memory.
//
// ggml reads the keys and values of a cell once for each query head, and adds up values in float16 (flash_attn_ext in
// ggml-cpu/ops.cpp). Here a cell is decoded to floats once for all query heads that share it. The visible cells of a
// token are divided into chunks of CHUNK cells. Each chunk has a softmax of its own, and the chunks are merged in their
// order (online softmax, https://arxiv.org/abs/1805.02867). If there are few tokens, the threads share out the chunks,
// else the tokens. The result of a token has the same bits either way, whatever other tokens, empty cells and threads
// there are.
#include "attention.h"

#if (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)) || defined(__ARM_FEATURE_DOTPROD)
#include <math.h>
#include <string.h>
#if defined(__ARM_FEATURE_DOTPROD)
#include <arm_neon.h>
#endif

#include "exponential.h"

#define CHUNK 256        // cells
#define KEYS 4           // cells whose keys are decoded at a time
#define VALUES 32        // cells whose values are decoded at a time
#define MOST_SIZE 256    // numbers of a head
#define MOST_SHARING 16  // query heads that share keys and values
#define TILED_ROWS 64    // from so many tokens on, ggml computes tiles of F16 caches (GGML_FA_TILE_Q), which is faster
#define AHEAD 16         // cells that are fetched ahead
#define UNITS_PER_THREAD 4  // with fewer tokens and heads for each thread, chunks are shared out
#define CHUNKS_PER_THREAD 2
#define FEW_CELLS 1024      // so few are shared out beforehand: that costs less than to wait for another thread

#define INLINE static inline __attribute__((always_inline))
#define FOR(I, N) _Pragma("GCC unroll 8") for (int I = 0; I < (N); I++)

typedef void (*Decode)(const uint8_t * from, int64_t count, float * out);

INLINE float half_at(const void * at) {
#if defined(__ARM_FEATURE_DOTPROD)
    __fp16 value;
    memcpy(&value, at, 2);
    return value;
#else
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _cvtsh_ss(bits);
#endif
}
static void decode_f16(const uint8_t * from, int64_t count, float * out) {
#if defined(__ARM_FEATURE_DOTPROD)
    for (int64_t i = 0; i < count; i += 4)
        vst1q_f32(out + i, vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(from + 2 * i))));
#else
    for (int64_t i = 0; i < count; i += 8)
        _mm256_storeu_ps(out + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + 2 * i))));
#endif
}
static void decode_q8_0(const uint8_t * from, int64_t count, float * out) {
    for (int64_t b = 0; b < count / 32; b++, from += 34, out += 32) {
        const float d = half_at(from);
        for (int i = 0; i < 32; i++) out[i] = d * (float)(int8_t)from[2 + i];
    }
}
static void decode_q4_0(const uint8_t * from, int64_t count, float * out) {
    for (int64_t b = 0; b < count / 32; b++, from += 18, out += 32) {
        const float d = half_at(from);
        for (int i = 0; i < 16; i++) {
            out[i] = d * (float)((from[2 + i] & 15) - 8);
            out[16 + i] = d * (float)((from[2 + i] >> 4) - 8);
        }
    }
}
static Decode decoder(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_F16: return decode_f16;
        case GGML_TYPE_Q8_0: return decode_q8_0;
        case GGML_TYPE_Q4_0: return decode_q4_0;
        default: return NULL;
    }
}

// The sums of the lanes of four vectors.
INLINE void store_four_sums(const F * of, float * out) {
#if defined(__ARM_FEATURE_DOTPROD)
    const float32x4_t first = vpaddq_f32((float32x4_t)of[0], (float32x4_t)of[1]);
    vst1q_f32(out, vpaddq_f32(first, vpaddq_f32((float32x4_t)of[2], (float32x4_t)of[3])));
#else
    __m256 part[4];
    for (int i = 0; i < 4; i++) {
#if WIDTH == 16
        part[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)of[i]), _mm512_extractf32x8_ps((__m512)of[i], 1));
#else
        part[i] = (__m256)of[i];
#endif
    }
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(part[0], part[1]), _mm256_hadd_ps(part[2], part[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#endif
}

// ---- what an operation has

typedef struct {
    const struct ggml_tensor *op, *query, *key, *value, *mask, *sinks;
    Decode decode_key, decode_value;
    float scale, max_bias, cap;  // cap: scores are limited to cap * tanh(score / cap); 0: they are not
    size_t key_bytes, value_bytes;  // of a cell, for a head
    int64_t key_size, value_size, rows, streams, heads, pairs, sharing, cells, chunks;
    // memory in floats: of each thread, and of the result of a chunk
    int64_t scratch, partial;
    bool splits;  // whether the threads share out chunks
} Attention;

// A thread's memory. `total` has the sums of the values of each head, `most` the greatest score, `weight` the sum of the
// exponentials of the scores, relative to it.
typedef struct {
    int32_t * visible;  // cells of the row `visible_of`
    int64_t count, visible_of;
    bool has_bias;  // the mask adds to the score of a visible cell
    float *query, *keys, *values, *scores, *chunk, *total;
    float most[MOST_SHARING], weight[MOST_SHARING];  // of the chunk
} Scratch;

INLINE int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
INLINE int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

static size_t row_bytes(const struct ggml_tensor * cache) {
    return (cache->type == GGML_TYPE_F16 ? cache->ne[0] : cache->ne[0] / 32) * cache->nb[0];
}

static Attention attention(const struct ggml_tensor * op, int threads) {
    const struct ggml_tensor *query = op->src[0], *key = op->src[1], *value = op->src[2];
    Attention of = {
        op, query, key, value, op->src[3], op->src[4], decoder(key->type), decoder(value->type), 0, 0, 0,
        row_bytes(key), row_bytes(value),
        key->ne[0], value->ne[0], query->ne[1], query->ne[3], query->ne[2], key->ne[2],
        query->ne[2] / key->ne[2], key->ne[1], (key->ne[1] + CHUNK - 1) / CHUNK, 0, 0, false};
    memcpy(&of.scale, op->op_params, sizeof(float));
    memcpy(&of.max_bias, op->op_params + 1, sizeof(float));
    memcpy(&of.cap, op->op_params + 2, sizeof(float));
    if (of.cap != 0) of.scale /= of.cap;
    of.scratch = padded(of.cells) + padded(of.sharing * of.key_size) + padded(KEYS * of.key_size)
        + padded(VALUES * of.value_size) + of.sharing * CHUNK + 2 * padded(of.sharing * of.value_size);
    of.partial = padded(of.value_size) + 16;
    of.splits = of.chunks > 1 && of.streams * of.rows * of.pairs < UNITS_PER_THREAD * threads;
    return of;
}

static Scratch scratch(const Attention * of, float * memory) {
    Scratch out = {.visible = (int32_t *)memory, .visible_of = -1};
    out.query = memory + padded(of->cells);
    out.keys = out.query + padded(of->sharing * of->key_size);
    out.values = out.keys + padded(KEYS * of->key_size);
    out.scores = out.values + padded(VALUES * of->value_size);
    out.chunk = out.scores + of->sharing * CHUNK;
    out.total = out.chunk + padded(of->sharing * of->value_size);
    return out;
}

static const uint8_t * mask_of(const Attention * of, int64_t row) {
    if (!of->mask) return NULL;
    const int64_t stream = row / of->rows % of->mask->ne[3];
    return (const uint8_t *)of->mask->data + row % of->rows * of->mask->nb[1] + stream * of->mask->nb[3];
}

// Lists the cells that a row sees.
static void list_visible(const Attention * of, Scratch * in, int64_t row) {
    if (in->visible_of == row) return;
    const uint8_t * mask = mask_of(of, row);
    int64_t count = 0;
    bool has_bias = false;
    for (int64_t c = 0; c < of->cells; c++) {
        uint16_t bits = 0;
        if (mask) memcpy(&bits, mask + 2 * c, 2);
        const bool is_visible = bits != 0xfc00;  // -infinity
        in->visible[count] = (int32_t)c;
        count += is_visible;
        has_bias |= is_visible && bits;
    }
    in->count = count, in->visible_of = row, in->has_bias = has_bias;
}

// ---- one chunk

// Multiplies `heads` queries with KEYS keys.
INLINE void multiply_keys(const float * query, const float * keys, int64_t size, const int heads, float * out) {
    F sums[2][KEYS];
    FOR(h, heads) FOR(c, KEYS) sums[h][c] = splat(0);
    for (int64_t d = 0; d < size; d += LANES) {
        F key[KEYS];
        FOR(c, KEYS) key[c] = load(keys + c * size + d);
        FOR(h, heads) {
            const F part = load(query + h * size + d);
            FOR(c, KEYS) sums[h][c] += part * key[c];
        }
    }
    FOR(h, heads) store_four_sums(sums[h], out + h * CHUNK);
}

// Adds `count` values of size `size`, times the weights of `heads` heads, to their sums, `vectors` at a time.
INLINE void add_values(
    const float * weights, const float * values, int count, int64_t size, const int heads, const int vectors, float * out
) {
    F sums[2][4];
    FOR(h, heads) FOR(v, vectors) sums[h][v] = load(out + h * size + v * LANES);
    for (int c = 0; c < count; c++) {
        F value[4];
        FOR(v, vectors) value[v] = load(values + c * size + v * LANES);
        FOR(h, heads) {
            const F weight = splat(weights[h * CHUNK + c]);
            FOR(v, vectors) sums[h][v] += weight * value[v];
        }
    }
    FOR(h, heads) FOR(v, vectors) store(out + h * size + v * LANES, sums[h][v]);
}
INLINE void add_all_values(
    const float * weights, const float * values, int count, int64_t size, const int heads, float * out
) {
    int64_t d = 0;
    for (; d + 4 * LANES <= size; d += 4 * LANES) add_values(weights, values + d, count, size, heads, 4, out + d);
    for (; d < size; d += LANES) add_values(weights, values + d, count, size, heads, 1, out + d);
}

// Limits scores that were divided by the cap: cap * tanh(score).
static void limit_scores(float * scores, int count, float cap) {
    for (int c = 0; c < count; c += LANES) {
        // below 88 / 2, where the exponential is finite; tanh is 1 from 9 on
        const F x = min_lanes(max_lanes(load(scores + c), splat(-40)), splat(40));
        store(scores + c, splat(cap) - splat(2 * cap) / (exponential(x + x) + splat(1)));
    }
}

// The factor of the mask for a head, by which ALiBi lowers the scores of distant cells.
static float slope(const Attention * of, int64_t head) {
    if (of->max_bias <= 0) return 1;
    int64_t power = 1;
    while (2 * power <= of->heads) power *= 2;
    return head < power ? powf(2, -of->max_bias / power * (head + 1))
                        : powf(2, -of->max_bias / 2 / power * (2 * (head - power) + 1));
}

// Replaces the scores of a head by their exponentials relative to the greatest.
static void exponentiate(float * scores, int count, float * most, float * weight) {
    for (int c = count; c % LANES; c++) scores[c] = -INFINITY;
    F top = splat(-INFINITY), sum = splat(0);
    for (int c = 0; c < count; c += LANES) top = max_lanes(top, load(scores + c));
    *most = top[0];
    for (int i = 1; i < LANES; i++) *most = top[i] > *most ? top[i] : *most;
    for (int c = 0; c < count; c += LANES) {
        const F each = exponential(load(scores + c) - splat(*most));
        store(scores + c, each);
        sum += each;
    }
    *weight = 0;
    for (int i = 0; i < LANES; i++) *weight += sum[i];
}

// Copies the queries of a row that share keys and values, times the scale.
static void copy_queries(const Attention * of, Scratch * in, int64_t row, int64_t pair) {
    const struct ggml_tensor * query = of->query;
    for (int64_t h = 0; h < of->sharing; h++) {
        const float * from = (const float *)(
            (const uint8_t *)query->data + row % of->rows * query->nb[1] + (pair * of->sharing + h) * query->nb[2]
            + row / of->rows * query->nb[3]);
        for (int64_t d = 0; d < of->key_size; d++) in->query[h * of->key_size + d] = from[d] * of->scale;
    }
}

static const uint8_t * cells_of(const struct ggml_tensor * cache, const Attention * of, int64_t row, int64_t pair) {
    const int64_t stream = row / of->rows / (of->streams / cache->ne[3]);
    return (const uint8_t *)cache->data + pair * cache->nb[2] + stream * cache->nb[3];
}

// Fetches the cell that is decoded AHEAD cells later. The keys of a head are too far apart for the processor to guess.
INLINE void fetch_ahead(const uint8_t * cache, size_t stride, size_t bytes, const int32_t * cells, int at, int count) {
    if (at + AHEAD >= count) return;
    const uint8_t * next = cache + cells[at + AHEAD] * stride;
    for (size_t i = 0; i < bytes; i += 64) __builtin_prefetch(next + i);
}

// Computes the attention of the copied queries over `count` visible cells: `most`, `weight` and `chunk`.
static void compute_chunk(
    const Attention * of, Scratch * in, int64_t row, int64_t pair, const int32_t * cells, int count
) {
    const uint8_t * keys = cells_of(of->key, of, row, pair), * values = cells_of(of->value, of, row, pair);
    const uint8_t * mask = mask_of(of, row);
    for (int c = 0; c < count; c += KEYS) {
        const int some = (int)least_of(KEYS, count - c);  // behind them are earlier keys, whose scores are overwritten
        for (int i = 0; i < some; i++) {
            fetch_ahead(keys, of->key->nb[1], of->key_bytes, cells, c + i, count);
            of->decode_key(keys + cells[c + i] * of->key->nb[1], of->key_size, in->keys + i * of->key_size);
        }
        int64_t h = 0;
        for (; h + 2 <= of->sharing; h += 2)
            multiply_keys(in->query + h * of->key_size, in->keys, of->key_size, 2, in->scores + h * CHUNK + c);
        if (h < of->sharing)
            multiply_keys(in->query + h * of->key_size, in->keys, of->key_size, 1, in->scores + h * CHUNK + c);
    }
    for (int64_t h = 0; h < of->sharing; h++) {
        float * scores = in->scores + h * CHUNK;
        if (of->cap != 0) limit_scores(scores, count, of->cap);
        const float factor = in->has_bias ? slope(of, pair * of->sharing + h) : 0;
        for (int c = 0; in->has_bias && c < count; c++) scores[c] += factor * half_at(mask + 2 * cells[c]);
        exponentiate(scores, count, in->most + h, in->weight + h);
    }
    memset(in->chunk, 0, sizeof(float) * of->sharing * of->value_size);
    for (int c = 0; c < count; c += VALUES) {
        const int some = (int)least_of(VALUES, count - c);
        for (int i = 0; i < some; i++) {
            fetch_ahead(values, of->value->nb[1], of->value_bytes, cells, c + i, count);
            of->decode_value(values + cells[c + i] * of->value->nb[1], of->value_size, in->values + i * of->value_size);
        }
        int64_t h = 0;
        for (; h + 2 <= of->sharing; h += 2)
            add_all_values(
                in->scores + h * CHUNK + c, in->values, some, of->value_size, 2, in->chunk + h * of->value_size);
        if (h < of->sharing)
            add_all_values(
                in->scores + h * CHUNK + c, in->values, some, of->value_size, 1, in->chunk + h * of->value_size);
    }
}

// ---- all chunks

// Adds the result of a chunk to the sums of a head.
static void merge(
    float * total, float * most, float * weight, const float * chunk, float chunk_most, float chunk_weight, int64_t size
) {
    const float top = chunk_most > *most ? chunk_most : *most;
    const float old = expf(*most - top), new = expf(chunk_most - top);
    for (int64_t d = 0; d < size; d += LANES)
        store(total + d, load(total + d) * splat(old) + load(chunk + d) * splat(new));
    *weight = *weight * old + chunk_weight * new;
    *most = top;
}

static void write_result(
    const Attention * of, int64_t row, int64_t head, const float * total, float most, float weight
) {
    const int64_t stream = row / of->rows;
    float * out = (float *)(
        (uint8_t *)of->op->data
        + (stream * of->op->ne[2] * of->op->ne[1] + head + row % of->rows * of->op->ne[1]) * of->op->nb[1]);
    float factor = 1;
    if (of->sinks) {  // the score of a head for no cell
        const float sink = ((const float *)of->sinks->data)[head], top = sink > most ? sink : most;
        factor = expf(most - top), weight = weight * factor + expf(sink - top);
    }
    factor = weight != 0 ? factor / weight : 0;  // 0: a token that sees no cell
    for (int64_t d = 0; d < of->value_size; d++) out[d] = total[d] * factor;
}

// Computes all chunks of a row and a pair of keys and values.
static void compute_row(const Attention * of, Scratch * in, int64_t row, int64_t pair) {
    float most[MOST_SHARING], weight[MOST_SHARING];
    for (int64_t h = 0; h < of->sharing; h++) most[h] = -INFINITY, weight[h] = 0;
    memset(in->total, 0, sizeof(float) * of->sharing * of->value_size);
    list_visible(of, in, row);
    copy_queries(of, in, row, pair);
    for (int64_t first = 0; first < in->count; first += CHUNK) {
        compute_chunk(of, in, row, pair, in->visible + first, (int)least_of(CHUNK, in->count - first));
        for (int64_t h = 0; h < of->sharing; h++)
            merge(
                in->total + h * of->value_size, most + h, weight + h, in->chunk + h * of->value_size, in->most[h],
                in->weight[h], of->value_size);
    }
    for (int64_t h = 0; h < of->sharing; h++)
        write_result(of, row, pair * of->sharing + h, in->total + h * of->value_size, most[h], weight[h]);
}

// The result of a chunk for a head in `partials`: its sums, and then its greatest score and its weight.
static float * partial_of(const Attention * of, float * partials, int64_t row, int64_t head, int64_t chunk) {
    return partials + ((row * of->heads + head) * of->chunks + chunk) * of->partial;
}

static void compute_partial(
    const Attention * of, Scratch * in, int64_t row, int64_t pair, int64_t chunk, float * partials
) {
    list_visible(of, in, row);
    const int64_t first = chunk * CHUNK, count = least_of(CHUNK, in->count - first);
    if (count > 0) {
        copy_queries(of, in, row, pair);
        compute_chunk(of, in, row, pair, in->visible + first, (int)count);
    }
    for (int64_t h = 0; h < of->sharing; h++) {
        float * out = partial_of(of, partials, row, pair * of->sharing + h, chunk);
        out[of->value_size] = in->most[h];
        out[of->value_size + 1] = count > 0 ? in->weight[h] : 0;  // 0: there is no such chunk
        if (count > 0) memcpy(out, in->chunk + h * of->value_size, sizeof(float) * of->value_size);
    }
}

static void merge_partials(const Attention * of, Scratch * in, int64_t row, int64_t head, float * partials) {
    float most = -INFINITY, weight = 0;
    memset(in->total, 0, sizeof(float) * of->value_size);
    for (int64_t chunk = 0; chunk < of->chunks; chunk++) {
        const float * from = partial_of(of, partials, row, head, chunk);
        if (from[of->value_size + 1] != 0)
            merge(
                in->total, &most, &weight, from, from[of->value_size], from[of->value_size + 1], of->value_size);
    }
    write_result(of, row, head, in->total, most, weight);
}

bool is_own_attention(const struct ggml_tensor * op) {
    const struct ggml_tensor *query = op->src[0], *key = op->src[1], *value = op->src[2], *mask = op->src[3];
    const bool has_types = query->type == GGML_TYPE_F32 && decoder(key->type) && decoder(value->type)
        && (!mask || mask->type == GGML_TYPE_F16) && (!op->src[4] || op->src[4]->type == GGML_TYPE_F32);
    if (!has_types) return false;
    const int unit = key->type == GGML_TYPE_F16 && value->type == GGML_TYPE_F16 ? LANES : 32;
    const bool fits = key->ne[0] % unit == 0 && value->ne[0] % unit == 0 && key->ne[0] % LANES == 0
        && key->ne[0] <= MOST_SIZE && value->ne[0] <= MOST_SIZE && key->ne[2] == value->ne[2]
        && key->ne[3] == value->ne[3] && query->ne[2] % key->ne[2] == 0 && query->ne[2] / key->ne[2] <= MOST_SHARING
        && query->ne[3] % key->ne[3] == 0 && (!mask || mask->ne[2] == 1);
    return fits && (unit != LANES || query->ne[1] < TILED_ROWS);
}

size_t attention_work_size(int threads, const struct ggml_tensor * op) {
    const Attention of = attention(op, threads);
    const int64_t partials = of.splits ? of.streams * of.rows * of.heads * of.chunks * of.partial : 0;
    return sizeof(float) * (of.scratch * threads + partials) + 64;
}

void compute_attention(
    const struct cpu_functions * ggml, const struct compute_params * params, const struct ggml_tensor * op
) {
    const Attention of = attention(op, params->nth);
    float * memory = (float *)(((uintptr_t)params->wdata + 63) & ~(uintptr_t)63);
    float * partials = memory + of.scratch * params->nth;
    Scratch in = scratch(&of, memory + of.scratch * params->ith);
    // All heads of a chunk are computed by the same thread if there are enough chunks: their cells are side by side.
    const int64_t pairs = of.splits && of.chunks >= CHUNKS_PER_THREAD * params->nth ? of.pairs : 1;
    const int64_t rows = of.streams * of.rows, units = rows * of.pairs / pairs * (of.splits ? of.chunks : 1);
    const bool is_shared_beforehand = of.cells <= FEW_CELLS;
    if (!is_shared_beforehand) {
        if (params->ith == 0) ggml->chunk_set(params->threadpool, params->nth);
        ggml->barrier(params->threadpool);
    }
    for (int64_t u = params->ith; u < units;
         u = is_shared_beforehand ? u + params->nth : ggml->chunk_add(params->threadpool, 1)) {
        const int64_t first = u % (of.pairs / pairs) * pairs, rest = u / (of.pairs / pairs);
        for (int64_t pair = first; pair < first + pairs; pair++) {
            if (of.splits) compute_partial(&of, &in, rest / of.chunks, pair, rest % of.chunks, partials);
            else compute_row(&of, &in, rest, pair);
        }
    }
    if (!of.splits) return;
    ggml->barrier(params->threadpool);
    for (int64_t u = params->ith; u < rows * of.heads; u += params->nth)
        merge_partials(&of, &in, u / of.heads, u % of.heads, partials);
}
#else
bool is_own_attention(const struct ggml_tensor * op) {
    (void)op;
    return false;
}
size_t attention_work_size(int threads, const struct ggml_tensor * op) {
    (void)threads, (void)op;
    return 0;
}
void compute_attention(
    const struct cpu_functions * ggml, const struct compute_params * params, const struct ggml_tensor * op
) {
    (void)ggml, (void)params, (void)op;
}
#endif
