/* Quantised rows of the paged cache: an integer code per value, a scale and a zero point per row.
 *
 * The block of one KV head of a span is the codes of its rows, [span_size][dim] int8 or [span_size][dim / 2]
 * bytes of two uint4 (lower dimension in the low nibble), then the rows' scales [span_size] and zeros
 * [span_size] as floats. A value is (code - zero) * scale. dim is a multiple of 16, so everything is aligned to
 * its size. The formulas are in kv_format.py. */
#ifndef ALLSPARK_KV_QUANT_H
#define ALLSPARK_KV_QUANT_H

#include "vec.h"

/* Kinds of cache beyond the dtypes of vec.h; the numbers are part of the binding. */
enum { KV_INT8 = 16, KV_UINT4 = 17 };

INLINE int is_quantised(int64_t kind) { return kind >= KV_INT8; }
INLINE int64_t code_bytes(int64_t kind, int64_t dim) { return kind == KV_UINT4 ? dim / 2 : dim; }
INLINE int64_t block_bytes(int64_t kind, int64_t dim, int64_t span_size) {
    return span_size * (code_bytes(kind, dim) + 2 * (int64_t)sizeof(float));
}
INLINE float *block_scales(const void *block, int64_t kind, int64_t dim, int64_t span_size) {
    return (float *)((char *)block + span_size * code_bytes(kind, dim));
}

/* Writes x[dim] to row `offset` of a block. */
void store_quantised(void *block, int64_t kind, int64_t offset, int64_t span_size, const float *x, int64_t dim);

/* 16 rows of a block from row `offset` on, of which `count` exist, as columns: to[dim][stride]. Columns of
 * absent rows are zero whatever the memory holds. */
void load_quantised_columns(const void *block, int64_t kind, int64_t offset, int64_t span_size, int64_t count,
                            int64_t dim, float *to, int64_t stride);

/* `count` rows from row `offset` on: to[count][stride], zero from dim on. */
void load_quantised_rows(const void *block, int64_t kind, int64_t offset, int64_t span_size, int64_t count,
                         int64_t dim, float *to, int64_t stride);

#endif
