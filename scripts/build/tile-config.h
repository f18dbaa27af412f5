// GCC's own _tile_loadconfig says that it reads eight bytes (bug 114098, mended in 12.4, 13.3 and 14), so that what
// ggml sets in the other 56 is optimized away and the first AMX instruction is illegal. All 64 are read.
#ifdef __AMX_TILE__
#include <immintrin.h>
#define _tile_loadconfig(config) __asm__ volatile("ldtilecfg %0" : : "m"(*(const char(*)[64])(config)))
#endif
