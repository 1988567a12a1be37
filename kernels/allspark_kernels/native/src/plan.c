/* Cutting a step into work items for the pool. How it is cut changes no bit of a result. */
#include <stdlib.h>

#include "attention.h"
#include "pool.h"

struct load {
    int64_t cost;
    int32_t request;
};

static int heavier_first(const void *a, const void *b) {
    const struct load *x = a, *y = b;
    if (x->cost != y->cost) return x->cost < y->cost ? 1 : -1;
    return x->request < y->request ? -1 : 1;
}

static int64_t rows_per_item(const struct step *s) {
    int64_t heads = group_heads(s);
    int64_t tile = heads < TILE_ROWS ? TILE_ROWS / heads : 1; /* rows of a register tile */
    int64_t tiles = MAX_VECTORS / (tile * heads);
    return tile * (tiles < 1 ? 1 : tiles);
}

static int64_t group_count(const struct step *s) {
    int64_t groups = 0, rows = rows_per_item(s);
    for (int64_t r = 0; r < s->requests; r++)
        if (s->kv_lens[r]) groups += (s->q_lens[r] + rows - 1) / rows;
    return groups * s->kv_heads;
}

static int64_t split_count(const struct step *s, int64_t request, int64_t row_end) {
    int64_t keys = s->kv_lens[request] - s->q_lens[request] + row_end;
    return keys <= SPLIT ? 1 : (keys + SPLIT - 1) / SPLIT;
}

/* Splits run apart only where whole rows would leave threads without work. */
static int is_apart(const struct step *s) {
    if (pool_threads() == 1 || group_count(s) >= 2 * pool_threads()) return 0;
    for (int64_t r = 0; r < s->requests; r++)
        if (s->kv_lens[r] > SPLIT) return 1;
    return 0;
}

/* Items of one request, its last (longest) rows first; counts them if `items` is NULL. */
static int64_t add_request(const struct step *s, int32_t request, int apart, struct item *items) {
    int64_t count = 0, step = rows_per_item(s), q_len = s->kv_lens[request] ? s->q_lens[request] : 0;
    for (int64_t row = (q_len - 1) / step * step; row >= 0; row -= step)
        for (int32_t head = 0; head < s->kv_heads; head++) {
            int64_t rows = q_len - row < step ? q_len - row : step;
            int32_t splits = (int32_t)split_count(s, request, row + rows);
            for (int32_t i = 0; i < (apart ? splits : 1); i++, count++)
                if (items) items[count] = (struct item){request, head, (int32_t)row, (int32_t)rows, i, splits};
        }
    return count;
}

static int64_t live_tokens(const struct step *s) {
    int64_t requests = s->requests;
    while (requests > 0 && s->kv_lens[requests - 1] == 0) requests--;
    return s->cu_q[requests];
}

/* Writes the items of a step to s->items, heaviest requests first, or only counts them if that is NULL; sets
 * state_floats to 0, or to the size of the state that each item needs, and live. Returns the number of items,
 * -1 without memory. */
EXPORT int64_t ask_attention_plan(struct step *s) {
    int apart = is_apart(s);
    s->state_floats = apart ? state_size(s, rows_per_item(s) * group_heads(s)) : 0;
    s->live = live_tokens(s);
    struct load *loads = malloc((size_t)s->requests * sizeof *loads);
    if (!loads) return -1;
    for (int64_t r = 0; r < s->requests; r++)
        loads[r] = (struct load){(int64_t)s->q_lens[r] * s->kv_lens[r], (int32_t)r};
    qsort(loads, (size_t)s->requests, sizeof *loads, heavier_first);
    int64_t count = 0;
    for (int64_t r = 0; r < s->requests; r++)
        count += add_request(s, loads[r].request, apart, s->items ? s->items + count : NULL);
    free(loads);
    return count;
}
