#define _GNU_SOURCE
#include "pool.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "vec.h"

enum { MAX_THREADS = 256, SPIN_NS = 30000, STACK_BYTES = 1 << 20 };

/* The items of a job are dealt out in parts, at most one for each thread. `ticket` of a part = epoch << 32 |
 * next item. Before a job is written, all tickets get an odd epoch, which no worker looks for; so a
 * compare-and-swap on a ticket proves that fn, context, items and parts belong to its epoch. */
struct part {
    _Alignas(64) _Atomic uint64_t ticket;
};
static struct {
    struct part part[MAX_THREADS];
    _Atomic uint32_t epoch; /* of the open job; set after all tickets */
    _Atomic int parts;
    _Atomic(pool_fn) fn;
    _Atomic(void *) context;
    _Atomic int64_t items;
    _Atomic int64_t done;
    _Atomic uint32_t caller_sleeps;
    _Atomic uint32_t bell; /* futex the workers sleep on */
    _Atomic uint32_t sleepers;
    _Atomic int stop;
    int wanted;  /* threads, the caller included; 0 = not chosen yet */
    int started; /* workers that exist */
    pthread_t workers[MAX_THREADS];
} pool;
static pthread_mutex_t pool_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t fork_hook = PTHREAD_ONCE_INIT;

static void futex_wait(_Atomic uint32_t *word, uint32_t seen) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}
static void futex_wake(_Atomic uint32_t *word, int count) {
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, count, NULL, NULL, 0);
}

static void relax(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

uint64_t denormals_off(void) {
#if defined(__x86_64__)
    uint32_t saved = __builtin_ia32_stmxcsr();
    __builtin_ia32_ldmxcsr(saved | 0x8040); /* FTZ | DAZ */
    return saved;
#elif defined(__aarch64__)
    uint64_t saved;
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" ::"r"(saved | (1u << 24))); /* FZ */
    return saved;
#else
    return 0;
#endif
}
void denormals_restore(uint64_t saved) {
#if defined(__x86_64__)
    __builtin_ia32_ldmxcsr((uint32_t)saved);
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" ::"r"(saved));
#endif
}

static pthread_key_t scratch_key; /* frees a thread's scratch when the thread ends */
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;
static void make_scratch_key(void) { pthread_key_create(&scratch_key, free); }

void *pool_scratch(size_t bytes) {
    static __thread void *memory;
    static __thread size_t capacity;
    if (bytes <= capacity) return memory;
    pthread_once(&scratch_once, make_scratch_key);
    free(memory);
    capacity = (bytes + 4095) & ~(size_t)4095;
    memory = aligned_alloc(4096, capacity);
    if (!memory) capacity = 0;
    pthread_setspecific(scratch_key, memory);
    return memory;
}

static int64_t part_start(int64_t items, int part, int parts) { return items * part / parts; }

/* Runs items of one part until none is left to claim. */
static void work_part(uint32_t epoch, int part) {
    for (;;) {
        uint64_t ticket = atomic_load_explicit(&pool.part[part].ticket, memory_order_acquire);
        if ((uint32_t)(ticket >> 32) != epoch) return;
        pool_fn fn = atomic_load_explicit(&pool.fn, memory_order_relaxed);
        void *context = atomic_load_explicit(&pool.context, memory_order_relaxed);
        int64_t items = atomic_load_explicit(&pool.items, memory_order_relaxed);
        int parts = atomic_load_explicit(&pool.parts, memory_order_relaxed);
        int64_t item = (int64_t)(uint32_t)ticket;
        if (part >= parts || item >= part_start(items, part + 1, parts)) return;
        if (!atomic_compare_exchange_weak(&pool.part[part].ticket, &ticket, ticket + 1)) continue;
        fn(context, item);
        if (atomic_fetch_add(&pool.done, 1) + 1 == items && atomic_load(&pool.caller_sleeps)) {
            atomic_store(&pool.caller_sleeps, 0);
            futex_wake(&pool.caller_sleeps, 1);
        }
    }
}

/* Runs items of job `epoch`: those of part `first`, then those that other threads have left. */
static void work(uint32_t epoch, int first) {
    int parts = atomic_load(&pool.parts);
    for (int i = 0; i < parts; i++) work_part(epoch, (first + i) % parts);
}

/* Waits for an open epoch other than `seen`: spins briefly, then sleeps so that others have the core. */
static uint32_t next_epoch(uint32_t seen) {
    int64_t until = now_ns() + SPIN_NS;
    for (int spins = 1;; spins++) {
        uint32_t bell = atomic_load(&pool.bell);
        uint32_t epoch = atomic_load(&pool.epoch);
        if (epoch != seen || atomic_load(&pool.stop)) return epoch;
        if (spins % 16 || now_ns() < until) {
            relax();
            continue;
        }
        atomic_fetch_add(&pool.sleepers, 1);
        if (atomic_load(&pool.epoch) == epoch && !atomic_load(&pool.stop))
            futex_wait(&pool.bell, bell);
        atomic_fetch_sub(&pool.sleepers, 1);
        until = now_ns() + SPIN_NS;
    }
}

static void *worker(void *part) {
    denormals_off();
    uint32_t epoch = atomic_load(&pool.epoch);
    while (!atomic_load(&pool.stop)) {
        work(epoch, (int)(uintptr_t)part);
        epoch = next_epoch(epoch);
    }
    return NULL;
}

static void ring(void) {
    atomic_fetch_add(&pool.bell, 1);
    if (atomic_load(&pool.sleepers)) futex_wake(&pool.bell, MAX_THREADS);
}

/* A child process has no workers: it forgets the parent's and starts its own when it needs them. */
static void forget_workers(void) {
    pool.started = 0;
    atomic_store(&pool.sleepers, 0);
    pthread_mutex_init(&pool_lock, NULL);
}
static void hook_fork(void) { pthread_atfork(NULL, NULL, forget_workers); }

static void start_workers(int count) {
    pthread_once(&fork_hook, hook_fork);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    while (pool.started < count) {
        void *part = (void *)(uintptr_t)(pool.started + 1);
        if (pthread_create(&pool.workers[pool.started], &attributes, worker, part)) break;
        pool.started++; /* fewer threads than wanted is slower, never wrong */
    }
    pthread_attr_destroy(&attributes);
}

static void stop_workers(void) {
    atomic_store(&pool.stop, 1);
    ring();
    for (int i = 0; i < pool.started; i++) pthread_join(pool.workers[i], NULL);
    pool.started = 0;
    atomic_store(&pool.stop, 0);
}

static int usable_cores(void) {
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set)) return 1;
    int cores = CPU_COUNT(&set);
    return cores > MAX_THREADS ? MAX_THREADS : cores;
}

