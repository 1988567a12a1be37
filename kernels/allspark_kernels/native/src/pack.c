/* Between a row-major weight [N, K] and its panels; a transposition that moves elements unchanged. */
#include "linear.h"
#include "pool.h"

enum { BLOCK = 32 /* k's moved at a time: source lines and panel rows both stay in L1 */ };

struct pack {
    const struct linear *w;
    char *plain; /* [n, k] row-major */
    int is_unpack;
};

/* position of (k, column) inside a panel, in elements */
INLINE int64_t place(int dtype, int64_t k, int64_t column) {
    if (dtype == DT_BF16) return (k / 2 * PANEL + column) * 2 + k % 2;
    return k * PANEL + column;
}

#define MOVE(TYPE, DTYPE)                                                                       \
    for (int64_t k0 = 0; k0 < w->k; k0 += BLOCK)                                                \
        for (int64_t column = 0; column < columns; column++) {                                  \
            TYPE *plain = (TYPE *)p->plain + (panel * PANEL + column) * w->k;                   \
            TYPE *packed = (TYPE *)(w->panels + panel * panel_bytes(w));                        \
            for (int64_t k = k0; k < k0 + BLOCK && k < w->k; k++) {                             \
                if (p->is_unpack) plain[k] = packed[place(DTYPE, k, column)];                   \
                else packed[place(DTYPE, k, column)] = plain[k];                                \
            }                                                                                   \
        }

static void move_panel(void *context, int64_t panel) {
    const struct pack *p = context;
    const struct linear *w = p->w;
    int64_t columns = w->n - panel * PANEL < PANEL ? w->n - panel * PANEL : PANEL;
    if (w->dtype == DT_F32) {
        MOVE(uint32_t, DT_F32)
    } else if (w->dtype == DT_BF16) {
        MOVE(uint16_t, DT_BF16)
    } else {
        MOVE(uint16_t, DT_F16)
    }
}

EXPORT int64_t ask_linear_bytes(int64_t n, int64_t k, int64_t dtype) {
    struct linear w = {n, k, dtype, NULL, NULL, 0};
    return panel_count(&w) * panel_bytes(&w);
}

/* The block behind w->panels must be zeroed, as the arena gives it. */
EXPORT void ask_linear_pack(const struct linear *w, const void *plain) {
    struct pack p = {w, (char *)plain, 0};
    pool_run(move_panel, &p, panel_count(w));
}
EXPORT void ask_linear_unpack(const struct linear *w, void *plain) {
    struct pack p = {w, plain, 1};
    pool_run(move_panel, &p, panel_count(w));
}
