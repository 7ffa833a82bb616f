// Runs of the packed kernels on small problems, for check.cpp.
#pragma once

#include <cstring>

#include "../check.h"
#include "blocks.h"

namespace {

// A packed weight of exactly its size; an absent one has no data.
struct PackedBuffer {
  Buffer data, bias;
  Packed packed;

  PackedBuffer(int64_t columns, int64_t inner, bool is_bfloat16, bool there = true, bool in_terms = false)
      : data(there ? size(columns, inner, is_bfloat16, in_terms) : 0), bias(columns),
        packed{there ? (float*)data : nullptr, bias, inner, columns, in_terms} {
    // Pairs of random bits could be NaN; a float's upper and lower half as bfloat16 are small.
    for (size_t i = 0; (is_bfloat16 || in_terms) && i < data.size; ++i)
      reinterpret_cast<uint32_t*>((float*)data)[i] = 0x3c003c00u | (i % 64);
  }
  static size_t size(int64_t columns, int64_t inner, bool is_bfloat16, bool in_terms) {
    const int64_t width = (columns + 15) / 16 * 16;
    if (is_bfloat16) return width * ((inner + 1) / 2);
    return in_terms ? width * ((inner + 31) / 32 * 48) : width * inner;
  }
};

// A weight of a block: float32 in terms where kernels take them.
PackedBuffer of_block(int64_t columns, int64_t inner, bool is_bfloat16, bool there = true) {
  const bool in_terms = !is_bfloat16 && !std::strcmp(vision_ttt_instruction_set(), "amx");
  return PackedBuffer(columns, inner, is_bfloat16, there, in_terms);
}

void check_packed_linear(int64_t rows, int64_t inner, int64_t columns, bool is_bfloat16) {
  Buffer x(rows * inner), out(rows * columns, false);
  PackedBuffer weight(columns, inner, is_bfloat16);
  const PackedLinear linear{x, out, weight.packed, rows, inner, is_bfloat16, 0, 2};
  expect(vision_ttt_packed_linear(&linear) == 0 && out.finite(), "a packed product is finite");
}

void check_packed_patches(int64_t B, int64_t C, int64_t h, int64_t w, int64_t height,
                          int64_t width, int64_t columns, bool is_bfloat16) {
  const int64_t H = h * height, W = w * width;
  Buffer images(B * C * H * W), out(B * h * w * columns, false);
  PackedBuffer weight(columns, C * height * width, is_bfloat16);
  const PackedPatches patches{images,    out,   weight.packed, B,           C, h, w, width,
                              C * H * W, H * W, W,             is_bfloat16, 0, 2};
  expect(vision_ttt_packed_patches(&patches) == 0 && out.finite(), "products of patches are finite");
}

void check_packed_vittt_blocks(int64_t B, int64_t h, int64_t w, int64_t R, bool own_q, bool gate,
                               bool is_bfloat16, int64_t hidden = 48, int64_t d = 16) {
  const int64_t D = 32, H = R * D / d, b = 16, K = 3, taps = 4;
  Buffer y(B * h * w * D), out(y.size, false), between(y.size, false), conv2d(K * K * D);
  Buffer norms(4 * D), inner(2 * H * d);
  Buffer conv_q(H * d * (taps + 1)), conv_k(conv_q.size), w0(H * d * d), b0(H * d), scale(R * b);
  Buffer post(2 * R * D);
  PackedBuffer views = of_block((own_q ? 3 : 2) * R * D, D, is_bfloat16);
  PackedBuffer gates = of_block(D, D, is_bfloat16, gate);
  PackedBuffer rates = of_block(H, D, is_bfloat16), out_proj = of_block(D, D, is_bfloat16);
  PackedBuffer mlp_gate = of_block(hidden, D, is_bfloat16), mlp_value = of_block(hidden, D, is_bfloat16);
  PackedBuffer mlp_out = of_block(D, hidden, is_bfloat16);
  const int64_t weights = H * d * taps;
  PackedVitttBlock block{
      y, out, between, nullptr, conv2d, {norms, norms + D, 0, 1e-6},
      {norms + 2 * D, norms + 3 * D, 0, 1e-6},
      views.packed, gates.packed, rates.packed, out_proj.packed, mlp_gate.packed, mlp_value.packed,
      mlp_out.packed, {conv_q, conv_q + weights}, {conv_k, conv_k + weights},
      {w0, b0, nullptr, nullptr}, inner, inner + H * d, scale, post, post + R * D, nullptr, nullptr,
      nullptr, B, h * w, h, w, D, H, R, K, taps, !own_q, 0, b, is_bfloat16, 2, 3, 0, 0, 0, 0, 0, 1e-6f,
      1e-6f, 0.1f};
  Buffer scratch(vision_ttt_packed_vittt_blocks_scratch(&block) / sizeof(float), false);
  block.scratch = scratch;
  const PackedVitttBlock blocks[] = {block, block, block};
  expect(vision_ttt_packed_vittt_blocks(blocks) == 0 && out.finite(), "packed blocks are finite");
}

// `rows` rows of a picture, of which one above and one below are not the band's, as far as there are three.
void check_packed_vittt_band(int64_t rows, int64_t w, int64_t R, int64_t open, bool reverse, bool merges,
                             bool is_bfloat16, int64_t d = 16) {
  const int64_t D = 32, H = D / d, b = 16, K = 3, taps = 4, hidden = 48, seen = taps - 1 + b - 1;
  const int64_t around = rows > 2, n = (rows - 2 * around) * w, weights = H * d * taps;
  Buffer y(rows * w * D), out(n * D / (is_bfloat16 && !merges ? 2 : 1), false), conv2d(K * K * D);
  Buffer norms(4 * D), inner(2 * H * d), conv_q(H * d * (taps + 1)), conv_k(conv_q.size), scale(b);
  Buffer post(2 * R * D), state(H * d * (d + 1) + seen * (2 * D + H)), next(state.size, false);
  Buffer side(n * D / (is_bfloat16 ? 2 : 1));
  for (size_t i = 0; is_bfloat16 && i < side.size; ++i)
    reinterpret_cast<uint32_t*>((float*)side)[i] = 0x3c003c00u | (i % 64);
  PackedBuffer views = of_block(2 * D, D, is_bfloat16), gates = of_block(D, D, is_bfloat16, merges);
  PackedBuffer rates = of_block(H, D, is_bfloat16), out_proj = of_block(D, D, is_bfloat16, merges);
  PackedBuffer mlp_gate = of_block(hidden, D, is_bfloat16, merges);
  PackedBuffer mlp_value = of_block(hidden, D, is_bfloat16, merges);
  PackedBuffer mlp_out = of_block(D, hidden, is_bfloat16, merges);
  PackedVitttBlock block{
      y, out, nullptr, nullptr, conv2d, {norms, norms + D, 0, 1e-6},
      {norms + 2 * D, norms + 3 * D, 0, 1e-6},
      views.packed, gates.packed, rates.packed, out_proj.packed, mlp_gate.packed, mlp_value.packed,
      mlp_out.packed, {conv_q, conv_q + weights}, {conv_k, conv_k + weights}, {}, inner, inner + H * d,
      scale, post, post + R * D, state, next, R == 2 && merges ? (float*)side : nullptr, 1, rows * w,
      rows, w, D, H, R, K, taps, 1, 0, b, is_bfloat16, 2, 1, around, around, open, reverse, merges, 1e-6f,
      1e-6f, 0.1f};
  Buffer scratch(vision_ttt_packed_vittt_blocks_scratch(&block) / sizeof(float), false);
  block.scratch = scratch;
  expect(vision_ttt_packed_vittt_blocks(&block) == 0 && next.finite(), "the state of a band is finite");
  expect((is_bfloat16 && !merges) || out.finite(), "a packed band is finite");
}

void check_packed_vit3_block(int64_t B, int64_t h, int64_t w, bool convolved, bool rotated,
                             bool is_bfloat16, int64_t hidden = 48) {
  const int64_t D = 64, H = 2, d = D / H;
  Buffer y(B * h * w * D), out(y.size, false), conv2d(10 * D), norms(4 * D), gates(2 * B * D);
  Buffer rotations(rotated ? h * w * D : 0), units(H * d * 2 * d), kernels(9 * d);
  Buffer mlp_conv(convolved ? 10 * hidden : 0);
  PackedBuffer qkv = of_block(3 * (D + d), D, is_bfloat16), proj = of_block(D, D + d, is_bfloat16);
  PackedBuffer fc1 = of_block(hidden, D, is_bfloat16), fc2 = of_block(D, hidden, is_bfloat16);
  PackedVit3Block block{
      y, out, nullptr, conv2d, conv2d + 9 * D, {norms, norms + D, 0, 1e-6},
      {norms + 2 * D, norms + 3 * D, 0, 1e-6}, gates, gates + B * D, qkv.packed, proj.packed,
      fc1.packed, fc2.packed, rotated ? (float*)rotations : nullptr, units, kernels,
      convolved ? (float*)mlp_conv : nullptr, convolved ? mlp_conv + 9 * hidden : nullptr, nullptr,
      nullptr, B, h * w, h, w, D, H, D, 0, is_bfloat16, 2, 0, 0, 0, 1.0 / 3.0};
  Buffer scratch(vision_ttt_packed_vit3_block_scratch(&block) / sizeof(float), false);
  block.scratch = scratch;
  expect(vision_ttt_packed_vit3_block(&block) == 0 && out.finite(), "a packed block is finite");
  if (convolved || B > 1) return;
  // Its rows but for those around a band, in both sweeps.
  const int64_t above = h > 4 ? 2 : 0, below = h > 4 ? 1 : 0, n = (h - above - below) * w;
  Buffer sums(H * d * 2 * d + 9 * d, false), rest(n * D, false);
  block.out = sums, block.sums = sums, block.above = above, block.below = below;
  expect(vision_ttt_packed_vit3_block(&block) == 0 && sums.finite(), "a band's sums are finite");
  block.out = rest, block.sums = nullptr, block.all_sums = sums, block.total = h * w;
  expect(vision_ttt_packed_vit3_block(&block) == 0 && rest.finite(), "a packed band is finite");
}

void check_packed_swiglu_ttt_block(int64_t B, int64_t h, int64_t w, int64_t prefix, bool rotated,
                                   bool scaled, bool is_bfloat16, int64_t hidden = 48) {
  const int64_t D = 64, H = 2, d = D / H, T = prefix + h * w;
  Buffer y(B * T * D), out(y.size, false), norms(4 * D), gates(2 * D), convolutions(20 * D);
  Buffer rotations(rotated ? h * w * 2 * d : 0), units(H * d * 2 * d), out_units(H * d * d);
  PackedBuffer qkv = of_block(3 * D, D, is_bfloat16), proj = of_block(D, D, is_bfloat16);
  PackedBuffer fc1 = of_block(hidden, D, is_bfloat16), fc2 = of_block(D, hidden, is_bfloat16);
  PackedSwigluTttBlock block{
      y, out, nullptr, {norms, norms + D, 0, 1e-6}, {norms + 2 * D, norms + 3 * D, 0, 1e-6},
      scaled ? (float*)gates : nullptr, scaled ? gates + D : nullptr, qkv.packed, proj.packed,
      fc1.packed, fc2.packed, rotated ? (float*)rotations : nullptr, convolutions,
      convolutions + 9 * D, convolutions + 10 * D, convolutions + 19 * D, units, out_units, B, T, h,
      w, D, H, scaled, 0, is_bfloat16, 2, 1.0};
  Buffer scratch(vision_ttt_packed_swiglu_ttt_block_scratch(&block) / sizeof(float), false);
  block.scratch = scratch;
  expect(vision_ttt_packed_swiglu_ttt_block(&block) == 0 && out.finite(), "a packed block is finite");
}

void check_packed_mamba_block(int64_t B, int64_t T, int64_t rank, bool is_bfloat16,
                              int64_t threads) {
  const int64_t D = 32, E = 48, K = 3, N = VISION_TTT_MAMBA_STATES;
  Buffer y(B * T * D), out(y.size, false), norm(D), decay(2 * N * E), channels(2 * E * (K + 3));
  for (size_t i = 0; i < decay.size; ++i) decay[i] = -std::fabs(decay[i]);
  PackedBuffer in_proj = of_block(2 * E, D, is_bfloat16), out_proj = of_block(D, E, is_bfloat16);
  PackedBuffer vectors = of_block(2 * N, E, is_bfloat16), low = of_block(rank, E, is_bfloat16);
  PackedBuffer steps = of_block(E, rank, is_bfloat16);
  auto direction = [&](int64_t i) {
    const float* own = channels + i * E * (K + 3);
    return MambaDirection{own, own + K * E, vectors.packed, low.packed, steps.packed,
                          decay + i * N * E, own + (K + 2) * E};
  };
  PackedMambaBlock block{y, out, nullptr, norm, in_proj.packed, out_proj.packed, direction(0),
                         direction(1), nullptr, nullptr, nullptr, B, T, D, E, K, is_bfloat16, threads,
                         0, 0, 1e-5};
  Buffer scratch(vision_ttt_packed_mamba_block_scratch(&block) / sizeof(float), false);
  block.scratch = scratch;
  expect(vision_ttt_packed_mamba_block(&block) == 0 && out.finite(), "a packed block is finite");
  // The first sequence as a band: one scan leaves its sums, the other one takes them.
  Buffer state((N + K - 1) * E), next(state.size, false), sums(T * E / (is_bfloat16 ? 2 : 1) + 1, false);
  Buffer rest(T * D, false);
  block.state = state, block.next_state = next, block.batch = 1;
  for (int64_t merges : {0, 1}) {
    block.merges = merges, block.reverse = 1 - merges;
    block.side = merges ? (float*)sums : nullptr, block.out = merges ? rest : sums;
    Buffer own(vision_ttt_packed_mamba_block_scratch(&block) / sizeof(float), false);
    block.scratch = own;
    expect(vision_ttt_packed_mamba_block(&block) == 0 && next.finite(), "a band's state is finite");
  }
  expect(rest.finite(), "a packed band is finite");
}

void check_packed() {
  for (bool is_bfloat16 : {false, true}) {
    check_packed_linear(1, 1, 1, is_bfloat16);
    check_packed_linear(7, 33, 21, is_bfloat16);
    check_packed_linear(205, 64, 100, is_bfloat16);
    check_packed_linear(600, 50, 37, is_bfloat16);  // in terms, where kernels take them
    check_packed_patches(1, 1, 1, 1, 1, 1, 1, is_bfloat16);
    check_packed_patches(2, 3, 5, 21, 3, 7, 24, is_bfloat16);
    check_packed_patches(1, 3, 3, 2, 16, 16, 40, is_bfloat16);
    check_packed_patches(2, 3, 24, 17, 4, 6, 21, is_bfloat16);
    check_packed_vittt_blocks(1, 1, 1, 1, false, false, is_bfloat16);
    check_packed_vittt_blocks(2, 3, 7, 2, false, true, is_bfloat16);
    check_packed_vittt_blocks(1, 13, 17, 2, true, true, is_bfloat16, 272);
    check_packed_vittt_blocks(2, 13, 17, 2, false, true, is_bfloat16, 272, 32);
    check_packed_vittt_blocks(1, 13, 17, 2, true, true, is_bfloat16, 64, 32);
    for (bool reverse : {false, true}) {
      check_packed_vittt_band(1, 1, 1, 15, reverse, true, is_bfloat16);
      check_packed_vittt_band(5, 7, 2, 3, reverse, true, is_bfloat16, 32);
      check_packed_vittt_band(19, 17, 2, 0, reverse, false, is_bfloat16, 32);
    }
    for (int64_t threads : {1, 2, 5}) {
      check_packed_mamba_block(1, 1, 2, is_bfloat16, threads);
      check_packed_mamba_block(3, 7, 6, is_bfloat16, threads);
      check_packed_mamba_block(2, 391, 4, is_bfloat16, threads);
    }
    check_packed_swiglu_ttt_block(1, 1, 1, 0, false, false, is_bfloat16);
    check_packed_swiglu_ttt_block(2, 3, 7, 5, true, true, is_bfloat16);
    check_packed_swiglu_ttt_block(1, 19, 23, 1, true, false, is_bfloat16, 272);
    check_packed_vit3_block(1, 1, 1, false, false, is_bfloat16);
    check_packed_vit3_block(2, 3, 7, true, true, is_bfloat16);
    check_packed_vit3_block(1, 19, 23, true, false, is_bfloat16, 272);
    check_packed_vit3_block(1, 19, 23, false, true, is_bfloat16, 272);
  }
}

}  // namespace
