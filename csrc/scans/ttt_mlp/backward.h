// Backward pass of ttt_mlp over one head of one image. The functions follow the steps of the derivation
// in the op's README.
#pragma once

#include "../learner/outputs_backward.h"
#include "mini_batch.h"

namespace {

template <int D>
class BackwardPass {
 public:
  static size_t floats(const Problem& p) {
    const int64_t padded = round_up(p.mini_batch_size, kLanes);
    return MiniBatch<D>::floats(p, Direction::kBackward) + OutputsBackward<D>::floats(p) +
           (held_states(p) + 1) * Weights<D>::kFloats + D * kPanel + 6 * padded * 4 * D + 9 * padded * D +
           D * padded + padded * kPanel + 2 * padded * padded + padded + 26 * 16;
  }

  BackwardPass(const Head& h, const Gradients& gradients, Scratch& scratch)
      : head(h), p(h.p), grad(gradients), norm(h.norm()) {
    const int64_t padded = round_up(p.mini_batch_size, kLanes);
    batch.allocate(scratch, p, Direction::kBackward);
    states = scratch.take(held_states(p) * Weights<D>::kFloats);
    dw = {scratch.take(Weights<D>::kFloats)};
    outputs = OutputsBackward<D>::begin(p, scratch);
    w_t = scratch.take(D * kPanel);
    slope_q = Hidden::take<D>(scratch, padded);
    dz1 = Hidden::take<D>(scratch, 2 * padded);
    dx2 = Hidden::take<D>(scratch, padded);
    de1 = Hidden::take<D>(scratch, padded);
    update1 = Hidden::take<D>(scratch, padded);
    dviews = scratch.take(2 * padded * D);
    dv = scratch.take(padded * D);
    dz2 = scratch.take(2 * padded * D);
    update2 = scratch.take(padded * D);
    dupdate2 = scratch.take(padded * D);
    dstep2 = scratch.take(padded * D);
    dg2 = scratch.take(padded * D);
    step2_t = scratch.take(D * padded);
    dupdate1 = scratch.take(padded * kPanel);
    dattention1 = scratch.take(padded * padded);
    dattention2 = scratch.take(padded * padded);
    deta = scratch.take(padded);
  }

  void run() {
    dw.load(grad.last, head.index);
    const int64_t count = head.mini_batches(), held = held_states(p);
    for (int64_t segment = (count - 1) / p.interval * p.interval; segment >= 0;
         segment -= p.interval) {
      // As many of the segment's states as the scratch holds.
      int64_t stop = count - segment < p.interval ? count : segment + p.interval;
      while (stop > segment) {
        const int64_t start = stop - held > segment ? stop - held : segment;
        replay(segment, start, stop);
        for (int64_t number = stop - 1; number >= start; --number)
          step_back(number, state(number - start));
        stop = start;
      }
    }
    dw.store(grad.dinitial, head.index);
    outputs.store_results(head, grad);
  }

 private:
  // With short mini-batches of wide heads the states between two saved ones take gigabytes. Beyond
  // 128 MiB the scratch holds fewer states, and the replay starts several times from the saved state.
  static int64_t held_states(const Problem& p) {
    const int64_t count = (p.length + p.mini_batch_size - 1) / p.mini_batch_size;
    const int64_t most = (int64_t(1) << 25) / (8 * D * D);
    const int64_t wanted = count < p.interval ? count : p.interval;
    return wanted < most ? wanted : most;
  }

  Weights<D> state(int64_t place) const { return {states + place * Weights<D>::kFloats}; }

  // The states of the mini-batches [start, stop), from the saved one before `segment`.
  void replay(int64_t segment, int64_t start, int64_t stop) {
    if (segment)
      state(0).load(grad.kept, head.kept_index(segment));
    else
      state(0).load(p.initial, head.initial_index());
    for (int64_t number = segment; number + 1 < stop; ++number) {
      const int64_t place = number < start ? 0 : number - start, first = number * p.mini_batch_size;
      batch.load_training(head, first, head.size(number));
      RowsAhead<D> ahead(head, first + p.mini_batch_size, p.mini_batch_size, {&p.k, &p.v},
                         MiniBatch<D>::kAsks);
      batch.learn(state(place), norm, batch.n, ahead);
      if (number >= start) copy(state(place + 1).data, state(place).data, Weights<D>::kFloats);
      batch.update(head.scale(batch.n - 1), state(number < start ? 0 : place + 1), ahead);
    }
  }

