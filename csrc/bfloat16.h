// Conversion of float vectors from and to bfloat16 in memory, and products of bfloat16 pairs.
#pragma once

#include <cstring>

#include "vector.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace {

struct Bfloat16 {
  uint16_t bits;
};

typedef uint16_t ShortVector __attribute__((vector_size(2 * VISION_TTT_LANES)));

VISION_TTT_INLINE Vector load(const Bfloat16* p) {
  ShortVector bits;
  std::memcpy(&bits, p, sizeof bits);
  return reinterpret_cast<Vector>(__builtin_convertvector(bits, IntVector) << 16);
}

// Round to nearest, ties to even; NaN stays NaN. AVX-512's own conversion makes 0 of subnormal numbers, the other
// branch keeps them.
VISION_TTT_INLINE void store(Bfloat16* p, Vector v) {
#ifdef __AVX512BF16__
  const auto rounded = _mm512_cvtneps_pbh(reinterpret_cast<__m512>(v));
  std::memcpy(p, &rounded, sizeof rounded);
#else
  const IntVector bits = reinterpret_cast<IntVector>(v);
  const IntVector low = (bits >> 16) & 1, number = v == v;
  const IntVector up = (number & (bits + 0x7fff + low)) | (~number & (bits | 0x400000));
  const ShortVector rounded = __builtin_convertvector((up >> 16) & 0xffff, ShortVector);
  std::memcpy(p, &rounded, sizeof rounded);
#endif
}

// Two bfloat16 per lane; the first is the lower half.
VISION_TTT_INLINE Vector load_pairs(const Bfloat16* p) {
  return load(reinterpret_cast<const float*>(p));
}

VISION_TTT_INLINE Vector splat_pair(const Bfloat16* p) {
  int32_t pair;
  std::memcpy(&pair, p, sizeof pair);
  return reinterpret_cast<Vector>(IntVector{} + pair);
}

// sum + a₀ b₀ + a₁ b₁ in each lane, in float32.
VISION_TTT_INLINE Vector add_product_of_pairs(Vector sum, Vector a, Vector b) {
#ifdef __AVX512BF16__
  return reinterpret_cast<Vector>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum),
                                                   reinterpret_cast<__m512bh>(a),
                                                   reinterpret_cast<__m512bh>(b)));
#else
  const IntVector x = reinterpret_cast<IntVector>(a), y = reinterpret_cast<IntVector>(b);
  sum += reinterpret_cast<Vector>(x << 16) * reinterpret_cast<Vector>(y << 16);
  const IntVector upper = IntVector{} + int32_t(0xffff0000);
  return sum + reinterpret_cast<Vector>(x & upper) * reinterpret_cast<Vector>(y & upper);
#endif
}

}  // namespace
