// Matrix products with quantized weights, and attention (attention.c), computed inside of ggml's CPU backend.
//
// ggml keeps weights in a buffer of the type CPU_REPACK in a layout of its own and asks the object of this type whether
// it computes an operation (ggml-cpu/traits.h, repack.cpp). llmcli puts its own functions in the place of that type's:
// they take weights of the types below, whose layout is that of interleave.h, and pass on all others. So the products
// run on ggml's threads and in its graph, and no weight is in memory twice. A further backend would split the graph at
// each product, which costs a decode more than it gains.
//
// The objects are C++ objects with virtual functions. They are laid out here as the Itanium C++ ABI does it, which GCC
// and Clang use: a pointer to a table of functions, whose first two are destructors.
#define EXPORT __attribute__((visibility("default")))

#if (defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)) || defined(__ARM_FEATURE_DOTPROD)
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "attention.h"
#include "ggml_backend.h"
#include "interleave.h"
#include "x8.h"

#define TILE_ROWS 8            // rows of inputs that a kernel multiplies at a time
#define FEW_ROWS 2             // so many are rounded by each thread: that costs less than to wait for another
#define CHUNK_BYTES 32768      // of weights that a thread takes at a time
#define SMALL_BYTES (1 << 20)  // of weights; the rows of a smaller product are shared out beforehand
#define PART_BYTES (1 << 19)   // least bytes of weights that a thread interleaves
#define MOST_PARTS 16

typedef void (*Kernel)(
    const uint8_t * weights, int64_t gap, const struct activations * inputs, int64_t columns, float * out);
typedef struct {
    enum rounding rounding;
    int columns, bytes;  // of a block
    void (*interleave)(uint8_t * out, Rows rows);
    Kernel kernels[4];  // for 1, 2, 4 and 8 rows
} Kind;

#define WITH(NAME, N)                                                                                         \
    static void x8_##NAME##_##N(                                                                              \
        const uint8_t * at, int64_t gap, const struct activations * in, int64_t columns, float * out          \
    ) {                                                                                                       \
        x8_##NAME(at, gap, in, columns, N, out);                                                              \
    }
#define ALL(NAME) WITH(NAME, 1) WITH(NAME, 2) WITH(NAME, 4) WITH(NAME, 8)
ALL(q4_0) ALL(q4_1) ALL(q5_0) ALL(q5_1) ALL(q8_0) ALL(iq4_nl) ALL(mxfp4)
ALL(q2_K) ALL(q3_K) ALL(q4_K) ALL(q5_K) ALL(q6_K) ALL(iq4_xs)

static const Kind * kind(enum ggml_type type) {
#define KIND(TYPE, NAME, ROUNDING, COLUMNS, BYTES)                                                                \
    case GGML_TYPE_##TYPE: {                                                                                      \
        static const Kind found = {                                                                               \
            ROUNDING, COLUMNS, BYTES, interleave_##NAME, {x8_##NAME##_1, x8_##NAME##_2, x8_##NAME##_4, x8_##NAME##_8}}; \
        return &found;                                                                                            \
    }
    switch (type) {
        KIND(Q4_0, q4_0, ROUND_32, 32, 18)
        KIND(Q4_1, q4_1, ROUND_32, 32, 20)
        KIND(Q5_0, q5_0, ROUND_32, 32, 22)
        KIND(Q5_1, q5_1, ROUND_32, 32, 24)
        KIND(Q8_0, q8_0, ROUND_32, 32, 34)
        KIND(IQ4_NL, iq4_nl, ROUND_32, 32, 18)
        KIND(MXFP4, mxfp4, ROUND_32, 32, 17)
        KIND(Q2_K, q2_K, ROUND_256, 256, 84)
        KIND(Q3_K, q3_K, ROUND_256, 256, 110)
        KIND(Q4_K, q4_K, ROUND_256, 256, 144)
        KIND(Q5_K, q5_K, ROUND_256, 256, 176)
        KIND(Q6_K, q6_K, ROUND_256, 256, 210)
        KIND(IQ4_XS, iq4_xs, ROUND_256, 256, 136)
        default: return NULL;
    }
}

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

static void round_row(enum rounding rounding, const float * from, int64_t columns, uint8_t * memory) {
    if (rounding == ROUND_32) round_row_32(from, columns, memory);
    else round_row_256(from, columns, memory);
}

