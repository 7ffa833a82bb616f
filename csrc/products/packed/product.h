// Products of a few rows with packed weights, whose sums over the whole inner axis stay in registers.
#pragma once

#include <type_traits>

#include "../../amx/product.h"
#include "next_rows.h"
#include "panels.h"
#include "sink.h"

namespace {

VISION_TTT_INLINE Vector load_weights(const float* p) { return load(p); }
VISION_TTT_INLINE Vector load_weights(const Bfloat16* p) { return load_pairs(p); }
VISION_TTT_INLINE Vector splat_inputs(const float* p) { return splat(*p); }
VISION_TTT_INLINE Vector splat_inputs(const Bfloat16* p) { return splat_pair(p); }
VISION_TTT_INLINE Vector add_product(Vector sum, Vector a, Vector b, const float*) {
  return sum + a * b;
}
VISION_TTT_INLINE Vector add_product(Vector sum, Vector a, Vector b, const Bfloat16*) {
  return add_product_of_pairs(sum, a, b);
}

// Prefetches pieces, a line now and then. A block's weights exceed the second cache level. Many lines at
// once would delay the loads and stores of the product.
class Ahead {
 public:
  explicit Ahead(const Pieces& pieces)
      : next_(static_cast<const char*>(pieces.first)), end_(next_ + pieces.bytes),
        gap_(pieces.stride - pieces.bytes), stride_(pieces.stride), left_(pieces.count) {}

  VISION_TTT_INLINE void fetch() {
    if (!left_) return;
    __builtin_prefetch(next_, 0, 2);
    next_ += 64;
    if (next_ < end_) return;
    --left_;
    next_ += gap_, end_ += stride_;
  }

 private:
  const char *next_, *end_;
  int64_t gap_, stride_, left_;
};

// Steps between two lines: the 16 tiles of about a hundred rows prefetch as many lines as they read.
constexpr int64_t kStepsPerLine = 16 * kPanel / kGroup;

// R rows of x times V vectors of columns from `weights` on, in panels that begin `stride` numbers apart;
// `inner` is a multiple of step_of(x).
template <int R, int V, class Element, class Out>
VISION_TTT_INLINE void product_tile(const Element* x, int64_t x_row, const Element* weights,
                                    int64_t stride, int64_t inner, const Sink<Out>& sink,
                                    int64_t row, int64_t column, Ahead& ahead) {
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  x += row * x_row;
  Vector sums[R][V] = {};
  for (int64_t k = 0; k < inner; k += step) {
    if (k % (kStepsPerLine * step) == 0) ahead.fetch();
    Vector factors[V];
    for (int v = 0; v < V; ++v)
      factors[v] = load_weights(weights + v * kLanes / kPanel * stride + k * kPanel +
                                v * kLanes % kPanel * step);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vector input = splat_inputs(x + r * x_row + k);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = add_product(sums[r][v], input, factors[v], x);
    }
  }
  sink.put(row, column, sums);
}

// V vectors of columns for all rows, in tiles of 6 and 5 rows, as far as there are enough.
template <int V, class Element, class Out>
VISION_TTT_INLINE void product_columns(const Element* x, int64_t x_row, int64_t rows,
                                       const Element* weights, int64_t stride, int64_t inner,
                                       const Sink<Out>& sink, int64_t column, Ahead& ahead) {
  auto tile = [&](auto count, int64_t i) __attribute__((always_inline)) {
    product_tile<decltype(count)::value, V>(x, x_row, weights, stride, inner, sink, i, column,
                                            ahead);
  };
  int64_t i = 0;
  if constexpr (V == 1)
    for (; i + 2 * kTileRows <= rows; i += 2 * kTileRows)
      tile(std::integral_constant<int, 2 * kTileRows>{}, i);
  // 6 n - m rows are n tiles, m of them with 5 rows.
  const int64_t tiles = (rows - i + kTileRows - 1) / kTileRows, fives = kTileRows * tiles - (rows - i);
  if (fives <= tiles) {
    for (int64_t n = fives; n < tiles; ++n, i += kTileRows)
      tile(std::integral_constant<int, kTileRows>{}, i);
    for (; i < rows; i += kTileRows - 1) tile(std::integral_constant<int, kTileRows - 1>{}, i);
    return;
  }
  for (; i + kTileRows <= rows; i += kTileRows) tile(std::integral_constant<int, kTileRows>{}, i);
  switch (rows - i) {
    case 4: return tile(std::integral_constant<int, 4>{}, i);
    case 3: return tile(std::integral_constant<int, 3>{}, i);
    case 2: return tile(std::integral_constant<int, 2>{}, i);
    case 1: return tile(std::integral_constant<int, 1>{}, i);
  }
}

// Multiply rows of x [rows, part.inner] with a part of the weight. `next` is what the caller multiplies
// with after it, as far as it is known. Products of terms fetch the next rows.
template <class Element, class Out>
__attribute__((noinline)) void product(const Element* x, int64_t x_row, int64_t rows,
                                       const Packed& w, const Part& part, const Sink<Out>& sink,
                                       const Pieces& next = {}, NextRows* next_rows = nullptr) {
  const Panels<Element> panels(w, part);
  if (product_by_tiles(x, x_row, rows, part, panels, sink, next_rows)) return;
  for (int64_t j = 0; j < panels.columns; j += kGroup) {
    Ahead ahead(j + kGroup < panels.columns ? panels.group(j + kGroup) : next);
    const int64_t end = j + panels.width(j);
    int64_t c = j;
    auto columns = [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
      for (; c + V * kLanes <= end; c += V * kLanes)
        product_columns<V>(x, x_row, rows, panels.at(c), panels.stride, panels.inner, sink, c, ahead);
    };
    columns(std::integral_constant<int, kTileVectors>{});
    if constexpr (kTileVectors > 2) columns(std::integral_constant<int, 2>{});
    columns(std::integral_constant<int, 1>{});
  }
}

// Multiply rows of x with a part of two weights of one shape: out [rows, 2 · columns].
inline void two_products(const float* x, int64_t x_row, int64_t rows, const Packed& first,
                         const Packed& second, const Part& part, float* out, int64_t out_row,
                         NextRows& next) {
  if (two_products_by_tiles(x, x_row, rows, first, second, part, out, out_row, next)) return;
  product(x, x_row, rows, first, part, Sink<float>{out, out_row, part.columns}, {}, &next);
  product(x, x_row, rows, second, part, Sink<float>{out + part.columns, out_row, part.columns}, {}, &next);
}

template <class Element, class Out>
VISION_TTT_INLINE void product(const Element* x, int64_t x_row, int64_t rows, const Packed& w,
                               const Sink<Out>& sink, const Pieces& next = {}) {
  product(x, x_row, rows, w, Part(w), sink, next);
}

}  // namespace
