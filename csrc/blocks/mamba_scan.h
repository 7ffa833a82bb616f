// Between the products of a Mamba block: its convolution, and the selective scan of a few tokens.
#pragma once

#include "../bfloat16.h"
#include "../scans/selective_scan/exponential.h"
#include "blocks.h"

namespace {

constexpr int64_t kStates = VISION_TTT_MAMBA_STATES;  // of a channel, in registers

// x σ(x).
VISION_TTT_INLINE Vector silu(Vector x) { return x / (1.0f + exp2(x * -1.44269504088896341f)); }

VISION_TTT_INLINE Vector rounded(Vector x, const float*) { return x; }
VISION_TTT_INLINE Vector rounded(Vector x, const Bfloat16*) {
  Bfloat16 bits[kLanes];
  store(bits, x);
  return load(bits);
}

// u = SiLU(bias + Σ_j w_j x_{t ∓ (K-1-j)}) of tokens of one image, back or forth.
template <class Element>
struct TokenConvolution1d {
  const Element* x;      // of token 0, in rows of x_row
  const float* weight;   // [K, channels]
  const float* bias;     // [channels]
  int64_t x_row, length, channels, taps;
  bool back;

  static constexpr int kTokens = 4;  // at a time, which share the weights

  // Tokens start … start + count - 1, u [count, channels].
  void operator()(int64_t start, int64_t count, Element* u) const {
    int64_t i = 0;
    while (i < count) {
      const int64_t first = start + i, last = first + kTokens - 1;
      const bool inside = back ? last + taps <= length : first >= taps - 1;
      if (inside && i + kTokens <= count) {
        tokens<kTokens>(first, 0, u + i * channels);
        i += kTokens;
      } else {
        const int64_t before = back ? length - 1 - first : first;  // tokens before it in scan order
        tokens<1>(first, before < taps - 1 ? taps - 1 - before : 0, u + i * channels);
        i += 1;
      }
    }
  }

 private:
  // kCount tokens from t on, without the taps before `from`.
  template <int kCount>
  VISION_TTT_INLINE void tokens(int64_t t, int64_t from, Element* u) const {
    const int64_t step = back ? -x_row : x_row;
    const Element* oldest = x + t * x_row - (taps - 1) * step;
    for (int64_t c = 0; c < channels; c += kLanes) {
      Vector sum[kCount];
      for (int i = 0; i < kCount; ++i) sum[i] = load(bias + c);
      for (int64_t j = from; j < taps; ++j) {
        const Vector w = load(weight + j * channels + c);
        for (int i = 0; i < kCount; ++i) sum[i] += w * load(oldest + j * step + i * x_row + c);
      }
      for (int i = 0; i < kCount; ++i) store(u + i * channels + c, silu(sum[i]));
    }
  }
};

// The recurrence of kLanes channels over neighbouring tokens of one image, back or forth.
template <class Element>
struct ScanOfTokens {
  const Element* u;      // [count, channels]
  const float* delta;    // [count, channels]
  const float* vectors;  // [count, 2 N]: B and C
  const float* decay;    // [N, channels]: A log₂ e
  const float* skip;     // [channels]
  int64_t channels, count;
  bool back;

  // Advance the state [N, channels] of channels c … and call finish(t, C h + D u) for every token.
  template <class Finish>
  VISION_TTT_INLINE void operator()(int64_t c, float* state, const Finish& finish) const {
    Vector h[kStates];
    for (int n = 0; n < kStates; ++n) h[n] = load(state + n * channels + c);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = back ? count - 1 - i : i;
      const Vector x = load(u + t * channels + c);
      const Vector step = load(delta + t * channels + c), update = step * x;
      const float* b = vectors + t * 2 * kStates;
      Vector y[2] = {load(skip + c) * x, Vector{}};  // two chains hide the latency of one
#pragma GCC unroll 16
      for (int n = 0; n < kStates; ++n) {
        h[n] = exp2(step * load(decay + n * channels + c)) * h[n] + update * b[n];
        y[n % 2] += h[n] * b[kStates + n];
      }
      finish(t, y[0] + y[1]);
    }
    for (int n = 0; n < kStates; ++n) store(state + n * channels + c, h[n]);
  }
};

}  // namespace
