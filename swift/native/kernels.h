/* The kernels of kernels.c for one instruction set: compiled once for each, with TARGET and NAME(x) defined there.

   Vectors are those of GCC and Clang, 16 floats wide; the compiler splits them where registers are narrower. What a row
   gets is computed from that row alone, in an order that depends on its own lengths only. */

#define INLINE static inline __attribute__((always_inline)) TARGET

INLINE vec NAME(load)(const float *at) {
    return *(const vec_in_memory *)at;
}

INLINE void NAME(store)(float *at, vec value) {
    *(vec_in_memory *)at = value;
}

INLINE vec NAME(all)(float value) {
    return value - (vec){0};
}

/* `yes` where the lanes of `mask` are all ones, `no` where they are all zeros */
INLINE vec NAME(choose)(integers mask, vec yes, vec no) {
    return (vec)((mask & (integers)yes) | (~mask & (integers)no));
}

INLINE float NAME(sum)(vec value) {
    float total = 0;
    for (int i = 0; i < LANES; i++)
        total += value[i];
    return total;
}

/* e^x, with a relative error below 2e-7 from -87 to 88 and the values of these ends beyond them; NaN for NaN.
   x = n ln 2 + r with |r| <= ln 2 / 2; the polynomial is Cephes' (expf.c, S. Moshier, after Cody and Waite). */
INLINE vec NAME(exponential)(vec x) {
    const vec low = NAME(all)(-87.0f), high = NAME(all)(88.0f);
    x = NAME(choose)(x < low, low, x);
    x = NAME(choose)(x > high, high, x);
    const vec magic = NAME(all)(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec shifted = x * 1.44269504088896341f + magic;
    vec n = shifted - magic;
    vec r = x - n * 0.693359375f;
    r = r - n * -2.12194440e-4f;
    vec p = NAME(all)(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    integers bits = ((integers)shifted - (integers)magic + 127) << 23;
    return p * (vec)bits;
}

/* scores[q][0..16*vectors) = queries[q] . keys[:, 0..16*vectors), for `count` queries of `depth` numbers. */
INLINE void NAME(dot_block)(const float *queries, const int count, const float *keys, int64_t stride, int64_t depth,
                            const int vectors, float *scores, int64_t score_stride) {
    vec sums[4][4];
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++)
            sums[q][v] = (vec){0};
    for (int64_t d = 0; d < depth; d++) {
        vec key[4];
        for (int v = 0; v < vectors; v++)
            key[v] = NAME(load)(keys + d * stride + v * LANES);
        for (int q = 0; q < count; q++) {
            const float query = queries[q * depth + d];
            for (int v = 0; v < vectors; v++)
                sums[q][v] += query * key[v];
        }
    }
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++)
            NAME(store)(scores + q * score_stride + v * LANES, sums[q][v]);
}

INLINE void NAME(dots_of)(const float *queries, const int count, const float *keys, int64_t stride, int64_t depth,
                          int64_t width, float *scores, int64_t score_stride) {
    int64_t at = 0;
    for (; at + 4 * LANES <= width; at += 4 * LANES)
        NAME(dot_block)(queries, count, keys + at, stride, depth, 4, scores + at, score_stride);
    for (; at < width; at += LANES)
        NAME(dot_block)(queries, count, keys + at, stride, depth, 1, scores + at, score_stride);
}

/* scores [count, width] of queries [count, depth] with keys [depth, width], whose rows lie `stride` apart; width is a
   multiple of 16. */
TARGET static void NAME(dots)(const float *queries, int64_t count, const float *keys, int64_t stride, int64_t depth,
                              int64_t width, float *scores, int64_t score_stride) {
    int64_t q = 0;
    for (; q + 4 <= count; q += 4)
        NAME(dots_of)(queries + q * depth, 4, keys, stride, depth, width, scores + q * score_stride, score_stride);
    for (; q + 2 <= count; q += 2)
        NAME(dots_of)(queries + q * depth, 2, keys, stride, depth, width, scores + q * score_stride, score_stride);
    for (; q < count; q++)
        NAME(dots_of)(queries + q * depth, 1, keys, stride, depth, width, scores + q * score_stride, score_stride);
}

