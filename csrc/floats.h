// Sizes and copies of floats in memory.
#pragma once

#include <cstring>

#include "vector.h"

namespace {

VISION_TTT_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

VISION_TTT_INLINE void copy(float* to, const float* from, size_t floats) {
  std::memcpy(to, from, floats * sizeof(float));
}

VISION_TTT_INLINE void clear(float* to, size_t floats) { std::memset(to, 0, floats * sizeof(float)); }

}  // namespace
