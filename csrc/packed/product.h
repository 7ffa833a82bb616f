// Products of a few rows with packed weights, whose sums over the whole inner axis stay in registers.
#pragma once

#include <type_traits>

#include "../bfloat16.h"
#include "packed.h"

namespace {

// The result of a product: out = add + scale ⊙ (sums + bias), where all but the sums are optional.
template <class Out>
struct Sink {
  Out* out;
  int64_t out_row;
  int64_t columns;
  const float* bias = nullptr;
  const float* scale = nullptr;
  const float* add = nullptr;  // may be out itself
  int64_t add_row = 0;

  template <int R, int V>
  VISION_TTT_INLINE void put(int64_t row, int64_t column, const Vector (&sums)[R][V]) const {
    // Unrolled here and below, because the compiler would otherwise store the sums to memory first.
    if (column + V * kLanes > columns) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) put_some(row + r, column + v * kLanes, sums[r][v]);
      return;
    }
    Vector shift[V], factor[V];
    for (int v = 0; v < V; ++v) {
      shift[v] = bias ? load(bias + column + v * kLanes) : Vector{};
      factor[v] = scale ? load(scale + column + v * kLanes) : splat(1.0f);
    }
    // The strides are copied here: for all the compiler knows, a store might change this structure.
    const int64_t out_step = out_row, add_step = add_row;
    Out* to = out + row * out_row + column;
    const float* from = add ? add + row * add_row + column : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, to += out_step) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Vector x = (sums[r][v] + shift[v]) * factor[v];
        if (from) x += load(from + v * kLanes);
        store(to + v * kLanes, x);
      }
      if (from) from += add_step;
    }
  }

  // The columns of a vector that exist.
  __attribute__((noinline)) void put_some(int64_t row, int64_t column, Vector sums) const {
    const int64_t count = columns - column < kLanes ? columns - column : kLanes;
    if (count <= 0) return;
    auto some = [&](const float* from) {
      float numbers[kLanes] = {};
      std::memcpy(numbers, from, count * sizeof(float));
      return load(numbers);
    };
    Vector x = sums;
    if (bias) x += some(bias + column);
    if (scale) x *= some(scale + column);
    if (add) x += some(add + row * add_row + column);
    Out numbers[kLanes];
    store(numbers, x);
    std::memcpy(out + row * out_row + column, numbers, count * sizeof(Out));
  }
};

// The numbers of the inner axis that one instruction multiplies.
constexpr int64_t step_of(const float*) { return 1; }
constexpr int64_t step_of(const Bfloat16*) { return 2; }
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

// 6 rows of 4 vectors fill 32 registers, 6 of 2 fill 16. 10 sums or more hide the latency of a
// multiply-add.
constexpr int kTileRows = 6;
constexpr int kTileVectors = VISION_TTT_REGISTERS == 32 ? 4 : 2;

// The columns of a panel of weights, and of the panels that a tile reads at once.
constexpr int64_t kPanel = 16;
constexpr int64_t kGroup = kTileVectors * kLanes > kPanel ? kTileVectors * kLanes : kPanel;

// Weights that are read next: `count` pieces of panels, which begin `stride` bytes apart.
struct Pieces {
  const void* first = nullptr;
  int64_t count = 0, bytes = 0, stride = 0;
};

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

// A part of a weight: columns from `first` (a multiple of kPanel), and a range of the inner axis.
struct Part {
  int64_t first, columns, inner_start, inner;

  explicit Part(const Packed& w) : first(0), columns(w.columns), inner_start(0), inner(w.inner) {}
};

// A part of a packed weight as its Element.
template <class Element>
struct Panels {
  static constexpr int64_t kStep = step_of(static_cast<const Element*>(nullptr));
  const Element* first;
  int64_t stride, inner, columns;  // of a panel, and padded

  Panels(const Packed& w, const Part& part)
      : stride((w.inner + kStep - 1) / kStep * kStep * kPanel),
        inner((part.inner + kStep - 1) / kStep * kStep),
        columns((part.columns + kPanel - 1) / kPanel * kPanel) {
    first = static_cast<const Element*>(w.data) + part.first / kPanel * stride +
            part.inner_start * kPanel;
  }

  const Element* at(int64_t column) const {
    return first + column / kPanel * stride + column % kPanel * kStep;
  }
  int64_t width(int64_t column) const {  // of the group that begins there
    return columns - column < kGroup ? columns - column : kGroup;
  }
  Pieces group(int64_t column) const {
    constexpr int64_t size = sizeof(Element);
    return {at(column), width(column) / kPanel, inner * kPanel * size, stride * size};
  }
};

// What a product with a weight, or with a part of it, reads first.
template <class Element>
Pieces begin_of(const Packed& w, const Part& part) {
  return w.data ? Panels<Element>(w, part).group(0) : Pieces{};
}
template <class Element>
Pieces begin_of(const Packed& w) {
  return begin_of<Element>(w, Part(w));
}

// Multiply rows of x [rows, part.inner] with a part of the weight. `next` is what the caller multiplies
// with after it, as far as it is known.
template <class Element, class Out>
__attribute__((noinline)) void product(const Element* x, int64_t x_row, int64_t rows,
                                       const Packed& w, const Part& part, const Sink<Out>& sink,
                                       const Pieces& next = {}) {
  const Panels<Element> panels(w, part);
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

template <class Element, class Out>
VISION_TTT_INLINE void product(const Element* x, int64_t x_row, int64_t rows, const Packed& w,
                               const Sink<Out>& sink, const Pieces& next = {}) {
  product(x, x_row, rows, w, Part(w), sink, next);
}

}  // namespace
