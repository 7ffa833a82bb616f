// Products of float32 rows with packed weights, as products of their bfloat16 terms in tile registers.
#pragma once

#include "../products/packed/next_rows.h"
#include "product_in_tiles.h"
#include "terms.h"

#ifdef VISION_TTT_TILES

namespace {

// The most panels whose sums over a part of the inner axis are kept.
constexpr int64_t kPanelsAtOnce = 32;

// Terms of whole panels, from a step of the inner axis on.
inline const Bfloat16* terms_of(const Panels<float>& panels, int64_t column, int64_t start) {
  return reinterpret_cast<const Bfloat16*>(panels.at(column) + floats_of_terms(start) * kPanel);
}

// The division of an inner axis into parts, for which the terms of two tiles of rows stay in the first cache
// level.
struct PartsOfInner {
  static constexpr int64_t kMost = 4 * kInnerOfTile;
  int64_t inner, size;

  explicit PartsOfInner(int64_t numbers) : inner(numbers) {
    const int64_t parts = (inner + kMost - 1) / kMost;
    size = (inner + parts * kInnerOfTile - 1) / (parts * kInnerOfTile) * kInnerOfTile;
  }
  bool is_last(int64_t start) const { return inner - start <= size; }
  int64_t count(int64_t start) const { return is_last(start) ? inner - start : size; }
};

// The terms of two tiles of rows.
class RowsOfTerms {
 public:
  // Split R tiles of x [rows, inner], from `tile` on.
  template <int R>
  void split(const float* x, int64_t x_row, const TilesOfRows& rows, int64_t tile, int64_t inner) {
    for (int r = 0; r < R; ++r) {
      const float* from = x + rows.begin(tile + r) * x_row;
      for (int64_t i = 0; i < rows.size; ++i, from += x_row) {
        Bfloat16* to = terms_[r] + i * kInnerOfTile;
        int64_t k = 0;
        for (; k + kInnerOfTile <= inner; k += kInnerOfTile, to += kTermsOfTile)
          store_terms(load(from + k), load(from + k + kLanes), to);
        if (k < inner)
          store_terms(load_first(from + k, inner - k), load_first(from + k + kLanes, inner - k - kLanes),
                      to);
      }
    }
  }
  const Bfloat16* tile(int r) const { return terms_[r]; }

 private:
  // The first n of 16 numbers, zeros after them; n may be negative or above 16.
  static Vector load_first(const float* p, int64_t n) {
    const uint32_t mask = n <= 0 ? 0 : n >= kLanes ? 0xffffu : (1u << n) - 1;
    return reinterpret_cast<Vector>(_mm512_maskz_loadu_ps(__mmask16(mask), p));
  }

