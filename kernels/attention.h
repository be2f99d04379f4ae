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

// Keys of the tile, turned so that one vector holds one lane of `width` keys. `count` rows are real, zeros follow.
template <class T>
inline void pack_keys(const T* const* rows, int64_t count, int64_t lanes, uint32_t* packed) {
    for (int64_t key = 0; key < count; key += Vec::width)
        for (int64_t k = 0; k < lanes; k += Vec::width) {
            Vec block[Vec::width];
            const int64_t left = lanes - k;
            for (int i = 0; i < Vec::width; i++) {
                if (key + i >= count) {
                    block[i] = Vec::zero();
                } else if (left >= Vec::width) {
                    block[i] = Vec::lanes(reinterpret_cast<const uint32_t*>(rows[key + i]) + k);
                } else {
                    uint32_t part[Vec::width] = {};
                    memcpy(part, reinterpret_cast<const uint32_t*>(rows[key + i]) + k, size_t(left) * 4);
                    block[i] = Vec::lanes(part);
                }
            }
            Vec::transpose(block);
            for (int i = 0; i < Vec::width; i++) block[i].store_lanes(packed + (k + i) * kKeys + key);
        }
}

// Values of the tile: bf16 in pairs of keys, f32 as they are; zeros from `count` to `padded`.
template <class E, class T>
inline void pack_values(const T* const* rows, int64_t count, int64_t padded, int64_t dim, int64_t padded_dim, uint32_t* packed) {
    alignas(64) T even[Vec::width], odd[Vec::width];
    for (int64_t key = 0; key < padded; key += E::lane) {
        uint32_t* to = packed + key / E::lane * padded_dim;
        if (key + E::lane <= count) {
            int64_t d = 0;
            for (; d + Vec::width <= dim; d += Vec::width) pair_rows(rows[key] + d, rows[key + E::lane - 1] + d).store_lanes(to + d);
            if (d < dim) {
                memset(even, 0, sizeof even);
                memset(odd, 0, sizeof odd);
                memcpy(even, rows[key] + d, size_t(dim - d) * sizeof(T));
                memcpy(odd, rows[key + E::lane - 1] + d, size_t(dim - d) * sizeof(T));
                pair_rows(even, odd).store_lanes(to + d);
            }
        } else if (key < count) {  // the last key of an odd number
            for (int64_t d = 0; d < padded_dim; d += Vec::width) {
                memset(even, 0, sizeof even);
                memset(odd, 0, sizeof odd);
                memcpy(even, rows[key] + d, size_t(least(Vec::width, dim - d)) * sizeof(T));
                pair_rows(even, odd).store_lanes(to + d);
            }
        } else {
            memset(to, 0, size_t(padded_dim) * 4);
        }
    }
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

template <class E>
void attend(const AttentionArgs& g, int64_t sequence, int64_t first_token, int64_t tokens, int64_t kv_head, Scratch<E>& s) {
    using T = typename E::type;
    const int64_t dim = g.head_dim, padded_dim = divide_up(dim, Vec::width) * Vec::width, lanes = dim / E::lane;
    const int64_t group = g.heads / g.kv_heads, rows = tokens * group;
    const int64_t begin = g.query_start[sequence], length = g.seq_len[sequence];
    const int64_t first_position = length - (g.query_start[sequence + 1] - begin) + first_token;
    const int64_t end = first_position + tokens;  // keys that some row of this task may see
    const int32_t* table = g.block_table + sequence * g.table_stride;
    const T* all_keys = static_cast<const T*>(g.keys) + kv_head * g.block_size * dim;
    const T* all_values = static_cast<const T*>(g.values) + kv_head * g.block_size * dim;
    const int64_t block_elements = g.kv_heads * g.block_size * dim;

    const T* q = static_cast<const T*>(g.q) + (begin + first_token) * g.q_stride + kv_head * group * dim;
    for (int64_t t = 0; t < tokens; t++)
        memcpy(s.q + t * group * lanes, q + t * g.q_stride, size_t(group * dim) * sizeof(T));
    memset(s.out, 0, size_t(rows * padded_dim) * 4);
    for (int64_t r = 0; r < rows; r++) {
        s.top[r] = kHidden;
        s.total[r] = 0;
    }
    const T *key_rows[kKeys], *value_rows[kKeys];
    int64_t start = g.window > 0 ? most(0, first_position - g.window + 1) / kKeys * kKeys : 0;
    for (; start < end; start += kKeys) {
        const int64_t count = least(kKeys, end - start), vectors = divide_up(count, Vec::width), padded = vectors * Vec::width;
        for (int64_t i = 0; i < count; i++) {
            const int64_t key = start + i;
            const int64_t at = int64_t(table[key / g.block_size]) * block_elements + key % g.block_size * dim;
            key_rows[i] = all_keys + at;
            value_rows[i] = all_values + at;
        }
        pack_keys(key_rows, count, lanes, s.keys);
        pack_values<E>(value_rows, count, padded, dim, padded_dim, s.values);
        for (int64_t r = 0; r < rows; r += kRows) {
            const int n = int(least(kRows, rows - r));
            strip<E>(n, reinterpret_cast<const char*>(s.q + r * lanes), lanes * 4, s.keys, kKeys, lanes, s.scores + r * kKeys, kKeys, padded,
                     false);
            for (int64_t i = r; i < r + n; i++) {
                const int64_t position = first_position + i / group;
                const int64_t first_seen = g.window > 0 ? position - g.window + 1 - start : 0;
                const float factor = weigh(s.scores + i * kKeys, s.weights + i * kKeys, vectors, g.scale, g.softcap, first_seen,
                                           position - start, s.top[i], s.total[i]);
                if (factor != 1.0f)
                    for (int64_t d = 0; d < padded_dim; d += Vec::width)
                        (Vec::load(s.out + i * padded_dim + d) * Vec::all(factor)).store(s.out + i * padded_dim + d);
            }
            strip<E>(n, reinterpret_cast<const char*>(s.weights + r * kKeys), kKeys * int64_t(sizeof(T)), s.values, padded_dim,
                     padded / E::lane, s.out + r * padded_dim, padded_dim, padded_dim, true);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        const float inverse = 1.0f / s.total[r];
        float* row = s.out + r * padded_dim;
        for (int64_t d = 0; d < padded_dim; d += Vec::width) (Vec::load(row + d) * Vec::all(inverse)).store(row + d);
        T* to = static_cast<T*>(g.out) + ((begin + first_token + r / group) * g.heads + kv_head * group + r % group) * dim;
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
        for (;;) {
            // From the last: late tiles of a long prompt see most keys, so the longest tasks go first.
            const int64_t task = tasks - 1 - __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED);
            if (task < 0) break;
            const int64_t tile_index = task / g.kv_heads;
            int64_t low = 0, high = g.sequences - 1;
            while (low < high) {
                const int64_t middle = (low + high + 1) / 2;
                if (tiles_before[middle] <= tile_index) low = middle;
                else high = middle - 1;
            }
            const int64_t first = (tile_index - tiles_before[low]) * tile_tokens;
            const int64_t tokens = least(tile_tokens, g.query_start[low + 1] - g.query_start[low] - first);
            attend<E>(g, low, first, tokens, task % g.kv_heads, scratch);
        }
    }
    free(tiles_before);
}

}  // namespace inferd::INFERD_LEVEL
