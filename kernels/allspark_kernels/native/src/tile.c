#include "tile.h"

#include "pool.h"

#if defined(__AVX512F__)
#include <cpuid.h>
#endif

/* Vectors of a panel row that are summed at once. */
#if defined(__AVX512F__)
enum { TILE_VECS = 2 };
#else
enum { TILE_VECS = 1 };
#endif

typedef vf accumulators[TILE_ROWS][TILE_VECS];

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

/* acc + x.odd * w.odd, then + x.even * w.even, each fused and rounded to fp32: VDPBF16PS as the CPUs at hand
 * compute it, which has_dot() checks. */
INLINE vf dot_broadcast(const uint32_t *x, vf w, vf acc) {
#if defined(__AVX512F__)
    __asm__("vdpbf16ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
#else
    (void)x;
    return acc + w; /* never called: has_dot() is 0 */
#endif
}

/* acc[r] += x[r * x_step] * w, for the vectors of this half of the panel */
INLINE void accumulate(const int R, const float *x, int64_t x_step, int half, const vf w[2], accumulators acc) {
    UNROLL for (int r = 0; r < R; r++)
        UNROLL for (int v = 0; v < TILE_VECS; v++)
            acc[r][v] = fma_broadcast(x + r * x_step, w[half + v], acc[r][v]);
}

INLINE void weight_step(const int R, const enum products how, const struct tile *t, int64_t step, int half,
                        accumulators acc) {
    const char *row = (const char *)t->panel + step * (how == F16 ? 2 : 4) * PANEL;
    if (how == F32 || how == F16) {
        const int dtype = how == F32 ? DT_F32 : DT_F16;
        vf w[2] = {vload_as(row, 0, dtype), vload_as(row, LANES, dtype)};
        accumulate(R, (const float *)t->x + step * R, 1, half, w, acc);
        return;
    }
    vu pairs[2] = {vloadu(row), vloadu(row + sizeof(vu))};
    if (how == BF16_DOT) {
        const uint32_t *x = (const uint32_t *)t->x + step * R;
        UNROLL for (int r = 0; r < R; r++)
            UNROLL for (int v = 0; v < TILE_VECS; v++)
                acc[r][v] = dot_broadcast(x + r, as_vf(pairs[half + v]), acc[r][v]);
        return;
    }
    const float *x = (const float *)t->x + step * 2 * R;
    vf even[2] = {as_vf(pairs[0] << 16), as_vf(pairs[1] << 16)};
    vf odd[2] = {as_vf(pairs[0] & 0xffff0000u), as_vf(pairs[1] & 0xffff0000u)};
    accumulate(R, x, 1, half, how == BF16 ? even : odd, acc);
    accumulate(R, x + R, 1, half, how == BF16 ? odd : even, acc);
}

INLINE void accumulate_weight(const int R, const enum products how, const struct tile *t, int half,
                              accumulators acc) {
    const char *line = t->ahead;
    for (int64_t step = 0; step < t->depth; step++, line += t->ahead_step) {
        weight_step(R, how, t, step, half, acc);
        __builtin_prefetch(line);
        if (how != F16) __builtin_prefetch(line + 64);
    }
}

/* keys: x is [depth][rows]; values: x is [rows][PANEL] */
INLINE void accumulate_cache(const int R, int is_value, const int dtype, const struct tile *t, int half,
                             accumulators acc) {
    const float *x = t->x;
    int64_t row_bytes = is_value ? t->row_bytes : PANEL * (int64_t)sizeof(float);
    for (int64_t k = 0; k < t->depth; k++) {
        const char *row = (const char *)t->panel + k * row_bytes;
        vf w[2] = {vload_as(row, 0, dtype), vload_as(row, LANES, dtype)};
        accumulate(R, is_value ? x + k : x + k * R, is_value ? PANEL : 1, half, w, acc);
    }
}

/* The kinds of tile, see tile.h. */
enum kind { WEIGHT, KEY, VALUE };

INLINE void tile_run(const int R, const enum kind kind, const int type, const struct tile *t) {
    for (int half = 0; half < PANEL / LANES; half += TILE_VECS) {
        accumulators acc;
        const float *from = t->start ? t->start : t->out;
        int64_t stride = t->start ? 0 : t->ldo;
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < TILE_VECS; v++)
            acc[r][v] = vload(from + r * stride + (half + v) * LANES);
        if (kind == WEIGHT) accumulate_weight(R, (enum products)type, t, half, acc);
        else accumulate_cache(R, kind == VALUE, type, t, half, acc);
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < TILE_VECS; v++)
            vstore(t->out + r * t->ldo + (half + v) * LANES, acc[r][v]);
    }
}

