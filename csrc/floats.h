// Sizes, copies and sums of floats in memory.
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

// out[i] = Σ_k shares[k · stride + i]
inline void add_up(const float* shares, int64_t count, int64_t stride, int64_t length, float* out) {
  int64_t i = 0;
  for (; i + kLanes <= length; i += kLanes) {
    Vector total{};
    for (int64_t k = 0; k < count; ++k) total += load(shares + k * stride + i);
    store(out + i, total);
  }
  for (; i < length; ++i) {
    float total = 0.0f;
    for (int64_t k = 0; k < count; ++k) total += shares[k * stride + i];
    out[i] = total;
  }
}

}  // namespace
