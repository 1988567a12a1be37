/* Low-rank adapters: out[row] += (x[row] A^T) B^T for the rows of each adapter of a step.
 *
 * Every element of x A^T is 16 chains over k (lane i takes k = i mod 16), added in the tree of vsum; every
 * element of the second product is one chain over the rank. Which rows share a tile changes no bit. */
#include "ops.h"
#include "pool.h"
#include "vec.h"

enum {
    MAX_PARTS = 3,
    ROWS = 4,                 /* of a register block */
    RANKS = 2,                /* of a register block */
    ITEM_RANKS = 8,           /* of one work item of the first product */
    ITEM_COLUMNS = 256,       /* of one work item of the second */
    PARALLEL_PRODUCTS = 32768 /* multiply-adds from which waking the pool is worth it */
};

/* One slot of a site's table. */
struct entry {
    const void *down, *up[MAX_PARTS];
    int64_t ranks[MAX_PARTS], unused;
};
struct lora_tile {
    int32_t slot, start, count;
};
struct job {
    const struct entry *entries;
    const int32_t *rows;
    const struct lora_tile *tiles;
    const float *x;
    float *low, *out;
    int64_t k, n, max_rank, rank_items, column_items;
    int64_t widths[MAX_PARTS], dtype;
};

/* the first n (1..16) elements; reads nothing behind them */
INLINE vf load_n(const void *base, int64_t index, int dtype, int64_t n) {
    if (n >= LANES) return vload_as(base, index, dtype);
    char part[LANES * sizeof(float)] = {0};
    memcpy(part, (const char *)base + index * dtype_bytes(dtype), (size_t)(n * dtype_bytes(dtype)));
    return vload_as(part, 0, dtype);
}

INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* low[r][q] of `rows` rows and `ranks` ranks at once */
INLINE void dots(const struct job *j, const int dtype, const int32_t *index, const void *down, float *low, int rows,
                 int ranks) {
    vf sum[ROWS][RANKS] = {0};
    for (int64_t k = 0; k < j->k; k += LANES) {
        int64_t n = j->k - k;
        vf a[RANKS];
        for (int q = 0; q < ranks; q++) a[q] = load_n(down, q * j->k + k, dtype, n);
        for (int r = 0; r < rows; r++) {
            vf x = vload_n(j->x + index[r] * j->k + k, n, 0.0f);
            for (int q = 0; q < ranks; q++) sum[r][q] = vfma(x, a[q], sum[r][q]);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int q = 0; q < ranks; q++) low[r * j->max_rank + q] = vsum(sum[r][q]);
}

INLINE void shrink(const struct job *j, const int dtype, int64_t item) {
    const struct lora_tile *t = &j->tiles[item / j->rank_items];
    const struct entry *e = &j->entries[t->slot];
    int64_t total = e->ranks[0] + e->ranks[1] + e->ranks[2];
    int64_t first = item % j->rank_items * ITEM_RANKS, end = least(first + ITEM_RANKS, total);
    for (int64_t q = first; q < end; q += RANKS) {
        const char *down = (const char *)e->down + q * j->k * dtype_bytes(dtype);
        for (int32_t r = 0; r < t->count; r += ROWS) {
            const int32_t *index = j->rows + t->start + r;
            float *low = j->low + (t->start + r) * j->max_rank + q;
            if (t->count - r >= ROWS && end - q >= RANKS) dots(j, dtype, index, down, low, ROWS, RANKS);
            else dots(j, dtype, index, down, low, (int)least(t->count - r, ROWS), (int)least(end - q, RANKS));
        }
    }
}

/* columns [column, end) of a part for `rows` rows */
INLINE void combine(const struct job *j, const int dtype, const int32_t *index, const float *low, const void *up,
                    int64_t rank, int64_t width, int64_t column, int64_t end, int64_t offset, int rows) {
    for (; column < end; column += LANES) {
        int64_t n = end - column;
        vf sum[ROWS] = {0};
        for (int64_t q = 0; q < rank; q++) {
            vf b = load_n(up, q * width + column, dtype, n);
            for (int r = 0; r < rows; r++) sum[r] = vfma(vset(low[r * j->max_rank + q]), b, sum[r]);
        }
        for (int r = 0; r < rows; r++) {
            float *out = j->out + index[r] * j->n + offset + column;
            vstore_n(out, vload_n(out, n, 0.0f) + sum[r], n);
        }
    }
}

INLINE void expand(const struct job *j, const int dtype, int64_t item) {
    const struct lora_tile *t = &j->tiles[item / j->column_items];
    const struct entry *e = &j->entries[t->slot];
    int64_t block = item % j->column_items, part = 0, offset = 0, first_rank = 0;
    for (int64_t blocks; block >= (blocks = (j->widths[part] + ITEM_COLUMNS - 1) / ITEM_COLUMNS); part++) {
        block -= blocks;
        offset += j->widths[part];
        first_rank += e->ranks[part];
    }
    int64_t rank = e->ranks[part], width = j->widths[part], column = block * ITEM_COLUMNS;
    int64_t end = least(column + ITEM_COLUMNS, width);
    if (rank == 0) return;
    for (int32_t r = 0; r < t->count; r += ROWS) {
        const int32_t *index = j->rows + t->start + r;
        const float *low = j->low + (t->start + r) * j->max_rank + first_rank;
        if (t->count - r >= ROWS)
            combine(j, dtype, index, low, e->up[part], rank, width, column, end, offset, ROWS);
        else combine(j, dtype, index, low, e->up[part], rank, width, column, end, offset, t->count - r);
    }
}

#define KIND(NAME, DTYPE)                                                                    \
    static void shrink_##NAME(void *context, int64_t item) { shrink(context, DTYPE, item); } \
    static void expand_##NAME(void *context, int64_t item) { expand(context, DTYPE, item); }
KIND(f32, DT_F32)
KIND(bf16, DT_BF16)
KIND(f16, DT_F16)
static const pool_fn shrinks[] = {shrink_f32, shrink_bf16, shrink_f16};
static const pool_fn expands[] = {expand_f32, expand_bf16, expand_f16};

static void run(pool_fn fn, struct job *j, int64_t items, int64_t products) {
    if (products >= PARALLEL_PRODUCTS) pool_run(fn, j, items);
    else for (int64_t i = 0; i < items; i++) fn(j, i);
}

EXPORT int ask_lora_add(const void *entries, const int32_t *rows, int64_t num_rows, const void *tiles,
                        int64_t num_tiles, const float *x, float *out, int64_t k, const int64_t *widths,
                        int64_t max_rank, int64_t dtype) {
    if (num_tiles <= 0 || max_rank <= 0) return 0;
    uint64_t saved = denormals_off();
    struct job j = {.entries = entries, .rows = rows, .tiles = tiles, .x = x, .out = out, .k = k};
    j.max_rank = max_rank;
    j.dtype = dtype;
    j.rank_items = (max_rank + ITEM_RANKS - 1) / ITEM_RANKS;
    for (int part = 0; part < MAX_PARTS; part++) {
        j.widths[part] = widths[part];
        j.n += widths[part];
        j.column_items += (widths[part] + ITEM_COLUMNS - 1) / ITEM_COLUMNS;
    }
    j.low = pool_scratch((size_t)(num_rows * max_rank) * sizeof(float));
    if (j.low) {
        run(shrinks[dtype], &j, num_tiles * j.rank_items, num_rows * max_rank * k);
        run(expands[dtype], &j, num_tiles * j.column_items, num_rows * max_rank * j.n);
    }
    denormals_restore(saved);
    return j.low ? 0 : 1;
}
