// Says for which builds of our C files this CPU is good enough. Called by quant/native/kernels.py.
#include "lanes.h"
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>

// Returns whether the CPU has F16C, LZCNT and MOVBE, whose names some compilers do not know.
static int has_f16c_lzcnt_movbe(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 29) || !(c & 1u << 22)) return 0;
    return __get_cpuid(0x80000001, &a, &b, &c, &d) && (c & 1u << 5);
}
// Returns whether the CPU has AVX-VNNI, whose name some compilers do not know.
static int has_avx_vnni(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a & 1u << 4);
}
#endif

// Returns 4 or 3 for a CPU of that level of x86-64, 5 for level 4 with AVX512_BF16, 0 for others. The
// operating system must save the registers, too.
EXPORT int llmcli_cpu_level(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
        !__builtin_cpu_supports("bmi") || !__builtin_cpu_supports("bmi2") || !has_f16c_lzcnt_movbe()) {
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

// Returns the number of the best library of products for this CPU (PRODUCTS in kernels.py), 0 for none.
EXPORT int llmcli_cpu_products(void) {
#if defined(__x86_64__)
    const int level = llmcli_cpu_level();
    if (level >= 4 && __builtin_cpu_supports("avx512vnni")) return 3;
    return level >= 3 ? 1 + has_avx_vnni() : 0;
#elif defined(__aarch64__) && defined(__linux__)
    return (getauxval(AT_HWCAP) & 1u << 20) != 0;  // HWCAP_ASIMDDP
#elif defined(__aarch64__) && defined(__APPLE__)
    return 1;
#else
    return 0;
#endif
}
