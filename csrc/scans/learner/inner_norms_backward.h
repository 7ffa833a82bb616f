// The derivatives of the inner norm's output and gradient for the rows of a mini-batch, kLanes of them at a
// time.
//
// The formulas are those of inner_norm.h, with the sums over a row rewritten so that they depend on the row's
// mean only. c = z - mean(z), s = 1 / std(z), x̂ = c s.
#pragma once

#include "inner_norms.h"

namespace {

// o = f(x) at z. Given the gradients ∂o of n rows, write those of z, and add to ∂γ and ∂β:
// ∂z = s (γ ∂o - mean(γ ∂o) - x̂ mean(γ ∂o x̂)).
template <int D>
VISION_TTT_INLINE void inner_outputs_backward(int64_t n, const float* grad, const float* z, const Norm& norm,
                                              float* dz, float* dweight, float* dbias) {
  alignas(64) float mean[kLanes], scale[kLanes], offset[kLanes], shrink[kLanes];
  for (TokenBlock block{0, n}; block.first < n; block.first += kLanes) {
    store(mean, row_means<D>(z, block));
    auto terms = [&](int64_t lane) __attribute__((always_inline)) {
      const int64_t row = block.row(lane), t = row * D;
      Sums<3> sums{};
      for (int64_t i = 0; i < D; i += kLanes) {
        const Vector c = load(z + t + i) - mean[lane], u = load(grad + t + i) * load(norm.weight + i);
        sums.of[0] += c * c;
        sums.of[1] += u;
        sums.of[2] += u * c;
      }
      return sums;
    };
    const auto sums = token_sums<kLanes>(terms, 0);
    const Vector s = inverse_std(sums.of[0], D, norm.eps);
    store(scale, s);
    store(offset, s * sums.of[1] * (1.0f / D));
    store(shrink, s * s * s * sums.of[2] * (1.0f / D));
    for (int64_t i = 0; i < D; i += kLanes) {
      const Vector weight = load(norm.weight + i);
      Vector of_weight = load(dweight + i), of_bias = load(dbias + i);
      for (int64_t t = block.first; t < block.end(); ++t) {
        const int64_t lane = t - block.first;
        const Vector c = load(z + t * D + i) - mean[lane], gradient = load(grad + t * D + i);
        store(dz + t * D + i, gradient * weight * scale[lane] - offset[lane] - c * shrink[lane]);
        of_weight += gradient * (c * scale[lane]);
        of_bias += gradient;
      }
      store(dweight + i, of_weight);
      store(dbias + i, of_bias);
    }
  }
}

// G = η_t g_t as inner_gradients() computes it. Given the gradients ∂G of n rows, write those of z, v and,
// unless deta is null, of η_t, and add to those of k, γ and β. `eta` is null for η = 1.
template <int D>
VISION_TTT_INLINE void inner_gradients_backward(int64_t n, const float* dstep, const float* eta, const float* z,
                                                const float* k, const RowsOf<const float>& v, const Norm& norm,
                                                float* dz, float* dk, float* dv, float* deta, float* dweight,
                                                float* dbias) {
  if (!norm.weight) {
    for (int64_t t = 0; t < n; ++t) {
      const Row<D> ds = Row<D>::of(dstep + t * D), a = ds * (eta ? eta[t] : 1.0f);
      if (deta) deta[t] = ds.dot(Row<D>::of(z + t * D) - Row<D>::of(v[t]));
      a.to(dz + t * D);
      (a * -1.0f).to(dv + t * D);
    }
    return;
  }
  constexpr float kShare = 1.0f / D;
  float squares = 0.0f;  // Σ γ²
  for (int64_t i = 0; i < D; i += kLanes) squares += sum(load(norm.weight + i) * load(norm.weight + i));

  alignas(64) float mean[kLanes], scale[kLanes], rate[kLanes];
  alignas(64) float a_mean[kLanes], a_along[kLanes], u_along[kLanes], x_mean[kLanes], x_along[kLanes];
  for (TokenBlock block{0, n}; block.first < n; block.first += kLanes) {
    store(mean, row_means<D>(z, block));
    auto of_loss = [&](int64_t lane) __attribute__((always_inline)) {
      return loss_sums<D>(block.row(lane), mean[lane], z, k, v, norm, nullptr);
    };
    // r = γ (k + β - v), so that u = γ e = r + γ² x̂.
    auto of_gradient = [&](int64_t lane) __attribute__((always_inline)) {
      const int64_t row = block.row(lane), t = row * D;
      Sums<5> sums{};
      for (int64_t i = 0; i < D; i += kLanes) {
        const Vector weight = load(norm.weight + i), c = load(z + t + i) - mean[lane];
        const Vector r = (load(k + t + i) - load(v[row] + i) + load(norm.bias + i)) * weight;
        const Vector ds = load(dstep + t + i), ww_ds = weight * weight * ds;
        sums.of[0] += ds;
        sums.of[1] += ds * c;
        sums.of[2] += ds * r;
        sums.of[3] += ww_ds;
        sums.of[4] += ww_ds * c;
      }
      return sums;
    };
    const auto loss = token_sums<kLanes>(of_loss, 0), gradient = token_sums<kLanes>(of_gradient, 0);
    const Vector s = inverse_std(loss.of[0], D, norm.eps);
    Vector h = splat(1.0f);
    if (eta) {
      for (int i = 0; i < kLanes; ++i) h[i] = eta[block.row(i)];
    }
    // With a = η ∂G: g = s (u - u_0 - x̂ u_1), ∂u = s (a - a_0 - x̂ a_1), where an index 0 names a mean and 1 that
    // of the product with x̂.
    const Vector u_0 = (loss.of[1] + s * loss.of[3]) * kShare;
    const Vector u_1 = (loss.of[2] + s * loss.of[4]) * s * kShare;
    const Vector a_0 = h * gradient.of[0] * kShare, a_1 = h * s * gradient.of[1] * kShare;
    const Vector ds_g = s * (gradient.of[2] + s * gradient.of[4] - u_0 * gradient.of[0] -
                             u_1 * s * gradient.of[1]);
    // ∂x̂ = γ² ∂u - s (a u_1 + u a_1)
    const Vector x_0 = s * ((h * gradient.of[3] - a_0 * squares - a_1 * s * loss.of[3]) * kShare -
                            u_1 * a_0 - a_1 * u_0);
    const Vector x_1 = s * (s * (h * gradient.of[4] - a_0 * loss.of[3] - a_1 * s * loss.of[4]) * kShare -
                            2.0f * u_1 * a_1);
    store(scale, s);
    store(rate, h);
    store(a_mean, s * a_0);
    store(a_along, s * a_1);
    store(u_along, s * u_1);
    store(x_mean, s * x_0);
    store(x_along, s * (x_1 + h * ds_g * kShare));
    if (deta)
      for (int64_t t = block.first; t < block.end(); ++t) deta[t] = ds_g[t - block.first];

    for (int64_t i = 0; i < D; i += kLanes) {
      const Vector weight = load(norm.weight + i), bias = load(norm.bias + i);
      Vector of_weight = load(dweight + i), of_bias = load(dbias + i);
      for (int64_t t = block.first; t < block.end(); ++t) {
        const int64_t at = t * D + i, lane = t - block.first;
        const Vector x_hat = (load(z + at) - mean[lane]) * scale[lane];
        const Vector e = load(k + at) + bias - load(v[t] + i) + weight * x_hat;
        const Vector a = load(dstep + at) * rate[lane];
        const Vector du = a * scale[lane] - a_mean[lane] - x_hat * a_along[lane], de = weight * du;
        const Vector dx = weight * de - a * u_along[lane] - weight * e * a_along[lane];
        store(dz + at, dx * scale[lane] - x_mean[lane] - x_hat * x_along[lane]);
        store(dk + at, load(dk + at) + de);
        store(dv + at, -de);
        of_weight += du * e + de * x_hat;
        of_bias += de;
      }
      store(dweight + i, of_weight);
      store(dbias + i, of_bias);
    }
  }
}

}  // namespace
