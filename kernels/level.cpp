// One instruction-set level's table. CMake compiles this file once per level.
#ifndef INFERD_STREAM_AHEAD
#define INFERD_STREAM_AHEAD 4096  // bytes
#endif
#include "attention.h"
#include "elementwise.h"
#include "encoder.h"
#include "linear.h"
#include "low_rank.h"
#include "rounding.h"
#include "sampling.h"

#define INFERD_STRING2(x) #x
#define INFERD_STRING(x) INFERD_STRING2(x)
#define INFERD_JOIN2(a, b) a##b
#define INFERD_JOIN(a, b) INFERD_JOIN2(a, b)

namespace inferd {
namespace {

// Chooses the instance for a number format.
#define INFERD_BY_DTYPE(call_f32, call_bf16) \
    if (dtype == Dtype::f32) call_f32;       \
    else call_bf16

using namespace INFERD_LEVEL;

void do_pack(Dtype dtype, const void* w, int64_t stride, int64_t out, int64_t in, int64_t first, void* packed, int threads) {
    INFERD_BY_DTYPE(pack<F32>(w, stride, out, in, first, packed, threads), pack<BF16>(w, stride, out, in, first, packed, threads));
}
void do_pack_ints(int bits, const int8_t* values, const uint16_t* scale, const int8_t* zero, int64_t out, int64_t in, int64_t group, void* packed,
                  int threads) {
    pack_ints(bits, values, scale, zero, out, in, group, packed, threads);
}
void do_round_weights(Dtype dtype, int bits, const void* weight, int64_t stride, int64_t out, int64_t in, int64_t group, int8_t* values,
                      float* scale, int8_t* zero, int threads) {
    INFERD_BY_DTYPE(round_weights(bits, static_cast<const float*>(weight), stride, out, in, group, values, scale, zero, threads),
                    round_weights(bits, static_cast<const bf16*>(weight), stride, out, in, group, values, scale, zero, threads));
}
void do_unpack_rows(const Weights& w, const int64_t* ids, int64_t count, Dtype dtype, void* out, int threads) {
    unpack_rows(w, ids, count, dtype, out, threads);
}
void do_linear(const Weights& w, const LinearArgs& g, int threads) { linear(w, g, threads); }
void do_attention(Dtype dtype, const AttentionArgs& g, int threads) {
    INFERD_BY_DTYPE(attention<F32>(g, threads), attention<BF16>(g, threads));
}
void do_rms_norm(Dtype dtype, const void* x, int64_t x_stride, const void* residual, void* sum, const void* weight, Dtype weight_dtype,
                 void* out, int64_t out_stride, int64_t rows, int64_t groups, int64_t n, float eps, int threads) {
    if (dtype == Dtype::f32)
        rms_norm<float, float>(x, x_stride, residual, sum, weight, out, out_stride, rows, groups, n, eps, threads);
    else if (weight_dtype == Dtype::f32)
        rms_norm<bf16, float>(x, x_stride, residual, sum, weight, out, out_stride, rows, groups, n, eps, threads);
    else
        rms_norm<bf16, bf16>(x, x_stride, residual, sum, weight, out, out_stride, rows, groups, n, eps, threads);
}
void do_gate_and_mul(Dtype dtype, Activation activation, const void* x, int64_t stride, void* out, int64_t rows, int64_t n, int threads) {
    INFERD_BY_DTYPE(gate_and_mul<float>(activation, x, stride, out, rows, n, threads),
                    gate_and_mul<bf16>(activation, x, stride, out, rows, n, threads));
}
void do_add(Dtype dtype, const void* x, void* sum, int64_t count, int threads) {
    INFERD_BY_DTYPE(add<float>(x, sum, count, threads), add<bf16>(x, sum, count, threads));
}
void do_add_parts(Dtype dtype, const float* const* parts, int64_t num_parts, void* total, int64_t count, int threads) {
    INFERD_BY_DTYPE(add_parts<float>(parts, num_parts, total, count, threads), add_parts<bf16>(parts, num_parts, total, count, threads));
}
void do_multiply(Dtype dtype, void* x, int64_t count, float factor, int threads) {
    INFERD_BY_DTYPE(multiply<float>(x, count, factor, threads), multiply<bf16>(x, count, factor, threads));
}
void do_rotary(Dtype dtype, void* x, int64_t stride, int64_t rows, int64_t heads, int64_t head_dim, const int64_t* positions,
               const float* cos, const float* sin, int64_t half, int threads) {
    INFERD_BY_DTYPE(rotary<float>(x, stride, rows, heads, head_dim, positions, cos, sin, half, threads),
                    rotary<bf16>(x, stride, rows, heads, head_dim, positions, cos, sin, half, threads));
}

void do_layer_norm(const LayerNormArgs& g, int threads) { layer_norm(g, threads); }
void do_text_attention(Dtype dtype, const TextAttentionArgs& g, int threads) {
    INFERD_BY_DTYPE(text_attention<float>(g, threads), text_attention<bf16>(g, threads));
}
void do_sample(const SampleArgs& g, int threads) { sample(g, threads); }
void do_low_rank(Dtype dtype, const LowRankArgs& g, int threads) {
    INFERD_BY_DTYPE(low_rank<F32>(g, threads), low_rank<BF16>(g, threads));
}

}  // namespace

const Kernels INFERD_JOIN(kernels_, INFERD_LEVEL) = {
    INFERD_STRING(INFERD_LEVEL), do_pack, do_pack_ints, do_round_weights, do_unpack_rows, do_linear, do_attention, do_rms_norm, do_gate_and_mul, do_add, do_add_parts, do_multiply, do_rotary, do_layer_norm,
    do_text_attention, do_sample, do_low_rank,
};

}  // namespace inferd
