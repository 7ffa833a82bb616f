// A part of a mini-batch of ttt_mlp, for one head of one image: the mirror of mini_batch() in
// src/vision_ttt/ops/_learner_dual.py.
#pragma once

#include "../learner/open_layer.h"

namespace {

template <int D>
size_t part_floats(const Problem& p) {
  return Part<D>::floats(p) + (7 * 4 + 3) * p.length * D + 7 * 16;
}

// out [4 d] = W2 g, kLanes of its rows at a time.
template <int D>
VISION_TTT_INLINE void through_w2(const float* w2, const float* g, float* out) {
  for (int64_t i = 0; i < 4 * D; i += kLanes) {
    auto terms = [&](int64_t lane) __attribute__((always_inline)) {
      const float* row = w2 + (i + lane) * D;
      Vector total{};
      for (int64_t j = 0; j < D; j += kLanes) total += load(row + j) * load(g + j);
      return Sums<1>{{total}};
    };
    store(out + i, token_sums<kLanes>(terms, 0).of[0]);
  }
}

template <int D>
void part_of_head(const Head& head, const OpenMiniBatch& open, Scratch& scratch) {
  constexpr int kHidden = 4 * D;
  const Part<D> part(head, open, scratch);
  const int64_t n = part.n;
  const auto first = open_layer<D, kHidden>(head, open, part.position, &State::w1, &State::b1);
  const auto second = open_layer<kHidden, D>(head, open, part.position, &State::w2, &State::b2);
  float* z1 = scratch.take(2 * n * kHidden);  // [K W1 + b1; Q W1 + b1]
  float* x2 = scratch.take(2 * n * kHidden);  // [σ(Z1); σ(Z1_q)]
  float* slope = scratch.take(n * kHidden);   // σ'(Z1)
  float* step1 = scratch.take(n * kHidden);
  float* update = scratch.take(n * kHidden);
  float* z2 = scratch.take(2 * n * D);        // [X2 W2 + b2; X2_q W2 + b2]
  float* step2 = scratch.take(n * D);
  float *z1_q = z1 + n * kHidden, *x2_q = x2 + n * kHidden, *z2_q = z2 + n * D;

  multiply_add_row(2 * n, D, kHidden, part.k, D, first.w, first.b, z1);
  for (int64_t i = 0; i < n * kHidden; i += kLanes) {
    const GeluTanh f = gelu_tanh(load(z1 + i));
    store(x2 + i, f.value);
    store(slope + i, f.derivative);
  }
  multiply_add_row(n, kHidden, D, x2, kHidden, second.w, second.b, z2);
  part.gradients(z2, step2);
  for (int64_t t = 0; t < n; ++t) {
    through_w2<D>(second.w, step2 + t * D, step1 + t * kHidden);
    for (int64_t i = t * kHidden; i < (t + 1) * kHidden; i += kLanes)
      store(step1 + i, load(step1 + i) * load(slope + i));
  }

  first.read(part, part.k, part.q, step1, update, z1_q);
  for (int64_t i = 0; i < n * kHidden; i += kLanes) store(x2_q + i, gelu_tanh(load(z1_q + i)).value);
  multiply_add_row(n, kHidden, D, x2_q, kHidden, second.w, second.b, z2_q);
  second.read(part, x2, x2_q, step2, update, z2_q);
  part.write_outputs(open.o, z2_q);
  first.add(part, part.k, step1);
  second.add(part, x2, step2);
}

}  // namespace
