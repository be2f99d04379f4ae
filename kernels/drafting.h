// Guessing with a small decoder: all passes that are worth it in one call, each over the tokens that the pass before guessed.
//
// For a model of a few megabytes, calling a pass from Python takes longer than its products. So neither arrays nor decisions
// return to Python between passes. Without kernels, engine/speculation/draft_passes.py decides by the same rule.
#pragma once
#include <algorithm>
#include <cmath>
#include <limits>
#include <stdexcept>
#include <vector>

#include "decoder.h"

namespace inferd {

// When a token is kept and a pass follows (engine/speculation/gain.py has the reasons). A token's chance is that of its confidence
// (`chances[i]` from `bounds[i - 1]` on) times those before it.
struct DraftRule {
    std::vector<float> bounds, chances;
    double next_chance;      // of a token, given only that those before it are right
    double tokens, seconds;  // expected of the step so far, without these guesses
    double row_s, pass_s;    // seconds of one more row of the step, and of a pass
    double least, least_per_s;  // the least chance of any token, and more for each second that it takes

    float chance(float sureness) const { return chances[size_t(std::upper_bound(bounds.begin(), bounds.end(), sureness) - bounds.begin())]; }
    // The least chance with which a token of so many seconds does not make the step slower per token.
    double bar(double cost_s) const { return std::max(least, cost_s * std::max(least_per_s, tokens / seconds)); }
    void add(double chance) { tokens += chance, seconds += row_s; }
};

// For each sequence: tokens that are known and not computed, the position of the first of them, the blocks (which also hold
// the guesses), and the most guesses.
struct DraftWork {
    std::vector<std::vector<int64_t>> pending, blocks;
    std::vector<int64_t> start, most;
};

struct Drafted {
    std::vector<std::vector<int64_t>> tokens;
    // For each pass over a sequence, whether its token was kept or not: p(first) / (p(first) + p(second)), 0.5 to 1.
    std::vector<std::vector<float>> surenesses;
    int64_t passes = 0;
};

class Drafter {
  public:
    // dtype, hidden: of the decoder. vocab: logits behind it belong to no token. divisor, softcap: of logits; 1 and 0: none.
    Drafter(Decoder& decoder, const Weights& head, Dtype dtype, int64_t hidden, int64_t vocab, int64_t block_size, float divisor, float softcap)
        : decoder_(decoder), head_(head), dtype_(dtype), hidden_size_(hidden), vocab_(vocab), block_size_(block_size), divisor_(divisor),
          softcap_(softcap) {}
    Drafter(const Drafter&) = delete;

    Drafted guess(const Kernels& k, const DraftWork& work, DraftRule rule, int threads) {
        const size_t count = work.pending.size();
        Drafted found{std::vector<std::vector<int64_t>>(count), std::vector<std::vector<float>>(count)};
        if (count == 0) return found;
        check(work);
        std::vector<size_t> going(count);
        std::vector<double> chance(count, 1.0);
        for (size_t i = 0; i < count; i++) going[i] = i;
        gather(work, found, going, true);
        while (true) {
            compute(k, threads);
            found.passes++;
            rule.seconds += rule.pass_s;
            double expected = 0;
            std::vector<size_t> alive;
            for (size_t row = 0; row < going.size(); row++) {
                const size_t i = going[row];
                found.surenesses[i].push_back(sureness_[row]);
                chance[i] *= rule.chance(sureness_[row]);
                if (!(chance[i] >= rule.bar(rule.row_s))) continue;
                rule.add(chance[i]);
                found.tokens[i].push_back(token_[row]);
                if (int64_t(found.tokens[i].size()) >= work.most[i]) continue;
                expected += chance[i];
                alive.push_back(i);
            }
            const double share = 1.0 / double(std::max<size_t>(alive.size(), 1));
            if (alive.empty() || !(rule.next_chance * expected * share >= rule.bar(rule.row_s + rule.pass_s * share))) return found;
            going = std::move(alive);
            gather(work, found, going, false);
        }
    }

  private:
    void check(const DraftWork& work) const {
        const size_t count = work.pending.size();
        bool is_whole = work.blocks.size() == count && work.start.size() == count && work.most.size() == count;
        for (size_t i = 0; is_whole && i < count; i++)
            is_whole = !work.pending[i].empty() && work.most[i] > 0 &&
                       work.start[i] + int64_t(work.pending[i].size()) + work.most[i] - 1 <= int64_t(work.blocks[i].size()) * block_size_;
        if (!is_whole) throw std::invalid_argument("each sequence needs pending tokens, a guess at least, and blocks that hold both");
    }

