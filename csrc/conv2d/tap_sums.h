// The gradient of a depth-wise Conv2d's weight: sums over tokens, for one vector of channels.
#pragma once

#include "token.h"

namespace {

// Some channels of one image's tokens [height, width], and of the gradients of the rows [first, end).
struct TokensAndGradients {
  const float *x, *grad;  // of the image's first token, and of the first row's
  int64_t x_row, grad_row, height, width, first, end;

  VISION_TTT_INLINE const float* x_at(int64_t row, int64_t col) const { return x + (row * width + col) * x_row; }
  VISION_TTT_INLINE const float* grad_at(int64_t row, int64_t col) const {
    return grad + ((row - first) * width + col) * grad_row;
  }

  // Add to the sums of 3 · 3 taps, in one pass. Rows of tokens are summed first, so that rounding errors
  // stay small on large images.
  void add_three(Vector (&total)[9]) const {
    for (int64_t row = first; row < end; ++row) {
      const Taps rows(row, height, 3);
      // At the edges, the taps that are inside.
      auto edge = [&](int64_t col) {
        const Taps cols(col, width, 3);
        for (int64_t i = rows.start; i < rows.stop; ++i)
          for (int64_t j = cols.start; j < cols.stop; ++j)
            total[i * 3 + j] += load(grad_at(row, col)) * load(x_at(row + i - 1, col + j - 1));
      };
      if (rows.stop - rows.start < 3) {
        for (int64_t col = 0; col < width; ++col) edge(col);
        continue;
      }
      edge(0);
      if (width == 1) continue;
      edge(width - 1);
      Vector share[9] = {};
      for (int64_t col = 1; col + 1 < width; ++col) {
        const Vector gradient = load(grad_at(row, col));
#pragma GCC unroll 9
        for (int i = 0; i < 9; ++i) share[i] += gradient * load(x_at(row + i / 3 - 1, col + i % 3 - 1));
      }
      for (int i = 0; i < 9; ++i) total[i] += share[i];
    }
  }

  // Add to the sum of the tap (i, j) of K · K.
  void add_tap(int64_t i, int64_t j, int64_t kernel, Vector& total) const {
    const int64_t half = kernel / 2, start = j < half ? half - j : 0;
    const int64_t stop = j > half ? width - (j - half) : width;
    for (int64_t row = first; row < end; ++row) {
      const int64_t other = row + i - half;
      if (other < 0 || other >= height) continue;
      Vector share{};
      for (int64_t col = start; col < stop; ++col)
        share += load(grad_at(row, col)) * load(x_at(other, col + j - half));
      total += share;
    }
  }
};

// Store the sums [K · K] over `count` groups of tokens, which are `row` numbers apart; group(n) returns one.
template <class Group>
void store_tap_sums(int64_t kernel, int64_t count, const Group& group, int64_t row, float* sums) {
  if (kernel == 3) {
    Vector total[9] = {};
    for (int64_t n = 0; n < count; ++n) group(n).add_three(total);
    for (int64_t i = 0; i < 9; ++i) store(sums + i * row, total[i]);
    return;
  }
  for (int64_t tap = 0; tap < kernel * kernel; ++tap) {
    Vector total{};
    for (int64_t n = 0; n < count; ++n) group(n).add_tap(tap / kernel, tap % kernel, kernel, total);
    store(sums + tap * row, total);
  }
}

}  // namespace