// Interleaves the rows `first` to `end` of weights [.., row_bytes], which are multiples of BLOCK_ROWS.
static void interleave(const Kind * of, const uint8_t * from, int64_t row_bytes, int64_t first, int64_t end, uint8_t * to) {
    for (int64_t j = first; j < end; j += BLOCK_ROWS)
        for (int64_t b = 0; b < row_bytes; b += of->bytes) {
            const uint8_t * rows[BLOCK_ROWS];
            for (int r = 0; r < BLOCK_ROWS; r++) rows[r] = from + (j + r) * row_bytes + b;
            of->interleave(to + j * row_bytes + b * BLOCK_ROWS, rows);
        }
}

// Rows of weights that a thread interleaves.
typedef struct {
    const Kind * kind;
    const uint8_t * from;
    uint8_t * to;
    int64_t row_bytes, first, end;
} Part;
static void * interleave_part(void * part) {
    const Part * of = part;
    interleave(of->kind, of->from, of->row_bytes, of->first, of->end, of->to);
    return NULL;
}

// Interleaves all `rows` of weights with some threads of their own: ggml's do not run while a model is loaded.
static void interleave_all(const Kind * of, const uint8_t * from, int64_t row_bytes, int64_t rows, uint8_t * to) {
    const int64_t wanted = least(least(rows * row_bytes / PART_BYTES, sysconf(_SC_NPROCESSORS_ONLN)), MOST_PARTS);
    const int64_t blocks = rows / BLOCK_ROWS, count = wanted > 1 ? least(wanted, blocks) : 1;
    Part parts[MOST_PARTS];
    pthread_t threads[MOST_PARTS];
    bool runs[MOST_PARTS];
    for (int64_t p = 0; p < count; p++) {
        parts[p] = (Part){
            of, from, to, row_bytes, blocks * p / count * BLOCK_ROWS, blocks * (p + 1) / count * BLOCK_ROWS};
        runs[p] = p + 1 < count && pthread_create(threads + p, NULL, interleave_part, parts + p) == 0;
        if (!runs[p]) interleave_part(parts + p);
    }
    for (int64_t p = 0; p < count; p++)
        if (runs[p]) pthread_join(threads[p], NULL);
}

typedef struct {
    const Kind * kind;
    const uint8_t * data;
    int64_t row_bytes, columns, height;
} Weights;

// Rounded rows of inputs, `each` bytes apart.
typedef struct {
    uint8_t * memory;
    int64_t each, count;
} Inputs;

// Multiplies up to TILE_ROWS rounded rows of inputs with the rows `first` to `end` of weights, which are multiples of
// BLOCK_ROWS; out: the address of each row's results for all rows of weights.
static void multiply_tile(
    const Weights * of, uint8_t * const * inputs, int rows, int64_t first, int64_t end, float * const * out
) {
    const int index = rows == 1 ? 0 : rows == 2 ? 1 : rows <= 4 ? 2 : 3, most = 1 << index;
    struct activations tile[TILE_ROWS];
    for (int i = 0; i < most; i++)  // further rows repeat the last one, and their results are left out
        tile[i] = activations_at(of->kind->rounding, inputs[least(i, rows - 1)], of->columns);
    for (int64_t j = first; j < end; j += KERNEL_ROWS) {
        const int64_t count = least(KERNEL_ROWS, end - j);  // where it is less, eight rows are computed twice
        const int64_t gap = count > BLOCK_ROWS ? BLOCK_ROWS * of->row_bytes : 0;
        float results[TILE_ROWS * KERNEL_ROWS];
        of->kind->kernels[index](of->data + j * of->row_bytes, gap, tile, of->columns, results);
        for (int i = 0; i < rows; i++) memcpy(out[i] + j, results + i * KERNEL_ROWS, sizeof(float) * count);
    }
}

// Multiplies all inputs with the rows `first` to `end` of weights; out [rows, height].
static void multiply(const Weights * of, const Inputs * inputs, int64_t first, int64_t end, float * out) {
    for (int64_t r = 0; r < inputs->count; r += TILE_ROWS) {
        uint8_t * tile[TILE_ROWS];
        float * to[TILE_ROWS];
        const int rows = (int)least(TILE_ROWS, inputs->count - r);
        for (int i = 0; i < rows; i++)
            tile[i] = inputs->memory + (r + i) * inputs->each, to[i] = out + (r + i) * of->height;
        multiply_tile(of, tile, rows, first, end, to);
    }
}

