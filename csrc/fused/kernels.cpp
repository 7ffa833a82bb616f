// The memory-bound kernels, for one instruction set. The build compiles this file once for each.
#include <cmath>

#include "fused.h"
#include "../functions.h"
#include "../transposed.h"

namespace {

// Chunks do not depend on the threads, so that the order of sums over tokens is fixed.
constexpr int64_t kChunk = VISION_TTT_CHUNK_TOKENS;

VISION_TTT_INLINE int64_t chunks(int64_t length) { return (length + kChunk - 1) / kChunk; }
VISION_TTT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The tokens of one chunk of one image.
struct Span {
  int64_t batch, start, stop;

  Span(int64_t task, int64_t length) {
    batch = task / chunks(length);
    start = task % chunks(length) * kChunk;
    stop = least(start + kChunk, length);
  }
};

VISION_TTT_INLINE const float* row(const Sequence& s, int64_t batch, int64_t token) {
  return s.data + batch * s.batch + token * s.token;
}
VISION_TTT_INLINE float* mutable_row(const Sequence& s, int64_t batch, int64_t token) {
  return s.data + batch * s.batch + token * s.token;
}

// One token's channels [start, stop), whose scan direction is `step`; the weight is [K, C] here. K = 0
// supports any number of taps, also beyond the sequence. For the published number, four, the loop is
// unrolled where all taps are inside.
template <int K>
VISION_TTT_INLINE void conv1d_token(const Conv1d& p, int64_t batch, int64_t t, int64_t start,
                                    int64_t stop, int64_t step) {
  const int64_t taps = K ? K : p.taps;
  const float* x = row(p.x, batch, t);
  float* y = mutable_row(p.y, batch, t);
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
      for (int64_t t = span.start; t < span.stop; ++t) share += load(row(p.y, span.batch, t) + c);
      bias += share;
      for (int64_t j = 0; j < p.taps; ++j) {
        const int64_t shift = step * (j - (p.taps - 1));
        Vector total{};
        for (int64_t t = span.start; t < span.stop; ++t)
          if (t + shift >= 0 && t + shift < p.length)
            total += load(row(p.y, span.batch, t) + c) * load(row(p.x, span.batch, t + shift) + c);
        float* weight = grad.weight + j * p.channels + c;
        store(weight, load(weight) + total);
      }
    }
    store(grad.bias + c, bias);
  }
}

namespace {

// Prefetch what the call reads of the token after the next one. Rows of a part of a wide projection begin far
// apart, so that the processor does not fetch them ahead.
VISION_TTT_INLINE void fetch_ahead(const GatedNorm& p, const Sequence& s, int64_t batch, int64_t t,
                                   int64_t floats) {
  const int64_t ahead = t + 2, line = 64 / sizeof(float);
  if (!s.data || ahead >= p.length) return;
  const float* first = row(s, batch, ahead);
  for (int64_t i = 0; i < floats; i += line) __builtin_prefetch(first + i);
}

struct Moments {
  float mean, inverse_std;
};

VISION_TTT_INLINE Moments moments(const float* z, int64_t dim, float eps) {
  Vector total{};
  for (int64_t i = 0; i < dim; i += kLanes) total += load(z + i);
  const float mean = sum(total) / float(dim);
  Vector square{};
  for (int64_t i = 0; i < dim; i += kLanes) {
    const Vector centred = load(z + i) - mean;
    square += centred * centred;
  }
  return {mean, 1.0f / std::sqrt(sum(square) / float(dim) + eps)};
}

constexpr int64_t kParts = 2;

}  // namespace

void VISION_TTT_KERNEL(gated_norm)(const GatedNorm& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t place = 0; place < p.batch * p.length; ++place) {
    const int64_t batch = place / p.length, t = place % p.length;
    const float* z = row(p.z, batch, t);
    const float* gate = p.gate.data ? row(p.gate, batch, t) : nullptr;
    float* out = mutable_row(p.out, batch, t);
    fetch_ahead(p, p.z, batch, t, p.parts * p.dim);
    fetch_ahead(p, p.gate, batch, t, p.dim);
    Moments m[kParts];
    for (int64_t r = 0; r < p.parts; ++r) m[r] = moments(z + r * p.dim, p.dim, p.eps);
    for (int64_t i = 0; i < p.dim; i += kLanes) {
      Vector total{};
      for (int64_t r = 0; r < p.parts; ++r) {
        const Vector x_hat = (load(z + r * p.dim + i) - m[r].mean) * m[r].inverse_std;
        total += x_hat * load(p.weight + r * p.dim + i) + load(p.bias + r * p.dim + i);
      }
      store(out + i, gate ? gelu(load(gate + i)).value * total : total);
    }
  }
}

