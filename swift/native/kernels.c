/* What a decoder on a CPU does, in one call each: norms, rotary positions and gates with their gradients, and for sampling
   products with packed matrices and attention over the cells of swift/rollout/engines/prompt_cache.py. See
   swift/native/__init__.py for how it is built, loaded and called.

   Plain C without a dependency. The threads are PyTorch's: `swift_use_threads` is handed the entry of the OpenMP
   runtime that PyTorch has loaded, because a second runtime would fight with it for the cores. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define LANES 16
#define PANEL 32 /* columns of a matrix that are multiplied at once */
#define DEPTH 256 /* rows of a panel that are summed at once; as many as stay in the nearest cache */
typedef float vec __attribute__((vector_size(64)));
typedef float vec_in_memory __attribute__((vector_size(64), aligned(4), may_alias));
typedef int32_t integers __attribute__((vector_size(64)));

/* A layer of the cache and of the model: cells of S slots, Hkv key/value heads of D, prompts up to W, own up to K. */
struct swift_layer {
    const float *prompt_keys;   /* [C, Hkv, D, W] */
    const float *prompt_values; /* [C, Hkv, W, D] */
    float *own_keys;            /* [C, Hkv, S, D, K] */
    float *own_values;          /* [C, Hkv, S, K, D] */
    const float *query_norm;    /* [D] or NULL */
    const float *key_norm;      /* [D] or NULL */
    int64_t heads, groups, depth, width, size, room; /* H, Hkv, D, W, S, K; D, W and K are multiples of 16 */
    float epsilon;              /* of the norms of heads */
    float scale;                /* of softmax */
};

/* The rows of a step. */
struct swift_step {
    const int64_t *slots;     /* [R], of all cells */
    const int64_t *own;       /* [R], own tokens so far: where this step writes */
    const int64_t *prompts;   /* [R], lengths */
    const int64_t *positions; /* [R], rows of the tables of angles */
    const float *cosines;     /* [T, D] */
    const float *sines;       /* [T, D], negative in their first half */
    const float *states;      /* [R, H + 2 Hkv, D]: queries, keys, values */
    float *output;            /* [R, H * D] */
    float *workspace;         /* [threads, share] */
    int64_t share;            /* at least 2 rep D + D + rep (W + K) with rep = H / Hkv */
    int64_t rows;
    int64_t threads;
};

#ifndef SWIFT_SOURCES
#define SWIFT_SOURCES ""
#endif

/* The digest of the sources that this was compiled from; see setup.py. */
const char *swift_sources(void) {
    return SWIFT_SOURCES;
}

/* GOMP_parallel of the OpenMP runtime: fn(data) on each of `threads` threads, which have ended when it returns. */
typedef void (*run_threads)(void (*fn)(void *), void *data, unsigned threads, unsigned flags);
static run_threads runtime = 0;

void swift_use_threads(run_threads entry) {
    runtime = entry;
}

#if defined(__x86_64__)
#define TARGET __attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma")))
#define NAME(x) x##_avx512
#define ROWS 8 /* with a panel's columns they fill the registers */
#include "kernels.h"
#undef TARGET
#undef NAME
#undef ROWS
#define TARGET __attribute__((target("avx2,fma")))
#define NAME(x) x##_avx2
#define ROWS 3
#include "kernels.h"
#undef TARGET
#undef NAME
#undef ROWS
#endif
#define TARGET
#define NAME(x) x##_plain
#define ROWS 2
#include "kernels.h"
#undef TARGET
#undef NAME
#undef ROWS

struct kernels {
    const char *name;
    void (*attend_one)(const struct swift_layer *, const struct swift_step *, int64_t, int64_t, float *);
    void (*add_norm_row)(float *, const float *, const float *, float, int64_t, float *);
    void (*gate_row)(const float *, const float *, int64_t, float *);
    void (*gate_back_row)(const float *, const float *, const float *, int64_t, float *, float *, float *);
    float (*norm_row)(const float *, const float *, float, int64_t, float *, float *);
    void (*norm_back_row)(const float *, const float *, const float *, float, const float *, int64_t, float *);
    void (*turn_head)(const float *, const float *, const float *, int64_t, int, float *);
    void (*product_rows)(const float *, int64_t, const float *, const float *, int64_t, float *, int64_t, int64_t);
};

#define KERNELS(set)                                                                                                   \
    {#set, attend_one_##set, add_norm_row_##set, gate_row_##set, gate_back_row_##set, norm_row_##set,                  \
     norm_back_row_##set, turn_head_##set, product_rows_##set}
static const struct kernels SETS[] = {
#if defined(__x86_64__)
    KERNELS(avx512),
    KERNELS(avx2),
#endif
    KERNELS(plain),
};
static const struct kernels *chosen = 0;

static int runs_here(const char *name) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (!strcmp(name, "avx512"))
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
               __builtin_cpu_supports("fma");
    if (!strcmp(name, "avx2"))
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
    return !strcmp(name, "plain");
}

