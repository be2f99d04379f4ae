// The operations between matrix products, each one pass over memory, computed in float.
#pragma once
#include "gemm.h"

namespace inferd::INFERD_LEVEL {

constexpr int64_t kSerial = 16384;  // elements below which a second thread costs more than it brings

// The first `count` of a vector's elements, zeros behind them.
template <class T>
inline Vec load_some(const T* p, int64_t count) {
    if (count >= Vec::width) return Vec::load(p);
    T part[Vec::width] = {};
    memcpy(part, p, size_t(count) * sizeof(T));
    return Vec::load(part);
}
template <class T>
inline void store_some(Vec v, T* p, int64_t count) {
    if (count >= Vec::width) return v.store(p);
    T part[Vec::width];
    v.store(part);
    memcpy(p, part, size_t(count) * sizeof(T));
}

// W: the weight's format; Gemma's norms are float32 in every model format.
template <class T, class W>
void rms_norm(const void* x, int64_t x_stride, const void* residual, void* sum, const void* weight, void* out, int64_t out_stride,
              int64_t rows, int64_t groups, int64_t n, float eps, int threads) {
    const W* w = static_cast<const W*>(weight);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * groups * n > kSerial)
    for (int64_t i = 0; i < rows * groups; i++) {
        const int64_t at = i / groups * x_stride + i % groups * n;
        const T* from = static_cast<const T*>(x) + at;
        T* to = static_cast<T*>(out) + i / groups * out_stride + i % groups * n;
        Vec squares = Vec::zero();
        if (residual) {
            const T* r = static_cast<const T*>(residual) + i * n;
            T* added = static_cast<T*>(sum) + i * n;
            for (int64_t j = 0; j < n; j += Vec::width) {
                store_some(load_some(from + j, n - j) + load_some(r + j, n - j), added + j, n - j);
                const Vec v = load_some(added + j, n - j);  // as rounded
                squares = Vec::fma(v, v, squares);
            }
            from = added;
        } else {
            for (int64_t j = 0; j < n; j += Vec::width) {
                const Vec v = load_some(from + j, n - j);
                squares = Vec::fma(v, v, squares);
            }
        }
        const Vec factor = Vec::all(1.0f / __builtin_sqrtf(squares.sum() / float(n) + eps));
        for (int64_t j = 0; j < n; j += Vec::width)
            store_some(load_some(from + j, n - j) * factor * load_some(w + j, n - j), to + j, n - j);
    }
}

struct Silu {
    static Vec of(Vec x) { return silu(x); }
};
struct Gelu {
    static Vec of(Vec x) { return gelu(x); }
};
struct GeluTanh {
    static Vec of(Vec x) { return gelu_tanh(x); }
};

template <class T, class F>
void gate(const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n, int threads) {
    constexpr int64_t chunk = 1024;
    const int64_t chunks = divide_up(n, chunk);
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * n > kSerial)
    for (int64_t i = 0; i < rows * chunks; i++) {
        const int64_t row = i / chunks, first = i % chunks * chunk, last = least(n, first + chunk);
        const T* gate = static_cast<const T*>(gate_up) + row * stride;
        const T* up = gate + n;
        T* to = static_cast<T*>(out) + row * n;
        for (int64_t j = first; j < last; j += Vec::width) {
            store_some(F::of(load_some(gate + j, last - j)) * load_some(up + j, last - j), to + j, last - j);
        }
    }
}

template <class T>
void gate_and_mul(Activation activation, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n, int threads) {
    switch (activation) {
        case Activation::gelu: return gate<T, Gelu>(gate_up, stride, out, rows, n, threads);
        case Activation::gelu_tanh: return gate<T, GeluTanh>(gate_up, stride, out, rows, n, threads);
        default: return gate<T, Silu>(gate_up, stride, out, rows, n, threads);
    }
}

template <class T>
void add(const void* x, void* sum, int64_t count, int threads) {
    const T* from = static_cast<const T*>(x);
    T* to = static_cast<T*>(sum);
#pragma omp parallel for schedule(static) num_threads(threads) if (count > kSerial)
    for (int64_t j = 0; j < count; j += Vec::width)
        store_some(load_some(from + j, count - j) + load_some(to + j, count - j), to + j, count - j);
}

// Added in the order of the parts, rounded once.
template <class T>
void add_parts(const float* const* parts, int64_t num_parts, void* total, int64_t count, int threads) {
    T* to = static_cast<T*>(total);
#pragma omp parallel for schedule(static) num_threads(threads) if (count > kSerial)
    for (int64_t j = 0; j < count; j += Vec::width) {
        Vec v = load_some(parts[0] + j, count - j);
        for (int64_t i = 1; i < num_parts; i++) v = v + load_some(parts[i] + j, count - j);
        store_some(v, to + j, count - j);
    }
}

template <class T>
void multiply(void* x, int64_t count, float factor, int threads) {
    T* at = static_cast<T*>(x);
#pragma omp parallel for schedule(static) num_threads(threads) if (count > kSerial)
    for (int64_t j = 0; j < count; j += Vec::width) store_some(load_some(at + j, count - j) * Vec::all(factor), at + j, count - j);
}

template <class T>
void rotary(void* x, int64_t stride, int64_t rows, int64_t heads, int64_t head_dim, const int64_t* positions, const float* cos,
            const float* sin, int64_t half, int threads) {
#pragma omp parallel for schedule(static) num_threads(threads) if (rows * heads * half > kSerial)
    for (int64_t row = 0; row < rows; row++) {
        const float* c = cos + positions[row] * half;
        const float* s = sin + positions[row] * half;
        for (int64_t head = 0; head < heads; head++) {
            T* a = static_cast<T*>(x) + row * stride + head * head_dim;
            T* b = a + half;
            for (int64_t j = 0; j < half; j += Vec::width) {
                const int64_t n = half - j;
                const Vec x1 = load_some(a + j, n), x2 = load_some(b + j, n), cj = load_some(c + j, n), sj = load_some(s + j, n);
                store_some(x1 * cj - x2 * sj, a + j, n);
                store_some(x2 * cj + x1 * sj, b + j, n);
            }
        }
    }
}

}  // namespace inferd::INFERD_LEVEL
