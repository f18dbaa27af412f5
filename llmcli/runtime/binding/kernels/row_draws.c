// Draws the next tokens of all sequences of a forward pass, one row of logits each, on several threads.
// llama.cpp's samplers draw. They get the few likeliest tokens, which row.c finds, because they would visit the whole
// vocabulary several times. row_draws.py calls it.
//
// Logit bias, penalties and DRY change single tokens, each by itself, so that they run before the likeliest tokens are
// found: on the tokens that they may change. The new logits are written into the row and taken back after the draw.
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "../../../../quant/native/lanes.h"
#include "row.h"

#define FEW_ROOM 4096      // most candidates among which the few likeliest are chosen
#define MOST_THREADS 256

struct change {
    float * at, before;
};

struct scratch {  // of one thread
    float * largest;     // the strand maxima of the row,
    bool knows_largest;  // if they are up to date
    struct candidate * table;
    int64_t room;  // candidates in `table`
    struct change * changes;
    int64_t change_room;
};

struct pass {
    struct row_draw ** draws;
    int64_t rows, count;
    const struct sampler_functions * functions;
    _Atomic int64_t next;
};

static bool grow_table(struct scratch * own, int64_t room) {
    if (room <= own->room) return true;
    free(own->table);
    own->table = malloc(room * sizeof(*own->table));
    own->room = own->table ? room : 0;
    return own->table;
}

static bool grow_changes(struct scratch * own, int64_t room) {
    if (room <= own->change_room) return true;
    free(own->changes);
    own->changes = malloc(room * sizeof(*own->changes));
    own->change_room = own->changes ? room : 0;
    return own->changes;
}

static bool is_token(const struct pass * pass, int32_t token) { return token >= 0 && token < pass->count; }

// Changes the logit of a token, and the strand maxima if they are known. `changed`: number of changes so far.
static int64_t change(const struct pass * pass, const struct row_draw * draw, struct scratch * own, int64_t changed,
                      int32_t token, float value) {
    float * logit = draw->logits + token;
    const float before = *logit;
    own->changes[changed] = (struct change){logit, before};
    *logit = value;
    if (own->knows_largest) llmcli_changed(draw->logits, pass->count, own->largest, token, before);
    return changed + 1;
}

static int64_t selected_token(const struct candidates * left) {
    return left->selected >= 0 && left->selected < (int64_t)left->size ? left->data[left->selected].id : -2;
}

// Writes the logits after bias, penalties and DRY into the row. Returns the number of changes.
static int64_t change_single_tokens(const struct pass * pass, const struct row_draw * draw, struct scratch * own,
                                    int64_t changed) {
    const float * x = draw->logits;
    for (int64_t i = 0; i < draw->bias_count; ++i) {
        if (!is_token(pass, draw->bias_tokens[i])) continue;
        const int32_t token = draw->bias_tokens[i];
        changed = change(pass, draw, own, changed, token, x[token] + draw->biases[i]);
    }
    if (draw->first == draw->rest) return changed;
    int64_t count = 0;
    for (int64_t i = 0; i < draw->token_count; ++i) {
        if (!is_token(pass, draw->tokens[i])) continue;
        own->table[count++] = (struct candidate){draw->tokens[i], x[draw->tokens[i]], 0};
    }
    struct candidates some = {own->table, count, -1, false};
    for (int64_t s = draw->first; s < draw->rest; ++s) {
        if (draw->replays) {
            pass->functions->reset(draw->samplers[s]);
            for (int64_t i = 0; i < draw->token_count; ++i) pass->functions->accept(draw->samplers[s], draw->tokens[i]);
        }
        pass->functions->apply(draw->samplers[s], &some);
    }
    for (size_t i = 0; i < some.size; ++i) {
        changed = change(pass, draw, own, changed, some.data[i].id, some.data[i].logit);
    }
    return changed;
}

