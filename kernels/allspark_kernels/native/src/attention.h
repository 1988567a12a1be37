/* Causal attention over the paged cache. The walk over the keys is fixed by their absolute positions:
 * blocks of 32 keys, online softmax from block to block, a fresh state every SPLIT keys, and the states
 * of the splits merged in order. A row's bits depend on nothing else: not on the span size, on the chunk
 * or batch it came in, on decode or prefill, or on the thread that walked a split. */
#ifndef ALLSPARK_ATTENTION_H
#define ALLSPARK_ATTENTION_H

#include "tile.h"

enum {
    BLOCK = PANEL,   /* keys of a block */
    SPLIT = 512,     /* keys of a split */
    MAX_VECTORS = 48 /* query vectors (rows times heads of one KV head) that an item aims for */
};

/* Query rows [row, row + rows) of a request, times the query heads of one KV head, over some splits. */
struct item {
    int32_t request, kv_head, row, rows, split, splits;
};

/* One step of the engine; mirrored in the binding, which owns the arrays. */
struct step {
    const int32_t *q_lens, *kv_lens, *cu_q, *span_table;
    int64_t requests, max_spans;
    int64_t q_heads, kv_heads, dim, span_size;
    struct item *items;
    int64_t item_count;
    /* NULL: an item walks all splits of its rows. Else an item is one split, the items of the same rows
     * follow each other, and each leaves its state here, state_floats apart. */
    float *states;
    int64_t state_floats;
    int64_t live; /* tokens of all requests but those that pad the end of a batch */
};

INLINE int64_t group_heads(const struct step *s) { return s->q_heads / s->kv_heads; }
INLINE int64_t padded_dim(const struct step *s) { return (s->dim + PANEL - 1) / PANEL * PANEL; }
/* floats of the state of `vectors` query vectors: maximum, 16 partial sums, weighted values */
INLINE int64_t state_size(const struct step *s, int64_t vectors) {
    return vectors * (1 + LANES + padded_dim(s));
}

/* Where one KV head of a request lies in the cache. */
struct cache_view {
    const void *k_cache, *v_cache;
    int64_t dtype, kv_heads, span_size, dim;
    const int32_t *spans; /* of the request */
    int64_t kv_head, end; /* end: keys that exist */
    float *values; /* a quantised cache: the values of the current block, [BLOCK][padded dim] */
};

/* Memory of the block that comes next. It is asked for a few lines at a time between the pieces of work on
 * the current block: all at once would fill the core's miss buffers and stall it. */
struct fetch {
    const char *chunk[4]; /* keys and values of 16 rows each; rows of a span are contiguous */
    int64_t chunks, bytes; /* bytes of a chunk */
    int64_t step;          /* bytes asked for at a time */
    int64_t at;            /* bytes of the last chunk that were asked for */
};
void aim(struct fetch *f, const struct cache_view *c, int64_t key);
INLINE void fetch_some(struct fetch *f) {
    for (int64_t i = 0; i < f->step && f->chunks > 0; i += 64) {
        __builtin_prefetch(f->chunk[f->chunks - 1] + f->at);
        f->at += 64;
        if (f->at < f->bytes) continue;
        f->at = 0;
        f->chunks--;
    }
}

/* Keys [first, first + count) of a block, transposed to [dim][BLOCK]; columns of absent keys are zero. From a
 * quantised cache the values of these keys are loaded too, to c->values. */
void load_keys(const struct cache_view *c, int64_t first, int64_t count, float *keys, struct fetch *f);

/* The value rows of 16 keys, or what is left of a span, from key `first` on: `panel` floats of dimension
 * `d` (a multiple of 32) on. Narrow heads are copied to `copy` [16][PANEL], whose other columns are zero. */
struct value_rows {
    const void *rows;
    int64_t row_bytes, dtype;
};
struct value_rows value_rows(const struct cache_view *c, int64_t first, int64_t count, int64_t d, float *copy);

#endif
