// Products of bfloat16 rows with packed weights in tile registers. Where rows do not begin at cache lines,
// they take twice as long.
#pragma once

#include "../products/packed/panels.h"
#include "../products/packed/sink.h"
#include "tiles.h"

#ifdef VISION_TTT_TILES

namespace {

// The division of rows into tiles of equally many; the last one begins within its neighbour.
struct TilesOfRows {
  int64_t rows, tiles, size;

  explicit TilesOfRows(int64_t count)
      : rows(count), tiles((count + kRowsOfTile - 1) / kRowsOfTile),
        size((count + tiles - 1) / tiles) {}

  int64_t begin(int64_t tile) const { return tile + 1 < tiles ? tile * size : rows - size; }
  // The rows of a tile that belong to its neighbour.
  int64_t shared(int64_t tile) const { return tile + 1 < tiles ? 0 : tiles * size - rows; }

  // Registers 0 to 3 hold sums, 4 and 5 rows of x, 6 and 7 weights.
  TileRegisters registers() const {
    const TileShape of_rows{size, 64}, of_weights{kRowsOfTile, 64};
    return TileRegisters({of_rows, of_rows, of_rows, of_rows, of_rows, of_rows, of_weights, of_weights});
  }
};

// Floats of a product's rows and columns, from some row and column on, to which tiles are stored as they are.
struct TilesInMemory {
  float* first = nullptr;
  int64_t row = 0;
  bool adds = false;  // the product is added to them
  int64_t first_row = 0, first_column = 0;
};

// A product's result, if its sums may go there as they are.
template <class Out>
TilesInMemory in_memory(const Sink<Out>& sink) {
  if constexpr (std::is_same<Out, float>::value)
    if (!sink.bias && !sink.scale && (!sink.add || sink.add == sink.out) && sink.columns % kPanel == 0)
      return {sink.out, sink.out_row, sink.add != nullptr};
  return {};
}

// The sums of R tiles of rows, from `tile` on, and P panels of columns, from `column` on, in registers 0 to
// R · P - 1.
template <int R, int P>
struct SumsOfTiles {
  const TilesOfRows& rows;
  int64_t tile, column;

  VISION_TTT_INLINE void start(const TilesInMemory& from) const {
    for_constants<R * P>([&](auto i) {
      from.adds ? load_tile<i>(place(from, i), from.row * kFloat) : clear_tile<i>();
    });
  }
  // The sums go to memory, or finish(row, sums) takes those of each row.
  template <class Finish>
  VISION_TTT_INLINE void end(const TilesInMemory& to, const Finish& finish) const {
    alignas(64) float sums[R * kRowsOfTile][P * kPanel];
    bool stored[R];
    for_constants<R>([&](auto r) {
      // Rows that were added to before must not be stored.
      stored[r] = to.first && !(to.adds && rows.shared(tile + r));
      for_constants<P>([&](auto p) {
        constexpr int i = r * P + p;
        if (stored[r])
          store_tile<i>(place(to, i), to.row * kFloat);
        else
          store_tile<i>(&sums[r * kRowsOfTile][p * kPanel], sizeof sums[0]);
      });
    });
    for (int r = 0; r < R; ++r)
      for (int64_t t = stored[r] ? rows.size : rows.shared(tile + r); t < rows.size; ++t) {
        Vector numbers[1][P];
        for (int p = 0; p < P; ++p) numbers[0][p] = load(&sums[r * kRowsOfTile + t][p * kPanel]);
        finish(rows.begin(tile + r) + t, numbers);
      }
  }

 private:
  static constexpr int64_t kFloat = sizeof(float);

