// Products with quantised weights: integers of 8 or 4 bits times activations, which are converted to bytes first.
//
// A weight is scale * (w - middle - zero) with w unsigned, an activation x_scale * (x - x_zero) with x signed. Within a group
// of inputs, which share a scale, sums are exact (int32); groups are added in ascending order in float. So a row's result
// never depends on the other rows or on the number of threads, and integers are the same on every level.
//
// A panel (kPanel outputs) is one stream, group after group:
//     scales, f16 [kPanel], to be multiplied by the output's own    where there are groups
//     zeros, u8 [kPanel]                                            where there are zero points: middle + zero
//     weights, in steps of kPanel lanes: a lane of 8-bit weights has four inputs; a lane of 4-bit weights has four inputs,
//     and the next four in the high halves
// A group is padded to a whole number of steps with activations of 0.
#pragma once
#include "elementwise.h"
#include "panels.h"
#include "scratch.h"

namespace inferd::INFERD_LEVEL {

struct Ints {  // how a matrix lies in memory
    int64_t group, groups;  // inputs of one; how many
    int64_t step;           // inputs
    int64_t steps;          // of a group
    int64_t width;          // inputs of a group with its padding
    int64_t scale_at, zero_at, weights_at, group_bytes, panel_bytes;
    int32_t middle;

