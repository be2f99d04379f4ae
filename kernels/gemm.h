// Matrix products: the register tile that linear layers and attention share, and the linear layer.
//
// Each output is one chain of multiply-adds over the contracted axis in ascending order, whatever the
// number of rows, threads or tiles: a row's result never depends on the other rows (batch invariance).
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
};

// c [R, C * width] (+)= a [R, n lanes] * b [n lanes, C * width]. a_stride in bytes, ldb in lanes, ldc in floats.
template <class E, int R, int C>
inline void tile(const char* a, int64_t a_stride, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc, bool accumulate,
                 Ahead ahead) {
    Vec acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) acc[r][j] = accumulate ? Vec::load(c + r * ldc + j * Vec::width) : Vec::zero();
    for (int64_t k = 0; k < n; k++) {
        Vec w[C];
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) w[j] = Vec::lanes(b + k * ldb + j * Vec::width);
        if (ahead.lines) {
            const char* p = ahead.at + k * ahead.step;
            __builtin_prefetch(p, 0, 2);
            if (ahead.lines > 1) __builtin_prefetch(p + 64, 0, 2);
            if (ahead.lines > 2) {
                __builtin_prefetch(p + 128, 0, 2);
                __builtin_prefetch(p + 192, 0, 2);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            Vec x = Vec::spread(lane_at(a + r * a_stride + k * 4));
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) acc[r][j] = E::madd(acc[r][j], x, w[j]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) acc[r][j].store(c + r * ldc + j * Vec::width);
}

template <class E, int C>
inline void rows_tile(int rows, const char* a, int64_t a_stride, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                      bool accumulate, Ahead ahead) {
    switch (rows) {
        case 1: return tile<E, 1, C>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 2: return tile<E, 2, C>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 3: return tile<E, 3, C>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 4: return tile<E, 4, C>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 5: return tile<E, 5, C>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        default: return tile<E, 6, C>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
    }
}

// Up to kRows rows by `columns` (a multiple of the vector's width).
template <class E>
inline void strip(int rows, const char* a, int64_t a_stride, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                  int64_t columns, bool accumulate, Ahead ahead = {}) {
    constexpr int wide = Vec::width * Vec::max_columns;
    int64_t j = 0;
    for (; j + wide <= columns; j += wide) {
        rows_tile<E, Vec::max_columns>(rows, a, a_stride, b + j, ldb, n, c + j, ldc, accumulate, ahead);
        ahead.lines = 0;
    }
    for (; j < columns; j += Vec::width) rows_tile<E, 1>(rows, a, a_stride, b + j, ldb, n, c + j, ldc, accumulate, {});
}

// Rows of [out, in] weights into panels; `first_row` lets several matrices share one packed buffer.
template <class E>
void pack(const void* weight, int64_t stride, int64_t out, int64_t in, int64_t first_row, void* packed, int threads) {
    using T = typename E::type;
    const int64_t lanes = in / E::lane, panels = divide_up(first_row + out, kPanel);
    const T* w = static_cast<const T*>(weight);
    uint32_t* p = static_cast<uint32_t*>(packed);
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t panel = first_row / kPanel; panel < panels; panel++) {
        uint32_t* base = p + panel * lanes * kPanel;
        const int64_t row = panel * kPanel - first_row;  // of the weight, in the panel's first column
        int64_t k = 0;
        if (row >= 0 && row + kPanel <= out)
            // Few rows at a time, so that the processor follows their streams; few lanes, so that what is written stays in L2.
            for (const int64_t whole = lanes / Vec::width * Vec::width; k < whole;) {
                const int64_t to = least(whole, k + 128);
                for (int64_t col = 0; col < kPanel; col += Vec::width)
                    for (int64_t j = k; j < to; j += Vec::width) {
                        Vec block[Vec::width];
#pragma GCC unroll 16
                        for (int i = 0; i < Vec::width; i++)
                            block[i] = Vec::lanes(reinterpret_cast<const uint32_t*>(w + (row + col + i) * stride) + j);
                        Vec::transpose(block);
#pragma GCC unroll 16
                        for (int i = 0; i < Vec::width; i++) block[i].store_lanes(base + (j + i) * kPanel + col);
                    }
                k = to;
            }
        for (int64_t col = most(0, -row); col < kPanel; col++)  // columns before belong to the matrix packed before
            for (int64_t rest = k; rest < lanes; rest++)
                base[rest * kPanel + col] = row + col < out ? lane_at(w + (row + col) * stride + rest * E::lane) : 0;
    }
}

// Rows of the weights out of their panels: what an embedding table shared with the output layer needs.
template <class E>
void unpack_rows(const void* packed, int64_t in, const int64_t* ids, int64_t count, void* out, int threads) {
    const int64_t lanes = in / E::lane;
    const uint32_t* p = static_cast<const uint32_t*>(packed);
    uint32_t* o = static_cast<uint32_t*>(out);
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 16)
    for (int64_t i = 0; i < count; i++) {
        const uint32_t* column = p + ids[i] / kPanel * lanes * kPanel + ids[i] % kPanel;
        for (int64_t k = 0; k < lanes; k++) o[i * lanes + k] = column[k * kPanel];
    }
}

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

inline void activate(float* c, const float* bias, int64_t count, Activation activation) {
    for (int64_t j = 0; j < count; j += Vec::width) {  // behind the last column there is room, and nobody looks
        float part[Vec::width] = {};
        if (bias) memcpy(part, bias + j, size_t(least(count - j, Vec::width)) * 4);
        const Vec x = Vec::load(c + j) + Vec::load(part);
        (activation == Activation::gelu ? gelu(x) : gelu_tanh(x)).store(c + j);
    }
}

template <class E>
void gemm(const Weights& w, const LinearArgs& g, int threads) {
    using T = typename E::type;
    if (g.rows == 0) return;
    const int64_t lanes = w.in / E::lane, panels = divide_up(w.out, kPanel);
    const int64_t panel_bytes = lanes * kPanel * 4, a_stride = g.x_stride * int64_t(sizeof(T));
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
                int64_t row = row0;
                for (int64_t s = 0; s < strips; s++) {
                    const int rows = int(divide_up(row1 - row, strips - s));
                    Ahead ahead;
                    if (strips == 1)  // one pass over the weights: stay a little ahead of the stream
                        ahead = {base + INFERD_STREAM_AHEAD, 256, 4};
                    else if (next_base != nullptr && next_base != base)  // fetch the next panel behind this one's arithmetic
                        ahead = {next_base + panel_bytes / strips * s, 256 / strips, strips >= 4 ? 1 : strips >= 2 ? 2 : 4};
                    strip<E>(rows, static_cast<const char*>(g.x) + row * a_stride, a_stride, reinterpret_cast<const uint32_t*>(base), kPanel,
                             lanes, c, kPanel, kPanel, false, ahead);
                    const int64_t column = panel * kPanel, count = least(kPanel, w.out - column);
                    const float* bias = w.bias ? w.bias + column : nullptr;
                    const float* unadded = g.activation == Activation::none ? bias : nullptr;
                    for (int r = 0; r < rows; r++) {
                        const int64_t at = (row + r) * g.out_stride + column;
                        if (g.activation != Activation::none) activate(c + r * kPanel, bias, count, g.activation);
                        if (g.out_dtype == Dtype::f32)
                            write_row(c + r * kPanel, unadded, static_cast<float*>(g.out) + at, count);
                        else
                            write_row(c + r * kPanel, unadded, static_cast<T*>(g.out) + at, count);
                    }
                    row += rows;
                }
            }
            begin = following;
        }
    }
}

}  // namespace inferd::INFERD_LEVEL
