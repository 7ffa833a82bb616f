// The pointwise kernels, for one instruction set. The build compiles this file once for each.
#include "../spans.h"
#include "rows.h"

namespace {

// Prefetch what the call reads of the token after the next one. Rows of a part of a wide projection begin far
// apart, so that the processor does not fetch them ahead.
VISION_TTT_INLINE void fetch_ahead(const GatedNorm& p, const Sequence& s, int64_t batch, int64_t t,
                                   int64_t floats) {
  const int64_t ahead = t + 2, line = 64 / sizeof(float);
  if (!s.data || ahead >= p.length) return;
  const float* first = token(s, batch, ahead);
  for (int64_t i = 0; i < floats; i += line) __builtin_prefetch(first + i);
}

constexpr int64_t kParts = 2;

}  // namespace

void VISION_TTT_KERNEL(gated_norm)(const GatedNorm& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t place = 0; place < p.batch * p.length; ++place) {
    const int64_t batch = place / p.length, t = place % p.length;
    const float* z = token(p.z, batch, t);
    const float* gate = p.gate.data ? token(p.gate, batch, t) : nullptr;
    fetch_ahead(p, p.z, batch, t, p.parts * p.dim);
    fetch_ahead(p, p.gate, batch, t, p.dim);
    merge_rows(z, 0, gate, 1, p.dim, p.parts, p.weight, p.bias, p.eps, token(p.out, batch, t));
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
      const float* z = token(p.z, span.batch, t);
      const float* gate = p.gate.data ? token(p.gate, span.batch, t) : nullptr;
      const float* dout = token(p.out, span.batch, t);
      float* dz = token(grad.z, span.batch, t);
      float* dgate = gate ? token(grad.gate, span.batch, t) : nullptr;
      fetch_ahead(p, p.z, span.batch, t, p.parts * p.dim);
      fetch_ahead(p, p.gate, span.batch, t, p.dim);
      fetch_ahead(p, p.out, span.batch, t, p.dim);
      MeanAndScale m[kParts];
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
    const Swish f = swish(load(p.x + i));
    store(p.out + i, p.grad ? load(p.grad + i) * f.derivative : f.value);
  }
}

void VISION_TTT_KERNEL(swiglu)(const SwiGlu& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t t = 0; t < p.rows; ++t) {
    const float* a = p.x + t * 2 * p.hidden;
    swiglu_numbers(a, a + p.hidden, p.hidden, p.out + t * p.hidden);
  }
}

void VISION_TTT_KERNEL(swiglu_backward)(const SwiGlu& p) {
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t t = 0; t < p.rows; ++t) {
    const float *a = p.x + t * 2 * p.hidden, *b = a + p.hidden, *dout = p.out + t * p.hidden;
    float *da = p.dx + t * 2 * p.hidden, *db = da + p.hidden;
    for (int64_t i = 0; i < p.hidden; i += kLanes) {
      const Vector incoming = load(dout + i);
      const Swish f = swish(load(a + i));
      store(da + i, incoming * load(b + i) * f.derivative);
      store(db + i, incoming * f.value);
    }
  }
}
