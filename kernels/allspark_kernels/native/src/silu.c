/* Gated activations, out = gate / (1 + e^-s(gate)) * up. SwiGLU: s(g) = g. GeGLU with the approximation by tanh:
 * 0.5 (1 + tanh(z)) = 1 / (1 + e^(-2 z)), hence s(g) = 2 sqrt(2 / pi) (g + 0.044715 g^3). And soft caps. */
#include "mathv.h"
#include "ops.h"
#include "pool.h"

enum { PARALLEL_ELEMENTS = 1 << 14, ITEM_ELEMENTS = 1 << 12 };

struct job {
    const float *gate_up;
    float *out;
    int64_t rows, width, columns; /* columns of one item */
    int is_gelu;
};

static void silu_item(void *context, int64_t item) {
    const struct job *j = context;
    int64_t per_row = (j->width + j->columns - 1) / j->columns;
    int64_t row = item / per_row, first = item % per_row * j->columns;
    int64_t end = first + j->columns < j->width ? first + j->columns : j->width;
    const float *gate = j->gate_up + row * 2 * j->width, *up = gate + j->width;
    float *out = j->out + row * j->width;
    for (int64_t i = first; i < end; i += LANES) {
        int64_t n = end - i;
        vf g = vload_n(gate + i, n, 0.0f), u = vload_n(up + i, n, 0.0f);
        vf s = g;
        if (j->is_gelu) s = vset(0x1.988454p+0f) * vfma(g * g * g, vset(0.044715f), g);
        vstore_n(out + i, g / (vset(1.0f) + vexp(-s)) * u, n);
    }
}

static void gated(const float *gate_up, float *out, int64_t rows, int64_t width, int is_gelu) {
    uint64_t saved = denormals_off();
    struct job j = {gate_up, out, rows, width, width < ITEM_ELEMENTS ? width : ITEM_ELEMENTS, is_gelu};
    int64_t items = rows * ((width + j.columns - 1) / j.columns);
    if (rows * width >= PARALLEL_ELEMENTS) pool_run(silu_item, &j, items);
    else for (int64_t i = 0; i < items; i++) silu_item(&j, i);
    denormals_restore(saved);
}

EXPORT void ask_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width) {
    gated(gate_up, out, rows, width, 0);
}
EXPORT void ask_gelu_mul(const float *gate_up, float *out, int64_t rows, int64_t width) {
    gated(gate_up, out, rows, width, 1);
}

struct capping {
    float *x;
    int64_t size;
    float cap;
};

static void cap_item(void *context, int64_t item) {
    const struct capping *c = context;
    int64_t first = item * ITEM_ELEMENTS, end = first + ITEM_ELEMENTS < c->size ? first + ITEM_ELEMENTS : c->size;
    for (int64_t i = first; i < end; i += LANES) {
        vf x = vload_n(c->x + i, end - i, 0.0f);
        vstore_n(c->x + i, vset(c->cap) * vtanh(x / vset(c->cap)), end - i);
    }
}

EXPORT void ask_soft_cap(float *x, int64_t rows, int64_t width, float cap) {
    uint64_t saved = denormals_off();
    struct capping c = {x, rows * width, cap};
    if (c.size > 0) pool_run(cap_item, &c, (c.size + ITEM_ELEMENTS - 1) / ITEM_ELEMENTS);
    denormals_restore(saved);
}
