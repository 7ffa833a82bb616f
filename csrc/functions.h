// exp, GELU and related functions on whole vectors.
#pragma once

#include "vector.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

namespace {

// e^(x - n ln 2), |x - n ln 2| ≤ ln 2 / 2, by a polynomial (Cephes' coefficients).
VISION_TTT_INLINE Vector exp_of_rest(Vector x, Vector n) {
  const Vector r = x - n * 0.693359375f + n * 2.12194440e-4f;
  Vector p = splat(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  return p * r * r + r + 1.0f;
}

// e^x with a relative error of 1e-7 (8e-8 measured from -86 to 87): 2^n e^r with |r| ≤ ln 2 / 2. It is infinite
// above 88.8 and 0 below -104, without AVX-512 above 88.4 (n = 128) and below -87.7 (n = -127). A least number
// in the place of 0 would not do: SiLU and GELU multiply it with x, which may be huge. NaN stays NaN.
VISION_TTT_INLINE Vector exp(Vector x) {
#ifdef __AVX512F__
  // If an argument is NaN, max and min return the second one. The masks are full: GCC 12 warns
  // about the functions without a mask.
  constexpr __mmask16 all = 0xffff;
  __m512 limited = _mm512_maskz_max_ps(all, _mm512_set1_ps(-104.0f), reinterpret_cast<__m512>(x));
  limited = _mm512_maskz_min_ps(all, _mm512_set1_ps(89.0f), limited);
  const Vector y = reinterpret_cast<Vector>(limited), z = y * 1.44269504088896341f;
  const __m512 n = _mm512_maskz_roundscale_ps(all, reinterpret_cast<__m512>(z),
                                             _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vector rest = exp_of_rest(y, reinterpret_cast<Vector>(n));
  return reinterpret_cast<Vector>(
      _mm512_maskz_scalef_ps(all, reinterpret_cast<__m512>(rest), n));
#else
  const Vector original = x;
  x = select(x < -88.0f, splat(-88.0f), x);
  x = select(x > 89.0f, splat(89.0f), x);
  const Vector magic = splat(12582912.0f);  // 1.5 · 2^23: adding it rounds to an integer
  const Vector n = (x * 1.44269504088896341f + magic) - magic;
  // A NaN cannot be converted to an integer and is returned unchanged.
  const IntVector number = original == original;
  const Vector whole = select(number, n, Vector{});
  // The bits of 2^n, for n = -127 those of 0, for n = 128 those of infinity.
  const IntVector bits = (__builtin_convertvector(whole, IntVector) + 127) << 23;
  return select(number, exp_of_rest(x, n) * reinterpret_cast<Vector>(bits), original);
#endif
}

VISION_TTT_INLINE Vector sigmoid(Vector x) { return 1.0f / (1.0f + exp(-x)); }

struct Swish {
  Vector value, derivative;
};

// SiLU, or Swish, x σ(x) and its derivative.
VISION_TTT_INLINE Swish swish(Vector x) {
  const Vector s = sigmoid(x), value = x * s;
  return {value, s + value * (1.0f - s)};
}

struct Gelu {
  Vector value, derivative;
};

// x Φ(x) and its derivative Φ(x) + x φ(x), Φ by Abramowitz & Stegun 7.1.26, in float32 with an absolute
// error of 3e-7 (measured from -12 to 12).
VISION_TTT_INLINE Gelu gelu(Vector x) {
  const Vector magnitude = select(x < 0.0f, -x, x) * 0.70710678118654752f;
  const Vector t = 1.0f / (1.0f + 0.3275911f * magnitude);
  const Vector density = exp(-magnitude * magnitude);
  Vector p = splat(1.061405429f);
  p = p * t - 1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t - 0.284496736f;
  p = p * t + 0.254829592f;
  const Vector tail = 0.5f * p * t * density;  // Φ(-|x|)
  const Vector phi = select(x < 0.0f, tail, 1.0f - tail);
  return {x * phi, phi + x * density * 0.39894228040143268f};
}

struct GeluTanh {
  Vector value, derivative, second_derivative;
};

// The tanh form of GELU, z/2 (1 + tanh u) with u = √(2/π) (z + 0.044715 z³), as z s with s = σ(w),
// w = 2 u, and its derivatives, where s' = s (1 - s) and s'' = s' (1 - 2 s) are those of σ at w. The
// absolute errors in float32 are 5e-7, 5e-7 and 2e-6 (measured from -12 to 12).
VISION_TTT_INLINE GeluTanh gelu_tanh(Vector z) {
  // Beyond ±9 the results are those at infinity in float32. Without the limit w² could overflow.
  const Vector low = select(z < -9.0f, splat(-9.0f), z);
  const Vector x = select(low > 9.0f, splat(9.0f), low);
  const Vector square = x * x;
  const Vector w = x * (1.5957691216057308f + 0.07135481627260025f * square);
  const Vector slope = 1.5957691216057308f + 0.21406444881780076f * square;  // w'
  const Vector e = exp(-w);
  const Vector s = 1.0f / (1.0f + e);
  const Vector ds = s * s * e;  // 1 - s = s e, without cancellation
  const Vector bend = 0.4281288976356015f * x;  // w''
  return {low * s, s + x * ds * slope,
          ds * (2.0f * slope + x * ((s * e - s) * slope * slope + bend))};
}

}  // namespace
