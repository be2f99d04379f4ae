// Matrix products: the register tile that linear layers and attention share, and the linear layer.
//
// Each output is one chain of multiply-adds over the contracted axis in ascending order, whatever the
// number of rows, threads or tiles: a row's result never depends on the other rows (batch invariance).
#pragma once
#include "panels.h"

namespace inferd::INFERD_LEVEL {

// c [R, C * width] (+)= a [R, n lanes] * b [n lanes, C * width]. a_stride in bytes, ldb in lanes, ldc in floats.
// Slow: see Ahead. More cache lines can be in flight to L2 alone than to L1 as well, but each then delays the tile's own
// reads of L2.
template <class E, int R, int C, bool Slow>
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
        if constexpr (Slow)
            __builtin_prefetch(ahead.at + k * ahead.step, 0, 3);
        else
            ahead.fetch(k);
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

template <class E, int C, bool Slow = false>
inline void rows_tile(int rows, const char* a, int64_t a_stride, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                      bool accumulate, Ahead ahead) {
    switch (rows) {
        case 1: return tile<E, 1, C, Slow>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 2: return tile<E, 2, C, Slow>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 3: return tile<E, 3, C, Slow>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 4: return tile<E, 4, C, Slow>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        case 5: return tile<E, 5, C, Slow>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
        default: return tile<E, 6, C, Slow>(a, a_stride, b, ldb, n, c, ldc, accumulate, ahead);
    }
}

// Up to kRows rows by `columns` (a multiple of the vector's width).
template <class E>
inline void strip(int rows, const char* a, int64_t a_stride, const uint32_t* b, int64_t ldb, int64_t n, float* c, int64_t ldc,
                  int64_t columns, bool accumulate, Ahead ahead = {}) {
    constexpr int wide = Vec::width * Vec::max_columns;
    int64_t j = 0;
    for (; j + wide <= columns; j += wide) {
        if (ahead.is_slow) rows_tile<E, Vec::max_columns, true>(rows, a, a_stride, b + j, ldb, n, c + j, ldc, accumulate, ahead);
        else rows_tile<E, Vec::max_columns>(rows, a, a_stride, b + j, ldb, n, c + j, ldc, accumulate, ahead);
        ahead = {};
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
            // Few rows at a time, so that the processor prefetches their streams; few lanes, so that the output stays in L2.
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

template <class E>
void gemm(const Weights& w, const LinearArgs& g, int threads) {
    const int64_t lanes = w.in / E::lane, a_stride = g.x_stride * int64_t(sizeof(typename E::type));
    const char* x = static_cast<const char*>(g.x);
    over_panels(w, g, lanes * kPanel * 4, 256, threads, [](const char* base, int64_t) { return base; },
                [&](const char* base, int64_t, int64_t row, int rows, float* c, Ahead ahead) {
                    strip<E>(rows, x + row * a_stride, a_stride, reinterpret_cast<const uint32_t*>(base), kPanel, lanes, c, kPanel, kPanel, false,
                             ahead);
                });
}

}  // namespace inferd::INFERD_LEVEL
