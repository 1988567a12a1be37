/* SwiGLU: out = gate / (1 + e^-gate) * up. */
#include "mathv.h"
#include "ops.h"
#include "pool.h"

enum { PARALLEL_ELEMENTS = 1 << 14, ITEM_ELEMENTS = 1 << 12 };

struct job {
    const float *gate_up;
    float *out;
    int64_t rows, width, columns; /* columns of one item */
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
        vstore_n(out + i, g / (vset(1.0f) + vexp(-g)) * u, n);
    }
}

EXPORT void ask_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width) {
    uint64_t saved = denormals_off();
    struct job j = {gate_up, out, rows, width, width < ITEM_ELEMENTS ? width : ITEM_ELEMENTS};
    int64_t items = rows * ((width + j.columns - 1) / j.columns);
    if (rows * width >= PARALLEL_ELEMENTS) pool_run(silu_item, &j, items);
    else for (int64_t i = 0; i < items; i++) silu_item(&j, i);
    denormals_restore(saved);
}
