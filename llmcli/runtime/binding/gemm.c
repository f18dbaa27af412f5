// Products of several rows with quantized weights, in bfloat16: a backend of ggml's kind (ggml-backend-impl.h), to
// which its scheduler gives such products as it gives them to BLAS. scripts/llama.cmake builds it into libggml-cpu;
// llmcli/runtime/binding/gemm.py registers it and says from how many rows on it is asked.
//
// ggml multiplies the old types (Q4_0 ... Q8_0) one row with another, which does for one row and is dear for many.
// Here a thread decodes BLOCK rows of weights to bfloat16 once, and all rows of inputs pass by. Both keep eight bits;
// ggml's inputs keep as many of the largest of their 32. k-quants stay ggml's: it has tiles of integers for them.
//
// AVX512_BF16 adds up pairs of products, each vector element its own. So inputs lie in strips: for each pair of columns
// LANES rows side by side. A row's sum has the same order whatever its neighbours and however many threads there are.
#define EXPORT __attribute__((visibility("default")))

#if defined(__AVX512BF16__) && defined(__F16C__) && defined(_OPENMP)
#include <immintrin.h>
#include <omp.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#define STRIP 16   // rows of inputs in a whole vector
#define STRIPS 3   // of a tile: with ACROSS, 24 of 32 registers are sums
#define ACROSS 8   // rows of weights of a tile
#define FEW 16     // the same where one strip is all there is
#define BLOCK 32   // rows of weights that a thread decodes at a time: they stay in its cache
#define NEVER (1 << 30)

typedef void (*Decoder)(const uint8_t * blocks, uint16_t * out, int64_t columns);

// ---- from blocks to bfloat16; layouts are those of ggml-common.h

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
static inline void put(uint16_t * out, __m512 first, __m512 second) {
    const __m512bh both = _mm512_cvtne2ps_pbh(second, first);
    memcpy(out, &both, sizeof(both));
}

static void q4_0(const uint8_t * at, uint16_t * out, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 32, at += 18, out += 32) {
        const __m512 d = half(at);
        const __m512i two = nibbles(at + 2);
        put(out, d * floats(low(two), 8), d * floats(high(two), 8));
    }
}
static void q4_1(const uint8_t * at, uint16_t * out, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 32, at += 20, out += 32) {
        const __m512 d = half(at), m = half(at + 2);
        const __m512i two = nibbles(at + 4);
        put(out, d * floats(low(two), 0) + m, d * floats(high(two), 0) + m);
    }
}
static void q5_0(const uint8_t * at, uint16_t * out, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 32, at += 22, out += 32) {
        const __m512 d = half(at);
        uint32_t fifth;
        memcpy(&fifth, at + 2, 4);
        const __m512i two = nibbles(at + 6);
        put(out, d * floats(with_fifth(low(two), fifth), 16), d * floats(with_fifth(high(two), fifth >> 16), 16));
    }
}
static void q5_1(const uint8_t * at, uint16_t * out, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 32, at += 24, out += 32) {
        const __m512 d = half(at), m = half(at + 2);
        uint32_t fifth;
        memcpy(&fifth, at + 4, 4);
        const __m512i two = nibbles(at + 8);
        put(out, d * floats(with_fifth(low(two), fifth), 0) + m, d * floats(with_fifth(high(two), fifth >> 16), 0) + m);
    }
}
static void q8_0(const uint8_t * at, uint16_t * out, int64_t columns) {
    for (int64_t i = 0; i < columns; i += 32, at += 34, out += 32) {
        const __m512 d = half(at);
        const __m128i first = _mm_loadu_si128((const __m128i *)(at + 2));
        const __m128i second = _mm_loadu_si128((const __m128i *)(at + 18));
        put(out, d * floats(_mm512_cvtepi8_epi32(first), 0), d * floats(_mm512_cvtepi8_epi32(second), 0));
    }
}

typedef struct {
    Decoder decode;
    int rows;  // from so many on it is quicker than ggml; both on two cores of an EPYC (Zen 4), 2026-11-23
} Kind;

static Kind kind(enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_0: return (Kind){q4_0, 8};
        case GGML_TYPE_Q4_1: return (Kind){q4_1, 4};
        case GGML_TYPE_Q5_0: return (Kind){q5_0, 8};
        case GGML_TYPE_Q5_1: return (Kind){q5_1, 4};
        case GGML_TYPE_Q8_0: return (Kind){q8_0, 8};
        default: return (Kind){NULL, NEVER};
    }
}

// ---- products