// ---- in ggml's CPU backend

static struct cpu_functions ggml;
static struct tensor_traits own_traits;
static struct extra_buffer_type * replaced;
static ggml_backend_buffer_t (*alloc_replaced)(ggml_backend_buffer_type_t type, size_t size);
static ggml_backend_buffer_t (*alloc_plain_replaced)(ggml_backend_buffer_type_t type, size_t size);
static ggml_backend_buffer_type_t buffer_type;
static uint64_t own_types;  // a bit for each type of weights that gets the layout of this file from now on

static int64_t row_count(const struct ggml_tensor * tensor) { return tensor->ne[1] * tensor->ne[2] * tensor->ne[3]; }

static bool gets_own_layout(const struct ggml_tensor * weights) {
    return (own_types >> weights->type & 1) && kind(weights->type) && weights->ne[1] % BLOCK_ROWS == 0
        && weights->ne[3] == 1;
}
static bool is_product(const struct ggml_tensor * op) {
    return op->op == GGML_OP_MUL_MAT || op->op == GGML_OP_MUL_MAT_ID;
}
static bool is_own(const struct ggml_tensor * op) { return is_product(op) && op->src[0]->extra == &own_traits; }
static struct tensor_traits * other_traits(const struct ggml_tensor * op) {
    return replaced->functions->get_tensor_traits(replaced, op);
}

// What the threads that compute an operation share.
typedef struct {
    const struct compute_params * params;
    struct ggml_tensor * op;
    Weights weights;  // of the first expert
    Inputs inputs;
    const uint8_t * rest;  // memory behind the inputs
} Operation;

static Operation operation(const struct compute_params * params, struct ggml_tensor * op) {
    const struct ggml_tensor * weights = op->src[0];
    const Kind * of = kind(weights->type);
    const int64_t each = activation_bytes(of->rounding, weights->ne[0]), count = row_count(op->src[1]);
    uint8_t * memory = (uint8_t *)(((uintptr_t)params->wdata + 63) & ~(uintptr_t)63);
    return (Operation){
        params, op, {of, weights->data, weights->nb[1], weights->ne[0], weights->ne[1]}, {memory, each, count},
        memory + each * count};
}

// Rounds the rows of inputs that are this thread's, or all of them.
static void round_inputs(const Operation * of, bool all) {
    const struct ggml_tensor * from = of->op->src[1];
    for (int64_t r = all ? 0 : of->params->ith; r < of->inputs.count; r += all ? 1 : of->params->nth) {
        const int64_t i1 = r % from->ne[1], i2 = r / from->ne[1] % from->ne[2], i3 = r / from->ne[1] / from->ne[2];
        const uint8_t * at = (const uint8_t *)from->data + i1 * from->nb[1] + i2 * from->nb[2] + i3 * from->nb[3];
        round_row(
            of->weights.kind->rounding, (const float *)at, of->weights.columns,
            of->inputs.memory + r * of->inputs.each);
    }
}

// Blocks of rows that a thread takes at a time: a multiple of those that a kernel computes together.
static int64_t blocks_per_chunk(const Weights * of) {
    return (CHUNK_BYTES / (of->row_bytes * KERNEL_ROWS) + 1) * (KERNEL_ROWS / BLOCK_ROWS);
}

static void compute_product(Operation of) {
    const struct compute_params * params = of.params;
    const int64_t blocks = of.weights.height / BLOCK_ROWS;
    const bool few = of.inputs.count <= FEW_ROWS, small = few && of.weights.height * of.weights.row_bytes < SMALL_BYTES;
    if (few) of.inputs.memory += of.inputs.each * of.inputs.count * params->ith;
    if (!small && params->ith == 0) ggml.chunk_set(params->threadpool, params->nth);
    round_inputs(&of, few);
    if (small) {
        const int64_t part = (blocks + params->nth - 1) / params->nth, first = least(params->ith * part, blocks);
        const int64_t end = least(first + part, blocks);
        multiply(&of.weights, &of.inputs, first * BLOCK_ROWS, end * BLOCK_ROWS, of.op->data);
        return;
    }
    ggml.barrier(params->threadpool);
    const int64_t chunk = blocks_per_chunk(&of.weights);
    for (int64_t c = params->ith; c * chunk < blocks; c = ggml.chunk_add(params->threadpool, 1)) {
        const int64_t end = least((c + 1) * chunk, blocks);
        multiply(&of.weights, &of.inputs, c * chunk * BLOCK_ROWS, end * BLOCK_ROWS, of.op->data);
    }
}