void VISION_TTT_KERNEL(gated_norm_backward)(const GatedNorm& p, const GatedNormGradients& grad) {
  const int64_t tasks = p.batch * chunks(p.length);
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const Span span(task, p.length);
    float* dweight = grad.weight + task * p.parts * p.dim;
    float* dbias = grad.bias + task * p.parts * p.dim;
    for (int64_t i = 0; i < p.parts * p.dim; i += kLanes) {
      store(dweight + i, Vector{});
      store(dbias + i, Vector{});
    }
    for (int64_t t = span.start; t < span.stop; ++t) {
      const float* z = row(p.z, span.batch, t);
      const float* gate = p.gate.data ? row(p.gate, span.batch, t) : nullptr;
      const float* dout = row(p.out, span.batch, t);
      float* dz = mutable_row(grad.z, span.batch, t);
      float* dgate = gate ? mutable_row(grad.gate, span.batch, t) : nullptr;
      fetch_ahead(p, p.z, span.batch, t, p.parts * p.dim);
      fetch_ahead(p, p.gate, span.batch, t, p.dim);
      fetch_ahead(p, p.out, span.batch, t, p.dim);
      Moments m[kParts];
      Vector mean[kParts] = {}, projection[kParts] = {};
      for (int64_t r = 0; r < p.parts; ++r) m[r] = moments(z + r * p.dim, p.dim, p.eps);
      for (int64_t i = 0; i < p.dim; i += kLanes) {
        Vector incoming = load(dout + i), total{};
        Gelu g{};
        if (gate) g = gelu(load(gate + i));
        const Vector dtotal = gate ? incoming * g.value : incoming;
        for (int64_t r = 0; r < p.parts; ++r) {
          const int64_t at = r * p.dim + i;
          const Vector x_hat = (load(z + at) - m[r].mean) * m[r].inverse_std;
          const Vector weight = load(p.weight + at);
          total += x_hat * weight + load(p.bias + at);
          store(dweight + at, load(dweight + at) + dtotal * x_hat);
          store(dbias + at, load(dbias + at) + dtotal);
          const Vector u = dtotal * weight;
          store(dz + at, u);  // completed below, after its means
          mean[r] += u;
          projection[r] += u * x_hat;
        }
        if (gate) store(dgate + i, incoming * total * g.derivative);
      }
      for (int64_t r = 0; r < p.parts; ++r) {
        const float average = sum(mean[r]) / float(p.dim);
        const float along = sum(projection[r]) / float(p.dim);
        for (int64_t i = 0; i < p.dim; i += kLanes) {
          const int64_t at = r * p.dim + i;
          const Vector x_hat = (load(z + at) - m[r].mean) * m[r].inverse_std;
          store(dz + at, (load(dz + at) - average - x_hat * along) * m[r].inverse_std);
        }
      }
    }
  }
}

void VISION_TTT_KERNEL(silu)(const Silu& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t i = 0; i < p.count; i += kLanes) {
    const Vector x = load(p.x + i), s = sigmoid(x);
    store(p.out + i, p.grad ? load(p.grad + i) * (s + x * s * (1.0f - s)) : x * s);
  }
}

void VISION_TTT_KERNEL(swiglu)(const SwiGlu& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t t = 0; t < p.rows; ++t) {
    const float *a = p.x + t * p.x_row, *b = a + p.hidden;
    float* out = p.out + t * p.out_row;
    for (int64_t i = 0; i < p.hidden; i += kLanes) {
      const Vector x = load(a + i);
      store(out + i, x * sigmoid(x) * load(b + i));
    }
  }
}

void VISION_TTT_KERNEL(swiglu_backward)(const SwiGlu& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t t = 0; t < p.rows; ++t) {
    const float *a = p.x + t * p.x_row, *b = a + p.hidden, *dout = p.out + t * p.out_row;
    float *da = p.dx + t * 2 * p.hidden, *db = da + p.hidden;
    for (int64_t i = 0; i < p.hidden; i += kLanes) {
      const Vector x = load(a + i), incoming = load(dout + i), s = sigmoid(x);
      store(da + i, incoming * load(b + i) * (s + x * s * (1.0f - s)));
      store(db + i, incoming * x * s);
    }
  }
}
