// Says for which build of our C files this CPU is good enough. Called by quant/native/kernels.py.
#include "lanes.h"

// Returns 4 or 3 for a CPU of that level of x86-64, 5 for level 4 with AVX512_BF16, 0 for others. The
// operating system must save the registers, too.
EXPORT int llmcli_cpu_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2")) {
        return 0;
    }
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vl")) {
        return 3;
    }
    return __builtin_cpu_supports("avx512bf16") ? 5 : 4;
#else
    return 0;
#endif
}
