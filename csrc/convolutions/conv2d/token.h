// One token of a depth-wise Conv2d on a grid of tokens.
#pragma once

#include "../../vector.h"

namespace {

// The taps [start, stop) of K that are inside an axis of `size` if the middle one is at `place`.
struct Taps {
  int64_t start, stop;

  Taps(int64_t place, int64_t size, int64_t kernel) {
    const int64_t half = kernel / 2;
    start = place < half ? half - place : 0;
    stop = size - place + half < kernel ? size - place + half : kernel;
  }
};

// Some channels of a grid's tokens, which are x_row numbers apart, and their weight [K · K, weight_row].
// The bias may be null. With `residual` the token itself is added.
template <class In>
struct TokenConvolution {
  int64_t x_row, height, width, channels, kernel;
  const float* weight;
  int64_t weight_row;
  const float* bias;
  bool residual;

  // K = 0 supports any kernel; inside the image the loops over the published sizes are unrolled.
  template <int K>
  VISION_TTT_INLINE void run(const In* centre, Taps rows, Taps cols, float* out) const {
    const int64_t size = K ? K : kernel;
    if (K) rows.start = cols.start = 0, rows.stop = cols.stop = K;
    for (int64_t c = 0; c < channels; c += kLanes) {
      Vector total = residual ? load(centre + c) : Vector{};
      if (bias) total += load(bias + c);
      for (int64_t i = rows.start; i < rows.stop; ++i)
        for (int64_t j = cols.start; j < cols.stop; ++j) {
          const int64_t offset = (i - size / 2) * width + j - size / 2;
          total += load(weight + (i * size + j) * weight_row + c) * load(centre + offset * x_row + c);
        }
      store(out + c, total);
    }
  }

  // The token at a place of its image's sequence; its numbers begin at `centre`.
  VISION_TTT_INLINE void operator()(const In* centre, int64_t place, float* out) const {
    const Taps rows(place / width, height, kernel), cols(place % width, width, kernel);
    if (kernel == 3 && (rows.stop - rows.start) * (cols.stop - cols.start) == 9)
      run<3>(centre, rows, cols, out);
    else
      run<0>(centre, rows, cols, out);
  }
};

}  // namespace
