// Sums over tokens of products of two rows, as products of their bfloat16 terms in tile registers.
#pragma once

#include "../products/packed/chunks.h"
#include "product_of_terms.h"

namespace {

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

// As add_outer_products(), for any a_row and `count` up to kMost.
template <int64_t kMost>
VISION_TTT_INLINE bool outer_products_by_tiles(const float* a, int64_t a_row, int64_t count, const float* b,
                                               int64_t b_row, int64_t columns, int64_t rows, float* sums,
                                               bool adds, NextRows& next) {
  alignas(64) TermsOfTokens of_a[kMost / kRowsOfTile], of_b[2];
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
  return true;
}

#else

// Returns false, and does nothing.
template <int64_t kMost, class... Arguments>
constexpr bool outer_products_by_tiles(const Arguments&...) {
  return false;
}

#endif

}  // namespace
