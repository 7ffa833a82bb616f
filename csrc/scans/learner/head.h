// The common part of the learners' passes: one head of one image, and the tokens of a mini-batch.
#pragma once

#include "../../floats.h"
#include "../../functions.h"
#include "../../products/matmul.h"
#include "../../scratch.h"
#include "inner_norms.h"

namespace {

// The tokens and parameters of one head of one image.
struct Head {
  const Problem& p;
  Scan scan;
  int64_t index;  // batch * heads + head: its place in [B, H, ...] tensors

  Head(const Problem& problem, int64_t task)
      : p(problem),
        scan{task / problem.heads, task % problem.heads, problem.length,
             task % problem.heads >= problem.heads - problem.reverse_heads, problem.seen},
        index(task) {}

  // The head's place in initial states [H, ...] or [B, H, ...].
  int64_t initial_index() const { return p.state_batch ? index : scan.head; }
  // The place of the state before this mini-batch in saved states [N, B, H, ...].
  int64_t kept_index(int64_t mini_batch) const {
    return (mini_batch / p.interval - 1) * p.batch * p.heads + index;
  }
  Norm norm() const {
    if (!p.ln_weight) return {nullptr, nullptr, p.eps};
    return {p.ln_weight + scan.head * p.dim, p.ln_bias + scan.head * p.dim, p.eps};
  }
  // p_j of the j-th token of a mini-batch, from j = 0.
  float scale(int64_t j) const {
    return p.scale ? p.scale[scan.head / p.scale_heads * p.mini_batch_size + j] : 1.0f;
  }
  // Row t of A [n, cols] times -p_t.
  void scale_rows(float* attention, int64_t n, int64_t cols) const {
    for (int64_t t = 0; t < n; ++t) {
      const float minus_p = -scale(t);
      for (int64_t i = t * cols; i < (t + 1) * cols; i += kLanes)
        store(attention + i, load(attention + i) * minus_p);
    }
  }
  // Write the gradients of eta [B, T, H] for the tokens from `start` on, given those of their rates. The slope of
  // η = rate · σ(x) is η (1 - η / rate).
  void write_rate_gradients(int64_t start, int64_t n, const float* rates, const float* drates, float* deta) const {
    for (int64_t t = 0; t < n; ++t) {
      float slope = 1.0f;
      if (p.rate >= 0.0f) slope = p.rate > 0.0f ? rates[t] * (1.0f - rates[t] / p.rate) : 0.0f;
      deta[token_index(start + t)] = drates[t] * slope;
    }
  }
  // The index in [B, T, H] of the token at a step of the scan.
  int64_t token_index(int64_t step) const {
    return (scan.batch * p.length + scan.token(step)) * p.heads + scan.head;
  }
  int64_t mini_batches() const { return (p.length + p.mini_batch_size - 1) / p.mini_batch_size; }
  // The number of tokens of a mini-batch: b, or the remaining ones.
  int64_t size(int64_t mini_batch) const {
    int64_t rest = p.length - mini_batch * p.mini_batch_size;
    return rest < p.mini_batch_size ? rest : p.mini_batch_size;
  }
};

// Neighbouring heads of one image.
struct Heads {
  const Problem& p;
  int64_t first, count;

  Head operator[](int64_t i) const { return Head(p, first + i); }
};

// [n, D] → [D, cols]; the columns past n are zero.
template <int D>
VISION_TTT_INLINE void transpose_rows(const float* rows, int64_t n, int64_t cols, float* out) {
  int64_t whole = n / kLanes * kLanes;
  for (int64_t i = 0; i < whole; i += kLanes)
    for (int64_t j = 0; j < D; j += kLanes)
      transpose_square(rows + i * D + j, D, out + j * cols + i, cols);
  if (whole == n) return;
  for (int64_t j = 0; j < D; ++j)
    for (int64_t i = whole; i < cols; ++i) out[j * cols + i] = i < n ? rows[i * D + j] : 0.0f;
}

// The lower triangle of x + offset, x [n, cols]; zero above the diagonal.
VISION_TTT_INLINE void keep_lower(float* x, int64_t n, int64_t cols, float offset = 0.0f) {
  for (int64_t t = 0; t < n; ++t)
    for (int64_t s = 0; s < cols; s += kLanes) {
      float* row = x + t * cols + s;
      store(row, keep_first(load(row) + offset, t - s + 1));
    }
}

// The taps of the convolutions of one head's views, each [K + 1, D]; null for no convolution.
template <int D>
struct Taps {
  float *q, *k;

