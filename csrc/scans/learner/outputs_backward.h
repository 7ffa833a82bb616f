// The backward pass of a mini-batch's outputs, and the gradients of what it shares with the other mini-batches of
// the head: the inner norm's parameters and the position scale.
#pragma once

#include "head.h"
#include "inner_norms_backward.h"

namespace {

template <int D>
struct OutputsBackward {
  float *dweight, *dbias;  // of the norm
  float* dscale;           // [b]

  static size_t floats(const Problem& p) { return 2 * D + p.mini_batch_size + 3 * 16; }

  static OutputsBackward begin(const Problem& p, Scratch& scratch) {
    const OutputsBackward backward{scratch.take(D), scratch.take(D), scratch.take(p.mini_batch_size)};
    clear(backward.dweight, D);
    clear(backward.dbias, D);
    clear(backward.dscale, p.mini_batch_size);
    return backward;
  }

  // o = f(q) at Z_q: from ∂o of n tokens to ∂Z_q, ∂U and the share of q. Q W + b in z_q becomes
  // Z_q = Q W + b - p U.
  void run(const Head& head, const Tokens& grad, int64_t start, int64_t n, const float* update, float* z_q, float* dq,
           float* dz_q, float* dupdate) const {
    const Norm norm = head.norm();
    load_rows<D>(grad, head.p.is_bfloat16, head.scan, start, n, dq);
    for (int64_t t = 0; t < n; ++t) {
      const float p_t = head.scale(t);
      for (int64_t i = t * D; i < (t + 1) * D; i += kLanes)
        store(z_q + i, load(z_q + i) - load(update + i) * p_t);
    }
    if (norm.weight) {
      inner_outputs_backward<D>(n, dq, z_q, norm, dz_q, dweight, dbias);
    } else {
      copy(dz_q, dq, n * D);
      clear(dq, n * D);
    }
    for (int64_t t = 0; t < n; ++t) {
      const Row<D> row = Row<D>::of(dz_q + t * D);
      (row * -head.scale(t)).to(dupdate + t * D);
      dscale[t] -= row.dot(Row<D>::of(update + t * D));
    }
  }

  void store_results(const Head& head, const Gradients& grad) const {
    if (grad.dln_weight) {
      copy(grad.dln_weight + head.index * D, dweight, D);
      copy(grad.dln_bias + head.index * D, dbias, D);
    }
    const int64_t b = head.p.mini_batch_size;
    if (grad.dscale) copy(grad.dscale + head.index * b, dscale, b);
  }
};

}  // namespace
