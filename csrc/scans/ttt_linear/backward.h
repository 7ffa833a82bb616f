// Backward pass of ttt_linear over one head of one image, derived in the op's README.
#pragma once

#include "../learner/outputs_backward.h"
#include "../learner/taps_backward.h"
#include "mini_batch.h"

namespace {

template <int D>
class BackwardOfHead {
 public:
  static size_t floats(const Problem& p) {
    const int64_t b = p.mini_batch_size, padded = round_up(b, kLanes);
    const size_t replayed = p.interval * (D * D + round_up(D, 16) + 2 * padded * D);
    const size_t rows = (9 * padded + 2 * p.taps) * D + D * padded + padded * padded;
    const size_t convolutions = Taps<D>::floats(p) + 2 * TapsBackward<D>::floats(p);
    return MiniBatch<D>::floats(p) + OutputsBackward<D>::floats(p) + convolutions + replayed + 2 * D * D + D +
           round_up(b, 16) + rows + 32 * 16;
  }

  BackwardOfHead(const Head& of, const Gradients& gradients, Scratch& scratch)
      : head(of), p(of.p), grad(gradients), norm(of.norm()), padded(round_up(p.mini_batch_size, kLanes)) {
    const int64_t b = p.mini_batch_size;
    states_w = scratch.take(p.interval * D * D);
    states_b = scratch.take(p.interval * round_up(D, 16));
    views = scratch.take(p.interval * padded * D);
    steps = scratch.take(p.interval * padded * D);
    dw = scratch.take(D * D);
    transposed = scratch.take(D * D);
    db = scratch.take(D);
    outputs = OutputsBackward<D>::begin(p, scratch);
    deta = scratch.take(b);
    batch.allocate(scratch, p);
    z_q = batch.z_k;  // its own z is in `views`
    batch.taps = Taps<D>::load(scratch, head);
    conv_q = TapsBackward<D>::begin(p, batch.taps.q, scratch);
    conv_k = TapsBackward<D>::begin(p, batch.taps.k, scratch);
    dz = scratch.take(2 * padded * D);
    scaled_step = scratch.take(padded * D);
    update = scratch.take(padded * D);
    dupdate = scratch.take(padded * D);
    step_t = scratch.take(D * padded);
    dattention = scratch.take(padded * padded);
    // The rows after the mini-batch follow them, see TapsBackward.
    dq = scratch.take((padded + p.taps) * D);
    dk = scratch.take((padded + p.taps) * D);
    dv = scratch.take(padded * D);
    dstep = scratch.take(padded * D);
  }

  void run() {
    copy(dw, grad.last.w1 + head.index * D * D, D * D);
    copy(db, grad.last.b1 + head.index * D, D);
    const int64_t count = head.mini_batches(), interval = p.interval;
    for (int64_t first = (count - 1) / interval * interval; first >= 0; first -= interval) {
      const int64_t members = count - first < interval ? count - first : interval;
      replay(first, members);
      for (int64_t m = members - 1; m >= 0; --m) step_back(first + m, m);
    }
    store_results();
  }

 private:
  // The states before the mini-batches from `first` on, from the saved one, and their z and steps.
  void replay(int64_t first, int64_t members) {
    const int64_t b = p.mini_batch_size;
    const State& from = first ? grad.kept : p.initial;
    const int64_t place = first ? head.kept_index(first) : head.initial_index();
    copy(states_w, from.w1 + place * D * D, D * D);
    copy(states_b, from.b1 + place * D, D);
    for (int64_t m = 0; m < members; ++m) {
      const int64_t number = first + m;
      batch.begin(head, number * b, head.size(number));
      RowsAhead<D> ahead(head, (number + 1) * b, b, {&p.k, &p.v}, tiles_of_product(b + D, D));
      batch.z_k = views + m * padded * D;
      batch.step = steps + m * padded * D;
      batch.learn(states_w + m * D * D, states_b + m * D, norm, batch.n, ahead);
      if (m + 1 == members) break;
      const float *w = states_w + m * D * D, *bias = states_b + m * D;
      batch.update(head.scale(batch.n - 1), update, w, bias, states_w + (m + 1) * D * D, states_b + (m + 1) * D,
                   ahead);
    }
  }

  // From the gradient of the state after a mini-batch, the m-th replayed one, to that of the state before it.
  void step_back(int64_t number, int64_t m) {
    const int64_t b = p.mini_batch_size, start = number * b;
    n = head.size(number);
    const float* w = states_w + m * D * D;
    RowsAhead<D> ahead(head, start - b, b, {&p.q, &p.k, &p.v, &grad.o, &grad.dq, &grad.dk, &grad.dv},
                       tiles_of_product(5 * n + D, D));

    batch.begin(head, start, n);
    batch.load_queries(head, start);
    batch.z_k = views + m * padded * D;
    batch.step = steps + m * padded * D;
    multiply_add_row(n, D, D, batch.q, D, w, states_b + m * D, z_q, asking(ahead));
    batch.attend();
    multiply(n, n, D, batch.attention, batch.cols, batch.step, update);

    outputs.run(head, grad.o, start, n, update, z_q, dq, dz_q(), dupdate);
    through_attention();
    through_state(ahead);
    multiply_add_transposed(n, n, D, batch.attention, batch.cols, dupdate, dstep);
    inner_gradients_backward<D>(n, dstep, batch.eta, batch.z_k, batch.k, batch.v, norm, dz, dk, dv,
                                deta, outputs.dweight, outputs.dbias);
    head.write_rate_gradients(start, n, batch.eta, deta, grad.deta);
    through_weight(w, ahead);
    through_views(start);
  }

