// Quantisation of weights at load, without calibration data.
#pragma once
#include "elementwise.h"
#include "scratch.h"

namespace inferd::INFERD_LEVEL {

struct Fit {  // x is about scale * (q - zero), with q from 0 to 15
    float scale, zero, error;
};

// The best of a few ranges: the group's own, and narrower ones that cut off its extremes. For each, scale and integers are fitted
// to each other twice (least squares). x [n], n a multiple of the vector's width; zeros behind the group change nothing.
inline Fit fit_nibbles(const float* x, int64_t n) {
    constexpr float top = 15.0f, tiny = 1e-12f, shrink[] = {1.0f, 0.925f, 0.85f, 0.775f, 0.7f};
    Vec highest = Vec::zero(), lowest = Vec::zero();
    for (int64_t j = 0; j < n; j += Vec::width) {
        const Vec v = Vec::load(x + j);
        highest = Vec::max(highest, v);
        lowest = Vec::max(lowest, Vec::zero() - v);
    }
    const float high = highest.top(), low = -lowest.top();
    constexpr int ranges = 5;
    float scale[ranges], zero[ranges];
    for (int r = 0; r < ranges; r++) {
        scale[r] = (high - low) * shrink[r] / top;
        scale[r] = scale[r] > tiny ? scale[r] : tiny;
        zero[r] = __builtin_rintf(top / 2 - (high + low) / 2 / scale[r]);
        zero[r] = zero[r] < 0 ? 0 : zero[r] > top ? top : zero[r];
    }
    // All ranges side by side: each is a chain of sums that wait for each other.
    for (int pass = 0; pass < 2; pass++) {
        Vec inverse[ranges], both[ranges], squares[ranges];
        for (int r = 0; r < ranges; r++) inverse[r] = Vec::all(1.0f / scale[r]), both[r] = squares[r] = Vec::zero();
        for (int64_t j = 0; j < n; j += Vec::width) {
            const Vec v = Vec::load(x + j);
#pragma GCC unroll 5
            for (int r = 0; r < ranges; r++) {
                const Vec q = Vec::min(Vec::all(top - zero[r]), Vec::max(Vec::all(-zero[r]), Vec::round(v * inverse[r])));
                both[r] = Vec::fma(v, q, both[r]);
                squares[r] = Vec::fma(q, q, squares[r]);
            }
        }
        for (int r = 0; r < ranges; r++) {
            const float sum = squares[r].sum(), fitted = sum > 0 ? both[r].sum() / sum : scale[r];
            scale[r] = fitted > tiny ? fitted : tiny;
        }
    }
    Vec inverse[ranges], errors[ranges];
    for (int r = 0; r < ranges; r++) inverse[r] = Vec::all(1.0f / scale[r]), errors[r] = Vec::zero();
    for (int64_t j = 0; j < n; j += Vec::width) {
        const Vec v = Vec::load(x + j);
#pragma GCC unroll 5
        for (int r = 0; r < ranges; r++) {
            const Vec q = Vec::min(Vec::all(top - zero[r]), Vec::max(Vec::all(-zero[r]), Vec::round(v * inverse[r])));
            const Vec miss = v - q * Vec::all(scale[r]);
            errors[r] = Vec::fma(miss, miss, errors[r]);
        }
    }
    Fit best{tiny, 8.0f, __builtin_inff()};
    for (int r = 0; r < ranges; r++) {
        const float error = errors[r].sum();
        if (error < best.error) best = {scale[r], zero[r], error};
    }
    return best;
}

// weight [out, in] -> values [out, in], scale [out, groups] and, of 4 bits, zero [out, groups]; see table.h.
template <class T>
void round_weights(int bits, const T* weight, int64_t stride, int64_t out, int64_t in, int64_t group, int8_t* values, float* scale, int8_t* zero,
                   int threads) {
    const int64_t width = group ? group : in, groups = divide_up(in, width), padded = divide_up(width, Vec::width) * Vec::width;
#pragma omp parallel num_threads(threads)
    {
        static thread_local Scratch rooms[2];
        float* x = rooms[0].take<float>(padded);
        int8_t* bytes = rooms[1].take<int8_t>(padded);
#pragma omp for schedule(static)
        for (int64_t row = 0; row < out; row++)
            for (int64_t index = 0; index < groups; index++) {
                const int64_t begin = index * width, n = least(width, in - begin), at = row * groups + index;
                for (int64_t j = 0; j < padded; j += Vec::width)
                    (j < n ? load_some(weight + row * stride + begin + j, n - j) : Vec::zero()).store(x + j);
                Vec from = Vec::all(-127.0f), to = Vec::all(127.0f), inverse = Vec::zero(), shift = Vec::zero();
                if (bits == 4) {
                    const Fit fit = fit_nibbles(x, padded);
                    scale[at] = fit.scale;
                    zero[at] = int8_t(fit.zero - 8.0f);
                    from = Vec::all(-fit.zero), to = Vec::all(15.0f - fit.zero);
                    inverse = Vec::all(1.0f / fit.scale), shift = Vec::all(fit.zero - 8.0f);
                } else {
                    Vec peak = Vec::zero();
                    for (int64_t j = 0; j < padded; j += Vec::width) peak = Vec::max(peak, Vec::max(Vec::load(x + j), Vec::zero() - Vec::load(x + j)));
                    const float largest = peak.top();
                    scale[at] = (largest > 1e-12f ? largest : 1e-12f) / 127.0f;
                    inverse = Vec::all(1.0f / scale[at]);
                }
                for (int64_t j = 0; j < padded; j += Vec::width)
                    (Vec::min(to, Vec::max(from, Vec::round(Vec::load(x + j) * inverse))) + shift).store_bytes(bytes + j);
                memcpy(values + row * in + begin, bytes, size_t(n));
            }
    }
}

}  // namespace inferd::INFERD_LEVEL
