/* Rotary embedding of q (in place) and k, and the write of k and v to the paged cache. */
#include "kv_quant.h"
#include "ops.h"
#include "pool.h"

enum { PARALLEL_ELEMENTS = 1 << 15, MAX_DIM = 512 /* checked by the binding */ };

struct rotary {
    float *q;
    const float *k, *v;
    int64_t ldq, ldk, ldv; /* floats from one token to the next; heads are contiguous */
    const float *cos_sin;  /* [max_pos][rotary_dim]: cosines, then sines */
    const int64_t *positions, *slots;
    void *k_cache, *v_cache; /* [spans][kv_heads][span_size][dim], or quantised blocks [spans][kv_heads] */
    int64_t cache_dtype;
    int64_t tokens, q_heads, kv_heads, dim, rotary_dim, span_size;
};

/* to[0..dim) = the head at `from`, its first 2 * half elements rotated; `to` may be `from` */
static void rotate(const float *from, float *to, const float *cos, int64_t half, int64_t dim) {
    const float *sin = cos + half;
    for (int64_t i = 0; i < half; i += LANES) {
        int64_t n = half - i;
        vf c = vload_n(cos + i, n, 0.0f), s = vload_n(sin + i, n, 0.0f);
        vf low = vload_n(from + i, n, 0.0f), high = vload_n(from + half + i, n, 0.0f);
        vstore_n(to + i, vfma(low, c, -(high * s)), n);
        vstore_n(to + half + i, vfma(high, c, low * s), n);
    }
    if (to != from) memcpy(to + 2 * half, from + 2 * half, (size_t)(dim - 2 * half) * sizeof(float));
}

static void store_row(void *cache, int64_t index, int dtype, const float *x, int64_t dim) {
    int64_t bytes = dtype_bytes(dtype);
    for (int64_t i = 0; i < dim; i += LANES) {
        int64_t n = dim - i < LANES ? dim - i : LANES;
        char narrow[LANES * sizeof(float)];
        vstore_as(narrow, 0, dtype, vload_n(x + i, n, 0.0f));
        memcpy((char *)cache + (index + i) * bytes, narrow, (size_t)(n * bytes));
    }
}

/* One head of one token to its slot. */
static void store_head(const struct rotary *r, void *cache, int64_t slot, int64_t head, const float *x) {
    int64_t span = slot / r->span_size, offset = slot % r->span_size, block = span * r->kv_heads + head;
    if (is_quantised(r->cache_dtype)) {
        char *at = (char *)cache + block * block_bytes(r->cache_dtype, r->dim, r->span_size);
        store_quantised(at, r->cache_dtype, offset, r->span_size, x, r->dim);
        return;
    }
    store_row(cache, (block * r->span_size + offset) * r->dim, (int)r->cache_dtype, x, r->dim);
}

static void rotary_token(void *context, int64_t token) {
    const struct rotary *r = context;
    const float *cos = r->cos_sin + r->positions[token] * r->rotary_dim;
    int64_t half = r->rotary_dim / 2, dim = r->dim, slot = r->slots[token];
    for (int64_t h = 0; h < r->q_heads; h++) {
        float *head = r->q + token * r->ldq + h * dim;
        rotate(head, head, cos, half, dim);
    }
    if (slot < 0) return;
    for (int64_t h = 0; h < r->kv_heads; h++) {
        float turned[MAX_DIM];
        rotate(r->k + token * r->ldk + h * dim, turned, cos, half, dim);
        store_head(r, r->k_cache, slot, h, turned);
        store_head(r, r->v_cache, slot, h, r->v + token * r->ldv + h * dim);
    }
}

EXPORT int ask_rotary_kv_write(float *q, const float *k, const float *v, int64_t ldq, int64_t ldk, int64_t ldv,
                               const float *cos_sin, int64_t max_positions, const int64_t *positions,
                               const int64_t *slots, void *k_cache, void *v_cache, int64_t cache_dtype,
                               int64_t num_slots, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim,
                               int64_t rotary_dim, int64_t span_size) {
    for (int64_t t = 0; t < tokens; t++)
        if (positions[t] < 0 || positions[t] >= max_positions || slots[t] >= num_slots) return 2;
    uint64_t saved = denormals_off();
    struct rotary r = {q,       k,           v,      ldq,     ldk,      ldv, cos_sin,    positions, slots,
                       k_cache, v_cache, cache_dtype, tokens, q_heads, kv_heads, dim, rotary_dim, span_size};
    if (tokens * (q_heads + kv_heads) * dim >= PARALLEL_ELEMENTS) pool_run(rotary_token, &r, tokens);
    else for (int64_t t = 0; t < tokens; t++) rotary_token(&r, t);
    denormals_restore(saved);
    return 0;
}
