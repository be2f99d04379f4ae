// The decoder of engine/model/llama.py as one call: every layer of a step over a plan that was made at load.
//
// It calls the functions of the current level in the same order and with the same roundings as Python does, so the results
// are equal to the bit. It saves the calls from Python. Activations lie in buffers that are kept from step to step.
#pragma once
#include <cstdlib>
#include <cstring>
#include <functional>
#include <new>
#include <vector>

#include "table.h"

namespace inferd {

struct Shape {  // of all layers
    Dtype dtype, norm_dtype;
    int64_t hidden, heads, kv_heads, head_dim, intermediate;
    float eps, embedding_scale, residual_multiplier;
    Activation gate;
    bool whole_norms;  // of queries and keys: over all heads together, else over each
    bool continues = false;  // a later stage: a step begins with the branch and the residual of the stage before
};

struct DecoderLayer {
    const void *attention_norm, *attention_out_norm, *feed_forward_norm, *feed_forward_out_norm, *q_norm, *k_norm;  // null: none
    const float *cos, *sin;  // [positions, half], or null: no rotary embedding
    int64_t half;
    Weights qkv, out, gate_up, down;
    AttentionArgs attention;  // what is the same in every step
};

enum Product { kQkv = 0, kOut = 1, kGateUp = 2, kDown = 3, kProducts = 4 };  // of a layer; an adapter may change each

// The low-rank products of one adapter, by layer and product (engine/adapters.py keeps their memory alive).
class Adapter {
  public:
    explicit Adapter(int64_t layers) : parts_(size_t(layers * kProducts)) {}
    void add(int64_t layer, int64_t product, const LowRankPart& part) { parts_.at(size_t(layer * kProducts + product)).push_back(part); }
    const std::vector<LowRankPart>& parts(int64_t layer, int64_t product) const { return parts_.at(size_t(layer * kProducts + product)); }

  private:
    std::vector<std::vector<LowRankPart>> parts_;
};

// The rows of a step that use adapters, gathered by adapter.
class AdapterRows {
  public:
    AdapterRows() = default;
    // of [rows]: a row's place in `adapters`, or < 0: none.
    AdapterRows(const std::vector<const Adapter*>& adapters, const int32_t* of, int64_t rows) : adapters_(adapters), rows_(adapters.size()) {
        for (int64_t i = 0; i < rows; i++)
            if (of[i] >= 0) rows_.at(size_t(of[i])).push_back(i);
    }
    // The same for a step of which only the rows `kept` (ascending) remain.
    AdapterRows kept(const int64_t* kept, int64_t count) const {
        AdapterRows found;
        found.adapters_ = adapters_;
        for (const std::vector<int64_t>& rows : rows_) {
            std::vector<int64_t> left;
            size_t at = 0;
            for (int64_t i = 0; i < count; i++) {
                while (at < rows.size() && rows[at] < kept[i]) at++;
                if (at < rows.size() && rows[at] == kept[i]) left.push_back(i);
            }
            found.rows_.push_back(std::move(left));
        }
        return found;
    }
    // y += what each row's adapter adds to one product of a layer.
    void apply(const Kernels& k, Dtype dtype, int64_t layer, int64_t product, const void* x, int64_t x_stride, Dtype y_dtype, void* y,
               int64_t y_stride, int threads) const {
        std::vector<LowRankGroup> groups;
        for (size_t i = 0; i < adapters_.size(); i++) {
            const std::vector<LowRankPart>& parts = adapters_[i]->parts(layer, product);
            if (!parts.empty() && !rows_[i].empty()) groups.push_back({parts.data(), int64_t(parts.size()), rows_[i].data(), int64_t(rows_[i].size())});
        }
        if (!groups.empty()) k.low_rank(dtype, {x, x_stride, y_dtype, y, y_stride, groups.data(), int64_t(groups.size())}, threads);
    }