/* output[q][0..16*vectors) += sum over positions of weights[q][position] * values[position][0..16*vectors) */
INLINE void NAME(mix_block)(const float *weights, int64_t weight_stride, const int count, const float *values,
                            int64_t depth, int64_t width, const int vectors, float *output) {
    vec sums[4][4];
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++)
            sums[q][v] = NAME(load)(output + q * depth + v * LANES);
    for (int64_t position = 0; position < width; position++) {
        vec value[4];
        for (int v = 0; v < vectors; v++)
            value[v] = NAME(load)(values + position * depth + v * LANES);
        for (int q = 0; q < count; q++) {
            const float weight = weights[q * weight_stride + position];
            for (int v = 0; v < vectors; v++)
                sums[q][v] += weight * value[v];
        }
    }
    for (int q = 0; q < count; q++)
        for (int v = 0; v < vectors; v++)
            NAME(store)(output + q * depth + v * LANES, sums[q][v]);
}

INLINE void NAME(mix_of)(const float *weights, int64_t weight_stride, const int count, const float *values,
                         int64_t depth, int64_t width, float *output) {
    int64_t at = 0;
    for (; at + 4 * LANES <= depth; at += 4 * LANES)
        NAME(mix_block)(weights, weight_stride, count, values + at, depth, width, 4, output + at);
    for (; at + 2 * LANES <= depth; at += 2 * LANES)
        NAME(mix_block)(weights, weight_stride, count, values + at, depth, width, 2, output + at);
    for (; at < depth; at += LANES)
        NAME(mix_block)(weights, weight_stride, count, values + at, depth, width, 1, output + at);
}

/* output [count, depth] += weights [count, width] times values [width, depth]; depth is a multiple of 16. */
TARGET static void NAME(mix)(const float *weights, int64_t weight_stride, int64_t count, const float *values,
                             int64_t depth, int64_t width, float *output) {
    int64_t q = 0;
    for (; q + 4 <= count; q += 4)
        NAME(mix_of)(weights + q * weight_stride, weight_stride, 4, values, depth, width, output + q * depth);
    for (; q + 2 <= count; q += 2)
        NAME(mix_of)(weights + q * weight_stride, weight_stride, 2, values, depth, width, output + q * depth);
    for (; q < count; q++)
        NAME(mix_of)(weights + q * weight_stride, weight_stride, 1, values, depth, width, output + q * depth);
}

/* 1 / sqrt(mean of squares + epsilon) */
INLINE float NAME(inverse_rms)(const float *row, int64_t width, float epsilon) {
    vec squares = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec part = NAME(load)(row + i);
        squares += part * part;
    }
    return 1.0f / sqrtf(NAME(sum)(squares) / (float)width + epsilon);
}

/* One head [depth] with its norm (or none) and rotary position; `sin` is negative in its first half. */
INLINE void NAME(turn)(const float *head, const float *norm, float epsilon, const float *cos, const float *sin,
                       int64_t depth, float scale, float *output) {
    const float inverse = norm ? NAME(inverse_rms)(head, depth, epsilon) : 1.0f;
    const int64_t half = depth / 2;
    for (int64_t d = 0; d < depth; d++) {
        const int64_t other = d < half ? d + half : d - half;
        const float own = norm ? head[d] * inverse * norm[d] : head[d];
        const float opposite = norm ? head[other] * inverse * norm[other] : head[other];
        output[d] = (own * cos[d] + opposite * sin[d]) * scale;
    }
}

/* Weights of softmax from scores, not yet divided by their sum, which is returned. The first `prompt` of `prompt_end`
   scores count and the first `own` (at least 1) of `own_end` behind them; the others weigh nothing. */
INLINE float NAME(weigh)(float *scores, int64_t prompt, int64_t prompt_end, int64_t own, int64_t own_end) {
    float *own_scores = scores + prompt_end;
    const int64_t width = prompt_end + own_end;
    for (int64_t i = prompt; i < prompt_end; i++)
        scores[i] = own_scores[0];
    for (int64_t i = own; i < own_end; i++)
        own_scores[i] = own_scores[0];
    vec tops = NAME(load)(scores);
    for (int64_t i = LANES; i < width; i += LANES) {
        const vec part = NAME(load)(scores + i);
        tops = NAME(choose)(part > tops, part, tops);
    }
    float top = tops[0];
    for (int i = 1; i < LANES; i++)
        top = tops[i] > top ? tops[i] : top;
    for (int64_t i = 0; i < width; i += LANES)
        NAME(store)(scores + i, NAME(exponential)(NAME(load)(scores + i) - top));
    for (int64_t i = prompt; i < prompt_end; i++)
        scores[i] = 0;
    for (int64_t i = own; i < own_end; i++)
        own_scores[i] = 0;
    vec sums = {0};
    for (int64_t i = 0; i < width; i += LANES)
        sums += NAME(load)(scores + i);
    return NAME(sum)(sums);
}

