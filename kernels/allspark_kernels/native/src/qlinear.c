/* Linear layers whose weights stay quantised in memory: panels of 32 columns, widened where they are multiplied.
 *
 * w = scale * code + offset is computed in fp32 as a product and a sum, and out is one chain of fused multiply-adds
 * over k that starts at the bias: bit for bit what ask_linear gives for the same weights in fp32. */
#include "linear.h"
#include "ops.h"
#include "pool.h"

/* 8-bit codes are int8. 4-bit codes lie as pairs of columns c and c + 16 in one byte; without offsets they stand
 * for the code less 8. */
enum kind { Q8, Q8_OFFSET, Q4, Q4_OFFSET, KINDS };

/* Mirrored in the binding. scales and offsets: [panels][groups][PANEL] of scale_dtype. */
struct qlinear {
    int64_t n, k, kind, group, scale_dtype;
    const char *codes; /* [panels][k][row_bytes] */
    const char *scales, *offsets;
    const float *bias; /* [panels * PANEL] or NULL */
};

enum { MAX_TILES = 8 /* row tiles of one work item */, AHEAD = 2048, PARALLEL_PACK = 65536 };

#if defined(__AVX512F__)
enum { VECS = 2 };
#else
enum { VECS = 1 };
#endif

typedef int8_t vb __attribute__((ext_vector_type(16)));
typedef uint8_t vub __attribute__((ext_vector_type(16)));

INLINE int64_t row_bytes(const int kind) { return kind >= Q4 ? PANEL / 2 : PANEL; }

/* One panel for one row tile. */
struct qtile {
    const struct qlinear *w;
    const char *codes, *scales, *offsets;
    const float *x; /* [k][R] */
    const float *start;
    float *out;
    int64_t ldo;
};

/* Columns [16 * half, ...) of a row of codes as floats. */
INLINE vf widen(const int kind, const char *row, int half) {
    if (kind == Q8 || kind == Q8_OFFSET) {
        vb b;
        memcpy(&b, row + half * LANES, sizeof b);
        return __builtin_convertvector(b, vf);
    }
    vub b;
    memcpy(&b, row, sizeof b);
    vi code = __builtin_convertvector(half ? b >> 4 : b & 15, vi);
    if (kind == Q4) code -= 8;
    return __builtin_convertvector(code, vf);
}

INLINE vf fma_broadcast(const float *x, vf w, vf acc) {
#if defined(__AVX512F__)
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(w), "m"(*x));
    return acc;
#else
    return vfma(vset(*x), w, acc);
#endif
}

INLINE void run_tile(const int R, const int kind, const struct qtile *t) {
    const struct qlinear *q = t->w;
    for (int first = 0; first < PANEL / LANES; first += VECS) {
        vf acc[TILE_ROWS][VECS];
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECS; v++)
            acc[r][v] = vload(t->start + (first + v) * LANES);
        const float *x = t->x;
        const char *row = t->codes;
        for (int64_t k = 0, g = 0; k < q->k; g++) {
            vf scale[VECS], offset[VECS];
            UNROLL for (int v = 0; v < VECS; v++) {
                int64_t at = g * PANEL + (first + v) * LANES;
                scale[v] = vload_as(t->scales, at, (int)q->scale_dtype);
                if (kind == Q8_OFFSET || kind == Q4_OFFSET) offset[v] = vload_as(t->offsets, at, (int)q->scale_dtype);
            }
            int64_t end = k + q->group < q->k ? k + q->group : q->k;
            for (; k < end; k++, x += R, row += row_bytes(kind)) {
                __builtin_prefetch(row + AHEAD);
                UNROLL for (int v = 0; v < VECS; v++) {
                    vf w = widen(kind, row, first + v) * scale[v];
                    if (kind == Q8_OFFSET || kind == Q4_OFFSET) w = w + offset[v];
                    UNROLL for (int r = 0; r < R; r++) acc[r][v] = fma_broadcast(x + r, w, acc[r][v]);
                }
            }
        }
        UNROLL for (int r = 0; r < R; r++) UNROLL for (int v = 0; v < VECS; v++)
            vstore(t->out + r * t->ldo + (first + v) * LANES, acc[r][v]);
    }
}