  private:
    std::vector<const Adapter*> adapters_;
    std::vector<std::vector<int64_t>> rows_;
};

struct StepRows {
    const int64_t *token_ids, *positions, *slots;  // [rows]
    const int32_t *query_start, *seq_len;          // [sequences + 1], [sequences]
    const int32_t* block_table;                    // [sequences, table_stride]
    int64_t table_stride, sequences, rows;
    const int64_t* output_rows;  // [num_output_rows] rows whose hidden states are needed, ascending
    int64_t num_output_rows;     // < 0: all are needed
    AdapterRows adapters = {};
    // Of a decoder that is divided among ranks; else null.
    void* partial = nullptr;  // this rank's part of a sum, float [rows, hidden]; or of a product's inputs or outputs
    void* whole = nullptr;    // what all ranks have together: [rows, hidden], or a product's inputs
};

class Decoder {
  public:
    // Called with a step and a number of rows: adds the parts of all ranks (StepRows::partial) into StepRows::whole.
    using Sum = std::function<void(const Kernels&, const StepRows&, int64_t rows, int threads)>;
    // Called with a step and this rank's part [rows, row_bytes]: puts those of all ranks side by side into StepRows::whole.
    using Concat = std::function<void(const StepRows&, const void* part, int64_t rows, int64_t row_bytes)>;

    // embedding: [vocabulary, hidden]; null: forward is given the rows themselves. norm: the last one; null: a step ends with the
    // branch and the residual, for the next stage. sum: null where no product is divided.
    Decoder(const Shape& shape, const Weights* embedding, const void* norm, Sum sum = {})
        : shape_(shape), has_embedding_(embedding != nullptr), embedding_(embedding ? *embedding : Weights{}), norm_(norm), sum_(std::move(sum)) {}
    Decoder(const Decoder&) = delete;
    ~Decoder() { free(memory_); }

    void add(DecoderLayer layer) {
        layer.attention.heads = shape_.heads, layer.attention.kv_heads = shape_.kv_heads, layer.attention.head_dim = shape_.head_dim;
        layers_.push_back(layer);
    }

    // Divides the second products of attention and of feed-forward by outputs instead of inputs, among so many ranks. Their inputs
    // are then put together before them and their outputs behind them, so each output is computed as in one process.
    void divide_by_outputs(int64_t ranks, Concat concat) { ranks_ = ranks, concat_ = std::move(concat); }

    // Computes in the memory of another decoder of this shape, whose steps are never computed at the same time.
    void borrow(Decoder& lender) { lender_ = &lender; }

