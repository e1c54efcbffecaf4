/* Routing and block-sparse experts of few tokens in float32, forward only. few_rows.py compiles this and calls it.
 *
 * Few tokens are bound by reading weights and, in a tensor library, by its calls: here each selected block's weights
 * are read once, four rows at a time, for all tokens that use it, in one call. Sums have a fixed order for any number
 * of threads. Sizes: N tokens, D model width, E experts, B blocks of M channels, R rows: one for every (expert, block,
 * token) that is selected, in that order.
 */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_CPU
#endif

typedef float lanes __attribute__((vector_size(64), aligned(4)));

/* Ask for part `part` of `parts` of the `size` weights that come next, since the processor foresees one stream only:
 * a row that serves several tokens would have it wait after each. */
static inline void prefetch(const float *next, int64_t size, int64_t part, int64_t parts)
{
    const int64_t share = (size / parts / 16 + 1) * 16, end = (part + 1) * share < size ? (part + 1) * share : size;
    for (int64_t i = part * share; i < end; i += 16)
        __builtin_prefetch(next + i, 0, 2); /* into the second cache: the first has what is multiplied now */
}

FOR_EACH_CPU static float dot(const float *x, const float *w, int64_t D)
{
    lanes s0 = {0}, s1 = {0}, s2 = {0}, s3 = {0};
    float sum = 0;
    int64_t d = 0;
    for (; d + 64 <= D; d += 64) {
        s0 += *(lanes *)(x + d) * *(lanes *)(w + d);
        s1 += *(lanes *)(x + d + 16) * *(lanes *)(w + d + 16);
        s2 += *(lanes *)(x + d + 32) * *(lanes *)(w + d + 32);
        s3 += *(lanes *)(x + d + 48) * *(lanes *)(w + d + 48);
    }
    s0 = (s0 + s1) + (s2 + s3);
    for (int i = 0; i < 16; i++)
        sum += s0[i];
    for (; d < D; d++)
        sum += x[d] * w[d];
    return sum;
}

/* y += sum of h[i] times row i of `count` rows, at most 4, of which `size` columns count; rows are D apart. */
FOR_EACH_CPU static void add_rows(float *y, const float *h, const float *w, int64_t count, int64_t D, int64_t size)
{
    const float *w1 = w + D, *w2 = w1 + D, *w3 = w2 + D;
    if (count == 4)
        for (int64_t d = 0; d < size; d++)
            y[d] += h[0] * w[d] + h[1] * w1[d] + h[2] * w2[d] + h[3] * w3[d];
    else
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < size; d++)
                y[d] += h[i] * w[i * D + d];
}

/* Equations of routing.py for N tokens. coefficients (N, K + 1): alpha and the gates; statistics (6 + K + B): what
 * usage.py sums. Cumulative mass is summed in double and rounded, as torch.cumsum does on the CPU. */
void route(const float *x, const float *weight, const float *prototypes, int64_t N, int64_t D, int64_t K, int64_t B,
           float *affinity, float *coefficients, uint8_t *shared, int64_t *shared_count, int64_t *expert_count,
           double *statistics)
{
    const double tau = (double)(B - 1) / (double)(B * B);
    memset(statistics, 0, sizeof(double) * (size_t)(6 + K + B));
    for (int64_t n = 0; n < N; n++) {
        const float *token = x + n * D;
        float *p = affinity + n * K, *out = coefficients + n * (K + 1), scores[B];
        uint8_t *blocks = shared + n * B;

        const float alpha = (float)tau + (float)(1 - 2 * tau) * (1.0f / (1.0f + expf(-dot(token, weight, D))));
        const float wanted = isnan(alpha) ? 1.0f : rintf((float)B * alpha);
        const int64_t b = wanted < 1 ? 1 : wanted > (float)(B - 1) ? B - 1 : (int64_t)wanted;

        for (int64_t i = 0; i < B; i++)
            scores[i] = dot(token, prototypes + i * D, D);
        for (int64_t i = 0; i < B; i++) { /* NaN comes first, ties go to the lower index */
            int64_t before = 0;
            for (int64_t j = 0; j < B; j++) {
                const int nan_i = isnan(scores[i]), nan_j = isnan(scores[j]);
                before += nan_i || nan_j ? (nan_j && !nan_i) || (nan_i && nan_j && j < i)
                                         : scores[j] > scores[i] || (scores[j] == scores[i] && j < i);
            }
            blocks[i] = before < b;
            statistics[6 + K + i] += blocks[i];
        }

        float largest = -INFINITY, sum = 0;
        int has_nan = 0;
        for (int64_t i = 0; i < K; i++) {
            p[i] = dot(token, weight + (i + 1) * D, D);
            has_nan |= isnan(p[i]);
            largest = p[i] > largest ? p[i] : largest;
        }
        for (int64_t i = 0; i < K; i++)
            sum += p[i] = has_nan ? NAN : expf(p[i] - largest);
        for (int64_t i = 0; i < K; i++)
            p[i] /= sum, out[i + 1] = 0;

        int64_t k = 0; /* the expert with most affinity among the rest, until the mass reaches 1 - alpha */
        double mass = 0;
        uint8_t taken[K];
        memset(taken, 0, (size_t)K);
        while (k < K) {
            int64_t best = -1;
            for (int64_t i = 0; i < K; i++)
                if (!taken[i] && (best < 0 || p[i] > p[best]))
                    best = i;
            taken[best] = 1, out[best + 1] = p[best], mass += p[best], k++;
            statistics[6 + best] += p[best] != 0;
            if ((float)mass >= 1.0f - alpha)
                break;
        }
        out[0] = alpha, shared_count[n] = b, expert_count[n] = k;
        statistics[0] += 1, statistics[1] += (double)(b + k * (B - b)), statistics[2] += (double)k;
        statistics[3] += (double)b, statistics[4] += alpha;
    }
}

