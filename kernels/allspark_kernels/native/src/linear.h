/* A weight [N, K] laid out for the kernels: panels of 32 output columns, each a row of steps (see `products`):
 * one k, or with bf16 two of them. Columns beyond N and a k beyond K are zero. */
#ifndef ALLSPARK_LINEAR_H
#define ALLSPARK_LINEAR_H

#include "tile.h"

struct linear {
    int64_t n, k;
    int64_t dtype;
    char *panels;
    const float *bias;     /* [n] or NULL */
    int64_t rounds_inputs; /* x is rounded to dtype before it is multiplied */
};

INLINE int64_t panel_count(const struct linear *w) { return (w->n + PANEL - 1) / PANEL; }
INLINE int64_t panel_steps(const struct linear *w) { return w->dtype == DT_BF16 ? (w->k + 1) / 2 : w->k; }
INLINE int64_t step_bytes(const struct linear *w) { return w->dtype == DT_F16 ? 2 * PANEL : 4 * PANEL; }
INLINE int64_t panel_bytes(const struct linear *w) { return panel_steps(w) * step_bytes(w); }

#endif
