/* Reading blocks of the paged cache. Every span size is a multiple of 16, so 16 keys from a multiple of
 * 16 on lie one after the other in one span. */
#include "attention.h"
#include "kv_quant.h"

/* index of the first element of the key's (or value's) row */
static int64_t row_index(const struct cache_view *c, int64_t key) {
    int64_t span = c->spans[key / c->span_size], offset = key % c->span_size;
    return ((span * c->kv_heads + c->kv_head) * c->span_size + offset) * c->dim;
}

/* the quantised block that holds the key (or value) */
static int64_t block_index(const struct cache_view *c, int64_t key) {
    int64_t head = c->spans[key / c->span_size] * c->kv_heads + c->kv_head;
    return head * block_bytes(c->dtype, c->dim, c->span_size);
}

static void aim_quantised(struct fetch *f, const struct cache_view *c, int64_t key) {
    int64_t bytes = code_bytes(c->dtype, c->dim), offset = key % c->span_size;
    const char *blocks[2] = {(const char *)c->v_cache, (const char *)c->k_cache};
    for (int i = 0; i < 2; i++) {
        const char *block = blocks[i] + block_index(c, key);
        const float *scales = block_scales(block, c->dtype, c->dim, c->span_size) + offset;
        __builtin_prefetch(scales); /* 16 of them are one line */
        __builtin_prefetch(scales + c->span_size);
        f->chunk[f->chunks++] = block + offset * bytes;
    }
    f->bytes = LANES * bytes;
}

void aim(struct fetch *f, const struct cache_view *c, int64_t key) {
    enum { PIECES = 11 /* calls of fetch_some during the work on a block, about */ };
    int64_t bytes = dtype_bytes((int)c->dtype);
    f->chunks = 0;
    f->bytes = LANES * c->dim * bytes;
    for (int64_t part = 0; part < BLOCK && key + part < c->end; part += LANES) {
        if (is_quantised(c->dtype)) {
            aim_quantised(f, c, key + part);
            continue;
        }
        int64_t index = row_index(c, key + part);
        f->chunk[f->chunks++] = (const char *)c->v_cache + index * bytes;
        f->chunk[f->chunks++] = (const char *)c->k_cache + index * bytes;
    }
    f->step = f->chunks * f->bytes / PIECES + 1;
    f->at = 0;
}

INLINE vf load_some(const void *cache, int64_t index, int64_t n, int dtype) {
    if (n >= LANES) return vload_as(cache, index, dtype);
    int64_t bytes = dtype_bytes(dtype);
    char copy[LANES * sizeof(float)] = {0};
    memcpy(copy, (const char *)cache + index * bytes, (size_t)(n * bytes));
    return vload_as(copy, 0, dtype);
}

/* to[16][PANEL] = 16 dimensions of `count` rows, from element `index` on; rows that are absent are zero */
INLINE void transpose_16(const struct cache_view *c, int64_t index, int64_t count, int64_t n, const int dtype,
                         float *to) {
    vu rows[16];
    if (count == LANES && n >= LANES) {
        UNROLL for (int i = 0; i < LANES; i++) rows[i] = as_vu(vload_as(c->k_cache, index + i * c->dim, dtype));
        transpose16(rows);
        UNROLL for (int i = 0; i < LANES; i++) vstore(to + i * PANEL, as_vf(rows[i]));
        return;
    }
    for (int64_t i = 0; i < LANES; i++)
        rows[i] = i < count ? as_vu(load_some(c->k_cache, index + i * c->dim, n, dtype)) : vsetu(0);
    transpose16(rows);
    for (int64_t i = 0; i < LANES && i < n; i++) vstore(to + i * PANEL, as_vf(rows[i]));
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
        vstore(to + 2 * i * PANEL, as_vf(rows[i] << 16));
        vstore(to + (2 * i + 1) * PANEL, as_vf(rows[i] & 0xffff0000u));
    }
}

INLINE void transpose_keys(const struct cache_view *c, int64_t index, int64_t count, const int dtype, float *to,
                           struct fetch *f) {
    for (int64_t d = 0; d < c->dim; d += LANES) {
        fetch_some(f);
        transpose_16(c, index + d, count, c->dim - d, dtype, to + d * PANEL);
    }
}

static void transpose_pairs(const struct cache_view *c, int64_t index, int64_t count, float *to, struct fetch *f) {
    for (int64_t d = 0; d < c->dim; d += 2 * LANES) {
        fetch_some(f);
        transpose_32((const char *)c->k_cache + (index + d) * 2, c->dim * 2, count, to + d * PANEL);
    }
}

/* 16 keys and values from key `first` on, of which `count` exist */
static void load_quantised(const struct cache_view *c, int64_t first, int64_t count, float *keys) {
    int64_t at = block_index(c, first), offset = first % c->span_size, padded = (c->dim + PANEL - 1) / PANEL * PANEL;
    load_quantised_columns((const char *)c->k_cache + at, c->dtype, offset, c->span_size, count, c->dim, keys, PANEL);
    load_quantised_rows((const char *)c->v_cache + at, c->dtype, offset, c->span_size, count, c->dim,
                        c->values + first % BLOCK * padded, padded);
}

void load_keys(const struct cache_view *c, int64_t first, int64_t count, float *keys, struct fetch *f) {
    for (int64_t part = 0; part < BLOCK; part += LANES) {
        int64_t present = count - part < LANES ? count - part : LANES;
        float *to = keys + part;
        if (present <= 0) {
            for (int64_t d = 0; d < c->dim; d++) vstore(to + d * PANEL, vset(0.0f));
            continue;
        }
        if (is_quantised(c->dtype)) {
            fetch_some(f);
            load_quantised(c, first + part, present, to);
            continue;
        }
        int64_t index = row_index(c, first + part);
        if (c->dtype == DT_F32) transpose_keys(c, index, present, DT_F32, to, f);
        else if (c->dtype == DT_F16) transpose_keys(c, index, present, DT_F16, to, f);
        else if (c->dim % (2 * LANES)) transpose_keys(c, index, present, DT_BF16, to, f);
        else transpose_pairs(c, index, present, to, f);
    }
}

struct value_rows value_rows(const struct cache_view *c, int64_t first, int64_t count, int64_t d, float *copy) {
    if (is_quantised(c->dtype)) {
        int64_t padded = (c->dim + PANEL - 1) / PANEL * PANEL;
        return (struct value_rows){c->values + first % BLOCK * padded + d, padded * sizeof(float), DT_F32};
    }
    int64_t index = row_index(c, first) + d, bytes = dtype_bytes((int)c->dtype), n = c->dim - d;
    if (n >= PANEL)
        return (struct value_rows){(const char *)c->v_cache + index * bytes, c->dim * bytes, c->dtype};
    for (int64_t i = 0; i < count; i++, index += c->dim) {
        vstore(copy + i * PANEL, load_some(c->v_cache, index, n, (int)c->dtype));
        vf rest = vset(0.0f);
        if (n > LANES) rest = load_some(c->v_cache, index + LANES, n - LANES, (int)c->dtype);
        vstore(copy + i * PANEL + LANES, rest);
    }
    return (struct value_rows){copy, PANEL * sizeof(float), DT_F32};
}