  // U = A G, A = lower(Q Kᵀ + 1)
  void through_attention() {
    const int64_t cols = batch.cols;
    transpose_rows<D>(batch.step, n, cols, step_t);
    multiply(n, D, cols, dupdate, D, step_t, dattention);
    keep_lower(dattention, n, cols);
    multiply_add(n, n, D, dattention, cols, batch.k, dq);
    product<false>(n, D, {n, dattention, 1, cols, batch.q, D, dk, D});
  }

  // W ← W - p_n Kᵀ G, b ← b - p_n Σ G: dstep starts as -p_n (K ∂W + ∂b)
  void through_state(RowsAhead<D>& ahead) {
    const float p_last = head.scale(n - 1);
    multiply_add_row(n, D, D, batch.k, D, dw, db, dstep, asking(ahead));
    transpose(dw, D, D, transposed);
    Vector dscale_last{};
    for (int64_t i = 0; i < n * D; i += kLanes) {
      const Vector k_dw = load(dstep + i), step = load(batch.step + i);
      dscale_last += k_dw * step;
      store(dstep + i, k_dw * -p_last);
      store(scaled_step + i, step * -p_last);
    }
    multiply_add(n, D, D, scaled_step, D, transposed, dk, asking(ahead));
    outputs.dscale[n - 1] -= sum(dscale_last);
  }

  // Q W + b, K W + b: the gradients of q and k, and those of the state before the mini-batch.
  void through_weight(const float* w, RowsAhead<D>& ahead) {
    transpose(w, D, D, transposed);
    multiply_add(n, D, D, dz, D, transposed, dk, asking(ahead));
    multiply_add(n, D, D, dz_q(), D, transposed, dq, asking(ahead));
    for (int64_t i = 0; i < D; i += kLanes) {
      Vector total = load(db + i);
      for (int64_t t = 0; t < 2 * n; ++t) total += load(dz + t * D + i);
      store(db + i, total);
    }
    multiply_add_transposed(D, 2 * n, D, batch.k, D, dz, dw, asking(ahead));
  }

  // The convolutions of q and k, and the gradients of the tokens.
  void through_views(int64_t start) {
    through_convolution(conv_q, p.q, start, dq);
    through_convolution(conv_k, p.k, start, dk);
    if (grad.dq.data) {
      store_rows<D>(grad.dq, p.is_bfloat16, head.scan, start, n, dq);
    } else {
      for (int64_t i = 0; i < n * D; i += kLanes) store(dk + i, load(dk + i) + load(dq + i));
    }
    store_rows<D>(grad.dk, p.is_bfloat16, head.scan, start, n, dk);
    store_rows<D>(grad.dv, p.is_bfloat16, head.scan, start, n, dv);
  }

  void through_convolution(const TapsBackward<D>& conv, const Tokens& view, int64_t start, float* rows) {
    if (!conv.taps) return;
    load_seen_rows<D>(view, p.is_bfloat16, head.scan, start, n, p.taps, batch.raw);
    conv.run(p.taps, n, batch.raw, rows);
  }

  void store_results() const {
    copy(grad.dinitial.w1 + head.index * D * D, dw, D * D);
    copy(grad.dinitial.b1 + head.index * D, db, D);
    outputs.store_results(head, grad);
    const int64_t taps = (p.taps + 1) * D;
    if (conv_q.taps) copy(grad.dtaps.q + head.index * taps, conv_q.dtaps, taps);
    if (conv_k.taps) copy(grad.dtaps.k + head.index * taps, conv_k.dtaps, taps);
  }

  float* dz_q() const { return dz + n * D; }

  const Head& head;
  const Problem& p;
  const Gradients& grad;
  const Norm norm;
  const int64_t padded;  // the rows of a mini-batch, as whole vectors
  int64_t n = 0;         // the mini-batch's tokens

  MiniBatch<D> batch;
  OutputsBackward<D> outputs;
  TapsBackward<D> conv_q, conv_k;
  float *states_w, *states_b;         // of an interval's mini-batches
  float *views, *steps;               // K W + b and G of an interval's mini-batches, [padded, D] each
  float *dw, *db;                     // of the state after the mini-batch, then before it
  float* transposed;                  // ∂Wᵀ or Wᵀ
  float* deta;                        // [b]
  float* z_q;                         // Q W + b, then Z_q [n, D]
  float* dz;                          // [∂Z_k; ∂Z_q], as k and q
  float* scaled_step;                 // -p_n G [n, D]
  float *update, *dupdate;            // U = A G and ∂U [n, D]
  float* step_t;                      // Gᵀ [D, cols]
  float* dattention;                  // ∂A [n, cols]
  float *dq, *dk, *dv, *dstep;        // [n, D]
};

}  // namespace