/* One row and one key/value head: write its position, attend with the query heads that share it. */
TARGET static void NAME(attend_one)(const struct swift_layer *layer, const struct swift_step *step, int64_t row,
                                    int64_t group, float *workspace) {
    const int64_t depth = layer->depth, shared = layer->heads / layer->groups, room = layer->room;
    const int64_t slot = step->slots[row], own = step->own[row], position = step->positions[row];
    const int64_t cell = slot / layer->size, prompt = step->prompts[row];
    const float *states = step->states + row * (layer->heads + 2 * layer->groups) * depth;
    const float *cos = step->cosines + position * depth, *sin = step->sines + position * depth;
    const int64_t head = cell * layer->groups + group;
    const int64_t own_head = head * layer->size + slot % layer->size;
    float *own_keys = layer->own_keys + own_head * depth * room;
    float *own_values = layer->own_values + own_head * room * depth;
    const int64_t prompt_end = (prompt + LANES - 1) / LANES * LANES, own_end = (own + LANES) / LANES * LANES;
    float *queries = workspace, *output = queries + shared * depth, *key = output + shared * depth;
    float *scores = key + depth;
    const int64_t score_stride = prompt_end + own_end;

    NAME(turn)(states + (layer->heads + group) * depth, layer->key_norm, layer->epsilon, cos, sin, depth, 1.0f, key);
    for (int64_t d = 0; d < depth; d++)
        own_keys[d * room + own] = key[d];
    memcpy(own_values + own * depth, states + (layer->heads + layer->groups + group) * depth, depth * sizeof(float));
    for (int64_t q = 0; q < shared; q++)
        NAME(turn)(states + (group * shared + q) * depth, layer->query_norm, layer->epsilon, cos, sin, depth,
                   layer->scale, queries + q * depth);

    NAME(dots)(queries, shared, layer->prompt_keys + head * depth * layer->width, layer->width, depth, prompt_end,
               scores, score_stride);
    NAME(dots)(queries, shared, own_keys, room, depth, own_end, scores + prompt_end, score_stride);
    float sums[shared];
    for (int64_t q = 0; q < shared; q++)
        sums[q] = NAME(weigh)(scores + q * score_stride, prompt, prompt_end, own + 1, own_end);
    memset(output, 0, shared * depth * sizeof(float));
    NAME(mix)(scores, score_stride, shared, layer->prompt_values + head * layer->width * depth, depth, prompt, output);
    NAME(mix)(scores + prompt_end, score_stride, shared, own_values, depth, own + 1, output);
    float *result = step->output + row * layer->heads * depth + group * shared * depth;
    for (int64_t q = 0; q < shared; q++) {
        const float inverse = 1.0f / sums[q];
        for (int64_t d = 0; d < depth; d++)
            result[q * depth + d] = output[q * depth + d] * inverse;
    }
}

/* hidden += added (if there is any); output = hidden / rms(hidden) * weight */
TARGET static void NAME(add_norm_row)(float *hidden, const float *added, const float *weight, float epsilon,
                                      int64_t width, float *output) {
    if (added)
        for (int64_t i = 0; i < width; i += LANES)
            NAME(store)(hidden + i, NAME(load)(hidden + i) + NAME(load)(added + i));
    const float inverse = NAME(inverse_rms)(hidden, width, epsilon);
    for (int64_t i = 0; i < width; i += LANES)
        NAME(store)(output + i, NAME(load)(hidden + i) * inverse * NAME(load)(weight + i));
}

/* output = gate * s(gate) * up, with s the logistic function */
TARGET static void NAME(gate_row)(const float *gates, const float *ups, int64_t width, float *output) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vec gate = NAME(load)(gates + i);
        NAME(store)(output + i, gate / (1.0f + NAME(exponential)(-gate)) * NAME(load)(ups + i));
    }
}

/* From the gradient of gate_row's output: its output again and the gradients of gates (may overwrite `grads`) and ups. */
TARGET static void NAME(gate_back_row)(const float *grads, const float *gates, const float *ups, int64_t width,
                                       float *dgates, float *dups, float *output) {
    for (int64_t i = 0; i < width; i += LANES) {
        const vec grad = NAME(load)(grads + i), gate = NAME(load)(gates + i), up = NAME(load)(ups + i);
        const vec slope = 1.0f / (1.0f + NAME(exponential)(-gate)), active = gate * slope;
        NAME(store)(output + i, active * up);
        NAME(store)(dups + i, grad * active);
        NAME(store)(dgates + i, grad * up * (slope + active * (1.0f - slope)));
    }
}

