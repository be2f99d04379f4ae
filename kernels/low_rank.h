// Low-rank products of adapters (LoRA, Hu et al. 2021): y += scale * B A x, for rows of many adapters at once.
//
// Rows are gathered by adapter, so that each matrix is read once for all rows that use it. A number of h = scale * A x is one
// chain of multiply-adds over the inputs, a number of y one over the ranks, both in float. Their order depends on neither the
// other rows, the tiles nor the threads: a row's result is the same alone and in any batch.
#pragma once
#include "elementwise.h"
#include "scratch.h"

namespace inferd::INFERD_LEVEL {

template <int R>
constexpr int kRankTile = R == 1 && Vec::width >= 16 ? 8 : 4;  // ranks that share the reads of a row
constexpr int kLowRankRows = Vec::width >= 16 ? 4 : 2;  // rows that share the reads of a matrix
constexpr int kVectors = kPanel / Vec::width > 4 ? 4 : kPanel / Vec::width;  // of a panel's outputs, at once

// What the next task reads, requested line by line behind this one's arithmetic: the matrices of one adapter are short, and
// those of the next lie elsewhere, so that the processor does not foresee them.
struct Soon {
    const char *at = nullptr, *end = nullptr;

    void fetch(int lines) {
        for (int i = 0; i < lines && at < end; i++, at += 64) __builtin_prefetch(at, 0, 2);
    }
};

// h[r][k] = scale * sum_j x[r][j] * a[k][j]
template <class E, int R, int K>
inline void shrink_tile(const typename E::type* const* x, const typename E::type* a, int64_t in, float scale, float* const* h, Soon& soon) {
    constexpr int64_t wide = Vec::width * E::lane;  // numbers of a vector
    const auto lanes = [](const typename E::type* p) { return Vec::lanes(reinterpret_cast<const uint32_t*>(p)); };
    Vec acc[R][K];
    for (int r = 0; r < R; r++)
        for (int k = 0; k < K; k++) acc[r][k] = Vec::zero();
    const int64_t whole = in / wide * wide;
    for (int64_t j = 0; j < whole; j += wide) {
        soon.fetch(K);
        Vec w[K];
#pragma GCC unroll 8
        for (int k = 0; k < K; k++) w[k] = lanes(a + k * in + j);
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            const Vec v = lanes(x[r] + j);
#pragma GCC unroll 8
            for (int k = 0; k < K; k++) acc[r][k] = E::madd(acc[r][k], v, w[k]);
        }
    }
    for (int64_t j = whole; j < in; j += Vec::width)
        for (int k = 0; k < K; k++) {
            const Vec w = load_some(a + k * in + j, in - j);
            for (int r = 0; r < R; r++) acc[r][k] = Vec::fma(load_some(x[r] + j, in - j), w, acc[r][k]);
        }
    for (int r = 0; r < R; r++)
        for (int k = 0; k < K; k++) h[r][k] = acc[r][k].sum() * scale;
}

template <class E, int R>
inline void shrink_rows(const typename E::type* const* x, const LowRankPart& part, int64_t first, int64_t count, float* const* h, Soon& soon) {
    const auto* a = static_cast<const typename E::type*>(part.a) + first * part.in;
    float* to[R];
    int64_t k = 0;
    for (; k + kRankTile<R> <= count; k += kRankTile<R>) {
        for (int r = 0; r < R; r++) to[r] = h[r] + first + k;
        shrink_tile<E, R, kRankTile<R>>(x, a + k * part.in, part.in, part.scale, to, soon);
    }
    for (; k < count; k++) {
        for (int r = 0; r < R; r++) to[r] = h[r] + first + k;
        shrink_tile<E, R, 1>(x, a + k * part.in, part.in, part.scale, to, soon);
    }
}

template <class T>
constexpr int kExpandLines = (kVectors * Vec::width * int(sizeof(T)) + 63) / 64;  // that one rank of a panel's part reads

// y[r][0 .. count) += sum_k h[r][k] * b[k][..], of a panel [rank, kPanel].
template <class T, class Y, int R>
inline void expand_panel(const float* const* h, const T* b, int64_t rank, Y* const* y, int64_t count, Soon& soon) {
    constexpr int64_t wide = kVectors * Vec::width;
    for (int64_t first = 0; first < count; first += wide) {
        const int64_t rest = count - first;
        Vec acc[R][kVectors];
        for (int r = 0; r < R; r++)
            for (int j = 0; j < kVectors; j++) {
                const int64_t left = rest - j * Vec::width;
                acc[r][j] = left > 0 ? load_some(y[r] + first + j * Vec::width, left) : Vec::zero();
            }
        for (int64_t k = 0; k < rank; k++) {
            soon.fetch(kExpandLines<T>);
            Vec w[kVectors];
#pragma GCC unroll 4
            for (int j = 0; j < kVectors; j++) w[j] = Vec::load(b + k * kPanel + first + j * Vec::width);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++) {
                const Vec v = Vec::all(h[r][k]);
#pragma GCC unroll 4
                for (int j = 0; j < kVectors; j++) acc[r][j] = Vec::fma(v, w[j], acc[r][j]);
            }
        }
        for (int r = 0; r < R; r++)
            for (int j = 0; j < kVectors; j++) {
                const int64_t left = rest - j * Vec::width;
                if (left > 0) store_some(acc[r][j], y[r] + first + j * Vec::width, left);
            }
    }
}

