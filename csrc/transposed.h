// A transposed copy of a small matrix.
#pragma once

#include <cstdint>

#include "aligned_memory.h"

namespace {

// x [rows, cols] as [cols, rows]. For weights [C, K] of a depth-wise convolution a vector then holds the
// weights of neighbouring channels.
class Transposed {
 public:
  Transposed(const float* x, int64_t rows, int64_t cols) {
    data_ = static_cast<float*>(allocate_aligned(rows * cols * sizeof(float)));
    if (!data_) return;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < cols; ++j) data_[j * rows + i] = x[i * cols + j];
  }
  ~Transposed() { free_aligned(data_); }
  Transposed(const Transposed&) = delete;
  Transposed& operator=(const Transposed&) = delete;

  const float* data() const { return data_; }  // null if the allocation failed

 private:
  float* data_ = nullptr;
};

}  // namespace