/* normed = row / rms(row), and output = normed * weight if there is a weight; returns 1 / rms(row). */
TARGET static float NAME(norm_row)(const float *row, const float *weight, float epsilon, int64_t width, float *normed,
                                   float *output) {
    const float inverse = NAME(inverse_rms)(row, width, epsilon);
    for (int64_t i = 0; i < width; i += LANES) {
        const vec part = NAME(load)(row + i) * inverse;
        NAME(store)(normed + i, part);
        if (weight)
            NAME(store)(output + i, part * NAME(load)(weight + i));
    }
    return inverse;
}

/* The gradient of what went into norm_row from `grads` of what came out, plus `added`; weight and added may be NULL. */
TARGET static void NAME(norm_back_row)(const float *grads, const float *weight, const float *normed, float inverse,
                                       const float *added, int64_t width, float *output) {
    vec sums = {0};
    for (int64_t i = 0; i < width; i += LANES) {
        vec grad = NAME(load)(grads + i);
        if (weight)
            grad *= NAME(load)(weight + i);
        sums += grad * NAME(load)(normed + i);
    }
    const float mean = NAME(sum)(sums) / (float)width;
    for (int64_t i = 0; i < width; i += LANES) {
        vec grad = NAME(load)(grads + i);
        if (weight)
            grad *= NAME(load)(weight + i);
        grad = (grad - NAME(load)(normed + i) * mean) * inverse;
        NAME(store)(output + i, added ? grad + NAME(load)(added + i) : grad);
    }
}

/* One head with rotary position, or (back) the gradient of one that was turned. */
TARGET static void NAME(turn_head)(const float *restrict head, const float *restrict cos, const float *restrict sin,
                                   int64_t depth, int back, float *restrict output) {
    const int64_t half = depth / 2;
    const float *first = back ? sin + half : sin, *second = back ? sin : sin + half;
    for (int64_t d = 0; d < half; d++) {
        output[d] = head[d] * cos[d] + head[d + half] * first[d];
        output[d + half] = head[d + half] * cos[d + half] + head[d] * second[d];
    }
}

/* output [count, 32] += rows [count, depth] times a panel [depth, 32]; rows lie `row_stride` apart, and `columns` of each
   32 are there. */
INLINE void NAME(product_block)(const float *rows, int64_t row_stride, int64_t depth, const float *panel,
                                const int count, float *output, int64_t stride, int64_t columns) {
    vec sums[ROWS][2];
    for (int r = 0; r < count; r++)
        sums[r][0] = sums[r][1] = (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        const vec left = NAME(load)(panel + k * PANEL), right = NAME(load)(panel + k * PANEL + LANES);
        for (int r = 0; r < count; r++) {
            const float state = rows[r * row_stride + k];
            sums[r][0] += state * left;
            sums[r][1] += state * right;
        }
    }
    for (int r = 0; r < count; r++) {
        float *line = output + r * stride;
        if (columns == PANEL) {
            NAME(store)(line, NAME(load)(line) + sums[r][0]);
            NAME(store)(line + LANES, NAME(load)(line + LANES) + sums[r][1]);
        } else {
            float whole[PANEL];
            NAME(store)(whole, sums[r][0]);
            NAME(store)(whole + LANES, sums[r][1]);
            for (int64_t column = 0; column < columns; column++)
                line[column] += whole[column];
        }
    }
}

/* output [count, columns] = bias [32] (may be NULL) plus the product. Sums over depth are taken in blocks, which are
   added up: their rounding errors are those of short sums. */
TARGET static void NAME(product_rows)(const float *rows, int64_t depth, const float *panel, const float *bias,
                                      int64_t count, float *output, int64_t stride, int64_t columns) {
    for (int64_t r = 0; r < count; r++)
        for (int64_t column = 0; column < columns; column++)
            output[r * stride + column] = bias ? bias[column] : 0;
    for (int64_t start = 0; start < depth; start += DEPTH) {
        const int64_t length = depth - start < DEPTH ? depth - start : DEPTH;
        const float *states = rows + start, *part = panel + start * PANEL;
        int64_t r = 0;
        for (; r + ROWS <= count; r += ROWS)
            NAME(product_block)(states + r * depth, depth, length, part, ROWS, output + r * stride, stride, columns);
        for (; r + ROWS / 2 <= count && ROWS > 2; r += ROWS / 2)
            NAME(product_block)(states + r * depth, depth, length, part, ROWS / 2, output + r * stride, stride, columns);
        for (; r < count; r++)
            NAME(product_block)(states + r * depth, depth, length, part, 1, output + r * stride, stride, columns);
    }
}

#undef INLINE
