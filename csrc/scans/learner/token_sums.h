// Sums along the rows of kLanes tokens at once, one token per lane.
//
// The sum of one row needs a chain of log2 kLanes dependent shuffles. For kLanes rows together a shuffle
// processes two rows or more, and one instruction computes the square roots or quotients of all rows.
#pragma once

#include <cmath>

#if defined(__AVX__)
#include <immintrin.h>
#endif

#include "../../vector.h"

namespace {

#if VISION_TTT_LANES == 16
#define VISION_TTT_EACH_LANE(f) \
  f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
#elif VISION_TTT_LANES == 8
#define VISION_TTT_EACH_LANE(f) f(0), f(1), f(2), f(3), f(4), f(5), f(6), f(7)
#else
#define VISION_TTT_EACH_LANE(f) f(0), f(1), f(2), f(3)
#endif

// kCount partial sums: at first those of one token in all lanes, at the end those of kLanes tokens.
template <int kCount>
struct Sums {
  Vector of[kCount];
};

// Lanes whose index has the bit kBit hold sums of b, the others sums of a, each of a lane and its
// neighbour across the bit.
template <int kBit>
VISION_TTT_INLINE Vector fold(Vector a, Vector b) {
#define VISION_TTT_OWN(i) ((i) & kBit ? kLanes + (i) : (i))
#define VISION_TTT_ACROSS(i) (((i) ^ kBit) + ((i) & kBit ? kLanes : 0))
  return __builtin_shufflevector(a, b, VISION_TTT_EACH_LANE(VISION_TTT_OWN)) +
         __builtin_shufflevector(a, b, VISION_TTT_EACH_LANE(VISION_TTT_ACROSS));
#undef VISION_TTT_OWN
#undef VISION_TTT_ACROSS
}

// terms(t) are the summands of token t. The sums of token first + i are in lane i of the result. The
// order of the additions is the same for every token.
template <int kTokens, class Terms>
VISION_TTT_INLINE auto token_sums(const Terms& terms, int64_t first) {
  if constexpr (kTokens == 1) {
    return terms(first);
  } else {
    auto sums = token_sums<kTokens / 2>(terms, first);
    const auto others = token_sums<kTokens / 2>(terms, first + kTokens / 2);
    for (size_t i = 0; i < sizeof(sums) / sizeof(Vector); ++i)
      sums.of[i] = fold<kTokens / 2>(sums.of[i], others.of[i]);
    return sums;
  }
}

VISION_TTT_INLINE Vector square_root(Vector x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Vector>(_mm512_maskz_sqrt_ps(0xffff, reinterpret_cast<__m512>(x)));
#elif defined(__AVX__)
  return reinterpret_cast<Vector>(_mm256_sqrt_ps(reinterpret_cast<__m256>(x)));
#else
  for (int i = 0; i < kLanes; ++i) x[i] = std::sqrt(x[i]);
  return x;
#endif
}

}  // namespace
