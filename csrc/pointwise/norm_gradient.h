// The gradient of a LayerNorm over rows.
#pragma once

#include "rows.h"

namespace {

// Replace n rows of ∂LN(x) by ∂x, plus `add` unless it is null, and add to the gradients of the norm's parameters.
VISION_TTT_INLINE void layer_norm_backward(const float* x, int64_t rows, int64_t dim, const float* weight, float eps,
                                           const float* add, float* grad, float* dweight, float* dbias) {
  for (int64_t t = 0; t < rows; ++t, x += dim, grad += dim) {
    const MeanAndScale m = moments(x, dim, eps);
    Vector total{}, along{};
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Vector gradient = load(grad + i), x_hat = (load(x + i) - m.mean) * m.inverse_std;
      store(dweight + i, load(dweight + i) + gradient * x_hat);
      store(dbias + i, load(dbias + i) + gradient);
      const Vector u = gradient * load(weight + i);
      total += u;
      along += u * x_hat;
    }
    const float mean = sum(total) / float(dim), projection = sum(along) / float(dim);
    for (int64_t i = 0; i < dim; i += kLanes) {
      const Vector x_hat = (load(x + i) - m.mean) * m.inverse_std;
      const Vector u = load(grad + i) * load(weight + i);
      const Vector dx = (u - mean - x_hat * projection) * m.inverse_std;
      store(grad + i, add ? dx + load(add + t * dim + i) : dx);
    }
  }
}

}  // namespace
