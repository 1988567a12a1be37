#include "attention.h"
#include "kv_quant.h"
#include "mathv.h"
#include "ops.h"
#include "pool.h"

struct job {
    const struct step *s;
    const float *q;
    int64_t ldq;
    const void *k_cache, *v_cache;
    int64_t dtype;
    float scale;
    float *out;
    int64_t window; /* keys that a row sees, its own included; 0: all */
    float cap;      /* soft cap of the scores; 0: none */
    _Atomic int failed; /* a thread found no scratch memory */
};

/* Softmax over the keys so far, per query vector: maximum of the scores (base 2), sum of the weights by
 * lane, weighted sum of the values. */
struct state {
    float *top, *sum, *values;
};

static struct state state_at(float *memory, int64_t vectors) {
    return (struct state){memory, memory + vectors, memory + vectors * (1 + LANES)};
}

/* What one thread needs for one item. Query vector v = row * heads + head. */
struct walk {
    const struct job *j;
    struct item item;
    int64_t index; /* of the item */
    struct cache_view cache;
    int64_t heads, vectors, dim, padded;
    int64_t position; /* of the first row */
    float *q, *keys, *scores, *narrow;
    struct state part, total;
    struct fetch fetch;
};

/* Query vectors [first, first + count): rows [row, row + rows) with `heads` heads each. They are the
 * height of one register tile. */
struct slice {
    int64_t first, count, row, rows, heads;
};

/* The slice that starts at vector `first`: whole rows if one fits, else a part of the heads of one row. */
static struct slice slice_at(const struct walk *w, int64_t first) {
    int64_t row = first / w->heads, head = first % w->heads;
    if (w->heads > TILE_ROWS) {
        int64_t left = w->heads - head;
        int64_t count = left < TILE_ROWS ? left : TILE_ROWS;
        return (struct slice){first, count, row, 1, count};
    }
    int64_t rows = TILE_ROWS / w->heads;
    if (rows > w->item.rows - row) rows = w->item.rows - row;
    return (struct slice){first, rows * w->heads, row, rows, w->heads};
}

/* The first key that a row at `position` sees. */
INLINE int64_t first_key(const struct job *j, int64_t position) {
    return j->window && position >= j->window ? position - j->window + 1 : 0;
}

/* Query vectors of a slice as [dim][vector], scaled so that scores are exponents of 2 (under a soft cap: the
 * argument of tanh). */
static void pack_queries(const struct walk *w, const struct slice *c) {
    const struct job *j = w->j;
    float scale = j->cap > 0.0f ? j->scale / j->cap : j->scale * LOG2E;
    float *to = w->q + c->first * w->dim;
    int64_t first_row = j->s->cu_q[w->item.request] + w->item.row;
    for (int64_t i = 0; i < c->count; i++) {
        int64_t v = c->first + i, head = w->item.kv_head * w->heads + v % w->heads;
        const float *from = j->q + (first_row + v / w->heads) * j->ldq + head * w->dim;
        for (int64_t d = 0; d < w->dim; d++) to[d * c->count + i] = from[d] * scale;
    }
}

static void scale_state(const struct walk *w, struct state *s, int64_t v, float factor) {
    vf f = vset(factor);
    vstore(s->sum + v * LANES, vload(s->sum + v * LANES) * f);
    float *values = s->values + v * w->padded;
    for (int64_t d = 0; d < w->padded; d += LANES) vstore(values + d, vload(values + d) * f);
}

