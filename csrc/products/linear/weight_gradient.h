// Sums over tokens of products of two rows: the gradient of a linear layer's weight.
#pragma once

#include "../../amx/outer_products.h"
#include "../packed/chunks.h"
#include "../packed/product.h"

namespace {

constexpr int64_t kThreadsToServe = 16;

// Rows of the weight whose sums fit a core's cache, together with packed weights: of one layer, and of an MLP.
constexpr int64_t kColumnsOfSlice = 512;
constexpr int64_t kColumnsAtOnce = kHasTiles ? 128 : 256;
constexpr int64_t kMostColumns = 256;  // of a factor of an outer product
// Successive rows of so many floats begin in different sets of the first cache level.
constexpr int64_t kRowAtOnce = kColumnsAtOnce + 16;

// sums [R, V vectors] = Σ_t a_tᵀ b_t, or += where `adds`, over `rows` rows, with b in a panel.
template <int R, int V>
VISION_TTT_INLINE void outer_tile(const float* a, int64_t a_row, const float* panel, int64_t rows,
                                  float* sums, int64_t sums_row, bool adds) {
  Vector total[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) total[r][v] = Vector{};
  for (int64_t t = 0; t < rows; ++t) {
    Vector b[V];
    for (int v = 0; v < V; ++v) b[v] = load(panel + t * kPanel + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const Vector factor = splat(a[t * a_row + r]);
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) total[r][v] += factor * b[v];
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
    for (int v = 0; v < V; ++v) {
      float* to = sums + r * sums_row + v * kLanes;
      store(to, adds ? load(to) + total[r][v] : total[r][v]);
    }
}

template <int V>
VISION_TTT_INLINE void outer_columns(const float* a, int64_t a_row, int64_t count,
                                     const float* panel, int64_t rows, float* sums,
                                     int64_t sums_row, bool adds) {
  int64_t i = 0;
  for (; i + kTileRows <= count; i += kTileRows)
    outer_tile<kTileRows, V>(a + i, a_row, panel, rows, sums + i * sums_row, sums_row, adds);
  for (; i + 2 <= count; i += 2)
    outer_tile<2, V>(a + i, a_row, panel, rows, sums + i * sums_row, sums_row, adds);
}

// sums [count, columns] = aᵀ b, or += where `adds`, for up to kRowsOfChunk rows of a [rows, count] and
// b [rows, columns]. `count` and `columns` are multiples of 16; with tiles `count` is at most kMostColumns.
// Rows of `a` begin in different sets of the first cache level.
__attribute__((noinline)) void add_outer_products(const float* a, int64_t a_row, int64_t count,
                                                  const float* b, int64_t b_row, int64_t columns,
                                                  int64_t rows, float* sums, bool adds, NextRows& next) {
  if (outer_products_by_tiles<kMostColumns>(a, a_row, count, b, b_row, columns, rows, sums, adds, next)) return;
  alignas(64) float panel[kRowsOfChunk * kPanel];
  for (int64_t j = 0; j < columns; j += kPanel) {
    const int64_t width = columns - j < kPanel ? columns - j : kPanel;
    // Every tile reads all of these numbers. Packed together they stay in the first cache level.
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t c = 0; c < width; c += kLanes)
        store(panel + t * kPanel + c, load(b + t * b_row + j + c));
    int64_t c = 0;
    auto vectors = [&](auto number) {
      constexpr int V = decltype(number)::value;
      for (; c + V * kLanes <= width; c += V * kLanes)
        outer_columns<V>(a, a_row, count, panel + c, rows, sums + j + c, columns, adds);
    };
    vectors(std::integral_constant<int, kTileVectors>{});
    if constexpr (kTileVectors > 2) vectors(std::integral_constant<int, 2>{});
    vectors(std::integral_constant<int, 1>{});
  }
}

// The same for an `a` whose rows may begin in the same sets of the first cache level.
void add_outer_products_of_any(const float* a, int64_t a_row, int64_t count, const float* b, int64_t b_row,
                               int64_t columns, int64_t rows, float* sums, bool adds, NextRows& next) {
  if (kHasTiles) return add_outer_products(a, a_row, count, b, b_row, columns, rows, sums, adds, next);
  alignas(64) float copy[kRowsOfChunk * kRowAtOnce];
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t j = 0; j < count; j += kLanes) store(copy + t * kRowAtOnce + j, load(a + t * a_row + j));
  add_outer_products(copy, kRowAtOnce, count, b, b_row, columns, rows, sums, adds, next);
}

