// Linear layers: one entry for all formats of weights.
#pragma once
#include "gemm.h"
#include "int8.h"

namespace inferd::INFERD_LEVEL {

inline void linear(const Weights& w, const LinearArgs& g, int threads) {
    switch (w.format) {
        case WeightFormat::f32: return gemm<F32>(w, g, threads);
        case WeightFormat::bf16: return gemm<BF16>(w, g, threads);
#if defined(__AVX512VNNI__)
        case WeightFormat::int8: return g.x_dtype == Dtype::f32 ? gemm_int8<float>(w, g, threads) : gemm_int8<bf16>(w, g, threads);
#endif
        default: return;  // the binding refuses these
    }
}

}  // namespace inferd::INFERD_LEVEL