// Inputs of a mixture: `ids` [tokens, used] names the experts of each token. An expert's pairs of token and place are
// together in a list, which each thread makes for itself.
static int64_t list_bytes(const struct ggml_tensor * op) {
    const int64_t experts = op->src[0]->ne[2], pairs = op->src[2]->ne[0] * op->src[2]->ne[1];
    return (experts + 1 + pairs) * 4;
}
static int32_t expert_of(const struct ggml_tensor * ids, int64_t pair) {
    const int64_t place = pair % ids->ne[0], token = pair / ids->ne[0];
    int32_t expert;
    memcpy(&expert, (const uint8_t *)ids->data + place * ids->nb[0] + token * ids->nb[1], 4);
    return expert;
}
// Sorts the pairs by their experts; `begins` [experts + 1] gets where the pairs of each expert begin.
static void sort_pairs(const struct ggml_tensor * ids, int64_t experts, int32_t * begins, int32_t * pairs) {
    const int64_t count = ids->ne[0] * ids->ne[1];
    memset(begins, 0, (experts + 1) * sizeof(int32_t));
    for (int64_t p = 0; p < count; p++) begins[expert_of(ids, p) + 1]++;
    for (int64_t e = 0; e < experts; e++) begins[e + 1] += begins[e];
    for (int64_t p = count; p-- > 0;) pairs[--begins[expert_of(ids, p) + 1]] = (int32_t)p;
    memmove(begins, begins + 1, experts * sizeof(int32_t));
    begins[experts] = (int32_t)count;
}

static void compute_mixture(Operation of) {
    const struct compute_params * params = of.params;
    const struct ggml_tensor * weights = of.op->src[0], * from = of.op->src[1], * ids = of.op->src[2];
    if (params->ith == 0) ggml.chunk_set(params->threadpool, params->nth);
    round_inputs(&of, false);
    int32_t * begins = (int32_t *)(of.rest + list_bytes(of.op) * params->ith), * pairs = begins + weights->ne[2] + 1;
    sort_pairs(ids, weights->ne[2], begins, pairs);
    ggml.barrier(params->threadpool);
    const int64_t blocks = of.weights.height / BLOCK_ROWS, chunk = blocks_per_chunk(&of.weights);
    const int64_t chunks = (blocks + chunk - 1) / chunk;
    int64_t next = params->ith, done = 0;  // chunks of all experts that have pairs are numbered together
    for (int64_t e = 0; e < weights->ne[2]; e++) {
        if (begins[e] == begins[e + 1]) continue;
        Weights expert = of.weights;
        expert.data += e * weights->nb[2];
        for (; next < done + chunks; next = ggml.chunk_add(params->threadpool, 1)) {
            const int64_t first = (next - done) * chunk * BLOCK_ROWS;
            const int64_t end = least(first + chunk * BLOCK_ROWS, expert.height);
            for (int32_t p = begins[e]; p < begins[e + 1]; p += TILE_ROWS) {
                uint8_t * tile[TILE_ROWS];
                float * to[TILE_ROWS];
                const int rows = (int)least(TILE_ROWS, begins[e + 1] - p);
                for (int i = 0; i < rows; i++) {
                    const int64_t place = pairs[p + i] % ids->ne[0], token = pairs[p + i] / ids->ne[0];
                    tile[i] = of.inputs.memory + (place % from->ne[1] + token * from->ne[1]) * of.inputs.each;
                    to[i] = (float *)((uint8_t *)of.op->data + place * of.op->nb[1] + token * of.op->nb[2]);
                }
                multiply_tile(&expert, tile, rows, first, end, to);
            }
        }
        done += chunks;
    }
}