  // From the gradient of the state after a mini-batch to the gradient of the state before it.
  void step_back(int64_t number, const Weights<D>& w) {
    start = number * p.mini_batch_size;
    n = head.size(number);
    batch.load_training(head, start, n);
    batch.load_queries(head, start);
    const int64_t b = p.mini_batch_size;
    RowsAhead<D> ahead(head, start - b, b, {&p.q, &p.k, &p.v, &grad.o}, MiniBatch<D>::kAsks);
    RowsAhead<D> results(head, start, n, {&grad.dq, &grad.dk, &grad.dv}, kPanels<D>);
    batch.learn(w, norm, 2 * n, ahead);
    cols = batch.cols;
    read(w);
    // 1. o = f(q) at Z2_q
    outputs.run(head, grad.o, start, n, update2, batch.z2_q(), dq(), dz2_q(), dupdate2);
    through_layer2();
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      results.ask();
      through_layer1(c, w);
    }
    through_attention1();
    through_inner_gradient();
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      ahead.ask();
      through_weights(c, w);
    }
    add_rows<D>(dz2, 2 * n, dw.b2());
    store_rows<D>(grad.dk, p.is_bfloat16, head.scan, start, n, dk());
    store_rows<D>(grad.dq, p.is_bfloat16, head.scan, start, n, dq());
    store_rows<D>(grad.dv, p.is_bfloat16, head.scan, start, n, dv);
    head.write_rate_gradients(start, n, batch.eta, deta, grad.deta);
  }

  // The results for the test views, again: U1, Z1_q, X2_q, A2, U2, Z2_q.
  void read(const Weights<D>& w) {
    batch.attend();
    for (int64_t t = 0; t < n; ++t) copy(batch.z2_q() + t * D, w.b2(), D);
    for (int64_t c = 0; c < kPanels<D>; ++c) {
      float *u = update1.panel(c), *z = batch.z1_q(c), *x = batch.x2_q(c), *s = slope_q.panel(c);
      multiply(n, n, kPanel, batch.attention, cols, batch.step1.panel(c), u);
      for (int64_t t = 0; t < n; ++t) {
        const float p_t = head.scale(t);
        for (int64_t i = t * kPanel; i < (t + 1) * kPanel; i += kLanes) {
          const GeluTanh f = gelu_tanh(load(z + i) - load(u + i) * p_t);
          store(x + i, f.value);
          store(s + i, f.derivative);
        }
      }
      multiply_add(n, kPanel, D, x, kPanel, w.w2(c), batch.z2_q());
    }
    batch.attend2();
    multiply(n, n, D, batch.attention2, cols, batch.step2, update2);
  }

  // 2. Layer 2 except for its panels: ∂A2, ∂G2, and the first part of ∂g2 and ∂η.
  void through_layer2() {
    transpose_rows<D>(batch.step2, n, cols, step2_t);
    multiply(n, D, cols, dupdate2, D, step2_t, dattention2);
    keep_lower(dattention2, n, cols);

    // ∂G2 = A2ᵀ ∂U2 - p_n M2, M2 = X2 ∂W2 + ∂b2
    const float p_last = head.scale(n - 1);
    for (int64_t t = 0; t < n; ++t) copy(dstep2 + t * D, dw.b2(), D);
    for (int64_t c = 0; c < kPanels<D>; ++c)
      multiply_add(n, kPanel, D, batch.x2.panel(c), kPanel, dw.w2(c), dstep2);
    float dscale_last = 0.0f;
    for (int64_t t = 0; t < n; ++t) {
      Row<D> m = Row<D>::of(dstep2 + t * D), step = Row<D>::of(batch.step2 + t * D);
      dscale_last += m.dot(step);
      (m * -p_last).to(dstep2 + t * D);
      (step * -p_last).to(batch.step2 + t * D);  // step2 is -p_n G2 from here on
    }
    outputs.dscale[n - 1] -= dscale_last;
    multiply_add_transposed(n, n, D, batch.attention2, cols, dupdate2, dstep2);
    for (int64_t t = 0; t < n; ++t) {
      Row<D> ds = Row<D>::of(dstep2 + t * D);
      deta[t] = ds.dot(Row<D>::of(batch.g2 + t * D));
      (ds * batch.eta[t]).to(dg2 + t * D);
    }
  }

  // 2. and 3. Panel c of ∂X2_q, ∂X2 and of layer 1; 5. and 6. through its g1 and E1.
  void through_layer1(int64_t c, const Weights<D>& w) {
    const float p_last = head.scale(n - 1);
    float *dx = dx2.panel(c), *dz_k = dz1.panel(c), *dz_q = dz1_q(c), *de = de1.panel(c);
    float *step = batch.step1.panel(c), *dstep = de;

    // ∂X2_q = ∂Z2_q W2ᵀ + ∂A2 X2, ∂X2 = ∂A2ᵀ X2_q - p_n G2 ∂W2ᵀ
    multiply(n, D, kPanel, dz2_q(), D, batch.w2_transposed(c), dz_q);
    multiply_add(n, n, kPanel, dattention2, cols, batch.x2.panel(c), dz_q);
    transpose(dw.w2(c), kPanel, D, w_t);
    multiply(n, D, kPanel, batch.step2, D, w_t, dx);
    multiply_add_transposed(n, n, kPanel, dattention2, cols, batch.x2_q(c), dx);

    // ∂Z1_q = ∂X2_q ⊙ σ'(Z1_q), ∂U1 = -P ∂Z1_q
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = t * kPanel;
      const float p_t = head.scale(t);
      Row<kPanel> dz = Row<kPanel>::of(dz_q + at) * Row<kPanel>::of(slope_q.panel(c) + at);
      dz.to(dz_q + at);
      (dz * -p_t).to(dupdate1 + at);
      outputs.dscale[t] -= dz.dot(Row<kPanel>::of(update1.panel(c) + at));
    }

    // ∂A1 = lower(∂U1 G1ᵀ)
    transpose_rows<kPanel>(step, n, cols, batch.hidden_t);
    if (c == 0)
      multiply(n, kPanel, cols, dupdate1, kPanel, batch.hidden_t, dattention1);
    else
      multiply_add(n, kPanel, cols, dupdate1, kPanel, batch.hidden_t, dattention1);

    // ∂G1 = A1ᵀ ∂U1 - p_n M1, M1 = K ∂W1 + ∂b1; ∂K starts as -p_n G1 ∂W1ᵀ
    for (int64_t t = 0; t < n; ++t) copy(dstep + t * kPanel, dw.b1(c), kPanel);
    multiply_add(n, D, kPanel, batch.k, D, dw.w1(c), dstep);
    float dscale_last = 0.0f;
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = t * kPanel;
      Row<kPanel> m = Row<kPanel>::of(dstep + at), g = Row<kPanel>::of(step + at);
      dscale_last += m.dot(g);
      (m * -p_last).to(dstep + at);
      (g * -p_last).to(step + at);  // step is -p_n G1 from here on
    }
    outputs.dscale[n - 1] -= dscale_last;
    multiply_add_transposed(n, n, kPanel, batch.attention, cols, dupdate1, dstep);
    transpose(dw.w1(c), D, kPanel, w_t);
    if (c == 0)
      multiply(n, kPanel, D, step, kPanel, w_t, dk());
    else
      multiply_add(n, kPanel, D, step, kPanel, w_t, dk());

    // G1 = η g1, g1 = E1 ⊙ σ'(Z1), E1 = g2 W2ᵀ
    for (int64_t t = 0; t < n; ++t) {
      const int64_t at = t * kPanel;
      Row<kPanel> ds = Row<kPanel>::of(dstep + at), e = Row<kPanel>::of(batch.e1.panel(c) + at);
      Row<kPanel> dg = ds * batch.eta[t], slope = Row<kPanel>::of(batch.slope.panel(c) + at);
      deta[t] += ds.dot(e * slope);
      (dg * slope).to(de + at);
      (dg * e * Row<kPanel>::of(batch.bend.panel(c) + at)).to(dz_k + at);
    }
    multiply_add(n, kPanel, D, de, kPanel, w.w2(c), dg2);
  }

  // 3. A1 = lower(Q Kᵀ + 1)
  void through_attention1() {
    keep_lower(dattention1, n, cols);
    multiply_add(n, n, D, dattention1, cols, batch.k, dq());
    multiply_add_transposed(n, n, D, dattention1, cols, batch.q, dk());
  }

  // 7. g2 = g(Z2, k, v)
  void through_inner_gradient() {
    inner_gradients_backward<D>(n, dg2, nullptr, batch.z2, batch.k, batch.v, norm, dz2, dk(), dv, nullptr,
                                outputs.dweight, outputs.dbias);
  }

  // 8. to 10. Through panel c of Z2 = X2 W2 + b2, X2 = σ(Z1), Z1 = K W1 + b1, and the remaining parts
  // of ∂W1, ∂W2.
  void through_weights(int64_t c, const Weights<D>& w) {
    float *dx = dx2.panel(c), *dz = dz1.panel(c);
    multiply_add(n, D, kPanel, dz2, D, batch.w2_transposed(c), dx);
    const float* slope = batch.slope.panel(c);
    for (int64_t i = 0; i < n * kPanel; i += kLanes)
      store(dz + i, load(dz + i) + load(dx + i) * load(slope + i));

    transpose(w.w1(c), D, kPanel, w_t);
    multiply_add(2 * n, kPanel, D, dz, kPanel, w_t, dviews);
    multiply_add_transposed(D, 2 * n, kPanel, batch.k, D, dz, dw.w1(c));
    add_rows<kPanel>(dz, 2 * n, dw.b1(c));
    multiply_add_transposed(kPanel, 2 * n, D, batch.x2.panel(c), kPanel, dz2, dw.w2(c));
    multiply_add_transposed(kPanel, n, D, de1.panel(c), kPanel, batch.g2, dw.w2(c));
  }

  float* dk() const { return dviews; }
  float* dq() const { return dviews + n * D; }
  float* dz2_q() const { return dz2 + n * D; }
  float* dz1_q(int64_t c) const { return dz1.panel(c) + n * kPanel; }

  const Head& head;
  const Problem& p;
  const Gradients& grad;
  const Norm norm;
  int64_t start = 0, n = 0, cols = 0;  // the mini-batch's

  MiniBatch<D> batch;
  OutputsBackward<D> outputs;
  float* states;            // [held, Weights]
  Weights<D> dw{nullptr};   // of the state after the mini-batch, then before it
  float* w_t;               // a panel of weights, transposed
  Hidden slope_q;           // σ'(Z1_q)
  Hidden update1;           // U1 = A1 G1
  Hidden dz1;               // [∂Z1; ∂Z1_q]
  Hidden dx2;               // ∂X2
  Hidden de1;               // ∂E1; before, ∂G1
  float* dviews;            // [∂K; ∂Q], [2 n, D]
  float* dv;                // [n, D]
  float* dz2;               // [∂Z2; ∂Z2_q]
  float *update2, *dupdate2;          // U2, ∂U2 [n, D]
  float *dstep2, *dg2;                // ∂G2, ∂g2 [n, D]
  float* step2_t;                     // G2ᵀ [D, cols]
  float* dupdate1;                    // a panel of ∂U1 [n, 64]
  float *dattention1, *dattention2;   // ∂A1, ∂A2 [n, cols]
  float* deta;                        // [n]
};

}  // namespace
