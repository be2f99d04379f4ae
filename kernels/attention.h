// Paged attention over a ragged batch (the softmax is online: Milakov & Gimelshein 2018; tiles as in
// FlashAttention, Dao et al. 2022; pages as in PagedAttention, Kwon et al. 2023).
//
// A task is one (sequence, key/value head, tile of query rows); the query heads that share a key/value
// head are rows of the same tile. Keys come in tiles of 64 that begin at multiples of 64 of the sequence,
// each packed once per task so that scores and weighted values are calls of the matrix kernel's tile.
// What a row sees is added in the same order wherever the row stands: a tile in which it sees nothing
// multiplies by one and adds zeros.
#pragma once
#include <cstdlib>

#include "gemm.h"

namespace inferd::INFERD_LEVEL {

constexpr int64_t kKeys = 64;       // keys of a tile
constexpr int64_t kQueryRows = 48;  // rows of a task: tokens x heads of the group
constexpr float kHidden = -__builtin_inff();

template <class E>
struct Scratch {  // one thread's
    using T = typename E::type;
    uint32_t* q;  // [rows][lanes]
    uint32_t* keys;  // [lanes, padded][kKeys]
    uint32_t* values;  // [kKeys / lane][dim]
    float* scores;     // [rows][kKeys]
    T* weights;        // [rows][kKeys]
    float* out;        // [rows][dim]
    float* top;        // [rows] highest score so far
    float* total;      // [rows] sum of weights so far
    void* memory;

