// One mini-batch of ttt_mlp: the common part of both passes.
//
// The 4 d hidden units are stored in panels of 64: a matrix [n, 4 d] as [panels, n, 64], W1 as
// [panels, d, 64]. A panel of either layer's weights is then a block of at most 64 × 128 floats, which
// stays in the first cache level during a product, and products of all head dimensions have the width
// that fills the registers.
#pragma once

#include "../learner/rows_ahead.h"

namespace {

constexpr int64_t kPanel = 64;

template <int D>
constexpr int64_t kPanels = 4 * D / kPanel;

// The inner model's weights, or their gradients, in one piece of memory.
template <int D>
struct Weights {
  static constexpr size_t kFloats = 8 * D * D + 5 * D;
  float* data;

  float* w1(int64_t panel) const { return data + panel * D * kPanel; }  // [D, 64]
  float* b1(int64_t panel) const { return data + 4 * D * D + panel * kPanel; }
  float* w2(int64_t panel) const { return data + 4 * D * D + 4 * D + panel * kPanel * D; }  // [64, D]
  float* b2() const { return data + 8 * D * D + 4 * D; }

  // Copy from and to place `index` of the op's tensors.
  void load(const State& from, int64_t index) const {
    const float* rows = from.w1 + index * 4 * D * D;
    for (int64_t c = 0; c < kPanels<D>; ++c)
      for (int64_t i = 0; i < D; ++i)
        copy(w1(c) + i * kPanel, rows + i * 4 * D + c * kPanel, kPanel);
    copy(b1(0), from.b1 + index * 4 * D, 4 * D);
    copy(w2(0), from.w2 + index * 4 * D * D, 4 * D * D);
    copy(b2(), from.b2 + index * D, D);
  }
  void store(const State& to, int64_t index) const {
    float* rows = to.w1 + index * 4 * D * D;
    for (int64_t c = 0; c < kPanels<D>; ++c)
      for (int64_t i = 0; i < D; ++i)
        copy(rows + i * 4 * D + c * kPanel, w1(c) + i * kPanel, kPanel);
    copy(to.b1 + index * 4 * D, b1(0), 4 * D);
    copy(to.w2 + index * 4 * D * D, w2(0), 4 * D * D);
    copy(to.b2 + index * D, b2(), D);
  }
};

// A matrix [rows, 4 d] in panels.
struct Hidden {
  float* data;
  int64_t rows;

  template <int D>
  static Hidden take(Scratch& scratch, int64_t rows) {
    return {scratch.take(rows * 4 * D), rows};
  }
  float* panel(int64_t c) const { return data + c * rows * kPanel; }
};

// row ← row + Σ of the n rows of x.
template <int D>
VISION_TTT_INLINE void add_rows(const float* x, int64_t n, float* row) {
  Row<D> total = Row<D>::of(row);
  for (int64_t t = 0; t < n; ++t) total = total + Row<D>::of(x + t * D);
  total.to(row);
}

enum class Direction { kForward, kBackward };

// The tokens of one mini-batch and their intermediate results at the weights before it.
template <int D>
struct MiniBatch : Views<D> {
  using Views<D>::n, Views<D>::cols, Views<D>::k, Views<D>::v, Views<D>::eta;

  Hidden z1;      // [K W1 + b1; Q W1 + b1]; the latter becomes Z1_q
  Hidden x2;      // [σ(Z1); σ(Z1_q)]
  Hidden slope;   // σ'(Z1)
  Hidden bend;    // σ''(Z1), null in the forward pass
  Hidden e1;      // g2 W2ᵀ, in the forward pass overwritten by G1
  Hidden step1;   // G1: η_t g1_t
  float* z2;      // [X2 W2 + b2; X2_q W2 + b2]: [2 n, D]
  float* g2;      // [n, D]
  float* step2;   // G2 [n, D]: η_t g2_t
  float* w2_t;    // W2ᵀ in panels [D, 64], in the forward pass the last one only
  int64_t w2_t_stride;
  float* hidden_t;    // a panel of a hidden matrix, transposed: [64, cols], columns past n zero
  float* attention2;  // A2 [n, cols]

  static size_t floats(const Problem& p, Direction direction) {
    const int64_t padded = round_up(p.mini_batch_size, kLanes);
    const bool backward = direction == Direction::kBackward;
    return Views<D>::floats(p) + (backward ? 8 : 6) * padded * 4 * D +
           (backward ? kPanels<D> : 1) * D * kPanel + 4 * padded * D + kPanel * padded +
           padded * padded + 12 * 16;
  }

