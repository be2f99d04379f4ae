// Paged attention over a ragged batch (the softmax is online: Milakov & Gimelshein 2018; tiles as in
// FlashAttention, Dao et al. 2022; pages as in PagedAttention, Kwon et al. 2023; whole numbers for the weights
// of a cache of bytes as in SageAttention, Zhang et al. 2025, but with 16 bits).
//
// A task is one (sequence, key/value head, tile of query rows). The query heads that share a key/value head are rows of
// the same tile, so each key and value is read once for all of them. Keys are read in tiles of 64, which begin at multiples
// of 64 in the sequence, and tiles in chunks of 1,024 keys. Each chunk has sums of its own, which are then merged, so
// several threads can share a long context. The keys of a row are added in the same order in every batch and on every
// thread: a tile without visible keys multiplies by one and adds zeros, and a chunk without any is skipped.
#pragma once
#include <type_traits>
#include <utility>

#include "cache.h"
#include "scratch.h"

namespace inferd::INFERD_LEVEL {

constexpr int64_t kChunk = 1024;    // keys with sums of their own
constexpr int64_t kQueryRows = 48;  // rows of a task: tokens x heads of the group
constexpr float kHidden = -__builtin_inff();

alignas(64) constexpr float kCount[kKeys] = {
    0,  1,  2,  3,  4,  5,  6,  7,  8,  9,  10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31,
    32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50, 51, 52, 53, 54, 55, 56, 57, 58, 59, 60, 61, 62, 63,
};

// Tokens of a sequence from first_token on, with one key/value head's group of query heads.
struct Task {
    int64_t sequence, kv_head, first_token, tokens;
    int64_t begin, end;  // keys: a tile's first that some row sees (or that this part of the task begins with), and behind the last
    float* part;         // where the sums of one chunk go, or null where all are this task's

    int64_t first_position(const AttentionArgs& g) const {
        return g.seq_len[sequence] - (g.query_start[sequence + 1] - g.query_start[sequence]) + first_token;
    }
    int64_t bunches() const { return divide_up(end - begin, kBunch); }
    Tile tile(int64_t start) const { return {sequence, kv_head, start, least(kKeys, end - start)}; }
};

// Sums of some rows over some keys.
struct Sums {
    float* out;    // [rows][padded_dim] weighted values
    float* top;    // [rows] highest score
    float* total;  // [rows] sum of weights
    static int64_t size(int64_t rows, int64_t padded_dim) { return rows * (padded_dim + 2) + 2 * Vec::width; }
    Sums() = default;
    Sums(float* at, int64_t rows, int64_t padded_dim) : out(at), top(at + rows * padded_dim), total(top + rows) {}
};

inline float exp_of(float x) {
    alignas(64) float lanes[Vec::width];
    exp(Vec::all(x)).store(lanes);
    return lanes[0];
}

// Adds the sums of the next chunk. A row without visible keys in it does not change, to the bit.
inline void fold(const Sums& whole, const Sums& chunk, int64_t rows, int64_t padded_dim) {
    for (int64_t r = 0; r < rows; r++) {
        if (chunk.top[r] == kHidden) continue;
        float *to = whole.out + r * padded_dim, *from = chunk.out + r * padded_dim;
        if (whole.top[r] == kHidden) {
            memcpy(to, from, size_t(padded_dim) * 4);
            whole.top[r] = chunk.top[r];
            whole.total[r] = chunk.total[r];
            continue;
        }
        const float top = chunk.top[r] > whole.top[r] ? chunk.top[r] : whole.top[r];
        const float before = exp_of(whole.top[r] - top), now = exp_of(chunk.top[r] - top);
        for (int64_t d = 0; d < padded_dim; d += Vec::width)
            Vec::fma(Vec::load(from + d), Vec::all(now), Vec::load(to + d) * Vec::all(before)).store(to + d);
        whole.total[r] = whole.total[r] * before + chunk.total[r] * now;
        whole.top[r] = top;
    }
}

template <class E, class F>
struct Attend {
    using T = typename E::type;
    using Weight = typename F::Cell;
    using Lanes = std::conditional_t<F::bytes, Whole, Vec>;  // what products are summed in
    static constexpr int64_t bunch_rows = kBunch / F::lane;
    const AttentionArgs& g;
    const int64_t rows_most;
    const Cache<F> cache{g};
    const int64_t dim = cache.dim, padded_dim = cache.padded_dim, lanes = cache.lanes, group = g.heads / g.kv_heads;
    const int64_t key_groups = F::bytes ? g.key_groups : 1;
    uint32_t* q;  // [rows][lanes]
    float *q_scale, *q_excess;  // bytes: [rows][key_groups] the scale of a whole number, and what 128 in every key would add
    float* scores;              // [rows][kKeys]
    Weight* weights;            // [rows][kKeys]; of bytes: [rows][2][kKeys], high and low
    float* step;                // bytes: [rows] the scale of a weight
    float* factor;              // [rows] for what was added before
    float* totals;              // [rows][width] sum of weights so far, in lanes
    uint32_t* tail;             // [padded_dim] the last lane of the values, where a sequence ends within it
    Sums sums, whole;           // of the chunk; of all before
    Gathered<F> gathered;
    int64_t fetched = kBunches;  // bunches of this task, and then of the next, that were prefetched

