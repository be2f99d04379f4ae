// A token for each row of logits: the best, or a draw from what temperature, min-p, top-k and top-p leave.
//
// The vocabulary is never sorted. One pass stores the greatest logit of each block of 128; later passes read only blocks
// that can hold the searched logit. The k-th largest logit and the end of the nucleus are found by partitioning
// candidates (quickselect, Hoare 1961; for the nucleus by mass instead of by number). A draw inverts the cumulative
// distribution in the vocabulary's order; a row's token does not depend on the other rows. A mask is applied while the
// first pass reads the logits.
#pragma once
#include <algorithm>

#include "gemm.h"
#include "scratch.h"

namespace inferd::INFERD_LEVEL {

constexpr int64_t kBlock = 128;  // logits summed together before the cumulative sum
constexpr int64_t kBands = 4096;  // of the histogram over a flat distribution: 32 nats
constexpr float kBandsPerNat = 128;

// A token that may be left, its logit and weight. Of this level alone, so that what <algorithm> makes of it is too.
struct Candidate {
    float logit, weight;
};
struct Likelier {
    bool operator()(const Candidate& a, const Candidate& b) const { return a.logit > b.logit; }
};

struct SampleRow {
    const float* x;
    int64_t count, blocks;
    float best, temperature;
    float* tops;       // [blocks] greatest logit of each
    double* ends;      // [blocks] sums of weights up to the end of each
    Scratch& room;        // of candidates

    // Logits of a block, relative to the best and after temperature; -infinity after the last one.
    void scaled(int64_t block, float* y) const {
        const int64_t first = block * kBlock, n = least(kBlock, count - first);
        const Vec top = Vec::all(best), heat = Vec::all(temperature);
        if (n < kBlock) {
            for (int64_t i = 0; i < kBlock; i++) y[i] = i < n ? x[first + i] : kNone;
            for (int64_t i = 0; i < kBlock; i += Vec::width) ((Vec::load(y + i) - top) / heat).store(y + i);
        } else
            for (int64_t i = 0; i < kBlock; i += Vec::width) ((Vec::load(x + first + i) - top) / heat).store(y + i);
    }
    float scaled_top(int64_t block) const { return (tops[block] - best) / temperature; }

    // Weights of a block's tokens whose logits are at least `floor`, and their sum.
    float weigh(int64_t block, float floor, float* weights) const {
        scaled(block, weights);
        Vec sum = Vec::zero();
        for (int64_t i = 0; i < kBlock; i += Vec::width) {
            const Vec y = Vec::load(weights + i);
            const Vec w = Vec::where_less(y, Vec::all(floor), Vec::zero(), exp(y));
            w.store(weights + i);
            sum = sum + w;
        }
        return sum.sum();
    }

    // All tokens whose logits are at least `floor`.
    int64_t gather(float floor, Candidate*& found) const {
        alignas(64) float y[kBlock], weights[kBlock];
        int64_t room_for = 0, n = 0;
        for (int64_t b = 0; b < blocks; b++) room_for += scaled_top(b) >= floor ? kBlock : 0;
        found = room.take<Candidate>(room_for + 1);
        for (int64_t b = 0; b < blocks; b++) {
            if (!(scaled_top(b) >= floor)) continue;
            scaled(b, y);
            for (int64_t i = 0; i < kBlock; i += Vec::width) exp(Vec::load(y + i)).store(weights + i);
            for (int64_t i = 0; i < kBlock; i++) {
                found[n] = {y[i], weights[i]};
                n += y[i] >= floor && y[i] > kNone;
            }
        }
        return n;
    }

    // A logit that at least `wanted` tokens reach: so many blocks do.
    float reached_by(int64_t wanted, float* spare) const {
        if (wanted > blocks) return kNone;
        Candidate* all = reinterpret_cast<Candidate*>(spare);
        for (int64_t b = 0; b < blocks; b++) all[b] = {scaled_top(b), 0.0f};
        std::nth_element(all, all + wanted - 1, all + blocks, Likelier());
        return all[wanted - 1].logit;
    }

    float kth(int64_t k, float* spare) const {
        Candidate* found;
        const int64_t n = gather(reached_by(k, spare), found);
        if (n < k) return kNone;  // the others are banned
        std::nth_element(found, found + k - 1, found + n, Likelier());
        return found[k - 1].logit;
    }

