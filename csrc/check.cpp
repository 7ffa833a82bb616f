// Run every kernel on small problems in buffers of exactly their size, for valgrind and the sanitizers
// (make sanitize). It checks that results are finite; tests/ops compares the values.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "check.h"
#include "blocks/check.h"
#include "blocks/swiglu_mlp/swiglu_mlp.h"
#include "convolutions/conv1d/conv1d.h"
#include "convolutions/conv2d/conv2d.h"
#include "convolutions/deformable_attention/deformable_attention.h"
#include "pointwise/pointwise.h"
#include "products/linear/linear.h"
#include "products/peak/peak.h"
#include "scans/learner/problem.h"
#include "scans/selective_scan/selective_scan.h"

namespace {

// `count` states of ttt_linear or ttt_mlp; absent tensors are null.
struct StateBuffers {
  Buffer w1, b1, w2, b2;

  StateBuffers(size_t count, int64_t d, bool mlp, bool fill)
      : w1(count * d * d * (mlp ? 4 : 1), fill), b1(count * d * (mlp ? 4 : 1), fill),
        w2(mlp ? count * d * d * 4 : 0, fill), b2(mlp ? count * d : 0, fill) {}
  operator State() {
    auto pointer = [](Buffer& x) { return x.size ? (float*)x : nullptr; };
    return {pointer(w1), pointer(b1), pointer(w2), pointer(b2)};
  }
  bool finite() const { return w1.finite() && b1.finite() && w2.finite() && b2.finite(); }
};

void check_learner(bool mlp, int64_t B, int64_t T, int64_t H, int64_t d, int64_t b, bool norm,
                   int64_t taps = 0, bool shared = false) {
  const size_t tokens = B * T * H * d, biases = B * H * d;
  const int64_t interval = 2, kept = (T - 1) / (b * interval);
  Buffer q(tokens), k(tokens), v(tokens), eta(B * T * H);
  StateBuffers initial(H, d, mlp, true);
  Buffer weight(H * d), bias(H * d), scale(H * b);
  for (size_t i = 0; i < eta.size; ++i) eta[i] = std::fabs(eta[i]) / float(d);
  for (Buffer* w : {&initial.w1, &initial.w2})
    for (size_t i = 0; i < w->size; ++i) (*w)[i] *= 0.1f;
  auto view = [&](float* data) { return Tokens{data, T * H * d, H * d, d}; };
  Buffer conv_weight(H * d * taps), conv_bias(taps ? H * d : 0);
  Convolution conv{taps ? (float*)conv_weight : nullptr, conv_bias};
  Problem p{view(q), view(k), view(v), conv, conv, eta, initial, norm ? (float*)weight : nullptr,
            norm ? (float*)bias : nullptr, scale, B, T, H, d, b, H / 2, interval, taps, 0, 1, 0, 0, 0, 2,
            1e-6f, taps ? 0.5f : -1.0f};
  Buffer o(tokens, false);
  StateBuffers last(B * H, d, mlp, false), states(kept * B * H, d, mlp, false);
  Outputs out{view(o), last, states};
  auto forward = mlp ? vision_ttt_ttt_mlp_forward : vision_ttt_ttt_linear_forward;
  expect(forward(&p, &out) == 0, "forward status");
  expect(o.finite() && last.finite() && states.finite(), "forward is finite");

  Buffer grad_o(tokens);
  StateBuffers grad_last(B * H, d, mlp, true), dinitial(B * H, d, mlp, false);
  Buffer dq(tokens, false), dk(tokens, false), dv(tokens, false), deta(B * T * H, false);
  Buffer dweight(biases, false), dbias(biases, false), dscale(B * H * b, false);
  Buffer dtaps_q(B * H * d * (taps + 1), false), dtaps_k(dtaps_q.size, false);
  if (mlp && taps) return;  // its backward pass supports no convolutions
  const Tokens of_q = shared ? Tokens{} : view(dq);
  const TapGradients dtaps{taps ? (float*)dtaps_q : nullptr, taps ? (float*)dtaps_k : nullptr};
  Gradients g{view(grad_o), grad_last, states, of_q, view(dk), view(dv), dtaps, deta, dinitial,
              norm ? (float*)dweight : nullptr, norm ? (float*)dbias : nullptr, dscale};
  auto backward = mlp ? vision_ttt_ttt_mlp_backward : vision_ttt_ttt_linear_backward;
  expect(backward(&p, &g) == 0, "backward status");
  expect(!dtaps.q || (dtaps_q.finite() && dtaps_k.finite()), "gradients of taps are finite");
  expect((shared || dq.finite()) && dk.finite() && dv.finite() && deta.finite() && dinitial.finite() &&
             dscale.finite() && (!norm || (dweight.finite() && dbias.finite())),
         "backward is finite");
}

// n tokens of a mini-batch of b from `position` on. With `each`, each sequence has its own.
void check_part(bool mlp, int64_t B, int64_t n, int64_t H, int64_t d, int64_t b, int64_t position,
                bool norm, bool each = false) {
  Buffer q(B * n * H * d), k(q.size), v(q.size), eta(B * n * H), o(q.size, false);
  StateBuffers start(B * H, d, mlp, true), sums(B * H, d, mlp, true);
  StateBuffers last(B * H, d, mlp, false), next_sums(B * H, d, mlp, false);
  StateBuffers next_start(B * H, d, mlp, false);
  Buffer weight(H * d), bias(H * d), scale(H * b);
  const std::vector<int64_t> positions(B, position);
  auto view = [&](float* data) { return Tokens{data, n * H * d, H * d, d}; };
  const Convolution none{nullptr, nullptr};
  Problem p{view(q), view(k), view(v), none, none, eta, start, norm ? (float*)weight : nullptr,
            norm ? (float*)bias : nullptr, scale, B, n, H, d, b, 0, 1, 0, 0, 1, 1, 0, 0, 2, 1e-6f,
            -1.0f};
  const bool full = !each && position + n == b;
  OpenMiniBatch open{view(o), position ? State(sums) : State{}, last, full ? State{} : State(next_sums),
                     each ? State(next_start) : State{}, each ? positions.data() : nullptr, position};
  auto part = mlp ? vision_ttt_ttt_mlp_part : vision_ttt_ttt_linear_part;
  expect(part(&p, &open) == 0, "the status of a part");
  expect(o.finite() && last.finite() && (full || next_sums.finite()) && (!each || next_start.finite()),
         "a part is finite");
  OpenMiniBatch only_o{view(o), position ? State(sums) : State{}, {}, {}, {}, nullptr, position};
  expect(part(&p, &only_o) == 0 && o.finite(), "a part without a state is finite");
}

void check_conv1d(int64_t B, int64_t T, int64_t D) {
  Buffer x(B * T * D), y(x.size, false), weight(4 * D), bias(D);
  Conv1d conv{{x, T * D, D}, {y, T * D, D}, weight, bias, B, T, D, 4, D / 2, 2};
  expect(vision_ttt_conv1d(&conv) == 0, "conv1d status");
  Buffer dweight(4 * D, false), dbias(D, false);
  Conv1dWeights shares{dweight, dbias};
  vision_ttt_conv1d_weights(&conv, &shares);
  expect(y.finite() && dweight.finite() && dbias.finite(), "conv1d is finite");
}

void check_pointwise(int64_t B, int64_t T, int64_t D) {
  const size_t tokens = B * T * D;
  Buffer x(tokens), y(tokens, false), bias(2 * D);
  const size_t chunks = B * ((T + vision_ttt_chunk_tokens() - 1) / vision_ttt_chunk_tokens());
  Buffer z(2 * tokens), dz(2 * tokens, false), dgate(tokens, false);
  Buffer norm_weight(2 * D), shares_w(chunks * 2 * D, false), shares_b(chunks * 2 * D, false);
  GatedNorm norm{{z, 2 * T * D, 2 * D}, {x, T * D, D}, {y, T * D, D}, norm_weight, bias,
                 B, T, D, 2, 2, 1e-6f};
  vision_ttt_gated_norm(&norm);
  expect(y.finite(), "gated norm is finite");
  GatedNormGradients gradients{{dz, 2 * T * D, 2 * D}, {dgate, T * D, D}, shares_w, shares_b};
  vision_ttt_gated_norm_backward(&norm, &gradients);
  expect(dz.finite() && dgate.finite() && shares_w.finite() && shares_b.finite(),
         "gated norm's backward is finite");

  const Silu silu{z, nullptr, y, B * T * D, 2}, silu_backward{z, y, y, B * T * D, 2};
  vision_ttt_silu(&silu);
  vision_ttt_silu(&silu_backward);
  expect(y.finite(), "silu and its gradient are finite");
  SwiGlu glu{z, y, dz, B * T, D, 2};
  vision_ttt_swiglu(&glu);
  vision_ttt_swiglu_backward(&glu);
  expect(y.finite() && dz.finite(), "swiglu is finite");
}

void check_linear(int64_t rows, int64_t inner, int64_t columns) {
  Buffer x(rows * inner), weight(columns * inner), bias(columns), grad(rows * columns);
  Buffer out(rows * columns, false), dx(rows * inner, false), dweight(columns * inner, false);
  const Linear linear{x, weight, bias, grad, out, dx, dweight, rows, inner, columns, 2};
  expect(vision_ttt_linear(&linear) == 0 && out.finite(), "a linear layer is finite");
  expect(vision_ttt_linear_backward(&linear) == 0 && dx.finite() && dweight.finite(),
         "a linear layer's backward is finite");
}

void check_swiglu_mlp(int64_t rows, int64_t dim, int64_t hidden, int64_t columns) {
  Buffer x(rows * dim), up(2 * hidden * dim), down(columns * hidden), grad(rows * columns);
  Buffer out(rows * columns, false), dx(rows * dim, false), dup(up.size, false);
  Buffer ddown(down.size, false);
  SwiGluMlpProblem mlp{x,   up,  down,  nullptr, nullptr, grad, out,    dx,      dup, ddown,
                       nullptr, nullptr, rows, dim, hidden,  columns, 0, 2, 1e-6f};
  expect(vision_ttt_swiglu_mlp(&mlp) == 0 && out.finite(), "an MLP is finite");
  expect(vision_ttt_swiglu_mlp_backward(&mlp) == 0 && dx.finite() && dup.finite() && ddown.finite(),
         "an MLP's backward is finite");
  if (columns != dim) return;
  Buffer norm(dim), dweight(dim, false), dbias(dim, false);
  mlp.norm_weight = norm, mlp.norm_bias = norm, mlp.adds = 1;
  mlp.dnorm_weight = dweight, mlp.dnorm_bias = dbias;
  expect(vision_ttt_swiglu_mlp(&mlp) == 0 && out.finite(), "a normed MLP is finite");
  expect(vision_ttt_swiglu_mlp_backward(&mlp) == 0 && dx.finite() && dweight.finite() && dbias.finite(),
         "a normed MLP's backward is finite");
}

void check_conv2d(int64_t B, int64_t h, int64_t w, int64_t C, int64_t K) {
  const int64_t T = h * w;
  Buffer x(B * T * C), y(B * T * C, false), weight(K * K * C), dweight(K * K * C, false);
  Conv2d conv{{x, T * C, C}, {y, T * C, C}, weight, B, h, w, C, K, 2};
  expect(vision_ttt_conv2d(&conv) == 0, "conv2d status");
  vision_ttt_conv2d_weight(&conv, dweight);
  expect(y.finite() && dweight.finite(), "conv2d is finite");
}

// With `hostile`, some locations are infinite, NaN or far outside. Their results need not be
// finite, but must not be written outside the buffers.
void check_deformable_attention(int64_t B, int64_t Q, int64_t H, int64_t d, int64_t L, int64_t P,
                                bool hostile) {
  std::vector<int64_t> shapes;
  int64_t S = 0;
  for (int64_t l = 0; l < L; ++l) {
    shapes.insert(shapes.end(), {3 + 2 * l, 7 - l});
    S += shapes[2 * l] * shapes[2 * l + 1];
  }
  const int64_t points = B * Q * H * L * P;
  Buffer value(B * S * H * d), locations(2 * points), weights(points);
  Buffer out(B * Q * H * d, false), grad(out.size);
  const float extremes[] = {NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 1e9f, -1e9f, 0.0f, 1.0f};
  for (size_t i = 0; hostile && i < locations.size; i += 2) locations[i] = extremes[i / 2 % 9];
  Buffer dvalue(value.size, false), dlocations(locations.size, false), dweights(points, false);
  const DeformableAttentionGradients gradients{dvalue, dlocations, dweights};
  DeformableAttention p{value, locations, weights, out, shapes.data(), S * H * d, H * d, d,
                        Q * H * d, H * d, B, S, Q, H, d, L, P, 0, 2};
  vision_ttt_deformable_attention(&p);
  expect(hostile || out.finite(), "deformable attention is finite");
  p.out = (float*)grad;
  vision_ttt_deformable_attention_backward(&p, &gradients);
  expect(hostile || (dvalue.finite() && dlocations.finite() && dweights.finite()),
         "deformable attention's backward is finite");
  // Buffers of bfloat16 of half the size: the same bits are other numbers.
  Buffer half(value.size / 2), half_out(out.size / 2, false);
  p.value = (float*)half, p.out = (float*)half_out, p.is_bfloat16 = 1;
  vision_ttt_deformable_attention(&p);
  vision_ttt_deformable_attention_backward(&p, &gradients);
}

// A scan with N states per channel, in G groups. `bare` omits the optional tensors.
void check_selective_scan(int64_t B, int64_t T, int64_t D, int64_t N, int64_t G, int64_t reverse,
                          bool bare, bool is_bfloat16) {
  const int64_t tokens = B * T * D, matrices = B * T * G * N, state = B * D * N, width = G * N;
  const int64_t chunks = (T + VISION_TTT_SCAN_CHUNK - 1) / VISION_TTT_SCAN_CHUNK;
  const int64_t numbers = is_bfloat16 ? 2 : 1;  // in a float
  Buffer u(tokens / numbers), delta(u.size), z(u.size), y(u.size, false), grad(u.size);
  Buffer b((matrices + 1) / numbers), c(b.size), a(D * N), skip(D), bias(D), initial(state);
  Buffer last(state, false), kept(chunks * state, false), grad_last(state);
  auto pointer = [&](Buffer& x) { return bare ? nullptr : (float*)x; };
  if (is_bfloat16)  // the bits of any float32 would be numbers of any size
    for (Buffer* x : {&u, &delta, &z, &grad, &b, &c})
      for (size_t i = 0; i < x->size; ++i) {
        const uint32_t pair = 0x3c003c00u | (i % 64);
        std::memcpy(x->data.get() + i, &pair, sizeof pair);
      }
  for (size_t i = 0; i < a.size; ++i) a.data[i] -= 1.0f;
  SelectiveScan p{{u, T * D, D, 0}, {delta, T * D, D, 0}, {b, T * width, width, N},
                  {c, T * width, width, N}, {pointer(z), T * D, D, 0}, {y, T * D, D, 0}, a,
                  pointer(skip), pointer(bias), pointer(initial), last, kept, B, T, D, N, G, reverse,
                  !bare, is_bfloat16, 2};
  expect(vision_ttt_selective_scan(&p) == 0 && y.finite() && last.finite() && kept.finite(),
         "a selective scan is finite");
  Buffer du(u.size, false), ddelta(u.size, false), dz(bare ? 0 : u.size, false);
  Buffer da(D * N, false), db(matrices, false), dc(matrices, false), dskip(D, false);
  Buffer dbias(D, false), dinitial(state, false);
  const SelectiveScanGradients gradients{(float*)du, (float*)ddelta, (float*)dz, da, db, dc,
                                         dskip, dbias, dinitial};
  p.y.data = (float*)grad, p.last_state = grad_last;
  expect(vision_ttt_selective_scan_backward(&p, &gradients) == 0, "a selective scan's status");
  for (const Buffer* x : {&du, &ddelta, &dz, &da, &db, &dc, &dskip, &dbias, &dinitial})
    expect(x->finite(), "a selective scan's backward is finite");
}

}  // namespace

