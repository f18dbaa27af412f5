// Matrix products of several rows of inputs with quantized weights, computed in bfloat16. This is a ggml backend
// (ggml_backend.h): ggml's scheduler assigns such products to it, as it does to BLAS. gemm.py registers it and sets the
// number of rows of inputs from which it is used.
//
// ggml multiplies the legacy types (Q4_0 ... Q8_0) row by row, which is slow for many rows. Here a thread decodes BLOCK
// rows of weights to bfloat16 once and multiplies them with all rows of inputs. Weights and inputs keep eight bits of
// precision; ggml's inputs keep eight bits relative to the largest of each 32. k-quants are left to ggml, which has
// integer tiles for them.
//
// AVX512_BF16 adds pairs of products in each element of a vector. Inputs are therefore packed in strips: for each pair
// of columns, the inputs of STRIP rows are side by side, and all are multiplied by the same pair of weights. Up to
// FEWEST rows are not packed; each row has a vector of sums, which are added up at the end. In both cases the order in
// which a row is summed depends neither on other rows nor on the number of threads.
#define EXPORT __attribute__((visibility("default")))

#if defined(__AVX512BF16__) && defined(__F16C__) && defined(_OPENMP)
#include <immintrin.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ggml_backend.h"

#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 8")
#endif

#define STRIP 16   // rows of inputs in a vector
#define STRIPS 3   // strips in a tile: with ACROSS, 24 of 32 registers are sums
#define ACROSS 8   // rows of weights in a tile
#define FEWEST 8   // most rows of inputs that are not packed into strips
#define BLOCK 32   // rows of weights that a thread decodes at a time, so that they stay in its cache
#define NEVER (1 << 30)

// ---- from blocks to bfloat16; layouts as in ggml-common.h

static inline __m512 half(const uint8_t * at) {
    uint16_t bits;
    memcpy(&bits, at, 2);
    return _mm512_set1_ps(_cvtsh_ss(bits));
}
static inline __m512i nibbles(const uint8_t * at) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at)); }
static inline __m512i low(__m512i two) { return _mm512_and_si512(two, _mm512_set1_epi32(15)); }
static inline __m512i high(__m512i two) { return _mm512_srli_epi32(two, 4); }
static inline __m512i with_fifth(__m512i value, __mmask16 bits) {
    return _mm512_mask_or_epi32(value, bits, value, _mm512_set1_epi32(16));
}
static inline __m512 floats(__m512i value, int less) {
    return _mm512_cvtepi32_ps(_mm512_sub_epi32(value, _mm512_set1_epi32(less)));
}
static inline __m512bh pairs_of(__m512 first, __m512 second) { return _mm512_cvtne2ps_pbh(second, first); }

static inline __m512bh q4_0(const uint8_t * at) {
    const __m512 d = half(at);
    const __m512i two = nibbles(at + 2);
    return pairs_of(d * floats(low(two), 8), d * floats(high(two), 8));
}
static inline __m512bh q4_1(const uint8_t * at) {
    const __m512 d = half(at), m = half(at + 2);
    const __m512i two = nibbles(at + 4);
    return pairs_of(d * floats(low(two), 0) + m, d * floats(high(two), 0) + m);
}
static inline __m512bh q5_0(const uint8_t * at) {
    const __m512 d = half(at);
    uint32_t fifth;
    memcpy(&fifth, at + 2, 4);
    const __m512i two = nibbles(at + 6);
    return pairs_of(d * floats(with_fifth(low(two), fifth), 16), d * floats(with_fifth(high(two), fifth >> 16), 16));
}
static inline __m512bh q5_1(const uint8_t * at) {
    const __m512 d = half(at), m = half(at + 2);
    uint32_t fifth;
    memcpy(&fifth, at + 4, 4);
    const __m512i two = nibbles(at + 8);
    return pairs_of(
        d * floats(with_fifth(low(two), fifth), 0) + m, d * floats(with_fifth(high(two), fifth >> 16), 0) + m);
}
static inline __m512bh q8_0(const uint8_t * at) {
    const __m512 d = half(at);
    const __m128i first = _mm_loadu_si128((const __m128i *)(at + 2));
    const __m128i second = _mm_loadu_si128((const __m128i *)(at + 18));
    return pairs_of(d * floats(_mm512_cvtepi8_epi32(first), 0), d * floats(_mm512_cvtepi8_epi32(second), 0));
}

