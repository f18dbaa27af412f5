// The structures and functions of pass_thread.c, also for kernel_results.c.
#pragma once
#include <stdint.h>

struct batch {  // llama_batch
    int32_t n_tokens;
    void *token, *embd, *pos, *n_seq_id, *seq_id, *logits;
};

// Of llama.cpp. On a GPU llama_decode returns before the pass has ended, and llama_synchronize waits for its end.
struct pass_functions {
    int32_t (*decode)(void * context, struct batch batch);
    void (*synchronize)(void * context);
};

struct pass_thread;

int64_t llmcli_pass_batch_size(void);
struct pass_thread * llmcli_start_pass_thread(const struct pass_functions * functions, void * context);
void llmcli_begin_pass(struct pass_thread * own, const struct batch * batch);
int32_t llmcli_end_pass(struct pass_thread * own, double * seconds);
void llmcli_stop_pass_thread(struct pass_thread * own);
