// inferd._kernels: the tables of level.cpp for Python. Tensors are passed as addresses and sizes; the caller
// (inferd/native) has checked formats and shapes. The GIL is released while a kernel runs.
#include <nanobind/nanobind.h>
#include <nanobind/stl/function.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "decoder.h"
#include "drafting.h"
#include "lookup.h"
#include "meeting.h"
#include "table.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace inferd;

namespace {

std::vector<const Kernels*> supported() {  // best first
    std::vector<const Kernels*> levels;
#ifdef INFERD_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni")) levels.push_back(&kernels_avx512bf16);
    if (avx512) levels.push_back(&kernels_avx512);
    if (avx2) levels.push_back(&kernels_avx2);
#endif
    levels.push_back(&kernels_generic);
    return levels;
}

const std::vector<const Kernels*> levels = supported();
const Kernels* active = levels.front();

template <class T = void>
T* at(uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

void use_level(const std::string& name) {
    for (const Kernels* level : levels)
        if (name == level->name) {
            active = level;
            return;
        }
    throw std::invalid_argument("this processor does not have the level '" + name + "'; see levels()");
}

// Asks for large pages before the memory is first touched: weights are read whole in every step.
void prefer_large_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t page = 1 << 21, first = (address + page - 1) / page * page, last = (address + uintptr_t(bytes)) / page * page;
    if (last > first) madvise(at(first), last - first, MADV_HUGEPAGE);
#else
    (void)address, (void)bytes;
#endif
}

// Has the system find and clear the pages of a range now, without writing to it. False where it cannot.
bool touch_pages(uintptr_t address, int64_t bytes) {
#if defined(__linux__) && defined(MADV_POPULATE_WRITE)
    const uintptr_t page = 4096, first = address / page * page, last = (address + uintptr_t(bytes) + page - 1) / page * page;
    return madvise(at(first), last - first, MADV_POPULATE_WRITE) == 0;
#else
    return (void)address, (void)bytes, false;
#endif
}

void linear(const Weights& weights, int x_dtype, uintptr_t x, int64_t x_stride, int out_dtype, uintptr_t out, int64_t out_stride, int64_t rows,
            int activation, int threads) {
    active->linear(weights, {Dtype(x_dtype), at(x), x_stride, Dtype(out_dtype), at(out), out_stride, rows, Activation(activation)}, threads);
}

void attention(int dtype, uintptr_t keys, uintptr_t values, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t out, int64_t q_stride,
               int64_t k_stride, int64_t v_stride, uintptr_t query_start, uintptr_t seq_len, uintptr_t block_table, uintptr_t slots,
               int64_t table_stride, int64_t sequences, int64_t rows, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t block_size,
               float scale, int64_t window, float softcap, uintptr_t key_scales, uintptr_t value_scales, int64_t key_groups, int threads) {
    active->attention(Dtype(dtype),
                      {at(keys), at(values), at(q), at(k), at(v), at(out), q_stride, k_stride, v_stride, at<int32_t>(query_start),
                       at<int32_t>(seq_len), at<int32_t>(block_table), at<int64_t>(slots), table_stride, sequences, rows, heads, kv_heads,
                       head_dim, block_size, scale, window, softcap, at<float>(key_scales), at<float>(value_scales), key_groups},
                      threads);
}

// How a decoder that is divided among ranks adds their parts: where they meet, or as Python says.
Decoder::Sum sum_of(std::function<void(int64_t)> sum, Meeting* meeting, Dtype dtype, int64_t hidden) {
    if (meeting != nullptr)
        return [=](const Kernels& k, const StepRows& step, int64_t rows, int threads) {
            meeting->sum(k, static_cast<const float*>(step.partial), rows * hidden, dtype, step.whole, threads);
        };
    if (!sum) return {};
    return [sum = std::move(sum)](const Kernels&, const StepRows&, int64_t rows, int) { sum(rows); };
}

// How such a decoder puts their parts side by side: where they meet, or as Python says, which finds the part in StepRows::partial.
Decoder::Concat concat_of(std::function<void(int64_t, int64_t)> concat, Meeting* meeting) {
    if (meeting != nullptr)
        return [=](const StepRows& step, const void* part, int64_t rows, int64_t row_bytes) { meeting->concat(part, rows, row_bytes, step.whole); };
    return [concat = std::move(concat)](const StepRows& step, const void* part, int64_t rows, int64_t row_bytes) {
        if (part != step.partial) memcpy(step.partial, part, size_t(rows * row_bytes));
        concat(rows, row_bytes);
    };
}

}  // namespace

