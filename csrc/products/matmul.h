// Small matrix products in registers, for operands that stay in the first two cache levels.
#pragma once

#include "../vector.h"

namespace {

// One product C [rows, cols] = (S +) A [rows, depth] B [depth, cols]. B, C and S are row-major; A may
// have any strides, so that a transposed A costs nothing, and S is C itself, or one row for all with
// start_row = 0. cols is a multiple of kLanes.
struct Operands {
  int64_t depth;
  const float* a;
  int64_t a_row, a_depth;
  const float* b;
  int64_t b_row;
  float* c;
  int64_t c_row;
  const float* start = nullptr;
  int64_t start_row = 0;
};

// R rows times V vectors of C stay in registers over the whole depth. The operands are copied, because
// stores to C could change them as far as the compiler knows.
template <int R, int V, bool kStarts>
VISION_TTT_INLINE void product_block(Operands o, int64_t i, int64_t j) {
  const float* a = o.a + i * o.a_row;
  const float* b = o.b + j;
  float* c = o.c + i * o.c_row + j;
  Vector acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v)
      acc[r][v] = kStarts ? load(o.start + (i + r) * o.start_row + j + v * kLanes) : Vector{};
#pragma GCC unroll 4
  for (int64_t k = 0; k < o.depth; ++k) {
    Vector row[V];
    for (int v = 0; v < V; ++v) row[v] = load(b + k * o.b_row + v * kLanes);
    for (int r = 0; r < R; ++r) {
      Vector x = splat(a[r * o.a_row + k * o.a_depth]);
      for (int v = 0; v < V; ++v) acc[r][v] += x * row[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(c + r * o.c_row + v * kLanes, acc[r][v]);
}

// For products between whose tiles nothing is done.
struct Nothing {
  void operator()() const {}
};

// All rows of one column block: tiles of R rows, then a smaller one for the remainder.
template <int R, int V, bool kStarts, class Between>
VISION_TTT_INLINE void product_rows(const Operands& o, int64_t i, int64_t rows, int64_t j,
                                    const Between& between) {
  for (; i + R <= rows; i += R) between(), product_block<R, V, kStarts>(o, i, j);
  if constexpr (R > 1) product_rows<R / 2, V, kStarts>(o, i, rows, j, between);
}

// Rows held beside 4, 2 and 1 vectors of columns. Powers of two, because mini-batches and heads are;
// 8 accumulators or more hide the latency of a multiply-add.
#if VISION_TTT_REGISTERS == 32
constexpr int kRowsOf4 = 4, kRowsOf2 = 8, kRowsOf1 = 8;
#else
constexpr int kRowsOf4 = 0, kRowsOf2 = 4, kRowsOf1 = 8;
#endif

// The rows of a tile in a product of so many columns.
constexpr int64_t tile_rows(int64_t cols) {
  if (kRowsOf4 > 0 && cols >= 4 * kLanes) return kRowsOf4;
  return cols >= 2 * kLanes ? kRowsOf2 : kRowsOf1;
}

// The whole tiles of a product, before each of which it calls between().
constexpr int64_t tiles_of_product(int64_t rows, int64_t cols) {
  const int64_t width = kRowsOf4 > 0 && cols >= 4 * kLanes ? 4 : cols >= 2 * kLanes ? 2 : 1;
  return rows / tile_rows(cols) * (cols / (width * kLanes));
}

template <bool kStarts, class Between = Nothing>
__attribute__((noinline)) void product(int64_t rows, int64_t cols, const Operands& o,
                                       const Between& between = {}) {
  int64_t j = 0;
  if constexpr (kRowsOf4 > 0)
    for (; j + 4 * kLanes <= cols; j += 4 * kLanes)
      product_rows<kRowsOf4, 4, kStarts>(o, 0, rows, j, between);
  for (; j + 2 * kLanes <= cols; j += 2 * kLanes)
    product_rows<kRowsOf2, 2, kStarts>(o, 0, rows, j, between);
  for (; j < cols; j += kLanes) product_rows<kRowsOf1, 1, kStarts>(o, 0, rows, j, between);
}

// C = A B, A row-major with rows of a_row floats.
template <class Between = Nothing>
VISION_TTT_INLINE void multiply(int64_t rows, int64_t depth, int64_t cols, const float* a,
                                int64_t a_row, const float* b, float* c, const Between& between = {}) {
  product<false>(rows, cols, {depth, a, a_row, 1, b, cols, c, cols}, between);
}

// C += A B.
template <class Between = Nothing>
VISION_TTT_INLINE void multiply_add(int64_t rows, int64_t depth, int64_t cols, const float* a,
                                    int64_t a_row, const float* b, float* c, const Between& between = {}) {
  product<true>(rows, cols, {depth, a, a_row, 1, b, cols, c, cols, c, cols}, between);
}

// C = A B + 1 sᵀ: s is added to every row.
template <class Between = Nothing>
VISION_TTT_INLINE void multiply_add_row(int64_t rows, int64_t depth, int64_t cols, const float* a,
                                        int64_t a_row, const float* b, const float* s, float* c,
                                        const Between& between = {}) {
  product<true>(rows, cols, {depth, a, a_row, 1, b, cols, c, cols, s, 0}, between);
}

// C += A B with A [n, n] zero above its diagonal; whole tiles of zeros are skipped.
VISION_TTT_INLINE void multiply_add_lower(int64_t n, int64_t cols, const float* a, int64_t a_row,
                                          const float* b, float* c) {
  const int64_t rows = tile_rows(cols);
  for (int64_t i = 0; i < n; i += rows) {
    const int64_t end = i + rows < n ? i + rows : n;
    multiply_add(end - i, end, cols, a + i * a_row, a_row, b, c + i * cols);
  }
}

// C += Aᵀ B, A [depth, rows] row-major with rows of a_row floats.
template <class Between = Nothing>
VISION_TTT_INLINE void multiply_add_transposed(int64_t rows, int64_t depth, int64_t cols,
                                               const float* a, int64_t a_row, const float* b,
                                               float* c, const Between& between = {}) {
  product<true>(rows, cols, {depth, a, 1, a_row, b, cols, c, cols, c, cols}, between);
}

}  // namespace
