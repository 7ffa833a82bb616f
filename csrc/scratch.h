// The scratch memory of one thread.
#pragma once

#include <cstring>

#include "aligned_memory.h"
#include "vector.h"

namespace {

VISION_TTT_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

VISION_TTT_INLINE void copy(float* to, const float* from, size_t floats) {
  std::memcpy(to, from, floats * sizeof(float));
}

VISION_TTT_INLINE void clear(float* to, size_t floats) { std::memset(to, 0, floats * sizeof(float)); }

// The scratch of one thread, allocated in pieces that are aligned to cache lines.
class Scratch {
 public:
  explicit Scratch(size_t floats) {
    base_ = static_cast<float*>(allocate_aligned(floats * sizeof(float)));
#ifdef VISION_TTT_POISON
    // For tests: memory that is read before it is written holds NaN.
    for (size_t i = 0; base_ && i < floats; ++i) base_[i] = __builtin_nanf("");
#endif
  }
  ~Scratch() { free_aligned(base_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool ok() const { return base_ != nullptr; }
  float* take(size_t floats) {
    float* piece = base_ + used_;
    used_ += round_up(floats, 16);
    return piece;
  }

 private:
  float* base_ = nullptr;
  size_t used_ = 0;
};

}  // namespace
