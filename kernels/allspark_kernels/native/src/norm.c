/* Root mean square normalisation, with or without adding to the residual stream first. */
#include "ops.h"
#include "pool.h"
#include "vec.h"

enum { PARALLEL_ELEMENTS = 1 << 15, CHAINS = 4 };

struct job {
    const float *x;
    float *residual; /* NULL: none */
    const float *weight;
    float *out;
    int64_t rows, width, ldx, rows_per_item;
    float eps;
};

/* Sum of squares: vector i of the row goes to chain i mod 4; then chains, then lanes, in a fixed tree. */
static float square_sum(const float *x, int64_t width) {
    vf sum[CHAINS] = {0};
    int64_t i = 0;
    for (; i + CHAINS * LANES <= width; i += CHAINS * LANES)
        UNROLL for (int c = 0; c < CHAINS; c++) {
            vf v = vload(x + i + c * LANES);
            sum[c] = vfma(v, v, sum[c]);
        }
    for (int c = 0; i < width; i += LANES, c++) {
        vf v = vload_n(x + i, width - i, 0.0f);
        sum[c] = vfma(v, v, sum[c]);
    }
    return vsum((sum[0] + sum[1]) + (sum[2] + sum[3]));
}

static void norm_row(const struct job *j, int64_t row) {
    int64_t width = j->width;
    const float *x = j->x + row * j->ldx;
    float *out = j->out + row * width;
    if (j->residual) {
        float *residual = j->residual + row * width;
        for (int64_t i = 0; i < width; i += LANES) {
            int64_t n = width - i;
            vstore_n(residual + i, vload_n(residual + i, n, 0.0f) + vload_n(x + i, n, 0.0f), n);
        }
        x = residual;
    }
    float mean = square_sum(x, width) / (float)width;
    vf scale = vset(1.0f / __builtin_sqrtf(mean + j->eps));
    for (int64_t i = 0; i < width; i += LANES) {
        int64_t n = width - i;
        vstore_n(out + i, vload_n(x + i, n, 0.0f) * scale * vload_n(j->weight + i, n, 0.0f), n);
    }
}

static void norm_item(void *context, int64_t item) {
    const struct job *j = context;
    int64_t end = (item + 1) * j->rows_per_item;
    for (int64_t row = item * j->rows_per_item; row < end && row < j->rows; row++) norm_row(j, row);
}

EXPORT void ask_rms_norm(const float *x, int64_t ldx, float *residual, const float *weight, float eps, float *out,
                         int64_t rows, int64_t width) {
    uint64_t saved = denormals_off();
    struct job j = {x, residual, weight, out, rows, width, ldx, 1 + PARALLEL_ELEMENTS / 4 / width, eps};
    if (rows * width < PARALLEL_ELEMENTS) j.rows_per_item = rows;
    if (rows > 0) pool_run(norm_item, &j, (rows + j.rows_per_item - 1) / j.rows_per_item);
    denormals_restore(saved);
}