int main() {
  for (bool mlp : {false, true})
    for (bool norm : {true, false}) {
      check_learner(mlp, 1, 1, 1, 16, 16, norm);
      check_learner(mlp, 2, 37, 3, 32, 16, norm);
      check_learner(mlp, 1, 100, 2, 64, 16, norm);
      check_learner(mlp, 1, 23, 2, 16, 3, norm);
      check_learner(mlp, 1, 70, 1, 128, 64, norm);
      check_learner(mlp, 1, 9, 2, 32, 1, norm);
      check_learner(mlp, 2, 37, 2, 32, 16, norm, 4);
      check_learner(mlp, 1, 2, 2, 16, 1, norm, 5);
    }
  check_learner(false, 2, 37, 2, 32, 16, true, 4, true);
  for (bool mlp : {false, true})
    for (bool norm : {true, false}) {
      check_part(mlp, 1, 1, 1, 16, 16, 0, norm);
      check_part(mlp, 2, 1, 3, 64, 16, 7, norm);
      check_part(mlp, 2, 1, 2, 128, 16, 15, norm);
      check_part(mlp, 3, 1, 2, 32, 4, 3, norm, true);
      check_part(mlp, 1, 5, 2, 32, 9, 2, norm);
      check_part(mlp, 1, 1, 2, 16, 1, 0, norm);
    }
  check_linear(1, 16, 16);
  check_linear(109, 48, 272);
  check_linear(1700, 80, 96);
  check_linear(109, 784, 800);
  check_linear(300, 784, 800);
  check_swiglu_mlp(1, 16, 16, 16);
  check_swiglu_mlp(109, 48, 272, 80);
  check_swiglu_mlp(300, 48, 272, 80);
  check_swiglu_mlp(1700, 32, 48, 32);
  check_conv1d(1, 1, 32);
  check_conv1d(2, 131, 64);
  check_pointwise(1, 1, 32);
  check_pointwise(2, 131, 64);
  check_conv2d(1, 1, 1, 16, 3);
  check_conv2d(2, 4, 5, 48, 3);
  check_conv2d(1, 3, 2, 32, 5);
  check_conv2d(1, 9, 200, 256, 3);
  for (bool hostile : {false, true}) {
    check_deformable_attention(1, 1, 1, 16, 1, 1, hostile);
    check_deformable_attention(2, 5, 3, 32, 3, 4, hostile);
    check_deformable_attention(1, 3, 2, 48, 2, 3, hostile);
    check_deformable_attention(1, 2, 3, 80, 2, 120, hostile);
  }
  for (bool is_bfloat16 : {false, true}) {
    check_selective_scan(1, 1, 16, 1, 1, 0, true, is_bfloat16);
    check_selective_scan(2, 130, 96, 16, 2, 48, false, is_bfloat16);
    check_selective_scan(1, 65, 112, 21, 1, 32, false, is_bfloat16);
    check_selective_scan(1, 64, 32, 7, 2, 32, false, is_bfloat16);
  }
  float sums = 0.0f;
  expect(vision_ttt_fma_peak(100, 2, &sums) > 0 && sums > 0.0f, "chains of multiply-adds");
  check_packed();
  std::printf("%s: %s\n", vision_ttt_instruction_set(), failures ? "FAILED" : "ok");
  return failures != 0;
}