    // Reserves memory for steps of so many rows; a larger step allocates more.
    void reserve(int64_t rows) {
        if (lender_ != nullptr) {
            lender_->reserve(rows);
            residual_ = lender_->residual_, normed_ = lender_->normed_, own_branch_ = lender_->own_branch_, qkv_ = lender_->qkv_;
            attended_ = lender_->attended_, gate_up_ = lender_->gate_up_, gated_ = lender_->gated_;
            return;
        }
        if (rows <= capacity_) return;
        const int64_t item = this->item(), heads = shape_.heads * shape_.head_dim;
        const int64_t widths[] = {shape_.hidden, shape_.hidden, shape_.hidden, qkv_width(), heads, 2 * shape_.intermediate, shape_.intermediate};
        int64_t bytes = kLine;
        for (const int64_t width : widths) bytes += lines(rows * width * item);
        capacity_ = 0;  // if the allocation fails, nothing is held, and a smaller step allocates again
        free(memory_);
        memory_ = malloc(size_t(bytes));
        if (memory_ == nullptr) throw std::bad_alloc();
        capacity_ = rows;
        char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory_) + kLine - 1) / kLine * kLine);
        void** const parts[] = {&residual_, &normed_, &branch_, &qkv_, &attended_, &gate_up_, &gated_};
        for (int i = 0; i < 7; i++) {
            *parts[i] = at;
            at += lines(rows * widths[i] * item);
        }
        own_branch_ = branch_;
    }

    // out [rows, hidden] = the output rows' hidden states after the last norm; other rows are not changed. Without a last norm,
    // out [2, rows, hidden] = branch and residual. entering [rows, hidden]: embedded tokens, used where there is no packed
    // embedding; of a later stage [2, rows, hidden]: branch and residual. After the last layer's keys and values, only the
    // output rows are computed.
    void forward(const Kernels& k, const StepRows& step, const void* entering, void* out, int threads) {
        if (step.rows == 0) return;
        reserve(step.rows);
        branch_ = sum_ || concat_ ? step.whole : own_branch_;
        Call call{*this, k, step, threads, step.rows, step.adapters};
        const int64_t size = step.rows * shape_.hidden * item();
        if (shape_.continues) {
            memcpy(branch_, entering, size_t(size));
            memcpy(residual_, static_cast<const char*>(entering) + size, size_t(size));
        } else {
            call.embed(entering);
        }
        bool has_branch = shape_.continues;  // a branch is still to be added to the residual
        for (const DecoderLayer& layer : layers_) {
            const int64_t index = &layer - layers_.data();
            const void* x = call.enter(has_branch, layer.attention_norm);
            call.attend(layer, index, x);
            if (step.num_output_rows >= 0 && &layer == &layers_.back()) {
                call.keep_output_rows();
                if (call.rows == 0) return;
            }
            call.second(index, kOut, layer.out, attended_, shape_.heads * shape_.head_dim);
            call.leave(layer.attention_out_norm);
            x = call.enter(true, layer.feed_forward_norm);
            call.linear(index, kGateUp, layer.gate_up, x, shape_.hidden, gate_up_, 2 * shape_.intermediate);
            k.gate_and_mul(shape_.dtype, shape_.gate, gate_up_, 2 * shape_.intermediate, gated_, call.rows, shape_.intermediate, threads);
            call.second(index, kDown, layer.down, gated_, shape_.intermediate);
            call.leave(layer.feed_forward_out_norm);
            has_branch = true;
        }
        if (norm_ == nullptr) {
            memcpy(out, branch_, size_t(size));
            memcpy(static_cast<char*>(out) + size, residual_, size_t(size));
            return;
        }
        if (step.num_output_rows < 0) return call.norm(branch_, residual_, norm_, out);
        call.norm(branch_, residual_, norm_, normed_);
        const int64_t bytes = shape_.hidden * item();
        for (int64_t i = 0; i < call.rows; i++) memcpy(static_cast<char*>(out) + step.output_rows[i] * bytes, row(normed_, i, bytes), size_t(bytes));
    }

  private:
    static constexpr int64_t kLine = 64;
    static int64_t lines(int64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }
    int64_t qkv_width() const { return (shape_.heads + 2 * shape_.kv_heads) * shape_.head_dim; }
    int64_t item() const { return shape_.dtype == Dtype::f32 ? 4 : 2; }  // bytes of a number
    const void* element(const void* at, int64_t count) const { return static_cast<const char*>(at) + count * item(); }
    static char* row(void* rows, int64_t i, int64_t bytes) { return static_cast<char*>(rows) + i * bytes; }

    struct Call {
        const Decoder& d;
        const Kernels& k;
        const StepRows& step;
        const int threads;
        int64_t rows;  // still computed
        AdapterRows adapters;  // of these rows

        // Moves the output rows of the tensors that the rest of the layer reads to the front.
        void keep_output_rows() {
            const int64_t heads = d.shape_.heads * d.shape_.head_dim * d.item(), hidden = d.shape_.hidden * d.item();
            for (int64_t i = 0; i < step.num_output_rows; i++) {
                memmove(row(d.attended_, i, heads), row(d.attended_, step.output_rows[i], heads), size_t(heads));
                memmove(row(d.residual_, i, hidden), row(d.residual_, step.output_rows[i], hidden), size_t(hidden));
            }
            rows = step.num_output_rows;
            adapters = adapters.kept(step.output_rows, step.num_output_rows);
        }
        void embed(const void* embedded) const {
            const Shape& s = d.shape_;
            const int64_t count = rows * s.hidden;
            if (d.has_embedding_)
                k.unpack_rows(d.embedding_, step.token_ids, rows, s.dtype, d.residual_, threads);
            else
                memcpy(d.residual_, embedded, size_t(count * d.item()));
            if (s.embedding_scale != 1.0f) k.multiply(s.dtype, d.residual_, count, s.embedding_scale, threads);
        }
        void linear(int64_t layer, Product product, const Weights& weights, const void* x, int64_t x_stride, void* out, int64_t out_stride) const {
            linear(layer, product, weights, x, x_stride, d.shape_.dtype, out, out_stride);
        }
        // One product of a layer, with what the rows' adapters add to it: the one place where adapters apply.
        void linear(int64_t layer, Product product, const Weights& weights, const void* x, int64_t x_stride, Dtype out_dtype, void* out,
                    int64_t out_stride) const {
            const Dtype dtype = d.shape_.dtype;
            k.linear(weights, {dtype, x, x_stride, out_dtype, out, out_stride, rows, Activation::none}, threads);
            adapters.apply(k, dtype, layer, product, x, x_stride, out_dtype, out, out_stride, threads);
        }
        // The second product of attention or of feed-forward, of which each rank may have a part. x [rows, width] is contiguous.
        void second(int64_t layer, Product product, const Weights& weights, const void* x, int64_t width) const {
            const int64_t hidden = d.shape_.hidden;
            if (d.concat_) {
                const int64_t outputs = hidden / d.ranks_;
                d.concat_(step, x, rows, width * d.item());
                linear(layer, product, weights, step.whole, width * d.ranks_, step.partial, outputs);
                d.concat_(step, step.partial, rows, outputs * d.item());
            } else if (d.sum_) {  // parts are float until they are added, so the sum is rounded once
                linear(layer, product, weights, x, width, Dtype::f32, step.partial, hidden);
                d.sum_(k, step, rows, threads);
            } else {
                linear(layer, product, weights, x, width, d.branch_, hidden);
            }
        }
        void norm(const void* x, void* residual, const void* weight, void* out) const {
            const Shape& s = d.shape_;
            k.rms_norm(s.dtype, x, s.hidden, residual, residual, weight, s.norm_dtype, out, s.hidden, rows, 1, s.hidden, s.eps, threads);
        }
        // Adds the branch to the residual; returns the input of the layer's next part.
        const void* enter(bool has_branch, const void* weight) const {
            const Shape& s = d.shape_;
            if (weight == nullptr) {
                if (has_branch) k.add(s.dtype, d.branch_, d.residual_, rows * s.hidden, threads);
                return d.residual_;
            }
            if (has_branch) norm(d.branch_, d.residual_, weight, d.normed_);
            else norm(d.residual_, nullptr, weight, d.normed_);
            return d.normed_;
        }
        void leave(const void* weight) const {
            if (weight) norm(d.branch_, nullptr, weight, d.branch_);
            if (d.shape_.residual_multiplier != 1.0f)
                k.multiply(d.shape_.dtype, d.branch_, rows * d.shape_.hidden, d.shape_.residual_multiplier, threads);
        }
        void attend(const DecoderLayer& layer, int64_t index, const void* x) const {
            const Shape& s = d.shape_;
            const int64_t width = d.qkv_width(), heads = s.heads * s.head_dim, kv_heads = s.kv_heads * s.head_dim;
            void *const q = d.qkv_, *const key = const_cast<void*>(d.element(q, heads));
            linear(index, kQkv, layer.qkv, x, s.hidden, q, width);
            if (layer.q_norm) {
                norm_heads(q, layer.q_norm, s.heads);
                norm_heads(key, layer.k_norm, s.kv_heads);
            }
            if (layer.cos)  // queries and keys lie side by side
                k.rotary(s.dtype, q, width, rows, s.heads + s.kv_heads, s.head_dim, step.positions, layer.cos, layer.sin, layer.half, threads);
            AttentionArgs a = layer.attention;
            a.q = q, a.k = key, a.v = d.element(key, kv_heads), a.out = d.attended_;
            a.q_stride = a.k_stride = a.v_stride = width;
            a.query_start = step.query_start, a.seq_len = step.seq_len, a.block_table = step.block_table, a.slots = step.slots;
            a.table_stride = step.table_stride, a.sequences = step.sequences, a.rows = rows;
            k.attention(s.dtype, a, threads);
        }
        void norm_heads(void* x, const void* weight, int64_t heads) const {
            const Shape& s = d.shape_;
            const int64_t groups = s.whole_norms ? 1 : heads, n = heads * s.head_dim / groups, stride = d.qkv_width();
            k.rms_norm(s.dtype, x, stride, nullptr, nullptr, weight, s.norm_dtype, x, stride, rows, groups, n, s.eps, threads);
        }
    };

    const Shape shape_;
    const bool has_embedding_;
    const Weights embedding_;
    const void* const norm_;
    const Sum sum_;
    int64_t ranks_ = 1;
    Concat concat_;
    std::vector<DecoderLayer> layers_;
    Decoder* lender_ = nullptr;
    int64_t capacity_ = 0;
    void* memory_ = nullptr;
    void *residual_ = nullptr, *normed_ = nullptr, *branch_ = nullptr, *own_branch_ = nullptr, *qkv_ = nullptr, *attended_ = nullptr, *gate_up_ = nullptr,
         *gated_ = nullptr;
};

}  // namespace inferd