struct LowRankTask {
    const LowRankPart* part;
    const int64_t* rows;
    int64_t num_rows;
    float* h;              // [num_rows, rank]
    int64_t first, count;  // ranks, or panels of outputs
    bool is_shrink;
};

template <class E>
inline void shrink(const LowRankArgs& g, const LowRankTask& task, Soon soon) {
    const typename E::type* x[kLowRankRows];
    float* h[kLowRankRows];
    int64_t i = 0;
    const auto take = [&](int count) {
        for (int r = 0; r < count; r++) {
            x[r] = static_cast<const typename E::type*>(g.x) + task.rows[i + r] * g.x_stride;
            h[r] = task.h + (i + r) * task.part->rank;
        }
    };
    for (; i + kLowRankRows <= task.num_rows; i += kLowRankRows) {
        take(kLowRankRows);
        shrink_rows<E, kLowRankRows>(x, *task.part, task.first, task.count, h, soon);
    }
    for (; i < task.num_rows; i++) {
        take(1);
        shrink_rows<E, 1>(x, *task.part, task.first, task.count, h, soon);
    }
}

template <class T, class Y>
inline void expand(const LowRankArgs& g, const LowRankTask& task, Soon soon) {
    const LowRankPart& part = *task.part;
    Y* y[kLowRankRows];
    const float* h[kLowRankRows];
    for (int64_t panel = task.first; panel < task.first + task.count; panel++) {
        const T* b = static_cast<const T*>(part.b) + panel * part.rank * kPanel;
        const int64_t count = least(int64_t(kPanel), part.count - panel * kPanel);
        int64_t i = 0;
        const auto take = [&](int rows) {
            for (int r = 0; r < rows; r++) {
                y[r] = static_cast<Y*>(g.y) + task.rows[i + r] * g.y_stride + part.first + panel * kPanel;
                h[r] = task.h + (i + r) * part.rank;
            }
        };
        for (; i + kLowRankRows <= task.num_rows; i += kLowRankRows) {
            take(kLowRankRows);
            expand_panel<T, Y, kLowRankRows>(h, b, part.rank, y, count, soon);
        }
        for (; i < task.num_rows; i++) {
            take(1);
            expand_panel<T, Y, 1>(h, b, part.rank, y, count, soon);
        }
    }
}

template <class E>
void low_rank(const LowRankArgs& g, int threads) {
    using T = typename E::type;
    constexpr int64_t ranks = 8, panels = 4;  // of a task
    static thread_local Scratch numbers, tasks;
    int64_t num_numbers = 0, num_shrink = 0, num_expand = 0, work = 0;
    for (int64_t i = 0; i < g.num_groups; i++)
        for (int64_t p = 0; p < g.groups[i].num_parts; p++) {
            const LowRankPart& part = g.groups[i].parts[p];
            num_numbers += g.groups[i].num_rows * part.rank;
            num_shrink += divide_up(part.rank, ranks);
            num_expand += divide_up(divide_up(part.count, int64_t(kPanel)), panels);
            work += g.groups[i].num_rows * part.rank * (part.in + part.count);
        }
    if (work == 0) return;
    float* h = numbers.take<float>(num_numbers);
    LowRankTask* const shrinking = tasks.take<LowRankTask>(num_shrink + num_expand);
    LowRankTask* const expanding = shrinking + num_shrink;
    int64_t s = 0, e = 0;
    for (int64_t i = 0; i < g.num_groups; i++)
        for (int64_t p = 0; p < g.groups[i].num_parts; p++) {
            const LowRankGroup& group = g.groups[i];
            const LowRankPart& part = group.parts[p];
            for (int64_t first = 0; first < part.rank; first += ranks)
                shrinking[s++] = {&part, group.rows, group.num_rows, h, first, least(ranks, part.rank - first), true};
            const int64_t all = divide_up(part.count, int64_t(kPanel));
            for (int64_t first = 0; first < all; first += panels)
                expanding[e++] = {&part, group.rows, group.num_rows, h, first, least(panels, all - first), false};
            h += group.num_rows * part.rank;
        }
    const auto reads = [](const LowRankTask& task) -> Soon {
        const LowRankPart& part = *task.part;
        const char* at = static_cast<const char*>(task.is_shrink ? part.a : part.b);
        const int64_t of_one = (task.is_shrink ? part.in : part.rank * kPanel) * int64_t(sizeof(T));
        return {at + task.first * of_one, at + (task.first + task.count) * of_one};
    };
#pragma omp parallel num_threads(threads) if (work > kSerial)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_shrink; i++) shrink<E>(g, shrinking[i], reads(shrinking[i + 1]));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_expand; i++) {
            const Soon soon = i + 1 < num_expand ? reads(expanding[i + 1]) : Soon{};
            if (g.y_dtype == Dtype::f32) expand<T, float>(g, expanding[i], soon);
            else expand<T, T>(g, expanding[i], soon);
        }
    }
}

}  // namespace inferd::INFERD_LEVEL
