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
    const void *x;
    const void *panel;  /* `depth` steps, see `products` */
    const float *start; /* [PANEL]: what the chains start from, or NULL: they continue from `out` */
    float *out;         /* [rows][PANEL], ldo apart */
    int64_t ldo, depth;
    const char *ahead; /* weight tiles: memory to fetch meanwhile, ahead_step bytes for each step */
    int64_t ahead_step;
    int64_t row_bytes; /* value tiles */
};
typedef void (*tile_fn)(const struct tile *);

/* How a weight tile multiplies. A step takes one k, or with bf16 weights two of them: word i of a panel's step
 * holds column i of the even k in its low half and that of the odd k in its high half.
 *
 * F32, F16, BF16: x is fp32 and used as it is, [k][rows].
 * BF16_PAIRS: x is rounded to bf16, and the odd k of a step comes first; as fp32, [step][odd, even][rows].
 * BF16_DOT: the same numbers in the same order, by the instruction that multiplies such pairs; x is
 *     [step][rows] words like those of the panel. */
enum products { F32, BF16, F16, BF16_PAIRS, BF16_DOT, PRODUCTS };

/* [rows][products]; BF16_DOT may only be used where has_dot() says so */
extern const tile_fn weight_tiles[TILE_ROWS + 1][PRODUCTS];

/* Whether this CPU multiplies bf16 pairs by itself, and to the same bits as BF16_PAIRS. */
int has_dot(void);

/* [rows]: the same with an fp32 panel that is in cache already */
extern const tile_fn key_tiles[TILE_ROWS + 1];
/* [rows][dtype]: x is [rows][PANEL]; panel rows are in plain order, row_bytes apart */
extern const tile_fn value_tiles[TILE_ROWS + 1][3];

#endif
