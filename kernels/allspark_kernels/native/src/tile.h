/* The one inner loop of linear layers and attention: out[R, 32] (+)= x[R, K] * panel[K, 32].
 *
 * Every element is one chain of fused multiply-adds in the order of k. How many rows share a tile, and
 * where a chain is parked in `out` and taken up again (fp32, exact), changes no bit of it. */
#ifndef ALLSPARK_TILE_H
#define ALLSPARK_TILE_H

#include "vec.h"

enum { PANEL = 32 }; /* columns of a panel: two vectors */

/* Rows that keep their accumulators in registers; lower tiles exist for every height. */
#if defined(__AVX512F__)
enum { TILE_ROWS = 12 };
#else
enum { TILE_ROWS = 6 }; /* 16 registers of half the width */
#endif

struct tile {
    const float *x;
    const void *panel;  /* [depth][PANEL] */
    const float *start; /* [PANEL]: what the chains start from, or NULL: they continue from `out` */
    float *out;         /* [rows][PANEL], ldo apart */
    int64_t ldo, depth;
    const char *ahead; /* weight tiles: memory to fetch meanwhile, ahead_step bytes for each k */
    int64_t ahead_step;
    int64_t row_bytes; /* value tiles */
};
typedef void (*tile_fn)(const struct tile *);

/* [rows][dtype]: x is [depth][rows]; a bf16 panel row is paired (see load_row) */
extern const tile_fn weight_tiles[TILE_ROWS + 1][3];
/* [rows]: the same with an fp32 panel that is in cache already */
extern const tile_fn key_tiles[TILE_ROWS + 1];
/* [rows][dtype]: x is [rows][PANEL]; panel rows are in plain order, row_bytes apart */
extern const tile_fn value_tiles[TILE_ROWS + 1][3];

/* Row k of a panel as its two vectors. bf16: word i holds column i in its low and column i + 16 in its
 * high half, so that one shift and one mask widen the row. */
INLINE void load_row(const void *panel, int64_t k, int dtype, vf out[2]) {
    if (dtype == DT_BF16) {
        vu pair = vloadu((const char *)panel + k * PANEL * 2);
        out[0] = as_vf(pair << 16);
        out[1] = as_vf(pair & 0xffff0000u);
    } else {
        out[0] = vload_as(panel, k * PANEL, dtype);
        out[1] = vload_as(panel, k * PANEL + LANES, dtype);
    }
}

#endif