    Ints(int bits, int64_t in, int64_t group_size, bool has_zero) {
        group = group_size ? group_size : in;
        groups = divide_up(in, group);
        step = bits == 8 ? 4 : 8;
        steps = divide_up(group, step);
        width = steps * step;
        scale_at = 0;
        zero_at = group_size ? kPanel * 2 : 0;
        weights_at = zero_at + (has_zero ? kPanel : 0);
        group_bytes = weights_at + steps * kPanel * 4;
        panel_bytes = groups * group_bytes;
        middle = bits == 8 ? 128 : 8;
    }
    explicit Ints(const Weights& w) : Ints(w.format == WeightFormat::int8 ? 8 : 4, w.in, w.group, w.has_zero) {}
};

// Nibbles become bytes without their zero points and are larger by this amount instead.
constexpr int32_t kRaised = 16;
constexpr int64_t kShortGroup = 256;  // inputs whose bytes add up to 16 bits

// Activations as bytes. A sum over a group starts at start + factor * (the output's total); where groups have zero points, it
// starts at factor * zero.
struct Bytes {
    const int8_t* x;       // [rows][groups * width]
    const float* scale;    // [rows][groups]
    const int32_t* start;  // [rows][groups]
    const int32_t* factor;
};

// A row's numbers in the order of the columns.
template <class T>
inline const T* in_order(const Weights& w, const T* x) {
    if (w.order == nullptr) return x;
    static thread_local Scratch room;
    T* gathered = room.take<T>(w.in);
    for (int64_t i = 0; i < w.in; i++) gathered[i] = x[w.order[i]];
    return gathered;
}

// Without zero points and groups a row's own range is used whole, with a zero point; else a group's peak is 127.
template <class T>
inline void to_bytes(const Weights& w, const Ints& lay, const T* x, int64_t row, int8_t* bytes, float* scale, int32_t* start,
                     int32_t* factor) {
    const float most_steps = w.total ? 255.0f : 127.0f;
    for (int64_t group = 0; group < lay.groups; group++) {
        const int64_t n = least(lay.group, w.in - group * lay.group), at = row * lay.groups + group;
        const T* from = x + group * lay.group;
        int8_t* to = bytes + at * lay.width;
        Vec highest = Vec::zero(), lowest = Vec::zero();  // zero itself is always a byte
        for (int64_t j = 0; j < n; j += Vec::width) {
            const Vec v = load_some(from + j, n - j);
            highest = Vec::max(highest, v);
            lowest = Vec::min(lowest, v);
        }
        lowest = Vec::zero() - lowest;
        const float bottom = w.total ? lowest.top() : 0.0f, range = w.total ? highest.top() + bottom : Vec::max(highest, lowest).top();
        const float inverse = range > 0 ? most_steps / range : 0.0f;
        const Vec factors = Vec::all(inverse), zero = w.total ? Vec::round(Vec::all(bottom) * factors) - Vec::all(128.0f) : Vec::zero();
        const auto whole = [&](Vec v) { return Vec::min(Vec::round(v * factors) + zero, Vec::all(127.0f)); };
        Vec sums = Vec::zero();
        int64_t j = 0;
        for (; j + Vec::width <= n; j += Vec::width) {
            const Vec each = whole(Vec::load(from + j));
            sums = sums + each;
            each.store_bytes(to + j);
        }
        int32_t sum = Whole::near(sums).sum();
        if (j < n) {
            int8_t part[Vec::width];
            whole(load_some(from + j, n - j)).store_bytes(part);
            for (int64_t i = 0; j < n; i++, j++) sum += to[j] = part[i];
        }
        for (; j < lay.width; j++) to[j] = 0;
        float first[Vec::width];
        zero.store(first);
        scale[at] = range / most_steps;
        start[at] = (w.has_zero ? -kRaised : -lay.middle) * sum;
        factor[at] = w.has_zero ? -sum : -int32_t(first[0]);
    }
}

// The part of a panel that a register tile reads, from its first column on.
struct Columns {
    const char* weights;
    int64_t weights_step;  // bytes from group to group
    int64_t steps, groups;
    const char *scales, *zeros;  // of the first group, or null
    int64_t head_step;           // bytes from group to group
    const int32_t* total;        // or null
    const float* own;            // scales of outputs
    int64_t head_bytes;          // before a group's weights
    bool is_short;               // groups are
};

// R rows by C vectors of columns into c, which adds up the sums of the groups.
template <int Bits, int R, int C, bool Grouped>
__attribute__((noinline)) void ints_tile(const Bytes& x, int64_t width, const Columns& of, float* c, Ahead ahead) {
    constexpr int step = Bits == 8 ? 4 : 8;
    const int64_t groups = Grouped ? of.groups : 1, x_stride = groups * width;
    for (int64_t group = 0; group < groups; group++) {
        Whole acc[R][C];
        if (of.zeros || of.total) {
            Whole said[C];
#pragma GCC unroll 4
            for (int j = 0; j < C; j++)
                said[j] = of.zeros ? Whole::bytes(reinterpret_cast<const uint8_t*>(of.zeros) + group * of.head_step + j * Vec::width)
                                   : Whole::lanes(of.total + j * Vec::width);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Whole start = Whole::spread(of.zeros ? 0 : uint32_t(x.start[r * groups + group]));
                const Whole factor = Whole::spread(uint32_t(x.factor[r * groups + group]));
#pragma GCC unroll 4
                for (int j = 0; j < C; j++)
                    acc[r][j] = of.is_short ? Whole::dot_pairs(start, said[j], factor) : Whole::add_product(start, said[j], factor);
            }
        } else
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Whole start = Whole::spread(uint32_t(x.start[r * groups + group]));
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) acc[r][j] = start;
            }
        const uint32_t* lanes = reinterpret_cast<const uint32_t*>(of.weights + group * of.weights_step);
        const int8_t *from = x.x + group * width, *later = from + 3 * x_stride;  // two pointers, so that few registers reach all rows
        const auto spread = [&](int r, int64_t at) __attribute__((always_inline)) {
            return Whole::spread(lane_at((r < 3 ? from : later) + r % 3 * x_stride + at));
        };
        if (ahead.lines == 4) {  // one pass over the weights, heads of groups among them
            ahead.at = reinterpret_cast<const char*>(lanes) + INFERD_STREAM_AHEAD;
            for (int64_t i = 0; i < of.head_bytes; i += 64) __builtin_prefetch(ahead.at - of.head_bytes + i, 0, 2);
        }
        for (int64_t k = 0; k < of.steps; k++) {
            Whole w[C];
#pragma GCC unroll 4
            for (int j = 0; j < C; j++) w[j] = Whole::lanes(lanes + j * Vec::width);
            if (R > 4 && ahead.is_slow) __builtin_prefetch(ahead.at + k * ahead.step, 0, 3);  // see gemm.h's tile; many strips are this high
            else ahead.fetch(k);
            if constexpr (Bits == 4) {
                Whole low[C];
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) low[j] = w[j].low_nibbles(), w[j] = w[j].high_nibbles();
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const Whole a = spread(r, 0);
#pragma GCC unroll 4
                    for (int j = 0; j < C; j++) acc[r][j] = Whole::dot(acc[r][j], low[j], a);
                }
            }
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                const Whole a = spread(r, step - 4);
#pragma GCC unroll 4
                for (int j = 0; j < C; j++) acc[r][j] = Whole::dot(acc[r][j], w[j], a);
            }
            lanes += kPanel;
            from += step;
            later += step;
        }
        ahead.at += of.steps * ahead.step;
        const bool last = group + 1 == groups;
