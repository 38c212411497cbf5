/* SPDX-License-Identifier: Apache-2.0

   The loops of a decode step: products of few rows with the parameters as they lie in memory; attention of one token
   per row over a prefix that rows share and over the row's own response; and, each in one pass, RMS norms, rotary
   positions and the gate of an MLP, which round to bfloat16 where training does.

   Sums are float32, in vectors of 16. A tile is up to six rows by four columns: its 24 sums stay in registers, and
   what is loaded for a column serves all rows. Few rows are as fast as the weights come from memory, so those of a
   later tile are asked for ahead. No result depends on the other rows of a batch.

   Legend: R rows, D inputs or head size, O outputs, K key-value heads, G query heads of each, P prefixes, S tokens of
   the longest, C slots of the response cache, T tokens of a response that there is room for, H heads, F width of the
   MLP. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define COLUMNS 4
#define MOST_ROWS 6
#define TILES_AHEAD 2  /* of weights */
#define TOKENS_AHEAD 8 /* of keys and of values */
#define BLOCK 64       /* tokens whose scores are held at a time */

typedef float lanes __attribute__((vector_size(64)));
typedef float four __attribute__((vector_size(16)));
typedef int32_t places __attribute__((vector_size(16)));
typedef uint32_t bits __attribute__((vector_size(64)));
typedef uint16_t halves __attribute__((vector_size(32)));

/* ---- sixteen numbers ---- */

INLINE lanes load(const float *from)
{
    lanes values;
    memcpy(&values, from, sizeof values);
    return values;
}

INLINE void store(float *to, lanes values) { memcpy(to, &values, sizeof values); }

/* 32 bfloat16 numbers as 16 words: the upper half of each is the number at the odd place. */
INLINE bits pairs(const uint16_t *from)
{
    bits values;
    memcpy(&values, from, sizeof values);
    return values;
}

/* Of 32 bfloat16 numbers, those at even and at odd places, as float32: a bfloat16 is the upper half of a float32. */
INLINE lanes even(const uint16_t *from) { return (lanes)(pairs(from) << 16); }
INLINE lanes odd(const uint16_t *from) { return (lanes)(pairs(from) & 0xffff0000u); }

/* `first` where all bits of `is_first` are set, `second` where none is. */
INLINE lanes choose(bits is_first, lanes first, lanes second)
{
    return (lanes)(((bits)first & is_first) | ((bits)second & ~is_first));
}

/* To the nearest bfloat16, ties to even; NaN stays NaN. */
INLINE halves rounded(lanes values)
{
    bits raw = (bits)values, near = raw + 0x7fffu + (raw >> 16 & 1u);
    lanes none = (lanes)((bits){0} + 0x7fc00000u);
    return __builtin_convertvector((bits)choose((bits)(values == values), (lanes)near, none) >> 16, halves);
}

/* 16 numbers from place `at` on, of a tensor in bfloat16 or float32. */
INLINE lanes read(const void *from, long at, int is_half)
{
    if (!is_half)
        return load((const float *)from + at);
    halves values;
    memcpy(&values, (const uint16_t *)from + at, sizeof values);
    return (lanes)(__builtin_convertvector(values, bits) << 16);
}

/* 16 numbers to place `at` of a tensor in bfloat16 or float32. */
INLINE void write(void *to, long at, lanes values, int is_half)
{
    halves near = rounded(values);
    if (is_half)
        memcpy((uint16_t *)to + at, &near, sizeof near);
    else
        store((float *)to + at, values);
}

/* Four sums of four numbers each, which together are the sum of all 16. */
INLINE four quarters(lanes x)
{
    four parts[4];
    memcpy(parts, &x, sizeof x);
    return (parts[0] + parts[2]) + (parts[1] + parts[3]);
}

/* The sum of a, of b, of c and of d. */
INLINE four totals(lanes a, lanes b, lanes c, lanes d)
{
    const places first = {0, 4, 1, 5}, second = {2, 6, 3, 7}, low = {0, 1, 4, 5}, high = {2, 3, 6, 7};
    four qa = quarters(a), qb = quarters(b), qc = quarters(c), qd = quarters(d);
    four ab = __builtin_shuffle(qa, qb, first) + __builtin_shuffle(qa, qb, second);
    four cd = __builtin_shuffle(qc, qd, first) + __builtin_shuffle(qc, qd, second);
    return __builtin_shuffle(ab, cd, low) + __builtin_shuffle(ab, cd, high);
}

INLINE float total(lanes x)
{
    four q = quarters(x);
    return q[0] + q[1] + q[2] + q[3];
}

