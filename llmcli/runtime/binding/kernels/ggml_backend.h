// What a ggml backend shares with ggml 0.25.3 (MIT license): its structures and numbers, from ggml.h,
// ggml-backend.h, ggml-backend-impl.h and ggml-impl.h. They are copied because llama-cpp-python does
// not install the last two. gemm.py uses the backend with this version only. Functions of ggml are
// passed in by their addresses, so that this library is built without ggml.
// scripts/build/check_c_portability.py compares this file with a source tree of ggml.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define GGML_VERSION "0.25.3"
#define GGML_BACKEND_API_VERSION 2

enum ggml_type {
    GGML_TYPE_F32 = 0,
    GGML_TYPE_F16 = 1,
    GGML_TYPE_Q4_0 = 2,
    GGML_TYPE_Q4_1 = 3,
    GGML_TYPE_Q5_0 = 6,
    GGML_TYPE_Q5_1 = 7,
    GGML_TYPE_Q8_0 = 8,
    GGML_TYPE_Q2_K = 10,
    GGML_TYPE_Q3_K = 11,
    GGML_TYPE_Q4_K = 12,
    GGML_TYPE_Q5_K = 13,
    GGML_TYPE_Q6_K = 14,
    GGML_TYPE_IQ4_NL = 20,
    GGML_TYPE_IQ4_XS = 23,
    GGML_TYPE_MXFP4 = 39,
};
enum ggml_op {
    GGML_OP_NONE = 0,
    GGML_OP_MUL_MAT = 29,
    GGML_OP_MUL_MAT_ID = 30,
    GGML_OP_RESHAPE = 36,
    GGML_OP_VIEW = 37,
    GGML_OP_PERMUTE = 38,
    GGML_OP_TRANSPOSE = 39,
    GGML_OP_FLASH_ATTN_EXT = 74,
};
enum { GGML_TENSOR_FLAG_COMPUTE = 16 };
enum { GGML_HINT_SRC0_IS_HADAMARD = 1 };
enum ggml_status { GGML_STATUS_ALLOC_FAILED = -2, GGML_STATUS_SUCCESS = 0 };
enum ggml_backend_dev_type { GGML_BACKEND_DEVICE_TYPE_ACCEL = 3 };

typedef struct ggml_backend_buffer_type * ggml_backend_buffer_type_t;
typedef struct ggml_backend_buffer * ggml_backend_buffer_t;
typedef struct ggml_backend * ggml_backend_t;
typedef struct ggml_backend_device * ggml_backend_dev_t;
typedef struct ggml_backend_reg * ggml_backend_reg_t;
typedef void (*unused_function)(void);  // ggml does not call it

struct ggml_tensor {
    enum ggml_type type;
    struct ggml_backend_buffer * buffer;
    int64_t ne[4];
    size_t nb[4];
    enum ggml_op op;
    int32_t op_params[16];
    int32_t flags;
    struct ggml_tensor * src[10];
    struct ggml_tensor * view_src;
    size_t view_offs;
    void * data;
    char name[64];
    void * extra;
    char padding[8];
};

struct ggml_cgraph {  // the beginning
    int size, n_nodes, n_leafs;
    struct ggml_tensor ** nodes;
};

struct ggml_backend_i {
    const char * (*get_name)(ggml_backend_t backend);
    void (*free)(ggml_backend_t backend);
    unused_function set_tensor_async, get_tensor_async, set_tensor_2d_async, get_tensor_2d_async, cpy_tensor_async;
    unused_function synchronize, graph_plan_create, graph_plan_free, graph_plan_update, graph_plan_compute;
    enum ggml_status (*graph_compute)(ggml_backend_t backend, struct ggml_cgraph * graph);
    unused_function event_record, event_wait, graph_optimize;
};

