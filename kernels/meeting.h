// Where the processes of one machine that divide a layer put their parts together: memory that all of them map.
//
// Each rank has a counter and two slots:
//
//     | counter 0 | counter 1 | ... | slots 0: even, odd | slots 1: even, odd | ...
//
// An exchange has a number, which all ranks count alike. A rank copies its part into its slot of the number's parity, sets its
// counter to the number (release), and waits until every other counter has it (acquire). Then it reads the others' slots.
// A slot is written again two exchanges later. Its rank has then seen that all others began the exchange between, and
// each begins an exchange only when it has read the one before: so no slot changes while it is read, and two slots are enough.
#pragma once
#include <sched.h>
#include <sys/mman.h>
#include <time.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <vector>

#include "table.h"

namespace inferd {

// A part of a file, as memory.
class Mapping {
  public:
    // Throws std::system_error.
    Mapping(int file, int64_t offset, int64_t bytes) : bytes_(size_t(bytes)), at_(mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file, off_t(offset))) {
        if (at_ == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "the memory that ranks share could not be mapped");
    }
    Mapping(const Mapping&) = delete;
    ~Mapping() { munmap(at_, bytes_); }
    char* at() const { return static_cast<char*>(at_); }

  private:
    const size_t bytes_;
    void* const at_;
};

class Meeting {
  public:
    // Of the memory for so many ranks, all zeros at first.
    static int64_t bytes(int64_t ranks) { return ranks * (kCounterBytes + 2 * kSlotBytes); }

    // spin_s: time for which a rank looks for the others before it sleeps; timeout_s: time after which an exchange fails.
    Meeting(char* memory, int64_t ranks, int64_t place, double spin_s, double timeout_s)
        : ranks_(ranks), place_(place), spin_ns_(int64_t(spin_s * 1e9)), timeout_ns_(int64_t(timeout_s * 1e9)), memory_(memory), parts_(size_t(ranks)) {
        if (place < 0 || place >= ranks) throw std::invalid_argument("a place is one of 0 to ranks - 1");
    }
    Meeting(const Meeting&) = delete;

    // total [count] = the float parts [count] of all ranks, added in their order and rounded once.
    void sum(const Kernels& k, const float* part, int64_t count, Dtype dtype, void* total, int threads) {
        const int64_t item = dtype == Dtype::f32 ? 4 : 2, most = kSlotBytes / 4;
        for (int64_t at = 0; at < count; at += most) {
            const int64_t size = std::min(most, count - at);
            exchange(part + at, size * 4);
            k.add_parts(dtype, parts_.data(), ranks_, static_cast<char*>(total) + at * item, size, threads);
        }
    }
    // parts [ranks, bytes] = those of all ranks; null: not wanted here. Every rank calls it with as many bytes.
    void gather(const void* part, int64_t bytes, void* parts) {
        for (int64_t at = 0; at < bytes; at += kSlotBytes) {
            const int64_t size = std::min(kSlotBytes, bytes - at);
            exchange(static_cast<const char*>(part) + at, size);
            for (int64_t rank = 0; parts != nullptr && rank < ranks_; rank++)
                memcpy(static_cast<char*>(parts) + rank * bytes + at, parts_[size_t(rank)], size_t(size));
        }
    }
    // whole [rows, ranks, row_bytes] = the parts [rows, row_bytes] of all ranks side by side. Every rank calls it with as many bytes.
    void concat(const void* part, int64_t rows, int64_t row_bytes, void* whole) {
        const int64_t bytes = rows * row_bytes;
        for (int64_t at = 0; at < bytes; at += kSlotBytes) {
            const int64_t end = std::min(bytes, at + kSlotBytes);
            exchange(static_cast<const char*>(part) + at, end - at);
            for (int64_t rank = 0; rank < ranks_; rank++) {
                const char* from = reinterpret_cast<const char*>(parts_[size_t(rank)]);
                for (int64_t i = at; i < end;) {  // a piece may begin and end within a row
                    const int64_t row = i / row_bytes, column = i % row_bytes, size = std::min(row_bytes - column, end - i);
                    memcpy(static_cast<char*>(whole) + (row * ranks_ + rank) * row_bytes + column, from + (i - at), size_t(size));
                    i += size;
                }
            }
        }
    }
    // The number of the exchange in which this rank is, 0 for none. Another thread may ask.
    int64_t waits_in() const { return waits_in_.load(std::memory_order_relaxed); }

  private:
    static constexpr int64_t kSlotBytes = 1 << 20;  // a larger part is exchanged piece by piece
    static constexpr int64_t kCounterBytes = 4096;
    static constexpr int64_t kLooksPerYield = 64;  // some microseconds
    static constexpr int64_t kSleepNs = 1'000'000'000;

