// The C interface of the CPU kernels that learn along the tokens (ttt_linear, ttt_mlp): one call's
// tensors, by pointer and stride.
//
// Strides count elements. The last axis of every tensor is contiguous. Row-vector convention,
// symbols and shapes as in the READMEs of src/vision_ttt/ops/ttt_linear and ttt_mlp; the launcher
// that fills these structures is src/vision_ttt/ops/_learner_cpu.py, whose fields must match to
// the letter.
#pragma once

#include <cstdint>

#ifndef VISION_TTT_EXPORT
#define VISION_TTT_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {

// A [B, T, H, d] tensor of float32 or bfloat16, see Problem::is_bfloat16.
struct Tokens {
  void* data;
  int64_t batch, token, head;
};

// Taps of a depth-wise convolution that a view goes through on its way in: in scan order
// y_t = bias + Σ_j weight_j x_{t - (K-1) + j}, x zero before the first token.
struct Convolution {
  const float* weight;  // [H d, K], or null: the view is taken as it is
  const float* bias;    // [H d]
};

// Gradients of a Convolution's taps, each image's and head's share.
struct TapGradients {
  float* q;  // [B, H, K + 1, d]: of the weights, then of the bias; null where there is no convolution
  float* k;
};

// The inner models' layers, or gradients of them: ttt_linear has the first only.
struct State {
  float* w1;  // [..., d, d] of ttt_linear, [..., d, 4d] of ttt_mlp
  float* b1;  // [..., d] or [..., 4d]
  float* w2;  // [..., 4d, d]
  float* b2;  // [..., d]
};

struct Problem {
  Tokens q, k, v;
  Convolution conv_q, conv_k;
  const float* eta;       // [B, T, H]: rates, or logits where rate >= 0
  State initial;          // [H, ...], or [B, H, ...] with state_batch = 1; only read
  const float* ln_weight; // [H, d], or null: no inner norm
  const float* ln_bias;   // [H, d], or null
  const float* scale;     // [H / scale_heads, b], or null: all ones
  int64_t batch, length, heads, dim, mini_batch_size, reverse_heads;
  int64_t interval;       // mini-batches between two kept states
  int64_t taps;           // K of both convolutions
  int64_t scale_heads;    // so many neighbouring heads share a row of scale
  int64_t state_batch;    // 1: the initial state has a batch axis
  int64_t is_bfloat16;    // of q, k, v, o and their gradients
  int64_t threads;
  float eps;
  float rate;             // >= 0: the rates are rate · σ(eta); below: they are eta
};

struct Outputs {
  Tokens o;
  State last;  // [B, H, ...], or nulls: the last state is not asked for
  State kept;  // [N, B, H, ...], or nulls: keep no states
};

struct Gradients {
  Tokens o;          // incoming
  State last;        // incoming [B, H, ...]
  State kept;        // [N, B, H, ...], as the forward pass left them; only read
  // Of ttt_linear's views before their convolutions; where dq is null q is k, and dk is of both.
  // ttt_mlp's backward pass knows no convolutions.
  Tokens dq, dk, dv;
  TapGradients dtaps;
  float* deta;       // [B, T, H]: of the rates, also where eta holds logits
  State dinitial;    // [B, H, ...]: the sum over B is the caller's where the state has no batch
  float* dln_weight; // [B, H, d], or null
  float* dln_bias;   // [B, H, d], or null
  float* dscale;     // [B, H, b], or null
};

// Return 0, or 1 where memory for the scratch of a thread could not be had.
VISION_TTT_EXPORT int vision_ttt_ttt_linear_forward(const Problem*, const Outputs*);
VISION_TTT_EXPORT int vision_ttt_ttt_linear_backward(const Problem*, const Gradients*);
VISION_TTT_EXPORT int vision_ttt_ttt_mlp_forward(const Problem*, const Outputs*);
VISION_TTT_EXPORT int vision_ttt_ttt_mlp_backward(const Problem*, const Gradients*);

// "avx512", "avx2" or "baseline": the instruction set in use.
VISION_TTT_EXPORT const char* vision_ttt_instruction_set();

}  // extern "C"