// Three functions for each type. TYPE_row decodes a row of weights to bfloat16. TYPE_four and TYPE_eight multiply a row
// of weights with 4 or 8 rows of bfloat16 inputs [.., columns]. They decode weights while they sum, because storing and
// reloading decoded weights would take longer for so few rows.
#define EACH(TYPE, BYTES)                                                                                          \
    static void TYPE##_row(const uint8_t * at, uint32_t * out, int64_t columns) {                                  \
        for (int64_t i = 0; i < columns; i += 32, at += BYTES, out += 16) {                                        \
            const __m512bh both = TYPE(at);                                                                        \
            memcpy(out, &both, sizeof(both));                                                                      \
        }                                                                                                          \
    }                                                                                                              \
    static void TYPE##_four(const uint8_t * at, const uint32_t * inputs, int64_t columns, float * sums) {          \
        FEW(4, TYPE, BYTES)                                                                                        \
    }                                                                                                              \
    static void TYPE##_eight(const uint8_t * at, const uint32_t * inputs, int64_t columns, float * sums) {         \
        FEW(8, TYPE, BYTES)                                                                                        \
    }
#define FEW(N, TYPE, BYTES)                                                                                        \
    __m512 all[N];                                                                                                 \
    for (int r = 0; r < N; r++) all[r] = _mm512_setzero_ps();                                                      \
    for (int64_t i = 0; i < columns; i += 32, at += BYTES) {                                                       \
        const __m512bh weights = TYPE(at);                                                                         \
        UNROLL for (int r = 0; r < N; r++)                                                                         \
            all[r] = _mm512_dpbf16_ps(                                                                             \
                all[r], (__m512bh)_mm512_load_si512((const void *)(inputs + (r * columns + i) / 2)), weights);     \
    }                                                                                                              \
    for (int r = 0; r < N; r++) sums[r] = _mm512_reduce_add_ps(all[r]);
EACH(q4_0, 18)
EACH(q4_1, 20)
EACH(q5_0, 22)
EACH(q5_1, 24)
EACH(q8_0, 34)

typedef struct {
    void (*row)(const uint8_t * blocks, uint32_t * out, int64_t columns);
    void (*four)(const uint8_t * blocks, const uint32_t * inputs, int64_t columns, float * sums);
    void (*eight)(const uint8_t * blocks, const uint32_t * inputs, int64_t columns, float * sums);
    int bytes;  // bytes of a block of 32 weights
    int rows;   // fewest rows of inputs for which these functions are faster than ggml's
} Kind;

static Kind kind(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return (Kind){q4_0_row, q4_0_four, q4_0_eight, 18, 5};
        case GGML_TYPE_Q4_1: return (Kind){q4_1_row, q4_1_four, q4_1_eight, 20, 3};
        case GGML_TYPE_Q5_0: return (Kind){q5_0_row, q5_0_four, q5_0_eight, 22, 4};
        case GGML_TYPE_Q5_1: return (Kind){q5_1_row, q5_1_four, q5_1_eight, 24, 3};
        case GGML_TYPE_Q8_0: return (Kind){q8_0_row, q8_0_four, q8_0_eight, 34, 2};
        default: return (Kind){.rows = NEVER};
    }
}

// ---- products

// Converts `count` rows of inputs to bfloat16, and sets further rows up to `most` to 0.
static void lay(const float * rows, int64_t count, int64_t columns, int64_t most, uint32_t * out) {
    for (int64_t i = 0; i < count * columns; i += 32) {
        const __m512bh both = pairs_of(_mm512_loadu_ps(rows + i), _mm512_loadu_ps(rows + i + 16));
        memcpy(out + i / 2, &both, sizeof(both));
    }
    memset(out + count * columns / 2, 0, (most - count) * columns * 2);
}

// Packs `count` rows of inputs into a strip of STRIP rows, pair of columns by pair of columns. Further rows are 0.
static void pack(const float * rows, int count, int64_t columns, uint32_t * out) {
    for (int r = count; r < STRIP; r++)
        for (int64_t p = 0; p < columns / 2; p++) out[p * STRIP + r] = 0;
    for (int r = 0; r < count; r++) {
        const float * row = rows + r * columns;
        for (int64_t i = 0; i < columns; i += 32) {
            const __m512bh both = pairs_of(_mm512_loadu_ps(row + i), _mm512_loadu_ps(row + i + 16));
            uint32_t pairs[16];
            memcpy(pairs, &both, sizeof(both));
            for (int p = 0; p < 16; p++) out[(i / 2 + p) * STRIP + r] = pairs[p];
        }
    }
}

