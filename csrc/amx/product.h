// Products with packed weights in tile registers. Each function returns true, or it returns false and does nothing,
// where the weights do not fit tiles or the instruction set has none.
#pragma once

#include "product_in_tiles.h"
#include "product_of_terms.h"

namespace {

#ifdef VISION_TTT_TILES

// As product(), whatever the number of rows, because the sums have another order in tiles.
template <class Element, class Out>
VISION_TTT_INLINE bool product_by_tiles(const Element* x, int64_t x_row, int64_t rows, const Part& part,
                                        const Panels<Element>& panels, const Sink<Out>& sink,
                                        NextRows* next_rows) {
  if constexpr (std::is_same<Element, float>::value) {
    NextRows none;
    if (!panels.in_terms) return false;
    product_of_terms(x, x_row, rows, part.inner, panels, sink, next_rows ? *next_rows : none);
  } else {
    if (panels.inner % kInnerOfTile) return false;
    product_in_tiles(x, x_row, rows, panels, sink);
  }
  return true;
}

// As two_products(): the rows' terms serve both.
VISION_TTT_INLINE bool two_products_by_tiles(const float* x, int64_t x_row, int64_t rows, const Packed& first,
                                             const Packed& second, const Part& part, float* out,
                                             int64_t out_row, NextRows& next) {
  if (!first.in_terms || part.columns % kPanel) return false;
  two_products_of_terms(x, x_row, rows, part.inner, Panels<float>(first, part), Panels<float>(second, part),
                        out, out_row, next);
  return true;
}

// Products with a part of two weights of one shape: finish(row, column, a, b) takes their sums, which are never
// in memory.
template <class Element, class Finish>
VISION_TTT_INLINE bool two_products_by_tiles(const Element* x, int64_t x_row, int64_t rows, const Packed& first,
                                             const Packed& second, const Part& part, const Finish& finish) {
  const Panels<Element> of_first(first, part), of_second(second, part);
  if (part.columns % kPanel) return false;
  if constexpr (std::is_same<Element, float>::value) {
    if (!first.in_terms) return false;
    NextRows none;
    two_products_of_terms(x, x_row, rows, part.inner, of_first, of_second, none, finish);
  } else {
    if (of_first.inner % kInnerOfTile) return false;
    two_products_in_tiles(x, x_row, rows, of_first, of_second, finish);
  }
  return true;
}

#else

template <class... Arguments>
constexpr bool product_by_tiles(const Arguments&...) {
  return false;
}
template <class... Arguments>
constexpr bool two_products_by_tiles(const Arguments&...) {
  return false;
}

#endif

}  // namespace
