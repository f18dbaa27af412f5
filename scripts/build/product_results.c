// Multiplies weights of every type that products.c knows with fixed pseudo-random inputs, and prints a line for each
// type and shape: a hash of the results and their sum. check_c_portability.py compares the lines of the kernels for
// different instructions, which must be equal.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "random_bits.h"

int llmcli_products_multiply(
    int type, const void * weights, int64_t height, int64_t row_bytes, int64_t columns, const float * inputs,
    int64_t rows, float * out);
int llmcli_products_interleave(int type, const void * weights, int64_t height, int64_t row_bytes, void * out);

// ggml's number of a type, the columns and bytes of its blocks, and where their float16 scales are; -1: none
struct type {
    const char * name;
    int number, columns, bytes, scale, minimum;
};
static const struct type types[] = {
    {"Q4_0", 2, 32, 18, 0, -1},      {"Q4_1", 3, 32, 20, 0, 2},       {"Q5_0", 6, 32, 22, 0, -1},
    {"Q5_1", 7, 32, 24, 0, 2},       {"Q8_0", 8, 32, 34, 0, -1},      {"IQ4_NL", 20, 32, 18, 0, -1},
    {"MXFP4", 39, 32, 17, -1, -1},   {"Q2_K", 10, 256, 84, 80, 82},   {"Q3_K", 11, 256, 110, 108, -1},
    {"Q4_K", 12, 256, 144, 0, 2},    {"Q5_K", 13, 256, 176, 0, 2},    {"Q6_K", 14, 256, 210, 208, -1},
    {"IQ4_XS", 23, 256, 136, 0, -1},
};
static const int heights[] = {8, 16, 40}, counts[] = {1, 2, 3, 8, 11};
enum { COLUMNS = 768 };

// A float16 from 0.0078 to 0.0156.
static void write_scale(uint8_t * at) {
    const uint16_t bits = (uint16_t)(0x2000 | (next_bits() & 0x3ff));
    memcpy(at, &bits, 2);
}

static void fill(const struct type * of, uint8_t * weights, int64_t size) {
    for (int64_t i = 0; i < size; i++) weights[i] = (uint8_t)next_bits();
    for (uint8_t * block = weights; block < weights + size; block += of->bytes) {
        if (of->scale >= 0) write_scale(block + of->scale);
        if (of->minimum >= 0) write_scale(block + of->minimum);
        if (of->scale < 0) block[0] = (uint8_t)(next_bits() % 16 ? 110 + next_bits() % 20 : next_bits() % 3);
    }
}

static int print_case(const struct type * of, int height, int count) {
    const int64_t row_bytes = COLUMNS / of->columns * of->bytes, size = row_bytes * height;
    uint8_t * weights = malloc(size), * interleaved = malloc(size);
    float * inputs = malloc(sizeof(float) * COLUMNS * count), * out = malloc(sizeof(float) * height * count);
    fill(of, weights, size);
    for (int i = 0; i < COLUMNS * count; i++)
        inputs[i] = i < 40 ? 0.f : ((float)(next_bits() >> 8) - 8388608.f) / 4194304.f;
    const int ok = llmcli_products_interleave(of->number, weights, height, row_bytes, interleaved)
        && llmcli_products_multiply(of->number, interleaved, height, row_bytes, COLUMNS, inputs, count, out);
    uint64_t hash = 0;
    double sum = 0;
    for (int i = 0; i < height * count; i++) {
        uint32_t bits;
        memcpy(&bits, out + i, 4);
        hash = (hash ^ bits) * 0x100000001b3u;
        sum += out[i];
    }
    printf("%s %dx%d %016llx %.9g\n", of->name, height, count, (unsigned long long)hash, sum);
    free(weights), free(interleaved), free(inputs), free(out);
    return ok;
}

int main(void) {
    int ok = 1;
    for (size_t t = 0; t < sizeof types / sizeof *types; t++)
        for (size_t h = 0; h < sizeof heights / sizeof *heights; h++)
            for (size_t c = 0; c < sizeof counts / sizeof *counts; c++)
                ok &= print_case(types + t, heights[h], counts[c]);
    return ok ? 0 : 1;
}