#pragma GCC unroll 4
        for (int j = 0; j < C; j++) {
            const Vec rest = of.scales ? Vec::halves(reinterpret_cast<const uint16_t*>(of.scales + group * of.head_step) + j * Vec::width) : Vec::all(1.0f);
            const Vec own = last ? Vec::load(of.own + j * Vec::width) : Vec::all(1.0f);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) {
                float* to = c + r * kPanel + j * Vec::width;
                const Vec factor = rest * Vec::all(x.scale[r * groups + group]);
                const Vec sum = group ? Vec::fma(acc[r][j].floats(), factor, Vec::load(to)) : acc[r][j].floats() * factor;
                (last ? sum * own : sum).store(to);
            }
        }
    }
}

template <int Bits, bool Grouped, int R>
inline void ints_columns(const Bytes& x, const Ints& lay, Columns of, float* c, Ahead ahead) {
    constexpr int C = Vec::max_columns;
    for (int64_t column = 0; column < kPanel; column += C * Vec::width) {
        ints_tile<Bits, R, C, Grouped>(x, lay.width, of, c + column, ahead);
        ahead = {};
        of.weights += C * Vec::width * 4;
        if (of.scales) of.scales += C * Vec::width * 2;
        if (of.zeros) of.zeros += C * Vec::width;
        if (of.total) of.total += C * Vec::width;
        of.own += C * Vec::width;
    }
}

// All groups of a panel for up to kRows rows.
template <int Bits, bool Grouped>
inline void ints_strip(const Ints& lay, const Bytes& all, int64_t row, int rows, const Columns& of, float* c, Ahead ahead) {
    const int64_t at = row * lay.groups;
    const Bytes x{all.x + at * lay.width, all.scale + at, all.start + at, all.factor + at};
    switch (rows) {
        case 1: return ints_columns<Bits, Grouped, 1>(x, lay, of, c, ahead);
        case 2: return ints_columns<Bits, Grouped, 2>(x, lay, of, c, ahead);
        case 3: return ints_columns<Bits, Grouped, 3>(x, lay, of, c, ahead);
        case 4: return ints_columns<Bits, Grouped, 4>(x, lay, of, c, ahead);
        case 5: return ints_columns<Bits, Grouped, 5>(x, lay, of, c, ahead);
        default: return ints_columns<Bits, Grouped, 6>(x, lay, of, c, ahead);
    }
}

// Nibbles of a panel as bytes in the order of 8-bit lanes, without their zero points (see kRaised).
inline void widen(const Ints& lay, const char* base, uint32_t* to) {
    const Whole less_each = Whole::spread(uint32_t(-0x01010101)), raised = Whole::spread(uint32_t(kRaised) * 0x01010101u);
    for (int64_t group = 0; group < lay.groups; group++, to += lay.steps * 2 * kPanel) {
        const char* head = base + group * lay.group_bytes;
        for (int64_t j = 0; j < kPanel; j += Vec::width) {
            const uint32_t* from = reinterpret_cast<const uint32_t*>(head + lay.weights_at) + j;
            const Whole more = Whole::add_product(raised, Whole::bytes(reinterpret_cast<const uint8_t*>(head + lay.zero_at) + j), less_each);
            for (int64_t k = 0; k < lay.steps; k++) {
                const Whole both = Whole::lanes(from + k * kPanel);
                Whole::add_bytes(both.low_nibbles(), more).store(to + 2 * k * kPanel + j);
                Whole::add_bytes(both.high_nibbles(), more).store(to + (2 * k + 1) * kPanel + j);
            }
        }
    }
}