/* Scores of one vector to weights, of which those from `skip` on and before `seen` (1..32) count. */
static void softmax_block(const struct walk *w, int64_t v, float *scores, int64_t skip, int64_t seen) {
    enum { VECS = BLOCK / LANES };
    vf s[VECS];
    UNROLL for (int i = 0; i < VECS; i++) s[i] = vload(scores + i * LANES);
    if (w->j->cap > 0.0f)
        UNROLL for (int i = 0; i < VECS; i++) s[i] = vset(w->j->cap * LOG2E) * vtanh(s[i]);
    if (seen < BLOCK) {
        vi left = vseti((int32_t)seen) - viota();
        UNROLL for (int i = 0; i < VECS; i++) s[i] = vselect(left > i * LANES, s[i], vset(MINUS_INF));
    }
    if (skip > 0) {
        vi before = viota() - vseti((int32_t)skip);
        UNROLL for (int i = 0; i < VECS; i++) s[i] = vselect(before < -i * LANES, vset(MINUS_INF), s[i]);
    }
    struct state part = w->part;
    vf largest = s[0];
    UNROLL for (int i = 1; i < VECS; i++) largest = vmax(largest, s[i]);
    float before = part.top[v], top = vhmax(largest);
    if (!(top > before)) {
        top = before;
    } else {
        part.top[v] = top;
        scale_state(w, &part, v, sexp2(before - top));
    }
    vf sum = vload(part.sum + v * LANES);
    UNROLL for (int i = 0; i < VECS; i++) {
        s[i] = vexp2(s[i] - vset(top));
        vstore(scores + i * LANES, s[i]);
        sum = sum + s[i];
    }
    vstore(part.sum + v * LANES, sum);
}

/* values += weights * V for `count` vectors from `first`, over keys [key, key + seen) */
static void add_values(struct walk *w, int64_t first, int64_t count, const float *weights, int64_t key, int64_t seen) {
    for (int64_t i = 0; i < seen; i += LANES) {
        fetch_some(&w->fetch);
        for (int64_t d = 0; d < w->padded; d += PANEL) {
            int64_t depth = seen - i < LANES ? seen - i : LANES;
            struct value_rows v = value_rows(&w->cache, key + i, depth, d, w->narrow);
            struct tile t = {
                .x = weights + i,
                .panel = v.rows,
                .row_bytes = v.row_bytes,
                .out = w->part.values + first * w->padded + d,
                .ldo = w->padded,
                .depth = depth,
            };
            value_tiles[count][v.dtype](&t);
        }
    }
}

static const float zeros[PANEL];

/* One block of keys, from absolute key `key` on, for one slice. */
static void attend_slice(struct walk *w, const struct slice *c, int64_t key) {
    int64_t first = w->position + c->row, last = first + c->rows - 1;
    if (last < key || first_key(w->j, first) >= key + BLOCK) return;
    struct tile t = {
        .x = w->q + c->first * w->dim,
        .panel = w->keys,
        .start = zeros,
        .out = w->scores,
        .ldo = BLOCK,
        .depth = w->dim,
    };
    fetch_some(&w->fetch);
    key_tiles[c->count](&t);
    /* where a row does not see the whole block, rows go one by one */
    int is_whole = first + 1 >= key + BLOCK && first_key(w->j, last) <= key;
    for (int64_t r = 0; r < c->rows; r++) {
        int64_t seen = first + r - key + 1, skip = first_key(w->j, first + r) - key;
        if (seen <= 0 || skip >= BLOCK) continue;
        if (seen > BLOCK) seen = BLOCK;
        for (int64_t h = 0; h < c->heads; h++) {
            fetch_some(&w->fetch);
            softmax_block(w, c->first + r * c->heads + h, w->scores + (r * c->heads + h) * BLOCK, skip, seen);
        }
        fetch_some(&w->fetch);
        if (!is_whole)
            add_values(w, c->first + r * c->heads, c->heads, w->scores + r * c->heads * BLOCK, key, seen);
    }
    if (is_whole) add_values(w, c->first, c->count, w->scores, key, BLOCK);
}

static void clear_state(const struct walk *w) {
    for (int64_t v = 0; v < w->vectors; v++) w->part.top[v] = MINUS_INF;
    memset(w->part.sum, 0, (size_t)(w->vectors * LANES) * sizeof(float));
    memset(w->part.values, 0, (size_t)(w->vectors * w->padded) * sizeof(float));
}