    // The memory belongs to the thread and is kept from call to call.
    Attend(const AttentionArgs& args, int64_t rows) : g(args), rows_most(rows) {
        static thread_local Scratch room;
        char* at = nullptr;
        for (int pass = 0; pass < 2; pass++) {  // first the size, then the addresses
            char* const begin = at;
            const auto take = [&](auto*& to, int64_t count) {
                to = reinterpret_cast<std::remove_reference_t<decltype(to)>>(at);
                at += divide_up(count * int64_t(sizeof(*to)), 64) * 64;
            };
            float* of_sums[2];
            take(q, rows * lanes);
            take(q_scale, rows * key_groups);
            take(q_excess, rows * key_groups);
            take(scores, rows * kKeys);
            take(weights, rows * kKeys * 2);
            take(step, rows);
            take(factor, rows);
            take(totals, rows * Vec::width);
            take(tail, padded_dim);
            for (float*& one : of_sums) take(one, Sums::size(rows, padded_dim));
            sums = Sums(of_sums[0], rows, padded_dim), whole = Sums(of_sums[1], rows, padded_dim);
            const int64_t room_of = cache.in_place ? 0 : 1;
            take(gathered.keys, room_of * lanes * kKeys);
            take(gathered.values, room_of * kKeys / F::lane * padded_dim);
            take(gathered.key_scales, room_of * key_groups * kKeys);
            take(gathered.value_scales, room_of * kKeys);
            if (pass == 0) at = room.take<char>(at - begin);
        }
    }

    // Rows of a task in strips of nearly equal height, each with its own instance of `call`.
    template <class Call>
    static void strips(int64_t rows, const Call& call) {
        const int64_t count = divide_up(rows, kRows);
        int64_t row = 0;
        for (int64_t s = 0; s < count; s++) {
            const int64_t n = divide_up(rows - row, count - s);
            switch (n) {
                case 1: call(std::integral_constant<int, 1>(), row); break;
                case 2: call(std::integral_constant<int, 2>(), row); break;
                case 3: call(std::integral_constant<int, 3>(), row); break;
                case 4: call(std::integral_constant<int, 4>(), row); break;
                case 5: call(std::integral_constant<int, 5>(), row); break;
                default: call(std::integral_constant<int, 6>(), row);
            }
            row += n;
        }
    }

