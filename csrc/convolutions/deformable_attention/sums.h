// The sums of several vectors' lanes at once.
#pragma once

#include "../../vector.h"

namespace {

// Halve the number of vectors: in every group of 2 N lanes of the result, the first N are of a, the
// others of b.
template <int N>
VISION_TTT_INLINE Vector add_halves(Vector a, Vector b);

#if VISION_TTT_LANES == 16
template <>
VISION_TTT_INLINE Vector add_halves<8>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}
template <>
VISION_TTT_INLINE Vector add_halves<4>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
}
template <>
VISION_TTT_INLINE Vector add_halves<2>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
         __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
}
template <>
VISION_TTT_INLINE Vector add_halves<1>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30) +
         __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
}
#elif VISION_TTT_LANES == 8
template <>
VISION_TTT_INLINE Vector add_halves<4>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11) +
         __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
}
template <>
VISION_TTT_INLINE Vector add_halves<2>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13) +
         __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
}
template <>
VISION_TTT_INLINE Vector add_halves<1>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14) +
         __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
}
#else
template <>
VISION_TTT_INLINE Vector add_halves<2>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 1, 4, 5) + __builtin_shufflevector(a, b, 2, 3, 6, 7);
}
template <>
VISION_TTT_INLINE Vector add_halves<1>(Vector a, Vector b) {
  return __builtin_shufflevector(a, b, 0, 4, 2, 6) + __builtin_shufflevector(a, b, 1, 5, 3, 7);
}
#endif

// The sum of row i in lane i, of kLanes rows of kLanes floats.
VISION_TTT_INLINE Vector sums(const float* rows) {
  Vector v[kLanes];
  for (int i = 0; i < kLanes; ++i) v[i] = load(rows + i * kLanes);
#if VISION_TTT_LANES == 16
  for (int i = 0; i < 8; ++i) v[i] = add_halves<8>(v[i], v[i + 8]);
#endif
#if VISION_TTT_LANES >= 8
  for (int i = 0; i < 4; ++i) v[i] = add_halves<4>(v[i], v[i + 4]);
#endif
  for (int i = 0; i < 2; ++i) v[i] = add_halves<2>(v[i], v[i + 2]);
  return add_halves<1>(v[0], v[1]);
}

}  // namespace
