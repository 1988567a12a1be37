/* Philox4x32-10 (Salmon et al., 2011), first output word only: counter (id, position low, position high, 0),
 * key = seed. Integer arithmetic: the same word on every device. */
#ifndef ALLSPARK_PHILOX_H
#define ALLSPARK_PHILOX_H

#include "vec.h"

enum { PHILOX_ROUNDS = 10 };
#define PHILOX_M0 0xD2511F53u
#define PHILOX_M1 0xCD9E8D57u
#define PHILOX_W0 0x9E3779B9u
#define PHILOX_W1 0xBB67AE85u

struct philox_stream {
    uint32_t key[2], position[2];
};

INLINE struct philox_stream philox_stream(int64_t seed, int64_t position) {
    uint64_t s = (uint64_t)seed, p = (uint64_t)position;
    return (struct philox_stream){{(uint32_t)s, (uint32_t)(s >> 32)}, {(uint32_t)p, (uint32_t)(p >> 32)}};
}

INLINE uint32_t philox(const struct philox_stream *s, uint32_t id) {
    uint32_t c0 = id, c1 = s->position[0], c2 = s->position[1], c3 = 0, k0 = s->key[0], k1 = s->key[1];
    UNROLL for (int i = 0; i < PHILOX_ROUNDS; i++) {
        uint64_t first = (uint64_t)c0 * PHILOX_M0, second = (uint64_t)c2 * PHILOX_M1;
        c0 = (uint32_t)(second >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)second;
        c2 = (uint32_t)(first >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)first;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return c0;
}

typedef uint64_t vu64 __attribute__((ext_vector_type(8)));

/* both halves of the 64-bit products of 16 lanes with a constant */
INLINE void multiply_wide(vu a, uint32_t b, vu *high, vu *low) {
    vu64 pairs, lower = (vu64)(uint64_t)0xffffffffu;
    memcpy(&pairs, &a, sizeof pairs);
    vu64 even = (pairs & lower) * (uint64_t)b, odd = (pairs >> 32) * (uint64_t)b;
    vu64 h = (even >> 32) | (odd & ~lower), l = (even & lower) | (odd << 32);
    memcpy(high, &h, sizeof h);
    memcpy(low, &l, sizeof l);
}

/* the words of ids first .. first + 15 */
INLINE vu philox16(const struct philox_stream *s, uint32_t first) {
    vu c0 = vsetu(first) + (vu)viota(), c1 = vsetu(s->position[0]), c2 = vsetu(s->position[1]), c3 = vsetu(0);
    uint32_t k0 = s->key[0], k1 = s->key[1];
    UNROLL for (int i = 0; i < PHILOX_ROUNDS; i++) {
        vu first_high, first_low, second_high, second_low;
        multiply_wide(c0, PHILOX_M0, &first_high, &first_low);
        multiply_wide(c2, PHILOX_M1, &second_high, &second_low);
        c0 = second_high ^ c1 ^ k0;
        c1 = second_low;
        c2 = first_high ^ c3 ^ k1;
        c3 = first_low;
        k0 += PHILOX_W0;
        k1 += PHILOX_W1;
    }
    return c0;
}

#endif
