// Attention of tokens over the cells of a KV cache in F16, Q8_0 or Q4_0, at the speed of memory.
//
// ggml reads the keys and values of a cell once for each query head, and adds up values in float16 (flash_attn_ext in
// ggml-cpu/ops.cpp). Here a cell is decoded to floats once for all query heads that share it. The visible cells of a
// token are divided into chunks of CHUNK cells. Each chunk has a softmax of its own, and the chunks are merged in their
// order (online softmax, https://arxiv.org/abs/1805.02867). If there are few tokens, the threads share out the chunks,
// else the tokens. Of many tokens, up to TILE_ROWS are computed together: a cell is decoded once for all of them. The result of
// a token has the same bits each way, whatever other tokens, empty cells and threads there are.
#include "attention.h"

#if (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)) || defined(__ARM_FEATURE_DOTPROD)
#include "attention_cells.h"

#define VALUES 32        // cells whose values are decoded at a time
#define MOST_SIZE 256    // numbers of a head
#define MOST_SHARING 16  // query heads that share keys and values
#define TILE_ROWS 32     // tokens that are computed together at most
#define LEAST_TILED 4    // fewer are computed alone
#define AHEAD 16         // cells that are fetched ahead
#define UNITS_PER_THREAD 4  // with fewer tokens and heads for each thread, chunks are shared out
#define CHUNKS_PER_THREAD 2
#define FEW_CELLS 1024      // so few are shared out beforehand: that costs less than to wait for another thread

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
    int64_t tile_rows;  // tokens that are computed together; 0: each is computed alone
} Attention;

// A chunk of the cells that a row sees. `keys` and `values`: decoded, or NULL.
typedef struct {
    const int32_t * cells;
    int count;
    bool has_bias;  // the mask adds to the score of a visible cell
    const float *keys, *values;
} Chunk;

// A thread's memory. `total` has the sums of the values of each head, `most` the greatest score, `weight` the sum of the
// exponentials of the scores, relative to it.
typedef struct {
    int32_t * visible;  // cells of the row `visible_of`, or those that any row of a tile sees
    int64_t count, visible_of;
    bool has_bias;
    float *query, *keys, *values, *scores, *chunk, *total;
    float most[MOST_SHARING], weight[MOST_SHARING];  // of the chunk
    struct TileScratch * tile;  // NULL: no tokens are computed together
} Scratch;

// The state of a row in a tile. `chunk`: the next one, in `cells`. `next`: the first cell behind it.
typedef struct {
    Chunk chunk;
    int64_t next;
    int32_t cells[CHUNK];
    float most[MOST_SHARING], weight[MOST_SHARING];
} TileRow;

// The memory of a tile. `ranks`: the place of each cell in `visible`. `keys` and `values` have the decoded cells from the
// place `first` to `end`, at most 2 * CHUNK.
typedef struct TileScratch {
    int32_t * ranks;
    float *keys, *values, *totals;
    int64_t first, end;
    TileRow rows[TILE_ROWS];
} TileScratch;

INLINE int64_t least_of(int64_t one, int64_t other) { return one < other ? one : other; }
INLINE int64_t padded(int64_t count) { return (count + 15) / 16 * 16; }

static size_t row_bytes(const struct ggml_tensor * cache) {
    return (cache->type == GGML_TYPE_F16 ? cache->ne[0] : cache->ne[0] / 32) * cache->nb[0];
}

// The size of a tile's memory. Behind its keys are KEYS more, which are read with the last.
static int64_t tile_floats(const Attention * of) {
    return padded(sizeof(TileScratch) / sizeof(float) + 1) + padded(of->cells)
        + (2 * CHUNK + KEYS) * (padded(of->key_size) + padded(of->value_size))
        + TILE_ROWS * padded(of->sharing * of->value_size);
}

