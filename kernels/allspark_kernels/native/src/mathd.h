/* log and exp in double precision, without a math library whose bits might differ elsewhere; relative
 * errors stay below 4e-16 over the ranges in use, see tests. */
#ifndef ALLSPARK_MATHD_H
#define ALLSPARK_MATHD_H

#include "vec.h"

#define LN2_HIGH 0x1.62e42fefa0000p-1 /* ends in 17 zero bits: exact times an exponent */
#define LN2_LOW 0x1.cf79abc9e3b3ap-40

INLINE double dfma(double a, double b, double c) { return __builtin_fma(a, b, c); }

/* Natural logarithm of a positive normal number: x = 2^e m with m in [0.70, 1.42), and
 * log m = 2 artanh(s) = 2 (s + s^3/3 + s^5/5 + ...) with s = (m - 1) / (m + 1), |s| < 0.1727. */
INLINE double dlog(double x) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    int64_t e = (int64_t)(bits - 0x3fe6a00000000000u) >> 52;
    bits -= (uint64_t)e << 52;
    double m;
    memcpy(&m, &bits, sizeof m);
    double s = (m - 1.0) / (m + 1.0), z = s * s;
    double p = 1.0 / 21;
    UNROLL for (int k = 19; k >= 3; k -= 2) p = dfma(p, z, 1.0 / k);
    double tail = 2.0 * s * z * p; /* log m = 2 s + tail; 2 s alone carries the rounding error */
    return dfma((double)e, LN2_HIGH, dfma((double)e, LN2_LOW, tail) + 2.0 * s);
}

typedef double vd __attribute__((ext_vector_type(8)));
typedef int64_t vl __attribute__((ext_vector_type(8)));

/* e^x for x <= 0; 0 below -700, for -inf and for NaN. Taylor series to degree 13 on |r| <= ln 2 / 2. */
INLINE vd dexp8(vd x) {
    static const double inverse_factorial[14] = {1.0, 1.0, 1.0 / 2, 1.0 / 6, 1.0 / 24, 1.0 / 120, 1.0 / 720,
        1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600,
        1.0 / 6227020800.0};
    vl normal = x >= -700.0;
    vd y = normal ? x : (vd)0.0, magic = (vd)0x1.8p52;
    vd n = (y * 0x1.71547652b82fep0 + magic) - magic;
    vd r = __builtin_elementwise_fma(n, (vd)-LN2_LOW, __builtin_elementwise_fma(n, (vd)-LN2_HIGH, y));
    vd p = (vd)inverse_factorial[13];
    UNROLL for (int k = 12; k >= 0; k--) p = __builtin_elementwise_fma(p, r, (vd)inverse_factorial[k]);
    vl bits = (__builtin_convertvector(n, vl) + 1023) << 52;
    vd scale;
    memcpy(&scale, &bits, sizeof scale);
    return normal ? p * scale : (vd)0.0;
}
INLINE double dexp(double x) { return dexp8((vd)x)[0]; }

#endif
