// A layer of the inner model in an open mini-batch: tokens that read it, and add their gradients to it.
//
// A mini-batch that is not complete is kept as θ' before it and its sums so far. One token is the usual
// number, so that nothing is padded to tiles, and all is read once per token: O(d²) of work and of memory.
#pragma once

#include "head.h"

namespace {

// The tokens of one head, and their places in the open mini-batch.
template <int D>
struct Part {
  const Head& head;
  int64_t n, position;  // tokens, and those of the mini-batch before them
  float *k, *q, *v;     // [n, D]; k and q are neighbours, so that one product reads both
  float* eta;           // [n]

  static size_t floats(const Problem& p) { return 3 * p.length * D + p.length + 4 * 16; }

  Part(const Head& of, const OpenMiniBatch& open, Scratch& scratch)
      : head(of), n(of.p.length), position(open.positions ? open.positions[of.scan.batch] : open.position) {
    const Problem& p = head.p;
    k = scratch.take(2 * n * D);
    q = k + n * D;
    v = scratch.take(n * D);
    eta = scratch.take(n);
    load_rows<D>(p.k, p.is_bfloat16, head.scan, 0, n, k);
    load_rows<D>(p.q, p.is_bfloat16, head.scan, 0, n, q);
    load_rows<D>(p.v, p.is_bfloat16, head.scan, 0, n, v);
    for (int64_t t = 0; t < n; ++t) eta[t] = p.eta[head.token_index(t)];
  }

  float scale(int64_t t) const { return head.scale(position + t); }
  bool completes() const { return position + n == head.p.mini_batch_size; }

  // G of the last layer: η_t g_t.
  void gradients(const float* z, float* step) const {
    const Norm norm = head.norm();
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = t * D;
      const Row<D> g = inner_gradient(Row<D>::of(z + at), Row<D>::of(k + at), Row<D>::of(v + at), norm);
      (g * eta[t]).to(step + at);
    }
  }

  // Replace Z_q by f(Q), and write that.
  void write_outputs(const Tokens& o, float* z_q) const {
    const Norm norm = head.norm();
    for (int64_t t = 0; norm.weight && t < n; ++t) {
      const int64_t at = t * D;
      const Row<D> x_hat = standardise(Row<D>::of(z_q + at), norm.eps).x;
      (Row<D>::of(q + at) + x_hat * Row<D>::of(norm.weight) + Row<D>::of(norm.bias)).to(z_q + at);
    }
    store_rows<D>(o, head.p.is_bfloat16, head.scan, 0, n, z_q);
  }
};

template <int kFloats>
VISION_TTT_INLINE float dot(const float* a, const float* b) {
  Vector total{};
  for (int i = 0; i < kFloats; i += kLanes) total += load(a + i) * load(b + i);
  return sum(total);
}

// One layer's weights [In, Out] and bias [Out]. A null pointer: zero where it is read, unwanted where it
// would be written.
template <int In, int Out>
struct OpenLayer {
  const float *w, *b;            // θ'
  const float *sum_w, *sum_b;    // before the tokens
  float *last_w, *last_b;        // θ_T
  float *next_sum_w, *next_sum_b;
  float *next_w, *next_b;        // θ' of the next token

  // Z_q ← Z_q - P (A G + X_q S + s), A the lower triangle of X_q Xᵀ + 1, for n tokens. `update` is [n, Out].
  template <class Tokens>
  void read(const Tokens& tokens, const float* x, const float* x_q, const float* step, float* update,
            float* z_q) const {
    const int64_t n = tokens.n;
    if (sum_w)
      multiply_add_row(n, In, Out, x_q, In, sum_w, sum_b, update);
    else
      clear(update, n * Out);
    for (int64_t t = 0; t < n; ++t) {
      for (int64_t s = 0; s <= t; ++s) {
        const float attention = dot<In>(x_q + t * In, x + s * In) + 1.0f;
        for (int64_t j = 0; j < Out; j += kLanes)
          store(update + t * Out + j, load(update + t * Out + j) + load(step + s * Out + j) * attention);
      }
      const float p = tokens.scale(t);
      for (int64_t j = t * Out; j < (t + 1) * Out; j += kLanes)
        store(z_q + j, load(z_q + j) - load(update + j) * p);
    }
  }

  // S ← S + Xᵀ G, s ← s + Σ G and θ_T = θ' - p_T S, as far as they are wanted.
  template <class Tokens>
  void add(const Tokens& tokens, const float* x, const float* step) const {
    if (!last_w) return;
    const int64_t n = tokens.n;
    const float p = tokens.scale(n - 1);
    const bool completes = tokens.completes();
    auto finish = [&](Vector before, Vector total, float* last, float* sums, float* next, int64_t at)
                      __attribute__((always_inline)) {
      const Vector now = before - total * p;
      store(last + at, now);
      if (sums) store(sums + at, completes ? Vector{} : total);
      if (next) store(next + at, completes ? now : before);
    };
    for (int64_t i = 0; i < In; ++i)
      for (int64_t j = 0; j < Out; j += kLanes) {
        const int64_t at = i * Out + j;
        Vector total = sum_w ? load(sum_w + at) : Vector{};
        for (int64_t t = 0; t < n; ++t) total += load(step + t * Out + j) * x[t * In + i];
        finish(load(w + at), total, last_w, next_sum_w, next_w, at);
      }
    for (int64_t j = 0; j < Out; j += kLanes) {
      Vector total = sum_b ? load(sum_b + j) : Vector{};
      for (int64_t t = 0; t < n; ++t) total += load(step + t * Out + j);
      finish(load(b + j), total, last_b, next_sum_b, next_b, j);
    }
  }
};

// A head's first or second layer, by the pointers to its weights and to its bias among a state's.
template <int In, int Out>
OpenLayer<In, Out> open_layer(const Head& head, const OpenMiniBatch& open, int64_t position,
                              float* State::*weights, float* State::*biases) {
  auto of = [](const State& state, float* State::*member, int64_t floats) {
    return state.*member ? state.*member + floats : nullptr;
  };
  const State& start = head.p.initial;
  const int64_t place = head.index, w = place * In * Out, b = place * Out;
  const State sums = position ? open.sums : State{};
  return {of(start, weights, head.initial_index() * In * Out), of(start, biases, head.initial_index() * Out),
          of(sums, weights, w), of(sums, biases, b), of(open.last, weights, w), of(open.last, biases, b),
          of(open.next_sums, weights, w), of(open.next_sums, biases, b),
          of(open.next_start, weights, w), of(open.next_start, biases, b)};
}

}  // namespace
