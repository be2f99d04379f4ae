// What followed the last time a text ended like this: engine/prompt_lookup.py, whose twin this is, without Python between tokens.
#pragma once
#include <algorithm>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

namespace inferd {

class Lookup {
  public:
    Lookup(int64_t shortest_kept, int64_t longest, int64_t most_looked_at)
        : shortest_kept_(shortest_kept), longest_(longest), most_looked_at_(most_looked_at) {}

    // Takes what the text has more, and returns how many tokens are equal and `count` tokens that followed them.
    std::pair<int64_t, std::vector<int64_t>> find(const std::vector<int64_t>& more, int64_t count) {
        for (const int64_t token : more) append(token);
        const int64_t end = int64_t(tokens_.size()) - 1;
        int64_t best = 0, best_at = 0;
        int64_t at = end < 1 ? 0 : before_[size_t(end)];
        for (int64_t i = 0; i < most_looked_at_ && at && best < longest_; i++, at = before_[size_t(at)]) {
            int64_t length = 2;
            while (length < longest_ && length <= at && token(at - length) == token(end - length)) length++;
            if (length > best) best = length, best_at = at;
        }
        const int64_t resumed = quote_at_ + end - quote_end_;
        const bool is_resumed = !best && quote_at_ && resumed < end;
        if (is_resumed) best = 1, best_at = resumed;
        quote_at_ = best >= shortest_kept_ ? best_at : 0, quote_end_ = end;
        std::vector<int64_t> found;
        if (!best || count <= 0) return {best, found};
        for (int64_t i = 0; i < count; i++) {
            const int64_t from = best_at + 1 + i;
            found.push_back(from <= end ? token(from) : found[size_t(i - (end - best_at))]);
        }
        return {best, found};
    }

  private:
    int64_t token(int64_t at) const { return tokens_[size_t(at)]; }
    void append(int64_t token) {
        const int64_t at = int64_t(tokens_.size());
        tokens_.push_back(token);
        int64_t before = 0;
        if (at) {
            int64_t& last = last_[uint64_t(tokens_[size_t(at - 1)]) << 32 | uint64_t(token)];
            before = std::exchange(last, at);
        }
        before_.push_back(before);
    }

    const int64_t shortest_kept_, longest_, most_looked_at_;
    std::vector<int64_t> tokens_, before_;         // by position: where the pair that ends here ended before; 0: nowhere
    std::unordered_map<uint64_t, int64_t> last_;  // pair -> where it ended last
    int64_t quote_at_ = 0, quote_end_ = 0;        // where the place that was last found, and the text, ended then
};

}  // namespace inferd
