// The decay 2^x of the selective scan, and softplus.
#pragma once

#include "../../functions.h"

#if defined(__AVX512DQ__)
#include <immintrin.h>
#endif

namespace {

#if defined(__AVX512DQ__)
constexpr __mmask16 kAllLanes = 0xffff;  // GCC 12 warns of the functions without a mask
#endif

// 2^x with a relative error of 2e-7: 2^n 2^r with |r| ≤ ½, 2^r = 1 + r q(r) by a polynomial fitted for
// the least largest relative error, 9.2e-8. That of 2^r - 1 stays small near r = 0, so that the errors
// of many tokens' slow decays do not add up to more. NaN stays NaN; without AVX-512 only if its last nine
// bits are 0, as decay_rates makes it.
VISION_TTT_INLINE Vector exp2(Vector x) {
#if defined(__AVX512DQ__)
  // The remainder of infinity is 0. Results below 2^-126 are subnormal or 0, those above 2^128 infinite.
  const Vector r = reinterpret_cast<Vector>(
      _mm512_maskz_reduce_ps(kAllLanes, reinterpret_cast<__m512>(x), _MM_FROUND_TO_NEAREST_INT));
  const Vector n = x - r;
#else
  // Results are between 2^-126 and infinity.
  const Vector low = select(x < -126.0f, splat(-126.0f), x);
  const Vector near = select(low > 128.0f, splat(128.0f), low);
  const Vector shifted = near + 12582912.0f;  // 1.5 · 2^23: adding it rounds to an integer
  const Vector r = near - (shifted - 12582912.0f);
#endif
  Vector p = splat(0.001326472731307149f);
  p = p * r + 0.009671512991189957f;
  p = p * r + 0.05550733581185341f;
  p = p * r + 0.24022242426872253f;
  p = p * r + 0.6931470036506653f;
  p = p * r + 1.0f;
#if defined(__AVX512DQ__)
  return reinterpret_cast<Vector>(
      _mm512_maskz_scalef_ps(kAllLanes, reinterpret_cast<__m512>(p), reinterpret_cast<__m512>(n)));
#else
  // The last bits of `shifted` are n; the sum of 2^128's and of 1 is infinity.
  return reinterpret_cast<Vector>(reinterpret_cast<IntVector>(p) +
                                  (reinterpret_cast<IntVector>(shifted) << 23));
#endif
}

struct Softplus {
  Vector value, derivative;
};

// ln(1 + e^x) = max(x, 0) + ln(1 + e^-|x|), the logarithm as 2 artanh(s) with s = e^-|x| / (2 + e^-|x|)
// and a polynomial in s², with a relative error of 5e-9 before rounding. The derivative is σ(x).
VISION_TTT_INLINE Softplus softplus(Vector x) {
  const Vector e = exp(select(x < 0.0f, x, -x));
  const Vector one = 1.0f + e, two = 2.0f + e, inverse = 1.0f / (one * two);  // a single division
  const Vector s = e * one * inverse, square = s * s, sigmoid = two * inverse;
  Vector p = splat(0.14012230211139495f);
  p = p * square + 0.1399957040000981f;
  p = p * square + 0.20010849536249498f;
  p = p * square + 0.333332065662865f;
  const Vector logarithm = 2.0f * s * (1.0f + square * p);
  return {select(x > 0.0f, x, Vector{}) + logarithm, select(x < 0.0f, e * sigmoid, sigmoid)};
}

}  // namespace
