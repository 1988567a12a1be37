/* A weight [N, K] laid out for the kernels: panels of 32 output columns, each [K][32], in the element
 * order that load_row() expects. Columns beyond N are zero and never stored to an output. */
#ifndef ALLSPARK_LINEAR_H
#define ALLSPARK_LINEAR_H

#include "tile.h"

struct linear {
    int64_t n, k;
    int64_t dtype;
    char *panels;
    const float *bias; /* [n] or NULL */
};

INLINE int64_t panel_count(const struct linear *w) { return (w->n + PANEL - 1) / PANEL; }
INLINE int64_t panel_bytes(const struct linear *w) { return PANEL * w->k * dtype_bytes((int)w->dtype); }

#endif
