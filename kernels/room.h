// Memory that a thread keeps from call to call: large pieces would be mapped, and cleared, anew each time.
// Not std::vector, whose functions the levels would share.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace inferd::INFERD_LEVEL {

class Room {
public:
    Room() = default;
    Room(const Room&) = delete;
    Room& operator=(const Room&) = delete;
    ~Room() { free(memory_); }

    // Room for so many; what was in it is lost.
    template <class T>
    T* take(int64_t count) {
        const size_t bytes = (size_t(count) * sizeof(T) + 63) / 64 * 64;
        if (bytes > size_) {
            free(memory_);
            memory_ = aligned_alloc(64, bytes);
            size_ = memory_ == nullptr ? 0 : bytes;
            if (memory_ == nullptr) throw std::bad_alloc();
        }
        return static_cast<T*>(memory_);
    }

private:
    void* memory_ = nullptr;
    size_t size_ = 0;
};

}  // namespace inferd::INFERD_LEVEL
