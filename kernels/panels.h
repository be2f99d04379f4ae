// The distribution of a linear layer's products: which thread computes which panel for which rows, what is prefetched
// meanwhile, and how sums become the layer's output. Independent of the weights' format.
#pragma once
#include "table.h"
#include "vec.h"

namespace inferd::INFERD_LEVEL {

constexpr int kRows = 6;  // rows of a register tile: 6 x 4 accumulators fill AVX-512's 32 registers best

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
inline int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Memory to read soon: `lines` cache lines at `at`, `step` bytes further with each lane of the contraction.
struct Ahead {
    const char* at = nullptr;
    int64_t step = 0;
    int lines = 0;
    bool is_slow = false;  // lines are requested so rarely that few are in flight

    // Prefetch the part for lane k.
    void fetch(int64_t k) const {
        const char* p = at + k * step;
        if (lines > 0) __builtin_prefetch(p, 0, 2);
        if (lines > 1) __builtin_prefetch(p + 64, 0, 2);
        if (lines > 2) {
            __builtin_prefetch(p + 128, 0, 2);
            __builtin_prefetch(p + 192, 0, 2);
        }
    }
};

template <class T>
inline void write_row(const float* c, const float* bias, T* out, int64_t count) {
    int64_t j = 0;
    for (; j + Vec::width <= count; j += Vec::width) {
        Vec v = Vec::load(c + j);
        if (bias) v = v + Vec::load(bias + j);
        v.store(out + j);
    }
    for (; j < count; j++) out[j] = from_float<T>(bias ? c[j] + bias[j] : c[j]);
}

inline Vec activated(Vec x, Activation activation) {
    switch (activation) {
        case Activation::gelu: return gelu(x);
        case Activation::gelu_tanh: return gelu_tanh(x);
        case Activation::silu: return silu(x);
        default: return x;
    }
}

inline void activate(float* c, const float* bias, int64_t count, Activation activation) {
    for (int64_t j = 0; j < count; j += Vec::width) {  // memory after the last column exists and is not read
        float part[Vec::width] = {};
        if (bias) memcpy(part, bias + j, size_t(least(count - j, Vec::width)) * 4);
        const Vec x = Vec::load(c + j) + Vec::load(part);
        activated(x, activation).store(c + j);
    }
}

// For each panel and each strip of up to kRows rows: strip(ready, panel, row, rows, c, ahead) leaves the sums in
// c [rows, kPanel], and they are written. `enter(base, strips)` gets a panel's memory once before its strips and returns what
// they read. A strip reads its panel in steps of `step_bytes` bytes.
template <class Enter, class Strip>
void over_panels(const Weights& w, const LinearArgs& g, int64_t panel_bytes, int64_t step_bytes, int threads, const Enter& enter, const Strip& strip) {
    if (g.rows == 0) return;
    const int64_t panels = divide_up(w.out, kPanel);
    // Row blocks only where the panels alone do not keep the threads busy.
    int64_t blocks = 1;
    if (panels < 4 * threads && threads > 1) blocks = least(divide_up(g.rows, 4 * kRows), divide_up(4 * threads, panels));
    const int64_t block_rows = divide_up(divide_up(g.rows, blocks), kRows) * kRows;
    blocks = divide_up(g.rows, block_rows);
    const int64_t tasks = panels * blocks;
    const int64_t grain = g.rows <= kRows ? most(1, tasks / (threads * 4)) : 1;
    int64_t taken = 0;
#pragma omp parallel num_threads(threads)
    {
        alignas(64) float c[kRows * kPanel];
        int64_t begin = __atomic_fetch_add(&taken, grain, __ATOMIC_RELAXED);
        while (begin < tasks) {
            const int64_t following = __atomic_fetch_add(&taken, grain, __ATOMIC_RELAXED);
            for (int64_t task = begin; task < least(begin + grain, tasks); task++) {
                const int64_t panel = task / blocks, row0 = task % blocks * block_rows, row1 = least(row0 + block_rows, g.rows);
                const char* base = static_cast<const char*>(w.packed) + panel * panel_bytes;
                const int64_t next = grain > 1 ? task + 1 : following;
                const char* next_base = next < tasks ? static_cast<const char*>(w.packed) + next / blocks * panel_bytes : nullptr;
                const int64_t strips = divide_up(row1 - row0, kRows);
                const int64_t column = panel * kPanel, count = least(kPanel, w.out - column);
                const float* bias = w.bias ? w.bias + column : nullptr;
                const float* unadded = g.activation == Activation::none ? bias : nullptr;
                const auto ready = enter(base, strips);
                int64_t row = row0;
                for (int64_t s = 0; s < strips; s++) {
                    const int rows = int(divide_up(row1 - row, strips - s));
                    Ahead ahead;
                    if (strips == 1)  // one pass over the weights: stay a little ahead of the stream
                        ahead = {base + INFERD_STREAM_AHEAD, step_bytes, 4};
                    else if (next_base != nullptr && next_base != base)  // fetch the next panel behind this one's arithmetic
                        ahead = {next_base + panel_bytes / strips * s, step_bytes / strips, strips >= 4 ? 1 : strips >= 2 ? 2 : 4, strips > 4};
                    const int64_t item = g.out_dtype == Dtype::f32 ? 4 : 2;  // bytes; what is written is in no cache yet
                    for (int r = 0; r < rows; r++) {
                        const char* to = static_cast<const char*>(g.out) + ((row + r) * g.out_stride + column) * item;
                        for (int64_t i = 0; i < count * item; i += 64) __builtin_prefetch(to + i, 1, 3);
                    }
                    strip(ready, panel, row, rows, c, ahead);
                    for (int r = 0; r < rows; r++) {
                        const int64_t at = (row + r) * g.out_stride + column;
                        if (g.activation != Activation::none) activate(c + r * kPanel, bias, count, g.activation);
                        if (g.out_dtype == Dtype::f32)
                            write_row(c + r * kPanel, unadded, static_cast<float*>(g.out) + at, count);
                        else
                            write_row(c + r * kPanel, unadded, static_cast<bf16*>(g.out) + at, count);
                    }
                    row += rows;
                }
            }
            begin = following;
        }
    }
}

}  // namespace inferd::INFERD_LEVEL