NB_MODULE(_kernels, m) {
    using nogil = nb::call_guard<nb::gil_scoped_release>;
    m.attr("PANEL") = kPanel;
    m.attr("INTS_LAYOUT") = kIntsLayout;
    m.def("levels", [] {
        std::vector<std::string> names;
        for (const Kernels* level : levels) names.push_back(level->name);
        return names;
    });
    m.def("level", [] { return std::string(active->name); });
    m.def("use_level", &use_level);
    m.def("prefer_large_pages", &prefer_large_pages);
    m.def("touch_pages", &touch_pages, nogil());
    m.def(
        "pack",
        [](int dtype, uintptr_t weight, int64_t stride, int64_t out, int64_t in, int64_t first_row, uintptr_t packed, int threads) {
            active->pack(Dtype(dtype), at(weight), stride, out, in, first_row, at(packed), threads);
        },
        nogil());
    m.def(
        "pack_ints",
        [](int bits, uintptr_t values, uintptr_t scale, uintptr_t zero, int64_t out, int64_t in, int64_t group, uintptr_t packed, int threads) {
            active->pack_ints(bits, at<int8_t>(values), at<uint16_t>(scale), at<int8_t>(zero), out, in, group, at(packed), threads);
        },
        nogil());
    m.def(
        "round_weights",
        [](int dtype, int bits, uintptr_t weight, int64_t stride, int64_t out, int64_t in, int64_t group, uintptr_t values, uintptr_t scale,
           uintptr_t zero, int threads) {
            active->round_weights(Dtype(dtype), bits, at(weight), stride, out, in, group, at<int8_t>(values), at<float>(scale), at<int8_t>(zero),
                                  threads);
        },
        nogil());
    m.def(
        "unpack_rows",
        [](const Weights& weights, uintptr_t ids, int64_t count, int out_dtype, uintptr_t out, int threads) {
            active->unpack_rows(weights, at<int64_t>(ids), count, Dtype(out_dtype), at(out), threads);
        },
        nogil());
    nb::class_<Weights>(m, "Weights")
        .def("__init__", [](Weights* self, int format, uintptr_t packed, uintptr_t scale, uintptr_t total, int64_t group, bool has_zero, uintptr_t bias,
                            int64_t in, int64_t out) {
            new (self) Weights{WeightFormat(format), at(packed), at<float>(scale), at<int32_t>(total), group, has_zero, at<float>(bias), in, out};
        })
        .def("take_in", [](Weights& self, uintptr_t order) { self.order = at<int32_t>(order); });
    m.def("linear", &linear, nogil());
    m.def("attention", &attention, nogil());
    m.def(
        "rms_norm",
        [](int dtype, uintptr_t x, int64_t x_stride, uintptr_t residual, uintptr_t sum, uintptr_t weight, int weight_dtype, uintptr_t out,
           int64_t out_stride, int64_t rows, int64_t groups, int64_t n, float eps, int threads) {
            active->rms_norm(Dtype(dtype), at(x), x_stride, at(residual), at(sum), at(weight), Dtype(weight_dtype), at(out), out_stride, rows,
                             groups, n, eps, threads);
        },
        nogil());
    m.def(
        "layer_norm",
        [](uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, uintptr_t out, uintptr_t narrow, int64_t rows, int64_t n, float eps,
           int threads) {
            active->layer_norm({at<float>(x), at<float>(residual), at<float>(weight), at<float>(bias), at<float>(out), at(narrow), rows, n, eps},
                               threads);
        },
        nogil());
    m.def(
        "sample",
        [](uintptr_t logits, int64_t stride, int64_t rows, int64_t vocab, uintptr_t temperature, uintptr_t floors, uintptr_t top_k,
           uintptr_t top_p, uintptr_t draws, uintptr_t best, uintptr_t tokens, int threads, uintptr_t masks, const std::vector<int64_t>& mask_of,
           int64_t mask_words) {
            active->sample({at<float>(logits), stride, rows, vocab, at<float>(temperature), at<float>(floors), at<int64_t>(top_k),
                            at<double>(top_p), at<double>(draws), at<float>(best), at<int64_t>(tokens), at<uint32_t>(masks), mask_of.data(),
                            mask_words},
                           threads);
        },
        "logits"_a, "stride"_a, "rows"_a, "vocab"_a, "temperature"_a, "floors"_a, "top_k"_a, "top_p"_a, "draws"_a, "best"_a, "tokens"_a,
        "threads"_a, "masks"_a = 0, "mask_of"_a = std::vector<int64_t>(), "mask_words"_a = 0, nogil());
    m.def(
        "text_attention",
        [](int out_dtype, uintptr_t qkv, uintptr_t out, uintptr_t starts, uintptr_t bias, int64_t texts, int64_t heads, int64_t head_dim,
           int64_t window, int64_t bias_reach, float scale, int threads) {
            active->text_attention(Dtype(out_dtype),
                                   {at<float>(qkv), at(out), at<int64_t>(starts), at<float>(bias), texts, heads, head_dim, window, bias_reach, scale},
                                   threads);
        },
        nogil());
    m.def(
        "gate_and_mul",
        [](int dtype, int activation, uintptr_t gate_up, int64_t stride, uintptr_t out, int64_t rows, int64_t n, int threads) {
            active->gate_and_mul(Dtype(dtype), Activation(activation), at(gate_up), stride, at(out), rows, n, threads);
        },
        nogil());
    nb::class_<Adapter>(m, "Adapter")
        .def(nb::init<int64_t>())
        .def(
            "add",
            [](Adapter& self, int64_t layer, int64_t product, uintptr_t a, uintptr_t b, int64_t rank, int64_t in, int64_t first, int64_t count,
               float scale) { self.add(layer, product, {at(a), at(b), rank, in, first, count, scale}); },
            nb::kw_only(), "layer"_a, "product"_a, "a"_a, "b"_a, "rank"_a, "size"_a, "first"_a, "count"_a, "scale"_a);
    m.def(
        "low_rank",
        [](int dtype, uintptr_t x, int64_t x_stride, int y_dtype, uintptr_t y, int64_t y_stride, int64_t rows,
           const std::vector<const Adapter*>& adapters, uintptr_t adapter_of, int64_t layer, int64_t product, int threads) {
            AdapterRows(adapters, at<int32_t>(adapter_of), rows)
                .apply(*active, Dtype(dtype), layer, product, at(x), x_stride, Dtype(y_dtype), at(y), y_stride, threads);
        },
        nogil());
    nb::class_<MappedMeeting>(m, "Meeting")
        .def(nb::init<int, int64_t, int64_t, int64_t, double, double>(), nb::kw_only(), "file"_a, "offset"_a, "ranks"_a, "place"_a, "spin_s"_a,
             "timeout_s"_a)
        .def_static("bytes", &MappedMeeting::bytes)
        .def(
            "sum",
            [](MappedMeeting& self, uintptr_t part, int64_t count, int total_dtype, uintptr_t total, int threads) {
                self.sum(*active, at<float>(part), count, Dtype(total_dtype), at(total), threads);
            },
            nogil())
        .def(
            "gather", [](MappedMeeting& self, uintptr_t part, int64_t bytes, uintptr_t parts) { self.gather(at(part), bytes, at(parts)); }, nogil())
        .def(
            "concat",
            [](MappedMeeting& self, uintptr_t part, int64_t rows, int64_t row_bytes, uintptr_t whole) {
                self.concat(at(part), rows, row_bytes, at(whole));
            },
            nogil())
        .def_prop_ro("waits_in", [](const MappedMeeting& self) { return self.waits_in(); });
    nb::class_<Decoder>(m, "Decoder")
        .def(
            "__init__",
            [](Decoder* self, int dtype, int norm_dtype, int64_t hidden, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t wide, float eps,
               float embedding_scale, float residual_multiplier, int gate, bool whole_norms, const Weights* embedding, uintptr_t norm, bool continues,
               std::function<void(int64_t)> sum, MappedMeeting* meeting) {
                new (self) Decoder({Dtype(dtype), Dtype(norm_dtype), hidden, heads, kv_heads, head_dim, wide, eps, embedding_scale,
                                    residual_multiplier, Activation(gate), whole_norms, continues},
                                   embedding, at(norm), sum_of(std::move(sum), meeting, Dtype(dtype), hidden));
            },
            nb::keep_alive<1, 18>(), nb::kw_only(), "dtype"_a, "norm_dtype"_a, "hidden"_a, "heads"_a, "kv_heads"_a, "head_dim"_a, "wide"_a, "eps"_a,
            "embedding_scale"_a, "residual_multiplier"_a, "gate"_a, "whole_norms"_a, "embedding"_a.none(), "norm"_a, "continues"_a = false,
            "sum"_a.none() = nb::none(), "meeting"_a.none() = nb::none())
        .def("reserve", &Decoder::reserve)
        .def("borrow", &Decoder::borrow, "lender"_a, nb::keep_alive<1, 2>())
        .def(
            "divide_by_outputs",
            [](Decoder& self, int64_t ranks, std::function<void(int64_t, int64_t)> concat, MappedMeeting* meeting) {
                self.divide_by_outputs(ranks, concat_of(std::move(concat), meeting));
            },
            nb::keep_alive<1, 4>(), "ranks"_a, "concat"_a.none(), "meeting"_a.none())
        .def(
            "add",
            [](Decoder& self, uintptr_t attention_norm, uintptr_t attention_out_norm, uintptr_t feed_forward_norm, uintptr_t feed_forward_out_norm,
               uintptr_t q_norm, uintptr_t k_norm, uintptr_t cos, uintptr_t sin, int64_t half, const Weights& qkv, const Weights& out,
               const Weights& gate_up, const Weights& down, uintptr_t keys, uintptr_t values, uintptr_t key_scales,
               uintptr_t value_scales, int64_t key_groups, int64_t block_size, float scale, int64_t window,
               float softcap) {
                DecoderLayer layer{at(attention_norm), at(attention_out_norm), at(feed_forward_norm), at(feed_forward_out_norm), at(q_norm),
                                   at(k_norm), at<float>(cos), at<float>(sin), half, qkv, out, gate_up, down, {}};
                AttentionArgs& a = layer.attention;
                a.keys = at(keys), a.values = at(values), a.block_size = block_size;
                a.key_scales = at<float>(key_scales), a.value_scales = at<float>(value_scales), a.key_groups = key_groups;
                a.scale = scale, a.window = window, a.softcap = softcap;
                self.add(layer);
            },
            nb::kw_only(), "attention_norm"_a, "attention_out_norm"_a, "feed_forward_norm"_a, "feed_forward_out_norm"_a, "q_norm"_a, "k_norm"_a,
            "cos"_a, "sin"_a, "half"_a, "qkv"_a, "out"_a, "gate_up"_a, "down"_a, "keys"_a, "values"_a, "key_scales"_a,
            "value_scales"_a, "key_groups"_a, "block_size"_a, "scale"_a, "window"_a,
            "softcap"_a)
        .def(
            "forward",
            [](Decoder& self, uintptr_t token_ids, uintptr_t positions, uintptr_t slots, uintptr_t query_start, uintptr_t seq_len,
               uintptr_t block_table, int64_t table_stride, int64_t sequences, int64_t rows, uintptr_t output_rows, int64_t num_output_rows, uintptr_t entering,
               uintptr_t out, int threads, const std::vector<const Adapter*>& adapters, uintptr_t adapter_of, uintptr_t partial, uintptr_t whole) {
                self.forward(*active,
                             {at<int64_t>(token_ids), at<int64_t>(positions), at<int64_t>(slots), at<int32_t>(query_start), at<int32_t>(seq_len),
                              at<int32_t>(block_table), table_stride, sequences, rows, at<int64_t>(output_rows), num_output_rows,
                              {adapters, at<int32_t>(adapter_of), adapters.empty() ? 0 : rows}, at(partial), at(whole)},
                             at(entering), at(out), threads);
            },
            "token_ids"_a, "positions"_a, "slots"_a, "query_start"_a, "seq_len"_a, "block_table"_a, "table_stride"_a, "sequences"_a, "rows"_a,
            "wanted"_a, "num_wanted"_a, "entering"_a, "out"_a, "threads"_a, "adapters"_a = std::vector<const Adapter*>(), "adapter_of"_a = 0,
            "partial"_a = 0, "whole"_a = 0,
            nogil());
    nb::class_<Drafter>(m, "Drafter")
        .def(
            "__init__",
            [](Drafter* self, Decoder& decoder, const Weights& head, int dtype, int64_t hidden, int64_t vocab, int64_t block_size, float divisor,
               float softcap) { new (self) Drafter(decoder, head, Dtype(dtype), hidden, vocab, block_size, divisor, softcap); },
            nb::keep_alive<1, 2>(), nb::kw_only(), "decoder"_a, "head"_a, "dtype"_a, "hidden"_a, "vocab"_a, "block_size"_a, "divisor"_a, "softcap"_a)
        .def(
            "guess",
            [](Drafter& self, std::vector<std::vector<int64_t>> pending, std::vector<std::vector<int64_t>> blocks, std::vector<int64_t> start,
               std::vector<int64_t> most, std::vector<float> bounds, std::vector<float> chances, double next_chance, double tokens,
               double seconds, double row_s, double pass_s, double least, double least_per_s, int threads) {
                if (chances.size() != bounds.size() + 1) throw std::invalid_argument("one chance more than bounds is needed");
                Drafted found = self.guess(*active, {std::move(pending), std::move(blocks), std::move(start), std::move(most)},
                                           {std::move(bounds), std::move(chances), next_chance, tokens, seconds, row_s, pass_s, least, least_per_s}, threads);
                return std::make_tuple(std::move(found.tokens), std::move(found.surenesses), found.passes);
            },
            nogil());
    nb::class_<Lookup>(m, "Lookup")
        .def(
            "__init__",
            [](Lookup* self, int64_t returned, int64_t resumed, int64_t longest, int64_t kept, int64_t window, int64_t held,
               int64_t most_looked_at) {
                new (self) Lookup({returned, resumed, longest, kept, window, held, most_looked_at});
            },
            nb::kw_only(), "returned"_a, "resumed"_a, "longest"_a, "kept"_a, "window"_a, "held"_a, "most_looked_at"_a)
        .def("find", &Lookup::find);
    m.def(
        "rotary",
        [](int dtype, uintptr_t x, int64_t stride, int64_t rows, int64_t heads, int64_t head_dim, uintptr_t positions, uintptr_t cos,
           uintptr_t sin, int64_t half, int threads) {
            active->rotary(Dtype(dtype), at(x), stride, rows, heads, head_dim, at<int64_t>(positions), at<float>(cos), at<float>(sin), half,
                           threads);
        },
        nogil());
}
