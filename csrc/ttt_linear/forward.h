// Forward pass of ttt_linear over one head of one image.
#pragma once

#include "head.h"

namespace {

template <int D>
size_t forward_floats(const Problem& p) {
  return MiniBatch<D>::floats(p) + D * D + D + 32;
}

template <int D>
void forward_head(const Head& head, const Outputs& out, Scratch& scratch) {
  const Problem& p = head.p;
  const Norm norm = head.norm();
  float* w = scratch.take(D * D);
  float* b = scratch.take(D);
  MiniBatch<D> batch;
  batch.allocate(scratch, head);
  std::memcpy(w, head.w0(), D * D * sizeof(float));
  std::memcpy(b, head.b0(), D * sizeof(float));

  for (int64_t start = 0, number = 0; start < p.length; start += p.mini_batch_size, ++number) {
    if (out.kept_w && number && number % p.interval == 0) {
      int64_t place = (number / p.interval - 1) * p.batch * p.heads + head.index;
      std::memcpy(out.kept_w + place * D * D, w, D * D * sizeof(float));
      std::memcpy(out.kept_b + place * D, b, D * sizeof(float));
    }
    const int64_t n = p.length - start < p.mini_batch_size ? p.length - start : p.mini_batch_size;
    batch.begin(head, start, n);
    batch.load_queries(head, start);
    batch.learn(head, w, b, norm, 2 * n, start + n);
    batch.attend();
    for (int64_t t = 0; t < n; ++t) {
      float* row = batch.attention + t * batch.cols;
      const float minus_p = -head.scale(t);
      for (int64_t s = 0; s < batch.cols; s += kLanes) store(row + s, load(row + s) * minus_p);
    }
    multiply_add(n, n, D, batch.attention, batch.cols, batch.step, batch.z_q);
    for (int64_t t = 0; t < n; ++t) {
      prefetch_row<D>(p.q, p.is_bfloat16, head.scan, start + n + t);
      prefetch_row<D, true>(out.o, p.is_bfloat16, head.scan, start + n + t);
      inner_output(Row<D>::of(batch.q + t * D), Row<D>::of(batch.z_q + t * D), norm)
          .to(batch.z_q + t * D);
    }
    store_rows<D>(out.o, p.is_bfloat16, head.scan, start, n, batch.z_q);
    batch.update(head.scale(n - 1), w, b);
  }
  if (!out.w) return;
  std::memcpy(out.w + head.index * D * D, w, D * D * sizeof(float));
  std::memcpy(out.b + head.index * D, b, D * sizeof(float));
}

}  // namespace