/* Use the instruction set of this name, or the first that this processor has for NULL; its name, or NULL for none. */
const char *swift_choose(const char *name) {
    for (unsigned i = 0; i < sizeof SETS / sizeof *SETS; i++)
        if ((!name || !strcmp(name, SETS[i].name)) && runs_here(SETS[i].name)) {
            chosen = &SETS[i];
            return chosen->name;
        }
    return 0;
}

/* Threads take tasks from a counter until there are none left. */
struct work {
    void (*task)(const void *, int64_t, int64_t);
    const void *data;
    int64_t count, portion, next, threads_so_far;
};

static void take_tasks(void *shared) {
    struct work *work = shared;
    const int64_t thread = __atomic_fetch_add(&work->threads_so_far, 1, __ATOMIC_RELAXED);
    for (;;) {
        const int64_t start = __atomic_fetch_add(&work->next, work->portion, __ATOMIC_RELAXED);
        if (start >= work->count)
            return;
        const int64_t stop = start + work->portion < work->count ? start + work->portion : work->count;
        for (int64_t i = start; i < stop; i++)
            work->task(work->data, i, thread);
    }
}

static void share_out(void (*task)(const void *, int64_t, int64_t), const void *data, int64_t count, int64_t threads) {
    if (!runtime || threads <= 1) {
        for (int64_t i = 0; i < count; i++)
            task(data, i, 0);
        return;
    }
    const int64_t portion = count / (threads * 8);
    struct work work = {task, data, count, portion > 0 ? portion : 1, 0, 0};
    runtime(take_tasks, &work, (unsigned)threads, 0);
}

struct attention {
    const struct swift_layer *layer;
    const struct swift_step *step;
};

static void attention_task(const void *data, int64_t index, int64_t thread) {
    const struct attention *both = data;
    const struct swift_step *step = both->step; /* rows of a cell follow each other: they read the same prompt */
    chosen->attend_one(both->layer, step, index % step->rows, index / step->rows, step->workspace + thread * step->share);
}

/* Attention of a step in one layer, with the norms of heads and rotary positions; writes the cache. */
void swift_attend(const struct swift_layer *layer, const struct swift_step *step) {
    const struct attention both = {layer, step};
    share_out(attention_task, &both, step->rows * layer->groups, step->threads);
}

struct add_norm {
    float *hidden;
    const float *added, *weight;
    float epsilon;
    float *output;
    int64_t width;
};

static void add_norm_task(const void *data, int64_t row, int64_t thread) {
    const struct add_norm *rows = data;
    const int64_t at = row * rows->width;
    (void)thread;
    chosen->add_norm_row(rows->hidden + at, rows->added ? rows->added + at : 0, rows->weight, rows->epsilon, rows->width,
                         rows->output + at);
}

/* hidden [N, width] += added [N, width] (may be NULL); output [N, width] = root-mean-square norm times weight. */
void swift_add_norm(float *hidden, const float *added, const float *weight, float epsilon, float *output, int64_t count,
                    int64_t width, int64_t threads) {
    const struct add_norm rows = {hidden, added, weight, epsilon, output, width};
    share_out(add_norm_task, &rows, count, threads);
}

struct gate {
    const float *grads, *gates, *ups;
    float *dgates, *dups, *output;
    int64_t width, stride;
};

static void gate_task(const void *data, int64_t row, int64_t thread) {
    const struct gate *rows = data;
    (void)thread;
    chosen->gate_row(rows->gates + row * rows->stride, rows->ups + row * rows->stride, rows->width,
                     rows->output + row * rows->width);
}

/* output [N, width] = silu(gates) * ups, whose rows lie `stride` apart. */
void swift_gate(const float *gates, const float *ups, float *output, int64_t count, int64_t width, int64_t stride,
                int64_t threads) {
    const struct gate rows = {0, gates, ups, 0, 0, output, width, stride};
    share_out(gate_task, &rows, count, threads);
}

static void gate_back_task(const void *data, int64_t row, int64_t thread) {
    const struct gate *rows = data;
    const int64_t at = row * rows->width;
    (void)thread;
    chosen->gate_back_row(rows->grads + at, rows->gates + at, rows->ups + at, rows->width, rows->dgates + at,
                          rows->dups + at, rows->output + at);
}

/* The gradients of gates (may overwrite `grads`) and ups from `grads` of the output, and that output; [N, width] each. */
void swift_gate_back(const float *grads, const float *gates, const float *ups, float *dgates, float *dups,
                     float *output, int64_t count, int64_t width, int64_t threads) {
    const struct gate rows = {grads, gates, ups, dgates, dups, output, width, width};
    share_out(gate_back_task, &rows, count, threads);
}

struct norm {
    const float *first, *weight, *normed, *added;
    float epsilon;
    float *inverse, *result, *output;
    int64_t width;
};

static void norm_task(const void *data, int64_t row, int64_t thread) {
    const struct norm *rows = data;
    const int64_t at = row * rows->width;
    (void)thread;
    rows->inverse[row] = chosen->norm_row(rows->first + at, rows->weight, rows->epsilon, rows->width, rows->result + at,
                                          rows->output + at);
}

