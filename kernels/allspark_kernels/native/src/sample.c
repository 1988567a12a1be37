/* Penalties, bans, mask, top-k, top-p and the seeded draw; one row per work item. */
#include "sample.h"

#include "mathd.h"
#include "mathv.h"
#include "philox.h"
#include "pool.h"

#define BANNED -1e9f
enum { PROMPT_OR_GENERATED = 3, GENERATED = 2, FIRST_PREFIX = 256 };
/* Gumbel noise of the smallest and the largest U: -log(25 ln 2) and 25 ln 2, rounded outwards */
#define NOISE_MIN -2.853
#define NOISE_MAX 17.329

struct job {
    const struct sampling *s;
    _Atomic int failed;
};

static int is_unseen(const uint8_t *seen8) {
    uint64_t word;
    memcpy(&word, seen8, sizeof word);
    return word == 0;
}

static void penalise_row(void *context, int64_t row) {
    const struct sampling *s = ((struct job *)context)->s;
    float factor = s->repetition_penalty[row], presence = s->presence_penalty[row];
    if (factor == 1.0f && presence == 0.0f) return;
    const uint8_t *seen = s->seen + s->slot[row] * s->vocab;
    uint8_t repeats = s->suppress_repetition[row] ? GENERATED : PROMPT_OR_GENERATED;
    float *x = s->logits + row * s->vocab;
    for (int64_t i = 0; i < s->vocab; i++) {
        if (i + 8 <= s->vocab && is_unseen(seen + i)) {
            i += 7;
            continue;
        }
        if (seen[i] & repeats) x[i] = x[i] < 0.0f ? x[i] * factor : x[i] / factor;
        if (seen[i] & GENERATED) x[i] -= presence;
    }
}

/* Applies the mask, drops NaN, and returns the maximum. */
static float finish_logits(const struct sampling *s, int64_t row) {
    int64_t words = (s->vocab + 31) / 32;
    const uint32_t *mask = s->allow_mask ? s->allow_mask + row * words : NULL;
    float *x = s->logits + row * s->vocab;
    vf top = vset(MINUS_INF);
    for (int64_t i = 0; i < s->vocab; i += LANES) {
        vf v = vload_n(x + i, s->vocab - i, MINUS_INF);
        v = vselect(v == v, v, vset(MINUS_INF));
        if (mask) {
            vu bits = (vsetu(mask[i / 32] >> i % 32) >> (vu)viota()) & 1u;
            v = vselect((vi)(bits != 0u), v, vset(MINUS_INF));
        }
        top = vmax(v, top);
        vstore_n(x + i, v, s->vocab - i);
    }
    return vhmax(top);
}

static int64_t first_equal(const float *x, int64_t n, float value) {
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = vload_n(x + i, n - i, MINUS_INF);
        if (!__builtin_reduce_or((vu)(v == vset(value)))) continue;
        for (int64_t lane = 0; lane < LANES; lane++)
            if (v[lane] == value) return i + lane;
    }
    return -1;
}

/* -log(-log U), U = ((word >> 8) + 1/2) / 2^24 */
static double gumbel(uint32_t word) {
    double u = ((double)(word >> 8) + 0.5) * 0x1p-24;
    return -dlog(-dlog(u));
}

/* A race: the largest x / T + noise wins, then the smaller id. */
struct race {
    struct philox_stream stream;
    double temperature, top; /* top: largest x / T */
    double best;
    int64_t winner;
    uint32_t least; /* words below cannot win */
};

static struct race new_race(const struct sampling *s, int64_t row, float top) {
    double temperature = s->temperature[row];
    if (temperature < 0x1p-126) temperature = 0x1p-126;
    return (struct race){
        .stream = philox_stream(s->seed[row], s->position[row]),
        .temperature = temperature,
        .top = (double)top / temperature,
        .best = -(double)__builtin_inff(),
        .winner = -1,
    };
}

static void enter(struct race *r, float x, int64_t id, uint32_t word) {
    double score = (double)x / r->temperature + gumbel(word);
    if (score < r->best || (score == r->best && id > r->winner) || !(score > -(double)__builtin_inff())) return;
    r->best = score;
    r->winner = id;
    /* A later entry needs noise of at least best - top, hence U >= exp(-exp(top - best)), found in single
     * precision; 8 units of 2^-24 are more than its error. */
    vf u = vexp(-vexp(vset((float)(r->top - score))));
    int64_t least = (int64_t)(u[0] * 0x1p24f) - 8;
    r->least = least > 0 ? (uint32_t)least << 8 : 0;
}

static void race_candidates(struct race *r, const uint64_t *keys, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        uint32_t id = candidate_id(keys[i]), word = philox(&r->stream, id);
        if (word >= r->least) enter(r, candidate_value(keys[i]), id, word);
    }
}

/* Everybody races; x too far below the maximum cannot win even with the best noise. */
static void race_all(struct race *r, const float *x, int64_t n) {
    double cutoff = (r->top - (NOISE_MAX - NOISE_MIN)) * r->temperature;
    float floor = (float)(cutoff - __builtin_fabs(cutoff) * 0x1p-22);
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = vload_n(x + i, n - i, MINUS_INF);
        vi near = v >= vset(floor);
        if (!__builtin_reduce_or((vu)near)) continue;
        vu words = philox16(&r->stream, (uint32_t)i);
        if (!__builtin_reduce_or((vu)(near & (vi)(words >= vsetu(r->least))))) continue;
        for (int64_t lane = 0; lane < LANES; lane++)
            if (near[lane] && words[lane] >= r->least) enter(r, v[lane], i + lane, words[lane]);
    }
}

