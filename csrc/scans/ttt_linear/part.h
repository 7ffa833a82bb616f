// A part of a mini-batch of ttt_linear, for one head of one image: the mirror of mini_batch() in
// src/vision_ttt/ops/_learner_dual.py.
#pragma once

#include "../learner/open_layer.h"

namespace {

template <int D>
size_t part_floats(const Problem& p) {
  return Part<D>::floats(p) + 4 * p.length * D + 3 * 16;
}

template <int D>
void part_of_head(const Head& head, const OpenMiniBatch& open, Scratch& scratch) {
  const Part<D> part(head, open, scratch);
  const int64_t n = part.n;
  const auto layer = open_layer<D, D>(head, open, part.position, &State::w1, &State::b1);
  float* z = scratch.take(2 * n * D);  // [K W + b; Q W + b]
  float* z_q = z + n * D;
  float* step = scratch.take(n * D);
  float* update = scratch.take(n * D);

  multiply_add_row(2 * n, D, D, part.k, D, layer.w, layer.b, z);
  part.gradients(z, step);
  layer.read(part, part.k, part.q, step, update, z_q);
  part.write_outputs(open.o, z_q);
  layer.add(part, part.k, step);
}

}  // namespace