typedef void (*qtile_fn)(const struct qtile *);
#define TILE(R)                                                                      \
    static void q8_##R(const struct qtile *t) { run_tile(R, Q8, t); }                \
    static void q8_offset_##R(const struct qtile *t) { run_tile(R, Q8_OFFSET, t); }  \
    static void q4_##R(const struct qtile *t) { run_tile(R, Q4, t); }                \
    static void q4_offset_##R(const struct qtile *t) { run_tile(R, Q4_OFFSET, t); }
#define NAMES(R) {q8_##R, q8_offset_##R, q4_##R, q4_offset_##R},
#if defined(__AVX512F__)
#define EACH_TILE(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12)
#else
#define EACH_TILE(X) X(1) X(2) X(3) X(4) X(5) X(6)
#endif
EACH_TILE(TILE)
static const qtile_fn tiles[TILE_ROWS + 1][KINDS] = {{0}, EACH_TILE(NAMES)};

struct job {
    const struct qlinear *w;
    const float *x;
    float *packed, *out;
    int64_t rows, panels, tiles;
};

INLINE int64_t tile_start(const struct job *j, int64_t tile) { return j->rows * tile / j->tiles; }

/* The rows of a tile as [k][row]. */
static void pack_rows(void *context, int64_t tile) {
    const struct job *j = context;
    int64_t first = tile_start(j, tile), rows = tile_start(j, tile + 1) - first, depth = j->w->k;
    const float *x = j->x + first * depth;
    float *to = j->packed + first * depth;
    for (int64_t k = 0; k < depth; k += LANES) {
        int64_t count = depth - k < LANES ? depth - k : LANES;
        vu block[16] = {0};
        for (int64_t r = 0; r < rows; r++) block[r] = as_vu(vload_n(x + r * depth + k, count, 0.0f));
        transpose16(block);
        for (int64_t i = 0; i < count; i++) vstore_n(to + (k + i) * rows, as_vf(block[i]), rows);
    }
}

static const float no_bias[PANEL];

static void run_item(void *context, int64_t item) {
    const struct job *j = context;
    const struct qlinear *w = j->w;
    int64_t panel = item % j->panels, column = panel * PANEL, groups = (w->k + w->group - 1) / w->group;
    int64_t scale_bytes = groups * PANEL * dtype_bytes((int)w->scale_dtype);
    int64_t first = item / j->panels * MAX_TILES, columns = w->n - column < PANEL ? w->n - column : PANEL;
    float beside[TILE_ROWS * PANEL] __attribute__((aligned(64)));
    struct qtile t = {
        .w = w,
        .codes = w->codes + panel * w->k * row_bytes((int)w->kind),
        .scales = w->scales + panel * scale_bytes,
        .offsets = w->offsets + panel * scale_bytes,
        .start = w->bias ? w->bias + column : no_bias,
    };
    for (int64_t i = first; i < first + MAX_TILES && i < j->tiles; i++) {
        int64_t row = tile_start(j, i), rows = tile_start(j, i + 1) - row;
        float *out = j->out + row * w->n + column;
        t.x = j->packed + row * w->k;
        t.out = columns == PANEL ? out : beside;
        t.ldo = columns == PANEL ? w->n : PANEL;
        tiles[rows][w->kind](&t);
        if (columns < PANEL)
            for (int64_t r = 0; r < rows; r++)
                memcpy(out + r * w->n, beside + r * PANEL, (size_t)columns * sizeof(float));
    }
}

EXPORT int ask_qlinear(const struct qlinear *w, const float *x, int64_t rows, float *out) {
    if (rows <= 0) return 0;
    uint64_t saved = denormals_off();
    struct job j = {w, x, (float *)x, out, rows, (w->n + PANEL - 1) / PANEL, (rows + TILE_ROWS - 1) / TILE_ROWS};
    if (rows > 1) {
        j.packed = pool_scratch((size_t)(rows * w->k) * sizeof(float));
        if (j.packed && rows * w->k >= PARALLEL_PACK) pool_run(pack_rows, &j, j.tiles);
        else if (j.packed) for (int64_t i = 0; i < j.tiles; i++) pack_rows(&j, i);
    }
    if (j.packed) pool_run(run_item, &j, j.panels * ((j.tiles + MAX_TILES - 1) / MAX_TILES));
    denormals_restore(saved);
    return j.packed ? 0 : 1;
}
