#ifndef ALLSPARK_SAMPLE_H
#define ALLSPARK_SAMPLE_H

#include "vec.h"

/* One sampling batch; mirrored in the binding. `seen` and `allow_mask` may be NULL. */
struct sampling {
    float *logits; /* [rows][vocab], processed in place */
    int64_t *chosen;
    int64_t rows, vocab;
    const float *temperature;
    const int32_t *top_k;
    const float *top_p;
    const int64_t *seed, *position;
    const float *repetition_penalty, *presence_penalty;
    const uint8_t *suppress_repetition;
    const uint8_t *seen; /* [seen_rows][vocab]: bit 0 prompt, bit 1 generated */
    int64_t seen_rows;
    const int32_t *slot;
    const int64_t *ban_rows, *ban_ids;
    int64_t bans;
    const uint32_t *allow_mask; /* [rows][ceil(vocab / 32)] */
};

/* Candidates sort by value, larger first, then by id, smaller first: as integers, in descending order. */
INLINE uint64_t candidate_key(float value, uint32_t id) {
    uint32_t u;
    value += 0.0f; /* -0 equals 0 */
    memcpy(&u, &value, sizeof u);
    u ^= u >> 31 ? 0xffffffffu : 0x80000000u;
    return (uint64_t)u << 32 | (0xffffffffu - id);
}
INLINE uint32_t candidate_id(uint64_t key) { return 0xffffffffu - (uint32_t)key; }
INLINE float candidate_value(uint64_t key) {
    uint32_t u = (uint32_t)(key >> 32);
    u ^= u >> 31 ? 0x80000000u : 0xffffffffu;
    float value;
    memcpy(&value, &u, sizeof value);
    return value;
}

/* The `k` best of values[0, n), without -inf, to keys[0, returned), in no order.
 * `keys` has room for candidate_room(n, k). */
int64_t candidate_room(int64_t n, int64_t k);
int64_t select_best(const float *values, int64_t n, int64_t k, uint64_t *keys);

/* Orders keys so that the k largest come first, themselves sorted in descending order. */
void sort_best(uint64_t *keys, int64_t n, int64_t k);

#endif
