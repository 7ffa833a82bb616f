// Operations on single rows between two products.
#pragma once

#include <cmath>

#include "../bfloat16.h"
#include "../functions.h"
#include "pointwise.h"

namespace {

struct MeanAndScale {
  float mean, inverse_std;
};

template <class In>
VISION_TTT_INLINE MeanAndScale moments(const In* x, int64_t dim, float eps) {
  Vector total{};
  for (int64_t i = 0; i < dim; i += kLanes) total += load(x + i);
  const float mean = sum(total) / float(dim);
  Vector square{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vector centred = load(x + i) - mean;
    square += centred * centred;
  }
  return {mean, 1.0f / std::sqrt(sum(square) / float(dim) + eps)};
}

// out [rows, D] = LN(x).
template <class Out>
VISION_TTT_INLINE void normalise_rows(const float* x, int64_t rows, int64_t dim,
                                      const NormParameters& norm, int64_t image, Out* out) {
  const float* weight = norm.weight + image * norm.image_stride;
  const float* bias = norm.bias + image * norm.image_stride;
  for (int64_t t = 0; t < rows; ++t, x += dim, out += dim) {
    const MeanAndScale m = moments(x, dim, float(norm.eps));
    for (int64_t i = 0; i < dim; i += kLanes)
      store(out + i, (load(x + i) - m.mean) * m.inverse_std * load(weight + i) + load(bias + i));
  }
}

// out = GELU(gate) ⊙ Σ_r LN_r(z_r) over the parts z_r [D] of each row of z; a null gate is omitted.
template <class Element>
VISION_TTT_INLINE void merge_rows(const Element* z, int64_t z_row, const float* gate, int64_t rows,
                                  int64_t dim, int64_t parts, const float* weight,
                                  const float* bias, float eps, Element* out) {
  for (int64_t t = 0; t < rows; ++t, z += z_row, gate += gate ? dim : 0, out += dim) {
    MeanAndScale m[2];
    for (int64_t r = 0; r < parts; ++r) m[r] = moments(z + r * dim, dim, eps);
    for (int64_t i = 0; i < dim; i += kLanes) {
      Vector total{};
      for (int64_t r = 0; r < parts; ++r) {
        const Vector x_hat = (load(z + r * dim + i) - m[r].mean) * m[r].inverse_std;
        total += x_hat * load(weight + r * dim + i) + load(bias + r * dim + i);
      }
      store(out + i, gate ? gelu(load(gate + i)).value * total : total);
    }
  }
}

// out = SiLU(gate) ⊙ value for `count` numbers.
template <class Out>
VISION_TTT_INLINE void swiglu_numbers(const float* gate, const float* value, int64_t count,
                                      Out* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector x = load(gate + i);
    store(out + i, x * sigmoid(x) * load(value + i));
  }
}

template <class Out>
VISION_TTT_INLINE void gelu_numbers(const float* x, int64_t count, bool tanh_form, Out* out) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Vector v = load(x + i);
    store(out + i, tanh_form ? gelu_tanh(v).value : gelu(v).value);
  }
}

}  // namespace
