/* The thread pool: `pool_run` calls fn(context, i) once for each i in [0, items), on any thread.
 *
 * Items are claimed one by one, so a core that is busy elsewhere delays one item, not a share. A thread
 * begins with a contiguous part of the items (neighbours share cache lines and prefetched memory) and then
 * helps the others.
 * The caller takes part. A second thread that calls while the pool is in use runs its own items itself.
 * Nothing may depend on which thread runs an item. */
#ifndef ALLSPARK_POOL_H
#define ALLSPARK_POOL_H

#include <stddef.h>
#include <stdint.h>

typedef void (*pool_fn)(void *context, int64_t item);

void pool_run(pool_fn fn, void *context, int64_t items);
int pool_threads(void);

/* Per-thread scratch memory of at least `bytes`, 64-byte aligned, contents undefined; NULL if none is left. */
void *pool_scratch(size_t bytes);

/* Denormal numbers cost ~100 cycles each: they are flushed to zero inside every exported function. */
uint64_t denormals_off(void);
void denormals_restore(uint64_t saved);

#endif