  void allocate(Scratch& scratch, const Problem& p, Direction direction) {
    Views<D>::allocate(scratch, p);
    // Rows are padded to whole vectors, so that a square can be transposed.
    const int64_t padded = round_up(p.mini_batch_size, kLanes);
    const bool backward = direction == Direction::kBackward;
    z1 = Hidden::take<D>(scratch, 2 * padded);
    x2 = Hidden::take<D>(scratch, 2 * padded);
    slope = Hidden::take<D>(scratch, padded);
    step1 = Hidden::take<D>(scratch, padded);
    e1 = backward ? Hidden::take<D>(scratch, padded) : step1;
    bend = backward ? Hidden::take<D>(scratch, padded) : Hidden{nullptr, 0};
    w2_t_stride = backward ? D * kPanel : 0;
    w2_t = scratch.take((backward ? kPanels<D> : 1) * D * kPanel);
    z2 = scratch.take(2 * padded * D);
    g2 = scratch.take(padded * D);
    step2 = scratch.take(padded * D);
    hidden_t = scratch.take(kPanel * padded);
    attention2 = scratch.take(padded * padded);
  }

  float* z1_q(int64_t c) const { return z1.panel(c) + n * kPanel; }
  float* x2_q(int64_t c) const { return x2.panel(c) + n * kPanel; }
  float* z2_q() const { return z2 + n * D; }
  float* w2_transposed(int64_t c) const { return w2_t + c * w2_t_stride; }

  // The number of prefetches of learn and update; learn makes two of three.
  static constexpr int64_t kAsks = 3 * kPanels<D>;

  // Compute Z1 of the first `rows` of [k; q], then all results of the training views, up to the steps.
  void learn(const Weights<D>& w, const Norm& norm, int64_t rows, RowsAhead<D>& ahead) {
    for (int64_t t = 0; t < n; ++t) copy(z2 + t * D, w.b2(), D);
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      float* z = z1.panel(c);
      ahead.ask();
      multiply_add_row(rows, D, kPanel, k, D, w.w1(c), w.b1(c), z);
      float *x = x2.panel(c), *s = slope.panel(c);
      float* b = bend.data ? bend.panel(c) : nullptr;
      for (int64_t i = 0; i < n * kPanel; i += kLanes) {
        const GeluTanh f = gelu_tanh(load(z + i));
        store(x + i, f.value);
        store(s + i, f.derivative);
        if (b) store(b + i, f.second_derivative);
      }
      multiply_add(n, kPanel, D, x, kPanel, w.w2(c), z2);
    }
    inner_gradients<D>(n, z2, k, v, nullptr, norm, g2);
    for (int64_t t = 0; t < n; ++t) (Row<D>::of(g2 + t * D) * eta[t]).to(step2 + t * D);
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      float *e = e1.panel(c), *step = step1.panel(c);
      const float* s = slope.panel(c);
      ahead.ask();
      transpose(w.w2(c), kPanel, D, w2_transposed(c));
      multiply(n, D, kPanel, g2, D, w2_transposed(c), e);
      for (int64_t t = 0; t < n; ++t)
        for (int64_t i = t * kPanel; i < (t + 1) * kPanel; i += kLanes)
          store(step + i, load(e + i) * load(s + i) * eta[t]);
    }
  }

  // A2 = lower triangle of X2_q X2ᵀ + 1.
  void attend2() {
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      transpose_rows<kPanel>(x2.panel(c), n, cols, hidden_t);
      if (c == 0)
        multiply(n, kPanel, cols, x2_q(c), kPanel, hidden_t, attention2);
      else
        multiply_add(n, kPanel, cols, x2_q(c), kPanel, hidden_t, attention2);
    }
    keep_lower(attention2, n, cols, 1.0f);
  }

  // W ← W - p_n Xᵀ G, b ← b - p_n Σ G in both layers. Overwrites the steps with -p_n G.
  void update(float p_last, const Weights<D>& w, RowsAhead<D>& ahead) {
    auto scale = [&](float* step, int64_t floats) {
      for (int64_t i = 0; i < floats; i += kLanes) store(step + i, load(step + i) * -p_last);
    };
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      ahead.ask();
      scale(step1.panel(c), n * kPanel);
      add_rows<kPanel>(step1.panel(c), n, w.b1(c));
      multiply_add_transposed(D, n, kPanel, k, D, step1.panel(c), w.w1(c));
    }
    scale(step2, n * D);
    add_rows<D>(step2, n, w.b2());
    for (int64_t c = 0; c < kPanels<D>; ++c)
      multiply_add_transposed(kPanel, n, D, x2.panel(c), kPanel, step2, w.w2(c));
  }
};

}  // namespace
