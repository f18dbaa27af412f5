// Rounds rows of inputs (activations.h) with what a header for an instruction set defines: `find_largest`, `round_32`
// and `round_to_half`.
#pragma once
#include <stdint.h>

#include "activations.h"

static void round_row_32(const float * from, int64_t columns, uint8_t * memory) {
    const struct activations row = activations_at(ROUND_32, memory, columns);
    for (int64_t b = 0; b < columns / 32; b++, from += 32) {
        const float largest = find_largest(from, 32), d = round_to_half(largest / 127.f);
        int16_t sums[2];
        round_32(from, largest != 0.f ? 127.f / largest : 0.f, row.values + 32 * b, sums);
        row.scales[b] = d;
        row.sums[b] = d * (float)(sums[0] + sums[1]);
        row.sums32[b] = (int16_t)(sums[0] + sums[1]);
    }
}
static void round_row_256(const float * from, int64_t columns, uint8_t * memory) {
    const struct activations row = activations_at(ROUND_256, memory, columns);
    for (int64_t b = 0; b < columns / 256; b++, from += 256) {
        const float largest = find_largest(from, 256), factor = largest != 0.f ? 127.f / largest : 0.f;
        for (int i = 0; i < 8; i++) {
            int16_t * sums = row.sums16 + 16 * b + 2 * i;
            round_32(from + 32 * i, factor, row.values + 256 * b + 32 * i, sums);
            row.sums32[8 * b + i] = (int16_t)(sums[0] + sums[1]);
        }
        row.scales[b] = largest != 0.f ? 1.f / factor : 0.f;
    }
}