// A strip of inputs: of each pair of columns `lanes` rows, those beyond `count` are 0.
static inline __attribute__((always_inline)) void pack(
    const float * rows, int count, int64_t columns, const int lanes, uint32_t * out
) {
    uint32_t pairs[16];
    for (int r = count; r < lanes; r++)
        for (int64_t p = 0; p < columns / 2; p++) out[p * lanes + r] = 0;
    for (int r = 0; r < count; r++) {
        const float * row = rows + r * columns;
        for (int64_t i = 0; i < columns; i += 32) {
            put((uint16_t *)pairs, _mm512_loadu_ps(row + i), _mm512_loadu_ps(row + i + 16));
            for (int p = 0; p < 16; p++) out[(i / 2 + p) * lanes + r] = pairs[p];
        }
    }
}

// Sums of N strips of inputs with as many rows of weights: `rows` and `across` of them are wanted.
#define TILE(NAME, LANES, N, WIDE, SUMS, PAIRS, ZERO, LOAD, ALL, ADD, STORE)                                         \
    static void NAME(                                                                                                \
        const uint32_t * inputs, int64_t pairs, const uint32_t * weights, float * out, int64_t stride, int64_t rows, \
        int64_t across                                                                                               \
    ) {                                                                                                              \
        SUMS sums[N][WIDE];                                                                                          \
        for (int s = 0; s < N; s++)                                                                                  \
            for (int j = 0; j < WIDE; j++) sums[s][j] = ZERO();                                                      \
        for (int64_t p = 0; p < pairs; p++) {                                                                        \
            PAIRS in[N];                                                                                             \
            for (int s = 0; s < N; s++) in[s] = (PAIRS)LOAD((const void *)(inputs + (s * pairs + p) * LANES));       \
            _Pragma("GCC unroll 16") for (int j = 0; j < WIDE; j++) {                                                \
                const PAIRS weight = (PAIRS)ALL((int)weights[j * pairs + p]);                                        \
                _Pragma("GCC unroll 3") for (int s = 0; s < N; s++) sums[s][j] = ADD(sums[s][j], in[s], weight);     \
            }                                                                                                        \
        }                                                                                                            \
        float lanes[WIDE][LANES] __attribute__((aligned(64)));                                                       \
        for (int s = 0; s < N; s++) {                                                                                \
            for (int j = 0; j < WIDE; j++) STORE(lanes[j], sums[s][j]);                                              \
            for (int r = 0; r < LANES && s * LANES + r < rows; r++)                                                  \
                for (int64_t j = 0; j < across; j++) out[(s * LANES + r) * stride + j] = lanes[j][r];                \
        }                                                                                                            \
    }
#define WHOLE(NAME, N)                                                                                    \
    TILE(NAME, STRIP, N, ACROSS, __m512, __m512bh, _mm512_setzero_ps, _mm512_load_si512, _mm512_set1_epi32, \
         _mm512_dpbf16_ps, _mm512_store_ps)
WHOLE(three, STRIPS)
WHOLE(two, 2)
WHOLE(one, 1)
TILE(eight, 8, 1, FEW, __m256, __m256bh, _mm256_setzero_ps, _mm256_load_si256, _mm256_set1_epi32, _mm256_dpbf16_ps,
     _mm256_store_ps)
TILE(four, 4, 1, FEW, __m128, __m128bh, _mm_setzero_ps, _mm_load_si128, _mm_set1_epi32, _mm_dpbf16_ps, _mm_store_ps)

typedef struct {
    void * data;
    size_t size;
} Buffer;

typedef struct {
    int threads;
    Buffer inputs, weights;
} Work;