    // The logit with which the mass of the likeliest tokens reaches `wanted`; false where all of them do not.
    static bool reach(Candidate* from, int64_t n, double wanted, float& logit) {
        double above = 0;
        while (n > 0) {
            const float a = from[0].logit, b = from[n / 2].logit, c = from[n - 1].logit;
            const float pivot = a > b ? (b > c ? b : a > c ? c : a) : (a > c ? a : b > c ? c : b);
            // Greater ones to the front, equal ones behind them.
            int64_t greater = 0, at = 0, less = n;
            double mass = 0, equal = 0;
            while (at < less) {
                const Candidate one = from[at];
                if (one.logit > pivot) {
                    mass += one.weight;
                    from[at++] = from[greater];
                    from[greater++] = one;
                } else if (one.logit < pivot) {
                    from[at] = from[--less];
                    from[less] = one;
                } else {
                    equal += one.weight;
                    at++;
                }
            }
            if (above + mass >= wanted && greater) {
                n = greater;
            } else if (above + mass + equal >= wanted) {
                logit = pivot;
                return true;
            } else {
                above += mass + equal;
                from += less;
                n -= less;
            }
        }
        return false;
    }

    // The least logit that top-p leaves of those that are at least `floor`.
    float nucleus(float floor, double top_p, float* spare) const {
        Candidate* found;
        double total = 0;
        float logit = floor;
        if (floor > kNone) {
            const int64_t n = gather(floor, found);
            for (int64_t i = 0; i < n; i++) total += found[i].weight;
            reach(found, n, top_p * total, logit);
            return logit;
        }
        alignas(64) float weights[kBlock];
        for (int64_t b = 0; b < blocks; b++) total += ends[b] = weigh(b, kNone, weights);
        const double wanted = top_p * total;
        // Nearly always the nucleus ends among few tokens: those that reach the top of the best blocks. So few of these
        // are tried first, and none whose blocks have too little mass.
        for (int64_t tried = 4; tried <= 256; tried *= 8) {
            const float limit = reached_by(least(tried, blocks), spare);
            double most = 0, mass = 0;
            for (int64_t b = 0; b < blocks; b++) most += scaled_top(b) >= limit ? ends[b] : 0;
            if (most >= wanted) {
                const int64_t n = gather(limit, found);
                for (int64_t i = 0; i < n; i++) mass += found[i].weight;
                if (mass >= wanted) {
                    reach(found, n, wanted, logit);
                    return logit;
                }
            }
            if (tried >= blocks) break;
        }
        return nucleus_of_flat(top_p);
    }

    // A flat distribution: a histogram finds the narrow band of logits in which the nucleus ends.
    float nucleus_of_flat(double top_p) const {
        alignas(64) float y[kBlock], weights[kBlock];
        Candidate* found = room.take<Candidate>(count + kBands);
        double* masses = reinterpret_cast<double*>(found + count);
        for (int64_t i = 0; i < kBands; i++) masses[i] = 0;
        const auto band_of = [](float logit) { return logit > -float(kBands) / kBandsPerNat ? int64_t(logit * -kBandsPerNat) : kBands - 1; };
        for (int64_t b = 0; b < blocks; b++) {
            scaled(b, y);
            for (int64_t i = 0; i < kBlock; i += Vec::width) exp(Vec::load(y + i)).store(weights + i);
            for (int64_t i = 0; i < kBlock; i++) masses[band_of(y[i])] += weights[i];
        }
        double total = 0, above = 0;
        for (int64_t i = 0; i < kBands; i++) total += masses[i];
        int64_t band = 0;
        while (band < kBands - 1 && above + masses[band] < top_p * total) above += masses[band++];
        int64_t n = 0;
        float logit = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (band_of(scaled_top(b)) > band) continue;
            scaled(b, y);
            for (int64_t i = 0; i < kBlock; i++)
                if (y[i] > kNone && band_of(y[i]) == band) found[n++] = {y[i], 0.0f};
        }
        for (int64_t i = 0; i < n; i += Vec::width) {
            float part[Vec::width] = {};
            for (int64_t j = 0; j < least(n - i, Vec::width); j++) {
                part[j] = found[i + j].logit;
                logit = part[j] < logit ? part[j] : logit;
            }
            exp(Vec::load(part)).store(part);
            for (int64_t j = 0; j < least(n - i, Vec::width); j++) found[i + j].weight = part[j];
        }
        reach(found, n, top_p * total - above, logit);  // where rounding lets it fail, all of the band is left
        return logit;
    }

