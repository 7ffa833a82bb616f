// The inner norm's output and gradient for the rows of a mini-batch, kLanes of them at a time.
//
// The formulas are those of inner_norm.h, with the sums over a row rewritten so that they depend on the
// row's mean only: three passes over rows in the first cache level.
#pragma once

#include "inner_norm.h"
#include "token_sums.h"

namespace {

// kLanes rows of D floats from `first` on. Rows beyond the n are replaced by the last one.
struct TokenBlock {
  int64_t first, n;

  int64_t row(int64_t lane) const { return first + lane < n ? first + lane : n - 1; }
  int64_t end() const { return first + kLanes < n ? first + kLanes : n; }
};

// The means of a block's rows, one token per lane.
template <int D>
VISION_TTT_INLINE Vector row_means(const float* z, const TokenBlock& block) {
  auto terms = [&](int64_t lane) __attribute__((always_inline)) {
    const float* row = z + block.row(lane) * D;
    Vector total = load(row);
    for (int64_t i = kLanes; i < D; i += kLanes) total += load(row + i);
    return Sums<1>{{total}};
  };
  return token_sums<kLanes>(terms, 0).of[0] * (1.0f / D);
}

VISION_TTT_INLINE Vector inverse_std(Vector squares, int D, float eps) {
  return 1.0f / square_root(squares * (1.0f / D) + eps);
}

// Write f(x) to n rows of `out`, which may be those of z = x W + b themselves.
template <int D>
VISION_TTT_INLINE void inner_outputs(int64_t n, const float* x, const float* z, const Norm& norm,
                                     const RowsOf<float>& out) {
  if (!norm.weight) {
    for (int64_t t = 0; t < n; ++t) Row<D>::of(z + t * D).to(out[t]);
    return;
  }
  alignas(64) float mean[kLanes], scale[kLanes];
  for (TokenBlock block{0, n}; block.first < n; block.first += kLanes) {
    store(mean, row_means<D>(z, block));
    auto squares = [&](int64_t lane) __attribute__((always_inline)) {
      const float* row = z + block.row(lane) * D;
      Vector total{};
      for (int64_t i = 0; i < D; i += kLanes) {
        const Vector centred = load(row + i) - mean[lane];
        total += centred * centred;
      }
      return Sums<1>{{total}};
    };
    store(scale, inverse_std(token_sums<kLanes>(squares, 0).of[0], D, norm.eps));
    for (int64_t t = block.first; t < block.end(); ++t) {
      const float m = mean[t - block.first], s = scale[t - block.first];
      for (int64_t i = 0; i < D; i += kLanes)
        store(out[t] + i, load(x + t * D + i) + load(norm.bias + i) +
                              (load(z + t * D + i) - m) * s * load(norm.weight + i));
    }
  }
}

// Sums over row t of what g needs, where c = z - mean(z) and r = γ (k + β - v): c², r, r c, γ² c and γ² c².
// Writes r unless it is null.
template <int D>
VISION_TTT_INLINE Sums<5> loss_sums(int64_t t, float mean, const float* z, const float* k,
                                    const RowsOf<const float>& v, const Norm& norm, float* rows) {
  Sums<5> sums{};
  for (int64_t i = 0; i < D; i += kLanes) {
    const Vector weight = load(norm.weight + i), c = load(z + t * D + i) - mean;
    const Vector r = (load(k + t * D + i) - load(v[t] + i) + load(norm.bias + i)) * weight;
    const Vector wwc = weight * weight * c;
    if (rows) store(rows + t * D + i, r);
    sums.of[0] += c * c;
    sums.of[1] += r;
    sums.of[2] += r * c;
    sums.of[3] += wwc;
    sums.of[4] += wwc * c;
  }
  return sums;
}

// G = η_t g_t, g = ∂/∂z ½‖f(k) - v‖² given z = k W + b, for n rows; eta is null for η = 1.
//
// With c = z - mean(z), s = 1 / std(z) and r = γ (k + β - v): g = s (u - mean(u) - c s² mean(u c)),
// u = r + γ² c s.
template <int D>
VISION_TTT_INLINE void inner_gradients(int64_t n, const float* z, const float* k,
                                       const RowsOf<const float>& v, const float* eta, const Norm& norm,
                                       float* step) {
  if (!norm.weight) {
    for (int64_t t = 0; t < n; ++t)
      ((Row<D>::of(z + t * D) - Row<D>::of(v[t])) * (eta ? eta[t] : 1.0f)).to(step + t * D);
    return;
  }
  alignas(64) float mean[kLanes], offset[kLanes], scale[kLanes], shrink[kLanes], spread[kLanes];
  for (TokenBlock block{0, n}; block.first < n; block.first += kLanes) {
    store(mean, row_means<D>(z, block));
    auto terms = [&](int64_t lane) __attribute__((always_inline)) {
      return loss_sums<D>(block.row(lane), mean[lane], z, k, v, norm, step);
    };
    const auto sums = token_sums<kLanes>(terms, 0);
    const Vector s = inverse_std(sums.of[0], D, norm.eps);
    const Vector mean_u = (sums.of[1] + s * sums.of[3]) * (1.0f / D);
    const Vector mean_uc = (sums.of[2] + s * sums.of[4]) * (1.0f / D);
    Vector rate = s;
    if (eta) {
      for (int i = 0; i < kLanes; ++i) rate[i] *= eta[block.row(i)];
    }
    store(scale, rate);
    store(offset, rate * mean_u);
    store(spread, rate * s);
    store(shrink, rate * s * s * mean_uc);
    for (int64_t t = block.first; t < block.end(); ++t) {
      const int64_t lane = t - block.first;
      for (int64_t i = t * D; i < (t + 1) * D; i += kLanes) {
        const Vector weight = load(norm.weight + i - t * D);
        const Vector c = load(z + i) - mean[lane];
        store(step + i, load(step + i) * scale[lane] - offset[lane] +
                            c * (weight * weight * spread[lane] - shrink[lane]));
      }
    }
  }
}

}  // namespace
