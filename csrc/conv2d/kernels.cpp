// The depth-wise Conv2d for one instruction set; compiled once for each, see the build.
#include "../vector.h"
#include "conv2d.h"

namespace {

VISION_TTT_INLINE float* token(const Sequence& s, int64_t batch, int64_t t) {
  return s.data + batch * s.batch + t * s.token;
}

// Taps [start, stop) of K that fall inside an axis of `size` when the middle one is at `place`.
struct Taps {
  int64_t start, stop;

  Taps(int64_t place, int64_t size, int64_t kernel) {
    const int64_t half = kernel / 2;
    start = place < half ? half - place : 0;
    stop = size - place + half < kernel ? size - place + half : kernel;
  }
};

// One token of the output. K = 0 takes any taps; inside the image the published ones are unrolled.
template <int K>
VISION_TTT_INLINE void convolve_token(const Conv2d& p, const float* centre, Taps rows, Taps cols,
                                      float* out) {
  const int64_t kernel = K ? K : p.kernel;
  if (K) rows.start = cols.start = 0, rows.stop = cols.stop = K;
  for (int64_t c = 0; c < p.channels; c += kLanes) {
    Vector total = p.residual ? load(centre + c) : Vector{};
    for (int64_t i = rows.start; i < rows.stop; ++i)
      for (int64_t j = cols.start; j < cols.stop; ++j) {
        const int64_t offset = (i - kernel / 2) * p.width + j - kernel / 2;
        total += load(p.weight + (i * kernel + j) * p.channels + c) *
                 load(centre + offset * p.x.token + c);
      }
    store(out + c, total);
  }
}

}  // namespace

void VISION_TTT_KERNEL(conv2d)(const Conv2d& p) {
  const int64_t tasks = p.batch * p.height;  // rows of tokens
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t batch = task / p.height, row = task % p.height;
    const Taps rows(row, p.height, p.kernel);
    for (int64_t col = 0; col < p.width; ++col) {
      const Taps cols(col, p.width, p.kernel);
      const int64_t t = row * p.width + col;
      const float* centre = token(p.x, batch, t);
      float* out = token(p.y, batch, t);
      const int64_t inside = (rows.stop - rows.start) * (cols.stop - cols.start);
      if (p.kernel == 3 && inside == 9)
        convolve_token<3>(p, centre, rows, cols, out);
      else
        convolve_token<0>(p, centre, rows, cols, out);
    }
  }
}

void VISION_TTT_KERNEL(conv2d_weight)(const Conv2d& p, float* weight) {
  const int64_t half = p.kernel / 2, columns = p.channels / kLanes;
  // One task has a vector of channels to itself: its sums add up in the same order whatever the
  // threads. Sums of a row of tokens first, so that rounding errors stay small on large images.
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t c = column * kLanes;
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
