/* The elementary functions by number, so that tests can measure their errors; nothing else calls this. */
#include "mathd.h"
#include "mathv.h"
#include "pool.h"

/* 0: exp2, 1: exp, 2: tanh (float); x and out [n] */
EXPORT void ask_evaluate_float(int64_t function, const float *x, float *out, int64_t n) {
    uint64_t saved = denormals_off();
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = vload_n(x + i, n - i, 0.0f);
        vstore_n(out + i, function == 2 ? vtanh(v) : function ? vexp(v) : vexp2(v), n - i);
    }
    denormals_restore(saved);
}

/* 0: log, 1: exp (double) */
EXPORT void ask_evaluate_double(int64_t function, const double *x, double *out, int64_t n) {
    for (int64_t i = 0; i < n; i++) out[i] = function ? dexp(x[i]) : dlog(x[i]);
}