// Draws from all tokens that the samplers from `from` on are given: the few likeliest, or all if `few` is 0.
static int64_t draw_from(const struct pass * pass, const struct row_draw * draw, struct scratch * own, int64_t few,
                         int64_t from) {
    const float * x = draw->logits;
    int64_t found = pass->count;
    if (few) {
        found = llmcli_few(x, pass->count, own->largest, own->knows_largest, few, own->table, own->room);
        if (!found) return -1;
    } else {
        for (int64_t i = 0; i < found; ++i) own->table[i] = (struct candidate){(int32_t)i, x[i], 0};
    }
    struct candidates left = {own->table, found, -1, false};
    for (int64_t s = from; s < draw->sampler_count; ++s) pass->functions->apply(draw->samplers[s], &left);
    return selected_token(&left);
}

static void draw_row(const struct pass * pass, struct row_draw * draw, struct scratch * own) {
    const bool chooses = draw->rest == draw->sampler_count;  // the likeliest
    const bool takes_all = !chooses && !draw->few;
    const int64_t singles = takes_all ? 0 : draw->bias_count + draw->token_count;
    const int64_t changes = draw->banned_count + singles;
    const int64_t least = draw->token_count > FEW_ROOM ? draw->token_count : FEW_ROOM;
    own->knows_largest = false;
    draw->token = -1;
    draw->sum = NAN;
    if (!own->largest) own->largest = malloc(sizeof(float) * llmcli_maxima(pass->count));
    if (!own->largest || !grow_table(own, takes_all ? pass->count : least)) return;
    if (changes && !grow_changes(own, changes)) return;
    if (draw->wants_sum) {
        draw->sum = llmcli_look(draw->logits, pass->count, draw->near, own->largest);
        own->knows_largest = true;
    }
    int64_t changed = 0;
    for (int64_t i = 0; i < draw->banned_count; ++i) {
        if (!is_token(pass, draw->banned[i])) continue;
        changed = change(pass, draw, own, changed, draw->banned[i], -INFINITY);
    }
    if (singles) changed = change_single_tokens(pass, draw, own, changed);
    if (chooses) {
        draw->token = llmcli_likeliest(draw->logits, pass->count, own->largest, own->knows_largest);
    } else {
        draw->token = draw_from(pass, draw, own, draw->few, takes_all ? 0 : draw->rest);
    }
    while (changed--) *own->changes[changed].at = own->changes[changed].before;  // newest first
}

// Draws from rows until none is left. Each thread runs it.
static void draw_some(void * shared) {
    struct pass * pass = shared;
    struct scratch own = {0};
    for (int64_t at; (at = atomic_fetch_add(&pass->next, 1)) < pass->rows;) {
        draw_row(pass, pass->draws[pass->rows - 1 - at], &own);  // the last rows may still be in the cache
    }
    free(own.largest), free(own.table), free(own.changes);
}

static void * draw_some_in_thread(void * shared) { return draw_some(shared), NULL; }

// Runs draw_some on new threads, which end with it: threads that waited would take cores from llama.cpp's.
static void run_on_threads(struct pass * pass, int64_t threads) {
    pthread_t started[MOST_THREADS];
    int64_t count = 0;
    while (count < threads - 1 && count < MOST_THREADS) {
        if (pthread_create(started + count, NULL, draw_some_in_thread, pass)) break;
        ++count;
    }
    draw_some(pass);
    while (count--) pthread_join(started[count], NULL);
}

// The size of the structure that callers fill in.
EXPORT int64_t llmcli_row_draw_size(void) { return sizeof(struct row_draw); }

// Draws from `rows` rows of `count` logits on up to `threads` threads. `parallel`: GOMP_parallel of ggml's OpenMP, whose
// threads wait for work after a pass; NULL: start threads.
EXPORT void llmcli_draw_rows(struct row_draw ** draws, int64_t rows, int64_t count,
                             const struct sampler_functions * functions, int64_t threads,
                             void (*parallel)(void (*)(void *), void *, unsigned, unsigned)) {
    struct pass pass = {.draws = draws, .rows = rows, .count = count, .functions = functions};
    atomic_init(&pass.next, 0);
    if (threads < 2 || rows < 2) {
        draw_some(&pass);
    } else if (parallel) {
        parallel(draw_some, &pass, (unsigned)threads, 0);
    } else {
        run_on_threads(&pass, threads < rows ? threads : rows);
    }
}