template <class T>
void ints_product(const Weights& w, const LinearArgs& g, int threads) {
        constexpr int64_t wide_strips = 22;  // from here on zero points are subtracted once for all strips
    const Ints lay(w);
    static thread_local Scratch rooms[4];
    int8_t* bytes = rooms[0].take<int8_t>(g.rows * lay.groups * lay.width);
    float* scale = rooms[1].take<float>(g.rows * lay.groups);
    int32_t* start = rooms[2].take<int32_t>(g.rows * lay.groups);
    int32_t* factor = rooms[3].take<int32_t>(g.rows * lay.groups);
    const T* x = static_cast<const T*>(g.x);
#pragma omp parallel for schedule(static) num_threads(threads) if (g.rows * w.in > 16384)
    for (int64_t row = 0; row < g.rows; row++) to_bytes(w, lay, in_order(w, x + row * g.x_stride), row, bytes, scale, start, factor);
    const Bytes all{bytes, scale, start, factor};
    const bool is_short = w.has_zero && lay.group <= kShortGroup;
    const auto columns = [&](const char* base, int64_t panel) {
        return Columns{base + lay.weights_at, lay.group_bytes, lay.steps, lay.groups, w.group ? base + lay.scale_at : nullptr,
                       w.has_zero ? base + lay.zero_at : nullptr, lay.group_bytes, w.total ? w.total + panel * kPanel : nullptr,
                       w.scale + panel * kPanel, lay.weights_at, is_short};
    };
    if (w.format == WeightFormat::int8) {
        over_panels(w, g, lay.panel_bytes, 256, threads, [](const char* base, int64_t) { return base; },
                    [&](const char* base, int64_t panel, int64_t row, int rows, float* c, Ahead ahead) {
                        const Columns of = columns(base, panel);
                        w.group ? ints_strip<8, true>(lay, all, row, rows, of, c, ahead) : ints_strip<8, false>(lay, all, row, rows, of, c, ahead);
                    });
        return;
    }
    struct Ready {
        const char* base;
        const char* bytes;  // or null
    };
    over_panels(w, g, lay.panel_bytes, 256, threads,
                [&](const char* base, int64_t strips) {
                    if (!w.has_zero || strips < wide_strips) return Ready{base, nullptr};
                    static thread_local Scratch room;
                    uint32_t* widened = room.take<uint32_t>(lay.groups * lay.steps * 2 * kPanel);
                    widen(lay, base, widened);
                    return Ready{base, reinterpret_cast<const char*>(widened)};
                },
                [&](Ready ready, int64_t panel, int64_t row, int rows, float* c, Ahead ahead) {
                    Columns of = columns(ready.base, panel);
                    if (!ready.bytes) return ints_strip<4, true>(lay, all, row, rows, of, c, ahead);
                    of.weights = ready.bytes, of.weights_step = lay.width * kPanel, of.steps = lay.width / 4, of.zeros = nullptr;
                    ahead.step /= 2;
                    ints_strip<8, true>(lay, all, row, rows, of, c, ahead);
                });
}

