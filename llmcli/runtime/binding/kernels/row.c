// One pass over a row of logits: the sum of its exponentials, for log-probabilities, and the maximum of each strand,
// which narrows the search for the likeliest tokens. After a forward pass the row is not in the nearest caches, so a
// second pass would fetch it again. row_scan.py calls it.
// Infinities and NaN are handled, so it must not be compiled with -ffast-math.
//
// A piece is PIECE consecutive vectors, and a strand is one lane of a piece: PIECE logits that are LANES apart. Its
// maximum is computed in a register. To find the likeliest tokens, only the pieces with the largest maxima are read
// again, and each is in few cache lines. The maxima of strands say how large these must be: likely tokens are often in
// the same piece, but seldom in the same strand. The numpy version (sampling/top_logprobs.py) uses the columns of a
// table instead.
#include "row.h"

#include "../../../../quant/native/lanes.h"
#include "exponential.h"

#define PIECE 16      // vectors
#define AHEAD 1024    // prefetch distance in logits
#define MOST_FEW 256  // as in sampler.py
#define HALVINGS 12   // most steps of the search for a number that enough pieces reach

typedef double D __attribute__((vector_size(8 * LANES)));

static inline F least_of_all(void) { return splat(-__builtin_inff()); }

// Vector `at` of a row of `count` logits, padded with -infinity.
static inline F part(const float * x, int64_t count, int64_t at) {
    if ((at + 1) * LANES <= count) return load(x + at * LANES);
    F out = least_of_all();
    memcpy(&out, x + at * LANES, 4 * (count - at * LANES));
    return out;
}

// Writes the maxima of the strands in `vectors` vectors from vector `first` on to `most`. If `sums`, also adds their
// e^(x - near) to `total`.
__attribute__((always_inline)) static inline void piece(const float * x, int64_t count, int64_t first, int vectors,
                                                        float near, const int sums, D * total, F * most) {
    F even = {0}, odd = {0}, top = least_of_all();
    for (int i = 0; i + 2 <= vectors; i += 2) {
        const F a = part(x, count, first + i), b = part(x, count, first + i + 1);
        __builtin_prefetch(x + (first + i) * LANES + AHEAD);  // harmless past the end
        if (LANES == 16) __builtin_prefetch(x + (first + i + 1) * LANES + AHEAD);
        top = max_lanes(b, max_lanes(a, top));  // in this order NaN changes nothing
        if (sums) {
            even += exponential(a - near);
            odd += exponential(b - near);
        }
    }
    if (vectors % 2) {
        const F a = part(x, count, first + vectors - 1);
        top = max_lanes(a, top);
        if (sums) even += exponential(a - near);
    }
    *most = top;
    if (sums) *total += __builtin_convertvector(even, D) + __builtin_convertvector(odd, D);
}

// All maxima of a row are in one array: first those of the strands, then those of the pieces, padded with -infinity.
static inline int64_t pieces(int64_t count) { return (count + PIECE * LANES - 1) / (PIECE * LANES); }
static inline int64_t padded_pieces(int64_t count) { return (pieces(count) + LANES - 1) / LANES * LANES; }
static inline float * piece_maxima(float * largest, int64_t count) { return largest + pieces(count) * LANES; }

static inline float largest_lane(F values) {
#if defined(__AVX512F__) && LANES == 16
    return _mm512_reduce_max_ps((__m512)values);
#else
    float most = values[0];
    for (int lane = 1; lane < LANES; ++lane) most = values[lane] > most ? values[lane] : most;
    return most;
#endif
}

