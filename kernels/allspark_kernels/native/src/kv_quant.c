#include "kv_quant.h"
#include "mathv.h"

typedef int8_t vc __attribute__((ext_vector_type(16)));
typedef uint8_t vb8 __attribute__((ext_vector_type(8)));
typedef uint8_t vb16 __attribute__((ext_vector_type(16)));

#define MIN_SCALE 1e-5f

/* round(clamp(x / scale + zero)); finite x only */
INLINE vf codes_of(vf x, float scale, float zero, float smallest, float largest) {
    vf code = x / vset(scale) + vset(zero);
    return vround(vmin(vmax(code, vset(smallest)), vset(largest)));
}

static void store_codes(char *row, int64_t kind, int64_t at, vf codes) {
    vi whole = __builtin_convertvector(codes, vi);
    if (kind == KV_INT8) {
        vc bytes = __builtin_convertvector(whole, vc);
        memcpy(row + at, &bytes, sizeof bytes);
        return;
    }
    vb16 bytes = __builtin_convertvector(whole, vb16);
    vb8 even = __builtin_shufflevector(bytes, bytes, 0, 2, 4, 6, 8, 10, 12, 14);
    vb8 odd = __builtin_shufflevector(bytes, bytes, 1, 3, 5, 7, 9, 11, 13, 15);
    even |= odd << 4;
    memcpy(row + at / 2, &even, sizeof even);
}

void store_quantised(void *block, int64_t kind, int64_t offset, int64_t span_size, const float *x, int64_t dim) {
    float smallest = kind == KV_INT8 ? -128.0f : 0.0f, steps = kind == KV_INT8 ? 255.0f : 15.0f;
    vf lo = vset(0.0f), hi = vset(0.0f), strange = vset(0.0f);
    for (int64_t i = 0; i < dim; i += LANES) {
        vf v = vload(x + i);
        lo = vmin(lo, v);
        hi = vmax(hi, v);
        strange = vselect(v - v == vset(0.0f), strange, vset(1.0f)); /* NaN or infinite */
    }
    float least = -vhmax(-lo), scale = (vhmax(hi) - least) / steps;
    int is_finite = vhmax(strange) == 0.0f;
    if (!(scale > MIN_SCALE)) scale = MIN_SCALE;
    float zero = is_finite ? codes_of(vset(-least), scale, smallest, smallest, smallest + steps)[0] : 0.0f;
    char *row = (char *)block + offset * code_bytes(kind, dim);
    for (int64_t i = 0; i < dim; i += LANES) {
        vf codes = vset(0.0f);
        if (is_finite) codes = codes_of(vload(x + i), scale, zero, smallest, smallest + steps);
        store_codes(row, kind, i, codes);
    }
    float *scales = block_scales(block, kind, dim, span_size);
    scales[offset] = is_finite ? scale : __builtin_nanf("");
    scales[span_size + offset] = zero;
}

/* to[16 * per][stride]: code b of word j of each row, widened. One transposition serves 64 or 128 dimensions. */
INLINE void unpack_words(const vu *words, int64_t n, const int is_uint4, vf zero, vf scale, float *to,
                         int64_t stride) {
    enum { BYTES = 4, NIBBLES = 8 };
    const int per = is_uint4 ? NIBBLES : BYTES;
    for (int64_t j = 0; j < n; j++) {
        for (int b = 0; b < per; b++) {
            vi code = is_uint4 ? (vi)((words[j] >> (uint32_t)(4 * b)) & 15u)
                               : (vi)(words[j] << (uint32_t)(24 - 8 * b)) >> 24;
            vstore(to + (j * per + b) * stride, (__builtin_convertvector(code, vf) - zero) * scale);
        }
    }
}

void load_quantised_columns(const void *block, int64_t kind, int64_t offset, int64_t span_size, int64_t count,
                            int64_t dim, float *to, int64_t stride) {
    int64_t bytes = code_bytes(kind, dim), words = bytes / 4;
    const char *from = (const char *)block + offset * bytes;
    const float *scales = block_scales(block, kind, dim, span_size) + offset;
    vf scale = vload_n(scales, count, 0.0f), zero = vload_n(scales + span_size, count, 0.0f);
    for (int64_t w = 0; w < words; w += LANES) {
        vu rows[LANES];
        /* 64 bytes may reach behind the row, yet not behind the 8 bytes a row of the parameters */
        UNROLL for (int i = 0; i < LANES; i++) rows[i] = vloadu(from + i * bytes + 4 * w);
        transpose16(rows);
        int64_t n = words - w < LANES ? words - w : LANES;
        if (kind == KV_UINT4) unpack_words(rows, n, 1, zero, scale, to + 8 * w * stride, stride);
        else unpack_words(rows, n, 0, zero, scale, to + 4 * w * stride, stride);
    }
}

INLINE vf load_codes(const char *row, int64_t kind, int64_t at) {
    if (kind == KV_INT8) {
        vc bytes;
        memcpy(&bytes, row + at, sizeof bytes);
        return __builtin_convertvector(bytes, vf);
    }
    vb8 both;
    memcpy(&both, row + at / 2, sizeof both);
    vb8 even = both & (uint8_t)15, odd = both >> 4;
    vb16 codes = __builtin_shufflevector(even, odd, 0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15);
    return __builtin_convertvector(codes, vf);
}

void load_quantised_rows(const void *block, int64_t kind, int64_t offset, int64_t span_size, int64_t count,
                         int64_t dim, float *to, int64_t stride) {
    int64_t bytes = code_bytes(kind, dim);
    const float *scales = block_scales(block, kind, dim, span_size) + offset;
    for (int64_t i = 0; i < count; i++, to += stride) {
        const char *row = (const char *)block + (offset + i) * bytes;
        vf scale = vset(scales[i]), zero = vset(scales[span_size + i]);
        for (int64_t d = 0; d < dim; d += LANES) vstore(to + d, (load_codes(row, kind, d) - zero) * scale);
        for (int64_t d = dim; d < stride; d += LANES) vstore(to + d, vset(0.0f));
    }
}
