// Computes attention (attention.c) over fixed pseudo-random caches of every type, with one thread, and prints a line for
// each case: its name and a weighted sum of the results. check_c_portability.py compares the sums of different
// processors, which differ by rounding.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "../../llmcli/runtime/binding/kernels/attention.h"
#include "random_bits.h"

enum { SIZE = 64, HEADS = 5, PAIRS = 1, CELLS = 600, PROMPT = 40 };  // PROMPT: rows that see what is before them

static void pass_barrier(struct ggml_threadpool * threads) { (void)threads; }
static int next_chunk;
static void set_chunk(struct ggml_threadpool * threads, int value) {
    (void)threads;
    next_chunk = value;
}
static int add_chunk(struct ggml_threadpool * threads, int value) {
    (void)threads;
    next_chunk += value;
    return next_chunk - value;
}

// A cache [PAIRS, CELLS, SIZE] of halves from 0.0078 to 0.0156 and random bytes.
static struct ggml_tensor cache(enum ggml_type type, int bytes, int values) {
    const size_t row = (size_t)SIZE / values * bytes;
    struct ggml_tensor out = {
        .type = type, .ne = {SIZE, CELLS, PAIRS, 1},
        .nb = {bytes, row, row * CELLS, row * CELLS * PAIRS}, .data = malloc(row * CELLS * PAIRS)};
    uint8_t * at = out.data;
    for (size_t i = 0; i < row * CELLS * PAIRS; i++) at[i] = (uint8_t)next_bits();
    for (size_t i = 0; i < row * CELLS * PAIRS; i += bytes) {
        const uint16_t bits = (uint16_t)(0x2000 | (next_bits() & 0x3ff) | (values == 1 ? next_bits() & 0x9c00 : 0));
        memcpy(at + i, &bits, 2);
    }
    return out;
}

static void print_case(const char * name, enum ggml_type type, int bytes, int values, int rows) {
    struct ggml_tensor key = cache(type, bytes, values), value = cache(type, bytes, values);
    struct ggml_tensor query = {
        .ne = {SIZE, rows, HEADS, 1}, .nb = {4, 4 * SIZE, 4 * SIZE * (size_t)rows, 4 * SIZE * (size_t)rows * HEADS}};
    struct ggml_tensor mask = {
        .type = GGML_TYPE_F16, .ne = {CELLS, rows, 1, 1}, .nb = {2, 2 * CELLS, 2 * CELLS * (size_t)rows, 2 * CELLS * (size_t)rows}};
    const int count = SIZE * HEADS * rows;
    float * queries = malloc(4 * count), * results = malloc(4 * count), scale = 0.125f;
    uint16_t * masks = malloc(2 * CELLS * (size_t)rows);
    for (int i = 0; i < count; i++) queries[i] = ((float)(next_bits() >> 8) - 8388608.f) / 4194304.f;
    for (int i = 0; i < CELLS * rows; i++) {
        const bool is_visible = rows < PROMPT ? next_bits() % 4 : i % CELLS <= CELLS - rows + i / CELLS;
        masks[i] = is_visible ? 0 : 0xfc00;
    }
    query.data = queries, mask.data = masks;
    struct ggml_tensor op = {
        .op = GGML_OP_FLASH_ATTN_EXT, .ne = {SIZE, HEADS, rows, 1}, .nb = {4, 4 * SIZE}, .src = {&query, &key, &value, &mask},
        .data = results};
    memcpy(op.op_params, &scale, 4);
    struct compute_params params = {.ith = 0, .nth = 1, .wsize = attention_work_size(1, &op)};
    params.wdata = malloc(params.wsize);
    const struct cpu_functions functions = {NULL, NULL, pass_barrier, set_chunk, add_chunk};
    if (!is_own_attention(&op)) exit(1);
    compute_attention(&functions, &params, &op);
    double sum = 0;
    for (int i = 0; i < count; i++) sum += results[i] * (1 + i % 7);
    printf("%s %d %.9g\n", name, rows, sum);
    free(key.data), free(value.data), free(queries), free(results), free(masks), free(params.wdata);
}

int main(void) {
    const int counts[] = {1, 5, 9, PROMPT};
    for (int i = 0; i < 4; i++) {
        print_case("F16", GGML_TYPE_F16, 2, 1, counts[i]);
        print_case("Q8_0", GGML_TYPE_Q8_0, 34, 32, counts[i]);
        print_case("Q4_0", GGML_TYPE_Q4_0, 18, 32, counts[i]);
    }
    return 0;
}
