// Scratch memory.
#pragma once

#include "aligned_memory.h"

namespace {

// The division of memory into pieces that begin at cache lines.
class Layout {
 public:
  static constexpr size_t padded(size_t bytes) { return (bytes + kCacheLine - 1) / kCacheLine * kCacheLine; }

  // With a null pointer, bytes() tells how much memory the pieces need.
  explicit Layout(void* memory) : base_(static_cast<char*>(memory)) {}

  template <class T = float>
  T* take(size_t count) {
    T* piece = reinterpret_cast<T*>(base_ + used_);
    used_ += padded(count * sizeof(T));
    return piece;
  }
  void start_over() { used_ = 0; }
  size_t bytes() const { return used_; }

 protected:
  char* base_;

 private:
  size_t used_ = 0;
};

// The memory of one thread.
class Scratch : public Layout {
 public:
  explicit Scratch(size_t bytes) : Layout(allocate_aligned(bytes)) {
#ifdef VISION_TTT_POISON
    // For tests: memory that is read before it is written holds NaN.
    for (size_t i = 0; base_ && i + sizeof(float) <= bytes; i += sizeof(float))
      *reinterpret_cast<float*>(base_ + i) = __builtin_nanf("");
#endif
  }
  ~Scratch() { free_aligned(base_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool ok() const { return base_ != nullptr; }
};

}  // namespace
