// Weights that are packed at every use, because training changes them at every step.
#pragma once

#include "../../amx/pack.h"
#include "../packed/chunks.h"
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
  size_t floats() const { return floats_of_column() * columns; }
  int64_t panels() const { return (columns + kPanel - 1) / kPanel; }

  // Write one panel of the packed weight.
  void pack(int64_t index, float* packed) const {
    float* panel = packed + index * floats_of_column() * kPanel;
    const auto copy = [&](int64_t k, float* to) { copy_block(index * kPanel, k, to); };
    if (pack_terms<kBlock>(inner, copy, panel)) return;
    for (int64_t k = 0; k < inner; k += kBlock) copy(k, panel + k * kPanel);
  }

 private:
  static constexpr int64_t kBlock = 16;

  int64_t floats_of_column() const { return kHasTiles ? floats_of_terms(inner) : inner; }

  // Columns of a panel as rows [kBlock, kPanel].
  void copy_block(int64_t first, int64_t k, float* to) const {
    const float* from = data + first * column_step + k * inner_step;
    if (inner_step == 1) {
      for (int64_t i = 0; i < kBlock; i += kLanes)
        for (int64_t c = 0; c < kPanel; c += kLanes)
          transpose_square(from + c * column_step + i, column_step, to + i * kPanel + c, kPanel);
      return;
    }
    for (int64_t i = 0; i < kBlock; ++i)
      for (int64_t c = 0; c < kPanel; c += kLanes)
        store(to + i * kPanel + c, load(from + i * inner_step + c));
  }
};

// A matrix, and the memory of its panels.
struct ToPack {
  Matrix matrix;
  float* packed;

  ToPack(const Matrix& of, Scratch& scratch) : matrix(of), packed(scratch.take(of.floats())) {}

  static size_t bytes(const Matrix& of) { return Scratch::padded(of.floats() * sizeof(float)); }
  Packed weight() const { return {packed, nullptr, matrix.inner, matrix.columns, kHasTiles}; }
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
