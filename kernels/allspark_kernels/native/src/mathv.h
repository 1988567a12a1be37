/* exp2, exp and log on 16 lanes, without a math library whose bits might differ elsewhere.
 *
 * 2^f for |f| <= 1/2 is a polynomial of degree 6, fitted for smallest relative error (2^-29 before
 * rounding); the integer part goes into the exponent. Largest errors found over the ranges in use: 0.94
 * units in the last place for exp2, 1.13 for exp (a test repeats the search).
 */
#ifndef ALLSPARK_MATHV_H
#define ALLSPARK_MATHV_H

#include "vec.h"

#define LOG2E 1.44269504f
#define LOG2E_LOW 1.925963033e-8f /* log2(e) - (float)log2(e) */
#define MINUS_INF (-__builtin_inff())

/* 2^n * 2^f for integral n in [-126, 127] and |f| <= 1/2 */
INLINE vf exp2_parts(vf n, vf f) {
    vf p = vset(0x1.41d332p-13f);
    p = vfma(p, f, vset(0x1.5f456ap-10f));
    p = vfma(p, f, vset(0x1.3b2dbcp-7f));
    p = vfma(p, f, vset(0x1.c6aed4p-5f));
    p = vfma(p, f, vset(0x1.ebfbdap-3f));
    p = vfma(p, f, vset(0x1.62e430p-1f));
    p = vfma(p, f, vset(1.0f));
    vi exponent = __builtin_convertvector(n, vi) + 127;
    return p * as_vf((vu)exponent << 23);
}

/* nearest integer, ties to even, for |x| < 2^22 */
INLINE vf vround(vf x) {
    vf magic = vset(0x1.8p23f);
    return (x + magic) - magic;
}

/* 2^x for x <= 0; exactly 0 below 2^-125, so also for -inf; NaN gives NaN */
INLINE vf vexp2(vf x) {
    vi tiny = x < vset(-125.0f);
    vf y = vselect(tiny, vset(0.0f), x);
    vf n = vround(y);
    return vselect(tiny, vset(0.0f), exp2_parts(vselect(y == y, n, vset(0.0f)), y - n));
}
INLINE float sexp2(float x) { return vexp2(vset(x))[0]; }

/* e^x with x taken as at least -87 and at most 88; NaN gives NaN */
INLINE vf vexp(vf x) {
    x = vselect(x < vset(-87.0f), vset(-87.0f), x);
    x = vselect(x > vset(88.0f), vset(88.0f), x);
    vf n = vround(x * vset(LOG2E));
    vf f = vfma(x, vset(LOG2E_LOW), vfma(x, vset(LOG2E), -n));
    return exp2_parts(vselect(x == x, n, vset(0.0f)), f);
}

/* tanh x = (1 - e) / (1 + e) with e = e^(-2 |x|) and the sign of x; near 0, where 1 - e cancels, its Taylor
 * series. NaN gives NaN. */
INLINE vf vtanh(vf x) {
    vf size = vselect(x < vset(0.0f), -x, x), e = vexp(vset(-2.0f) * size), z = x * x;
    vf large = (vset(1.0f) - e) / (vset(1.0f) + e);
    vf p = vfma(vset(-17.0f / 315), z, vset(2.0f / 15));
    p = vfma(vfma(p, z, vset(-1.0f / 3)), z * x, x);
    return vselect(size < vset(0.2f), p, vselect(x < vset(0.0f), -large, large));
}

#endif