    struct Counter {
        std::atomic<uint32_t> number;  // of the last exchange into which the rank has brought its part
        std::atomic<uint32_t> sleepers;  // ranks that ask to be woken when it changes
        std::atomic<int64_t> bytes[2];  // of the parts in its slots
    };
    static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free, "the counters are shared between processes");

    Counter& counter(int64_t rank) const { return *reinterpret_cast<Counter*>(memory_ + rank * kCounterBytes); }
    char* slot(int64_t rank, uint32_t number) const { return memory_ + ranks_ * kCounterBytes + (2 * rank + number % 2) * kSlotBytes; }

    // Brings in this rank's part and waits for all others; parts_ then points to them.
    void exchange(const void* part, int64_t bytes) {
        const uint32_t number = ++number_;
        waits_in_.store(++exchanges_, std::memory_order_relaxed);
        memcpy(slot(place_, number), part, size_t(bytes));
        Counter& mine = counter(place_);
        mine.bytes[number % 2].store(bytes, std::memory_order_relaxed);
        // Either this load sees a rank that goes to sleep, or that rank sees the number: both orders are sequentially consistent.
        mine.number.store(number, std::memory_order_seq_cst);
        if (mine.sleepers.load(std::memory_order_seq_cst) > 0) wake(mine.number);
        for (int64_t rank = 0; rank < ranks_; rank++) {
            if (rank != place_) wait_for(rank, number);
            const int64_t theirs = counter(rank).bytes[number % 2].load(std::memory_order_relaxed);
            if (theirs != bytes)
                throw std::runtime_error("rank " + std::to_string(rank) + " of the stage brought " + std::to_string(theirs) + " bytes into exchange " +
                                         std::to_string(number) + ", and this rank " + std::to_string(bytes) + ". This is a bug.");
            parts_[size_t(rank)] = reinterpret_cast<const float*>(slot(rank, number));
        }
        waits_in_.store(0, std::memory_order_relaxed);
    }
    void wait_for(int64_t rank, uint32_t number) const {
        Counter& other = counter(rank);
        if (has(other, number)) return;
        const int64_t began = now_ns();
        for (int64_t looks = 1; now_ns() - began < spin_ns_; looks++) {
            for (int64_t i = 0; i < kLooksPerYield; i++) {
                if (has(other, number)) return;
                relax();
            }
            sched_yield();  // the other rank may want this processor
        }
        other.sleepers.fetch_add(1, std::memory_order_seq_cst);
        bool came = false;
        while (!came && now_ns() - began < timeout_ns_) {
            const uint32_t seen = other.number.load(std::memory_order_seq_cst);
            came = reached(seen, number);
            if (!came) sleep_while(other.number, seen, std::min(kSleepNs, timeout_ns_));
        }
        other.sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (!came)
            throw std::runtime_error("rank " + std::to_string(rank) + " of the stage did not bring its part into exchange " + std::to_string(number) + " within " +
                                     std::to_string(timeout_ns_ / 1'000'000) + " ms");
    }
    static bool has(const Counter& counter, uint32_t number) { return reached(counter.number.load(std::memory_order_acquire), number); }
    static bool reached(uint32_t seen, uint32_t number) { return int32_t(seen - number) >= 0; }  // numbers go round after 2^32

    static int64_t now_ns() {
        timespec now;
        clock_gettime(CLOCK_MONOTONIC, &now);
        return int64_t(now.tv_sec) * 1'000'000'000 + now.tv_nsec;
    }
    static void relax() {
#if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
#elif defined(__aarch64__)
        __asm__ __volatile__("yield");
#endif
    }
    static void sleep_while(std::atomic<uint32_t>& word, uint32_t seen, int64_t most_ns) {
#if defined(__linux__)
        const timespec most{time_t(most_ns / 1'000'000'000), long(most_ns % 1'000'000'000)};
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, seen, &most, nullptr, 0);
#else
        const timespec some{0, 50'000};
        (void)word, (void)seen, (void)most_ns;
        nanosleep(&some, nullptr);
#endif
    }
    static void wake(std::atomic<uint32_t>& word) {
#if defined(__linux__)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
#else
        (void)word;
#endif
    }

    const int64_t ranks_, place_, spin_ns_, timeout_ns_;
    char* const memory_;
    uint32_t number_ = 0;
    int64_t exchanges_ = 0;
    std::atomic<int64_t> waits_in_{0};
    std::vector<const float*> parts_;  // in the slots
};

// A meeting in a part of a file, which it maps.
class MappedMeeting : private Mapping, public Meeting {
  public:
    MappedMeeting(int file, int64_t offset, int64_t ranks, int64_t place, double spin_s, double timeout_s)
        : Mapping(file, offset, bytes(ranks)), Meeting(at(), ranks, place, spin_s, timeout_s) {}
};

}  // namespace inferd