/* How many of the sorted keys are the shortest prefix whose probability exceeds top_p; `total` is the sum
 * of the weights of all kept ids. Returns count + 1 if the prefix is longer than `count`. */
static int64_t prefix_length(const struct race *r, const uint64_t *keys, int64_t count, double total, float top_p) {
    double before = 0.0, limit = (double)top_p * total;
    for (int64_t i = 0; i < count; i++) {
        if (before > limit) return i;
        before += dexp((double)candidate_value(keys[i]) / r->temperature - r->top);
    }
    return before > limit ? count : count + 1;
}

/* sum of exp((x - max) / T) over a row: lane i of the sum takes every eighth id, then a fixed tree */
static double row_weight(const struct race *r, const float *x, int64_t n) {
    vd sum = (vd)0.0;
    for (int64_t i = 0; i < n; i += 8) {
        vd v = (vd)-(double)__builtin_inff();
        for (int64_t lane = 0; lane < 8 && i + lane < n; lane++) v[lane] = (double)x[i + lane];
        sum += dexp8(v / r->temperature - r->top);
    }
    double a[8];
    memcpy(a, &sum, sizeof a);
    return ((a[0] + a[4]) + (a[2] + a[6])) + ((a[1] + a[5]) + (a[3] + a[7]));
}

static double keys_weight(const struct race *r, const uint64_t *keys, int64_t count) {
    double sum = 0.0;
    for (int64_t i = 0; i < count; i++) sum += dexp((double)candidate_value(keys[i]) / r->temperature - r->top);
    return sum;
}

/* The ids that top-k and then top-p keep. Without top-k the best are taken in growing numbers until they
 * hold the nucleus. */
static int64_t keep_nucleus(const struct race *r, const float *x, int64_t vocab, int64_t k, float top_p,
                            uint64_t *keys) {
    double total = k == vocab ? row_weight(r, x, vocab) : 0.0;
    for (int64_t n = k == vocab ? FIRST_PREFIX : k;; n *= 8) {
        if (n > k) n = k;
        int64_t count = select_best(x, vocab, n, keys);
        sort_best(keys, count, count);
        if (k < vocab) total = keys_weight(r, keys, count);
        int64_t kept = prefix_length(r, keys, count, total, top_p);
        if (kept <= count) return kept;
        if (n == k || count < n) return count;
    }
}

static void choose_row(void *context, int64_t row) {
    struct job *j = context;
    const struct sampling *s = j->s;
    const float *x = s->logits + row * s->vocab;
    float top = finish_logits(s, row), top_p = s->top_p[row];
    int is_greedy = !(s->temperature[row] > 0.0f) || top == -MINUS_INF; /* infinite logits win any race */
    if (is_greedy || !(top > MINUS_INF)) {
        s->chosen[row] = top > MINUS_INF ? first_equal(x, s->vocab, top) : -1;
        return;
    }
    struct race r = new_race(s, row, top);
    int64_t k = s->top_k[row] <= 0 || s->top_k[row] > s->vocab ? s->vocab : s->top_k[row];
    int is_nucleus = top_p > 0.0f && top_p < 1.0f;
    if (k == s->vocab && !is_nucleus) {
        race_all(&r, x, s->vocab);
    } else {
        uint64_t *keys = pool_scratch((size_t)candidate_room(s->vocab, k) * sizeof *keys);
        if (!keys) {
            j->failed = 1;
            return;
        }
        int64_t count = is_nucleus ? keep_nucleus(&r, x, s->vocab, k, top_p, keys)
                                   : select_best(x, s->vocab, k, keys);
        race_candidates(&r, keys, count);
    }
    s->chosen[row] = r.winner;
}

static int ban(const struct sampling *s) {
    for (int64_t i = 0; i < s->bans; i++) {
        int64_t row = s->ban_rows[i], id = s->ban_ids[i];
        if (row < 0 || row >= s->rows || id < 0 || id >= s->vocab) return 0;
        s->logits[row * s->vocab + id] = BANNED;
    }
    return 1;
}

/* Returns 0; 1 without memory; 2 if a slot or a banned id lies outside its table. */
EXPORT int ask_sample(const struct sampling *s) {
    uint64_t saved = denormals_off();
    struct job j = {s, 0};
    int valid = 1;
    for (int64_t row = 0; s->seen && row < s->rows; row++)
        if (s->slot[row] < 0 || s->slot[row] >= s->seen_rows) valid = 0;
    if (valid && s->seen) pool_run(penalise_row, &j, s->rows);
    valid = valid && ban(s);
    if (valid) pool_run(choose_row, &j, s->rows);
    denormals_restore(saved);
    return valid ? j.failed : 2;
}

/* seen[slot or slots[i], ids[i]] |= bit; negative ids are skipped. Returns 0, or 2 outside the table. */
EXPORT int ask_mark_seen(uint8_t *seen, int64_t rows, int64_t vocab, int64_t slot, const int64_t *slots,
                         const int64_t *ids, int64_t count, int64_t bit) {
    for (int64_t i = 0; i < count; i++) {
        int64_t row = slots ? slots[i] : slot;
        if (ids[i] < 0) continue;
        if (row < 0 || row >= rows || ids[i] >= vocab) return 2;
        seen[row * vocab + ids[i]] |= (uint8_t)bit;
    }
    return 0;
}