INLINE float greatest(lanes x)
{
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++)
        most = x[lane] > most ? x[lane] : most;
    return most;
}

/* exp of numbers up to 0, to 2e-7 of the result; 0 below -87; NaN stays NaN. The power of two is split
   off by adding 1.5 * 2**23, which leaves whole numbers; the polynomial is that of Cephes (expf). */
INLINE lanes exponential(lanes x)
{
    const float magic = 12582912.0f;
    lanes shifted = x * 1.44269504f + magic, whole = shifted - magic;
    lanes rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    lanes power = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    power = power * rest + 8.3334519073e-3f;
    power = power * rest + 4.1665795894e-2f;
    power = power * rest + 1.6666665459e-1f;
    power = power * rest + 5.0000001201e-1f;
    power = power * rest * rest + rest + 1.0f;
    lanes scaled = choose((bits)(x < -87.0f), (lanes){0}, (lanes)((bits)power + ((bits)shifted << 23)));
    return choose((bits)(x == x), scaled, x);
}

/* The nearest numbers that a tensor in bfloat16 or float32 can hold, as float32. */
INLINE lanes held(lanes values, int is_half)
{
    return is_half ? (lanes)(__builtin_convertvector(rounded(values), bits) << 16) : values;
}

/* ---- tiles ---- */

/* A statement for each of MOST_ROWS rows. In a function that is compiled for a constant number of `rows`, the compiler
   drops the statements of further rows. The sums of row r are s<r>0 to s<r>3, one for each column. */
#define EACH_ROW(DO) DO(0) DO(1) DO(2) DO(3) DO(4) DO(5)
#define START(r) lanes s##r##0 = {0}, s##r##1 = {0}, s##r##2 = {0}, s##r##3 = {0};
#define ADD(r) \
    if (r < rows) { \
        lanes x = load(left + r * size + at); \
        s##r##0 += x * c0; \
        s##r##1 += x * c1; \
        s##r##2 += x * c2; \
        s##r##3 += x * c3; \
    }
#define SUMS(r) totals(s##r##0, s##r##1, s##r##2, s##r##3)

/* ---- products ---- */

struct product {
    long num_rows, size;        /* R, D: a multiple of 32 */
    long first, num_outputs;    /* where the columns of a weight begin in `out`, and how many it has from all weights */
    int is_half;                /* whether `out` is bfloat16 */
    int num_threads;
    float *room;                /* [R, D]: the rows as float32, reordered by `multiply` */
};

/* Add the bias to the sums of four columns, and store them at place `at` of `out`. */
INLINE void finish(void *out, long at, four sums, const uint16_t *bias, int is_half)
{
    if (bias)
        for (int column = 0; column < COLUMNS; column++) {
            uint32_t word = (uint32_t)bias[column] << 16;
            float value;
            memcpy(&value, &word, sizeof value);
            sums[column] += value;
        }
    if (is_half) {
        lanes padded = {0};
        memcpy(&padded, &sums, sizeof sums);
        halves near = rounded(padded);
        memcpy((uint16_t *)out + at, &near, COLUMNS * sizeof(uint16_t));
    } else
        memcpy((float *)out + at, &sums, sizeof sums);
}

/* The products of some rows with four columns. */
INLINE void product_tile(const int rows, const struct product *p, void *out, long row, long column,
                         const uint16_t *weight, const uint16_t *bias)
{
    const long size = p->size;
    const float *left = p->room + row * size;
    EACH_ROW(START)
    for (long at = 0; at < size; at += 2 * LANES) {
        const uint16_t *w0 = weight + at, *w1 = w0 + size, *w2 = w1 + size, *w3 = w2 + size;
        const long ahead = TILES_AHEAD * COLUMNS * size;
        __builtin_prefetch(w0 + ahead), __builtin_prefetch(w1 + ahead);
        __builtin_prefetch(w2 + ahead), __builtin_prefetch(w3 + ahead);
        lanes c0 = even(w0), c1 = even(w1), c2 = even(w2), c3 = even(w3);
        EACH_ROW(ADD)
        left += LANES;
        c0 = odd(w0), c1 = odd(w1), c2 = odd(w2), c3 = odd(w3);
        EACH_ROW(ADD)
        left -= LANES;
    }
    long to = row * p->num_outputs + p->first + column;
#define FINISH(r) \
    if (r < rows) \
        finish(out, to + r * p->num_outputs, SUMS(r), bias, p->is_half);
    EACH_ROW(FINISH)
}