    int64_t draw(float floor, double uniform) const {
        alignas(64) float weights[kBlock];
        double total = 0;
        for (int64_t b = 0; b < blocks; b++) {
            if (scaled_top(b) >= floor) total += weigh(b, floor, weights);
            ends[b] = total;
        }
        // Rounding must not carry the target to the total: that would be past the last token.
        const double end = total * (1.0 - 0x1p-52), target = uniform * total < end ? uniform * total : end;
        int64_t block = 0;
        while (block < blocks - 1 && ends[block] <= target) block++;
        weigh(block, floor, weights);
        double sum = block ? ends[block - 1] : 0;
        int64_t last = 0;
        for (int64_t i = 0; i < kBlock; i++) {
            if (!(weights[i] > 0)) continue;
            last = i;
            sum += weights[i];
            if (sum > target) break;
        }
        return block * kBlock + last;
    }

    static constexpr float kNone = -__builtin_inff();
};

constexpr int64_t kWord = 32;  // tokens of a word of a mask
struct WordBits {
    uint32_t bit[kWord];
    constexpr WordBits() : bit() {
        for (int64_t i = 0; i < kWord; i++) bit[i] = uint32_t(1) << i;
    }
};
constexpr WordBits kWordBits;

// The logits of `n` tokens from `first` on, a multiple of a word, become -infinity where the mask has no bit.
inline void ban(float* x, int64_t first, int64_t n, const uint32_t* mask, int64_t words) {
    for (int64_t i = 0; i < n; i += kWord) {
        const int64_t word = (first + i) / kWord;
        const uint32_t bits = word < words ? mask[word] : 0;
        if (bits == ~uint32_t(0)) continue;
        float* const y = x + first + i;
        if (n - i >= kWord)
            for (int64_t j = 0; j < kWord; j++) y[j] = bits & kWordBits.bit[j] ? y[j] : SampleRow::kNone;
        else
            for (int64_t j = 0; j < n - i; j++) y[j] = bits & kWordBits.bit[j] ? y[j] : SampleRow::kNone;
    }
}

inline float higher(float a, float b) { return a > b ? a : b; }

inline void sample(const SampleArgs& g, int threads) {
    const int64_t blocks = divide_up(g.vocab, kBlock);
#pragma omp parallel num_threads(threads) if (g.rows > 1)
    {
        static thread_local Scratch tops_room, ends_room, spare_room, candidates_room;
        float* const tops = tops_room.take<float>(blocks);
        double* const ends = ends_room.take<double>(blocks);
        float* const spare = spare_room.take<float>(2 * blocks);
#pragma omp for schedule(dynamic, 1)
        for (int64_t r = 0; r < g.rows; r++) {
            float* const x = g.logits + r * g.stride;
            const uint32_t* const mask = g.masks && g.mask_of[r] >= 0 ? g.masks + g.mask_of[r] * g.mask_words : nullptr;
            const Vec endless = Vec::all(__builtin_inff());
            Vec odd = Vec::zero();  // counts logits that are neither finite nor banned
            float best = SampleRow::kNone;
            for (int64_t b = 0; b < blocks; b++) {
                const int64_t first = b * kBlock, n = least(kBlock, g.vocab - first);
                alignas(64) float part[kBlock];
                const float* from = x + first;
                if (mask) ban(x, first, n, mask, g.mask_words);
                if (n < kBlock) {
                    for (int64_t i = 0; i < kBlock; i++) part[i] = i < n ? from[i] : SampleRow::kNone;
                    from = part;
                }
                Vec top = Vec::all(SampleRow::kNone);
                for (int64_t i = 0; i < kBlock; i += Vec::width) {
                    const Vec v = Vec::load(from + i);
                    top = Vec::max(top, v);
                    odd = odd + Vec::where_less(v, endless, Vec::zero(), Vec::all(1.0f));
                }
                tops[b] = top.top();
                best = tops[b] > best ? tops[b] : best;
            }
            g.best[r] = odd.sum() > 0 ? __builtin_nanf("") : best;
            g.tokens[r] = 0;
            if (odd.sum() > 0 || best == SampleRow::kNone) continue;
            if (g.temperature[r] == 0) {
                int64_t at = 0;
                while (tops[at] != best) at++;
                at *= kBlock;
                while (x[at] != best) at++;
                g.tokens[r] = at;
                continue;
            }
            const SampleRow row{x, g.vocab, blocks, best, g.temperature[r], tops, ends, candidates_room};
            float floor = g.floors[r];
            if (g.top_k[r] > 0 && g.top_k[r] < g.vocab) floor = higher(floor, row.kth(g.top_k[r], spare));
            if (g.top_p[r] < 1) floor = higher(floor, row.nucleus(floor, g.top_p[r], spare));
            g.tokens[r] = row.draw(floor, g.draws[r]);
        }
    }
}

}  // namespace inferd::INFERD_LEVEL
