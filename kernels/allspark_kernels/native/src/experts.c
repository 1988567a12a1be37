/* Mixture of experts: routing, the products of each token's experts, their weighted sum. */
#include "linear.h"
#include "mathv.h"
#include "ops.h"
#include "pool.h"

enum { PARALLEL_ELEMENTS = 1 << 15, MAX_EXPERTS = 1024 /* checked by the binding */ };

/* x[0..n) becomes e^(x - max x); returns their sum, whose order is fixed by n. NaN counts as minus infinity. */
static float exponentials(float *x, int64_t n) {
    vf top = vset(MINUS_INF), sum = vset(0.0f);
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = vload_n(x + i, n - i, MINUS_INF);
        v = vselect(v == v, v, vset(MINUS_INF));
        top = vmax(v, top);
        vstore_n(x + i, v, n - i);
    }
    float largest = vhmax(top);
    if (largest == MINUS_INF) largest = 0.0f;
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = vload_n(x + i, n - i, MINUS_INF);
        v = vselect(v == vset(MINUS_INF), vset(0.0f), vexp(v - vset(largest)));
        sum = sum + v;
        vstore_n(x + i, v, n - i);
    }
    return vsum(sum);
}

/* The index of the largest value, the first of equals; it is then marked as taken. */
static int32_t take_best(const float *value, char *taken, int64_t n) {
    int32_t best = -1;
    for (int64_t i = 0; i < n; i++)
        if (!taken[i] && (best < 0 || value[i] > value[best])) best = (int32_t)i;
    taken[best] = 1;
    return best;
}

static void route_row(const float *logits, int64_t experts, int64_t top_k, int64_t is_normalised, int32_t *ids,
                      float *weights) {
    float order[MAX_EXPERTS], value[MAX_EXPERTS];
    char taken[MAX_EXPERTS] = {0};
    memcpy(value, logits, (size_t)experts * sizeof(float));
    float sum = exponentials(value, experts), chosen = 0.0f;
    /* logits decide the order: distinct ones may have equal exponentials */
    for (int64_t i = 0; i < experts; i++) order[i] = logits[i] == logits[i] ? logits[i] : MINUS_INF;
    for (int64_t j = 0; j < top_k; j++) {
        ids[j] = take_best(order, taken, experts);
        weights[j] = value[ids[j]] / sum;
        chosen += weights[j];
    }
    if (is_normalised)
        for (int64_t j = 0; j < top_k; j++) weights[j] = weights[j] / chosen;
}

/* order: the pairs (token * top_k + j), those of expert e at [starts[e], starts[e + 1]) */
static void sort_pairs(const int32_t *ids, int64_t pairs, int64_t experts, int32_t *order, int32_t *starts) {
    memset(starts, 0, (size_t)(experts + 1) * sizeof(int32_t));
    for (int64_t p = 0; p < pairs; p++) starts[ids[p]]++;
    int32_t end = 0;
    for (int64_t e = 0; e < experts; e++) starts[e] = end += starts[e];
    starts[experts] = end;
    for (int64_t p = pairs - 1; p >= 0; p--) order[--starts[ids[p]]] = (int32_t)p;
}

EXPORT void ask_route_experts(const float *logits, int64_t rows, int64_t experts, int64_t top_k,
                              int64_t is_normalised, int32_t *ids, float *weights, int32_t *order,
                              int32_t *starts) {
    uint64_t saved = denormals_off();
    for (int64_t r = 0; r < rows; r++)
        route_row(logits + r * experts, experts, top_k, is_normalised, ids + r * top_k, weights + r * top_k);
    sort_pairs(ids, rows * top_k, experts, order, starts);
    denormals_restore(saved);
}

/* Where pair p finds its activations and leaves its result. */
struct pairs {
    const float *x;
    int64_t each_own; /* 1: every pair has a row of x, 0: those of a token share one */
    int64_t top_k, k, n;
    float *out;
};

static const float *input_of(const struct pairs *p, int32_t pair) {
    return p->x + (p->each_own ? pair : pair / p->top_k) * p->k;
}

/* `w` is a struct qlinear or a struct linear. */
static int multiply(const void *w, int is_quantised, const float *x, int64_t rows, float *out) {
    return is_quantised ? ask_qlinear(w, x, rows, out) : ask_linear(w, x, rows, out);
}

/* Every pair of one expert, `order[0..count)`: rows are gathered, multiplied together and scattered. */
static int run_expert(const void *w, int is_quantised, const struct pairs *p, const int32_t *order, int64_t count,
                      float *rows, float *results) {
    if (count == 1) return multiply(w, is_quantised, input_of(p, *order), 1, p->out + *order * p->n);
    for (int64_t i = 0; i < count; i++)
        memcpy(rows + i * p->k, input_of(p, order[i]), (size_t)p->k * sizeof(float));
    if (multiply(w, is_quantised, rows, count, results)) return 1;
    for (int64_t i = 0; i < count; i++)
        memcpy(p->out + order[i] * p->n, results + i * p->n, (size_t)p->n * sizeof(float));
    return 0;
}

/* `experts`: one weight each, all [n, k], all quantised or none. rows [tokens * top_k, k] and results [tokens * top_k, n] are scratch
 * memory. A row's chain is that of ask_linear, hence independent of how many rows its expert got. */
EXPORT int ask_grouped_linear(const void *const *experts, int64_t num_experts, const int32_t *order,
                              const int32_t *starts, const float *x, int64_t each_own, int64_t tokens,
                              int64_t top_k, float *rows, float *results, float *out, int64_t is_quantised) {
    if (tokens <= 0) return 0;
    const int64_t *size = experts[0]; /* both kinds begin with n and k */
    struct pairs p = {x, each_own, top_k, size[1], size[0], out};
    for (int64_t e = 0; e < num_experts; e++) {
        int64_t count = starts[e + 1] - starts[e];
        if (count && run_expert(experts[e], (int)is_quantised, &p, order + starts[e], count, rows, results)) return 1;
    }
    return 0;
}

struct sum {
    const float *parts, *weights, *shared, *gate;
    float *out;
    int64_t top_k, width;
};

static void combine_row(void *context, int64_t row) {
    const struct sum *s = context;
    const float *parts = s->parts + row * s->top_k * s->width, *weights = s->weights + row * s->top_k;
    vf gate = vset(1.0f);
    if (s->gate) gate = vset(1.0f) / (vset(1.0f) + vexp(vset(-s->gate[row])));
    for (int64_t i = 0; i < s->width; i += LANES) {
        int64_t n = s->width - i;
        vf total = vset(0.0f);
        for (int64_t j = 0; j < s->top_k; j++)
            total = vfma(vload_n(parts + j * s->width + i, n, 0.0f), vset(weights[j]), total);
        if (s->shared) total = vfma(vload_n(s->shared + row * s->width + i, n, 0.0f), gate, total);
        vstore_n(s->out + row * s->width + i, total, n);
    }
}

/* parts [rows, top_k, width], weights [rows, top_k], shared [rows, width] or NULL, gate [rows] or NULL */
EXPORT void ask_combine_experts(const float *parts, const float *weights, const float *shared, const float *gate,
                                float *out, int64_t rows, int64_t top_k, int64_t width) {
    uint64_t saved = denormals_off();
    struct sum s = {parts, weights, shared, gate, out, top_k, width};
    if (rows * top_k * width >= PARALLEL_ELEMENTS) pool_run(combine_row, &s, rows);
    else for (int64_t r = 0; r < rows; r++) combine_row(&s, r);
    denormals_restore(saved);
}
