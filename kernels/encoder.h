// Operations of text encoders besides matrix products: layer norm, and attention of every token to its own text.
//
// A row's result never depends on the other rows (batch invariance): scores, weights and sums are made in the order of
// the text's own tokens.
#pragma once
#include "attention.h"
#include "elementwise.h"

namespace inferd::INFERD_LEVEL {

// sum = x + residual (where there is one); out = (sum - mean) / sqrt(variance + eps) * weight + bias, and a bf16 copy of it.
// All rows are contiguous.
inline void layer_norm(const LayerNormArgs& g, int threads) {
    const int64_t n = g.n;
#pragma omp parallel for schedule(static) num_threads(threads) if (g.rows * n > kSerial)
    for (int64_t i = 0; i < g.rows; i++) {
        const float *from = g.x + i * n, *residual = g.residual ? g.residual + i * n : nullptr;
        float* out = g.out + i * n;
        bf16* narrow = g.narrow ? static_cast<bf16*>(g.narrow) + i * n : nullptr;
        Vec total = Vec::zero();
        for (int64_t j = 0; j < n; j += Vec::width) {
            Vec v = load_some(from + j, n - j);
            if (residual) v = v + load_some(residual + j, n - j);
            store_some(v, out + j, n - j);
            total = total + v;
        }
        const float mean = total.sum() / float(n);
        Vec squares = Vec::zero();
        for (int64_t j = 0; j < n; j += Vec::width) {
            float part[Vec::width];
            (load_some(out + j, n - j) - Vec::all(mean)).store(part);
            for (int64_t k = n - j; k < Vec::width; k++) part[k] = 0;
            const Vec v = Vec::load(part);
            squares = Vec::fma(v, v, squares);
        }
        const Vec factor = Vec::all(1.0f / __builtin_sqrtf(squares.sum() / float(n) + g.eps)), middle = Vec::all(mean);
        for (int64_t j = 0; j < n; j += Vec::width) {
            Vec v = (load_some(out + j, n - j) - middle) * factor * load_some(g.weight + j, n - j);
            if (g.bias) v = v + load_some(g.bias + j, n - j);
            store_some(v, out + j, n - j);
            if (narrow) store_some(v, narrow + j, n - j);
        }
    }
}

// `padded` rows turned, so that one vector holds one number of as many of them. `dim` is a multiple of the vector's width.
inline void pack_keys(const float* const* rows, int64_t padded, int64_t dim, float* packed) {
    for (int64_t key = 0; key < padded; key += Vec::width)
        for (int64_t d = 0; d < dim; d += Vec::width) {
            Vec block[Vec::width];
#pragma GCC unroll 16
            for (int i = 0; i < Vec::width; i++) block[i] = Vec::load(rows[key + i] + d);
            Vec::transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < Vec::width; i++) block[i].store(packed + (d + i) * kKeys + key);
        }
}

// Tokens first.. of one text, with one head.
struct TextTask {
    int64_t text, head, first, tokens;
};