static bool work_size(struct tensor_traits * self, int threads, const struct ggml_tensor * op, size_t * size) {
    (void)self;
    const int64_t rows = row_count(op->src[1]), each = activation_bytes(kind(op->src[0]->type)->rounding, op->src[0]->ne[0]);
    const bool is_mixture = op->op == GGML_OP_MUL_MAT_ID;
    *size = each * rows * (!is_mixture && rows <= FEW_ROWS ? threads : 1) + 64;
    if (is_mixture) *size += list_bytes(op) * threads;
    return true;
}

static bool compute_forward(struct tensor_traits * self, struct compute_params * params, struct ggml_tensor * op) {
    (void)self;
    if (op->op == GGML_OP_MUL_MAT_ID) compute_mixture(operation(params, op));
    else compute_product(operation(params, op));
    return true;
}

static void no_destructor(void * self) { (void)self; }
static const struct tensor_traits_functions own_traits_functions = {
    {no_destructor, no_destructor}, work_size, compute_forward};
static struct tensor_traits own_traits = {&own_traits_functions};

static bool attention_is_on = true;
static bool leaves_attention;  // whether ggml has computed the attention of a single token
static bool attention_size(struct tensor_traits * self, int threads, const struct ggml_tensor * op, size_t * size) {
    (void)self;
    *size = attention_work_size(threads, op);
    return true;
}
static bool attention_forward(struct tensor_traits * self, struct compute_params * params, struct ggml_tensor * op) {
    (void)self;
    compute_attention(&ggml, params, op);
    return true;
}
static const struct tensor_traits_functions attention_traits_functions = {
    {no_destructor, no_destructor}, attention_size, attention_forward};
static struct tensor_traits attention_traits = {&attention_traits_functions};

static enum ggml_status (*init_replaced)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor);
static void (*set_replaced)(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);

static enum ggml_status init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor);
static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size);

// Returns whether weights have the layout of this file, or will have it. llama.cpp also asks with buffers without bytes
// and functions, before it allocates one.
static bool has_own_layout(const struct ggml_tensor * weights) {
    const struct ggml_backend_buffer * buffer = weights->buffer;
    if (!buffer || buffer->type != buffer_type) return false;
    return buffer->init_tensor ? weights->extra == &own_traits : gets_own_layout(weights);
}
static bool supports_op(struct extra_buffer_type * self, ggml_backend_dev_t device, const struct ggml_tensor * op) {
    (void)self;
    const struct ggml_tensor * weights = op->src[0], * inputs = op->src[1];
    const bool is_matrix = op->op == GGML_OP_MUL_MAT && weights->ne[2] == 1;
    if ((is_matrix || op->op == GGML_OP_MUL_MAT_ID) && has_own_layout(weights))
        return inputs->type == GGML_TYPE_F32 && (!inputs->buffer || ggml.is_host(inputs->buffer->type));
    return replaced->functions->supports_op(replaced, device, op);
}
static struct tensor_traits * get_tensor_traits(struct extra_buffer_type * self, const struct ggml_tensor * op) {
    (void)self;
    if (op->op == GGML_OP_FLASH_ATTN_EXT) {
        if (attention_is_on && is_own_attention(op)) return &attention_traits;
        if (op->src[0]->ne[1] == 1) __atomic_store_n(&leaves_attention, true, __ATOMIC_RELAXED);
        return NULL;
    }
    return is_own(op) ? &own_traits : other_traits(op);
}
static const struct extra_buffer_type_functions own_functions = {
    {no_destructor, no_destructor}, supports_op, get_tensor_traits};
static struct extra_buffer_type own = {&own_functions};