static Attention attention(const struct ggml_tensor * op, int threads) {
    const struct ggml_tensor *query = op->src[0], *key = op->src[1], *value = op->src[2];
    Attention of = {
        op, query, key, value, op->src[3], op->src[4], decoder(key->type), decoder(value->type), 0, 0, 0,
        row_bytes(key), row_bytes(value),
        key->ne[0], value->ne[0], query->ne[1], query->ne[3], query->ne[2], key->ne[2],
        query->ne[2] / key->ne[2], key->ne[1], (key->ne[1] + CHUNK - 1) / CHUNK, 0, 0, false, 0};
    memcpy(&of.scale, op->op_params, sizeof(float));
    memcpy(&of.max_bias, op->op_params + 1, sizeof(float));
    memcpy(&of.cap, op->op_params + 2, sizeof(float));
    if (of.cap != 0) of.scale /= of.cap;
    of.scratch = padded(of.cells) + padded(of.sharing * of.key_size) + padded(KEYS * of.key_size)
        + padded(VALUES * of.value_size) + of.sharing * CHUNK + 2 * padded(of.sharing * of.value_size);
    of.partial = padded(of.value_size) + 16;
    const int64_t tasks = of.streams * of.rows * of.pairs, shared_out = UNITS_PER_THREAD * threads;
    of.splits = of.chunks > 1 && tasks < shared_out;
    if (of.rows < LEAST_TILED) return of;
    const int64_t tile_rows = least_of(least_of(TILE_ROWS, of.rows), tasks / shared_out);  // so that no thread is idle
    if (tile_rows >= LEAST_TILED) of.tile_rows = tile_rows;
    of.scratch += tile_floats(&of);  // in any case: OpenMP may start fewer threads than the memory was reserved for
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
    if (of->tile_rows) {
        float * rest = out.total + padded(of->sharing * of->value_size);
        out.tile = (TileScratch *)rest;
        rest += padded(sizeof(TileScratch) / sizeof(float) + 1);
        out.tile->ranks = (int32_t *)rest;
        out.tile->keys = rest + padded(of->cells);
        out.tile->values = out.tile->keys + (2 * CHUNK + KEYS) * padded(of->key_size);
        out.tile->totals = out.tile->values + (2 * CHUNK + KEYS) * padded(of->value_size);
    }
    return out;
}

static const uint8_t * mask_of(const Attention * of, int64_t row) {
    if (!of->mask) return NULL;
    const int64_t stream = row / of->rows % of->mask->ne[3];
    return (const uint8_t *)of->mask->data + row % of->rows * of->mask->nb[1] + stream * of->mask->nb[3];
}

// Whether a mask has the same four halves `bits` at 16 cells.
INLINE bool is_run_of(const uint8_t * mask, uint64_t bits) {
    uint64_t four[4];
    memcpy(four, mask, 32);
    return ((four[0] ^ bits) | (four[1] ^ bits) | (four[2] ^ bits) | (four[3] ^ bits)) == 0;
}
#define HIDDEN 0xfc00  // -infinity
#define HIDDEN_FOUR 0xfc00fc00fc00fc00

// Lists up to `limit` cells that a row sees, from `*next` on, which becomes the first cell behind them. Returns how many.
static int64_t list_cells(
    const Attention * of, const uint8_t * mask, int64_t * next, int64_t limit, int32_t * out, bool * has_bias
) {
    int64_t count = 0, c = *next;
    while (c < of->cells && count < limit) {
        if (c + 16 <= of->cells && count + 16 <= limit) {
            if (!mask || is_run_of(mask + 2 * c, 0)) {
                for (int i = 0; i < 16; i++) out[count + i] = (int32_t)(c + i);
                count += 16, c += 16;
                continue;
            }
            if (is_run_of(mask + 2 * c, HIDDEN_FOUR)) {
                c += 16;
                continue;
            }
        }
        uint16_t bits = 0;
        if (mask) memcpy(&bits, mask + 2 * c, 2);
        out[count] = (int32_t)c++;
        count += bits != HIDDEN;
        *has_bias |= bits != HIDDEN && bits;
    }
    *next = c;
    return count;
}

