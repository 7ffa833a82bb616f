// Forward pass of ttt_linear over heads of one image.
#pragma once

#include "mini_batch.h"

namespace {

// The most heads that are processed together. Their rows are neighbours in memory, so that more of every
// touched page is used. Their states fit the second cache level.
template <int D>
constexpr int64_t kHeadsTogether = D <= 64 ? 4 : 2;

// The state of the forward pass along the tokens of one head.
template <int D>
struct Learner {
  float *w, *b;  // the state
  Taps<D> taps;
};

template <int D>
size_t forward_floats(const Problem& p) {
  return MiniBatch<D>::floats(p) + kHeadsTogether<D> * (D * D + D + Taps<D>::floats(p) + 4 * 16);
}

// One mini-batch of one head; `ahead` are the next tokens.
template <int D>
void forward_mini_batch(const Head& head, int64_t number, const Learner<D>& learner,
                        const Outputs& out, MiniBatch<D>& batch, RowsAhead<D>& ahead) {
  const Problem& p = head.p;
  float *w = learner.w, *b = learner.b;
  if (out.kept.w1 && number && number % p.interval == 0) {
    copy(out.kept.w1 + head.kept_index(number) * D * D, w, D * D);
    copy(out.kept.b1 + head.kept_index(number) * D, b, D);
  }
  const int64_t start = number * p.mini_batch_size, n = head.size(number);
  batch.taps = learner.taps;
  batch.begin(head, start, n);
  batch.load_queries(head, start);
  batch.learn(w, b, head.norm(), 2 * n, ahead);
  ahead.ask();
  batch.attend();
  ahead.ask();
  head.scale_rows(batch.attention, n, batch.cols);
  multiply_add_lower(n, D, batch.attention, batch.cols, batch.step, batch.z_q);
  ahead.ask();
  write_outputs<D>(head, out.o, start, n, batch.q, batch.z_q);
  ahead.ask();
  batch.update(head.scale(n - 1), batch.step, w, b, w, b, ahead);
}

// The state of a head before its first token.
template <int D>
Learner<D> initial_learner(const Head& head, Scratch& scratch) {
  const Problem& p = head.p;
  const Learner<D> learner{scratch.take(D * D), scratch.take(D), Taps<D>::load(scratch, head)};
  copy(learner.w, p.initial.w1 + head.initial_index() * D * D, D * D);
  copy(learner.b, p.initial.b1 + head.initial_index() * D, D);
  return learner;
}

// Call body(head, number, ahead) for the mini-batches of neighbouring heads in turns; `ahead` are the tokens
// of the next turn, for so many prefetches.
template <int D, class Body>
void for_each_mini_batch(const Heads& heads, const Outputs& out, int64_t prefetches, const Body& body) {
  const Problem& p = heads.p;
  const int64_t b = p.mini_batch_size;
  for (int64_t number = 0; number < heads[0].mini_batches(); ++number)
    for (int64_t i = 0; i < heads.count; ++i) {
      const bool last = i + 1 == heads.count;
      RowsAhead<D> ahead(heads[last ? 0 : i + 1], (number + last) * b, b, {&p.q, &p.k, &p.v, &out.o},
                         prefetches);
      body(i, number, ahead);
    }
}

// The heads' states after their last tokens.
template <int D, class Learner>
void store_states(const Heads& heads, const Outputs& out, const Learner* learners) {
  for (int64_t i = 0; out.last.w1 && i < heads.count; ++i) {
    copy(out.last.w1 + heads[i].index * D * D, learners[i].w, D * D);
    copy(out.last.b1 + heads[i].index * D, learners[i].b, D);
  }
}

template <int D>
void forward_heads(const Heads& heads, const Outputs& out, Scratch& scratch) {
  const Problem& p = heads.p;
  MiniBatch<D> batch;
  batch.allocate(scratch, p);
  Learner<D> learners[kHeadsTogether<D>];
  for (int64_t i = 0; i < heads.count; ++i) learners[i] = initial_learner<D>(heads[i], scratch);
  const int64_t prefetches = tiles_of_product(2 * p.mini_batch_size + D, D) + 4;
  for_each_mini_batch<D>(heads, out, prefetches, [&](int64_t i, int64_t number, auto& ahead) {
    forward_mini_batch(heads[i], number, learners[i], out, batch, ahead);
  });
  store_states<D>(heads, out, learners);
}

}  // namespace