// Multiplies N strips of inputs with ACROSS rows of weights. Only the products of the first `rows` rows of inputs with
// the first `across` rows of weights are written to `out`, whose rows are `stride` floats apart.
#define TILE(NAME, N)                                                                                                \
    static void NAME(                                                                                                \
        const uint32_t * inputs, int64_t pairs, const uint32_t * weights, float * out, int64_t stride, int64_t rows, \
        int64_t across                                                                                               \
    ) {                                                                                                              \
        __m512 sums[N][ACROSS];                                                                                      \
        for (int s = 0; s < N; s++)                                                                                  \
            for (int j = 0; j < ACROSS; j++) sums[s][j] = _mm512_setzero_ps();                                       \
        for (int64_t p = 0; p < pairs; p++) {                                                                        \
            __m512bh in[N];                                                                                          \
            for (int s = 0; s < N; s++)                                                                              \
                in[s] = (__m512bh)_mm512_load_si512((const void *)(inputs + (s * pairs + p) * STRIP));               \
            UNROLL for (int j = 0; j < ACROSS; j++) {                                                                \
                const __m512bh weight = (__m512bh)_mm512_set1_epi32((int)weights[j * pairs + p]);                    \
                UNROLL for (int s = 0; s < N; s++)                                                                   \
                    sums[s][j] = _mm512_dpbf16_ps(sums[s][j], in[s], weight);                                        \
            }                                                                                                        \
        }                                                                                                            \
        float lanes[ACROSS][STRIP] __attribute__((aligned(64)));                                                     \
        for (int s = 0; s < N; s++) {                                                                                \
            for (int j = 0; j < ACROSS; j++) _mm512_store_ps(lanes[j], sums[s][j]);                                  \
            for (int r = 0; r < STRIP && s * STRIP + r < rows; r++)                                                  \
                for (int64_t j = 0; j < across; j++) out[(s * STRIP + r) * stride + j] = lanes[j][r];                \
        }                                                                                                            \
    }
TILE(one, 1)
TILE(two, 2)
TILE(three, STRIPS)

typedef struct {
    void * data;
    size_t size;
} Buffer;

typedef struct {
    int threads;
    Buffer inputs, weights;
} Work;

typedef struct {
    Kind kind;
    const uint8_t * data;
    size_t row_bytes;
    int64_t columns, height;
} Weights;

static void * grown(Buffer * buffer, size_t size) {
    if (buffer->size < size) {
        free(buffer->data);
        buffer->data = aligned_alloc(64, (size + 63) / 64 * 64);
        buffer->size = buffer->data ? size : 0;
    }
    return buffer->data;
}

static inline int64_t least(int64_t one, int64_t other) { return one < other ? one : other; }

// Multiplies `rows` unpacked rows of inputs with `count` rows of weights from `first` on; out [rows, height].
static void few(const uint32_t * laid, int64_t rows, const Weights * of, int64_t first, int64_t count, float * out) {
    float sums[FEWEST];
    for (int64_t j = first; j < first + count; j++) {
        (rows > 4 ? of->kind.eight : of->kind.four)(of->data + j * of->row_bytes, laid, of->columns, sums);
        for (int64_t r = 0; r < rows; r++) out[r * of->height + j] = sums[r];
    }
}

// Does the same as few() for packed inputs; `decoded` is a buffer for BLOCK rows of weights.
static void many(
    const uint32_t * packed, int64_t rows, const Weights * of, int64_t first, int64_t count, uint32_t * decoded,
    float * out
) {
    const int64_t pairs = of->columns / 2;
    for (int64_t j = 0; j < count; j++)
        of->kind.row(of->data + (first + j) * of->row_bytes, decoded + j * pairs, of->columns);
    for (int64_t r = 0; r < rows; r += STRIPS * STRIP) {
        const int64_t left = rows - r;
        for (int64_t j = 0; j < count; j += ACROSS)
            (left > 2 * STRIP ? three : left > STRIP ? two : one)(
                packed + r * pairs, pairs, decoded + j * pairs, out + r * of->height + first + j, of->height, left,
                least(ACROSS, count - j));
    }
}

