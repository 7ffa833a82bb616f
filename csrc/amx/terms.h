// float32 as a sum of three bfloat16 terms, and products of such sums in tile registers.
//
// Each term takes the next 8 of a number's 24 bits, so that the sum is exact (above 2⁻¹¹⁰; what lies below
// 2⁻¹²⁶ is dropped). Of the nine products of two numbers' terms the six largest are added: those left out are
// about as small as a rounding of float32. Infinity gives NaN.
#pragma once

#include "tiles.h"

namespace {

constexpr int kTerms = 3;

// The length of a packed weight's column of terms, in floats.
constexpr int64_t floats_of_terms(int64_t inner) {
  return (inner + kInnerOfTile - 1) / kInnerOfTile * kInnerOfTile * kTerms / 2;
}

}  // namespace

#ifdef VISION_TTT_TILES

namespace {

constexpr int64_t kTile = kRowsOfTile * kInnerOfTile;  // bfloat16 numbers of a tile
constexpr int64_t kTermsOfTile = kTerms * kTile;       // of all terms, one tile after the other

// Split 16 numbers and 16 others; a term of two of them is a pair, and `to` the first term's row of a tile.
// Pairs of numbers that are 16 apart need no shuffles. Both factors of a product have this order.
VISION_TTT_INLINE void store_terms(Vector low, Vector high, Bfloat16* to) {
  typedef uint32_t Bits __attribute__((vector_size(4 * VISION_TTT_LANES)));
  const Bits upper = Bits{} + 0xffff0000u;
  for (int n = 0; n < kTerms; ++n) {
    const Bits a = reinterpret_cast<Bits>(low), b = reinterpret_cast<Bits>(high);
    const Bits pairs = (a >> 16) | (b & upper);
    std::memcpy(to + n * kTile, &pairs, sizeof pairs);
    low -= reinterpret_cast<Vector>(a & upper);
    high -= reinterpret_cast<Vector>(b & upper);
  }
}

// Registers 0 to R · P - 1 += R tiles of rows times P of columns over `steps` steps of kInnerOfTile numbers.
// The terms of each follow one another, step after step. Registers 4 and 5 hold rows, 6 and 7 columns. Each
// step calls step().
template <int R, int P, class Step>
VISION_TTT_INLINE void multiply_terms(const Bfloat16* const (&rows)[R], const Bfloat16* const (&columns)[P],
                                      int64_t steps, const Step& step) {
  for (int64_t at = 0; at < steps * kTermsOfTile; at += kTermsOfTile) {
    step();
    const auto load_rows = [&](int64_t term) __attribute__((always_inline)) {
      for_constants<R>([&](auto r) { load_whole_tile<4 + r>(rows[r] + at + term * kTile); });
    };
    const auto load_columns = [&](int64_t term) __attribute__((always_inline)) {
      for_constants<P>([&](auto p) { load_whole_tile<6 + p>(columns[p] + at + term * kTile); });
    };
    const auto multiply = []() __attribute__((always_inline)) {
      for_constants<R * P>([](auto i) { multiply_tiles<i, 4 + i / P, 6 + i % P>(); });
    };
    load_rows(2), load_columns(0), multiply();
    load_rows(1), multiply();
    load_columns(1), multiply();
    load_rows(0), multiply();
    load_columns(2), multiply();
    load_columns(0), multiply();
  }
}

}  // namespace

#endif