  static size_t floats(const Problem& p) { return 2 * (p.taps + 1) * D; }
  static Taps load(Scratch& scratch, const Head& head) {
    return {load_one(scratch, head, head.p.conv_q), load_one(scratch, head, head.p.conv_k)};
  }

 private:
  static float* load_one(Scratch& scratch, const Head& head, const Convolution& conv) {
    if (!conv.weight) return nullptr;
    float* taps = scratch.take((head.p.taps + 1) * D);
    load_taps<D>(conv, head.scan.head, head.p.taps, taps);
    return taps;
  }
};

// The tokens of one mini-batch, and the attention of its test views to its training views.
// q and k are neighbours in memory, so that one product computes both.
template <int D>
struct Views {
  int64_t n = 0;      // tokens
  int64_t cols = 0;   // n rounded up to whole vectors
  float *k, *q;       // [n, D]
  RowsOf<const float> v;  // n rows, where they lie or in v_copy
  float* v_copy;      // [n, D]
  float* k_t;         // Kᵀ [D, cols], columns past n zero
  float* attention;   // A [n, cols], zero above the diagonal
  float* eta;         // [n]
  Taps<D> taps{};     // the current head's
  float* raw;              // [K - 1 + n, D]: the input tokens of a convolution

  static size_t floats(const Problem& p) {
    int64_t b = p.mini_batch_size, padded = round_up(b, kLanes);
    size_t convolutions = p.taps ? (p.taps - 1 + b) * D : 0;
    return 4 * padded * D + padded * padded + padded + convolutions + 6 * 16;
  }
  void allocate(Scratch& scratch, const Problem& p) {
    int64_t b = p.mini_batch_size, padded = round_up(b, kLanes);
    k = scratch.take(2 * padded * D);
    q = k;  // set per mini-batch, directly behind its k
    v_copy = scratch.take(padded * D);
    k_t = scratch.take(D * padded);
    attention = scratch.take(padded * padded);
    eta = scratch.take(padded);
    raw = p.taps ? scratch.take((p.taps - 1 + b) * D) : nullptr;
  }

  // Load the training and label views of the tokens from `start`.
  void load_training(const Head& head, int64_t start, int64_t count) {
    n = count;
    cols = round_up(n, kLanes);
    q = k + n * D;
    for (int64_t t = 0; t < n; ++t) eta[t] = head.p.eta[head.token_index(start + t)];
    if (head.p.rate >= 0.0f) {
      for (int64_t t = n; t < cols; ++t) eta[t] = 0.0f;
      for (int64_t t = 0; t < cols; t += kLanes) store(eta + t, head.p.rate * sigmoid(load(eta + t)));
    }
    load_view(head, head.p.k, taps.k, start, k);
    if (head.p.is_bfloat16) {
      load_rows<D>(head.p.v, true, head.scan, start, n, v_copy);
      v = {v_copy, D};
    } else {
      const RowsOf<float> rows = rows_in_place(head.p.v, head.scan, start);
      v = {rows.first, rows.apart};
    }
  }

  void load_queries(const Head& head, int64_t start) {
    load_view(head, head.p.q, taps.q, start, q);
  }

  void load_view(const Head& head, const Tokens& x, const float* taps, int64_t start, float* rows) {
    const Problem& p = head.p;
    if (taps)
      load_convolved_rows<D>(x, p.is_bfloat16, head.scan, start, n, taps, p.taps, raw, rows);
    else
      load_rows<D>(x, p.is_bfloat16, head.scan, start, n, rows);
  }

  // A = lower triangle of Q Kᵀ + 1.
  void attend() {
    transpose_rows<D>(k, n, cols, k_t);
    multiply(n, D, cols, q, D, k_t, attention);
    keep_lower(attention, n, cols, 1.0f);
  }
};

// Write the outputs f(q) of n tokens, given z = q W + b, which is overwritten.
template <int D>
VISION_TTT_INLINE void write_outputs(const Head& head, const Tokens& o, int64_t start, int64_t n, const float* q,
                                     float* z) {
  if (!head.p.is_bfloat16) {
    inner_outputs<D>(n, q, z, head.norm(), rows_in_place(o, head.scan, start));
    return;
  }
  inner_outputs<D>(n, q, z, head.norm(), {z, D});
  store_rows<D>(o, true, head.scan, start, n, z);
}

}  // namespace