#define TILE(R)                                                                          \
    static void w_f32_##R(const struct tile *t) { tile_run(R, WEIGHT, F32, t); }         \
    static void w_bf16_##R(const struct tile *t) { tile_run(R, WEIGHT, BF16, t); }       \
    static void w_f16_##R(const struct tile *t) { tile_run(R, WEIGHT, F16, t); }         \
    static void w_pairs_##R(const struct tile *t) { tile_run(R, WEIGHT, BF16_PAIRS, t); } \
    static void w_dot_##R(const struct tile *t) { tile_run(R, WEIGHT, BF16_DOT, t); }    \
    static void k_##R(const struct tile *t) { tile_run(R, KEY, DT_F32, t); }             \
    static void v_f32_##R(const struct tile *t) { tile_run(R, VALUE, DT_F32, t); }       \
    static void v_bf16_##R(const struct tile *t) { tile_run(R, VALUE, DT_BF16, t); }     \
    static void v_f16_##R(const struct tile *t) { tile_run(R, VALUE, DT_F16, t); }
#define WEIGHT_NAMES(R) {w_f32_##R, w_bf16_##R, w_f16_##R, w_pairs_##R, w_dot_##R},
#define KEY_NAME(R) k_##R,
#define VALUE_NAMES(R) {v_f32_##R, v_bf16_##R, v_f16_##R},

#if defined(__AVX512F__)
#define EACH_TILE(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define EACH_TILE(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif

EACH_TILE(TILE)
const tile_fn weight_tiles[TILE_ROWS + 1][PRODUCTS] = {{0}, EACH_TILE(WEIGHT_NAMES)};
const tile_fn key_tiles[TILE_ROWS + 1] = {0, EACH_TILE(KEY_NAME)};
const tile_fn value_tiles[TILE_ROWS + 1][3] = {{0}, EACH_TILE(VALUE_NAMES)};

#if defined(__AVX512F__)
static int cpu_has_bf16(void) {
    unsigned eax, ebx, ecx, edx;
    return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax >> 5 & 1);
}

/* Random pairs of all magnitudes through both tiles; denormals are flushed, as in every use of them. */
static int dot_agrees(void) {
    enum { STEPS = 64, TRIALS = 16 };
    uint32_t panel[STEPS][PANEL], words[STEPS], seed = 1;
    float pairs[STEPS][2], dot[PANEL], reference[PANEL];
    const float zero[PANEL] = {0};
    for (int trial = 0; trial < TRIALS; trial++) {
        for (int i = 0; i < STEPS * (PANEL + 1); i++) {
            seed = seed * 1664525u + 1013904223u;
            uint32_t exponents = 0x20002000u + (uint32_t)trial * 0x02000200u; /* sums neither NaN nor infinite */
            uint32_t word = (seed & 0x9fff9fffu) + exponents;
            if (i < STEPS * PANEL) panel[i / PANEL][i % PANEL] = word;
            else words[i - STEPS * PANEL] = word;
        }
        for (int i = 0; i < STEPS; i++) {
            pairs[i][0] = bf16_to_f32((uint16_t)(words[i] >> 16));
            pairs[i][1] = bf16_to_f32((uint16_t)words[i]);
        }
        struct tile t = {.x = words, .panel = panel, .start = zero, .out = dot, .ldo = PANEL, .depth = STEPS};
        t.ahead = (const char *)panel;
        w_dot_1(&t);
        t.x = pairs;
        t.out = reference;
        w_pairs_1(&t);
        if (memcmp(dot, reference, sizeof dot)) return 0;
    }
    return 1;
}

int has_dot(void) {
    static _Atomic int known; /* 0: not yet, 1: no, 2: yes; two threads may find out at once */
    if (!known) {
        uint64_t saved = denormals_off();
        known = cpu_has_bf16() && dot_agrees() ? 2 : 1;
        denormals_restore(saved);
    }
    return known == 2;
}
#else
int has_dot(void) { return 0; }
#endif
