#include "tile.h"

/* Vectors of a panel row that are summed at once. */
#if defined(__AVX512F__)
enum { TILE_VECS = 2 };
#else
enum { TILE_VECS = 1 };
#endif

typedef vf accumulators[TILE_ROWS][TILE_VECS];

/* The kinds of tile, see tile.h. */
enum kind { WEIGHT, KEY, VALUE };

INLINE void load_panel_row(const enum kind kind, const int dtype, const struct tile *t, int64_t k, vf w[2]) {
    if (kind != VALUE) {
        load_row(t->panel, k, dtype, w);
        return;
    }
    const char *row = (const char *)t->panel + k * t->row_bytes;
    w[0] = vload_as(row, 0, dtype);
    w[1] = vload_as(row, LANES, dtype);
}

/* acc + x * w for one x. With AVX-512 the broadcast is part of the instruction: compilers load it apart to
 * use it twice, which costs half as many slots again, and slots are what hyper-threads compete for. */
INLINE vf fma_broadcast(const float *x, vf w, vf acc) {
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
#else
    return vfma(vset(*x), w, acc);
#endif
}

INLINE void accumulate(const int R, const enum kind kind, const int dtype, const struct tile *t, int half,
                       accumulators acc) {
    const int k_step = kind == VALUE ? 1 : R, row_step = kind == VALUE ? PANEL : 1;
    const float *x = t->x;
    const char *line = t->ahead;
    for (int64_t k = 0; k < t->depth; k++, x += k_step) {
        vf w[2];
        load_panel_row(kind, dtype, t, k, w);
        if (kind == WEIGHT) {
            __builtin_prefetch(line);
            if (dtype == DT_F32) __builtin_prefetch(line + 64);
            line += t->ahead_step;
        }
        if (TILE_VECS == 1 && half) w[0] = w[1];
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < TILE_VECS; v++) acc[r][v] = fma_broadcast(x + r * row_step, w[v], acc[r][v]);
    }
}

INLINE void tile_run(const int R, const enum kind kind, const int dtype, const struct tile *t) {
    for (int half = 0; half < PANEL / LANES; half += TILE_VECS) {
        accumulators acc;
        const float *from = t->start ? t->start : t->out;
        int64_t stride = t->start ? 0 : t->ldo;
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < TILE_VECS; v++)
            acc[r][v] = vload(from + r * stride + (half + v) * LANES);
        accumulate(R, kind, dtype, t, half, acc);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < TILE_VECS; v++)
            vstore(t->out + r * t->ldo + (half + v) * LANES, acc[r][v]);
    }
}

#define TILE(R)                                                                          \
    static void w_f32_##R(const struct tile *t) { tile_run(R, WEIGHT, DT_F32, t); }      \
    static void w_bf16_##R(const struct tile *t) { tile_run(R, WEIGHT, DT_BF16, t); }    \
    static void w_f16_##R(const struct tile *t) { tile_run(R, WEIGHT, DT_F16, t); }      \
    static void k_##R(const struct tile *t) { tile_run(R, KEY, DT_F32, t); }             \
    static void v_f32_##R(const struct tile *t) { tile_run(R, VALUE, DT_F32, t); }       \
    static void v_bf16_##R(const struct tile *t) { tile_run(R, VALUE, DT_BF16, t); }     \
    static void v_f16_##R(const struct tile *t) { tile_run(R, VALUE, DT_F16, t); }
#define WEIGHT_NAMES(R) {w_f32_##R, w_bf16_##R, w_f16_##R},
#define KEY_NAME(R) k_##R,
#define VALUE_NAMES(R) {v_f32_##R, v_bf16_##R, v_f16_##R},

#if defined(__AVX512F__)
#define EACH_TILE(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define EACH_TILE(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

EACH_TILE(TILE)
const tile_fn weight_tiles[TILE_ROWS + 1][3] = {{0}, EACH_TILE(WEIGHT_NAMES)};
const tile_fn key_tiles[TILE_ROWS + 1] = {0, EACH_TILE(KEY_NAME)};
const tile_fn value_tiles[TILE_ROWS + 1][3] = {{0}, EACH_TILE(VALUE_NAMES)};
