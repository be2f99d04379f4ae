// Ranks as threads, which meet in one memory, for ThreadSanitizer. Prints the sum that every rank found.
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "meeting.h"

using namespace inferd;

static void add_parts(Dtype, const float* const* parts, int64_t num_parts, void* total, int64_t count, int) {
    for (int64_t j = 0; j < count; j++) {
        float v = parts[0][j];
        for (int64_t i = 1; i < num_parts; i++) v += parts[i][j];
        static_cast<float*>(total)[j] = v;
    }
}

int main() {
    constexpr int64_t kRanks = 3, kRounds = 200;
    Kernels kernels{};
    kernels.add_parts = add_parts;
    char* const memory = static_cast<char*>(aligned_alloc(4096, size_t(Meeting::bytes(kRanks))));
    memset(memory, 0, size_t(Meeting::bytes(kRanks)));
    std::vector<double> found(kRanks);
    std::vector<std::thread> threads;
    for (int64_t place = 0; place < kRanks; place++)
        threads.emplace_back([&, place] {
            Meeting meeting(memory, kRanks, place, place == 0 ? 0 : 20e-6, 60);  // one sleeps, the others look first
            for (int64_t round = 0; round < kRounds; round++) {
                std::vector<float> part(size_t(1 + round % 97), float(place + 1)), total(part.size()), parts(part.size() * kRanks);
                meeting.sum(kernels, part.data(), int64_t(part.size()), Dtype::f32, total.data(), 1);
                meeting.gather(part.data(), int64_t(part.size() * 4), place == 0 ? parts.data() : nullptr);
                for (const float number : total) found[size_t(place)] += double(number);
                meeting.concat(part.data(), int64_t(part.size()), 4, parts.data());
                for (size_t i = 0; i < parts.size(); i++)
                    if (parts[i] != float(i % kRanks + 1)) abort();
                if (meeting.waits_in() != 0) abort();
            }
        });
    for (std::thread& thread : threads) thread.join();
    for (const double sum : found) printf("%.0f\n", sum);
    free(memory);
}
