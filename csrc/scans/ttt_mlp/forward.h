// Forward pass of ttt_mlp over one head of one image.
#pragma once

#include "mini_batch.h"

namespace {

template <int D>
size_t forward_floats(const Problem& p) {
  return MiniBatch<D>::floats(p, Direction::kForward) + Taps<D>::floats(p) + 2 * 16 +
         Weights<D>::kFloats;
}

template <int D>
void forward_head(const Head& head, const Outputs& out, Scratch& scratch) {
  const Problem& p = head.p;
  const Norm norm = head.norm();
  const Weights<D> w{scratch.take(Weights<D>::kFloats)};
  MiniBatch<D> batch;
  batch.allocate(scratch, p, Direction::kForward);
  batch.taps = Taps<D>::load(scratch, head);
  w.load(p.initial, head.initial_index());

  for (int64_t number = 0; number < head.mini_batches(); ++number) {
    if (out.kept.w1 && number && number % p.interval == 0)
      w.store(out.kept, head.kept_index(number));
    const int64_t start = number * p.mini_batch_size, n = head.size(number);
    batch.load_training(head, start, n);
    batch.load_queries(head, start);
    RowsAhead<D> ahead(head, start + n, n, {&p.q, &p.k, &p.v, &out.o},
                       MiniBatch<D>::kAsks + kPanels<D>);
    batch.learn(w, norm, 2 * n, ahead);

    // Z1_q = Q W1 + b1 - P A1 G1, X2_q = σ(Z1_q)
    const int64_t cols = batch.cols;
    batch.attend();
    head.scale_rows(batch.attention, n, cols);
    for (int64_t t = 0; t < n; ++t) copy(batch.z2_q() + t * D, w.b2(), D);
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      float *z = batch.z1_q(c), *x = batch.x2_q(c);
      ahead.ask();
      multiply_add_lower(n, kPanel, batch.attention, cols, batch.step1.panel(c), z);
      for (int64_t i = 0; i < n * kPanel; i += kLanes) store(x + i, gelu_tanh(load(z + i)).value);
      multiply_add(n, kPanel, D, x, kPanel, w.w2(c), batch.z2_q());
    }

    // Z2_q = X2_q W2 + b2 - P A2 G2
    batch.attend2();
    head.scale_rows(batch.attention2, n, cols);
    multiply_add_lower(n, D, batch.attention2, cols, batch.step2, batch.z2_q());
    write_outputs<D>(head, out.o, start, n, batch.q, batch.z2_q());
    batch.update(head.scale(n - 1), w, ahead);
  }
  if (out.last.w1) w.store(out.last, head.index);
}

}  // namespace