// inputs [rows, columns], weights [height, columns] -> out [rows, height]; false if out of memory.
static bool product(Work * work, Weights of, const float * inputs, int64_t rows, float * out) {
    const int64_t strips = (rows + STRIP - 1) / STRIP, blocks = (of.height + BLOCK - 1) / BLOCK, pairs = of.columns / 2;
    const size_t each = BLOCK * pairs * sizeof(uint32_t);
    uint32_t * ready = grown(&work->inputs, strips * STRIP * pairs * sizeof(uint32_t));
    uint8_t * buffers = grown(&work->weights, each * work->threads);
    if (!ready || !buffers) return false;
    if (rows <= FEWEST) lay(inputs, rows, of.columns, FEWEST, ready);
    atomic_long next = 0;  // threads fetch one block at a time, so that a busy core computes fewer
#pragma omp parallel num_threads(work->threads)
    {
        uint32_t * mine = (uint32_t *)(buffers + each * omp_get_thread_num());
        if (rows > FEWEST) {
#pragma omp for schedule(static)
            for (int64_t s = 0; s < strips; s++)
                pack(
                    inputs + s * STRIP * of.columns, least(STRIP, rows - s * STRIP), of.columns,
                    ready + s * STRIP * pairs);
        }
        for (int64_t b; (b = atomic_fetch_add(&next, 1)) < blocks;) {
            const int64_t first = b * BLOCK, count = least(BLOCK, of.height - first);
            if (rows <= FEWEST) few(ready, rows, &of, first, count, out);
            else many(ready, rows, &of, first, count, mine, out);
        }
    }
    return true;
}

// ---- the backend

static struct ggml_functions ggml;
static int64_t row_count(const struct ggml_tensor * tensor) { return tensor->ne[1] * tensor->ne[2] * tensor->ne[3]; }

static _Thread_local int from_rows = NEVER;  // of the pass that this thread computes next

