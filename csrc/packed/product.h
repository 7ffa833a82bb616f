// Products of a few rows with packed weights, whose sums over the whole inner axis stay in registers.
#pragma once

#include <type_traits>

#include "../bfloat16.h"
#include "packed.h"

namespace {

constexpr int64_t kPanel = 64;

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
    if (column + V * kLanes > columns) {
      for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) put_some(row + r, column + v * kLanes, sums[r][v]);
      return;
    }
    Vector shift[V], factor[V];
    for (int v = 0; v < V; ++v) {
      shift[v] = bias ? load(bias + column + v * kLanes) : Vector{};
      factor[v] = scale ? load(scale + column + v * kLanes) : splat(1.0f);
    }
    // Unrolled, because the compiler would otherwise store the sums to memory first.
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Vector x = (sums[r][v] + shift[v]) * factor[v];
        if (add) x += load(add + (row + r) * add_row + column + v * kLanes);
        store(out + (row + r) * out_row + column + v * kLanes, x);
      }
  }

  // The columns of a vector that exist.
  void put_some(int64_t row, int64_t column, Vector sums) const {
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

// Prefetching of the weights that are read next, a line now and then. A block's weights exceed the second
// cache level. Many lines at once would delay the loads and stores of the product.
struct Ahead {
  const char *next, *end;

  VISION_TTT_INLINE void fetch() {
    __builtin_prefetch(next, 0, 2);
    next += next < end ? 64 : 0;
  }
};

// Steps between two lines: the 16 tiles of about a hundred rows prefetch as many lines as they read. With
// 16 registers they read a quarter of a panel, and come back for the others.
constexpr int64_t kStepsPerLine = VISION_TTT_REGISTERS == 32 ? 4 : 16;

// R rows of x times V vectors of a panel's columns; `inner` is a multiple of step_of(x).
template <int R, int V, class Element, class Out>
VISION_TTT_INLINE void product_tile(const Element* x, int64_t x_row, const Element* panel,
                                    int64_t width, int64_t inner, const Sink<Out>& sink,
                                    int64_t row, int64_t column, Ahead& ahead) {
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  x += row * x_row;
  Vector sums[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) sums[r][v] = Vector{};
  for (int64_t k = 0; k < inner; k += step) {
    if (k % (kStepsPerLine * step) == 0) ahead.fetch();
    Vector weights[V];
    for (int v = 0; v < V; ++v) weights[v] = load_weights(panel + k * width + v * kLanes * step);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const Vector input = splat_inputs(x + r * x_row + k);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) sums[r][v] = add_product(sums[r][v], input, weights[v], x);
    }
  }
  sink.put(row, column, sums);
}

// 6 rows of 4 vectors fill 32 registers, 6 of 2 fill 16. 10 sums or more hide the latency of a
// multiply-add.
constexpr int kTileRows = 6;
constexpr int kTileVectors = VISION_TTT_REGISTERS == 32 ? 4 : 2;

// V vectors of one panel's columns for all rows, in tiles of 6 and 5 rows, as far as there are enough.
template <int V, class Element, class Out>
VISION_TTT_INLINE void product_columns(const Element* x, int64_t x_row, int64_t rows,
                                       const Element* panel, int64_t width, int64_t inner,
                                       const Sink<Out>& sink, int64_t column, Ahead& ahead) {
  auto tile = [&](auto count, int64_t i) __attribute__((always_inline)) {
    product_tile<decltype(count)::value, V>(x, x_row, panel, width, inner, sink, i, column, ahead);
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

// The columns of the panel that begins at column j.
inline int64_t panel_width(const Packed& w, int64_t j) {
  const int64_t padded = (w.columns - j + 15) / 16 * 16;
  return padded < kPanel ? padded : kPanel;
}

// Where a part begins in memory.
template <class Element>
const Element* begin_of(const Packed& w, const Part& part) {
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  const int64_t depth = (w.inner + step - 1) / step * step;
  return static_cast<const Element*>(w.data) + part.first * depth +
         part.inner_start * panel_width(w, part.first);
}

// Multiply rows of x [rows, part.inner] with a part of the weight. `next` is what the caller multiplies
// with after it, as far as it is known: its first lines are prefetched.
template <class Element, class Out>
__attribute__((noinline)) void product(const Element* x, int64_t x_row, int64_t rows,
                                       const Packed& w, const Part& part, const Sink<Out>& sink,
                                       const void* next = nullptr) {
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  const int64_t depth = (w.inner + step - 1) / step * step;
  const int64_t inner = (part.inner + step - 1) / step * step;
  for (int64_t j = 0; j < part.columns; j += kPanel) {
    const int64_t width = panel_width(w, part.first + j);
    const Element* panel = static_cast<const Element*>(w.data) + (part.first + j) * depth +
                           part.inner_start * width;
    const bool last = j + kPanel >= part.columns;
    const char* then = static_cast<const char*>(last ? next : panel + depth * width);
    Ahead ahead{then, then + (then ? inner * width * sizeof(Element) : 0)};
    int64_t c = 0;
    auto columns = [&](auto vectors) {
      constexpr int V = decltype(vectors)::value;
      for (; c + V * kLanes <= width; c += V * kLanes)
        product_columns<V>(x, x_row, rows, panel + c * step, width, inner, sink, j + c, ahead);
    };
    columns(std::integral_constant<int, kTileVectors>{});
    if constexpr (kTileVectors > 2) columns(std::integral_constant<int, 2>{});
    columns(std::integral_constant<int, 1>{});
  }
}

template <class Element, class Out>
VISION_TTT_INLINE void product(const Element* x, int64_t x_row, int64_t rows, const Packed& w,
                               const Sink<Out>& sink, const void* next = nullptr) {
  product(x, x_row, rows, w, Part(w), sink, next);
}

}  // namespace
