// Sums over tokens of products of two rows: the gradient of a linear layer's weight.
#pragma once

#include "../packed/chunks.h"
#include "../packed/product.h"

namespace {

constexpr int64_t kThreadsToServe = 16;

constexpr int64_t kColumnsAtOnce = 256;  // rows of the weight whose sums fit a core's cache
// Successive rows of so many floats begin in different sets of the first cache level.
constexpr int64_t kRowAtOnce = kColumnsAtOnce + 16;

// sums [R, V vectors] += Σ_t a_tᵀ b_t over `rows` rows, with b in a panel.
template <int R, int V>
VISION_TTT_INLINE void outer_tile(const float* a, int64_t a_row, const float* panel, int64_t rows,
                                  float* sums, int64_t sums_row) {
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
      store(to, load(to) + total[r][v]);
    }
}

template <int V>
VISION_TTT_INLINE void outer_columns(const float* a, int64_t a_row, int64_t count,
                                     const float* panel, int64_t rows, float* sums,
                                     int64_t sums_row) {
  int64_t i = 0;
  for (; i + kTileRows <= count; i += kTileRows)
    outer_tile<kTileRows, V>(a + i, a_row, panel, rows, sums + i * sums_row, sums_row);
  for (; i + 2 <= count; i += 2)
    outer_tile<2, V>(a + i, a_row, panel, rows, sums + i * sums_row, sums_row);
}

// sums [count, columns] += aᵀ b for `rows` rows of a [rows, count] and b [rows, columns]. `panel` is
// scratch of rows · kPanel floats. `count` is even, `columns` a multiple of 16.
__attribute__((noinline)) void add_outer_products(const float* a, int64_t a_row, int64_t count,
                                                  const float* b, int64_t b_row, int64_t columns,
                                                  int64_t rows, float* panel, float* sums) {
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
        outer_columns<V>(a, a_row, count, panel + c, rows, sums + j + c, columns);
    };
    vectors(std::integral_constant<int, kTileVectors>{});
    if constexpr (kTileVectors > 2) vectors(std::integral_constant<int, 2>{});
    vectors(std::integral_constant<int, 1>{});
  }
}

// Parts of the tokens, each with its own sums, which are added in a fixed order. The parts depend on the
// number of tokens only, so that the bits of a sum do not depend on the threads.
struct Parts {
  int64_t rows, of_part;

  explicit Parts(int64_t tokens) : rows(tokens) {
    constexpr int64_t kMost = 8 * kRowsOfChunk;
    const int64_t tiles = (tokens + kTileOfRows * kThreadsToServe - 1) / (kTileOfRows * kThreadsToServe);
    const int64_t shared = kTileOfRows * tiles;
    of_part = shared < kRowsOfChunk ? kRowsOfChunk : shared < kMost ? shared : kMost;
  }
  int64_t count() const { return (rows + of_part - 1) / of_part; }

  // Call body(start, count) for the chunks of a part.
  template <class Body>
  void for_each_chunk(int64_t part, const Body& body) const {
    const int64_t end = (part + 1) * of_part < rows ? (part + 1) * of_part : rows;
    for (int64_t start = part * of_part; start < end; start += kRowsOfChunk)
      body(start, end - start < kRowsOfChunk ? end - start : kRowsOfChunk);
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

// The gradient [columns, inner] of a large weight, in tiles whose sums over all tokens stay in a core's
// second cache level. A tile is one thread's, so that its bits do not depend on the threads.
struct GradientTiles {
  int64_t columns, inner;

  static constexpr int64_t kSide = 192, kSomeRow = kSide + 16;

  int64_t across() const { return (inner + kSide - 1) / kSide; }
  int64_t count() const { return (columns + kSide - 1) / kSide * across(); }

  // dweight = gradᵀ x for `rows` rows of grad and x. Returns 1 if a thread got no memory.
  int sum(const float* grad, const float* x, int64_t rows, float* dweight, int64_t threads) const {
    const size_t floats = kSide * kSide + kRowsOfChunk * (kSomeRow + kPanel);
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
      Buffers buffers(floats * sizeof(float));
      if (!buffers.ok()) failed = 1;
#pragma omp for schedule(dynamic, 1)
      for (int64_t tile = 0; tile < count(); ++tile) {
        if (!buffers.ok()) continue;
        buffers.start_over();
        sum_tile(tile / across() * kSide, tile % across() * kSide, grad, x, rows, dweight, buffers);
      }
    }
    return failed;
  }

 private:
  void sum_tile(int64_t first, int64_t start, const float* grad, const float* x, int64_t rows,
                float* dweight, Buffers& buffers) const {
    const int64_t height = columns - first < kSide ? columns - first : kSide;
    const int64_t width = inner - start < kSide ? inner - start : kSide;
    float* sums = buffers.take<float>(kSide * kSide);
    float* some = buffers.take<float>(kRowsOfChunk * kSomeRow);
    float* panel = buffers.take<float>(kRowsOfChunk * kPanel);
    for (int64_t i = 0; i < height * width; i += kLanes) store(sums + i, Vector{});
    for (int64_t from = 0; from < rows; from += kRowsOfChunk) {
      const int64_t count = rows - from < kRowsOfChunk ? rows - from : kRowsOfChunk;
      for (int64_t t = 0; t < count; ++t)
        for (int64_t j = 0; j < height; j += kLanes)
          store(some + t * kSomeRow + j, load(grad + (from + t) * columns + first + j));
      add_outer_products(some, kSomeRow, height, x + from * inner + start, inner, width, count, panel,
                         sums);
    }
    for (int64_t i = 0; i < height; ++i)
      std::memcpy(dweight + (first + i) * inner + start, sums + i * width, width * sizeof(float));
  }
};

}  // namespace