static enum ggml_status init_tensor(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor) {
    if (!gets_own_layout(tensor)) return init_replaced(buffer, tensor);
    tensor->extra = &own_traits;
    return GGML_STATUS_SUCCESS;
}
static void set_tensor(
    ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size
) {
    if (tensor->extra != &own_traits) {
        set_replaced(buffer, tensor, data, offset, size);
        return;
    }
    const int64_t rows = tensor->ne[1] * tensor->ne[2];
    if (offset || size != tensor->nb[1] * (size_t)rows) abort();  // ggml's own layouts have this limit, too
    interleave_all(kind(tensor->type), data, tensor->nb[1], rows, tensor->data);
}
// Asks for pages of 2 MiB: fewer faults while a model is loaded, and fewer misses of the TLB afterwards.
static void use_huge_pages(void * memory, size_t size) {
#if defined(__linux__)
    const uintptr_t page = 1 << 21, first = ((uintptr_t)memory + page - 1) & ~(page - 1);
    const uintptr_t end = ((uintptr_t)memory + size) & ~(page - 1);
    if (end > first) madvise((void *)first, end - first, MADV_HUGEPAGE);  // memory is as good if it is refused
#else
    (void)memory, (void)size;
#endif
}
// Allocates a plain buffer, as of a KV cache.
static ggml_backend_buffer_t alloc_plain(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = alloc_plain_replaced(type, size);
    if (buffer && buffer->get_base && size) use_huge_pages(buffer->get_base(buffer), size);
    return buffer;
}
static ggml_backend_buffer_t alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    ggml_backend_buffer_t buffer = alloc_replaced(type, size);
    if (!buffer) return NULL;
    if (buffer->get_base && size) use_huge_pages(buffer->get_base(buffer), size);
    init_replaced = buffer->init_tensor, set_replaced = buffer->set_tensor;
    buffer->init_tensor = init_tensor, buffer->set_tensor = set_tensor;
    return buffer;
}

// ---- what products.py calls

EXPORT const char * llmcli_products_ggml_version(void);
EXPORT void llmcli_products_install(
    ggml_backend_buffer_type_t type, const struct cpu_functions * functions, uint64_t types);
EXPORT int llmcli_products_use_attention(int on);
EXPORT int llmcli_products_leave_attention(void);
EXPORT int llmcli_products_multiply(
    int type, const void * weights, int64_t height, int64_t row_bytes, int64_t columns, const float * inputs,
    int64_t rows, float * out);
EXPORT int llmcli_products_interleave(int type, const void * weights, int64_t height, int64_t row_bytes, void * out);

// Returns the version of ggml whose structures this file uses.
const char * llmcli_products_ggml_version(void) { return GGML_VERSION; }

// Lets the weights of models that are loaded from now on have the layout of this file if their type is one of `types`, a
// bit for each, else ggml's.
void llmcli_products_install(
    ggml_backend_buffer_type_t type, const struct cpu_functions * functions, uint64_t types
) {
    if (!replaced) {
        ggml = *functions, buffer_type = type, replaced = type->context, alloc_replaced = type->alloc_buffer;
        ggml_backend_buffer_type_t plain = ggml.cpu_buffer_type();
        alloc_plain_replaced = plain->alloc_buffer, plain->alloc_buffer = alloc_plain;
    }
    own_types = types;
    type->context = &own;
    type->alloc_buffer = types ? alloc_buffer : alloc_replaced;
}

// Lets attention.c compute attention from now on if `on`, else ggml. Returns whether it did so before.
int llmcli_products_use_attention(int on) {
    const bool before = attention_is_on;
    attention_is_on = on != 0;
    return before;
}

// Returns 1 if ggml has computed the attention of a single token in this process, else 0.
int llmcli_products_leave_attention(void) { return __atomic_load_n(&leaves_attention, __ATOMIC_RELAXED); }

// Writes weights [height, row_bytes] in the layout of this file; returns 1, or 0 if there is none for them.
int llmcli_products_interleave(int type, const void * weights, int64_t height, int64_t row_bytes, void * out) {
    const Kind * of = kind(type);
    if (!of || height % BLOCK_ROWS) return 0;
    interleave_all(of, weights, row_bytes, height, out);
    return 1;
}

// Computes a product with weights in the layout of this file, out [rows, height]; returns 1, or 0 if there is none for
// them or memory is out.
int llmcli_products_multiply(
    int type, const void * weights, int64_t height, int64_t row_bytes, int64_t columns, const float * inputs,
    int64_t rows, float * out
) {
    const Kind * of = kind(type);
    if (!of || height % BLOCK_ROWS || columns % of->columns) return 0;
    const Weights all = {of, weights, row_bytes, columns, height};
    Inputs rounded = {NULL, activation_bytes(of->rounding, columns), rows};
    rounded.memory = aligned_alloc(64, rounded.each * rows);
    if (!rounded.memory) return 0;
    for (int64_t r = 0; r < rows; r++)
        round_row(of->rounding, inputs + r * columns, columns, rounded.memory + r * rounded.each);
    multiply(&all, &rounded, 0, height, out);
    free(rounded.memory);
    return 1;
}
#endif