    Scratch(int64_t rows, int64_t lanes, int64_t padded_lanes, int64_t dim) {
        const int64_t sizes[] = {rows * lanes * 4, padded_lanes * kKeys * 4, kKeys / E::lane * dim * 4, rows * kKeys * 4,
                                 rows * kKeys * int64_t(sizeof(T)), rows * dim * 4, rows * 4, rows * 4};
        int64_t bytes = 64;
        for (int64_t size : sizes) bytes += divide_up(size, 64) * 64;
        memory = malloc(size_t(bytes));
        char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
        void* parts[8];
        for (int i = 0; i < 8; i++) {
            parts[i] = at;
            at += divide_up(sizes[i], 64) * 64;
        }
        q = static_cast<uint32_t*>(parts[0]);
        keys = static_cast<uint32_t*>(parts[1]);
        values = static_cast<uint32_t*>(parts[2]);
        scores = static_cast<float*>(parts[3]);
        weights = static_cast<T*>(parts[4]);
        out = static_cast<float*>(parts[5]);
        top = static_cast<float*>(parts[6]);
        total = static_cast<float*>(parts[7]);
    }
    ~Scratch() { free(memory); }
    Scratch(const Scratch&) = delete;
};

inline Vec pair_rows(const bf16* even, const bf16* odd) { return Vec::pairs(even, odd); }
inline Vec pair_rows(const float* row, const float*) { return Vec::load(row); }

// A vector of a row that may end before the vector does.
inline Vec some_lanes(const void* row, int64_t k, int64_t left) {
    const char* from = static_cast<const char*>(row) + k * 4;
    uint32_t part[Vec::width] = {};
    memcpy(part, from, size_t(least(left, Vec::width)) * 4);
    return Vec::lanes(part);
}
template <class T>
inline Vec some_pairs(const T* even, const T* odd, int64_t left) {
    if (left >= Vec::width) return pair_rows(even, odd);
    T a[Vec::width] = {}, b[Vec::width] = {};
    memcpy(a, even, size_t(left) * sizeof(T));
    memcpy(b, odd, size_t(left) * sizeof(T));
    return pair_rows(a, b);
}

// Lanes k.. of `width` keys, turned so that one vector holds one lane of all of them.
template <class T>
inline void turned(const T* const* rows, const T* const* next_rows, int64_t k, Vec* block) {
#pragma GCC unroll 16
    for (int i = 0; i < Vec::width; i++) {
        block[i] = Vec::lanes(reinterpret_cast<const uint32_t*>(rows[i]) + k);
        __builtin_prefetch(reinterpret_cast<const uint32_t*>(next_rows[i]) + k, 0, 2);
    }
    Vec::transpose(block);
}
template <class T>
inline void turned_end(const T* const* rows, int64_t k, int64_t left, Vec* block) {
    for (int i = 0; i < Vec::width; i++) block[i] = some_lanes(rows[i], k, left);
    Vec::transpose(block);
}

// Many rows: the tile is packed once and read by all of them. Rows of keys behind the last one may be any.
template <class T>
inline void pack_keys(const T* const* rows, int64_t padded, int64_t lanes, uint32_t* packed, const T* const* next_rows) {
    for (int64_t key = 0; key < padded; key += Vec::width) {
        Vec block[Vec::width];
        int64_t k = 0;
        for (; k + Vec::width <= lanes; k += Vec::width) {
            turned(rows + key, next_rows + key, k, block);
#pragma GCC unroll 16
            for (int i = 0; i < Vec::width; i++) block[i].store_lanes(packed + (k + i) * kKeys + key);
        }
        if (k < lanes) {
            turned_end(rows + key, k, lanes - k, block);
            for (int i = 0; i < Vec::width; i++) block[i].store_lanes(packed + (k + i) * kKeys + key);
        }
    }
}
template <class E, class T>
inline void pack_values(const T* const* rows, int64_t padded, int64_t dim, int64_t padded_dim, uint32_t* packed, const T* const* next_rows) {
    for (int64_t key = 0; key < padded; key += E::lane) {
        uint32_t* to = packed + key / E::lane * padded_dim;
        for (int64_t d = 0; d < dim; d += 64 / int64_t(sizeof(T)))
            for (int i = 0; i < E::lane; i++) __builtin_prefetch(next_rows[key + i] + d, 0, 2);
        for (int64_t d = 0; d < dim; d += Vec::width)
            some_pairs(rows[key] + d, rows[key + E::lane - 1] + d, dim - d).store_lanes(to + d);
    }
}

// Few rows: keys and values go from memory to registers, multiplied in the same order as in the packed tile.
template <class E, int R, class T>
inline void direct_scores(const uint32_t* q, const T* const* rows, int64_t padded, int64_t lanes, float* scores, const T* const* next_rows) {
    for (int64_t key = 0; key < padded; key += Vec::width) {
        Vec block[Vec::width], acc[R];
        for (int r = 0; r < R; r++) acc[r] = Vec::zero();
        int64_t k = 0;
        for (; k + Vec::width <= lanes; k += Vec::width) {
            turned(rows + key, next_rows + key, k, block);
#pragma GCC unroll 16
            for (int i = 0; i < Vec::width; i++)
#pragma GCC unroll 8
                for (int r = 0; r < R; r++) acc[r] = E::madd(acc[r], Vec::spread(q[r * lanes + k + i]), block[i]);
        }
        if (k < lanes) {
            turned_end(rows + key, k, lanes - k, block);
            for (int64_t i = 0; i < lanes - k; i++)
                for (int r = 0; r < R; r++) acc[r] = E::madd(acc[r], Vec::spread(q[r * lanes + k + i]), block[i]);
        }
        for (int r = 0; r < R; r++) acc[r].store(scores + r * kKeys + key);
    }
}
template <class E, int R, int C, bool whole, class T>
inline void direct_values_part(const T* weights, const T* const* rows, int64_t padded, int64_t d, int64_t dim, float* out, int64_t out_stride,
                               const T* const* next_rows) {
    Vec acc[R][C];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c] = Vec::load(out + r * out_stride + d + c * Vec::width);
    for (int64_t key = 0; key < padded; key += E::lane) {
        const T *even = rows[key] + d, *odd = rows[key + E::lane - 1] + d;
        Vec v[C];
#pragma GCC unroll 4
        for (int c = 0; c < C; c++)
            v[c] = whole ? pair_rows(even + c * Vec::width, odd + c * Vec::width) : some_pairs(even, odd, dim - d);
        for (int64_t line = 0; line < C * Vec::width; line += 64 / int64_t(sizeof(T)))
            for (int i = 0; i < E::lane; i++) __builtin_prefetch(next_rows[key + i] + d + line, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const Vec w = Vec::spread(lane_at(weights + r * kKeys + key));
#pragma GCC unroll 4
            for (int c = 0; c < C; c++) acc[r][c] = E::madd(acc[r][c], w, v[c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 4
        for (int c = 0; c < C; c++) acc[r][c].store(out + r * out_stride + d + c * Vec::width);
}
template <class E, int R, class T>
inline void direct_values(const T* weights, const T* const* rows, int64_t padded, int64_t dim, float* out, int64_t out_stride,
                          const T* const* next_rows) {
    constexpr int C = Vec::max_columns;
    int64_t d = 0;
    for (; d + C * Vec::width <= dim; d += C * Vec::width)
        direct_values_part<E, R, C, true>(weights, rows, padded, d, dim, out, out_stride, next_rows);
    for (; d < dim; d += Vec::width) direct_values_part<E, R, 1, false>(weights, rows, padded, d, dim, out, out_stride, next_rows);
}

// Scores of one row and tile into weights; returns the factor for what was added before.
template <class T>
inline float weigh(float* scores, T* weights, int64_t vectors, float scale, float softcap, int64_t first_seen, int64_t last_seen, float& top,
                   float& total) {
    alignas(64) float steps[Vec::width];
    for (int i = 0; i < Vec::width; i++) steps[i] = float(i);
    const Vec index = Vec::load(steps);
    const bool masked = last_seen < vectors * Vec::width - 1 || first_seen > 0;
    const Vec from = Vec::all(float(most(first_seen, 0))), to = Vec::all(float(most(least(last_seen, kKeys), -1)));
    Vec highest = Vec::all(kHidden);
    for (int64_t j = 0; j < vectors; j++) {
        Vec s = Vec::load(scores + j * Vec::width) * Vec::all(scale);
        if (softcap > 0) s = Vec::all(softcap) * tanh(s / Vec::all(softcap));
        if (masked) {
            const Vec key = index + Vec::all(float(j * Vec::width));
            s = Vec::where_less(to, key, Vec::all(kHidden), s);
            s = Vec::where_less(key, from, Vec::all(kHidden), s);
        }
        s.store(scores + j * Vec::width);
        highest = Vec::max(highest, s);
    }
    float now = highest.top();
    now = now > top ? now : top;
    if (now == kHidden) {  // nothing seen yet
        memset(static_cast<void*>(weights), 0, size_t(vectors) * Vec::width * sizeof(T));
        return 1.0f;
    }
    Vec sum = Vec::zero();
    for (int64_t j = 0; j < vectors; j++) {
        exp(Vec::load(scores + j * Vec::width) - Vec::all(now)).store(weights + j * Vec::width);
        sum = sum + Vec::load(weights + j * Vec::width);  // as rounded: the weights then add up to one
    }
    float factor = 1.0f;
    if (now != top) {
        alignas(64) float lanes[Vec::width];
        exp(Vec::all(top - now)).store(lanes);
        factor = lanes[0];
    }
    total = total * factor + sum.sum();
    top = now;
    return factor;
}

// One tile of keys of one sequence and head.
struct Tile {
    int64_t sequence, kv_head, start, count;
};

// Where the tile's keys and values lie; behind the last one its address is repeated.
template <class T>
inline void find_rows(const AttentionArgs& g, const Tile& tile, const T** keys, const T** values) {
    const int32_t* table = g.block_table + tile.sequence * g.table_stride;
    const T *k = static_cast<const T*>(g.keys), *v = static_cast<const T*>(g.values);
    const int64_t dim = g.head_dim, block_size = g.block_size, count = tile.count;
    int64_t block = tile.start / block_size, offset = tile.start % block_size;
    for (int64_t i = 0; i < count; block++, offset = 0) {
        int64_t at = ((int64_t(table[block]) * g.kv_heads + tile.kv_head) * block_size + offset) * dim;
        for (const int64_t end = least(count, i + block_size - offset); i < end; i++, at += dim) {
            keys[i] = k + at;
            values[i] = v + at;
        }
    }
    for (int64_t i = count; i < kKeys; i++) {
        keys[i] = keys[count - 1];
        values[i] = values[count - 1];
    }
}

// Tokens first_token.. of a sequence's rows, with one key/value head's group of query heads.
struct Task {
    int64_t sequence, kv_head, first_token, tokens;

    int64_t first_position(const AttentionArgs& g) const {
        return g.seq_len[sequence] - (g.query_start[sequence + 1] - g.query_start[sequence]) + first_token;
    }
    Tile first_tile(const AttentionArgs& g) const {
        const int64_t first = first_position(g), start = g.window > 0 ? most(0, first - g.window + 1) / kKeys * kKeys : 0;
        return {sequence, kv_head, start, least(kKeys, first + tokens - start)};
    }
};

template <class E>
struct Attend {
    using T = typename E::type;
    const AttentionArgs& g;
    Scratch<E>& s;
    const int64_t dim = g.head_dim, padded_dim = divide_up(dim, Vec::width) * Vec::width, lanes = dim / E::lane;
    const int64_t group = g.heads / g.kv_heads;

    // Scores of rows r..r+n to weights, and what was added before to the new scale.
    void weigh_rows(int64_t r, int64_t n, int64_t first_position, int64_t start, int64_t vectors) {
        for (int64_t i = r; i < r + n; i++) {
            const int64_t position = first_position + i / group;
            const int64_t first_seen = g.window > 0 ? position - g.window + 1 - start : 0;
            const float factor = weigh(s.scores + i * kKeys, s.weights + i * kKeys, vectors, g.scale, g.softcap, first_seen, position - start,
                                       s.top[i], s.total[i]);
            if (factor != 1.0f)
                for (int64_t d = 0; d < padded_dim; d += Vec::width)
                    (Vec::load(s.out + i * padded_dim + d) * Vec::all(factor)).store(s.out + i * padded_dim + d);
        }
    }

    template <int R>
    void direct(int64_t first_position, int64_t start, int64_t vectors, const T* const* keys, const T* const* values,
                const T* const* next_keys, const T* const* next_values) {
        const int64_t padded = vectors * Vec::width;
        direct_scores<E, R>(s.q, keys, padded, lanes, s.scores, next_keys);
        weigh_rows(0, R, first_position, start, vectors);
        direct_values<E, R>(s.weights, values, padded, dim, s.out, padded_dim, next_values);
    }

    void packed(int64_t rows, int64_t first_position, int64_t start, int64_t vectors, const T* const* keys, const T* const* values,
                const T* const* next_keys, const T* const* next_values) {
        const int64_t padded = vectors * Vec::width;
        pack_keys(keys, padded, lanes, s.keys, next_keys);
        pack_values<E>(values, padded, dim, padded_dim, s.values, next_values);
        for (int64_t r = 0; r < rows; r += kRows) {
            const int n = int(least(kRows, rows - r));
            strip<E>(n, reinterpret_cast<const char*>(s.q + r * lanes), lanes * 4, s.keys, kKeys, lanes, s.scores + r * kKeys, kKeys, padded,
                     false);
            weigh_rows(r, n, first_position, start, vectors);
            strip<E>(n, reinterpret_cast<const char*>(s.weights + r * kKeys), kKeys * int64_t(sizeof(T)), s.values, padded_dim,
                     padded / E::lane, s.out + r * padded_dim, padded_dim, padded_dim, true);
        }
    }
};

// `next`: the task that follows, whose first tile is fetched behind this one's last.
template <class E>
void attend(const AttentionArgs& g, const Task& task, const Task* next, Scratch<E>& s) {
    using T = typename E::type;
    Attend<E> a{g, s};
    const int64_t dim = a.dim, padded_dim = a.padded_dim, lanes = a.lanes, group = a.group, rows = task.tokens * group;
    const int64_t first_position = task.first_position(g), end = first_position + task.tokens;  // of the keys some row sees
    const int64_t first_row = g.query_start[task.sequence] + task.first_token;

    const T* q = static_cast<const T*>(g.q) + first_row * g.q_stride + task.kv_head * group * dim;
    for (int64_t t = 0; t < task.tokens; t++) memcpy(s.q + t * group * lanes, q + t * g.q_stride, size_t(group * dim) * sizeof(T));
    memset(s.out, 0, size_t(rows * padded_dim) * 4);
    for (int64_t r = 0; r < rows; r++) {
        s.top[r] = kHidden;
        s.total[r] = 0;
    }
    const T *found[4][kKeys], **keys = found[0], **values = found[1], **next_keys = found[2], **next_values = found[3];
    Tile tile = task.first_tile(g);
    find_rows(g, tile, keys, values);
    for (;;) {
        const int64_t start = tile.start, vectors = divide_up(tile.count, Vec::width);
        const bool last = start + kKeys >= end;
        const Tile upcoming = !last ? Tile{task.sequence, task.kv_head, start + kKeys, least(kKeys, end - start - kKeys)}
                              : next ? next->first_tile(g)
                                     : tile;
        find_rows(g, upcoming, next_keys, next_values);
        switch (rows) {
            case 1: a.template direct<1>(first_position, start, vectors, keys, values, next_keys, next_values); break;
            case 2: a.template direct<2>(first_position, start, vectors, keys, values, next_keys, next_values); break;
            case 3: a.template direct<3>(first_position, start, vectors, keys, values, next_keys, next_values); break;
            case 4: a.template direct<4>(first_position, start, vectors, keys, values, next_keys, next_values); break;
            case 5: a.template direct<5>(first_position, start, vectors, keys, values, next_keys, next_values); break;
            case 6: a.template direct<6>(first_position, start, vectors, keys, values, next_keys, next_values); break;
            default: a.packed(rows, first_position, start, vectors, keys, values, next_keys, next_values);
        }
        if (last) break;
        tile = upcoming;
        const T** spare = keys;
        keys = next_keys, next_keys = spare;
        spare = values;
        values = next_values, next_values = spare;
    }
    for (int64_t r = 0; r < rows; r++) {
        const float inverse = 1.0f / s.total[r];
        float* row = s.out + r * padded_dim;
        for (int64_t d = 0; d < padded_dim; d += Vec::width) (Vec::load(row + d) * Vec::all(inverse)).store(row + d);
        T* to = static_cast<T*>(g.out) + ((first_row + r / group) * g.heads + task.kv_head * group + r % group) * dim;
        write_row<T>(row, nullptr, to, dim);
    }
}

template <class E>
void attention(const AttentionArgs& g, int threads) {
    using T = typename E::type;
    if (g.rows == 0) return;
    const int64_t dim = g.head_dim, lanes = dim / E::lane, group = g.heads / g.kv_heads;
    const int64_t tile_tokens = most(1, kQueryRows / group);
    // tiles_before[i]: query tiles of the sequences before i
    int64_t* tiles_before = static_cast<int64_t*>(malloc(size_t(g.sequences + 1) * sizeof(int64_t)));
    tiles_before[0] = 0;
    for (int64_t i = 0; i < g.sequences; i++)
        tiles_before[i + 1] = tiles_before[i] + divide_up(g.query_start[i + 1] - g.query_start[i], tile_tokens);
    const int64_t tasks = tiles_before[g.sequences] * g.kv_heads;
    int64_t taken = 0;
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t row = 0; row < g.rows; row++) {
            const int64_t block = g.slots[row] / g.block_size, offset = g.slots[row] % g.block_size;
            for (int64_t head = 0; head < g.kv_heads; head++) {
                const int64_t to = ((block * g.kv_heads + head) * g.block_size + offset) * dim;
                memcpy(static_cast<T*>(g.keys) + to, static_cast<const T*>(g.k) + row * g.k_stride + head * dim, size_t(dim) * sizeof(T));
                memcpy(static_cast<T*>(g.values) + to, static_cast<const T*>(g.v) + row * g.v_stride + head * dim, size_t(dim) * sizeof(T));
            }
        }
        Scratch<E> scratch(tile_tokens * group, lanes, divide_up(lanes, Vec::width) * Vec::width, divide_up(dim, Vec::width) * Vec::width);
        // From the last: late tiles of a long prompt see most keys, so the longest tasks go first.
        const auto take = [&](Task& task) {
            const int64_t index = tasks - 1 - __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            if (index < 0) return false;
            const int64_t tile_index = index / g.kv_heads;
            int64_t low = 0, high = g.sequences - 1;
            while (low < high) {
                const int64_t middle = (low + high + 1) / 2;
                if (tiles_before[middle] <= tile_index) low = middle;
                else high = middle - 1;
            }
            const int64_t first = (tile_index - tiles_before[low]) * tile_tokens;
            task = {low, index % g.kv_heads, first, least(tile_tokens, g.query_start[low + 1] - g.query_start[low] - first)};
            return true;
        };
        Task task, following;
        for (bool more = take(task); more; task = following) {
            more = take(following);
            attend<E>(g, task, more ? &following : nullptr, scratch);
        }
    }
    free(tiles_before);
}

}  // namespace inferd::INFERD_LEVEL
