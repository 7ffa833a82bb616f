// Sums over tokens of products of two rows: the gradient of a linear layer's weight.
#pragma once

#include "../packed/chunks.h"
#include "../packed/product.h"

namespace {

constexpr int64_t kThreadsToServe = 16;

// Rows of the weight whose sums fit a core's cache, together with packed weights: of one layer, and of an MLP.
constexpr int64_t kColumnsOfSlice = 512;
#ifdef VISION_TTT_TILES
constexpr int64_t kColumnsAtOnce = 128;
#else
constexpr int64_t kColumnsAtOnce = 256;
#endif
constexpr int64_t kMostColumns = 256;  // of a factor of an outer product
// Successive rows of so many floats begin in different sets of the first cache level.
constexpr int64_t kRowAtOnce = kColumnsAtOnce + 16;

#ifdef VISION_TTT_TILES

// Terms of a chunk's tokens, as the inner axis of a product.
struct TermsOfTokens {
  static constexpr int64_t kSteps = (kRowsOfChunk + kInnerOfTile - 1) / kInnerOfTile;
  Bfloat16 terms[kSteps * kTermsOfTile];

  // 16 columns of x, in rows `x_row` apart.
  void columns_of(const float* x, int64_t x_row, int64_t rows) {
    alignas(64) float block[2][kRowsOfTile * kRowsOfTile];
    for (int64_t start = 0; start < rows; start += kInnerOfTile) {
      for (int64_t half = 0; half < 2; ++half) {
        const int64_t from = start + half * kRowsOfTile;
        if (from + kRowsOfTile <= rows) {
          transpose_square(x + from * x_row, x_row, block[half], kRowsOfTile);
        } else {
          alignas(64) float last[kRowsOfTile * kRowsOfTile] = {};
          for (int64_t t = from; t < rows; ++t) store(last + (t - from) * kRowsOfTile, load(x + t * x_row));
          transpose_square(last, kRowsOfTile, block[half], kRowsOfTile);
        }
      }
      Bfloat16* to = terms + start / kInnerOfTile * kTermsOfTile;
      for (int64_t i = 0; i < kRowsOfTile; ++i)
        store_terms(load(block[0] + i * kRowsOfTile), load(block[1] + i * kRowsOfTile), to + i * kInnerOfTile);
    }
  }

  // The same as a panel, in which tokens are neighbours.
  void panel_of(const float* x, int64_t x_row, int64_t rows) {
    for (int64_t start = 0; start < rows; start += kInnerOfTile) {
      Bfloat16* to = terms + start / kInnerOfTile * kTermsOfTile;
      for (int64_t t = start; t < start + kRowsOfTile; ++t, to += kInnerOfTile)
        store_terms(t < rows ? load(x + t * x_row) : Vector{},
                    t + kRowsOfTile < rows ? load(x + (t + kRowsOfTile) * x_row) : Vector{}, to);
    }
  }
};

// sums [count, columns] = aᵀ b, or += where `adds`, for up to kRowsOfChunk rows of a [rows, count] and
// b [rows, columns]. `count` is at most kMostColumns; both are multiples of 16.
__attribute__((noinline)) void add_outer_products(const float* a, int64_t a_row, int64_t count,
                                                  const float* b, int64_t b_row, int64_t columns,
                                                  int64_t rows, float* sums, bool adds, NextRows& next) {
  alignas(64) TermsOfTokens of_a[kMostColumns / kRowsOfTile], of_b[2];
  for (int64_t i = 0; i < count; i += kRowsOfTile) of_a[i / kRowsOfTile].columns_of(a + i, a_row, rows);
  const TilesOfRows tiles_of_sums(count);
  const TileRegisters registers = tiles_of_sums.registers();
  const int64_t steps = (rows + kInnerOfTile - 1) / kInnerOfTile;
  auto panels = [&](auto number, int64_t j) __attribute__((always_inline)) {
    constexpr int P = decltype(number)::value;
    const Bfloat16* from[P];
    for (int p = 0; p < P; ++p) {
      of_b[p].panel_of(b + j + p * kPanel, b_row, rows);
      from[p] = of_b[p].terms;
    }
    for_two_tiles(tiles_of_sums, [&](auto tiles, int64_t tile) __attribute__((always_inline)) {
      constexpr int R = decltype(tiles)::value;
      const Bfloat16* of_rows[R];
      for (int r = 0; r < R; ++r) of_rows[r] = of_a[tile + r].terms;
      const SumsOfTiles<R, P> some{tiles_of_sums, tile, j};
      some.start({sums, columns, adds});
      multiply_terms<R, P>(of_rows, from, steps, [&]() __attribute__((always_inline)) { next.fetch(); });
      some.end({sums, columns}, [](int64_t, const auto&) {});
    });
  };
  int64_t j = 0;
  for (; j + kPanel < columns; j += 2 * kPanel) panels(std::integral_constant<int, 2>{}, j);
  if (j < columns) panels(std::integral_constant<int, 1>{}, j);
}
#else

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
// b [rows, columns]; both are multiples of 16. Rows of `a` begin in different sets of the first cache level.
__attribute__((noinline)) void add_outer_products(const float* a, int64_t a_row, int64_t count,
                                                  const float* b, int64_t b_row, int64_t columns,
                                                  int64_t rows, float* sums, bool adds, NextRows&) {
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

#endif

// The same for an `a` whose rows may begin in the same sets of the first cache level.
void add_outer_products_of_any(const float* a, int64_t a_row, int64_t count, const float* b, int64_t b_row,
                               int64_t columns, int64_t rows, float* sums, bool adds, NextRows& next) {
#ifdef VISION_TTT_TILES
  add_outer_products(a, a_row, count, b, b_row, columns, rows, sums, adds, next);
#else
  alignas(64) float copy[kRowsOfChunk * kRowAtOnce];
  for (int64_t t = 0; t < rows; ++t)
    for (int64_t j = 0; j < count; j += kLanes) store(copy + t * kRowAtOnce + j, load(a + t * a_row + j));
  add_outer_products(copy, kRowAtOnce, count, b, b_row, columns, rows, sums, adds, next);
#endif
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
#ifdef VISION_TTT_TILES
  static constexpr int64_t kUnit = kRowsOfChunk;  // a chunk of fewer rows takes nearly as long
#else
  static constexpr int64_t kUnit = kTileOfRows;
#endif
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
      Buffers buffers(kSide * kSide * sizeof(float));
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
