// A layer of a few columns on the tokens of a wide one, while a chunk of them is in the cache. Its products are too
// narrow for packed weights.
#pragma once

#include <cstring>

#include "../matmul.h"
#include "linear.h"
#include "weight_gradient.h"

namespace {

// x weightᵀ + bias, with the columns padded to whole vectors.
class NarrowForward {
 public:
  NarrowForward(const NarrowLinear& layer, int64_t inner, Buffers& buffers)
      : layer_(layer), inner_(inner), padded_(padded(layer)),
        weight_(buffers.take<float>((inner + 1) * padded_)), bias_(weight_ + inner * padded_) {
    for (int64_t c = 0; c < padded_; ++c) {
      const bool is_there = c < layer.columns;
      for (int64_t i = 0; i < inner; ++i)
        weight_[i * padded_ + c] = is_there ? layer.weight[c * inner + i] : 0.0f;
      bias_[c] = is_there ? layer.bias[c] : 0.0f;
    }
  }
  static size_t bytes(const NarrowLinear& layer, int64_t inner) {
    return Buffers::padded((inner + 1) * padded(layer) * sizeof(float));
  }

  // The rows [start, start + count) of x, which begin at `x`.
  void operator()(const float* x, int64_t start, int64_t count) const {
    constexpr int64_t kRows = 16;
    alignas(64) float some[kRows * kLanes];
    for (int64_t t = 0; t < count; t += kRows)
      for (int64_t c = 0; c < padded_; c += kLanes) {
        const int64_t rows = count - t < kRows ? count - t : kRows;
        const int64_t columns = layer_.columns - c < kLanes ? layer_.columns - c : kLanes;
        product<true>(rows, kLanes, {inner_, x + t * inner_, inner_, 1, weight_ + c, padded_, some, kLanes,
                                     bias_ + c, 0});
        for (int64_t r = 0; r < rows; ++r)
          std::memcpy(layer_.out + (start + t + r) * layer_.columns + c, some + r * kLanes,
                      columns * sizeof(float));
      }
  }

 private:
  const NarrowLinear& layer_;
  int64_t inner_, padded_;
  float *weight_, *bias_;

  static int64_t padded(const NarrowLinear& layer) { return (layer.columns + kLanes - 1) / kLanes * kLanes; }
};

// The layer's gradients for the rows [start, start + count), which begin at `x` and `dx`: adds to dx, and to sums of
// the weight [M, D] and the bias [M].
VISION_TTT_INLINE void add_narrow_gradients(const NarrowLinear& layer, int64_t inner, int64_t start, int64_t count,
                                            const float* x, float* dx, float* sums) {
  const int64_t columns = layer.columns;
  const float* grad = layer.grad + start * columns;
  multiply_add(count, columns, inner, grad, columns, layer.weight, dx);
  multiply_add_transposed(columns, count, inner, grad, columns, x, sums);
  for (int64_t t = 0; t < count; ++t)
    for (int64_t c = 0; c < columns; ++c) sums[columns * inner + c] += grad[t * columns + c];
}

VISION_TTT_INLINE int64_t floats_of_narrow_sums(const NarrowLinear& layer, int64_t inner) {
  return (layer.columns * (inner + 1) + kLanes - 1) / kLanes * kLanes;
}

VISION_TTT_INLINE void clear_narrow_sums(const NarrowLinear& layer, int64_t inner, float* sums) {
  for (int64_t i = 0; i < floats_of_narrow_sums(layer, inner); i += kLanes) store(sums + i, Vector{});
}

// The gradients of the weight and the bias: sums of `count` parts, `apart` floats between them.
VISION_TTT_INLINE void add_up_narrow(const NarrowLinear& layer, int64_t inner, float* parts, int64_t apart,
                                     int64_t count) {
  if (!layer.columns) return;
  add_parts(parts, apart, count, floats_of_narrow_sums(layer, inner), parts);
  std::memcpy(layer.dweight, parts, layer.columns * inner * sizeof(float));
  std::memcpy(layer.dbias, parts + layer.columns * inner, layer.columns * sizeof(float));
}

}  // namespace