// Parts of the tokens of nearly equal size, each with its own sums, which are added in a fixed order. The parts
// depend on the number of tokens only, so that the bits of a sum do not depend on the threads.
class Parts {
 public:
  explicit Parts(int64_t tokens) : rows_(tokens), units_((tokens + kUnit - 1) / kUnit) {
    constexpr int64_t least = kRowsOfChunk / kUnit, most = 8 * least;
    const int64_t shared = (units_ + kThreadsToServe - 1) / kThreadsToServe;
    const int64_t of_part = shared < least ? least : shared < most ? shared : most;
    count_ = (units_ + of_part - 1) / of_part;
  }
  int64_t count() const { return count_; }

  // Call body(start, count, is_first) for the chunks of a part.
  template <class Body>
  void for_each_chunk(int64_t part, const Body& body) const {
    const int64_t first = begin(part), end = begin(part + 1);
    for (int64_t start = first; start < end; start += kRowsOfChunk)
      body(start, end - start < kRowsOfChunk ? end - start : kRowsOfChunk, start == first);
  }

 private:
  // In tiles, a chunk of fewer rows takes nearly as long.
  static constexpr int64_t kUnit = kHasTiles ? kRowsOfChunk : kTileOfRows;
  int64_t rows_, units_, count_;

  int64_t begin(int64_t part) const {
    const int64_t start = units_ * part / count_ * kUnit;
    return start < rows_ ? start : rows_;
  }
};

// out [columns] = Σ_p parts[p], with `apart` floats between the starts of successive parts.
VISION_TTT_INLINE void add_parts(const float* parts, int64_t apart, int64_t count, int64_t columns,
                                 float* out) {
  for (int64_t c = 0; c < columns; c += kLanes) {
    Vector total = load(parts + c);
    for (int64_t p = 1; p < count; ++p) total += load(parts + p * apart + c);
    store(out + c, total);
  }
}

// A square of Σ_p parts[p], kLanes rows of `row` floats, as columns of `out`, which are `out_row` apart.
VISION_TTT_INLINE void add_parts_transposed(const float* parts, int64_t row, int64_t apart, int64_t count,
                                            float* out, int64_t out_row) {
  alignas(64) float square[kLanes * kLanes];
  for (int64_t r = 0; r < kLanes; ++r)
    add_parts(parts + r * row, apart, count, kLanes, square + r * kLanes);
  transpose_square(square, kLanes, out, out_row);
}

// The gradient [columns, inner] of a large weight, in tiles whose sums over all tokens stay in a core's
// second cache level. A tile is one thread's, so that its bits do not depend on the threads.
struct GradientTiles {
  int64_t columns, inner;

  static constexpr int64_t kSide = 192;

  int64_t across() const { return (inner + kSide - 1) / kSide; }
  int64_t count() const { return (columns + kSide - 1) / kSide * across(); }

  // dweight = gradᵀ x for `rows` rows of grad and x. Returns 1 if a thread got no memory.
  int sum(const float* grad, const float* x, int64_t rows, float* dweight, int64_t threads) const {
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
      Scratch scratch(kSide * kSide * sizeof(float));
      if (!scratch.ok()) failed = 1;
#pragma omp for schedule(dynamic, 1)
      for (int64_t tile = 0; tile < count(); ++tile) {
        if (!scratch.ok()) continue;
        scratch.start_over();
        sum_tile(tile / across() * kSide, tile % across() * kSide, grad, x, rows, dweight, scratch);
      }
    }
    return failed;
  }

 private:
  void sum_tile(int64_t first, int64_t start, const float* grad, const float* x, int64_t rows,
                float* dweight, Scratch& scratch) const {
    const int64_t height = columns - first < kSide ? columns - first : kSide;
    const int64_t width = inner - start < kSide ? inner - start : kSide;
    float* sums = scratch.take(kSide * kSide);
    for (int64_t from = 0; from < rows; from += kRowsOfChunk) {
      const int64_t count = rows - from < kRowsOfChunk ? rows - from : kRowsOfChunk;
      NextRows next;
      const int64_t after = from + kRowsOfChunk, left = rows - after;
      const int64_t some = left < kRowsOfChunk ? left : kRowsOfChunk;
      next.add(grad + after * columns + first, some, columns, height);
      next.add(x + after * inner + start, some, inner, width);
      next.spread(steps_of_product(height, count, width));
      add_outer_products_of_any(grad + from * columns + first, columns, height, x + from * inner + start,
                                inner, width, count, sums, from > 0, next);
    }
    for (int64_t i = 0; i < height; ++i)
      std::memcpy(dweight + (first + i) * inner + start, sums + i * width, width * sizeof(float));
  }
};

}  // namespace
