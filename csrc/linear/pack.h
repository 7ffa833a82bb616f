// Weights that are packed at every use, because training changes them at every step.
#pragma once

#include "../packed/product.h"

namespace {

// A matrix [columns, inner], or the transposed of a matrix in memory. Both sizes are multiples of 16,
// and one of the steps is 1.
struct Matrix {
  const float* data;
  int64_t columns, inner, column_step, inner_step;

  static Matrix of(const float* data, int64_t columns, int64_t inner) {
    return {data, columns, inner, inner, 1};
  }
  // The transposed of data [inner, columns], whose rows are `row` apart.
  static Matrix transposed(const float* data, int64_t columns, int64_t inner, int64_t row) {
    return {data, columns, inner, 1, row};
  }
  size_t bytes() const { return columns * inner * sizeof(float); }
  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }

  // Write one panel [inner, width] of the packed weight.
  void pack(int64_t index, float* packed) const {
    const int64_t first = index * kPanel;
    const int64_t width = columns - first < kPanel ? columns - first : kPanel;
    const float* from = data + first * column_step;
    float* panel = packed + first * inner;
    if (inner_step == 1) {
      for (int64_t k = 0; k < inner; k += kLanes)
        for (int64_t c = 0; c < width; c += kLanes)
          transpose_square(from + c * column_step + k, column_step, panel + k * width + c, width);
      return;
    }
    for (int64_t k = 0; k < inner; ++k)
      for (int64_t c = 0; c < width; c += kLanes)
        store(panel + k * width + c, load(from + k * inner_step + c));
  }
};

// A matrix, and the memory of its panels.
struct ToPack {
  Matrix matrix;
  float* packed;

  Packed weight() const { return {packed, nullptr, matrix.inner, matrix.columns}; }
};

template <int N>
void pack_all(const ToPack (&weights)[N], int64_t threads) {
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  for (const ToPack& w : weights) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < w.matrix.panels(); ++i) w.matrix.pack(i, w.packed);
  }
}

}  // namespace