/* [R, D] bfloat16 by [width, D] bfloat16 -> columns of [R, O] in bfloat16 or float32; `width` is a multiple of 4. */
void multiply(const struct product *p, void *out, const uint16_t *states, const uint16_t *weight,
              const uint16_t *bias, long width)
{
    /* The rows in the order in which a word of weights is taken apart: of 32, those at even places, then the others. */
    for (long at = 0; at < p->num_rows * p->size; at += 2 * LANES) {
        store(p->room + at, even(states + at));
        store(p->room + at + LANES, odd(states + at));
    }
    const long num_tiles = (p->num_rows + MOST_ROWS - 1) / MOST_ROWS;
#pragma omp parallel for schedule(static) num_threads(p->num_threads)
    for (long column = 0; column < width; column += COLUMNS)
        for (long tile = 0; tile < num_tiles; tile++) {
            const long row = p->num_rows * tile / num_tiles, end = p->num_rows * (tile + 1) / num_tiles;
            switch (end - row) {
#define PRODUCT(n) \
    case n: \
        product_tile(n, p, out, row, column, weight + column * p->size, bias ? bias + column : 0); \
        break;
                PRODUCT(1) PRODUCT(2) PRODUCT(3) PRODUCT(4) PRODUCT(5) PRODUCT(6)
            }
        }
}

/* ---- attention ---- */

struct decode {
    long num_rows, num_key_heads, group, size;                /* R, K, G, D: a multiple of 16 */
    long prefix_room, own_room;                              /* S, T */
    long query_stride, key_stride, value_stride;              /* from row to row */
    long window;                                              /* keys that a token sees; 0: all */
    const int64_t *prefix_of, *prefix_length, *num_written; /* of each row */
    const float *sinks;                                       /* [K * G], or none */
    float scale, softcap;                                     /* 0: no cap */
    int is_half;                                              /* whether query, key, value and `out` are bfloat16 */
    int num_threads;
};

/* Online softmax of a few queries of one row (query heads that share a key-value head), over the keys so far. */
struct sight {
    float *mixed;                          /* [rows, D] sum of exp(score - most) * value, not yet divided by `sum` */
    float most[MOST_ROWS], sum[MOST_ROWS]; /* greatest score, and sum of exp(score - most) */
};

/* Consecutive tokens of a KV cache. */
struct stretch {
    const float *keys, *values; /* [num, D] */
    long num;
};

/* The scores of some queries for four keys. */
INLINE void score_tile(const int rows, float *scores, const float *left, const float *const keys[COLUMNS], long size)
{
    const float *k0 = keys[0], *k1 = keys[1], *k2 = keys[2], *k3 = keys[3];
    EACH_ROW(START)
    for (long at = 0; at < size; at += LANES) {
        const long ahead = TOKENS_AHEAD * size + at;
        __builtin_prefetch(k0 + ahead), __builtin_prefetch(k1 + ahead);
        __builtin_prefetch(k2 + ahead), __builtin_prefetch(k3 + ahead);
        lanes c0 = load(k0 + at), c1 = load(k1 + at), c2 = load(k2 + at), c3 = load(k3 + at);
        EACH_ROW(ADD)
    }
#define KEEP(r) \
    if (r < rows) { \
        four sums = SUMS(r); \
        memcpy(scores + r * BLOCK, &sums, sizeof sums); \
    }
    EACH_ROW(KEEP)
}