/* Rows of the selected blocks: their groups (expert * B + block), tokens and where each group ends. With has_shared,
 * expert 0 computes `blocks` and the others the complement. Returns R. */
int64_t plan(const float *gates, const uint8_t *blocks, int64_t N, int64_t E, int64_t B, int64_t has_shared,
             int32_t *tokens, int32_t *ends)
{
    int64_t row = 0;
    for (int64_t e = 0; e < E; e++)
        for (int64_t b = 0; b < B; b++) {
            for (int64_t n = 0; n < N; n++)
                if (gates[n * E + e] != 0 && (blocks[n * B + b] != 0) == (!has_shared || e == 0)) /* NaN is not 0 */
                    tokens[row++] = (int32_t)n;
            ends[e * B + b] = (int32_t)row;
        }
    return row;
}

static const float *of_expert(const float *shared, const float *bank, int64_t e, int64_t size)
{
    return shared ? (e ? bank + (e - 1) * size : shared) : bank + e * size;
}

/* out (R, M) = x[token] @ keys[block]^T + bias. Keys (E, B * M, D), the first expert's apart where shared_keys is. */
void up(const float *x, const int32_t *tokens, const int32_t *ends, int64_t D, int64_t E, int64_t B, int64_t M,
        const float *shared_keys, const float *keys, const float *shared_bias, const float *bias, float *out,
        int64_t threads)
{
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (int64_t g = 0; g < E * B; g++) {
        const int64_t first = g ? ends[g - 1] : 0, e = g / B, b = g % B;
        const float *w = of_expert(shared_keys, keys, e, B * M * D) + b * M * D;
        const float *add = bias ? of_expert(shared_bias, bias, e, B * M) + b * M : 0;
        for (int64_t m = 0; m < M; m++)
            for (int64_t r = first; r < ends[g]; r++) {
                if (m + 1 < M && ends[g] - first > 1) /* rows for one token are one stream */
                    prefetch(w + (m + 1) * D, D, r - first, ends[g] - first);
                out[r * M + m] = dot(x + tokens[r] * D, w + m * D, D) + (add ? add[m] : 0);
            }
    }
}

/* y (N, D) = sum over rows of gate * (hidden @ values[block]) + sum over active experts of gate * bias. */
void down(const float *hidden, const float *gates, const int32_t *tokens, const int32_t *ends, int64_t N, int64_t D,
          int64_t E, int64_t B, int64_t M, const float *shared_values, const float *values, const float *shared_bias,
          const float *bias, float *y, int64_t threads)
{
    const int64_t slice = (D + threads - 1) / threads;
#pragma omp parallel for num_threads(threads)
    for (int64_t thread = 0; thread < threads; thread++) {
        const int64_t from = thread * slice, size = from + slice < D ? slice : D - from;
        if (size <= 0)
            continue;
        for (int64_t n = 0; n < N; n++) {
            memset(y + n * D + from, 0, sizeof(float) * (size_t)size);
            for (int64_t e = 0; bias && e < E; e++)
                if (gates[n * E + e] != 0)
                    add_rows(y + n * D + from, gates + n * E + e, of_expert(shared_bias, bias, e, D) + from, 1, D, size);
        }
        for (int64_t g = 0; g < E * B; g++) {
            const int64_t first = g ? ends[g - 1] : 0, e = g / B, b = g % B;
            const float *w = of_expert(shared_values, values, e, B * M * D) + b * M * D + from;
            for (int64_t m = 0; m < M; m += 4)
                for (int64_t r = first; r < ends[g]; r++) {
                    const int64_t count = M - m < 4 ? M - m : 4;
                    float h[4];
                    for (int64_t i = 0; i < count; i++)
                        h[i] = gates[tokens[r] * E + e] * hidden[r * M + m + i];
                    for (int64_t i = 0; i < 4 && m + 4 + i < M; i++)
                        prefetch(w + (m + 4 + i) * D, size, r - first, ends[g] - first);
                    add_rows(y + tokens[r] * D + from, h, w + m * D, count, D, size);
                }
        }
    }
}
