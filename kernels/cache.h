// The layout of the paged KV cache in memory: written by rows, read by tiles of keys.
//
// A block holds the data of one key/value head in the order in which products read it, in lanes of 32 bits (one float,
// two bf16 or four bytes). Keys are [head_dim / lane][block_size][lane]: a vector holds one lane of several keys. Values
// are [block_size / lane][head_dim][lane]: a lane holds several keys of one column. So reading needs no transposition.
// Keys of 8 bits are stored with 128 added, because products of bytes need one unsigned side; each row of `quantised`
// columns has a scale (symmetric, Dettmers et al. 2022).
#pragma once
#include "gemm.h"

namespace inferd::INFERD_LEVEL {

constexpr int64_t kKeys = 64;   // keys of a tile
constexpr int64_t kBunch = 16;  // keys that lie side by side where a block holds a multiple of them
constexpr int64_t kBunches = kKeys / kBunch;

// What a cell of the cache is.
template <class E>
struct Plain {
    using Cell = typename E::type;
    static constexpr int lane = E::lane;
    static constexpr bool bytes = false;
};
struct ByteCells {
    using Cell = int8_t;
    static constexpr int lane = 4;
    static constexpr bool bytes = true;
};

// Whole numbers in -127..127 for n values, and their scale. A NaN or infinity makes the scale NaN.
template <class T>
inline float to_bytes(const T* x, int64_t n, int8_t* bytes) {
    float highest = 0, poison = 0;
    for (int64_t i = 0; i < n; i++) {
        const float value = to_float(x[i]), size = value < 0 ? -value : value;
        highest = size > highest ? size : highest;
        poison += value * 0.0f;
    }
    const float inverse = highest > 0 ? 127.0f / highest : 0.0f;
    float part[Vec::width];
    for (int64_t i = 0; i < n; i += Vec::width) {
        const int64_t count = least(Vec::width, n - i);
        for (int64_t j = 0; j < Vec::width; j++) part[j] = j < count ? to_float(x[i + j]) : 0.0f;
        Vec::round(Vec::load(part) * Vec::all(inverse)).store(part);
        // Where the scale is NaN any byte may be written.
        for (int64_t j = 0; j < count; j++) bytes[i + j] = part[j] >= -127.0f && part[j] <= 127.0f ? int8_t(part[j]) : int8_t(0);
    }
    return highest / 127.0f + poison;
}

template <class F>
struct Cache {
    const AttentionArgs& g;
    const int64_t dim = g.head_dim, size = g.block_size, lanes = dim / F::lane, value_rows = divide_up(size, F::lane);
    const int64_t padded_dim = divide_up(dim, Vec::width) * Vec::width;
    // Whether tiles are read in place; otherwise they are gathered first.
    const bool in_place = size % kBunch == 0 && dim % Vec::width == 0;

    uint32_t* keys_of(int64_t block, int64_t head) const {
        return static_cast<uint32_t*>(g.keys) + (block * g.kv_heads + head) * lanes * size;
    }
    uint32_t* values_of(int64_t block, int64_t head) const {
        return static_cast<uint32_t*>(g.values) + (block * g.kv_heads + head) * value_rows * dim;
    }
    float* key_scales_of(int64_t block, int64_t head) const { return g.key_scales + (block * g.kv_heads + head) * g.key_groups * size; }
    float* value_scales_of(int64_t block, int64_t head) const { return g.value_scales + (block * g.kv_heads + head) * size; }

    // Prefetches the cache lines that `write` will touch.
    void prepare(int64_t row, int64_t head) const {
        const int64_t block = g.slots[row] / size, offset = g.slots[row] % size;
        const uint32_t *keys = keys_of(block, head) + offset, *values = values_of(block, head) + offset / F::lane * dim;
        for (int64_t l = 0; l < lanes; l++) __builtin_prefetch(keys + l * size, 1, 2);
        for (int64_t d = 0; d < dim; d += 16) __builtin_prefetch(values + d, 1, 2);
        if constexpr (F::bytes) {
            for (int64_t i = 0; i < g.key_groups; i++) __builtin_prefetch(key_scales_of(block, head) + i * size + offset, 1, 2);
            __builtin_prefetch(value_scales_of(block, head) + offset, 1, 2);
        }
    }

