// The loops over the columns of a block of GPTQ in C (quant/methods/error_feedback.py): the same
// steps as in Python, for TILE rows of the panel at a time, whose values stay in the cache. Sums
// are added in another order than numpy's, and multiply-adds may be contracted. Called by
// quant/native/feedback_kernels.py.
//
// A panel is transposed: [columns, rows], with the values of a column adjacent. `rows` is a
// multiple of TILE, and a block has at most MAX_COLUMNS columns. Matrices over the columns of a
// block have `stride` floats from one row to the next, because they are parts of larger ones.
#include "lanes.h"

#define TILE 32
#define PARTS (TILE / WIDTH)
#define MAX_COLUMNS 256
#define MAX_GROUP_COLUMNS 32
#define ZERO_GUARD 1e-36f  // as in group_sums.py
// Adding and subtracting this number rounds numbers within 2^22 to integers.
#define ROUNDING 12582912.f

// The layout of a block; _CGridLayout in feedback_kernels.py has the same fields. Levels are from
// `low` to `high`, integer scales from `scale_low` to `scale_high`, integer minimums from 0 to
// `max_min`.
struct grid_layout {
    int32_t columns, group_columns, low, high, scale_low, scale_high, max_min;
};

typedef float Tile[MAX_COLUMNS][TILE];

static inline W load_width(const float * x) {
    W out;
    memcpy(&out, x, sizeof(out));
    return out;
}
static inline void store_width(float * x, W value) { memcpy(x, &value, sizeof(value)); }
static inline W spread(float value) { return value - (W){0}; }
// Returns x rounded to an integer from `low` to `high`, which are integers.
static inline W round_within(W x, float low, float high) {
    const W clipped = min_part(max_part(x, spread(low)), spread(high));
    return (clipped + ROUNDING) - ROUNDING;
}
static inline W invert_width(W x) { return x / (x * x + ZERO_GUARD); }
// Returns x / y, but 0 where y is 0.
static inline W divide_or_zero(W x, W y) {
    const __typeof__(y == y) is_zero = y == 0;
    return (W)(~is_zero & (__typeof__(is_zero))(x / y));
}

// Adds the products of `factors` with the columns `first` .. `last` of a tile to `sums`. Two sums
// for each part keep both multipliers of a core busy.
__attribute__((always_inline)) static inline void add_products(W sums[PARTS], const float * factors,
                                                               const Tile tile, int first,
                                                               int last) {
    W even[PARTS], odd[PARTS];
    int k = first;
    for (int p = 0; p < PARTS; ++p) even[p] = odd[p] = spread(0);
    for (; k + 1 < last; k += 2) {
        const W one = spread(factors[k]), two = spread(factors[k + 1]);
        for (int p = 0; p < PARTS; ++p) {
            even[p] += one * load_width(tile[k] + p * WIDTH);
            odd[p] += two * load_width(tile[k + 1] + p * WIDTH);
        }
    }
    if (k < last) {
        const W one = spread(factors[k]);
        for (int p = 0; p < PARTS; ++p) even[p] += one * load_width(tile[k] + p * WIDTH);
    }
    for (int p = 0; p < PARTS; ++p) sums[p] += even[p] + odd[p];
}

static inline void load_column(W values[PARTS], const float * column) {
    for (int p = 0; p < PARTS; ++p) values[p] = load_width(column + p * WIDTH);
}
static inline void store_column(float * column, const W values[PARTS]) {
    for (int p = 0; p < PARTS; ++p) store_width(column + p * WIDTH, values[p]);
}

// _round_block: rounds the columns of a block one after another. `target` are the block's weights
// plus the errors of earlier blocks. Writes `levels` and the errors of `weights`. `minimum` is NULL
// if groups have none; `step` and `minimum` are [groups, rows].
EXPORT void llmcli_round_block(const struct grid_layout * s, const float * weights,
                               const float * target, const float * feed, int64_t stride,
                               const float * step, const float * minimum, float * levels,
                               float * errors, int64_t rows) {
    for (int64_t row = 0; row < rows; row += TILE) {
        Tile tile;  // the errors
        for (int j = 0; j < s->columns; ++j) {
            const int64_t at = j * rows + row, group = j / s->group_columns * rows + row;
            W exact[PARTS];
            load_column(exact, target + at);
            add_products(exact, feed + j * stride, tile, 0, j);
            for (int p = 0; p < PARTS; ++p) {
                const int first = p * WIDTH;
                const W scale = load_width(step + group + first);
                const W offset = minimum ? load_width(minimum + group + first) : spread(0);
                const W level =
                    round_within((exact[p] - offset) * invert_width(scale), s->low, s->high);
                const W error = load_width(weights + at + first) - (level * scale + offset);
                store_width(levels + at + first, level);
                store_width(errors + at + first, error);
                store_width(tile[j] + first, error);
            }
        }
    }
}

