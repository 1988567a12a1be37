/* Reading blocks of the paged cache. Every span size is a multiple of 16, so 16 keys from a multiple of
 * 16 on lie one after the other in one span. */
#include "attention.h"

/* index of the first element of the key's (or value's) row */
static int64_t row_index(const struct cache_block *c, int64_t key) {
    int64_t span = c->spans[key / c->span_size], offset = key % c->span_size;
    return ((span * c->kv_heads + c->kv_head) * c->span_size + offset) * c->dim;
}

INLINE vf load_some(const void *cache, int64_t index, int64_t n, int dtype) {
    if (n >= LANES) return vload_as(cache, index, dtype);
    int64_t bytes = dtype_bytes(dtype);
    char copy[LANES * sizeof(float)] = {0};
    memcpy(copy, (const char *)cache + index * bytes, (size_t)(n * bytes));
    return vload_as(copy, 0, dtype);
}

INLINE void transpose_keys(const struct cache_block *c, int64_t index, int64_t count, const int dtype, float *to) {
    for (int64_t d = 0; d < c->dim; d += LANES) {
        int64_t n = c->dim - d < LANES ? c->dim - d : LANES;
        vu rows[16] = {0};
        for (int64_t i = 0; i < count; i++)
            rows[i] = as_vu(load_some(c->k_cache, index + i * c->dim + d, n, dtype));
        transpose16(rows);
        for (int64_t i = 0; i < n; i++) vstore(to + (d + i) * BLOCK, as_vf(rows[i]));
    }
}

/* bf16 moves in pairs: one transposition serves 32 dimensions, a shift or a mask widens a row */
static void transpose_pairs(const struct cache_block *c, int64_t index, int64_t count, float *to) {
    for (int64_t d = 0; d < c->dim; d += 2 * LANES) {
        vu rows[16] = {0};
        for (int64_t i = 0; i < count; i++)
            rows[i] = vloadu((const char *)c->k_cache + (index + i * c->dim + d) * 2);
        transpose16(rows);
        UNROLL for (int i = 0; i < LANES; i++) {
            vstore(to + (d + 2 * i) * BLOCK, as_vf(rows[i] << 16));
            vstore(to + (d + 2 * i + 1) * BLOCK, as_vf(rows[i] & 0xffff0000u));
        }
    }
}

void load_keys(const struct cache_block *c, int64_t first, int64_t count, float *keys) {
    for (int64_t half = 0; half < BLOCK; half += LANES, keys += LANES) {
        int64_t present = count - half < LANES ? count - half : LANES;
        if (present <= 0) {
            for (int64_t d = 0; d < c->dim; d++) vstore(keys + d * BLOCK, vset(0.0f));
            continue;
        }
        int64_t index = row_index(c, first + half);
        if (c->dtype == DT_F32) transpose_keys(c, index, present, DT_F32, keys);
        else if (c->dtype == DT_F16) transpose_keys(c, index, present, DT_F16, keys);
        else if (c->dim % (2 * LANES)) transpose_keys(c, index, present, DT_BF16, keys);
        else transpose_pairs(c, index, present, keys);
    }
}

INLINE void widen_values(const struct cache_block *c, int64_t index, int64_t first, int64_t count, const int dtype,
                         float *values) {
    for (int64_t i = 0; i < count; i++)
        for (int64_t d = 0; d < c->dim; d += LANES) {
            vf v = load_some(c->v_cache, index + i * c->dim + d, c->dim - d, dtype);
            vstore(values + (d / PANEL * BLOCK + first + i) * PANEL + d % PANEL, v);
        }
}

void load_values(const struct cache_block *c, int64_t first, int64_t count, float *values) {
    for (int64_t half = 0; half < count; half += LANES) {
        int64_t present = count - half < LANES ? count - half : LANES;
        int64_t index = row_index(c, first + half);
        if (c->dtype == DT_F32) widen_values(c, index, half, present, DT_F32, values);
        else if (c->dtype == DT_BF16) widen_values(c, index, half, present, DT_BF16, values);
        else widen_values(c, index, half, present, DT_F16, values);
    }
}