/* normed [N, width] = states / rms, inverse [N] = 1 / rms, output = normed * weight (both may be NULL). */
void swift_norm(const float *states, const float *weight, float epsilon, float *normed, float *inverse, float *output,
                int64_t count, int64_t width, int64_t threads) {
    const struct norm rows = {states, weight, 0, 0, epsilon, inverse, normed, output, width};
    share_out(norm_task, &rows, count, threads);
}

static void norm_back_task(const void *data, int64_t row, int64_t thread) {
    const struct norm *rows = data;
    const int64_t at = row * rows->width;
    (void)thread;
    chosen->norm_back_row(rows->first + at, rows->weight, rows->normed + at, rows->inverse[row],
                          rows->added ? rows->added + at : 0, rows->width, rows->output + at);
}

/* output [N, width]: the gradient of states from `grads` of the output of swift_norm, plus `added`; weight and added may
   be NULL, and output may be grads. */
void swift_norm_back(const float *grads, const float *weight, const float *normed, float *inverse, const float *added,
                     float *output, int64_t count, int64_t width, int64_t threads) {
    const struct norm rows = {grads, weight, normed, added, 0, inverse, 0, output, width};
    share_out(norm_back_task, &rows, count, threads);
}

struct turn {
    const float *states, *cosines, *sines;
    float *output;
    int64_t heads, depth, row, head, output_row;
    int back;
};

static void turn_task(const void *data, int64_t row, int64_t thread) {
    const struct turn *rows = data;
    const int64_t angle = row * rows->depth;
    (void)thread;
    for (int64_t head = 0; head < rows->heads; head++)
        chosen->turn_head(rows->states + row * rows->row + head * rows->head, rows->cosines + angle,
                          rows->sines + angle, rows->depth, rows->back,
                          rows->output + row * rows->output_row + head * rows->depth);
}

/* output [N, heads, depth] with rotary positions, or (back) the gradient of states that were turned. Rows of states lie
   `row` apart and heads `head`, rows of the output `output_row`; cosines and sines [N, depth], these negative in their
   first half. */
void swift_turn(const float *states, const float *cosines, const float *sines, float *output, int64_t count,
                int64_t heads, int64_t depth, int64_t row, int64_t head, int64_t output_row, int64_t back,
                int64_t threads) {
    const struct turn rows = {states, cosines, sines, output, heads, depth, row, head, output_row, back != 0};
    share_out(turn_task, &rows, count, threads);
}

struct product {
    const float *rows, *panels, *bias;
    float *output;
    int64_t count, depth, width, portion, portions;
};

static void product_task(const void *data, int64_t index, int64_t thread) {
    const struct product *all = data;
    const int64_t panel = index / all->portions, column = panel * PANEL;
    const int64_t row = index % all->portions * all->portion;
    const int64_t count = all->count - row < all->portion ? all->count - row : all->portion;
    const int64_t columns = all->width - column < PANEL ? all->width - column : PANEL;
    (void)thread;
    chosen->product_rows(all->rows + row * all->depth, all->depth, all->panels + panel * all->depth * PANEL,
                         all->bias ? all->bias + column : 0, count, all->output + row * all->width + column, all->width,
                         columns);
}

/* output [N, M] = rows [N, K] times a matrix in panels [ceil(M / 32), K, 32], plus bias [32 ceil(M / 32)] (may be NULL).
   The sums of a row are taken in the same order whatever rows are beside it. */
void swift_product(const float *rows, const float *panels, const float *bias, float *output, int64_t count,
                   int64_t depth, int64_t width, int64_t threads) {
    const int64_t num_panels = (width + PANEL - 1) / PANEL;
    int64_t portion = 128; /* rows that stay in the cache beside a panel; fewer where threads would have nothing to do */
    while (portion > 8 && num_panels * ((count + portion - 1) / portion) < 4 * threads)
        portion /= 2;
    const int64_t portions = (count + portion - 1) / portion;
    const struct product all = {rows, panels, bias, output, count, depth, width, portion, portions};
    share_out(product_task, &all, num_panels * portions, threads);
}

struct packing {
    const float *weight;
    float *panels;
    int64_t width, depth;
};

static void packing_task(const void *data, int64_t panel, int64_t thread) {
    const struct packing *all = data;
    const int64_t first = panel * PANEL, columns = all->width - first < PANEL ? all->width - first : PANEL;
    const float *weight = all->weight + first * all->depth;
    float *panels = all->panels + first * all->depth;
    (void)thread;
    for (int64_t start = 0; start < all->depth; start += LANES) { /* a line of each row at a time */
        const int64_t stop = start + LANES < all->depth ? start + LANES : all->depth;
        for (int64_t column = 0; column < PANEL; column++)
            for (int64_t k = start; k < stop; k++)
                panels[k * PANEL + column] = column < columns ? weight[column * all->depth + k] : 0;
    }
}

/* panels [ceil(M / 32), K, 32] of weight [M, K]; columns beyond M are zero. */
void swift_pack(const float *weight, float *panels, int64_t width, int64_t depth, int64_t threads) {
    const struct packing all = {weight, panels, width, depth};
    share_out(packing_task, &all, (width + PANEL - 1) / PANEL, threads);
}