    void load_queries(const Task& task) {
        const int64_t first_row = g.query_start[task.sequence] + task.first_token;
        for (int64_t t = 0; t < task.tokens; t++) {
            const T* from = static_cast<const T*>(g.q) + (first_row + t) * g.q_stride + task.kv_head * group * dim;
            uint32_t* to = q + t * group * lanes;
            if constexpr (F::bytes) {
                const int64_t columns = dim / key_groups;
                for (int64_t i = 0; i < group * key_groups; i++) {
                    int8_t* bytes = reinterpret_cast<int8_t*>(to) + i * columns;
                    int32_t sum = 0;
                    q_scale[t * group * key_groups + i] = to_bytes(from + i * columns, columns, bytes);
                    for (int64_t d = 0; d < columns; d++) sum += bytes[d];
                    q_excess[t * group * key_groups + i] = 128.0f * float(sum);
                }
            } else
                memcpy(to, from, size_t(group * dim) * sizeof(T));
        }
    }


    // Scores of R rows with the keys of C vectors, from the j-th on.
    template <int R, int C>
    void score(int64_t row, int64_t j, const Found& found, const Found* next) {
        const uint32_t *keys[C], *ahead[C];
        for (int c = 0; c < C; c++) {
            keys[c] = found.key_vector(j + c);
            ahead[c] = next ? next->key_vector(j + c) : nullptr;
        }
        const int64_t part_lanes = lanes / key_groups;
        for (int64_t part = 0; part < key_groups; part++) {
            Lanes acc[R][C];
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) acc[r][c] = Lanes::spread(0);
            for (int64_t l = part * part_lanes; l < (part + 1) * part_lanes; l++) {
                Lanes k[C];
#pragma GCC unroll 4
                for (int c = 0; c < C; c++) k[c] = Lanes::lanes(keys[c] + l * found.key_step);
                if (next)
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) __builtin_prefetch(ahead[c] + l * next->key_step, 0, 2);
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) {
                    const Lanes x = Lanes::spread(q[(row + r) * lanes + l]);
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++)
                        if constexpr (F::bytes) acc[r][c] = Whole::dot(acc[r][c], k[c], x);
                        else acc[r][c] = E::madd(acc[r][c], x, k[c]);
                }
            }
            for (int r = 0; r < R; r++)
                for (int c = 0; c < C; c++) {
                    float* to = scores + (row + r) * kKeys + (j + c) * Vec::width;
                    if constexpr (F::bytes) {
                        const int64_t at = (row + r) * key_groups + part;
                        const Vec worth = Vec::load(found.key_scale(j + c, part)) * Vec::all(q_scale[at]);
                        const Vec s = (acc[r][c].floats() - Vec::all(q_excess[at])) * worth;
                        (part ? Vec::load(to) + s : s).store(to);
                    } else
                        acc[r][c].store(to);
                }
        }
    }
    template <int R>
    void score_rows(int64_t row, int64_t vectors, const Found& found, const Found* next) {
        constexpr int C = Vec::max_columns;
        int64_t j = 0;
        // Three quarters of a tile are computed as a whole one: its last vectors repeat others and are not read.
        for (; vectors - j > C / 2; j += C) score<R, C>(row, j, found, next);
        if constexpr (C > 2)
            if (vectors - j == 2) return score<R, 2>(row, j, found, next);
        if (j < vectors) score<R, 1>(row, j, found, next);
    }

    // Scores of one row and tile into weights, and the factor for what was added before.
    void weigh(int64_t row, int64_t vectors, int64_t first_seen, int64_t last_seen, const Found& found) {
        float* s = scores + row * kKeys;
        const bool masked = last_seen < vectors * Vec::width - 1 || first_seen > 0;
        Vec highest = Vec::all(kHidden);
        for (int64_t j = 0; j < vectors; j++) {
            Vec v = Vec::load(s + j * Vec::width) * Vec::all(g.scale);
            if (g.softcap > 0) v = Vec::all(g.softcap) * tanh(v / Vec::all(g.softcap));
            if (masked) {
                const Vec key = Vec::load(kCount + j * Vec::width);
                v = Vec::where_less(Vec::all(float(least(last_seen, kKeys))), key, Vec::all(kHidden), v);
                v = Vec::where_less(key, Vec::all(float(first_seen)), Vec::all(kHidden), v);
            }
            v.store(s + j * Vec::width);
            highest = Vec::max(highest, v);
        }
        float now = highest.top();
        now = now > sums.top[row] ? now : sums.top[row];
        factor[row] = 1.0f;
        Weight* to = weights + row * kKeys * (F::bytes ? 2 : 1);
        if (now == kHidden) {  // no visible key yet
            memset(static_cast<void*>(to), 0, size_t(kKeys) * sizeof(Weight) * (F::bytes ? 2 : 1));
            if constexpr (F::bytes) step[row] = 0;
            return;
        }
        Vec sum = Vec::zero(), most_worth = Vec::zero(), poison = Vec::zero();
        for (int64_t j = 0; j < vectors; j++) {
            Vec p = exp(Vec::load(s + j * Vec::width) - Vec::all(now));
            if constexpr (F::bytes) {
                sum = sum + p;
                // The scale of a key that is not visible may be any value, even NaN.
                p = Vec::where_less(Vec::zero(), p, p * Vec::load(found.value_scale(j)), p);
                p.store(s + j * Vec::width);
                most_worth = Vec::max(most_worth, p);
                poison = Vec::fma(p, Vec::zero(), poison);
            } else {
                p.store(to + j * Vec::width);
                sum = sum + Vec::load(to + j * Vec::width);  // as rounded: the weights then add up to one
            }
        }
        if constexpr (F::bytes) {
            const float most_now = most_worth.top(), inverse = most_now > 1e-30f ? 65535.0f / most_now : 0.0f;
            step[row] = most_now / 65535.0f + poison.sum();  // a NaN among the values stays NaN
            uint8_t *high = reinterpret_cast<uint8_t*>(to), *low = high + kKeys;
            for (int64_t i = 0; i < vectors * Vec::width; i++) {
                const int32_t whole_weight = int32_t(s[i] * inverse + 0.5f);
                high[i] = uint8_t(whole_weight >> 8);
                low[i] = uint8_t(whole_weight);
            }
        }
        if (now != sums.top[row]) factor[row] = exp_of(sums.top[row] - now);
        (Vec::load(totals + row * Vec::width) * Vec::all(factor[row]) + sum).store(totals + row * Vec::width);
        sums.top[row] = now;
    }

    // Adds C vectors of the weighted values, from column d on, to the sums of R rows.
    template <int R, int C>
    void mix(int64_t row, int64_t d, int64_t value_rows, bool has_tail, const Found& found, const Found* next) {
        constexpr int parts = F::bytes ? 2 : 1;
        Lanes acc[R][C][parts];
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++)
                if constexpr (F::bytes) acc[r][c][0] = acc[r][c][1] = Whole::spread(0);
                else acc[r][c][0] = Vec::load(sums.out + (row + r) * padded_dim + d + c * Vec::width) * Vec::all(factor[row + r]);
        const Weight* weight = weights + row * kKeys * parts;
        const auto add = [&](const uint32_t* values) __attribute__((always_inline)) {
            Lanes v[C];
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) v[c] = Lanes::lanes(values + c * Vec::width);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++)
#pragma GCC unroll 2
                for (int p = 0; p < parts; p++) {
                    const Lanes w = Lanes::spread(lane_at(weight + (r * parts + p) * kKeys));
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++)
                        if constexpr (F::bytes) acc[r][c][p] = Whole::dot(acc[r][c][p], w, v[c]);
                        else acc[r][c][p] = E::madd(acc[r][c][p], w, v[c]);
                }
            weight += F::lane;
        };
        for (int64_t first = 0, bunch = 0; first < value_rows; first += bunch_rows, bunch++) {
            const uint32_t *values = found.values[bunch] + d, *ahead = next ? next->values[bunch] + d : nullptr;
            const int64_t n = least(bunch_rows, value_rows - first);
            for (int64_t i = 0; i < n; i++) {
                if (next)
#pragma GCC unroll 4
                    for (int c = 0; c < C; c++) __builtin_prefetch(ahead + i * next->value_step + c * Vec::width, 0, 2);
                add(values + i * found.value_step);
            }
        }
        if (has_tail) add(tail + d);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++)
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) {
                float* to = sums.out + (row + r) * padded_dim + d + c * Vec::width;
                if constexpr (F::bytes) {
                    const Vec whole_sum = Vec::fma(acc[r][c][0].floats(), Vec::all(256.0f), acc[r][c][1].floats());
                    Vec::fma(whole_sum, Vec::all(step[row + r]), Vec::load(to) * Vec::all(factor[row + r])).store(to);
                } else
                    acc[r][c][0].store(to);
            }
    }
    template <int R>
    void mix_rows(int64_t row, int64_t value_rows, bool has_tail, const Found& found, const Found* next) {
        constexpr int C = F::bytes && R > kRows / 2 ? Vec::max_columns / 2 : Vec::max_columns;  // what the registers hold
        int64_t d = 0;
        for (; d + C * Vec::width <= padded_dim; d += C * Vec::width) mix<R, C>(row, d, value_rows, has_tail, found, next);
        for (; d < padded_dim; d += Vec::width) mix<R, 1>(row, d, value_rows, has_tail, found, next);
    }

    // The chunk's sums are complete: add up the lanes of their totals.
    void close_chunk(int64_t rows) {
        for (int64_t r = 0; r < rows; r++) sums.total[r] = Vec::load(totals + r * Vec::width).sum();
    }
    void open_chunk(int64_t rows) {
        memset(sums.out, 0, size_t(rows * padded_dim) * 4);
        memset(totals, 0, size_t(rows * Vec::width) * 4);
        for (int64_t r = 0; r < rows; r++) sums.top[r] = kHidden;
    }

    // Bunches are fetched a tile's worth ahead, across tiles and tasks: `upcoming` gets as many as the tile at hand has.
    const Found* look_ahead(const Task& task, const Task* next, int64_t bunches, Found& upcoming) {
        upcoming.key_step = upcoming.scale_step = cache.size;
        upcoming.value_step = cache.dim;
        const int64_t own = task.bunches();
        int64_t count = 0;
        for (; count < bunches; count++, fetched++) {
            const bool is_own = fetched < own;
            if (!is_own && (!next || fetched - own >= next->bunches())) break;
            const Task& of = is_own ? task : *next;
            find_bunch(cache, of.sequence, of.kv_head, of.begin + (is_own ? fetched : fetched - own) * kBunch, count, upcoming);
            if constexpr (F::bytes) {
                for (int64_t i = 0; i < key_groups; i++) __builtin_prefetch(upcoming.key_scales[count] + i * upcoming.scale_step, 0, 2);
                __builtin_prefetch(upcoming.value_scales[count], 0, 2);
            }
        }
        for (int64_t i = most(count, 1); count && i < kBunches; i++) {
            upcoming.keys[i] = upcoming.keys[count - 1];
            upcoming.values[i] = upcoming.values[count - 1];
        }
        return count ? &upcoming : nullptr;
    }

    // `next`: the task that follows, whose first keys are fetched behind this one's last.
    void run(const Task& task, const Task* next) {
        const int64_t rows = task.tokens * group, first_position = task.first_position(g);
        load_queries(task);
        open_chunk(rows);
        bool folded = false;
        Found found, upcoming;
        for (int64_t start = task.begin;; start += kKeys) {
            const Tile tile = task.tile(start);
            const bool last = start + kKeys >= task.end;
            const Found* ahead = nullptr;
            if (cache.in_place) {
                find(cache, tile, found);
                ahead = look_ahead(task, next, divide_up(tile.count, kBunch), upcoming);
            } else
                gather(cache, tile, gathered, found);
            const int64_t vectors = divide_up(tile.count, Vec::width), value_rows = tile.count / F::lane, left = tile.count % F::lane;
            if (left) {  // memory after the last key may hold anything, and NaN times 0 is NaN
                const uint32_t mask = (1u << (left * 32 / F::lane)) - 1;
                const uint32_t* from = found.values[value_rows / bunch_rows] + value_rows % bunch_rows * found.value_step;
                for (int64_t d = 0; d < padded_dim; d++) tail[d] = from[d] & mask;
            }
            strips(rows, [&](auto n, int64_t row) { score_rows<decltype(n)::value>(row, vectors, found, row ? nullptr : ahead); });
            for (int64_t r = 0; r < rows; r++) {
                const int64_t position = first_position + r / group - start;
                weigh(r, vectors, g.window > 0 ? position - g.window + 1 : 0, position, found);
            }
            strips(rows, [&](auto n, int64_t row) { mix_rows<decltype(n)::value>(row, value_rows, left != 0, found, row ? nullptr : ahead); });
            if (last) break;
            if ((start + kKeys) % kChunk == 0) {
                close_chunk(rows);
                if (folded) fold(whole, sums, rows, padded_dim);
                else std::swap(whole, sums);
                folded = true;
                open_chunk(rows);
            }
        }
        fetched = most(0, fetched - task.bunches());
        close_chunk(rows);
        if (task.part) {
            Sums part(task.part, rows, padded_dim);
            memcpy(part.out, sums.out, size_t(rows * padded_dim) * 4);
            memcpy(part.top, sums.top, size_t(rows) * 4);
            memcpy(part.total, sums.total, size_t(rows) * 4);
            return;
        }
        if (folded) fold(whole, sums, rows, padded_dim);
        finish(task, folded ? whole : sums);
    }

    void finish(const Task& task, const Sums& of) const {
        const int64_t first_row = g.query_start[task.sequence] + task.first_token;
        for (int64_t r = 0; r < task.tokens * group; r++) {
            const float inverse = 1.0f / of.total[r];
            float* row = of.out + r * padded_dim;
            for (int64_t d = 0; d < padded_dim; d += Vec::width) (Vec::load(row + d) * Vec::all(inverse)).store(row + d);
            write_row<T>(row, nullptr, static_cast<T*>(g.out) + ((first_row + r / group) * g.heads + task.kv_head * group + r % group) * dim, dim);
        }
    }
};

