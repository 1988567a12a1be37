/* Logical vectors of 16 fp32 lanes, the same on every instruction set.
 *
 * AVX-512 holds one in a register, AVX2 and NEON split it; lanes never mix except in the reductions
 * below, whose order is written out. Contraction is off (-ffp-contract=off): a multiply-add is fused
 * only where vfma() says so. Hence every build of these sources returns the same bits. */
#ifndef ALLSPARK_VEC_H
#define ALLSPARK_VEC_H

#include <stdint.h>
#include <string.h>

#define LANES 16
#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)")
#define EXPORT __attribute__((visibility("default")))

typedef float vf __attribute__((ext_vector_type(16)));
typedef int32_t vi __attribute__((ext_vector_type(16)));
typedef uint32_t vu __attribute__((ext_vector_type(16)));
typedef uint16_t vh __attribute__((ext_vector_type(16)));
typedef _Float16 vhf __attribute__((ext_vector_type(16)));

/* Element types of weights and caches; the numbers are part of the binding. */
enum dtype { DT_F32 = 0, DT_BF16 = 1, DT_F16 = 2 };

INLINE int64_t dtype_bytes(int dtype) { return dtype == DT_F32 ? 4 : 2; }

INLINE vf vset(float x) { return (vf){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vu vsetu(uint32_t x) { return (vu){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vi vseti(int32_t x) { return (vi){x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x}; }
INLINE vi viota(void) { return (vi){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }

INLINE vf vload(const float *p) { vf v; memcpy(&v, p, sizeof v); return v; }
INLINE void vstore(float *p, vf v) { memcpy(p, &v, sizeof v); }
INLINE vu vloadu(const void *p) { vu v; memcpy(&v, p, sizeof v); return v; }
INLINE vf vfma(vf a, vf b, vf c) { return __builtin_elementwise_fma(a, b, c); }
INLINE float sfma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

INLINE vf as_vf(vu v) { vf r; memcpy(&r, &v, sizeof r); return r; }
INLINE vu as_vu(vf v) { vu r; memcpy(&r, &v, sizeof r); return r; }

/* mask lanes are all ones or all zeros, as vector comparisons give them */
INLINE vf vselect(vi mask, vf yes, vf no) { return mask ? yes : no; }
/* NaN in b is kept, NaN in a is dropped (the operand order of the x86 instruction) */
INLINE vf vmax(vf a, vf b) { return a > b ? a : b; }
INLINE vf vmin(vf a, vf b) { return a < b ? a : b; }

/* first n (0..16) floats, the rest is `fill`; reads nothing behind them */
INLINE vf vload_n(const float *p, int64_t n, float fill) {
    if (n >= LANES) return vload(p);
    vf v = vset(fill);
    if (n > 0) memcpy(&v, p, (size_t)n * sizeof(float));
    return v;
}
INLINE void vstore_n(float *p, vf v, int64_t n) {
    if (n >= LANES) vstore(p, v);
    else if (n > 0) memcpy(p, &v, (size_t)n * sizeof(float));
}

/* Reductions over the lanes in one fixed tree: i with i+8, then +4, +2, +1. */
INLINE float vsum(vf v) {
    float a[LANES];
    vstore(a, v);
    UNROLL for (int w = 8; w >= 1; w /= 2)
        UNROLL for (int i = 0; i < w; i++) a[i] = a[i] + a[i + w];
    return a[0];
}
INLINE float vhmax(vf v) {
    float a[LANES];
    vstore(a, v);
    UNROLL for (int w = 8; w >= 1; w /= 2)
        UNROLL for (int i = 0; i < w; i++) a[i] = a[i] > a[i + w] ? a[i] : a[i + w];
    return a[0];
}

/* 16 x 16 transposition, in four rounds that each exchange blocks of half the size */
INLINE void transpose16(vu v[16]) {
    UNROLL for (int i = 0; i < 8; i++) {
        vu a = v[i], b = v[i + 8];
        v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
        v[i + 8] = __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
    UNROLL for (int j = 0; j < 16; j += 8) UNROLL for (int i = j; i < j + 4; i++) {
        vu a = v[i], b = v[i + 4];
        v[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
        v[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
    UNROLL for (int j = 0; j < 16; j += 4) UNROLL for (int i = j; i < j + 2; i++) {
        vu a = v[i], b = v[i + 2];
        v[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
        v[i + 2] = __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    UNROLL for (int i = 0; i < 16; i += 2) {
        vu a = v[i], b = v[i + 1];
        v[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
        v[i + 1] = __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
}

INLINE float bf16_to_f32(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
INLINE float f16_to_f32(uint16_t h) { _Float16 f; memcpy(&f, &h, sizeof f); return (float)f; }

/* 16 consecutive elements of any storage type, widened exactly */
INLINE vf vload_bf16(const void *p) {
    vh h;
    memcpy(&h, p, sizeof h);
    return as_vf(__builtin_convertvector(h, vu) << 16);
}
INLINE vf vload_f16(const void *p) { vhf h; memcpy(&h, p, sizeof h); return __builtin_convertvector(h, vf); }
INLINE vf vload_as(const void *base, int64_t index, int dtype) {
    const char *p = (const char *)base + index * dtype_bytes(dtype);
    if (dtype == DT_BF16) return vload_bf16(p);
    if (dtype == DT_F16) return vload_f16(p);
    return vload((const float *)p);
}

/* round to nearest even; NaN stays a (quiet) NaN instead of rounding up to infinity */
INLINE vh vto_bf16(vf v) {
    vu u = as_vu(v);
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu quiet = (u >> 16) | 0x40u;
    vu nan = (vu)(v != v);
    return __builtin_convertvector((rounded & ~nan) | (quiet & nan), vh);
}
INLINE vh vto_f16(vf v) {
    vhf h = __builtin_convertvector(v, vhf);
    vh r;
    memcpy(&r, &h, sizeof r);
    return r;
}
INLINE void vstore_as(void *base, int64_t index, int dtype, vf v) {
    char *p = (char *)base + index * dtype_bytes(dtype);
    if (dtype == DT_F32) { vstore((float *)p, v); return; }
    vh h = dtype == DT_BF16 ? vto_bf16(v) : vto_f16(v);
    memcpy(p, &h, sizeof h);
}

#endif
