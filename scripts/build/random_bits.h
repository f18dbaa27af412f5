// Pseudo-random numbers that are the same everywhere, for programs that compare compilers and processors.
#pragma once
#include <stdint.h>

static uint64_t random_state = 1;
static inline void seed(uint64_t number) { random_state = number * 0x9e3779b97f4a7c15u + 1; }
static inline uint32_t next_bits(void) {  // xorshift64*
    random_state ^= random_state >> 12;
    random_state ^= random_state << 25;
    random_state ^= random_state >> 27;
    return (uint32_t)(random_state * 0x2545f4914f6cdd1du >> 32);
}