/* Add 16 or (`is_wide`) 64 columns of the values of `num` tokens to `mixed`, weighted by the shares of each query. */
INLINE void mix_tile(const int rows, const int is_wide, float *mixed, const float *shares, const float *values,
                     long num, long size)
{
#define TAKE(r) \
    lanes s##r##0, s##r##1, s##r##2, s##r##3; \
    if (r < rows) { \
        const float *from = mixed + r * size; \
        s##r##0 = load(from); \
        if (is_wide) \
            s##r##1 = load(from + 16), s##r##2 = load(from + 32), s##r##3 = load(from + 48); \
    }
    EACH_ROW(TAKE)
    for (long token = 0; token < num; token++, values += size) {
        lanes c0 = load(values), c1, c2, c3;
        const float *ahead = values + TOKENS_AHEAD * size;
        __builtin_prefetch(ahead);
        if (is_wide) {
            __builtin_prefetch(ahead + 16), __builtin_prefetch(ahead + 32), __builtin_prefetch(ahead + 48);
            c1 = load(values + 16), c2 = load(values + 32), c3 = load(values + 48);
        }
#define BLEND(r) \
    if (r < rows) { \
        float x = shares[r * BLOCK + token]; \
        s##r##0 += x * c0; \
        if (is_wide) \
            s##r##1 += x * c1, s##r##2 += x * c2, s##r##3 += x * c3; \
    }
        EACH_ROW(BLEND)
    }
#define GIVE(r) \
    if (r < rows) { \
        float *to = mixed + r * size; \
        store(to, s##r##0); \
        if (is_wide) \
            store(to + 16, s##r##1), store(to + 32, s##r##2), store(to + 48, s##r##3); \
    }
    EACH_ROW(GIVE)
}

/* Turn the scores of `num` further tokens into shares exp(score - most), and rescale the sums so far to the new
   greatest score. */
INLINE void weigh(struct sight *seen, int row, float *scores, long num, long size, float softcap)
{
    const long padded = (num + LANES - 1) / LANES * LANES;
    for (long token = 0; softcap > 0 && token < padded; token += LANES) {
        const lanes x = load(scores + token) / softcap, away = choose((bits)(x < 0), x, -x);
        const lanes power = exponential(away + away), bent = (1 - power) / (1 + power) * softcap; /* tanh of |x| */
        store(scores + token, choose((bits)(x < 0), -bent, bent));
    }
    for (long token = num; token < padded; token++)
        scores[token] = -INFINITY;
    lanes tops = load(scores), sums = {0};
    for (long token = LANES; token < padded; token += LANES) {
        lanes next = load(scores + token);
        tops = choose((bits)(next > tops), next, tops);
    }
    const float here = greatest(tops), top = here > seen->most[row] ? here : seen->most[row];
    for (long token = 0; token < padded; token += LANES) {
        lanes shares = exponential(load(scores + token) - top);
        store(scores + token, shares);
        sums += shares; /* a place without a token adds 0 */
    }
    const float factor = exponential((lanes){0} + (seen->most[row] - top))[0];
    seen->sum[row] = seen->sum[row] * factor + total(sums);
    seen->most[row] = top;
    for (long at = 0; at < size; at += LANES)
        store(seen->mixed + row * size + at, load(seen->mixed + row * size + at) * factor);
}

/* Continue the online softmax over the tokens of `left`, then over those of `next`, BLOCK tokens at a time. */
INLINE void look(const int rows, struct sight *seen, const float *queries, struct stretch left, struct stretch next,
                 long size, float softcap)
{
    float scores[MOST_ROWS * BLOCK] __attribute__((aligned(64)));
    while (left.num || next.num) {
        if (!left.num)
            left = next, next.num = 0;
        const float *keys = left.keys, *values = left.values;
        const long here = left.num < BLOCK ? left.num : BLOCK;
        for (long token = 0; token < here; token += COLUMNS) {
            const float *four_keys[COLUMNS];
            for (int column = 0; column < COLUMNS; column++) /* the last one again where there are no more */
                four_keys[column] = keys + (token + column < here ? token + column : here - 1) * size;
            score_tile(rows, scores + token, queries, four_keys, size);
        }
        for (int row = 0; row < rows; row++)
            weigh(seen, row, scores + row * BLOCK, here, size, softcap);
        long at = 0;
        for (; at + 4 * LANES <= size; at += 4 * LANES)
            mix_tile(rows, 1, seen->mixed + at, scores, values + at, here, size);
        for (; at < size; at += LANES)
            mix_tile(rows, 0, seen->mixed + at, scores, values + at, here, size);
        left = (struct stretch){keys + here * size, values + here * size, left.num - here};
    }
}

/* One token per row: its key [R, K, D] and value go into the response cache [C, K, T, D], then its query
   [R, K * G, D] sees the row's prefix [P, K, S, D] and its response so far -> `out` [R, K * G, D]. */
void attend(const struct decode *step, void *out, const void *query, const void *key, const void *value,
            float *own_keys, float *own_values, const float *prefix_keys, const float *prefix_values)
{
    const long size = step->size, heads = step->num_key_heads, num_items = step->num_rows * heads;
    const long portion = num_items / 32 + 1;
#pragma omp parallel for schedule(dynamic, portion) num_threads(step->num_threads)
    for (long item = 0; item < num_items; item++) { /* rows of one prefix mostly follow one another */
        const long head = item / step->num_rows, row = item % step->num_rows;
        const long own = (row * heads + head) * step->own_room * size, written = step->num_written[row];
        const long prefix = (step->prefix_of[row] * heads + head) * step->prefix_room * size;
        const long length = step->prefix_length[row], before = length + written + 1 - step->window;
        /* Keys before the window: first those of the prefix (`left_out`, in numbers), then those of the response. */
        const long out_of_sight = step->window > 0 && before > 0 ? before : 0;
        const long left_out = (out_of_sight < length ? out_of_sight : length) * size;
        const long own_left_out = own + out_of_sight * size - left_out;
        const struct stretch shared = {prefix_keys + prefix + left_out, prefix_values + prefix + left_out,
                                       length - left_out / size};
        const struct stretch response = {own_keys + own_left_out, own_values + own_left_out,
                                         written + 1 - out_of_sight + left_out / size};
        const long key_at = row * step->key_stride + head * size, value_at = row * step->value_stride + head * size;
        for (long at = 0; at < size; at += LANES) {
            store(own_keys + own + written * size + at, read(key, key_at + at, step->is_half));
            store(own_values + own + written * size + at, read(value, value_at + at, step->is_half));
        }
        for (long first = 0; first < step->group; first += MOST_ROWS) {
            const long rows = step->group - first < MOST_ROWS ? step->group - first : MOST_ROWS;
            const long from = (head * step->group + first) * size;
            float queries[rows * size] __attribute__((aligned(64))), mixed[rows * size] __attribute__((aligned(64)));
            struct sight seen = {.mixed = mixed};
            for (long at = 0; at < rows * size; at += LANES) {
                lanes values = read(query, row * step->query_stride + from + at, step->is_half);
                store(queries + at, values * step->scale);
                store(mixed + at, (lanes){0});
            }
            for (long one = 0; one < rows; one++) { /* a sink was seen before, and its value is zero */
                seen.most[one] = step->sinks ? step->sinks[head * step->group + first + one] : -INFINITY;
                seen.sum[one] = step->sinks ? 1 : 0;
            }
            switch (rows) {
#define LOOK(n) \
    case n: \
        look(n, &seen, queries, shared, response, size, step->softcap); \
        break;
                LOOK(1) LOOK(2) LOOK(3) LOOK(4) LOOK(5) LOOK(6)
            }
            for (long at = 0; at < rows * size; at += LANES) {
                const long to = row * heads * step->group * size + from + at;
                write(out, to, load(mixed + at) / seen.sum[at / size], step->is_half);
            }
        }
    }
}

/* ---- small things ---- */

/* [R, D], by the root of the mean square of each row, by the weight [D]; D is a multiple of 16. */
void normalize(void *out, const void *states, const void *weight, long num_rows, long size, float epsilon, int is_half,
               int num_threads)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 16)
    for (long row = 0; row < num_rows; row++) {
        lanes squares = {0};
        for (long at = row * size; at < (row + 1) * size; at += LANES) {
            lanes x = read(states, at, is_half);
            squares += x * x;
        }
        const float factor = 1.0f / __builtin_sqrtf(total(squares) / size + epsilon);
        for (long at = 0; at < size; at += LANES) {
            lanes normed = held(read(states, row * size + at, is_half) * factor, is_half);
            write(out, row * size + at, normed * read(weight, at, is_half), is_half);
        }
    }
}

