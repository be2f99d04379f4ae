// The functions of one instruction-set level, over plain pointers.
//
// Every level is the same sources compiled with other flags (see CMakeLists.txt), so this header must
// stay free of inline functions: the linker would keep one copy, of any level.
#pragma once
#include <cstdint>

namespace inferd {

enum class Dtype : int { f32 = 0, bf16 = 1 };
enum class Activation : int { none = 0, gelu = 1, gelu_tanh = 2, silu = 3 };

// Weights are packed in panels of this many output columns, the same for all levels.
constexpr int kPanel = 64;
constexpr int kMaxDim = 256;  // of a head, in attention

// The version of the layout of integers in panels (ints.h). It changes with the layout, because packed weights are stored
// on disk.
constexpr int kIntsLayout = 1;

// The number format of a linear layer's weights.
enum class WeightFormat : int { f32 = 0, bf16 = 1, int8 = 2, int4 = 3 };

// The weights of a linear layer. linear.h and the files it includes define the layout of `packed`.
struct Weights {
    WeightFormat format;
    const void* packed;    // [ceil(out / kPanel)] panels
    const float* scale;    // int8, int4: [ceil(out / kPanel) * kPanel], of each output
    const int32_t* total;  // int8, int4 with neither groups nor zeros: as many, the sums of an output's integers; else null
    int64_t group;         // int8, int4: inputs that share a scale; 0: all of them
    bool has_zero;         // int8, int4: a group has a zero point beside its scale
    const float* bias;     // [out] or null
    int64_t in, out;
    const int32_t* order = nullptr;  // int8, int4: [in] the input that each column takes (act-order); null: its own
};

struct LinearArgs {
    Dtype x_dtype;    // that of f32 and bf16 weights; either for others
    const void* x;    // [rows, >= in]
    int64_t x_stride;  // elements
    Dtype out_dtype;  // f32 or that of x
    void* out;        // [rows, out]
    int64_t out_stride;
    int64_t rows;
    Activation activation;  // of the sum with the bias
};

struct AttentionArgs {
    void* keys;    // [num_blocks, kv_heads, head_dim / lane, block_size, lane], see cache.h
    void* values;  // [num_blocks, kv_heads, ceil(block_size / lane), head_dim, lane]
    const void* q;  // [rows, heads, head_dim], row stride q_stride
    const void* k;  // [rows, kv_heads, head_dim]
    const void* v;
    void* out;                    // [rows, heads, head_dim], contiguous
    int64_t q_stride, k_stride, v_stride;
    const int32_t* query_start;   // [sequences + 1]
    const int32_t* seq_len;       // [sequences]
    const int32_t* block_table;   // [sequences, table_stride]
    const int64_t* slots;         // [rows]
    int64_t table_stride;
    int64_t sequences, rows, heads, kv_heads, head_dim, block_size;
    float scale;
    int64_t window;  // 0: none
    float softcap;   // 0: none
    // Of a cache of bytes, else null: keys and values are then bytes, and lane is 4.
    float* key_scales = nullptr;    // [num_blocks, kv_heads, key_groups, block_size]
    float* value_scales = nullptr;  // [num_blocks, kv_heads, block_size]
    int64_t key_groups = 1;         // parts of a key with scales of their own
};

struct LayerNormArgs {
    const float* x;         // [rows, n]
    const float* residual;  // [rows, n] or null
    const float* weight;    // [n]
    const float* bias;      // [n] or null
    float* out;             // [rows, n]
    void* narrow;           // [rows, n] bf16 or null
    int64_t rows, n;
    float eps;
};

struct TextAttentionArgs {
    const float* qkv;       // [rows, 3, heads, head_dim]
    void* out;              // [rows, heads, head_dim]
    const int64_t* starts;  // [texts + 1]: first rows
    const float* bias;      // [heads, 2 * bias_reach - 1] by key - query + bias_reach - 1, or null
    int64_t texts, heads, head_dim, window, bias_reach;  // window < 0: none
    float scale;
};

struct SampleArgs {
    float* logits;  // [rows, >= vocab], row stride `stride`; changed where a mask bans tokens
    int64_t stride, rows, vocab;
    // Of each row. Temperature 0: the greatest logit, and of equal ones the first.
    const float* temperature;
    const float* floors;   // least logit, after temperature and relative to the greatest; -infinity: none
    const int64_t* top_k;  // 0: none
    const double* top_p;   // 1: none
    const double* draws;   // in [0, 1)
    float* best;           // out: the greatest logit; NaN where a logit is neither finite nor -infinity
    int64_t* tokens;       // out: 0 where the best is not finite
    // Masks of `mask_words` words, or null. Bit b of word w of a row's mask: token 32 w + b may be drawn. Others may not.
    const uint32_t* masks = nullptr;
    const int64_t* mask_of = nullptr;  // of each row: which mask; negative: none
    int64_t mask_words = 0;
};

// One projection of an adapter: y[.., first .. first + count) += scale * B A x.
struct LowRankPart {
    const void* a;  // [rank, in]
    const void* b;  // [ceil(count / kPanel), rank, kPanel]: B transposed, in panels of outputs
    int64_t rank, in, first, count;
    float scale;
};

struct LowRankGroup {  // the rows that use one adapter
    const LowRankPart* parts;
    int64_t num_parts;
    const int64_t* rows;  // [num_rows]
    int64_t num_rows;
};

struct LowRankArgs {
    const void* x;     // [rows, >= in], all in one format
    int64_t x_stride;  // elements
    Dtype y_dtype;     // that of x, or f32
    void* y;           // [rows, y_stride], changed in place
    int64_t y_stride;
    const LowRankGroup* groups;  // no row is in two
    int64_t num_groups;
};

struct Kernels {
    const char* name;
    void (*pack)(Dtype, const void* weight, int64_t stride, int64_t out, int64_t in, int64_t first_row, void* packed, int threads);
    // values [out, in], signed, without their zeros [out, groups] (or null); scale f16 [out, groups], a part of the output's own.
    void (*pack_ints)(int bits, const int8_t* values, const uint16_t* scale, const int8_t* zero, int64_t out, int64_t in, int64_t group,
                      void* packed, int threads);
    // Weights into integers, scales f32 [out, groups] and zeros [out, groups], without data: 8 bits around 0 to the nearest (no
    // zeros), 4 bits fitted to each group by least squares.
    void (*round_weights)(Dtype, int bits, const void* weight, int64_t stride, int64_t out, int64_t in, int64_t group, int8_t* values, float* scale,
                          int8_t* zero, int threads);
    // Rows of the weights [count, in]: f32 and bf16 as they are, integers as `out` is.
    void (*unpack_rows)(const Weights&, const int64_t* ids, int64_t count, Dtype out_dtype, void* out, int threads);
    // x @ weights.T + bias, through the activation.
    void (*linear)(const Weights&, const LinearArgs&, int threads);
    void (*attention)(Dtype, const AttentionArgs&, int threads);
    // out = rms_norm(x); with residual: residual = x + residual, out = rms_norm(residual).
    // rows x groups vectors of width n; vector (r, g) begins at r * stride + g * n, out is contiguous.
    // The weight is float32 or as x. out may be x, and sum the residual.
    void (*rms_norm)(Dtype, const void* x, int64_t x_stride, const void* residual, void* sum, const void* weight, Dtype weight_dtype,
                     void* out, int64_t out_stride, int64_t rows, int64_t groups, int64_t n, float eps, int threads);
    // gate_up [rows, 2n], row stride `stride`: out [rows, n] = activation(first half) * second half.
    void (*gate_and_mul)(Dtype, Activation, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t n, int threads);
    void (*add)(Dtype, const void* x, void* sum, int64_t count, int threads);  // sum += x
    // total [count] = parts[0] + parts[1] + ..., each float [count], added in this order and rounded once.
    void (*add_parts)(Dtype total_dtype, const float* const* parts, int64_t num_parts, void* total, int64_t count, int threads);
    void (*multiply)(Dtype, void* x, int64_t count, float factor, int threads);  // in place
    // In place on x [rows, heads, head_dim]; cos and sin f32 [positions, half].
    void (*rotary)(Dtype, void* x, int64_t stride, int64_t rows, int64_t heads, int64_t head_dim, const int64_t* positions,
                   const float* cos, const float* sin, int64_t half, int threads);
    void (*layer_norm)(const LayerNormArgs&, int threads);
    void (*text_attention)(Dtype out, const TextAttentionArgs&, int threads);
    void (*sample)(const SampleArgs&, int threads);
    void (*low_rank)(Dtype, const LowRankArgs&, int threads);
};

extern const Kernels kernels_generic;
#ifdef INFERD_X86
extern const Kernels kernels_avx2;
extern const Kernels kernels_avx512;
extern const Kernels kernels_avx512bf16;
#endif

}  // namespace inferd