struct ggml_backend {
    uint8_t (*guid)[16];
    struct ggml_backend_i iface;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_dev_caps {
    bool async, host_buffer, buffer_from_host_ptr, events, mmap_support;
};

struct ggml_backend_dev_props {
    const char *name, *description;
    size_t memory_free, memory_total;
    enum ggml_backend_dev_type type;
    const char * device_id;
    struct ggml_backend_dev_caps caps;
};

struct ggml_backend_device_i {
    const char * (*get_name)(ggml_backend_dev_t device);
    const char * (*get_description)(ggml_backend_dev_t device);
    void (*get_memory)(ggml_backend_dev_t device, size_t * free, size_t * total);
    enum ggml_backend_dev_type (*get_type)(ggml_backend_dev_t device);
    void (*get_props)(ggml_backend_dev_t device, struct ggml_backend_dev_props * props);
    ggml_backend_t (*init_backend)(ggml_backend_dev_t device, const char * params);
    ggml_backend_buffer_type_t (*get_buffer_type)(ggml_backend_dev_t device);
    unused_function get_host_buffer_type;
    ggml_backend_buffer_t (*buffer_from_host_ptr)(ggml_backend_dev_t device, void * at, size_t size, size_t most);
    bool (*supports_op)(ggml_backend_dev_t device, const struct ggml_tensor * op);
    bool (*supports_buft)(ggml_backend_dev_t device, ggml_backend_buffer_type_t type);
    unused_function offload_op, event_new, event_free, event_synchronize;
};

struct ggml_backend_device {
    struct ggml_backend_device_i iface;
    ggml_backend_reg_t reg;
    void * context;
};

struct ggml_backend_reg_i {
    const char * (*get_name)(ggml_backend_reg_t registry);
    size_t (*get_device_count)(ggml_backend_reg_t registry);
    ggml_backend_dev_t (*get_device)(ggml_backend_reg_t registry, size_t index);
    void * (*get_proc_address)(ggml_backend_reg_t registry, const char * name);
};

struct ggml_backend_reg {
    int api_version;
    struct ggml_backend_reg_i iface;
    void * context;
};

// Functions of ggml that the backend calls. gemm.py fills them in, in this order.
struct ggml_functions {
    bool (*is_contiguous)(const struct ggml_tensor * tensor);
    bool (*is_host)(ggml_backend_buffer_type_t type);
    ggml_backend_buffer_type_t (*cpu_buffer_type)(void);
    ggml_backend_buffer_t (*cpu_buffer_from_ptr)(void * at, size_t size);
};

// ---- ggml-cpu: traits.h and ggml-cpu-impl.h

struct ggml_threadpool;
struct compute_params {
    int ith, nth;
    size_t wsize;
    void * wdata;
    struct ggml_threadpool * threadpool;
    bool use_ref;
};

struct tensor_traits;
struct tensor_traits_functions {
    void (*destructors[2])(void * self);
    bool (*work_size)(struct tensor_traits * self, int threads, const struct ggml_tensor * op, size_t * size);
    bool (*compute_forward)(struct tensor_traits * self, struct compute_params * params, struct ggml_tensor * op);
};
struct tensor_traits {
    const struct tensor_traits_functions * functions;
};

struct extra_buffer_type;
struct extra_buffer_type_functions {
    void (*destructors[2])(void * self);
    bool (*supports_op)(struct extra_buffer_type * self, ggml_backend_dev_t device, const struct ggml_tensor * op);
    struct tensor_traits * (*get_tensor_traits)(struct extra_buffer_type * self, const struct ggml_tensor * op);
};
struct extra_buffer_type {
    const struct extra_buffer_type_functions * functions;
};

struct ggml_backend_buffer_type {
    unused_function get_name;
    ggml_backend_buffer_t (*alloc_buffer)(ggml_backend_buffer_type_t type, size_t size);
    unused_function get_alignment, get_max_size, get_alloc_size, is_host;
    ggml_backend_dev_t device;
    void * context;
};

struct ggml_backend_buffer {
    unused_function free_buffer;
    void * (*get_base)(ggml_backend_buffer_t buffer);
    enum ggml_status (*init_tensor)(ggml_backend_buffer_t buffer, struct ggml_tensor * tensor);
    unused_function memset_tensor;
    void (*set_tensor)(
        ggml_backend_buffer_t buffer, struct ggml_tensor * tensor, const void * data, size_t offset, size_t size);
    unused_function get_tensor, set_tensor_2d, get_tensor_2d, cpy_tensor, clear, reset;
    ggml_backend_buffer_type_t type;
    void * context;
    size_t size;
    int usage;
};

// Functions of ggml and ggml-cpu that products inside of the CPU backend call.
struct cpu_functions {
    bool (*is_host)(ggml_backend_buffer_type_t type);
    ggml_backend_buffer_type_t (*cpu_buffer_type)(void);
    void (*barrier)(struct ggml_threadpool * threads);
    void (*chunk_set)(struct ggml_threadpool * threads, int value);
    int (*chunk_add)(struct ggml_threadpool * threads, int value);
};