template <class Out>
void attend_text(const TextAttentionArgs& g, const TextTask& task, uint32_t* packed, float* scores, int64_t padded, float* mixed) {
    const int64_t start = g.starts[task.text], length = g.starts[task.text + 1] - start, dim = g.head_dim, stride = 3 * g.heads * dim;
    const float* q = g.qkv + (start + task.first) * stride + task.head * dim;
    const float* k = g.qkv + start * stride + (g.heads + task.head) * dim;
    const float* v = k + g.heads * dim;
    // The keys that are visible to any row.
    int64_t low = 0, high = length;
    if (g.window >= 0) {
        low = most(0, task.first - g.window) / kKeys * kKeys;
        high = least(length, task.first + task.tokens + g.window);
    }
    for (int64_t tile = low; tile < high; tile += kKeys) {
        const float* rows[kKeys];
        const int64_t count = least(kKeys, high - tile), wide = divide_up(count, Vec::width) * Vec::width;
        for (int64_t i = 0; i < wide; i++) rows[i] = k + (tile + least(i, count - 1)) * stride;
        pack_keys(rows, wide, dim, reinterpret_cast<float*>(packed));
        for (int64_t r = 0; r < task.tokens; r += kRows)
            strip<F32>(int(least(kRows, task.tokens - r)), reinterpret_cast<const char*>(q + r * stride), stride * 4, packed, kKeys, dim,
                       scores + r * padded + tile, padded, wide, false);
    }
    alignas(64) float steps[Vec::width];
    for (int i = 0; i < Vec::width; i++) steps[i] = float(i);
    const Vec index = Vec::load(steps), hidden = Vec::all(kHidden), scale = Vec::all(g.scale);
    for (int64_t r = 0; r < task.tokens; r += kRows) {
        const int64_t rows = least(kRows, task.tokens - r);
        float inverse[kRows];
        for (int64_t i = 0; i < rows; i++) {
            float* row = scores + (r + i) * padded;
            const int64_t at = task.first + r + i;
            const float* bias = g.bias ? g.bias + task.head * (2 * g.bias_reach - 1) + g.bias_reach - 1 - at : nullptr;
            const float from = g.window >= 0 ? float(at - g.window) : 0.0f, to = g.window >= 0 ? float(least(at + g.window, length - 1)) : float(length - 1);
            Vec top = hidden;
            for (int64_t j = low; j < high; j += Vec::width) {
                Vec s = Vec::load(row + j) * scale;
                if (bias) s = s + load_some(bias + j, length - j);
                const Vec key = index + Vec::all(float(j));
                s = Vec::where_less(Vec::all(to), key, hidden, Vec::where_less(key, Vec::all(from), hidden, s));
                s.store(row + j);
                top = Vec::max(top, s);
            }
            const Vec highest = Vec::all(top.top());
            Vec total = Vec::zero();
            for (int64_t j = low; j < high; j += Vec::width) {
                const Vec e = exp(Vec::load(row + j) - highest);
                e.store(row + j);
                total = total + e;
            }
            inverse[i] = 1.0f / total.sum();
        }
        strip<F32>(int(rows), reinterpret_cast<const char*>(scores + r * padded + low), padded * 4, reinterpret_cast<const uint32_t*>(v + low * stride),
                   stride, high - low, mixed, dim, dim, false);
        for (int64_t i = 0; i < rows; i++) {
            Out* out = static_cast<Out*>(g.out) + ((start + task.first + r + i) * g.heads + task.head) * dim;
            for (int64_t d = 0; d < dim; d += Vec::width) (Vec::load(mixed + i * dim + d) * Vec::all(inverse[i])).store(out + d);
        }
    }
}

// The caller guarantees that head_dim is a multiple of the vector's width.
template <class Out>
void text_attention(const TextAttentionArgs& g, int threads) {
    int64_t longest = 1, tiles = 0;
    int64_t* tiles_before = static_cast<int64_t*>(malloc(size_t(g.texts + 1) * sizeof(int64_t)));
    for (int64_t i = 0; i < g.texts; i++) {
        const int64_t length = g.starts[i + 1] - g.starts[i];
        tiles_before[i] = tiles;
        tiles += divide_up(length, kQueryRows);
        longest = most(longest, length);
    }
    tiles_before[g.texts] = tiles;
    const int64_t padded = divide_up(longest, kKeys) * kKeys + Vec::width, tasks = tiles * g.heads;
    const int64_t lanes = divide_up(g.head_dim, Vec::width) * Vec::width;
    int64_t taken = 0;
#pragma omp parallel num_threads(threads) if (tasks > 1)
    {
        const size_t sizes[] = {size_t(lanes * kKeys), size_t(kQueryRows * padded), size_t(kRows * lanes)};
        float* memory = static_cast<float*>(malloc((sizes[0] + sizes[1] + sizes[2] + 16) * 4));
        float* scratch = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        int64_t text = 0;
        for (;;) {
            const int64_t task = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            if (task >= tasks) break;
            const int64_t tile = task / g.heads;
            while (tiles_before[text + 1] <= tile) text++;  // a thread's tasks only ascend
            const int64_t first = (tile - tiles_before[text]) * kQueryRows;
            const int64_t tokens = least(kQueryRows, g.starts[text + 1] - g.starts[text] - first);
            attend_text<Out>(g, {text, task % g.heads, first, tokens}, reinterpret_cast<uint32_t*>(scratch), scratch + sizes[0], padded,
                             scratch + sizes[0] + sizes[1]);
        }
        free(memory);
    }
    free(tiles_before);
}

}  // namespace inferd::INFERD_LEVEL
