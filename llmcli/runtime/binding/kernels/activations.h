// Rows of inputs that are rounded to 8 bits, as ggml rounds them for its own products: groups of 32 inputs share a
// scale in float16 for the legacy types (quantize_row_q8_0), groups of 256 share one in float32 for k-quants
// (quantize_row_q8_K_ref).
#pragma once
#include <stdint.h>

enum rounding { ROUND_32, ROUND_256 };

// A rounded row, in activation_bytes() bytes of memory.
struct activations {
    int8_t * values;   // [columns]
    float * scales;    // of each group
    float * sums;      // ROUND_32: scale * sum of the values of each group
    int16_t * sums16;  // ROUND_256: sums of each 16 values
    int16_t * sums32;  // sums of each 32 values
};

// Returns a multiple of 64.
static inline int64_t activation_bytes(enum rounding rounding, int64_t columns) {
    const int64_t bytes = columns + (rounding == ROUND_32 ? columns / 32 * 10 : columns / 256 * 4 + columns / 32 * 6);
    return (bytes + 63) / 64 * 64;
}

static inline struct activations activations_at(enum rounding rounding, uint8_t * memory, int64_t columns) {
    struct activations row = {.values = (int8_t *)memory, .scales = (float *)(memory + columns)};
    if (rounding == ROUND_32) {
        row.sums = row.scales + columns / 32;
        row.sums32 = (int16_t *)(row.sums + columns / 32);
    } else {
        row.sums16 = (int16_t *)(row.scales + columns / 256);
        row.sums32 = row.sums16 + columns / 16;
    }
    return row;
}