typedef struct {
    Decoder decode;
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

// Sums for all inputs with the `count` decoded rows of weights whose first stands at `out`.
static void block(
    const uint32_t * packed, int64_t rows, int lanes, const uint32_t * decoded, int64_t count, const Weights * of,
    float * out
) {
    const int64_t pairs = of->columns / 2;
    if (lanes < STRIP) {
        for (int64_t j = 0; j < count; j += FEW)
            (lanes == 8 ? eight : four)(
                packed, pairs, decoded + j * pairs, out + j, of->height, rows, least(FEW, count - j));
        return;
    }
    for (int64_t r = 0; r < rows; r += STRIPS * STRIP) {
        const int64_t left = rows - r;
        for (int64_t j = 0; j < count; j += ACROSS)
            (left > 2 * STRIP ? three : left > STRIP ? two : one)(
                packed + r * pairs, pairs, decoded + j * pairs, out + r * of->height + j, of->height, left,
                least(ACROSS, count - j));
    }
}

// inputs [rows, columns], weights [height, columns] -> out [rows, height]; false where there is no memory.
static bool product(Work * work, Weights of, const float * inputs, int64_t rows, float * out) {
    const int lanes = rows <= 4 ? 4 : rows <= 8 ? 8 : STRIP;
    const int64_t strips = (rows + lanes - 1) / lanes, blocks = (of.height + BLOCK - 1) / BLOCK, pairs = of.columns / 2;
    const size_t each = BLOCK * pairs * sizeof(uint32_t);
    uint32_t * packed = grown(&work->inputs, strips * lanes * pairs * sizeof(uint32_t));
    uint8_t * buffers = grown(&work->weights, each * work->threads);
    if (!packed || !buffers) return false;
    atomic_long next = 0;  // a core that others want, too, takes fewer blocks
#pragma omp parallel num_threads(work->threads)
    {
        uint16_t * mine = (uint16_t *)(buffers + each * omp_get_thread_num());
#pragma omp for schedule(static)
        for (int64_t s = 0; s < strips; s++) {
            const float * first = inputs + s * lanes * of.columns;
            uint32_t * strip = packed + s * lanes * pairs;
            const int count = least(lanes, rows - s * lanes);
            if (lanes == STRIP) pack(first, count, of.columns, STRIP, strip);
            else if (lanes == 8) pack(first, count, of.columns, 8, strip);
            else pack(first, count, of.columns, 4, strip);
        }
        for (int64_t b; (b = atomic_fetch_add(&next, 1)) < blocks;) {
            const int64_t first = b * BLOCK, count = least(BLOCK, of.height - first);
            for (int64_t j = 0; j < count; j++)
                of.decode(of.data + (first + j) * of.row_bytes, mine + j * of.columns, of.columns);
            block(packed, rows, lanes, (const uint32_t *)mine, count, &of, out + first);
        }
    }
    return true;
}

// ---- the backend

static atomic_int from_rows = NEVER;

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
        if (node->op != GGML_OP_MUL_MAT || !(node->flags & GGML_TENSOR_FLAG_COMPUTE)) continue;  // the others are views
        const Weights of = {kind(weights->type).decode, weights->data, weights->nb[1], weights->ne[0], weights->ne[1]};
        const bool made = product(backend->context, of, inputs->data, ggml_nrows(inputs), node->data);
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
    return (void)device, ggml_backend_cpu_buffer_type();
}
static ggml_backend_buffer_t from_host(ggml_backend_dev_t device, void * at, size_t size, size_t most) {
    (void)device, (void)most;
    return ggml_backend_cpu_buffer_from_ptr(at, size);
}
static bool wanted(const struct ggml_tensor * op, int from) {
    const struct ggml_tensor * weights = op->src[0], * inputs = op->src[1];
    const Kind of = kind(weights->type);
    return of.decode && ggml_nrows(inputs) >= (from > of.rows ? from : of.rows) && weights->ne[2] * weights->ne[3] == 1
        && inputs->type == GGML_TYPE_F32 && ggml_is_contiguous(weights) && ggml_is_contiguous(inputs)
        && ggml_is_contiguous(op) && ggml_get_op_params_i32(op, 1) != GGML_HINT_SRC0_IS_HADAMARD;
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
    return (void)device, ggml_backend_buft_is_host(of);
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

EXPORT ggml_backend_reg_t llmcli_gemm(void);
EXPORT void llmcli_gemm_from(int rows);
EXPORT int llmcli_gemm_product(
    int type, const void * weights, int64_t height, int64_t columns, const float * inputs, int64_t rows, int threads,
    float * out);

ggml_backend_reg_t llmcli_gemm(void) {
    static struct ggml_backend_reg registry = {
        .api_version = GGML_BACKEND_API_VERSION,
        .iface = {
            .get_name = registry_name, .get_device_count = count, .get_device = device, .get_proc_address = address,
        },
    };
    return &registry;
}

// Products of fewer rows stay ggml's; 0: all do.
void llmcli_gemm_from(int rows) { from_rows = rows > 0 ? rows : NEVER; }

// One product by itself: 1, or 0 where there is none of this type.
int llmcli_gemm_product(
    int type, const void * weights, int64_t height, int64_t columns, const float * inputs, int64_t rows, int threads,
    float * out
) {
    const Weights of = {kind(type).decode, weights, ggml_row_size(type, columns), columns, height};
    Work work = {.threads = threads};
    const bool made = of.decode && product(&work, of, inputs, rows, out);
    free(work.inputs.data);
    free(work.weights.data);
    return made;
}
#endif
