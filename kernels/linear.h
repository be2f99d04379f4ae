// Linear layers: one entry for all formats of weights.
#pragma once
#include "gemm.h"
#include "ints.h"

namespace inferd::INFERD_LEVEL {

inline void linear(const Weights& w, const LinearArgs& g, int threads) {
    switch (w.format) {
        case WeightFormat::f32: return gemm<F32>(w, g, threads);
        case WeightFormat::bf16: return gemm<BF16>(w, g, threads);
        default: return g.x_dtype == Dtype::f32 ? ints_product<float>(w, g, threads) : ints_product<bf16>(w, g, threads);
    }
}

// Rows of the weights [count, in]: what an embedding table shared with the output layer needs. f32 and bf16 weights keep their
// format, `out_dtype` is that of the others.
inline void unpack_rows(const Weights& w, const int64_t* ids, int64_t count, Dtype out_dtype, void* out, int threads) {
    switch (w.format) {
        case WeightFormat::f32: return unpack_rows<F32>(w.packed, w.in, ids, count, out, threads);
        case WeightFormat::bf16: return unpack_rows<BF16>(w.packed, w.in, ids, count, out, threads);
        default:
            if (out_dtype == Dtype::f32)
                unpack_ints(w, ids, count, static_cast<float*>(out), threads);
            else
                unpack_ints(w, ids, count, static_cast<bf16*>(out), threads);
    }
}

}  // namespace inferd::INFERD_LEVEL
