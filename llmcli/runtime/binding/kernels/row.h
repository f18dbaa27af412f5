// The structures and functions of row.c and row_draws.c, also for kernel_results.c. Python has its own copies of the
// structures (row_draws.py, sampler.py), so ROW_INTERFACE is increased with every change of a structure or function.
#pragma once
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define ROW_INTERFACE 2  // as in row_scan.py

struct candidate {  // llama_token_data
    int32_t id;
    float logit, p;
};

struct candidates {  // llama_token_data_array
    struct candidate * data;
    size_t size;
    int64_t selected;
    bool sorted;
};

struct sampler_functions {  // of llama.cpp
    void (*apply)(void * sampler, struct candidates * candidates);
    void (*accept)(void * sampler, int32_t token);
    void (*reset)(void * sampler);
};

// What to draw from one row. Tokens outside the vocabulary have no effect, as in llama.cpp. `samplers`: all of the
// chain, in order. Those from `first` to `rest` change only the listed `tokens`, each by itself. If there are none from
// `rest` on, the likeliest token is chosen.
struct row_draw {
    float * logits;
    void * const * samplers;
    const int32_t * tokens;
    const int32_t * bias_tokens;  // before the sampler `first`, these biases are added
    const float * biases;
    const int32_t * banned;  // tokens that must not be drawn
    int64_t first, rest, sampler_count, token_count, bias_count, banned_count;
    int64_t few;       // number of likeliest tokens that the sampler `rest` keeps; 0: give it all tokens
    int64_t replays;   // whether `tokens` are the text so far, which the samplers before `rest` shall read first
    int64_t wants_sum;
    double sum;     // result: sum of e^(logit - near) over the unchanged row, if wanted
    int64_t token;  // result: the drawn token; -1 if it must be drawn in another way, -2 if the samplers drew none
    float near;
};

// row.c
int64_t llmcli_row_interface(void);
int64_t llmcli_maxima(int64_t count);
double llmcli_look(const float * x, int64_t count, float near, float * largest);
void llmcli_changed(const float * x, int64_t count, float * largest, int64_t at, float before);
int64_t llmcli_likeliest(const float * x, int64_t count, float * largest, int known);
int64_t llmcli_few(const float * x, int64_t count, float * largest, int known, int64_t few, struct candidate * out,
                   int64_t room);
int64_t llmcli_draw(const float * x, int64_t count, float * largest, int known, int64_t few, struct candidate * table,
                    int64_t room, void (*apply)(void * chain, struct candidates * candidates), void * chain);

// row_draws.c
int64_t llmcli_row_draw_size(void);
void llmcli_draw_rows(struct row_draw ** draws, int64_t rows, int64_t count, const struct sampler_functions * functions,
                      int64_t threads, void (*parallel)(void (*)(void *), void *, unsigned, unsigned));
