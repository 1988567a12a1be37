/* The functions of the library that compute; prototypes shared by their files, the tape and the binding. */
#ifndef ALLSPARK_OPS_H
#define ALLSPARK_OPS_H

#include <stdint.h>

struct linear;
struct step;

/* x [rows, k], out [rows, n], both contiguous. Returns 0, or 1 without memory for the packed activations. */
int ask_linear(const struct linear *w, const float *x, int64_t rows, float *out);

/* x [rows, width] with rows ldx apart; residual (may be NULL) and out contiguous. */
void ask_rms_norm(const float *x, int64_t ldx, float *residual, const float *weight, float eps, float *out,
                  int64_t rows, int64_t width);

/* gate_up [rows, 2 * width] -> out [rows, width], contiguous */
void ask_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width);

/* Adds the adapters' part to out [T, n]: entries of the site's slots, rows [num_rows] grouped by adapter, tiles
 * of them (slot, start, count), x [T, k], widths [3] of the parts of a row of out. Returns 0, or 1 without
 * scratch memory (nothing is added then). */
int ask_lora_add(const void *entries, const int32_t *rows, int64_t num_rows, const void *tiles, int64_t num_tiles,
                 const float *x, float *out, int64_t k, const int64_t *widths, int64_t max_rank, int64_t dtype);

/* q, k, v: heads of a token contiguous, tokens ld apart; cos_sin [max_positions, rotary_dim]: cosines, then
 * sines; caches [num_slots / span_size, kv_heads, span_size, dim]. Returns 0, or 2 (and writes nothing) if a
 * position or slot lies outside its table. */
int ask_rotary_kv_write(float *q, const float *k, const float *v, int64_t ldq, int64_t ldk, int64_t ldv,
                        const float *cos_sin, int64_t max_positions, const int64_t *positions,
                        const int64_t *slots, void *k_cache, void *v_cache, int64_t cache_dtype,
                        int64_t num_slots, int64_t tokens, int64_t q_heads, int64_t kv_heads, int64_t dim,
                        int64_t rotary_dim, int64_t span_size);

/* q: heads of a token contiguous, tokens ldq apart; out [tokens, q_heads, dim]. A row sees at most `window`
 * keys (0: all), scores become cap * tanh(score / cap) (0: as they are). Returns 0, or 1 without scratch
 * memory (the output is then incomplete). */
int ask_paged_attention(const struct step *s, const float *q, int64_t ldq, const void *k_cache,
                        const void *v_cache, int64_t dtype, float scale, float *out, int64_t window, float cap);

/* The same, but rows of requests without keys (the padding of a batch) are left alone instead of zeroed. */
int attend_live(const struct step *s, const float *q, int64_t ldq, const void *k_cache, const void *v_cache,
                int64_t dtype, float scale, float *out, int64_t window, float cap);

#endif
