// The depth-wise Conv2d, for one instruction set. The build compiles this file once for each.
#include "../../spans.h"
#include "../../transposed.h"
#include "conv2d.h"
#include "token.h"

namespace {

// One vector of channels of the weight's gradient for the published size, 3 · 3 taps in one pass. Rows of tokens
// are summed first, so that rounding errors stay small on large images.
void weight_of_three(const Conv2d& p, int64_t c, float* weight) {
  Vector total[9] = {};
  for (int64_t task = 0; task < p.batch * p.height; ++task) {
    const int64_t batch = task / p.height, row = task % p.height;
    const Taps rows(row, p.height, 3);
    const float *x = token(p.x, batch, row * p.width) + c, *y = token(p.y, batch, row * p.width) + c;
    const int64_t above = p.x.token * p.width;
    // At the edges, the taps that are inside.
    auto edge = [&](int64_t col) {
      const Taps cols(col, p.width, 3);
      for (int64_t i = rows.start; i < rows.stop; ++i)
        for (int64_t j = cols.start; j < cols.stop; ++j)
          total[i * 3 + j] += load(y + col * p.y.token) * load(x + (i - 1) * above + (col + j - 1) * p.x.token);
    };
    if (rows.stop - rows.start < 3) {
      for (int64_t col = 0; col < p.width; ++col) edge(col);
      continue;
    }
    edge(0);
    if (p.width == 1) continue;
    edge(p.width - 1);
    Vector share[9] = {};
    for (int64_t col = 1; col + 1 < p.width; ++col) {
      const Vector gradient = load(y + col * p.y.token);
#pragma GCC unroll 9
      for (int i = 0; i < 9; ++i)
        share[i] += gradient * load(x + (i / 3 - 1) * above + (col + i % 3 - 1) * p.x.token);
    }
    for (int i = 0; i < 9; ++i) total[i] += share[i];
  }
  for (int64_t i = 0; i < 9; ++i) store(weight + i * p.channels + c, total[i]);
}

}  // namespace

int VISION_TTT_KERNEL(conv2d)(const Conv2d& p) {
  const Transposed weight(p.weight, p.channels, p.kernel * p.kernel);
  if (!weight.data()) return 1;
  const TokenConvolution<float> convolve{p.x.token, p.height, p.width, p.channels, p.kernel,
                                         weight.data(), p.channels, nullptr, false};
  const int64_t tasks = p.batch * p.height;  // rows of tokens
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t batch = task / p.height, row = task % p.height;
    for (int64_t t = row * p.width; t < (row + 1) * p.width; ++t)
      convolve(token(p.x, batch, t), t, token(p.y, batch, t));
  }
  return 0;
}

void VISION_TTT_KERNEL(conv2d_weight)(const Conv2d& p, float* weight) {
  const int64_t half = p.kernel / 2, columns = p.channels / kLanes;
  // A vector of channels belongs to one task, so that the order of its sums does not depend on the
  // threads. Rows of tokens are summed first, so that rounding errors stay small on large images.
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t c = column * kLanes;
    if (p.kernel == 3) {
      weight_of_three(p, c, weight);
      continue;
    }
    for (int64_t i = 0; i < p.kernel; ++i)
      for (int64_t j = 0; j < p.kernel; ++j) {
        Vector total{};
        const int64_t first = j < half ? half - j : 0;
        const int64_t last = j > half ? p.width - (j - half) : p.width;
        for (int64_t task = 0; task < p.batch * p.height; ++task) {
          const int64_t batch = task / p.height, row = task % p.height, other = row + i - half;
          if (other < 0 || other >= p.height) continue;
          Vector share{};
          for (int64_t col = first; col < last; ++col)
            share += load(token(p.y, batch, row * p.width + col) + c) *
                     load(token(p.x, batch, other * p.width + col + j - half) + c);
          total += share;
        }
        store(weight + (i * p.kernel + j) * p.channels + c, total);
      }
  }
}
