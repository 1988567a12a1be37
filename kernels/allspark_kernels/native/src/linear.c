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

/* Rows are cut into tiles of nearly equal height; inside a tile the activations lie as `how` wants them. */
struct job {
    const struct linear *w;
    enum products how;
    const float *x;
    uint32_t *packed; /* fp32, or pairs of bf16 */
    float *out;
    int64_t rows, ldx, ldo;
    int64_t steps, width;         /* of a row of `packed`: steps, words of a step */
    int64_t panels, tiles, group; /* group: tiles of one work item */
};

static enum products products_of(const struct linear *w) {
    if (w->dtype != DT_BF16) return w->dtype == DT_F32 ? F32 : F16;
    if (!w->rounds_inputs) return BF16;
    return has_dot() ? BF16_DOT : BF16_PAIRS;
}

INLINE int64_t tile_start(const struct job *j, int64_t tile) { return j->rows * tile / j->tiles; }

INLINE vf rounded(vf x, const int dtype) {
    if (dtype == DT_BF16) return as_vf(__builtin_convertvector(vto_bf16(x), vu) << 16);
    vh half = vto_f16(x);
    return vload_f16(&half);
}

/* 16 k's of up to 16 rows from column k on, as words [k][row]; `swap` 1 exchanges even and odd k's */
static void pack_plain(const struct job *j, const float *x, int64_t rows, int64_t k, uint32_t *to) {
    int64_t depth = j->w->k, count = depth - k < LANES ? depth - k : LANES, swap = j->how == BF16_PAIRS;
    vu block[16] = {0};
    for (int64_t r = 0; r < rows; r++) {
        vf v = vload_n(x + r * j->ldx + k, count, 0.0f);
        if (j->how == BF16_PAIRS) v = rounded(v, DT_BF16);
        if (j->how == F16 && j->w->rounds_inputs) v = rounded(v, DT_F16);
        block[r] = as_vu(v);
    }
    transpose16(block);
    int64_t end = j->width * (j->steps - k / j->width); /* an odd K is filled up with a zero */
    for (int64_t i = 0; i < LANES && i < end; i++)
        vstore_n((float *)to + (k + (i ^ swap)) * rows, as_vf(block[i]), rows);
}

/* 32 k's of up to 16 rows as words [pair of k][row] */
static void pack_pairs(const struct job *j, const float *x, int64_t rows, int64_t k, uint32_t *to) {
    int64_t left = j->w->k - k;
    vu block[16] = {0};
    for (int64_t r = 0; r < rows; r++) {
        const float *from = x + r * j->ldx + k;
        vh low = vto_bf16(vload_n(from, left, 0.0f)), high = vto_bf16(vload_n(from + LANES, left - LANES, 0.0f));
        memcpy(&block[r], &low, sizeof low);
        memcpy((char *)&block[r] + sizeof low, &high, sizeof high);
    }
    transpose16(block);
    for (int64_t i = 0; i < LANES && k / 2 + i < j->steps; i++)
        vstore_n((float *)to + (k / 2 + i) * rows, as_vf(block[i]), rows);
}

static void pack_rows(void *context, int64_t tile) {
    const struct job *j = context;
    int64_t first = tile_start(j, tile), rows = tile_start(j, tile + 1) - first;
    const float *x = j->x + first * j->ldx;
    uint32_t *to = j->packed + first * j->steps * j->width;
    if (j->how == BF16_DOT)
        for (int64_t k = 0; k < j->w->k; k += 2 * LANES) pack_pairs(j, x, rows, k, to);
    else
        for (int64_t k = 0; k < j->w->k; k += LANES) pack_plain(j, x, rows, k, to);
}

/* One row of fp32 that is multiplied as it is lies right already. */
static int needs_packing(const struct job *j) {
    return j->rows > 1 || j->w->rounds_inputs || j->steps * j->width != j->w->k;
}

/* row tiles [first, end) of one panel */
static void run_panel(const struct job *j, struct tile t, int64_t first, int64_t end) {
    int64_t bytes = step_bytes(j->w), tiles = end - first;
    int64_t block = tiles == 1 ? j->steps : BLOCK_BYTES / bytes;
    const char *panel = t.panel;
    float *out = t.out;
    t.ahead_step = bytes / tiles;
    for (int64_t at = 0; at < j->steps; at += block, t.start = NULL) {
        t.depth = j->steps - at < block ? j->steps - at : block;
        t.panel = panel + at * bytes;
        t.out = out;
        /* each tile fetches its share of the next block (at the end: of the next panel) */
        const char *next = (const char *)t.panel + (tiles == 1 ? AHEAD : t.depth * bytes);
        for (int64_t i = first; i < end; i++) {
            int64_t row = tile_start(j, i), rows = tile_start(j, i + 1) - row;
            t.x = j->packed + (row * j->steps + at * rows) * j->width;
            t.ahead = next + (i - first) * t.depth * t.ahead_step;
            weight_tiles[rows][j->how](&t);
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

static int64_t group_tiles(int64_t row_bytes) {
    int64_t fit = GROUP_BYTES / (TILE_ROWS * row_bytes);
    return fit < 1 ? 1 : fit > MAX_GROUP ? MAX_GROUP : fit;
}

EXPORT int ask_linear(const struct linear *w, const float *x, int64_t rows, float *out) {
    if (rows <= 0) return 0;
    uint64_t saved = denormals_off();
    struct job j = {.w = w, .how = products_of(w), .x = x, .packed = (uint32_t *)x, .out = out, .rows = rows};
    j.ldx = w->k;
    j.ldo = w->n;
    j.steps = panel_steps(w);
    j.width = j.how == BF16 || j.how == BF16_PAIRS ? 2 : 1;
    j.panels = panel_count(w);
    j.tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    j.group = group_tiles(j.steps * j.width * (int64_t)sizeof(float));
    if (needs_packing(&j)) {
        j.packed = pool_scratch((size_t)(rows * j.steps * j.width) * sizeof(float));
        if (j.packed && rows * w->k >= PARALLEL_PACK) pool_run(pack_rows, &j, j.tiles);
        else if (j.packed) for (int64_t i = 0; i < j.tiles; i++) pack_rows(&j, i);
    }
    if (j.packed) pool_run(run_item, &j, j.panels * ((j.tiles + j.group - 1) / j.group));
    denormals_restore(saved);
    return j.packed ? 0 : 1;
}
