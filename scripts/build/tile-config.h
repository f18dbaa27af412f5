// GCC's _tile_loadconfig is declared to read eight bytes (bug 114098, fixed in 12.4, 13.3 and 14). What ggml writes to
// the other 56 is therefore optimized away, and the first AMX instruction is illegal. This macro reads all 64 bytes.
#ifdef __AMX_TILE__
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif

// amx.py looks for this symbol: a library without it, from such a compiler, must not use AMX.
#ifdef __cplusplus
extern "C" {
#endif
__attribute__((weak, visibility("default"))) char llmcli_tile_config;
#ifdef __cplusplus
}
#endif