  alignas(64) Bfloat16 terms_[2][PartsOfInner::kMost / kInnerOfTile * kTermsOfTile];
};

// Rows of `inner` numbers times `count` panels: panel(i, start) are terms of the i-th one, from a
// number of its inner axis on.
// The sums go to memory, or finish(row, i, sums) takes those of one or two panels from the i-th on.
template <class Panel, class Finish>
VISION_TTT_INLINE void multiply_panels(const float* x, int64_t x_row, int64_t x_rows, int64_t inner,
                                       int64_t count, const Panel& panel, const TilesInMemory& memory,
                                       NextRows& next, const Finish& finish) {
  const TilesOfRows rows(x_rows);
  const TileRegisters registers = rows.registers();
  const PartsOfInner parts(inner);
  RowsOfTerms terms;
  // The sums over the parts before. Rows begin in different sets of the first cache level.
  constexpr int64_t kRow = (kPanelsAtOnce + 1) * kPanel;
  alignas(64) float partial[2 * kRowsOfTile * kRow];
  for_two_tiles(rows, [&](auto tiles, int64_t tile) __attribute__((always_inline)) {
    constexpr int R = decltype(tiles)::value;
    for (int64_t first = 0; first < count; first += kPanelsAtOnce) {
      const int64_t end = count - first < kPanelsAtOnce ? count : first + kPanelsAtOnce;
      const TilesInMemory before{partial, kRow, true, rows.begin(tile), first * kPanel};
      const TilesInMemory after{partial, kRow, false, rows.begin(tile), first * kPanel};
      for (int64_t start = 0; start < inner; start += parts.size) {
        const int64_t some = parts.count(start), steps = (some + kInnerOfTile - 1) / kInnerOfTile;
        terms.template split<R>(x + start, x_row, rows, tile, some);
        auto multiply = [&](auto width, int64_t i) __attribute__((always_inline)) {
          constexpr int P = decltype(width)::value;
          const Bfloat16 *from[R], *columns[P];
          for (int r = 0; r < R; ++r) from[r] = terms.tile(r);
          for (int p = 0; p < P; ++p) columns[p] = panel(i + p, start);
          const SumsOfTiles<R, P> sums{rows, tile, i * kPanel};
          sums.start(start ? before : memory);
          multiply_terms<R, P>(from, columns, steps, [&]() __attribute__((always_inline)) { next.fetch(); });
          sums.end(parts.is_last(start) ? memory : after,
                   [&](int64_t row, const auto& numbers) __attribute__((always_inline)) {
                     finish(row, i, numbers);
                   });
        };
        int64_t i = first;
        for (; i + 2 <= end; i += 2) multiply(std::integral_constant<int, 2>{}, i);
        if (i < end) multiply(std::integral_constant<int, 1>{}, i);
      }
    }
  });
}

// As product(), for rows of `inner` numbers.
template <class Out>
void product_of_terms(const float* x, int64_t x_row, int64_t rows, int64_t inner, const Panels<float>& panels,
                      const Sink<Out>& sink, NextRows& next) {
  if (!rows) return;
  const TilesInMemory memory = in_memory(sink);
  Sink<Out> rest = sink;
  if (memory.first) rest.add = nullptr;
  multiply_panels(
      x, x_row, rows, inner, panels.columns / kPanel,
      [&](int64_t i, int64_t start) { return terms_of(panels, i * kPanel, start); }, memory, next,
      [&](int64_t row, int64_t i, const auto& sums) __attribute__((always_inline)) {
        rest.put(row, i * kPanel, sums);
      });
}

// As two_products(), for whole panels.
inline void two_products_of_terms(const float* x, int64_t x_row, int64_t rows, int64_t inner,
                                  const Panels<float>& first, const Panels<float>& second, float* out,
                                  int64_t out_row, NextRows& next) {
  if (!rows) return;
  const int64_t panels = first.columns / kPanel;
  multiply_panels(
      x, x_row, rows, inner, 2 * panels,
      [&](int64_t i, int64_t start) {
        return i < panels ? terms_of(first, i * kPanel, start) : terms_of(second, (i - panels) * kPanel, start);
      },
      TilesInMemory{out, out_row}, next, [](int64_t, int64_t, const auto&) {});
}

// Products with two weights of one shape: finish(row, column, a, b) takes their sums.
template <class Finish>
void two_products_of_terms(const float* x, int64_t x_row, int64_t rows, int64_t inner,
                           const Panels<float>& first, const Panels<float>& second, NextRows& next,
                           const Finish& finish) {
  if (!rows) return;
  multiply_panels(
      x, x_row, rows, inner, 2 * (first.columns / kPanel),
      [&](int64_t i, int64_t start) { return terms_of(i % 2 ? second : first, i / 2 * kPanel, start); },
      TilesInMemory{}, next, [&](int64_t row, int64_t i, const auto& sums) __attribute__((always_inline)) {
        if constexpr (sizeof sums / sizeof(Vector) == 2) finish(row, i / 2 * kPanel, sums[0][0], sums[0][1]);
      });
}

}  // namespace

#endif
