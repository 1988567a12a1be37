/* Reading blocks of the paged cache. Every span size is a multiple of 16, so 16 keys from a multiple of
 * 16 on lie one after the other in one span. */
#include "attention.h"

/* index of the first element of the key's (or value's) row */
static int64_t row_index(const struct cache_block *c, int64_t key) {
    int64_t span = c->spans[key / c->span_size], offset = key % c->span_size;
    return ((span * c->kv_heads + c->kv_head) * c->span_size + offset) * c->dim;
}

/* Asks for the rows of the 16 keys one block on, while this block is worked on: a span is too short a
 * stream for the hardware to follow. */
static void fetch_ahead(const struct cache_block *c, const void *cache, int64_t key) {
    key += BLOCK;
    if (key >= c->end) return;
    int64_t bytes = LANES * c->dim * dtype_bytes((int)c->dtype);
    const char *rows = (const char *)cache + row_index(c, key) * dtype_bytes((int)c->dtype);
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(rows + i);
}

INLINE vf load_some(const void *cache, int64_t index, int64_t n, int dtype) {
    if (n >= LANES) return vload_as(cache, index, dtype);
    int64_t bytes = dtype_bytes(dtype);
    char copy[LANES * sizeof(float)] = {0};
    memcpy(copy, (const char *)cache + index * bytes, (size_t)(n * bytes));
    return vload_as(copy, 0, dtype);
}

/* to[16][BLOCK] = 16 dimensions of `count` rows, from element `index` on; rows that are absent are zero */
INLINE void transpose_16(const struct cache_block *c, int64_t index, int64_t count, int64_t n, const int dtype,
                         float *to) {
    vu rows[16];
    if (count == LANES && n >= LANES) {
        UNROLL for (int i = 0; i < LANES; i++) rows[i] = as_vu(vload_as(c->k_cache, index + i * c->dim, dtype));
        transpose16(rows);
        UNROLL for (int i = 0; i < LANES; i++) vstore(to + i * BLOCK, as_vf(rows[i]));
        return;
    }
    for (int64_t i = 0; i < LANES; i++)
        rows[i] = i < count ? as_vu(load_some(c->k_cache, index + i * c->dim, n, dtype)) : vsetu(0);
    transpose16(rows);
    for (int64_t i = 0; i < LANES && i < n; i++) vstore(to + i * BLOCK, as_vf(rows[i]));
}

/* bf16 moves in pairs: one transposition serves 32 dimensions, a shift or a mask widens a row */
INLINE void transpose_32(const char *from, int64_t row_bytes, int64_t count, float *to) {
    vu rows[16];
    if (count == LANES) {
        UNROLL for (int i = 0; i < LANES; i++) rows[i] = vloadu(from + i * row_bytes);
    } else {
        for (int64_t i = 0; i < LANES; i++) rows[i] = i < count ? vloadu(from + i * row_bytes) : vsetu(0);
    }
    transpose16(rows);
    UNROLL for (int i = 0; i < LANES; i++) {
        vstore(to + 2 * i * BLOCK, as_vf(rows[i] << 16));
        vstore(to + (2 * i + 1) * BLOCK, as_vf(rows[i] & 0xffff0000u));
    }
}

INLINE void transpose_keys(const struct cache_block *c, int64_t index, int64_t count, const int dtype, float *to) {
    for (int64_t d = 0; d < c->dim; d += LANES)
        transpose_16(c, index + d, count, c->dim - d, dtype, to + d * BLOCK);
}

static void transpose_pairs(const struct cache_block *c, int64_t index, int64_t count, float *to) {
    for (int64_t d = 0; d < c->dim; d += 2 * LANES)
        transpose_32((const char *)c->k_cache + (index + d) * 2, c->dim * 2, count, to + d * BLOCK);
}

void load_keys(const struct cache_block *c, int64_t first, int64_t count, float *keys) {
    for (int64_t half = 0; half < BLOCK; half += LANES, keys += LANES) {
        int64_t present = count - half < LANES ? count - half : LANES;
        if (present <= 0) {
            for (int64_t d = 0; d < c->dim; d++) vstore(keys + d * BLOCK, vset(0.0f));
            continue;
        }
        int64_t index = row_index(c, first + half);
        fetch_ahead(c, c->k_cache, first + half);
        if (c->dtype == DT_F32) transpose_keys(c, index, present, DT_F32, keys);
        else if (c->dtype == DT_F16) transpose_keys(c, index, present, DT_F16, keys);
        else if (c->dim % (2 * LANES)) transpose_keys(c, index, present, DT_BF16, keys);
        else transpose_pairs(c, index, present, keys);
    }
}

/* to[count][PANEL] = up to 32 dimensions of `count` rows, from element `index` on */
INLINE void widen_panel(const struct cache_block *c, int64_t index, int64_t count, int64_t n, const int dtype,
                        float *to) {
    if (n >= PANEL) {
        for (int64_t i = 0; i < count; i++, index += c->dim, to += PANEL) {
            vstore(to, vload_as(c->v_cache, index, dtype));
            vstore(to + LANES, vload_as(c->v_cache, index + LANES, dtype));
        }
        return;
    }
    for (int64_t i = 0; i < count; i++, index += c->dim, to += PANEL) {
        vstore(to, load_some(c->v_cache, index, n, dtype));
        if (n > LANES) vstore(to + LANES, load_some(c->v_cache, index + LANES, n - LANES, dtype));
    }
}

INLINE void widen_values(const struct cache_block *c, int64_t index, int64_t count, const int dtype, float *to) {
    for (int64_t d = 0; d < c->dim; d += PANEL, to += BLOCK * PANEL)
        widen_panel(c, index + d, count, c->dim - d, dtype, to);
}

void load_values(const struct cache_block *c, int64_t first, int64_t count, float *values) {
    for (int64_t half = 0; half < count; half += LANES) {
        int64_t present = count - half < LANES ? count - half : LANES;
        int64_t index = row_index(c, first + half);
        fetch_ahead(c, c->v_cache, first + half);
        if (c->dtype == DT_F32) widen_values(c, index, present, DT_F32, values + half * PANEL);
        else if (c->dtype == DT_BF16) widen_values(c, index, present, DT_BF16, values + half * PANEL);
        else widen_values(c, index, present, DT_F16, values + half * PANEL);
    }
}