    // The rows of a pass: the pending tokens of each sequence, or its latest guess.
    void gather(const DraftWork& work, const Drafted& found, const std::vector<size_t>& going, bool is_first) {
        ids_.clear(), positions_.clear(), slots_.clear(), wanted_.clear(), lengths_.clear();
        starts_.assign(1, 0);
        stride_ = 0;
        for (const size_t i : going) stride_ = std::max(stride_, work.blocks[i].size());
        table_.assign(going.size() * stride_, 0);
        for (size_t row = 0; row < going.size(); row++) {
            const size_t i = going[row];
            const std::vector<int64_t>& blocks = work.blocks[i];
            if (is_first)
                ids_.insert(ids_.end(), work.pending[i].begin(), work.pending[i].end());
            else
                ids_.push_back(found.tokens[i].back());
            const int64_t end = work.start[i] + int64_t(work.pending[i].size() + found.tokens[i].size());
            for (int64_t at = is_first ? work.start[i] : end - 1; at < end; at++) {
                positions_.push_back(at);
                slots_.push_back(blocks[size_t(at / block_size_)] * block_size_ + at % block_size_);
            }
            wanted_.push_back(int64_t(ids_.size()) - 1);
            starts_.push_back(int32_t(ids_.size()));
            lengths_.push_back(int32_t(end));
            for (size_t b = 0; b < blocks.size(); b++) table_[row * stride_ + b] = int32_t(blocks[b]);
        }
    }

    // The likeliest next token of each sequence, and its confidence.
    void compute(const Kernels& k, int threads) {
        const int64_t rows = int64_t(ids_.size()), count = int64_t(wanted_.size()), item = dtype_ == Dtype::f32 ? 4 : 2;
        hidden_.resize(size_t(rows * hidden_size_ * item));
        decoder_.forward(k,
                         {ids_.data(), positions_.data(), slots_.data(), starts_.data(), lengths_.data(), table_.data(), int64_t(stride_), count,
                          rows, wanted_.data(), rows > count ? count : -1},
                         nullptr, hidden_.data(), threads);
        const size_t bytes = size_t(hidden_size_ * item);
        for (int64_t i = 0; i < count; i++)
            if (wanted_[size_t(i)] != i) memmove(&hidden_[size_t(i) * bytes], &hidden_[size_t(wanted_[size_t(i)]) * bytes], bytes);
        logits_.resize(size_t(count * head_.out));
        k.linear(head_, {dtype_, hidden_.data(), hidden_size_, Dtype::f32, logits_.data(), head_.out, count, Activation::none}, threads);
        token_.resize(size_t(count)), sureness_.resize(size_t(count));
        best(k, count, token_, first_, threads);
        for (int64_t i = 0; i < count; i++) logits_[size_t(i * head_.out + token_[size_t(i)])] = -std::numeric_limits<float>::infinity();
        best(k, count, next_, second_, threads);
        for (size_t i = 0; i < size_t(count); i++) {
            const float gap = shown(first_[i]) - shown(second_[i]);
            sureness_[i] = gap >= 0 ? 1.0f / (1.0f + std::exp(-gap)) : 0.5f;  // 0.5 where they are NaN
        }
    }

    void best(const Kernels& k, int64_t count, std::vector<int64_t>& tokens, std::vector<float>& values, int threads) {
        cold_.assign(size_t(count), 0.0f), floors_.assign(size_t(count), -std::numeric_limits<float>::infinity());
        none_.assign(size_t(count), 0), whole_.assign(size_t(count), 1.0);
        tokens.resize(size_t(count)), values.resize(size_t(count));
        k.sample({logits_.data(), head_.out, count, vocab_, cold_.data(), floors_.data(), none_.data(), whole_.data(), whole_.data(), values.data(),
                  tokens.data()},
                 threads);
    }

    float shown(float logit) const {
        logit /= divisor_;
        return softcap_ > 0 ? std::tanh(logit / softcap_) * softcap_ : logit;
    }

    Decoder& decoder_;
    const Weights head_;
    const Dtype dtype_;
    const int64_t hidden_size_, vocab_, block_size_;
    const float divisor_, softcap_;
    // Arrays of the current pass, reused by the next.
    std::vector<int64_t> ids_, positions_, slots_, wanted_, token_, next_, none_;
    std::vector<int32_t> starts_, lengths_, table_;
    size_t stride_ = 0;
    std::vector<char> hidden_;
    std::vector<float> logits_, first_, second_, sureness_, cold_, floors_;
    std::vector<double> whole_;
};

}  // namespace inferd