static struct cache_view view_of(const struct job *j, const struct item *item) {
    const struct step *s = j->s;
    return (struct cache_view){
        .k_cache = j->k_cache,
        .v_cache = j->v_cache,
        .dtype = j->dtype,
        .kv_heads = s->kv_heads,
        .span_size = s->span_size,
        .dim = s->dim,
        .spans = s->span_table + item->request * s->max_spans,
        .kv_head = item->kv_head,
        .end = s->kv_lens[item->request] - s->q_lens[item->request] + item->row + item->rows,
    };
}

/* The next block is the one at `key`, or the first of the item that this thread will probably run next. */
static void aim_next(struct walk *w, int64_t key) {
    const struct step *s = w->j->s;
    if (key < w->cache.end && !(s->states && key % SPLIT == 0)) {
        aim(&w->fetch, &w->cache, key);
    } else if (w->index + 1 < s->item_count) {
        const struct item *next = &s->items[w->index + 1];
        struct cache_view view = view_of(w->j, next);
        int64_t start = view.end - next->rows; /* position of its first row */
        start = first_key(w->j, start) / BLOCK * BLOCK;
        aim(&w->fetch, &view, s->states && next->split * SPLIT > start ? next->split * SPLIT : start);
    } else {
        w->fetch.chunks = 0;
    }
}

/* The state of keys [split * SPLIT, ...) up to the last row's own, into w->part. */
static void walk_split(struct walk *w, int64_t split) {
    int64_t keys = w->position + w->item.rows; /* seen by the last row */
    int64_t end = (split + 1) * SPLIT < keys ? (split + 1) * SPLIT : keys;
    int64_t begin = first_key(w->j, w->position) / BLOCK * BLOCK;
    clear_state(w);
    for (int64_t key = begin > split * SPLIT ? begin : split * SPLIT; key < end; key += BLOCK) {
        int64_t count = end - key < BLOCK ? end - key : BLOCK;
        aim_next(w, key + BLOCK);
        load_keys(&w->cache, key, count, w->keys, &w->fetch);
        for (int64_t first = 0; first < w->vectors;) {
            struct slice c = slice_at(w, first);
            attend_slice(w, &c, key);
            first += c.count;
        }
    }
}

/* total = total merged with the state of a later split */
static void merge(const struct walk *w, struct state total, struct state part, int64_t v) {
    if (part.top[v] == MINUS_INF) return; /* the row's window leaves the split out */
    float top = total.top[v] > part.top[v] ? total.top[v] : part.top[v];
    vf a = vset(sexp2(total.top[v] - top)), b = vset(sexp2(part.top[v] - top));
    float *sum = total.sum + v * LANES, *values = total.values + v * w->padded;
    total.top[v] = top;
    vstore(sum, vfma(vload(part.sum + v * LANES), b, vload(sum) * a));
    for (int64_t d = 0; d < w->padded; d += LANES)
        vstore(values + d, vfma(vload(part.values + v * w->padded + d), b, vload(values + d) * a));
}

/* Rows that reach into the split take part; the others have no state in it. */
static void merge_split(const struct walk *w, struct state part, int64_t split) {
    int64_t row = split * SPLIT - w->position;
    for (int64_t v = (row > 0 ? row : 0) * w->heads; v < w->vectors; v++) merge(w, w->total, part, v);
}

static void write_rows(const struct walk *w, struct state s) {
    const struct job *j = w->j;
    int64_t first_row = j->s->cu_q[w->item.request] + w->item.row;
    for (int64_t v = 0; v < w->vectors; v++) {
        int64_t head = w->item.kv_head * w->heads + v % w->heads;
        float *out = j->out + ((first_row + v / w->heads) * j->s->q_heads + head) * w->dim;
        float sum = vsum(vload(s.sum + v * LANES));
        vf scale = vset(1.0f / sum);
        for (int64_t d = 0; d < w->dim; d += LANES)
            vstore_n(out + d, vload(s.values + v * w->padded + d) * scale, w->dim - d);
    }
}