  VISION_TTT_INLINE float* place(const TilesInMemory& m, int i) const {
    return m.first + (rows.begin(tile + i / P) - m.first_row) * m.row + column - m.first_column +
           i % P * kPanel;
  }
};

// R tiles of rows of x [rows, inner], from `tile` on, times P panels of weights, for the columns from
// `column` on; inner is a multiple of kInnerOfTile.
template <int R, int P, class Finish>
VISION_TTT_INLINE void multiply_block(const Bfloat16* x, int64_t x_row, const TilesOfRows& rows,
                                      int64_t tile, const Bfloat16* const (&weights)[P],
                                      int64_t inner, int64_t column, const TilesInMemory& memory,
                                      const Finish& finish) {
  const Bfloat16* from[R];
  for_constants<R>([&](auto r) { from[r] = x + rows.begin(tile + r) * x_row; });
  const SumsOfTiles<R, P> sums{rows, tile, column};
  sums.start(memory);
  for (int64_t k = 0; k < inner; k += kInnerOfTile) {
    for_constants<P>([&](auto p) { load_tile<6 + p>(weights[p] + k * kPanel, 64); });
    for_constants<R>([&](auto r) {
      load_tile<4 + r>(from[r] + k, x_row * sizeof(Bfloat16));
      for_constants<P>([&](auto p) { multiply_tiles<r * P + p, 4 + r, 6 + p>(); });
    });
  }
  sums.end(memory, finish);
}

// Call multiply(R, tile) for tiles of rows, two at a time as far as there are. All columns of two tiles follow
// one another, so that their rows stay in the first cache level, and weights are read in order.
template <class Multiply>
VISION_TTT_INLINE void for_two_tiles(const TilesOfRows& rows, const Multiply& multiply) {
  int64_t tile = 0;
  for (; tile + 2 <= rows.tiles; tile += 2) multiply(std::integral_constant<int, 2>{}, tile);
  if (tile < rows.tiles) multiply(std::integral_constant<int, 1>{}, tile);
}

// As product(), where the inner axis is a multiple of kInnerOfTile.
template <class Out>
void product_in_tiles(const Bfloat16* x, int64_t x_row, int64_t count, const Panels<Bfloat16>& panels,
                      const Sink<Out>& sink) {
  if (!count) return;
  const TilesInMemory memory = in_memory(sink);
  Sink<Out> rest = sink;
  if (memory.first) rest.add = nullptr;
  const TilesOfRows rows(count);
  const TileRegisters registers = rows.registers();
  for_two_tiles(rows, [&](auto tiles, int64_t tile) __attribute__((always_inline)) {
    constexpr int R = decltype(tiles)::value;
    int64_t c = 0;
    auto finish = [&](int64_t row, const auto& sums) __attribute__((always_inline)) {
      rest.put(row, c, sums);
    };
    for (; c + kPanel < panels.columns; c += 2 * kPanel)
      multiply_block<R, 2>(x, x_row, rows, tile, {panels.at(c), panels.at(c + kPanel)}, panels.inner, c,
                           memory, finish);
    if (c < panels.columns)
      multiply_block<R, 1>(x, x_row, rows, tile, {panels.at(c)}, panels.inner, c, memory, finish);
  });
}

// Products with two weights of one shape: finish(row, column, a, b) takes their sums.
template <class Finish>
void two_products_in_tiles(const Bfloat16* x, int64_t x_row, int64_t count,
                           const Panels<Bfloat16>& first, const Panels<Bfloat16>& second,
                           const Finish& finish) {
  if (!count) return;
  const TilesOfRows rows(count);
  const TileRegisters registers = rows.registers();
  for_two_tiles(rows, [&](auto tiles, int64_t tile) __attribute__((always_inline)) {
    for (int64_t c = 0; c < first.columns; c += kPanel)
      multiply_block<decltype(tiles)::value, 2>(
          x, x_row, rows, tile, {first.at(c), second.at(c)}, first.inner, c, {},
          [&](int64_t row, const auto& sums) __attribute__((always_inline)) {
            finish(row, c, sums[0][0], sums[0][1]);
          });
  });
}

}  // namespace

#endif