// Adds the products of `moments` with the negated moves in `tile` to the gradient of a tile's rows.
// The columns of a group already have those with the columns before it.
static inline void finish_gradient(const struct grid_layout * s, float * gradient,
                                   const float * moments, int64_t stride, const Tile tile,
                                   int group_columns, int64_t rows) {
    for (int j = 0; j < s->columns; ++j) {
        W sums[PARTS];
        load_column(sums, gradient + j * rows);
        add_products(sums, moments + j * stride, tile, j / group_columns * group_columns,
                     s->columns);
        store_column(gradient + j * rows, sums);
    }
}

// _move_codes: moves each code of a block to the level with the lowest error. `gradient` is half of
// the derivative of the total error; it is updated.
EXPORT void llmcli_move_codes(const struct grid_layout * s, float * codes, float * gradient,
                              const float * moments, int64_t stride, const float * step,
                              int64_t rows) {
    for (int64_t row = 0; row < rows; row += TILE) {
        Tile tile;  // the negated moves
        for (int j = 0; j < s->columns; ++j) {
            const int64_t at = j * rows + row, group = j / s->group_columns * rows + row;
            const float curvature = moments[j * stride + j];
            W sums[PARTS];
            load_column(sums, gradient + at);
            add_products(sums, moments + j * stride, tile, 0, j);
            store_column(gradient + at, sums);
            for (int p = 0; p < PARTS; ++p) {
                const int first = p * WIDTH;
                const W scale = load_width(step + group + first);
                const W code = load_width(codes + at + first);
                const W best = code + sums[p] * invert_width(scale) / curvature;
                const W moved = round_within(best, s->low, s->high);
                store_width(codes + at + first, moved);
                store_width(tile[j] + first, (code - moved) * scale);
            }
        }
        finish_gradient(s, gradient + row, moments, stride, tile, 1, rows);
    }
}

// _refit_groups: moves each group's integer scale and minimum, one group after another, to the best
// integer. `d` and `m` are [rows]; `scales` and `mins` [groups, rows] and `gradient` are updated.
// `m` and `mins` are NULL if groups have no minimum.
EXPORT void llmcli_refit_groups(const struct grid_layout * s, const float * codes,
                                float * gradient, const float * moments, int64_t stride,
                                const float * d, const float * m, float * scales, float * mins,
                                int64_t rows) {
    const int width = s->group_columns;
    for (int64_t row = 0; row < rows; row += TILE) {
        Tile levels, tile;  // the codes, and the negated moves
        for (int j = 0; j < s->columns; ++j) {
            memcpy(levels[j], codes + j * rows + row, sizeof(levels[j]));
        }
        for (int first = 0, group = 0; first < s->columns; first += width, ++group) {
            const int64_t at = group * rows + row;
            float sums[MAX_GROUP_COLUMNS], total = 0;  // sums of the rows of the group's moments
            W curvature[PARTS], slope[PARTS], remaining[PARTS], change[PARTS], lift[PARTS];
            for (int p = 0; p < PARTS; ++p) curvature[p] = slope[p] = remaining[p] = spread(0);
            for (int i = 0; i < width; ++i) {
                const float * line = moments + (first + i) * stride;
                float * column = gradient + (first + i) * rows + row;
                W products[PARTS], slopes[PARTS];
                sums[i] = 0;
                for (int k = first; k < first + width; ++k) sums[i] += line[k];
                total += sums[i];
                load_column(slopes, column);
                add_products(slopes, line, tile, 0, first);
                store_column(column, slopes);
                for (int p = 0; p < PARTS; ++p) products[p] = spread(0);
                add_products(products, line, levels, first, first + width);
                for (int p = 0; p < PARTS; ++p) {
                    const W code = load_width(levels[first + i] + p * WIDTH);
                    curvature[p] += code * products[p];
                    slope[p] += code * slopes[p];
                    remaining[p] += slopes[p];
                }
            }
            for (int p = 0; p < PARTS; ++p) {
                const int lane = p * WIDTH;
                const W unit = load_width(d + row + lane), old = load_width(scales + at + lane);
                const W best = old + divide_or_zero(slope[p], curvature[p] * unit);
                const W moved = round_within(best, s->scale_low, s->scale_high);
                store_width(scales + at + lane, moved);
                change[p] = (moved - old) * unit;
                lift[p] = spread(0);
            }
            if (mins) {
                for (int i = 0; i < width; ++i) {
                    for (int p = 0; p < PARTS; ++p) {
                        const W code = load_width(levels[first + i] + p * WIDTH);
                        remaining[p] -= sums[i] * (code * change[p]);
                    }
                }
                for (int p = 0; p < PARTS; ++p) {
                    const int lane = p * WIDTH;
                    const W unit = load_width(m + row + lane), old = load_width(mins + at + lane);
                    const W best = old - divide_or_zero(remaining[p], unit * total);
                    const W moved = round_within(best, 0, s->max_min);
                    store_width(mins + at + lane, moved);
                    lift[p] = (moved - old) * unit;
                }
            }
            for (int i = 0; i < width; ++i) {
                for (int p = 0; p < PARTS; ++p) {
                    const W code = load_width(levels[first + i] + p * WIDTH);
                    store_width(tile[first + i] + p * WIDTH, lift[p] - code * change[p]);
                }
            }
        }
        finish_gradient(s, gradient + row, moments, stride, tile, width, rows);
    }
}
