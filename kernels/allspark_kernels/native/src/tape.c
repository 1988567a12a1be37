/* A recorded step: the calls of one forward pass, run again in one call. Between two kernels of a decode
 * step an interpreter with cold caches takes longer than many of the kernels. */
#include "ops.h"
#include "vec.h"

/* Functions of the binding; the numbers are mirrored there. */
enum { CALL_LINEAR, CALL_RMS_NORM, CALL_SILU_MUL, CALL_ROTARY, CALL_ATTENTION, CALL_GELU_MUL, CALL_SOFT_CAP,
       CALL_ROUTE, CALL_GROUPED, CALL_COMBINE, CALL_QLINEAR };

/* Integers and addresses in the order of the function's arguments; a float argument leaves a gap, and the floats
 * follow in their own order. */
struct call {
    int64_t function;
    int64_t rows_per_token; /* 0: `a` holds the number of rows; else rows = this times the live tokens */
    int64_t a[20];
    double f[2];
};

#define ROWS(i) (each ? each * live : a[i])
#define P(i) ((void *)c->a[i])

static int run_call(const struct call *c, int64_t live) {
    int64_t each = c->rows_per_token;
    const int64_t *a = c->a;
    switch (c->function) {
    case CALL_LINEAR: return ask_linear(P(0), P(1), each ? each * live : a[2], P(3));
    case CALL_RMS_NORM:
        ask_rms_norm(P(0), a[1], P(2), P(3), (float)c->f[0], P(5), each ? each * live : a[6], a[7]);
        return 0;
    case CALL_SILU_MUL: ask_silu_mul(P(0), P(1), each ? each * live : a[2], a[3]); return 0;
    case CALL_ROTARY:
        return ask_rotary_kv_write(P(0), P(1), P(2), a[3], a[4], a[5], P(6), a[7], P(8), P(9), P(10), P(11), a[12],
                                   a[13], each ? each * live : a[14], a[15], a[16], a[17], a[18], a[19]);
    case CALL_ATTENTION:
        return attend_live(P(0), P(1), a[2], P(3), P(4), a[5], (float)c->f[0], P(7), a[8], (float)c->f[1]);
    case CALL_GELU_MUL: ask_gelu_mul(P(0), P(1), ROWS(2), a[3]); return 0;
    case CALL_SOFT_CAP: ask_soft_cap(P(0), ROWS(1), a[2], (float)c->f[0]); return 0;
    case CALL_ROUTE: ask_route_experts(P(0), ROWS(1), a[2], a[3], a[4], P(5), P(6), P(7), P(8)); return 0;
    case CALL_GROUPED:
        return ask_grouped_linear(P(0), a[1], P(2), P(3), P(4), a[5], ROWS(6), a[7], P(8), P(9), P(10), a[11]);
    case CALL_QLINEAR: return ask_qlinear(P(0), P(1), ROWS(2), P(3));
    default: ask_combine_experts(P(0), P(1), P(2), P(3), P(4), ROWS(5), a[6], a[7]); return 0;
    }
}

/* Runs the calls in order; `live` is the number of tokens that are no padding. Returns the first status
 * other than 0. */
EXPORT int ask_tape_run(const struct call *calls, int64_t count, const int64_t *live) {
    int status = 0;
    for (int64_t i = 0; i < count && !status; i++) status = run_call(&calls[i], *live);
    return status;
}