    // The key and the value of one row and head to its slot.
    template <class T>
    void write(int64_t row, int64_t head) const {
        const int64_t block = g.slots[row] / size, offset = g.slots[row] % size;
        const T* k = static_cast<const T*>(g.k) + row * g.k_stride + head * dim;
        const T* v = static_cast<const T*>(g.v) + row * g.v_stride + head * dim;
        uint32_t* to = keys_of(block, head) + offset;
        typename F::Cell* cells = reinterpret_cast<typename F::Cell*>(values_of(block, head) + offset / F::lane * dim) + offset % F::lane;
        if constexpr (F::bytes) {
            alignas(64) int8_t bytes[kMaxDim];
            const int64_t columns = dim / g.key_groups;
            for (int64_t i = 0; i < g.key_groups; i++)
                key_scales_of(block, head)[i * size + offset] = to_bytes(k + i * columns, columns, bytes + i * columns);
            for (int64_t l = 0; l < lanes; l++) to[l * size] = lane_at(bytes + l * F::lane) ^ 0x80808080u;
            value_scales_of(block, head)[offset] = to_bytes(v, dim, bytes);
            for (int64_t d = 0; d < dim; d++) cells[d * F::lane] = bytes[d];
        } else {
            for (int64_t l = 0; l < lanes; l++) to[l * size] = lane_at(k + l * F::lane);
            for (int64_t d = 0; d < dim; d++) cells[d * F::lane] = v[d];
        }
    }
};

// One tile of keys of one sequence and head.
struct Tile {
    int64_t sequence, kv_head, start, count;
};

// The position of a tile: bunches of keys and the steps between their lanes. After the last bunch its address is repeated.
struct Found {
    const uint32_t *keys[kBunches], *values[kBunches];
    const float *key_scales[kBunches], *value_scales[kBunches];
    int64_t key_step, value_step, scale_step;

    // Vector j of the tile's keys, in their first lane.
    const uint32_t* key_vector(int64_t j) const { return keys[j * Vec::width / kBunch] + j * Vec::width % kBunch; }
    const float* key_scale(int64_t j, int64_t part) const {
        return key_scales[j * Vec::width / kBunch] + j * Vec::width % kBunch + part * scale_step;
    }
    const float* value_scale(int64_t j) const { return value_scales[j * Vec::width / kBunch] + j * Vec::width % kBunch; }
};

// Memory for one tile that is not read in place.
template <class F>
struct Gathered {
    uint32_t* keys;     // [lanes][kKeys]
    uint32_t* values;   // [kKeys / lane][padded_dim]
    float* key_scales;  // [key_groups][kKeys]
    float* value_scales;  // [kKeys]
};

// Bunch `to` of what is found: the 16 keys of a sequence from position `at` on.
template <class F>
inline void find_bunch(const Cache<F>& cache, int64_t sequence, int64_t kv_head, int64_t at, int64_t to, Found& found) {
    const int64_t block = cache.g.block_table[sequence * cache.g.table_stride + at / cache.size], offset = at % cache.size;
    found.keys[to] = cache.keys_of(block, kv_head) + offset;
    found.values[to] = cache.values_of(block, kv_head) + offset / F::lane * cache.dim;
    if constexpr (F::bytes) {
        found.key_scales[to] = cache.key_scales_of(block, kv_head) + offset;
        found.value_scales[to] = cache.value_scales_of(block, kv_head) + offset;
    }
}

template <class F>
inline void find(const Cache<F>& cache, const Tile& tile, Found& found) {
    found.key_step = found.scale_step = cache.size;
    found.value_step = cache.dim;
    const int64_t last = divide_up(tile.count, kBunch) - 1;
    for (int64_t i = 0; i < kBunches; i++) find_bunch(cache, tile.sequence, tile.kv_head, tile.start + least(i, last) * kBunch, i, found);
}

template <class F>
inline void gather(const Cache<F>& cache, const Tile& tile, const Gathered<F>& to, Found& found) {
    const AttentionArgs& g = cache.g;
    const int32_t* table = g.block_table + tile.sequence * g.table_stride;
    const int64_t rows = kKeys / F::lane;
    memset(to.values, 0, size_t(rows * cache.padded_dim) * 4);
    for (int64_t key = 0; key < kKeys; key++) {
        const int64_t at = tile.start + least(key, tile.count - 1), block = table[at / cache.size], offset = at % cache.size;
        const uint32_t* k = cache.keys_of(block, tile.kv_head) + offset;
        for (int64_t l = 0; l < cache.lanes; l++) to.keys[l * kKeys + key] = k[l * cache.size];
        if (key >= tile.count) continue;  // its weight is 0, and the value is set to 0 because a block may hold anything there
        using Cell = typename F::Cell;
        const Cell* v = reinterpret_cast<const Cell*>(cache.values_of(block, tile.kv_head) + offset / F::lane * cache.dim) + offset % F::lane;
        Cell* cells = reinterpret_cast<Cell*>(to.values + key / F::lane * cache.padded_dim) + key % F::lane;
        for (int64_t d = 0; d < cache.dim; d++) cells[d * F::lane] = v[d * F::lane];
        if constexpr (F::bytes) {
            for (int64_t i = 0; i < g.key_groups; i++)
                to.key_scales[i * kKeys + key] = cache.key_scales_of(block, tile.kv_head)[i * cache.size + offset];
            to.value_scales[key] = cache.value_scales_of(block, tile.kv_head)[offset];
        }
    }
    found.key_step = found.scale_step = kKeys;
    found.value_step = cache.padded_dim;
    for (int64_t i = 0; i < kBunches; i++) {
        found.keys[i] = to.keys + i * kBunch;
        found.values[i] = to.values + i * (kBunch / F::lane) * cache.padded_dim;
        found.key_scales[i] = to.key_scales + i * kBunch;
        found.value_scales[i] = to.value_scales + i * kBunch;
    }
}

}  // namespace inferd::INFERD_LEVEL
