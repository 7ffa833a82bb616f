// Forward pass of ttt_linear over one head of one image.
#pragma once

#include "mini_batch.h"

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
  copy(w, p.initial.w1 + head.initial_index() * D * D, D * D);
  copy(b, p.initial.b1 + head.initial_index() * D, D);

  for (int64_t number = 0; number < head.mini_batches(); ++number) {
    if (out.kept.w1 && number && number % p.interval == 0) {
      copy(out.kept.w1 + head.kept_index(number) * D * D, w, D * D);
      copy(out.kept.b1 + head.kept_index(number) * D, b, D);
    }
    const int64_t start = number * p.mini_batch_size, n = head.size(number);
    batch.begin(head, start, n);
    batch.load_queries(head, start);
    batch.learn(head, w, b, norm, 2 * n, start + n);
    batch.attend();
    head.scale_rows(batch.attention, n, batch.cols);
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
  if (!out.last.w1) return;
  copy(out.last.w1 + head.index * D * D, w, D * D);
  copy(out.last.b1 + head.index * D, b, D);
}

}  // namespace
