// Memory that a thread keeps from call to call. Otherwise large pieces would be mapped, and cleared, at each call.
// This is not std::vector, because all levels would share its compiled functions.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <new>

namespace inferd::INFERD_LEVEL {

class Scratch {
public:
    Scratch() = default;
    Scratch(const Scratch&) = delete;
    Scratch& operator=(const Scratch&) = delete;
    ~Scratch() { free(memory_); }

    // Memory for so many elements; the previous content is lost.
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