static const char * label(void) { return "BF16"; }
static const char * name(ggml_backend_t backend) { return (void)backend, label(); }
static void end(ggml_backend_t backend) {
    Work * work = backend->context;
    free(work->inputs.data);
    free(work->weights.data);
    free(work);
    free(backend);
}
static enum ggml_status compute(ggml_backend_t backend, struct ggml_cgraph * graph) {
    for (int i = 0; i < graph->n_nodes; i++) {
        const struct ggml_tensor * node = graph->nodes[i], * weights = node->src[0], * inputs = node->src[1];
        if (node->op != GGML_OP_MUL_MAT || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;  // others are views
        const Weights of = {kind(weights->type), weights->data, weights->nb[1], weights->ne[0], weights->ne[1]};
        const bool made = product(backend->context, of, inputs->data, row_count(inputs), node->data);
        if (!made) return GGML_STATUS_ALLOC_FAILED;
    }
    return GGML_STATUS_SUCCESS;
}
static void set_threads(ggml_backend_t backend, int threads) { ((Work *)backend->context)->threads = threads; }

static const char * device_name(ggml_backend_dev_t device) { return (void)device, label(); }
static const char * description(ggml_backend_dev_t device) { return (void)device, "products in bfloat16"; }
static void memory(ggml_backend_dev_t device, size_t * unused, size_t * total) { (void)device, *unused = *total = 0; }
static enum ggml_backend_dev_type type(ggml_backend_dev_t device) {
    return (void)device, GGML_BACKEND_DEVICE_TYPE_ACCEL;
}
static void props(ggml_backend_dev_t device, struct ggml_backend_dev_props * out) {
    *out = (struct ggml_backend_dev_props){.name = label(), .description = description(device), .type = type(device)};
    out->caps.buffer_from_host_ptr = true;
}
static ggml_backend_t init(ggml_backend_dev_t device, const char * params) {
    static uint8_t guid[16] = "llmcli gemm bf16";
    Work * work = calloc(1, sizeof(*work));
    ggml_backend_t backend = calloc(1, sizeof(*backend));
    (void)params;
    if (!work || !backend) return free(work), free(backend), NULL;
    work->threads = 1;
    const struct ggml_backend_i made = {.get_name = name, .free = end, .graph_compute = compute};
    *backend = (struct ggml_backend){.guid = &guid, .iface = made, .device = device, .context = work};
    return backend;
}
static ggml_backend_buffer_type_t buffers(ggml_backend_dev_t device) {
    return (void)device, ggml.cpu_buffer_type();
}
static ggml_backend_buffer_t from_host(ggml_backend_dev_t device, void * at, size_t size, size_t most) {
    (void)device, (void)most;
    return ggml.cpu_buffer_from_ptr(at, size);
}
static bool wanted(const struct ggml_tensor * op, int from) {
    const struct ggml_tensor * weights = op->src[0], * inputs = op->src[1];
    const Kind of = kind(weights->type);
    return of.row && row_count(inputs) >= (from > of.rows ? from : of.rows) && weights->ne[2] * weights->ne[3] == 1
        && inputs->type == GGML_TYPE_F32 && ggml.is_contiguous(weights) && ggml.is_contiguous(inputs)
        && ggml.is_contiguous(op) && op->op_params[1] != GGML_HINT_SRC0_IS_HADAMARD;
}
static bool supports(ggml_backend_dev_t device, const struct ggml_tensor * op) {
    const int from = from_rows;
    (void)device;
    if (from == NEVER) return false;
    switch (op->op) {
        case GGML_OP_MUL_MAT: return wanted(op, from);
        case GGML_OP_NONE: case GGML_OP_RESHAPE: case GGML_OP_VIEW: case GGML_OP_PERMUTE: case GGML_OP_TRANSPOSE:
            return true;
        default: return false;
    }
}
static bool reads(ggml_backend_dev_t device, ggml_backend_buffer_type_t of) {
    return (void)device, ggml.is_host(of);
}

static const char * registry_name(ggml_backend_reg_t registry) { return (void)registry, label(); }
static size_t count(ggml_backend_reg_t registry) { return (void)registry, 1; }
static ggml_backend_dev_t device(ggml_backend_reg_t registry, size_t index) {
    static struct ggml_backend_device only = {.iface = {
        .get_name = device_name, .get_description = description, .get_memory = memory, .get_type = type,
        .get_props = props, .init_backend = init, .get_buffer_type = buffers, .buffer_from_host_ptr = from_host,
        .supports_op = supports, .supports_buft = reads,
    }};
    (void)index;
    only.reg = registry;
    return &only;
}
static void * address(ggml_backend_reg_t registry, const char * of) {
    (void)registry;
    return strcmp(of, "ggml_backend_set_n_threads") ? NULL : (void *)set_threads;
}

// ---- what gemm.py calls

EXPORT ggml_backend_reg_t llmcli_gemm(const struct ggml_functions * functions);
EXPORT const char * llmcli_gemm_ggml_version(void);
EXPORT void llmcli_gemm_from(int rows);
EXPORT int llmcli_gemm_product(
    int type, const void * weights, int64_t height, int64_t columns, const float * inputs, int64_t rows, int threads,
    float * out);

// Returns the registry of the backend, which calls these functions of ggml.
ggml_backend_reg_t llmcli_gemm(const struct ggml_functions * functions) {
    ggml = *functions;
    static struct ggml_backend_reg registry = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {
            .get_name = registry_name, .get_device_count = count, .get_device = device, .get_proc_address = address,
        },
    };
    return &registry;
}

// Returns the version of ggml whose structures this file uses.
const char * llmcli_gemm_ggml_version(void) { return GGML_VERSION; }

// Sets from how many rows of inputs this thread's passes compute products here; ggml computes smaller ones. 0 leaves
// all to ggml.
void llmcli_gemm_from(int rows) { from_rows = rows > 0 ? rows : NEVER; }

// Computes one product; returns 1, or 0 if the type is not supported or memory is out.
int llmcli_gemm_product(
    int type, const void * weights, int64_t height, int64_t columns, const float * inputs, int64_t rows, int threads,
    float * out
) {
    const Kind of_type = kind(type);
    const Weights of = {of_type, weights, columns / 32 * of_type.bytes, columns, height};
    Work work = {.threads = threads};
    const bool made = of.kind.row && product(&work, of, inputs, rows, out);
    free(work.inputs.data);
    free(work.weights.data);
    return made;
}
#endif