// values [out, in], signed, without their zeros, into the panels from column first_row on; scale f16 and zero [out, groups]
// or null. Columns that belong to no row have weights of 0 and scales of 0.
inline void pack_ints(int bits, const int8_t* values, const uint16_t* scale, const int8_t* zero, int64_t out, int64_t in, int64_t group,
                      void* packed, int threads) {
    const Ints lay(bits, in, group, zero != nullptr);
    const uint32_t flip = bits == 8 ? 0x80808080u : 0x08080808u;
    const auto four = [&](int64_t row, int64_t from, int64_t end) {
        uint32_t lane = 0;
        if (row < out) memcpy(&lane, values + row * in + from, size_t(most(0, least(4, end - from))));
        return lane ^ flip;
    };
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t panel = 0; panel < divide_up(out, kPanel); panel++)
        for (int64_t index = 0; index < lay.groups; index++) {
            char* head = static_cast<char*>(packed) + panel * lay.panel_bytes + index * lay.group_bytes;
            const int64_t begin = index * lay.group, end = least(in, begin + lay.group);
            uint32_t* lanes = reinterpret_cast<uint32_t*>(head + lay.weights_at);
            for (int64_t column = 0; column < kPanel; column++) {
                const int64_t row = panel * kPanel + column, at = row * lay.groups + index;
                if (group) reinterpret_cast<uint16_t*>(head + lay.scale_at)[column] = row < out ? scale[at] : uint16_t(0);
                if (zero) reinterpret_cast<uint8_t*>(head + lay.zero_at)[column] = uint8_t((row < out ? zero[at] : 0) + lay.middle);
            }
            int64_t k = 0;
            if ((panel + 1) * kPanel <= out)  // whole blocks of columns and lanes are turned in registers
                for (const int64_t fours = bits == 8 ? 1 : 2; (k * fours + Vec::width) * 4 <= end - begin; k += Vec::width / fours)
                    for (int64_t column = 0; column < kPanel; column += Vec::width) {
                        const int8_t* corner = values + (panel * kPanel + column) * in + begin + k * lay.step;
                        Vec block[Vec::width];
#pragma GCC unroll 16
                        for (int i = 0; i < Vec::width; i++) block[i] = Vec::lanes(reinterpret_cast<const uint32_t*>(corner + i * in));
                        Vec::transpose(block);
                        uint32_t turned[Vec::width][Vec::width];
#pragma GCC unroll 16
                        for (int i = 0; i < Vec::width; i++) block[i].store_lanes(turned[i]);
                        for (int64_t i = 0; i < Vec::width / fours; i++)
                            for (int64_t j = 0; j < Vec::width; j++) {
                                uint32_t lane = turned[i * fours][j] ^ flip;
                                if (bits == 4) lane = (lane & 0x0f0f0f0fu) | ((turned[i * fours + 1][j] ^ flip) & 0x0f0f0f0fu) << 4;
                                lanes[(k + i) * kPanel + column + j] = lane;
                            }
                    }
            for (; k < lay.steps; k++)
                for (int64_t column = 0; column < kPanel; column++) {
                    const int64_t row = panel * kPanel + column, from = begin + k * lay.step;
                    uint32_t lane = four(row, from, end);
                    if (bits == 4) lane = (lane & 0x0f0f0f0fu) | (four(row, from + 4, end) & 0x0f0f0f0fu) << 4;
                    lanes[k * kPanel + column] = lane;
                }
        }
}

// Rows of the weights, as floats.
template <class T>
void unpack_ints(const Weights& w, const int64_t* ids, int64_t count, T* out, int threads) {
    const Ints lay(w);
#pragma omp parallel for schedule(static) num_threads(threads) if (count > 16)
    for (int64_t i = 0; i < count; i++) {
        const int64_t column = ids[i] % kPanel;
        const char* base = static_cast<const char*>(w.packed) + ids[i] / kPanel * lay.panel_bytes;
        for (int64_t group = 0; group < lay.groups; group++) {
            const char* head = base + group * lay.group_bytes;
            const char* lanes = head + lay.weights_at + column * 4;
            const float rest = w.group ? half_to_float(reinterpret_cast<const uint16_t*>(head + lay.scale_at)[column]) : 1.0f;
            const float scale = w.scale[ids[i]] * rest;
            const int32_t zero = w.has_zero ? reinterpret_cast<const uint8_t*>(head + lay.zero_at)[column] : lay.middle;
            const int64_t first = group * lay.group;
            for (int64_t k = 0; k < least(lay.group, w.in - first); k++) {
                const uint8_t byte = uint8_t(lanes[k / lay.step * kPanel * 4 + k % 4]);
                const int32_t whole = w.format == WeightFormat::int8 ? byte : k % 8 < 4 ? byte & 15 : byte >> 4;
                out[i * w.in + (w.order ? w.order[first + k] : first + k)] = from_float<T>(scale * float(whole - zero));
            }
        }
    }
}

}  // namespace inferd::INFERD_LEVEL