// Lists the cells that a row sees.
static void list_visible(const Attention * of, Scratch * in, int64_t row) {
    if (in->visible_of == row) return;
    int64_t next = 0;
    in->has_bias = false;
    in->count = list_cells(of, mask_of(of, row), &next, of->cells, in->visible, &in->has_bias);
    in->visible_of = row;
}

// ---- one chunk

// The factor of the mask for a head, by which ALiBi lowers the scores of distant cells.
static float slope(const Attention * of, int64_t head) {
    if (of->max_bias <= 0) return 1;
    int64_t power = 1;
    while (2 * power <= of->heads) power *= 2;
    return head < power ? powf(2, -of->max_bias / power * (head + 1))
                        : powf(2, -of->max_bias / 2 / power * (2 * (head - power) + 1));
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

// Computes the attention of the copied queries over a chunk: `most`, `weight` and `chunk`.
static void compute_chunk(const Attention * of, Scratch * in, int64_t row, int64_t pair, const Chunk * chunk) {
    const uint8_t * keys = cells_of(of->key, of, row, pair), * values = cells_of(of->value, of, row, pair);
    const int32_t * cells = chunk->cells;
    const int count = chunk->count;
    for (int c = 0; c < count; c += KEYS) {
        if (chunk->keys) {
            multiply_keys(in->query, chunk->keys + c * of->key_size, of->key_size, of->sharing, in->scores + c);
            continue;
        }
        const int some = (int)least_of(KEYS, count - c);  // behind them are earlier keys, whose scores are overwritten
        for (int i = 0; i < some; i++) {
            fetch_ahead(keys, of->key->nb[1], of->key_bytes, cells, c + i, count);
            of->decode_key(keys + cells[c + i] * of->key->nb[1], of->key_size, in->keys + i * of->key_size);
        }
        multiply_keys(in->query, in->keys, of->key_size, of->sharing, in->scores + c);
    }
    const uint8_t * mask = mask_of(of, row);
    for (int64_t h = 0; h < of->sharing; h++) {
        float * scores = in->scores + h * CHUNK;
        if (of->cap != 0) limit_scores(scores, count, of->cap);
        const float factor = chunk->has_bias ? slope(of, pair * of->sharing + h) : 0;
        for (int c = 0; chunk->has_bias && c < count; c++) scores[c] += factor * half_at(mask + 2 * cells[c]);
        exponentiate(scores, count, in->most + h, in->weight + h);
    }
    memset(in->chunk, 0, sizeof(float) * of->sharing * of->value_size);
    for (int c = 0; c < count; c += VALUES) {
        const int some = (int)least_of(VALUES, count - c);
        const float * decoded = chunk->values ? chunk->values + c * of->value_size : in->values;
        for (int i = 0; !chunk->values && i < some; i++) {
            fetch_ahead(values, of->value->nb[1], of->value_bytes, cells, c + i, count);
            of->decode_value(values + cells[c + i] * of->value->nb[1], of->value_size, in->values + i * of->value_size);
        }
        add_values(in->scores + c, decoded, some, of->value_size, of->sharing, in->chunk);
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

// Adds the chunk that was computed to the sums of the heads that share it.
static void merge_chunk(const Attention * of, const Scratch * in, float * totals, float * most, float * weight) {
    for (int64_t h = 0; h < of->sharing; h++)
        merge(
            totals + h * of->value_size, most + h, weight + h, in->chunk + h * of->value_size, in->most[h],
            in->weight[h], of->value_size);
}

// The chunk that begins at a place of the list of visible cells.
static Chunk chunk_at(const Scratch * in, int64_t first) {
    return (Chunk){in->visible + first, (int)least_of(CHUNK, in->count - first), in->has_bias, NULL, NULL};
}

// Computes all chunks of a row and a pair of keys and values.
static void compute_row(const Attention * of, Scratch * in, int64_t row, int64_t pair) {
    float most[MOST_SHARING], weight[MOST_SHARING];
    for (int64_t h = 0; h < of->sharing; h++) most[h] = -INFINITY, weight[h] = 0;
    memset(in->total, 0, sizeof(float) * of->sharing * of->value_size);
    list_visible(of, in, row);
    copy_queries(of, in, row, pair);
    for (int64_t first = 0; first < in->count; first += CHUNK) {
        const Chunk chunk = chunk_at(in, first);
        compute_chunk(of, in, row, pair, &chunk);
        merge_chunk(of, in, in->total, most, weight);
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
    const Chunk cells = chunk_at(in, chunk * CHUNK);
    const int count = cells.count;
    if (count > 0) {
        copy_queries(of, in, row, pair);
        compute_chunk(of, in, row, pair, &cells);
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

// ---- tiles: tokens that are computed together

// Lists the cells that any of `count` rows sees, and the place of each cell in this list.
static void list_tile(const Attention * of, Scratch * in, int64_t row, int64_t count) {
    in->count = 0, in->visible_of = -1;
    for (int64_t c = 0; c < of->cells; c += 16) {
        const int some = (int)least_of(16, of->cells - c);
        bool is_visible[16] = {false}, sees_all = false;
        for (int64_t r = 0; r < count && !sees_all; r++) {
            const uint8_t * mask = mask_of(of, row + r);
            sees_all = !mask || (some == 16 && is_run_of(mask + 2 * c, 0));
            if (sees_all || (some == 16 && is_run_of(mask + 2 * c, HIDDEN_FOUR))) continue;
            for (int i = 0; i < some; i++) {
                uint16_t bits;
                memcpy(&bits, mask + 2 * (c + i), 2);
                is_visible[i] |= bits != HIDDEN;
            }
        }
        for (int i = 0; i < some; i++) {
            in->tile->ranks[c + i] = (int32_t)in->count;
            in->visible[in->count] = (int32_t)(c + i);
            in->count += sees_all || is_visible[i];
        }
    }
}

// Decodes the keys and values of a tile up to a place in the list of its cells.
static void decode_tile(const Attention * of, Scratch * in, int64_t row, int64_t pair, int64_t end) {
    TileScratch * tile = in->tile;
    const uint8_t * keys = cells_of(of->key, of, row, pair), * values = cells_of(of->value, of, row, pair);
    for (; tile->end < end; tile->end++) {
        const int64_t cell = in->visible[tile->end], at = tile->end - tile->first;
        of->decode_key(keys + cell * of->key->nb[1], of->key_size, tile->keys + at * of->key_size);
        of->decode_value(values + cell * of->value->nb[1], of->value_size, tile->values + at * of->value_size);
    }
}

// Makes a place in the list of cells the first one that is decoded.
static void move_tile(const Attention * of, TileScratch * tile, int64_t first) {
    const int64_t skipped = first - tile->first, kept = tile->end - first;
    if (kept > 0) {
        memmove(tile->keys, tile->keys + skipped * of->key_size, sizeof(float) * kept * of->key_size);
        memmove(tile->values, tile->values + skipped * of->value_size, sizeof(float) * kept * of->value_size);
    }
    tile->first = first, tile->end = kept > 0 ? tile->end : first;
}

static void list_next_chunk(const Attention * of, TileRow * state, int64_t row) {
    state->chunk = (Chunk){.cells = state->cells};
    state->chunk.count =
        (int)list_cells(of, mask_of(of, row), &state->next, CHUNK, state->cells, &state->chunk.has_bias);
}

// Computes `count` rows of one stream and a pair of keys and values. The cells are decoded in blocks of CHUNK. A chunk
// of a row begins in a block and may end in the next. One whose cells are not side by side among those of the tile is
// decoded again.
static void compute_tile(const Attention * of, Scratch * in, int64_t row, int64_t count, int64_t pair) {
    TileScratch * tile = in->tile;
    const int64_t width = padded(of->sharing * of->value_size);
    list_tile(of, in, row, count);
    memset(tile->totals, 0, sizeof(float) * count * width);
    for (int64_t r = 0; r < count; r++) {
        TileRow * state = tile->rows + r;
        state->next = 0;
        for (int64_t h = 0; h < of->sharing; h++) state->most[h] = -INFINITY, state->weight[h] = 0;
        list_next_chunk(of, state, row + r);
    }
    tile->first = tile->end = 0;
    for (int64_t block = 0; block < in->count; block += CHUNK) {
        move_tile(of, tile, block);
        for (int64_t r = 0; r < count; r++) {
            TileRow * state = tile->rows + r;
            Chunk * chunk = &state->chunk;
            while (chunk->count > 0 && tile->ranks[chunk->cells[0]] < block + CHUNK) {
                const int64_t first = tile->ranks[chunk->cells[0]];
                const int64_t end = tile->ranks[chunk->cells[chunk->count - 1]] + 1;
                if (end - first == chunk->count) {
                    decode_tile(of, in, row, pair, end);
                    chunk->keys = tile->keys + (first - block) * of->key_size;
                    chunk->values = tile->values + (first - block) * of->value_size;
                }
                copy_queries(of, in, row + r, pair);
                compute_chunk(of, in, row + r, pair, chunk);
                merge_chunk(of, in, tile->totals + r * width, state->most, state->weight);
                list_next_chunk(of, state, row + r);
            }
        }
    }
    for (int64_t r = 0; r < count; r++)
        for (int64_t h = 0; h < of->sharing; h++)
            write_result(
                of, row + r, pair * of->sharing + h, tile->totals + r * width + h * of->value_size,
                tile->rows[r].most[h], tile->rows[r].weight[h]);
}

bool is_own_attention(const struct ggml_tensor * op) {
    const struct ggml_tensor *query = op->src[0], *key = op->src[1], *value = op->src[2], *mask = op->src[3];
    const bool has_types = query->type == GGML_TYPE_F32 && decoder(key->type) && decoder(value->type)
        && (!mask || mask->type == GGML_TYPE_F16) && (!op->src[4] || op->src[4]->type == GGML_TYPE_F32);
    if (!has_types) return false;
    const int unit = key->type == GGML_TYPE_F16 && value->type == GGML_TYPE_F16 ? LANES : 32;
    return key->ne[0] % unit == 0 && value->ne[0] % unit == 0 && key->ne[0] % LANES == 0
        && key->ne[0] <= MOST_SIZE && value->ne[0] <= MOST_SIZE && key->ne[2] == value->ne[2]
        && key->ne[3] == value->ne[3] && query->ne[2] % key->ne[2] == 0 && query->ne[2] / key->ne[2] <= MOST_SHARING
        && query->ne[3] % key->ne[3] == 0 && (!mask || mask->ne[2] == 1);
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
    const int64_t rows = of.streams * of.rows;
    const int64_t tiles = of.tile_rows ? (of.rows + of.tile_rows - 1) / of.tile_rows : 0;  // of a stream
    const int64_t units = of.tile_rows ? of.streams * tiles * of.pairs
                                       : rows * of.pairs / pairs * (of.splits ? of.chunks : 1);
    const bool is_shared_beforehand = of.cells <= FEW_CELLS && !of.tile_rows;
    if (!is_shared_beforehand) {
        if (params->ith == 0) ggml->chunk_set(params->threadpool, params->nth);
        ggml->barrier(params->threadpool);
    }
    for (int64_t u = params->ith; u < units;
         u = is_shared_beforehand ? u + params->nth : ggml->chunk_add(params->threadpool, 1)) {
        if (of.tile_rows) {
            const int64_t tile = units - 1 - u;  // the last ones see most cells
            const int64_t first = tile / of.pairs % tiles * of.tile_rows;
            compute_tile(
                &of, &in, tile / of.pairs / tiles * of.rows + first, least_of(of.tile_rows, of.rows - first),
                tile % of.pairs);
            continue;
        }
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
