/* out[M, N] = x[M, K] * w^T + bias; every element is one chain over k that starts at the bias. */
#include "linear.h"
#include "ops.h"
#include "pool.h"

enum {
    BLOCK_BYTES = 128 << 10, /* of a panel taken at a time: it stays in L2 from tile to tile */
    AHEAD = 4096,            /* distance of fetching weights with a single tile: measured best */
    GROUP_BYTES = 384 << 10, /* activations of one work item: they stay in L2 from panel to panel */
    MAX_GROUP = 16,          /* row tiles of one work item */
    PARALLEL_PACK = 65536    /* activations from which packing them is worth waking the pool */
};

/* Rows are cut into tiles of nearly equal height; inside a tile the activations lie [k][row]. */
struct job {
    const struct linear *w;
    const float *x;
    float *packed, *out;
    int64_t rows, ldx, ldo;
    int64_t panels, tiles, group; /* group: tiles of one work item */
};

INLINE int64_t tile_start(const struct job *j, int64_t tile) { return j->rows * tile / j->tiles; }

static void pack_rows(void *context, int64_t tile) {
    const struct job *j = context;
    int64_t first = tile_start(j, tile), rows = tile_start(j, tile + 1) - first, depth = j->w->k;
    const float *x = j->x + first * j->ldx;
    float *to = j->packed + first * depth;
    for (int64_t k = 0; k < depth; k += LANES) {
        int64_t count = depth - k < LANES ? depth - k : LANES;
        vu block[16] = {0};
        for (int64_t r = 0; r < rows; r++) block[r] = as_vu(vload_n(x + r * j->ldx + k, count, 0.0f));
        transpose16(block);
        for (int64_t i = 0; i < count; i++) vstore_n(to + (k + i) * rows, as_vf(block[i]), rows);
    }
}

/* row tiles [first, end) of one panel */
static void run_panel(const struct job *j, struct tile t, int64_t first, int64_t end) {
    int64_t depth = j->w->k, dtype = j->w->dtype, row_bytes = PANEL * dtype_bytes((int)dtype), tiles = end - first;
    int64_t block = tiles == 1 ? depth : BLOCK_BYTES / row_bytes;
    const char *panel = t.panel;
    float *out = t.out;
    t.ahead_step = row_bytes / tiles;
    for (int64_t k0 = 0; k0 < depth; k0 += block, t.start = NULL) {
        t.depth = depth - k0 < block ? depth - k0 : block;
        t.panel = panel + k0 * row_bytes;
        t.out = out;
        /* each tile fetches its share of the next block (at the end: of the next panel) */
        const char *next = (const char *)t.panel + (tiles == 1 ? AHEAD : t.depth * row_bytes);
        for (int64_t i = first; i < end; i++) {
            int64_t row = tile_start(j, i), rows = tile_start(j, i + 1) - row;
            t.x = j->packed + row * depth + k0 * rows;
            t.ahead = next + (i - first) * t.depth * t.ahead_step;
            weight_tiles[rows][dtype](&t);
            t.out += rows * t.ldo;
        }
    }
}

/* The last panel of a width that is no multiple of 32: computed beside the output, then cut to size. */
static void run_narrow(const struct job *j, struct tile t, int64_t first, int64_t end, int64_t columns) {
    float wide_out[MAX_GROUP * TILE_ROWS * PANEL] __attribute__((aligned(64)));
    int64_t row = tile_start(j, first), rows = tile_start(j, end) - row;
    float *out = t.out;
    float start[PANEL] = {0};
    memcpy(start, t.start, (size_t)columns * sizeof(float));
    t.start = start;
    t.out = wide_out;
    t.ldo = PANEL;
    run_panel(j, t, first, end);
    for (int64_t r = 0; r < rows; r++)
        memcpy(out + r * j->ldo, wide_out + r * PANEL, (size_t)columns * sizeof(float));
}

static const float no_bias[PANEL];

static void run_item(void *context, int64_t item) {
    const struct job *j = context;
    const struct linear *w = j->w;
    int64_t panel = item % j->panels, column = panel * PANEL;
    int64_t first = item / j->panels * j->group;
    int64_t end = first + j->group < j->tiles ? first + j->group : j->tiles;
    struct tile t = {
        .panel = w->panels + panel * panel_bytes(w),
        .start = w->bias ? w->bias + column : no_bias,
        .out = j->out + tile_start(j, first) * j->ldo + column,
        .ldo = j->ldo,
    };
    if (column + PANEL <= w->n) run_panel(j, t, first, end);
    else run_narrow(j, t, first, end, w->n - column);
}

static int64_t group_tiles(int64_t depth) {
    int64_t fit = GROUP_BYTES / (TILE_ROWS * depth * (int64_t)sizeof(float));
    return fit < 1 ? 1 : fit > MAX_GROUP ? MAX_GROUP : fit;
}

EXPORT int ask_linear(const struct linear *w, const float *x, int64_t rows, float *out) {
    if (rows <= 0) return 0;
    uint64_t saved = denormals_off();
    struct job j = {.w = w, .x = x, .packed = (float *)x, .out = out, .rows = rows, .ldx = w->k, .ldo = w->n};
    j.panels = panel_count(w);
    j.tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    j.group = group_tiles(w->k);
    if (rows > 1) {
        j.packed = pool_scratch((size_t)(rows * w->k) * sizeof(float));
        if (j.packed && rows * w->k >= PARALLEL_PACK) pool_run(pack_rows, &j, j.tiles);
        else if (j.packed) for (int64_t i = 0; i < j.tiles; i++) pack_rows(&j, i);
    }
    if (j.packed) pool_run(run_item, &j, j.panels * ((j.tiles + j.group - 1) / j.group));
    denormals_restore(saved);
    return j.packed ? 0 : 1;
}
