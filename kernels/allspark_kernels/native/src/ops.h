/* The functions of the library that compute; prototypes shared by their files, the tape and the binding. */
#ifndef ALLSPARK_OPS_H
#define ALLSPARK_OPS_H

#include <stdint.h>

struct linear;
struct step;

/* x [rows, k], out [rows, n], both contiguous. Returns 0, or 1 without memory for the packed activations. */
int ask_linear(const struct linear *w, const float *x, int64_t rows, float *out);

/* The same with a weight that stays quantised, see qlinear.c. */
struct qlinear;
int ask_qlinear(const struct qlinear *w, const float *x, int64_t rows, float *out);

/* x [rows, width] with rows ldx apart; residual (may be NULL) and out contiguous. */
void ask_rms_norm(const float *x, int64_t ldx, float *residual, const float *weight, float eps, float *out,
                  int64_t rows, int64_t width);

/* Mixture of experts, see experts.c. */
void ask_route_experts(const float *logits, int64_t rows, int64_t experts, int64_t top_k, int64_t is_normalised,
                       int32_t *ids, float *weights, int32_t *order, int32_t *starts);
int ask_grouped_linear(const void *const *experts, int64_t num_experts, const int32_t *order,
                       const int32_t *starts, const float *x, int64_t each_own, int64_t tokens, int64_t top_k,
                       float *rows, float *results, float *out, int64_t is_quantised);
void ask_combine_experts(const float *parts, const float *weights, const float *shared, const float *gate,
                         float *out, int64_t rows, int64_t top_k, int64_t width);

/* gate_up [rows, 2 * width] -> out [rows, width], contiguous */
void ask_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t width);
void ask_gelu_mul(const float *gate_up, float *out, int64_t rows, int64_t width);

/* x [rows, width] becomes cap * tanh(x / cap) */
void ask_soft_cap(float *x, int64_t rows, int64_t width, float cap);

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