int pool_threads(void) {
    if (!pool.wanted) pool.wanted = usable_cores();
    return pool.wanted;
}

static void wait_done(int64_t items) {
    int64_t until = now_ns() + SPIN_NS;
    for (int spins = 1; atomic_load(&pool.done) != items; spins++) {
        if (spins % 16 || now_ns() < until) {
            relax();
            continue;
        }
        atomic_store(&pool.caller_sleeps, 1);
        while (atomic_load(&pool.done) != items && atomic_load(&pool.caller_sleeps))
            futex_wait(&pool.caller_sleeps, 1);
        atomic_store(&pool.caller_sleeps, 0);
    }
}

static void run_shared(pool_fn fn, void *context, int64_t items) {
    if (pool.started < pool.wanted - 1) start_workers(pool.wanted - 1);
    uint32_t epoch = atomic_load(&pool.epoch);
    int parts = pool.wanted < items ? pool.wanted : (int)items;
    for (int i = 0; i < pool.wanted; i++) atomic_store(&pool.part[i].ticket, (uint64_t)(epoch + 1) << 32);
    atomic_store(&pool.fn, fn);
    atomic_store(&pool.context, context);
    atomic_store(&pool.items, items);
    atomic_store(&pool.parts, parts);
    atomic_store(&pool.done, 0);
    epoch += 2;
    for (int i = 0; i < parts; i++)
        atomic_store(&pool.part[i].ticket, (uint64_t)epoch << 32 | (uint64_t)part_start(items, i, parts));
    atomic_store(&pool.epoch, epoch);
    ring();
    work(epoch, 0);
    wait_done(items);
}

void pool_run(pool_fn fn, void *context, int64_t items) {
    if (items > 1 && items < UINT32_MAX && pool_threads() > 1 && !pthread_mutex_trylock(&pool_lock)) {
        run_shared(fn, context, items);
        pthread_mutex_unlock(&pool_lock);
        return;
    }
    for (int64_t i = 0; i < items; i++) fn(context, i);
}

EXPORT int ask_get_threads(void) { return pool_threads(); }

/* Waits for a running job, then ends all workers; the next job starts as many as it needs. */
EXPORT void ask_set_threads(int threads) {
    pthread_mutex_lock(&pool_lock);
    stop_workers();
    pool.wanted = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    pthread_mutex_unlock(&pool_lock);
}
