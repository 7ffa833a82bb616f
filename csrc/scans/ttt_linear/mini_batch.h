// One mini-batch of ttt_linear: the common part of both passes.
#pragma once

#include "../learner/rows_ahead.h"

namespace {

// The tokens of one mini-batch and their intermediate results at the state (W, b) before it.
template <int D>
struct MiniBatch : Views<D> {
  using Views<D>::n, Views<D>::cols, Views<D>::k, Views<D>::v, Views<D>::eta;

  float *z_k, *z_q;   // [n, D]: K W + b, Q W + b, neighbours as k and q; z_q becomes Z_q
  float* step;        // G [n, D]: η_t g_t

  static size_t floats(const Problem& p) {
    return Views<D>::floats(p) + 3 * round_up(p.mini_batch_size, kLanes) * D + 2 * 16;
  }
  // Rows are padded to whole vectors, so that a square can be transposed.
  void allocate(Scratch& scratch, const Problem& p) {
    Views<D>::allocate(scratch, p);
    const int64_t padded = round_up(p.mini_batch_size, kLanes);
    z_k = scratch.take(2 * padded * D);
    z_q = z_k;
    step = scratch.take(padded * D);
  }

  void begin(const Head& head, int64_t start, int64_t count) {
    this->load_training(head, start, count);
    z_q = z_k + n * D;
  }

  // Compute z of the first `rows` of [k; q], and the steps.
  void learn(const float* w, const float* b, const Norm& norm, int64_t rows, RowsAhead<D>& ahead) {
    multiply_add_row(rows, D, D, k, D, w, b, z_k, asking(ahead));
    inner_gradients<D>(n, z_k, k, v, eta, norm, step);
  }

  // W = W₀ - p_n Kᵀ G, b = b₀ - p_n Σ G, which may replace W₀ and b₀. Writes -p_n G, which may replace the steps.
  void update(float p_last, float* scaled_step, const float* w0, const float* b0, float* w, float* b,
              RowsAhead<D>& ahead) {
    Row<D> bias = Row<D>::of(b0);
    for (int64_t t = 0; t < n; ++t) {
      const Row<D> scaled = Row<D>::of(step + t * D) * -p_last;
      scaled.to(scaled_step + t * D);
      bias = bias + scaled;
    }
    bias.to(b);
    product<true>(D, D, {n, k, 1, D, scaled_step, D, w, D, w0, D}, asking(ahead));
  }
};

}  // namespace
