// Where a product's sums go.
#pragma once

#include "../../bfloat16.h"

namespace {

// The result of a product: out = add + scale ⊙ (sums + bias), where all but the sums are optional.
template <class Out>
struct Sink {
  Out* out;
  int64_t out_row;
  int64_t columns;
  const float* bias = nullptr;
  const float* scale = nullptr;
  const float* add = nullptr;  // may be out itself
  int64_t add_row = 0;

  template <int R, int V>
  VISION_TTT_INLINE void put(int64_t row, int64_t column, const Vector (&sums)[R][V]) const {
    // Unrolled here and below, because the compiler would otherwise store the sums to memory first.
    if (column + V * kLanes > columns) {
#pragma GCC unroll 16
      for (int r = 0; r < R; ++r)
#pragma GCC unroll 4
        for (int v = 0; v < V; ++v) put_some(row + r, column + v * kLanes, sums[r][v]);
      return;
    }
    Vector shift[V], factor[V];
    for (int v = 0; v < V; ++v) {
      shift[v] = bias ? load(bias + column + v * kLanes) : Vector{};
      factor[v] = scale ? load(scale + column + v * kLanes) : splat(1.0f);
    }
    // The strides are copied here: for all the compiler knows, a store might change this structure.
    const int64_t out_step = out_row, add_step = add_row;
    Out* to = out + row * out_row + column;
    const float* from = add ? add + row * add_row + column : nullptr;
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r, to += out_step) {
#pragma GCC unroll 4
      for (int v = 0; v < V; ++v) {
        Vector x = (sums[r][v] + shift[v]) * factor[v];
        if (from) x += load(from + v * kLanes);
        store(to + v * kLanes, x);
      }
      if (from) from += add_step;
    }
  }

  // The columns of a vector that exist.
  __attribute__((noinline)) void put_some(int64_t row, int64_t column, Vector sums) const {
    const int64_t count = columns - column < kLanes ? columns - column : kLanes;
    if (count <= 0) return;
    auto some = [&](const float* from) {
      float numbers[kLanes] = {};
      std::memcpy(numbers, from, count * sizeof(float));
      return load(numbers);
    };
    Vector x = sums;
    if (bias) x += some(bias + column);
    if (scale) x *= some(scale + column);
    if (add) x += some(add + row * add_row + column);
    Out numbers[kLanes];
    store(numbers, x);
    std::memcpy(out + row * out_row + column, numbers, count * sizeof(Out));
  }
};

}  // namespace
