// Weights that are packed at every use, because training changes them at every step.
#pragma once

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
#ifdef VISION_TTT_TILES
    for (int64_t k = 0; k < inner; k += 2 * kBlock) {
      alignas(64) float numbers[2][kBlock * kPanel] = {};
      for (int64_t half = 0; half < 2 && k + half * kBlock < inner; ++half)
        copy_block(index * kPanel, k + half * kBlock, numbers[half]);
      Bfloat16* to = reinterpret_cast<Bfloat16*>(panel) + k / kInnerOfTile * kTermsOfTile;
      for (int64_t i = 0; i < kBlock; ++i)
        store_terms(load(numbers[0] + i * kPanel), load(numbers[1] + i * kPanel), to + i * kInnerOfTile);
    }
#else
    for (int64_t k = 0; k < inner; k += kBlock) copy_block(index * kPanel, k, panel + k * kPanel);
#endif
  }

 private:
  static constexpr int64_t kBlock = 16;

  int64_t floats_of_column() const {
#ifdef VISION_TTT_TILES
    return floats_of_terms(inner);
#else
    return inner;
#endif
  }

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

  ToPack(const Matrix& of, Buffers& buffers) : matrix(of), packed(buffers.take<float>(of.floats())) {}

  static size_t bytes(const Matrix& of) { return Buffers::padded(of.floats() * sizeof(float)); }
  Packed weight() const {
#ifdef VISION_TTT_TILES
    constexpr int64_t in_terms = 1;
#else
    constexpr int64_t in_terms = 0;
#endif
    return {packed, nullptr, matrix.inner, matrix.columns, in_terms};
  }
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