// Scans a row of `count` logits. Returns the sum of e^(x - near), or 0 unless `sums`. If `largest` is given, the
// maxima are written to it.
__attribute__((always_inline)) static inline double look(const float * x, int64_t count, float near, const int sums,
                                                         float * largest) {
    D total = {0};
    const int64_t vectors = (count + LANES - 1) / LANES, whole = count / (PIECE * LANES);
    float * of_pieces = largest ? piece_maxima(largest, count) : NULL;
    F most;
    for (int64_t at = 0; at < whole; ++at) {
        piece(x, INT64_MAX, at * PIECE, PIECE, near, sums, &total, &most);
        if (largest) store(largest + at * LANES, most), of_pieces[at] = largest_lane(most);
    }
    if (vectors > whole * PIECE) {
        piece(x, count, whole * PIECE, vectors - whole * PIECE, near, sums, &total, &most);
        if (largest) store(largest + whole * LANES, most), of_pieces[whole] = largest_lane(most);
    }
    for (int64_t at = pieces(count); largest && at < padded_pieces(count); ++at) of_pieces[at] = -__builtin_inff();
    double sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += total[lane];
    return sum;
}

// The version of row.h.
EXPORT int64_t llmcli_row_interface(void) { return ROW_INTERFACE; }

// Number of maxima of `count` logits.
EXPORT int64_t llmcli_maxima(int64_t count) { return pieces(count) * LANES + padded_pieces(count); }

// The sum of e^(x - near) over `count` logits; NaN if one of them is NaN. If `largest` is given, the maxima are
// written to it, ignoring NaN.
EXPORT double llmcli_look(const float * x, int64_t count, float near, float * largest) {
    return largest ? look(x, count, near, 1, largest) : look(x, count, near, 1, NULL);
}

// The maxima without the sum.
static void find_maxima(const float * x, int64_t count, float * largest) { look(x, count, 0, 0, largest); }

// Corrects the maxima after the logit with the index `at`, which was `before`, has changed.
EXPORT void llmcli_changed(const float * x, int64_t count, float * largest, int64_t at, float before) {
    const int64_t piece = at / (PIECE * LANES), lane = at % LANES;
    float * most = largest + piece * LANES + lane;
    const float strand_before = *most;
    if (x[at] >= *most) {
        *most = x[at];
    } else if (before == *most) {
        *most = -__builtin_inff();
        for (int64_t i = piece * PIECE * LANES + lane; i < count && i < (piece + 1) * PIECE * LANES; i += LANES) {
            if (x[i] > *most) *most = x[i];
        }
    }
    float * of_piece = piece_maxima(largest, count) + piece;
    if (*most >= *of_piece || strand_before == *of_piece) *of_piece = largest_lane(load(largest + piece * LANES));
}

// The index of the first largest logit; -1 if all are -infinity. `largest` holds the maxima if `known`; otherwise they
// are written to it.
EXPORT int64_t llmcli_likeliest(const float * x, int64_t count, float * largest, int known) {
    if (!known) find_maxima(x, count, largest);
    const float * of_pieces = piece_maxima(largest, count);
    F top = least_of_all();
    for (int64_t i = 0; i < pieces(count); i += LANES) top = max_lanes(load(of_pieces + i), top);
    const float most = largest_lane(top);
    if (!(most > -__builtin_inff())) return -1;
    int64_t piece = 0;
    while (of_pieces[piece] != most) ++piece;
    for (int64_t at = piece * PIECE * LANES; at < count; ++at) {
        if (x[at] == most) return at;
    }
    return -1;
}

// Moves heap[at] down to its position in the min-heap.
static void sink(float * heap, int64_t size, int64_t at) {
    const float value = heap[at];
    for (int64_t child; (child = 2 * at + 1) < size; at = child) {
        if (child + 1 < size && heap[child + 1] < heap[child]) ++child;
        if (!(heap[child] < value)) break;
        heap[at] = heap[child];
    }
    heap[at] = value;
}

// How many of `size` numbers reach `least`. `size`: a multiple of LANES.
static int64_t count_from(const float * values, int64_t size, float least) {
    I found = {0};
    for (int64_t i = 0; i < size; i += LANES) found -= load(values + i) >= least;
    int64_t sum = 0;
    for (int lane = 0; lane < LANES; ++lane) sum += found[lane];
    return sum;
}

