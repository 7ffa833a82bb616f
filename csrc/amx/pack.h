// Panels of float32 weights as bfloat16 terms.
#pragma once

#include "../products/packed/panels.h"
#include "terms.h"

namespace {

#ifdef VISION_TTT_TILES

// Write a panel of terms. copy(k, to) copies kBlock rows [kPanel] of the panel, from k on. Returns true.
template <int64_t kBlock, class Copy>
VISION_TTT_INLINE bool pack_terms(int64_t inner, const Copy& copy, float* panel) {
  static_assert(2 * kBlock == kInnerOfTile, "two blocks are a tile");
  for (int64_t k = 0; k < inner; k += kInnerOfTile) {
    alignas(64) float numbers[2][kBlock * kPanel] = {};
    for (int64_t half = 0; half < 2 && k + half * kBlock < inner; ++half)
      copy(k + half * kBlock, numbers[half]);
    Bfloat16* to = reinterpret_cast<Bfloat16*>(panel) + k / kInnerOfTile * kTermsOfTile;
    for (int64_t i = 0; i < kBlock; ++i)
      store_terms(load(numbers[0] + i * kPanel), load(numbers[1] + i * kPanel), to + i * kInnerOfTile);
  }
  return true;
}

#else

// Returns false, and does nothing.
template <int64_t kBlock, class Copy>
constexpr bool pack_terms(int64_t, const Copy&, float*) {
  return false;
}

#endif

}  // namespace
