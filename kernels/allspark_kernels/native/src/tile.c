#include "tile.h"

enum { AHEAD = 4096 /* prefetch distance in bytes: measured best for streams from memory */ };

typedef vf accumulators[TILE_ROWS][TILE_VECS];

/* x element of row r at depth k: x[k * k_step + r * row_step] */
INLINE void accumulate(const int R, const int dtype, const int row_step, const int k_step, const int ahead,
                       const struct tile *t, int half, accumulators acc) {
    const float *x = t->x;
    for (int64_t k = 0; k < t->depth; k++, x += k_step) {
        vf w[2];
        load_row(t->panel, k, dtype, w);
        if (ahead) {
            const char *line = (const char *)t->panel + k * PANEL * dtype_bytes(dtype) + AHEAD;
            __builtin_prefetch(line);
            if (dtype == DT_F32) __builtin_prefetch(line + 64);
        }
        if (TILE_VECS == 1 && half) w[0] = w[1];
        UNROLL for (int r = 0; r < R; r++) {
            vf a = vset(x[r * row_step]);
            UNROLL for (int v = 0; v < TILE_VECS; v++) acc[r][v] = vfma(a, w[v], acc[r][v]);
        }
    }
}

INLINE void tile_run(const int R, const int dtype, const int row_step, const int k_step, const int ahead,
                     const struct tile *t) {
    for (int half = 0; half < PANEL / LANES; half += TILE_VECS) {
        accumulators acc;
        const float *from = t->start ? t->start : t->out;
        int64_t stride = t->start ? 0 : t->ldo;
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < TILE_VECS; v++)
            acc[r][v] = vload(from + r * stride + (half + v) * LANES);
        accumulate(R, dtype, row_step, k_step, ahead, t, half, acc);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < TILE_VECS; v++)
            vstore(t->out + r * t->ldo + (half + v) * LANES, acc[r][v]);
    }
}

#define TILE(R)                                                                                  \
    static void f32_##R(const struct tile *t) { tile_run(R, DT_F32, 1, R, 1, t); }               \
    static void bf16_##R(const struct tile *t) { tile_run(R, DT_BF16, 1, R, 1, t); }             \
    static void f16_##R(const struct tile *t) { tile_run(R, DT_F16, 1, R, 1, t); }               \
    static void cached_##R(const struct tile *t) { tile_run(R, DT_F32, 1, R, 0, t); }            \
    static void score_##R(const struct tile *t) { tile_run(R, DT_F32, PANEL, 1, 0, t); }
#define WEIGHT(R) {f32_##R, bf16_##R, f16_##R},
#define CACHED(R) cached_##R,
#define SCORE(R) score_##R,

#define EACH_SMALL(X) X(1) X(2) X(3) X(4) X(5) X(6)
#if defined(__AVX512F__)
#define EACH_TILE(X) EACH_SMALL(X) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define EACH_TILE(X) EACH_SMALL(X)
#endif

EACH_TILE(TILE)
const tile_fn weight_tiles[TILE_ROWS + 1][3] = {{0}, EACH_TILE(WEIGHT)};
const tile_fn cached_tiles[TILE_ROWS + 1] = {0, EACH_TILE(CACHED)};
const tile_fn score_tiles[TILE_ROWS + 1] = {0, EACH_TILE(SCORE)};
