// Products of 8-bit integers: rows of activations are quantised as they come, each with a scale of its own, weights once,
// each output column with its own. Sums are exact (int32), so a row's result never depends on the other rows.
//
// Only where the processor multiplies bytes itself (AVX-512 VNNI); elsewhere there is no such kernel.
#pragma once
#include "gemm.h"
#include "room.h"

namespace inferd::INFERD_LEVEL {

#if defined(__AVX512VNNI__)

struct I8 {
    static constexpr int lane = 4;  // unsigned activations times signed weights
    static Vec madd(Vec acc, Vec a, Vec b) {
        return {_mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(acc.v), _mm512_castps_si512(a.v), _mm512_castps_si512(b.v)))};
    }
};

// x [rows, n] -> bytes, and per row a scale and a zero: x = scale * (byte - zero). A row's own range is used whole.
template <class T>
inline void quantize(const T* x, int64_t stride, uint8_t* bytes, float* scales, int32_t* zeros, int64_t rows, int64_t n, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * n > 16384)
    for (int64_t i = 0; i < rows; i++) {
        const T* from = x + i * stride;
        uint8_t* to = bytes + i * n;
        const auto load = [](__mmask16 left, const T* at) {
            if constexpr (sizeof(T) == 4)
                return _mm512_maskz_loadu_ps(left, at);
            else
                return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(left, at)), 16));
        };
        __m512 highest = _mm512_setzero_ps(), lowest = _mm512_setzero_ps();  // zero itself is always a byte
        for (int64_t j = 0; j < n; j += 16) {
            const __mmask16 left = n - j >= 16 ? 0xffff : __mmask16((1u << (n - j)) - 1);
            const __m512 v = load(left, from + j);
            highest = _mm512_max_ps(highest, v);
            lowest = _mm512_min_ps(lowest, v);
        }
        const float top = _mm512_reduce_max_ps(highest), bottom = _mm512_reduce_min_ps(lowest), range = top - bottom;
        scales[i] = range / 255.0f;
        const float inverse = range > 0 ? 255.0f / range : 0.0f;
        const __m512i zero = _mm512_cvtps_epi32(_mm512_set1_ps(-bottom * inverse));
        zeros[i] = _mm_cvtsi128_si32(_mm512_castsi512_si128(zero));
        for (int64_t j = 0; j < n; j += 16) {
            const __mmask16 left = n - j >= 16 ? 0xffff : __mmask16((1u << (n - j)) - 1);
            const __m512i whole = _mm512_cvtps_epi32(_mm512_mul_ps(load(left, from + j), _mm512_set1_ps(inverse)));
            const __m512i placed = _mm512_max_epi32(_mm512_add_epi32(whole, zero), _mm512_setzero_si512());
            _mm512_mask_cvtusepi32_storeu_epi8(to + j, left, placed);
        }
    }
}

// Columns of a panel come with scale and total for all of kPanel.
template <class T>
inline void gemm_int8(const Weights& w, const LinearArgs& g, int threads) {
    if (g.rows == 0) return;
    static thread_local Room held[3];
    uint8_t* x = held[0].take<uint8_t>(g.rows * w.in);
    float* x_scale = held[1].take<float>(g.rows);
    int32_t* x_zero = held[2].take<int32_t>(g.rows);
    quantize(static_cast<const T*>(g.x), g.x_stride, x, x_scale, x_zero, g.rows, w.in, threads);
    const int64_t lanes = w.in / I8::lane, panels = divide_up(w.out, kPanel), panel_bytes = lanes * kPanel * 4;
    int64_t blocks = 1;
    if (panels < 4 * threads && threads > 1) blocks = least(divide_up(g.rows, 4 * kRows), divide_up(4 * threads, panels));
    const int64_t block_rows = divide_up(divide_up(g.rows, blocks), kRows) * kRows;
    blocks = divide_up(g.rows, block_rows);
    const int64_t tasks = panels * blocks;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t task = 0; task < tasks; task++) {
        alignas(64) float c[kRows * kPanel];
        const int64_t panel = task / blocks, row0 = task % blocks * block_rows, row1 = least(row0 + block_rows, g.rows);
        const uint32_t* base = reinterpret_cast<const uint32_t*>(static_cast<const char*>(w.packed) + panel * panel_bytes);
        const int64_t column = panel * kPanel, count = least(kPanel, w.out - column), strips = divide_up(row1 - row0, kRows);
        const float* bias = w.bias ? w.bias + column : nullptr;
        const float* unadded = g.activation == Activation::none ? bias : nullptr;
        int64_t row = row0;
        for (int64_t s = 0; s < strips; s++) {
            const int rows = int(divide_up(row1 - row, strips - s));
            Ahead ahead;
            if (strips == 1) ahead = {reinterpret_cast<const char*>(base) + INFERD_STREAM_AHEAD, 256, 4};
            strip<I8>(rows, reinterpret_cast<const char*>(x + row * w.in), w.in, base, kPanel, lanes, c, kPanel, kPanel, false, ahead);
            for (int r = 0; r < rows; r++) {
                float* sums = c + r * kPanel;
                const __m512 scale = _mm512_set1_ps(x_scale[row + r]);
                const __m512i zero = _mm512_set1_epi32(x_zero[row + r]);
                for (int64_t j = 0; j < kPanel; j += 16) {
                    const __m512i sum = _mm512_sub_epi32(_mm512_loadu_si512(sums + j), _mm512_mullo_epi32(zero, _mm512_loadu_si512(w.total + column + j)));
                    _mm512_storeu_ps(sums + j, _mm512_mul_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale), _mm512_loadu_ps(w.scale + column + j)));
                }
                if (g.activation != Activation::none) activate(sums, bias, count, g.activation);
                const int64_t at = (row + r) * g.out_stride + column;
                if (g.out_dtype == Dtype::f32)
                    write_row(sums, unadded, static_cast<float*>(g.out) + at, count);
                else
                    write_row(sums, unadded, static_cast<bf16*>(g.out) + at, count);
            }
            row += rows;
        }
    }
}

#endif

}  // namespace inferd::INFERD_LEVEL
