/* Exact top-k without sorting the vocabulary: entries that beat the k-th best so far are collected, and
 * whenever the buffer is full it shrinks to its k best, which raises the bar. */
#include <stdlib.h>

#include "sample.h"

enum { MIN_ROOM = 1024 };

static void swap(uint64_t *a, uint64_t *b) {
    uint64_t t = *a;
    *a = *b;
    *b = t;
}

/* Moves the k largest of n distinct keys to the front (Hoare, 1961; pivot: median of three). */
static void partition_best(uint64_t *keys, int64_t n, int64_t k) {
    int64_t low = 0, high = n - 1;
    while (low < high) {
        uint64_t a = keys[low], b = keys[low + (high - low) / 2], c = keys[high];
        uint64_t pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
        int64_t i = low, j = high;
        while (i <= j) {
            while (keys[i] > pivot) i++;
            while (keys[j] < pivot) j--;
            if (i <= j) swap(&keys[i++], &keys[j--]);
        }
        if (k - 1 <= j) high = j;
        else if (k - 1 >= i) low = i;
        else return;
    }
}

static int descending(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return (x < y) - (x > y);
}

void sort_best(uint64_t *keys, int64_t n, int64_t k) {
    if (k < n) partition_best(keys, n, k);
    qsort(keys, (size_t)(k < n ? k : n), sizeof *keys, descending);
}

int64_t candidate_room(int64_t n, int64_t k) {
    int64_t room = 4 * k < MIN_ROOM ? MIN_ROOM : 4 * k;
    return room < n ? room : n;
}

int64_t select_best(const float *values, int64_t n, int64_t k, uint64_t *keys) {
    int64_t room = candidate_room(n, k), count = 0;
    float floor = -__builtin_inff(); /* entries must beat it */
    for (int64_t i = 0; i < n; i += LANES) {
        vf v = vload_n(values + i, n - i, -__builtin_inff());
        if (!__builtin_reduce_or((vu)(v > vset(floor)))) continue;
        for (int64_t lane = 0; lane < LANES && i + lane < n; lane++) {
            if (!(values[i + lane] > floor)) continue;
            if (count == room) { /* only when room < n, and then room > k */
                partition_best(keys, count, k);
                count = k;
                for (int64_t c = 0; c < k; c++) {
                    float value = candidate_value(keys[c]);
                    if (c == 0 || value < floor) floor = value;
                }
                if (!(values[i + lane] > floor)) continue;
            }
            keys[count++] = candidate_key(values[i + lane], (uint32_t)(i + lane));
        }
    }
    if (count > k) {
        partition_best(keys, count, k);
        count = k;
    }
    return count;
}
