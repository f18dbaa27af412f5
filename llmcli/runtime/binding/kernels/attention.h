// Attention of tokens over the cells of a KV cache (attention.c), computed on ggml's threads in the place of ggml's flash
// attention.
#pragma once
#include "ggml_backend.h"

// Returns whether `compute_attention` computes this operation.
bool is_own_attention(const struct ggml_tensor * op);
// Returns how many bytes of memory it needs.
size_t attention_work_size(int threads, const struct ggml_tensor * op);
void compute_attention(
    const struct cpu_functions * ggml, const struct compute_params * params, const struct ggml_tensor * op);
