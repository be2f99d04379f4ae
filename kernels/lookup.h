// The tokens that followed the last time a text ended like this. It computes the same as
// engine/speculation/prompt_lookup.py, without Python between tokens.
#pragma once
#include <algorithm>
#include <cstdint>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

namespace inferd {

// Parameters of the search; engine/speculation/prompt_lookup.py defines the terms.
struct LookupRule {
    int64_t returned, resumed, longest, kept, window, held, most_looked_at;
};

class Lookup {
  public:
    using Tokens = std::vector<int64_t>;
    explicit Lookup(const LookupRule& rule) : rule_(rule) {}

    // Appends the text's new tokens. Returns the number of equal tokens, `count` tokens that followed them, and the rival of each.
    std::tuple<int64_t, Tokens, Tokens> find(const Tokens& more, int64_t count) {
        for (const int64_t token : more) append(token);
        const int64_t end = int64_t(tokens_.size()) - 1;
        if (end - quote_end_ > rule_.held) quote_at_ = -1;
        look(end);
        if (places_.empty()) look_behind_quote(end);
        may_resume_ = false;
        Tokens found, rivals;
        if (places_.empty() || count <= 0) return {0, found, rivals};
        const Place best = chosen(end);
        if (best.length >= rule_.kept || (is_near(best) && best.length != rule_.resumed))
            quote_at_ = best.at, quote_end_ = end, may_resume_ = true;
        for (int64_t i = 0; i < count; i++) {
            const auto next = [&](int64_t at) { return at + 1 + i <= end ? token(at + 1 + i) : found[size_t(at + i - end)]; };
            const int64_t said = next(best.at);
            int64_t rival = 0;
            size_t left = 0;
            for (const Place& place : places_)
                if (next(place.at) == said) places_[left++] = place;
                else rival = std::max(rival, place.length);
            places_.resize(left);
            found.push_back(said), rivals.push_back(rival);
        }
        return {best.length, found, rivals};
    }

  private:
    struct Place {
        int64_t length, at;  // tokens that are equal, and where they end
    };

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
    // The latest occurrences of the text's end.
    void look(int64_t end) {
        places_.clear();
        int64_t at = end < 1 ? 0 : before_[size_t(end)];
        for (int64_t i = 0; i < rule_.most_looked_at && at; i++, at = before_[size_t(at)]) {
            int64_t length = 2;
            while (length < rule_.longest && length <= at && token(at - length) == token(end - length)) length++;
            places_.push_back({length, at});
        }
    }
    void look_behind_quote(int64_t end) {
        if (quote_at_ < 0) return;
        for (int64_t at = quote_at_ + 1; at < std::min(quote_at_ + rule_.window + 1, end); at++)
            if (token(at) == token(end)) return places_.push_back({rule_.returned, at});
        const int64_t at = quote_at_ + end - quote_end_;
        if (may_resume_ && at < end) places_.push_back({rule_.resumed, at});
    }
    Place chosen(int64_t end) const {
        int64_t longest = 0, most_votes = 0;
        for (const Place& place : places_) longest = std::max(longest, place.length);
        Place best{longest, 0}, near{longest, 0};
        for (const Place& place : places_) {
            if (place.length < longest) continue;
            if (quote_at_ >= 0 && place.at == quote_at_ + end - quote_end_) return place;
            if (is_near(place)) near = place;  // the earliest comes last
            int64_t votes = 0;
            for (const Place& other : places_) votes += other.length == longest && token(other.at + 1) == token(place.at + 1);
            if (votes > most_votes) most_votes = votes, best = place;
        }
        return near.at ? near : best;
    }
    bool is_near(const Place& place) const {
        return quote_at_ >= 0 && quote_at_ < place.at && place.at <= quote_at_ + rule_.window;
    }

    const LookupRule rule_;
    Tokens tokens_, before_;                      // by position: where the pair that ends here last ended before; 0: nowhere
    std::unordered_map<uint64_t, int64_t> last_;  // pair -> where it ended last
    std::vector<Place> places_;                   // latest first
    int64_t quote_at_ = -1, quote_end_ = 0;       // the ends of the followed place and of the text at that time
    bool may_resume_ = false;
};

}  // namespace inferd
