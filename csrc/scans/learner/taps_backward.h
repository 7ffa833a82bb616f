// The backward pass of a view's convolution, on the rows of a mini-batch in the cache. A token's
// gradient needs those of the K - 1 tokens after it, which the backward scan has just processed.
#pragma once

#include "head.h"

namespace {

template <int D>
struct TapsBackward {
  const float* taps;  // [K + 1, D], or null for no convolution
  float* dtaps;       // [K + 1, D]
  float* after;       // [K - 1, D]: gradients of the tokens after this mini-batch

  static size_t floats(const Problem& p) { return 2 * p.taps * D + 2 * 16; }

  static TapsBackward begin(const Problem& p, const float* taps, Scratch& scratch) {
    if (!taps) return {};
    const size_t whole = (p.taps + 1) * D, past = (p.taps - 1) * D;
    TapsBackward backward{taps, scratch.take(whole), scratch.take(past)};
    clear(backward.dtaps, whole);
    clear(backward.after, past);
    return backward;
  }

  // The first n of the rows [n + K - 1, D] are gradients of the convolved view. Add to the gradients of
  // the taps, given the convolution's input rows, and replace the n rows by gradients of the view.
  VISION_TTT_INLINE void run(int64_t count, int64_t n, const float* seen, float* rows) const {
    copy(rows + n * D, after, (count - 1) * D);
    copy(after, rows, (count - 1) * D);
    if (count == 4)
      columns<4>(4, n, seen, rows);
    else
      columns<0>(count, n, seen, rows);
  }

 private:
  // K = 0 supports any number of taps; the loop over the published number is unrolled.
  template <int K>
  void columns(int64_t any, int64_t n, const float* seen, float* rows) const {
    const int64_t count = K ? K : any;
    for (int64_t i = 0; i < D; i += kLanes) {
      Vector bias = load(dtaps + count * D + i);
      for (int64_t t = 0; t < n; ++t) bias += load(rows + t * D + i);
      store(dtaps + count * D + i, bias);
      for (int64_t j = 0; j < count; ++j) {
        Vector total = load(dtaps + j * D + i);
        for (int64_t t = 0; t < n; ++t)
          total += load(rows + t * D + i) * load(seen + (t + j) * D + i);
        store(dtaps + j * D + i, total);
      }
      for (int64_t t = 0; t < n; ++t) {
        Vector total{};
        for (int64_t j = 0; j < count; ++j)
          total += load(taps + (count - 1 - j) * D + i) * load(rows + (t + j) * D + i);
        store(rows + t * D + i, total);
      }
    }
  }
};

}  // namespace
