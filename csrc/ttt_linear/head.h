// What forward and backward share: one head of one image, its scratch, one mini-batch of tokens.
#pragma once

#include <cstdlib>
#include <cstring>

#include "../functions.h"
#include "../matmul.h"
#include "rows.h"

namespace {

VISION_TTT_INLINE int64_t round_up(int64_t n, int64_t multiple) {
  return (n + multiple - 1) / multiple * multiple;
}

// Floats for the scratch of one thread, handed out in cache-line-aligned pieces.
class Scratch {
 public:
  explicit Scratch(size_t floats) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 64, floats * sizeof(float)) == 0) base_ = static_cast<float*>(memory);
#ifdef VISION_TTT_POISON
    // Under test: whatever is read before it is written turns into NaN.
    for (size_t i = 0; base_ && i < floats; ++i) base_[i] = __builtin_nanf("");
#endif
  }
  ~Scratch() { std::free(base_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  bool ok() const { return base_ != nullptr; }
  float* take(size_t floats) {
    float* piece = base_ + used_;
    used_ += round_up(floats, 16);
    return piece;
  }

 private:
  float* base_ = nullptr;
  size_t used_ = 0;
};

// One head of one image: which tokens, which parameters.
struct Head {
  const Problem& p;
  Scan scan;
  int64_t index;  // batch * heads + head: where [B, H, ...] tensors hold it

  Head(const Problem& problem, int64_t task)
      : p(problem),
        scan{task / problem.heads, task % problem.heads, problem.length,
             task % problem.heads >= problem.heads - problem.reverse_heads},
        index(task) {}

  int64_t state_index() const { return p.state_batch ? index : scan.head; }
  const float* w0() const { return p.w0 + state_index() * p.dim * p.dim; }
  const float* b0() const { return p.b0 + state_index() * p.dim; }
  Norm norm() const {
    if (!p.ln_weight) return {nullptr, nullptr, p.eps};
    return {p.ln_weight + scan.head * p.dim, p.ln_bias + scan.head * p.dim, p.eps};
  }
  // p_j of the j-th token of a mini-batch, j from 0.
  float scale(int64_t j) const {
    return p.scale ? p.scale[scan.head / p.scale_heads * p.mini_batch_size + j] : 1.0f;
  }
  // Index into [B, T, H] of the token at a step of the scan.
  int64_t token_index(int64_t step) const {
    return (scan.batch * p.length + scan.token(step)) * p.heads + scan.head;
  }
};

// The tokens of one mini-batch and what the forward pass makes of them at the state (W, b) before.
// q and k are neighbours, so that one product serves both.
template <int D>
struct MiniBatch {
  int64_t n = 0;      // tokens
  int64_t cols = 0;   // n rounded up to whole vectors
  float *k, *q, *v;   // [n, D]
  float *z_k, *z_q;   // [n, D]: K W + b, Q W + b; z_q ends as Z_q
  float* step;        // G [n, D]: η_t g_t
  float* k_t;         // Kᵀ [D, cols], columns past n zero
  float* attention;   // A [n, cols], zero above the diagonal
  float* eta;         // [n]
  float *taps_q, *taps_k;  // [K + 1, D], null where the view is not convolved
  float* raw;              // [K - 1 + n, D]: the tokens that a convolution sees

  static size_t floats(const Problem& p) {
    int64_t b = p.mini_batch_size, cols = round_up(b, kLanes), rows = round_up(b, kLanes);
    size_t convolutions = p.taps ? (2 * (p.taps + 1) + p.taps - 1 + b) * D : 0;
    return 6 * rows * D + D * cols + rows * cols + round_up(b, 16) + convolutions + 12 * 16;
  }
  // Rows are padded to whole vectors, too, so that a square can be transposed.
  void allocate(Scratch& scratch, const Head& head) {
    const Problem& p = head.p;
    int64_t b = p.mini_batch_size;
    int64_t cols = round_up(b, kLanes), rows = round_up(b, kLanes);
    k = scratch.take(2 * rows * D);
    q = k;  // set per mini-batch: right behind its k
    v = scratch.take(rows * D);
    z_k = scratch.take(2 * rows * D);
    z_q = z_k;
    step = scratch.take(rows * D);
    k_t = scratch.take(D * cols);
    attention = scratch.take(rows * cols);
    eta = scratch.take(cols);
    taps_q = allocate_taps(scratch, head, p.conv_q);
    taps_k = allocate_taps(scratch, head, p.conv_k);
    raw = p.taps ? scratch.take((p.taps - 1 + b) * D) : nullptr;
  }

  static float* allocate_taps(Scratch& scratch, const Head& head, const Convolution& conv) {
    if (!conv.weight) return nullptr;
    float* taps = scratch.take((head.p.taps + 1) * D);
    load_taps<D>(conv, head.scan.head, head.p.taps, taps);
    return taps;
  }

  void begin(const Head& head, int64_t start, int64_t count) {
    n = count;
    cols = round_up(n, kLanes);
    q = k + n * D;
    z_q = z_k + n * D;
    for (int64_t t = 0; t < n; ++t) eta[t] = head.p.eta[head.token_index(start + t)];
    if (head.p.rate >= 0.0f) {
      for (int64_t t = n; t < cols; ++t) eta[t] = 0.0f;
      for (int64_t t = 0; t < cols; t += kLanes) store(eta + t, head.p.rate * sigmoid(load(eta + t)));
    }
    load_view(head, head.p.k, taps_k, start, k);
    load_rows<D>(head.p.v, head.p.is_bfloat16, head.scan, start, n, v);
  }

  void load_queries(const Head& head, int64_t start) {
    load_view(head, head.p.q, taps_q, start, q);
  }

  void load_view(const Head& head, const Tokens& x, const float* taps, int64_t start, float* rows) {
    const Problem& p = head.p;
    if (taps)
      load_convolved_rows<D>(x, p.is_bfloat16, head.scan, start, n, taps, p.taps, raw, rows);
    else
      load_rows<D>(x, p.is_bfloat16, head.scan, start, n, rows);
  }

  // z for the first `rows` of [k; q], and the steps. Meanwhile the tokens from `next` are fetched.
  void learn(const Head& head, const float* w, const float* b, const Norm& norm, int64_t rows,
             int64_t next) {
    for (int64_t t = 0; t < rows; ++t) std::memcpy(z_k + t * D, b, D * sizeof(float));
    multiply_add(rows, D, D, k, D, w, z_k);
    for (int64_t t = 0; t < n; ++t) {
      prefetch_row<D>(head.p.k, head.p.is_bfloat16, head.scan, next + t);
      prefetch_row<D>(head.p.v, head.p.is_bfloat16, head.scan, next + t);
      Row<D> g = inner_gradient(Row<D>::of(z_k + t * D), Row<D>::of(k + t * D),
                                Row<D>::of(v + t * D), norm);
      (g * eta[t]).to(step + t * D);
    }
  }

  // A = lower triangle of Q Kᵀ + 1.
  void attend() {
    transpose_rows(k, k_t);
    multiply(n, D, cols, q, D, k_t, attention);
    for (int64_t t = 0; t < n; ++t)
      for (int64_t s = 0; s < cols; s += kLanes) {
        float* row = attention + t * cols + s;
        store(row, keep_first(load(row) + 1.0f, t - s + 1));
      }
  }

  // [n, D] → [D, cols]; the columns past n are zero.
  void transpose_rows(const float* rows, float* out) const {
    int64_t whole = n / kLanes * kLanes;
    for (int64_t i = 0; i < whole; i += kLanes)
      for (int64_t j = 0; j < D; j += kLanes)
        transpose_square(rows + i * D + j, D, out + j * cols + i, cols);
    if (whole == n) return;
    for (int64_t j = 0; j < D; ++j)
      for (int64_t i = whole; i < cols; ++i) out[j * cols + i] = i < n ? rows[i * D + j] : 0.0f;
  }

  // W ← W - p_n Kᵀ G, b ← b - p_n Σ G. Overwrites the steps with -p_n G.
  void update(float p_last, float* w, float* b) {
    Row<D> bias = Row<D>::of(b);
    for (int64_t t = 0; t < n; ++t) {
      Row<D> scaled = Row<D>::of(step + t * D) * -p_last;
      scaled.to(step + t * D);
      bias = bias + scaled;
    }
    bias.to(b);
    multiply_add_transposed(D, n, D, k, D, step, w);
  }
};

}  // namespace
