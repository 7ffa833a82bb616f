// Backward pass of ttt_linear over one head of one image, derived in the op's README.
#pragma once

#include "../learner/taps_backward.h"
#include "mini_batch.h"

namespace {

template <int D>
size_t backward_floats(const Problem& p) {
  const int64_t b = p.mini_batch_size, padded = round_up(b, kLanes);
  const size_t states = p.interval * (D * D + round_up(D, 16));
  const size_t rows = (10 * padded + 2 * p.taps) * D + D * padded + padded * padded;
  const size_t convolutions = Taps<D>::floats(p) + 2 * TapsBackward<D>::floats(p);
  return MiniBatch<D>::floats(p) + convolutions + states + 2 * D * D + 3 * D + round_up(b, 16) +
         rows + 32 * 16;
}

template <int D>
void backward_head(const Head& head, const Gradients& grad, Scratch& scratch) {
  const Problem& p = head.p;
  const Norm norm = head.norm();
  const int64_t b = p.mini_batch_size, padded = round_up(b, kLanes);
  const int64_t interval = p.interval;
  const int64_t count = head.mini_batches();

  float* states_w = scratch.take(interval * D * D);
  float* states_b = scratch.take(interval * round_up(D, 16));
  float* dw = scratch.take(D * D);
  float* transposed = scratch.take(D * D);
  float* db = scratch.take(D);
  float* dweight = scratch.take(D);
  float* dbias = scratch.take(D);
  float* dscale = scratch.take(b);
  MiniBatch<D> batch;
  batch.allocate(scratch, p);
  batch.taps = Taps<D>::load(scratch, head);
  const auto conv_q = TapsBackward<D>::begin(p, batch.taps.q, scratch);
  const auto conv_k = TapsBackward<D>::begin(p, batch.taps.k, scratch);
  float* dz = scratch.take(2 * padded * D);  // [∂Z_q; ∂Z_k]
  float* through_w = scratch.take(2 * padded * D);
  float* update = scratch.take(padded * D);   // U = A G
  float* dupdate = scratch.take(padded * D);  // ∂U
  float* step_t = scratch.take(D * padded);   // Gᵀ
  float* dattention = scratch.take(padded * padded);
  // The rows after the mini-batch follow them, see TapsBackward.
  float* dq = scratch.take((padded + p.taps) * D);
  float* dk = scratch.take((padded + p.taps) * D);
  float* dv = scratch.take(padded * D);
  float* dstep = scratch.take(padded * D);

  copy(dw, grad.last.w1 + head.index * D * D, D * D);
  copy(db, grad.last.b1 + head.index * D, D);
  clear(dweight, D);
  clear(dbias, D);
  clear(dscale, b);

  auto accumulate = [](float* total, const Row<D>& share) { (Row<D>::of(total) + share).to(total); };

  for (int64_t segment = (count - 1) / interval * interval; segment >= 0; segment -= interval) {
    // Replay the segment's states from the saved one.
    const State& from = segment ? grad.kept : p.initial;
    const int64_t place = segment ? head.kept_index(segment) : head.initial_index();
    copy(states_w, from.w1 + place * D * D, D * D);
    copy(states_b, from.b1 + place * D, D);
    const int64_t members = count - segment < interval ? count - segment : interval;
    for (int64_t m = 0; m + 1 < members; ++m) {
      const int64_t number = segment + m;
      batch.begin(head, number * b, head.size(number));
      RowsAhead<D> ahead(head, (number + 1) * b, b, {&p.k, &p.v}, slices(b, D) + slices(D, D));
      batch.learn(states_w + m * D * D, states_b + m * D, norm, batch.n, ahead);
      copy(states_w + (m + 1) * D * D, states_w + m * D * D, D * D);
      copy(states_b + (m + 1) * D, states_b + m * D, D);
      batch.update(head.scale(batch.n - 1), states_w + (m + 1) * D * D, states_b + (m + 1) * D,
                   ahead);
    }

    for (int64_t m = members - 1; m >= 0; --m) {
      const int64_t number = segment + m, start = number * b, n = head.size(number);
      const float* w = states_w + m * D * D;
      const float p_last = head.scale(n - 1);

      RowsAhead<D> ahead(head, start - b, b, {&p.q, &p.k, &p.v, &grad.o},
                         2 * slices(2 * n, D) + slices(D, D));
      RowsAhead<D> results(head, start, n, {&grad.dq, &grad.dk, &grad.dv}, 2 * slices(n, D));

      // The forward pass, again.
      batch.begin(head, start, n);
      batch.load_queries(head, start);
      batch.learn(w, states_b + m * D, norm, 2 * n, ahead);
      batch.attend();
      const int64_t cols = batch.cols;
      multiply(n, n, D, batch.attention, cols, batch.step, update);

      // o = f(q), Z_q = Q W + b - p U
      load_rows<D>(grad.o, p.is_bfloat16, head.scan, start, n, dq);
      for (int64_t t = 0; t < n; ++t) {
        const float p_t = head.scale(t);
        Row<D> gradient = Row<D>::of(dq + t * D), dz_q = gradient;
        Row<D> u = Row<D>::of(update + t * D);
        if (norm.weight) {
          Row<D> z_q = Row<D>::of(batch.z_q + t * D) - u * p_t;
          auto [x_hat, inverse_std] = standardise(z_q, norm.eps);
          accumulate(dweight, gradient * x_hat);
          accumulate(dbias, gradient);
          dz_q = remove_norm_directions(gradient * Row<D>::of(norm.weight), x_hat) * inverse_std;
        } else {
          clear(dq + t * D, D);
        }
        dz_q.to(dz + t * D);
        (dz_q * -p_t).to(dupdate + t * D);
        dscale[t] -= dz_q.dot(u);
      }
      transpose_rows<D>(batch.step, n, cols, step_t);
      multiply(n, D, cols, dupdate, D, step_t, dattention);
      keep_lower(dattention, n, cols);
      multiply_add(n, n, D, dattention, cols, batch.k, dq);
      clear(dk, n * D);
      multiply_add_transposed(n, n, D, dattention, cols, batch.q, dk);

      // W ← W - p_n Kᵀ G, b ← b - p_n Σ G: dstep starts as -p_n (K ∂W + ∂b)
      in_slices(n, results, [&](int64_t t, int64_t rows) {
        multiply_add_row(rows, D, D, batch.k + t * D, D, dw, db, dstep + t * D);
      });
      transpose(dw, D, D, transposed);
      in_slices(n, results, [&](int64_t t, int64_t rows) {
        multiply(rows, D, D, batch.step + t * D, D, transposed, through_w + t * D);
      });
      float dscale_last = 0.0f;
      for (int64_t t = 0; t < n; ++t) {
        Row<D> k_dw = Row<D>::of(dstep + t * D);
        dscale_last += k_dw.dot(Row<D>::of(batch.step + t * D));
        (k_dw * -p_last).to(dstep + t * D);
        (Row<D>::of(dk + t * D) - Row<D>::of(through_w + t * D) * p_last).to(dk + t * D);
      }
      dscale[n - 1] -= dscale_last;
      multiply_add_transposed(n, n, D, batch.attention, cols, dupdate, dstep);

      // G = η g(z_k, k, v), z_k = K W + b
      float* dz_k = dz + n * D;
      for (int64_t t = 0; t < n; ++t) {
        Row<D> z = Row<D>::of(batch.z_k + t * D);
        Row<D> k = Row<D>::of(batch.k + t * D), v = Row<D>::of(batch.v + t * D);
        Row<D> ds = Row<D>::of(dstep + t * D);
        Row<D> g = inner_gradient(z, k, v, norm);
        grad.deta[head.token_index(start + t)] = ds.dot(g);
        Row<D> a = ds * batch.eta[t];
        if (norm.weight) {
          auto through = gradient_backward(a, z, k, v, norm);
          through.z.to(dz_k + t * D);
          (Row<D>::of(dk + t * D) + through.error).to(dk + t * D);
          (through.error * -1.0f).to(dv + t * D);
          accumulate(dweight, through.weight);
          accumulate(dbias, through.error);
        } else {
          a.to(dz_k + t * D);
          (a * -1.0f).to(dv + t * D);
        }
      }

      // Q W, K W
      transpose(w, D, D, transposed);
      in_slices(2 * n, ahead, [&](int64_t t, int64_t rows) {
        multiply(rows, D, D, dz + t * D, D, transposed, through_w + t * D);
      });
      for (int64_t t = 0; t < n; ++t) {
        (Row<D>::of(dq + t * D) + Row<D>::of(through_w + t * D)).to(dq + t * D);
        (Row<D>::of(dk + t * D) + Row<D>::of(through_w + (n + t) * D)).to(dk + t * D);
        accumulate(db, Row<D>::of(dz + t * D) + Row<D>::of(dz_k + t * D));
      }
      in_slices(D, ahead, [&](int64_t i, int64_t rows) {
        multiply_add_transposed(rows, n, D, batch.q + i, D, dz, dw + i * D);
        multiply_add_transposed(rows, n, D, batch.k + i, D, dz_k, dw + i * D);
      });

      auto through_conv = [&](const TapsBackward<D>& conv, const Tokens& view, float* rows) {
        if (!conv.taps) return;
        load_seen_rows<D>(view, p.is_bfloat16, head.scan, start, n, p.taps, batch.raw);
        conv.run(p.taps, n, batch.raw, rows);
      };
      through_conv(conv_q, p.q, dq);
      through_conv(conv_k, p.k, dk);
      if (grad.dq.data)
        store_rows<D>(grad.dq, p.is_bfloat16, head.scan, start, n, dq);
      else
        for (int64_t t = 0; t < n; ++t) accumulate(dk + t * D, Row<D>::of(dq + t * D));
      store_rows<D>(grad.dk, p.is_bfloat16, head.scan, start, n, dk);
      store_rows<D>(grad.dv, p.is_bfloat16, head.scan, start, n, dv);
    }
  }
  copy(grad.dinitial.w1 + head.index * D * D, dw, D * D);
  copy(grad.dinitial.b1 + head.index * D, db, D);
  if (grad.dln_weight) {
    copy(grad.dln_weight + head.index * D, dweight, D);
    copy(grad.dln_bias + head.index * D, dbias, D);
  }
  if (conv_q.taps) copy(grad.dtaps.q + head.index * (p.taps + 1) * D, conv_q.dtaps, (p.taps + 1) * D);
  if (conv_k.taps) copy(grad.dtaps.k + head.index * (p.taps + 1) * D, conv_k.dtaps, (p.taps + 1) * D);
  if (grad.dscale) copy(grad.dscale + head.index * b, dscale, b);
}

}  // namespace