// A number that at least `few` pieces reach, and not many more if it is found in HALVINGS steps; -infinity if fewer
// have a finite maximum.
static float reached_by(const float * of_pieces, int64_t size, int64_t few) {
    F top = least_of_all(), bottom = splat(__builtin_inff());
    for (int64_t i = 0; i < size; i += LANES) {
        const F values = load(of_pieces + i);
        top = max_lanes(values, top);
        bottom = select_lanes(values > -__builtin_inff(), min_lanes(values, bottom), bottom);
    }
    float low = -largest_lane(-bottom), high = largest_lane(top);
    if (count_from(of_pieces, size, low) < few) return -__builtin_inff();
    for (int i = 0; i < HALVINGS; ++i) {
        const float middle = low + (high - low) / 2;
        const int64_t found = count_from(of_pieces, size, middle);
        if (found >= few) low = middle;
        if (found < few) high = middle;
        if (found >= few && found <= few + few / 4) break;
    }
    return low;
}

// The `few`-th largest strand maximum; -infinity if fewer strands have a finite one.
static float floor_of(const float * largest, const float * of_pieces, int64_t size, int64_t few) {
    const float least = reached_by(of_pieces, size, few);
    float heap[MOST_FEW];
    for (int64_t i = 0; i < few; ++i) heap[i] = -__builtin_inff();
    for (int64_t piece = 0; piece < size; ++piece) {
        if (!(of_pieces[piece] >= least && of_pieces[piece] > heap[0])) continue;
        for (const float *at = largest + piece * LANES, *end = at + LANES; at < end; ++at) {
            if (!(*at >= least && *at > heap[0])) continue;
            heap[0] = *at;
            sink(heap, few, 0);
        }
    }
    return heap[0];
}

// Writes all logits of a row that reach the `few`-th largest strand maximum, which include the `few` likeliest, in the
// order of their ids. Returns their number; 0 if `out` is too small or fewer strands have a finite maximum.
EXPORT int64_t llmcli_few(const float * x, int64_t count, float * largest, int known, int64_t few,
                          struct candidate * out, int64_t room) {
    if (few < 1 || few > MOST_FEW) return 0;
    if (!known) find_maxima(x, count, largest);
    const float * of_pieces = piece_maxima(largest, count);
    const float least = floor_of(largest, of_pieces, padded_pieces(count), few);
    if (!(least > -__builtin_inff())) return 0;
    int64_t found = 0;
    for (int64_t piece = 0; piece < pieces(count); ++piece) {
        if (!(of_pieces[piece] >= least)) continue;
        const int64_t vectors = (count + LANES - 1) / LANES, last = piece * PIECE + PIECE;
        for (int64_t at = piece * PIECE; at < last && at < vectors; ++at) {
            const F values = part(x, count, at);
            if (!any_lane(values >= least)) continue;
            for (int lane = 0; lane < LANES; ++lane) {
                if (!(values[lane] >= least)) continue;
                if (found == room) return 0;
                out[found++] = (struct candidate){(int32_t)(at * LANES + lane), values[lane], 0};
            }
        }
    }
    return found;
}

// Applies the samplers `chain` to these candidates by `apply` (llama_sampler_apply). Returns the id of the chosen
// token; -1 if there are no candidates, -2 if the samplers chose none.
EXPORT int64_t llmcli_draw(const float * x, int64_t count, float * largest, int known, int64_t few,
                           struct candidate * table, int64_t room,
                           void (*apply)(void * chain, struct candidates * candidates), void * chain) {
    const int64_t found = llmcli_few(x, count, largest, known, few, table, room);
    if (!found) return -1;
    struct candidates left = {table, found, -1, false};
    apply(chain, &left);
    return left.selected >= 0 && left.selected < (int64_t)left.size ? left.data[left.selected].id : -2;
}
