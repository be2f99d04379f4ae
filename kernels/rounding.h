// Making integers of weights, without any data: what a load-time quantisation does to every matrix.
#pragma once
#include "elementwise.h"
#include "room.h"

namespace inferd::INFERD_LEVEL {

struct Fit {  // x is about scale * (q - zero), with q from 0 to 15
    float scale, zero, error;
};

// The best of a few ranges: the group's own, and shrunk ones that cut off its ends. For each, scale and integers are fitted
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
    Fit best{tiny, 8.0f, __builtin_inff()};
    for (const float part : shrink) {
        float scale = (high - low) * part / top;
        scale = scale > tiny ? scale : tiny;
        float zero = __builtin_rintf(top / 2 - (high + low) / 2 / scale);
        zero = zero < 0 ? 0 : zero > top ? top : zero;
        const Vec from = Vec::all(-zero), to = Vec::all(top - zero);
        for (int pass = 0; pass < 3; pass++) {
            const Vec inverse = Vec::all(1.0f / scale), step = Vec::all(scale);
            Vec both = Vec::zero(), squares = Vec::zero(), errors = Vec::zero();
            for (int64_t j = 0; j < n; j += Vec::width) {
                const Vec v = Vec::load(x + j), q = Vec::min(to, Vec::max(from, Vec::round(v * inverse)));
                if (pass < 2) {
                    both = Vec::fma(v, q, both);
                    squares = Vec::fma(q, q, squares);
                } else {
                    const Vec miss = v - q * step;
                    errors = Vec::fma(miss, miss, errors);
                }
            }
            if (pass == 2) {
                const float error = errors.sum();
                if (error < best.error) best = {scale, zero, error};
            } else {
                const float sum = squares.sum(), fitted = sum > 0 ? both.sum() / sum : scale;
                scale = fitted > tiny ? fitted : tiny;
            }
        }
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
        static thread_local Room rooms[2];
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
