// A thread that computes forward passes with llama_decode, so that the engine's thread can go on meanwhile. It runs no
// Python code: a Python thread would wait for the interpreter's lock before each pass. pass_thread.py calls it.
#include "pass_thread.h"

#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "../../../../quant/native/lanes.h"

enum state { IDLE, COMPUTING, ENDING };

struct pass_thread {
    pthread_t thread;
    pthread_mutex_t lock;
    pthread_cond_t changed;
    enum state state;
    struct pass_functions functions;
    void * context;
    struct batch batch;
    int32_t code;
    double seconds;
};

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + 1e-9 * time.tv_nsec;
}

static void * run(void * argument) {
    struct pass_thread * own = argument;
    pthread_mutex_lock(&own->lock);
    while (own->state != ENDING) {
        if (own->state == IDLE) {
            pthread_cond_wait(&own->changed, &own->lock);
            continue;
        }
        pthread_mutex_unlock(&own->lock);
        const double begun = now();
        const int32_t code = own->functions.decode(own->context, own->batch);
        own->functions.synchronize(own->context);
        const double seconds = now() - begun;
        pthread_mutex_lock(&own->lock);
        own->code = code;
        own->seconds = seconds;
        own->state = IDLE;
        pthread_cond_broadcast(&own->changed);
    }
    pthread_mutex_unlock(&own->lock);
    return NULL;
}

EXPORT int64_t llmcli_pass_batch_size(void) { return sizeof(struct batch); }

// Returns NULL if the system gives no thread.
EXPORT struct pass_thread * llmcli_start_pass_thread(const struct pass_functions * functions, void * context) {
    struct pass_thread * own = calloc(1, sizeof(*own));
    if (!own) return NULL;
    own->functions = *functions;
    own->context = context;
    pthread_mutex_init(&own->lock, NULL);
    pthread_cond_init(&own->changed, NULL);
    if (pthread_create(&own->thread, NULL, run, own)) {
        free(own);
        return NULL;
    }
    return own;
}

// The arrays of the batch must not change before llmcli_end_pass.
EXPORT void llmcli_begin_pass(struct pass_thread * own, const struct batch * batch) {
    pthread_mutex_lock(&own->lock);
    own->batch = *batch;
    own->state = COMPUTING;
    pthread_cond_broadcast(&own->changed);
    pthread_mutex_unlock(&own->lock);
}

// Waits for the end of the pass. Returns the code of llama_decode, and writes the seconds that it took.
EXPORT int32_t llmcli_end_pass(struct pass_thread * own, double * seconds) {
    pthread_mutex_lock(&own->lock);
    while (own->state == COMPUTING) pthread_cond_wait(&own->changed, &own->lock);
    const int32_t code = own->code;
    *seconds = own->seconds;
    pthread_mutex_unlock(&own->lock);
    return code;
}

// Waits for a running pass, and ends the thread.
EXPORT void llmcli_stop_pass_thread(struct pass_thread * own) {
    pthread_mutex_lock(&own->lock);
    while (own->state == COMPUTING) pthread_cond_wait(&own->changed, &own->lock);
    own->state = ENDING;
    pthread_cond_broadcast(&own->changed);
    pthread_mutex_unlock(&own->lock);
    pthread_join(own->thread, NULL);
    pthread_mutex_destroy(&own->lock);
    pthread_cond_destroy(&own->changed);
    free(own);
}
