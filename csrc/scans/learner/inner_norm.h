// The inner norm, and the gradient of a token's loss through it.
//
// The formulas are those of src/vision_ttt/ops/_learner_inner_model.py, one token at a time.
#pragma once

#include <cmath>

#include "rows.h"

namespace {

// The inner norm's parameters of one head; weight is null for no norm.
struct Norm {
  const float* weight;
  const float* bias;
  float eps;
};

template <int D>
struct Standardised {
  Row<D> x;           // mean 0, variance 1
  float inverse_std;
};

template <int D>
VISION_TTT_INLINE Standardised<D> standardise(const Row<D>& z, float eps) {
  Row<D> centred = z - z.mean();
  float inverse_std = 1.0f / std::sqrt(centred.dot(centred) * (1.0f / D) + eps);
  return {centred * inverse_std, inverse_std};
}

// P g = g - mean(g) - x̂ mean(g x̂).
template <int D>
VISION_TTT_INLINE Row<D> remove_norm_directions(const Row<D>& g, const Row<D>& x_hat) {
  return g - g.mean() - x_hat * (g.dot(x_hat) * (1.0f / D));
}

// g = ∂/∂z ½‖f(k) - v‖², given z = k W + b.
template <int D>
VISION_TTT_INLINE Row<D> inner_gradient(const Row<D>& z, const Row<D>& k, const Row<D>& v,
                                        const Norm& norm) {
  if (!norm.weight) return z - v;
  auto [x_hat, inverse_std] = standardise(z, norm.eps);
  Row<D> weight = Row<D>::of(norm.weight);
  Row<D> error = k + x_hat * weight + Row<D>::of(norm.bias) - v;
  return remove_norm_directions(error * weight, x_hat) * inverse_std;
}

}  // namespace