// The step's tasks, numbered so that they can be taken in any order.
struct Tasks {
    const AttentionArgs& g;
    const int64_t tile_tokens = most(1, kQueryRows / (g.heads / g.kv_heads));
    int64_t* tiles_before;  // [sequences + 1] query tiles of the sequences before
    int64_t count, chunks = 1;  // chunks: the most that a task has

    Tasks(const AttentionArgs& args, Scratch& room) : g(args), tiles_before(room.take<int64_t>(g.sequences + 1)) {
        tiles_before[0] = 0;
        for (int64_t i = 0; i < g.sequences; i++) {
            tiles_before[i + 1] = tiles_before[i] + divide_up(tokens_of(i), tile_tokens);
            chunks = most(chunks, divide_up(g.seq_len[i], kChunk) + 1);
        }
        count = tiles_before[g.sequences] * g.kv_heads;
    }
    int64_t tokens_of(int64_t sequence) const { return g.query_start[sequence + 1] - g.query_start[sequence]; }
    // Whether one task of each head reads all keys that it writes.
    bool is_alone(int64_t sequence) const { return tokens_of(sequence) <= tile_tokens; }

    Task at(int64_t index) const {
        const int64_t tile = index / g.kv_heads;
        int64_t low = 0, high = g.sequences - 1;
        while (low < high) {
            const int64_t middle = (low + high + 1) / 2;
            if (tiles_before[middle] <= tile) low = middle;
            else high = middle - 1;
        }
        const int64_t first = (tile - tiles_before[low]) * tile_tokens;
        Task task{low, index % g.kv_heads, first, least(tile_tokens, tokens_of(low) - first), 0, 0, nullptr};
        const int64_t position = task.first_position(g);
        task.begin = g.window > 0 ? most(0, position - g.window + 1) / kKeys * kKeys : 0;
        task.end = position + task.tokens;
        return task;
    }
};

