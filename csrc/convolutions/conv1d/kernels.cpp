// The depth-wise Conv1d, for one instruction set. The build compiles this file once for each.
#include "../../spans.h"
#include "../../transposed.h"
#include "conv1d.h"

namespace {

// One token's channels [start, stop), whose scan direction is `step`; the weight is [K, C] here. K = 0
// supports any number of taps, also beyond the sequence. For the published number, four, the loop is
// unrolled where all taps are inside.
template <int K>
VISION_TTT_INLINE void conv1d_token(const Conv1d& p, int64_t batch, int64_t t, int64_t start,
                                    int64_t stop, int64_t step) {
  const int64_t taps = K ? K : p.taps;
  const float* x = token(p.x, batch, t);
  float* y = token(p.y, batch, t);
  for (int64_t c = start; c < stop; c += kLanes) {
    Vector total = p.bias ? load(p.bias + c) : Vector{};
    for (int64_t j = 0; j < taps; ++j) {
      const int64_t shift = step * (j - (taps - 1));
      if (!K && (t + shift < 0 || t + shift >= p.length)) continue;
      total += load(p.weight + j * p.channels + c) * load(x + shift * p.x.token + c);
    }
    store(y + c, total);
  }
}

VISION_TTT_INLINE void conv1d_direction(const Conv1d& p, const Span& span, int64_t start,
                                        int64_t stop, int64_t step) {
  // Token by token, not channel by channel, so that memory is read contiguously.
  for (int64_t t = span.start; t < span.stop; ++t) {
    const int64_t first = t - step * (p.taps - 1);
    if (p.taps == 4 && first >= 0 && first < p.length)
      conv1d_token<4>(p, span.batch, t, start, stop, step);
    else
      conv1d_token<0>(p, span.batch, t, start, stop, step);
  }
}

}  // namespace

int VISION_TTT_KERNEL(conv1d)(const Conv1d& call) {
  const Transposed weight(call.weight, call.channels, call.taps);
  if (!weight.data()) return 1;
  Conv1d p = call;
  p.weight = weight.data();
  const int64_t tasks = p.batch * chunks(p.length);
  const int64_t forward = p.channels - p.reverse_channels;
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const Span span(task, p.length);
    conv1d_direction(p, span, 0, forward, 1);
    conv1d_direction(p, span, forward, p.channels, -1);
  }
  return 0;
}

void VISION_TTT_KERNEL(conv1d_weights)(const Conv1d& p, const Conv1dWeights& grad) {
  const int64_t forward = p.channels - p.reverse_channels;
  const int64_t columns = p.channels / kLanes;
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t c = column * kLanes, step = c < forward ? 1 : -1;
    // Chunks are summed first, then their sums, so that rounding errors stay small in long sequences.
    Vector bias{};
    for (int64_t j = 0; j < p.taps; ++j) store(grad.weight + j * p.channels + c, Vector{});
    for (int64_t task = 0; task < p.batch * chunks(p.length); ++task) {
      const Span span(task, p.length);
      Vector share{};
      for (int64_t t = span.start; t < span.stop; ++t) share += load(token(p.y, span.batch, t) + c);
      bias += share;
      for (int64_t j = 0; j < p.taps; ++j) {
        const int64_t shift = step * (j - (p.taps - 1));
        Vector total{};
        for (int64_t t = span.start; t < span.stop; ++t)
          if (t + shift >= 0 && t + shift < p.length)
            total += load(token(p.y, span.batch, t) + c) * load(token(p.x, span.batch, t + shift) + c);
        float* weight = grad.weight + j * p.channels + c;
        store(weight, load(weight) + total);
      }
    }
    store(grad.bias + c, bias);
  }
}