/* Lays out the thread's scratch memory; returns 0 without memory. */
static int prepare(struct walk *w, struct job *j, int64_t index) {
    const struct step *s = j->s;
    w->j = j;
    w->item = s->items[index];
    w->index = index;
    w->heads = group_heads(s);
    w->vectors = w->item.rows * w->heads;
    w->dim = s->dim;
    w->padded = padded_dim(s);
    w->position = s->kv_lens[w->item.request] - s->q_lens[w->item.request] + w->item.row;
    w->cache = view_of(j, &w->item);
    int64_t state = state_size(s, w->vectors), q = w->vectors * w->dim;
    int64_t block = w->padded * BLOCK, scores = TILE_ROWS * BLOCK;
    int64_t narrow = LANES * PANEL, values = is_quantised(j->dtype) ? block : 0;
    float *memory = pool_scratch((size_t)(block + scores + narrow + values + 2 * state + q) * sizeof(float));
    if (!memory) {
        j->failed = 1;
        return 0;
    }
    w->keys = memory;
    w->scores = w->keys + block;
    w->narrow = w->scores + scores;
    w->cache.values = w->narrow + narrow;
    w->q = w->cache.values + values;
    w->part = state_at(w->q + q, w->vectors);
    w->total = state_at(w->q + q + state, w->vectors);
    for (int64_t first = 0; first < w->vectors;) {
        struct slice c = slice_at(w, first);
        pack_queries(w, &c);
        first += c.count;
    }
    return 1;
}

static void run_item(void *context, int64_t index) {
    struct job *j = context;
    struct walk w;
    if (!prepare(&w, j, index)) return;
    if (j->s->states) {
        w.part = state_at(j->s->states + index * j->s->state_floats, w.vectors);
        walk_split(&w, w.item.split);
        return;
    }
    int64_t begin = first_key(j, w.position) / SPLIT;
    for (int64_t split = begin; split < w.item.splits; split++) {
        walk_split(&w, split);
        if (split > begin) {
            merge_split(&w, w.part, split);
        } else if (w.item.splits > begin + 1) {
            struct state first = w.total;
            w.total = w.part;
            w.part = first;
        }
    }
    write_rows(&w, w.item.splits > begin + 1 ? w.total : w.part);
}

/* Merges the states of the items of the same rows, of which `index` is the first. */
static void merge_item(struct job *j, int64_t index) {
    const struct step *s = j->s;
    struct walk w;
    if (s->items[index].split || !prepare(&w, j, index)) return;
    w.total = state_at(s->states + index * s->state_floats, w.vectors);
    for (int64_t i = index + 1; i < s->item_count && s->items[i].split; i++)
        merge_split(&w, state_at(s->states + i * s->state_floats, w.vectors), s->items[i].split);
    write_rows(&w, w.total);
}

int attend_live(const struct step *s, const float *q, int64_t ldq, const void *k_cache, const void *v_cache,
                int64_t dtype, float scale, float *out, int64_t window, float cap) {
    uint64_t saved = denormals_off();
    struct job j = {s, q, ldq, k_cache, v_cache, dtype, scale, out, window, cap, 0};
    pool_run(run_item, &j, s->item_count);
    if (s->states)
        for (int64_t i = 0; i < s->item_count; i++) merge_item(&j, i);
    denormals_restore(saved);
    return j.failed;
}

EXPORT int ask_paged_attention(const struct step *s, const float *q, int64_t ldq, const void *k_cache,
                               const void *v_cache, int64_t dtype, float scale, float *out, int64_t window, float cap) {
    int64_t width = s->q_heads * s->dim;
    for (int64_t r = 0; r < s->requests; r++)
        if (s->kv_lens[r] == 0)
            memset(out + s->cu_q[r] * width, 0, (size_t)(s->q_lens[r] * width) * sizeof(float));
    return attend_live(s, q, ldq, k_cache, v_cache, dtype, scale, out, window, cap);
}