/* The first `num_turned` heads of each row of [R, H, D], in place, by cos and sin [R, D]; D is a multiple of 32. */
void rotate(void *states, const void *cos, const void *sin, long num_rows, long num_heads, long num_turned, long size,
            int is_half, int num_threads)
{
    const long half = size / 2;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 16)
    for (long row = 0; row < num_rows; row++)
        for (long at = 0; at < half; at += LANES) {
            const long near = row * size + at, far = near + half;
            const lanes near_cos = read(cos, near, is_half), near_sin = read(sin, near, is_half);
            const lanes far_cos = read(cos, far, is_half), far_sin = read(sin, far, is_half);
            for (long head = 0; head < num_turned; head++) {
                const long first = (row * num_heads + head) * size + at, second = first + half;
                const lanes x = read(states, first, is_half), y = read(states, second, is_half);
                write(states, first, held(x * near_cos, is_half) - held(y * near_sin, is_half), is_half);
                write(states, second, held(y * far_cos, is_half) + held(x * far_sin, is_half), is_half);
            }
        }
}

/* silu(gate) * up, for gate and up side by side in [R, 2 * F] -> [R, F]; F is a multiple of 16. */
void gate(void *out, const void *states, long num_rows, long width, int is_half, int num_threads)
{
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_rows > 4)
    for (long row = 0; row < num_rows; row++)
        for (long at = 0; at < width; at += LANES) {
            const lanes x = read(states, 2 * row * width + at, is_half);
            const lanes up = read(states, (2 * row + 1) * width + at, is_half);
            const lanes power = exponential(choose((bits)(x > 0), -x, x)); /* of -|x| */
            const lanes silu = x * choose((bits)(x > 0), (lanes){0} + 1.0f, power) / (power + 1.0f);
            write(out, row * width + at, held(silu, is_half) * up, is_half);
        }
}