template <class E, class F>
void attention_in(const AttentionArgs& g, int threads) {
    using T = typename E::type;
    static thread_local Scratch tasks_room, parts_room;
    const Tasks tasks(g, tasks_room);
    const int64_t group = g.heads / g.kv_heads, rows = tasks.tile_tokens * group;
    const int64_t part_size = Sums::size(rows, divide_up(g.head_dim, Vec::width) * Vec::width);
    // Few tasks with long contexts: threads share chunks too. Sums are computed and merged in the same way.
    const bool split = threads > 1 && tasks.chunks > 2 && tasks.count < 4 * threads;
    const int64_t chunks = split ? tasks.chunks : 1, items = tasks.count * chunks;
    float* const parts = split ? parts_room.take<float>(items * part_size) : nullptr;
    bool write_first = split;
    for (int64_t i = 0; i < g.sequences; i++) write_first |= !tasks.is_alone(i);
    int64_t taken = 0;
#pragma omp parallel num_threads(threads)
    {
        Attend<E, F> attend(g, rows);
        if (write_first) {
#pragma omp for schedule(static)
            for (int64_t row = 0; row < g.rows; row++)
                for (int64_t head = 0; head < g.kv_heads; head++) attend.cache.template write<T>(row, head);
        }
        // In descending order: late tiles of a long prompt have the most keys, so the longest tasks come first.
        const auto take = [&](Task& task) {
            for (;;) {
                const int64_t index = items - 1 - __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
                if (index < 0) return false;
                task = tasks.at(index / chunks);
                if (!split) return true;
                const int64_t chunk = task.begin / kChunk + index % chunks;
                task.begin = most(task.begin, chunk * kChunk);
                task.end = least(task.end, (chunk + 1) * kChunk);
                task.part = parts + index * part_size;
                if (task.begin < task.end) return true;
            }
        };
        Task task, following;
        for (bool more = take(task); more; task = following) {
            more = take(following);
            if (!write_first && more) attend.cache.prepare(g.query_start[following.sequence], following.kv_head);
            if (!write_first)
                for (int64_t t = 0; t < task.tokens; t++) attend.cache.template write<T>(g.query_start[task.sequence] + t, task.kv_head);
            attend.run(task, more ? &following : nullptr);
        }
        if (split) {
#pragma omp barrier
#pragma omp for schedule(static)
            for (int64_t index = 0; index < tasks.count; index++) {
                const Task whole = tasks.at(index);
                const int64_t task_rows = whole.tokens * group, count = (whole.end - 1) / kChunk - whole.begin / kChunk + 1;
                const Sums first(parts + index * chunks * part_size, task_rows, attend.padded_dim);
                for (int64_t i = 1; i < count; i++)
                    fold(first, Sums(parts + (index * chunks + i) * part_size, task_rows, attend.padded_dim), task_rows, attend.padded_dim);
                attend.finish(whole, first);
            }
        }
    }
}

template <class E>
void attention(const AttentionArgs& g, int threads) {
    if (g.rows == 0) return;
    if (g.key_scales) attention_in<E, ByteCells>(g, threads);
    else attention_in<E, Plain<E>>(g, threads);
}

}  // namespace inferd::INFERD_LEVEL
