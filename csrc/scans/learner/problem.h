// The C interface of the learners' CPU kernels (ttt_linear, ttt_mlp): the tensors of a call, by pointer
// and stride.
//
// Strides count elements. The last axis of every tensor is contiguous. Row-vector convention,
// symbols and shapes as in the READMEs of src/vision_ttt/ops/ttt_linear and ttt_mlp. The structures in
// src/vision_ttt/ops/_learner_cpu.py, which fills them, must have the same fields.
#pragma once

#include "../../export.h"

extern "C" {

// A [B, T, H, d] tensor of float32 or bfloat16, see Problem::is_bfloat16.
struct Tokens {
  void* data;
  int64_t batch, token, head;
};

// Taps of a depth-wise convolution that is applied to a view when it is loaded: in scan order
// y_t = bias + Σ_j weight_j x_{t - (K-1) + j}, with x zero before the first token.
struct Convolution {
  const float* weight;  // [H d, K], or null for no convolution
  const float* bias;    // [H d]
};

// Gradients of the convolutions' taps, a share per image and head.
struct TapGradients {
  float* q;  // [B, H, K + 1, d]: of the weights, then of the bias; null for no convolution
  float* k;
};

// The inner models' layers, or their gradients. ttt_linear has the first layer only.
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
  State initial;          // [H, ...], or [B, H, ...] with state_batch = 1; read-only
  const float* ln_weight; // [H, d], or null for no inner norm
  const float* ln_bias;   // [H, d], or null
  const float* scale;     // [H / scale_heads, b], or null for ones
  int64_t batch, length, heads, dim, mini_batch_size, reverse_heads;
  int64_t interval;       // mini-batches between two saved states
  int64_t taps;           // K of both convolutions
  int64_t seen;           // tokens of the views that lie before the first one of the scan
  int64_t scale_heads;    // the number of neighbouring heads that share a row of scale
  int64_t state_batch;    // 1: the initial state has a batch axis
  int64_t is_bfloat16;    // of q, k, v, o and their gradients
  int64_t rounds;         // 1: factors of products may be rounded to bfloat16
  int64_t threads;
  float eps;
  float rate;             // >= 0: the rates are rate · σ(eta); < 0: the rates are eta
};

struct Outputs {
  Tokens o;
  State last;  // [B, H, ...], or nulls for no last state
  State kept;  // [N, B, H, ...], or nulls for no saved states
};

struct Gradients {
  Tokens o;          // incoming
  State last;        // incoming [B, H, ...]
  State kept;        // [N, B, H, ...], saved by the forward pass; read-only
  // Gradients of ttt_linear's views before their convolutions. A null dq means that q is k, and dk is
  // the sum of both. ttt_mlp's backward pass supports no convolutions.
  Tokens dq, dk, dv;
  TapGradients dtaps;
  float* deta;       // [B, T, H]: of eta, rates or logits
  State dinitial;    // [B, H, ...]; for a state without a batch axis the caller sums over B
  float* dln_weight; // [B, H, d], or null
  float* dln_bias;   // [B, H, d], or null
  float* dscale;     // [B, H, b], or null
};

// Tokens of one mini-batch, as many of it as there are, without gradients. Problem::initial is θ' before
// the mini-batch, with reverse_heads = 0 and no convolutions. The results lie apart from the arguments.
struct OpenMiniBatch {
  Tokens o;
  State sums;                // [B, H, ...]: Σ η_s ∂ℓ_s/∂θ' of its tokens before; not read at position 0
  State last;                // [B, H, ...]: θ_T of the last token; or nulls for no state
  State next_sums;           // [B, H, ...]: the sums after the tokens, 0 for a complete mini-batch; or nulls
  State next_start;          // [B, H, ...]: θ' of the next token; or nulls
  const int64_t* positions;  // [B]: its number of tokens before, or null where `position` is every one's
  int64_t position;          // position + length <= mini_batch_size
};

// Return 0, or 1 if the scratch of a thread could not be allocated.
VISION_TTT_EXPORT int vision_ttt_ttt_linear_forward(const Problem*, const Outputs*);
VISION_TTT_EXPORT int vision_ttt_ttt_linear_backward(const Problem*, const Gradients*);
VISION_TTT_EXPORT int vision_ttt_ttt_linear_part(const Problem*, const OpenMiniBatch*);
VISION_TTT_EXPORT int vision_ttt_ttt_mlp_forward(const Problem*, const Outputs*);
VISION_TTT_EXPORT int vision_ttt_ttt_mlp_backward(const Problem*, const Gradients*);
VISION_TTT_EXPORT int vision_ttt_ttt_mlp_part(const Problem*, const OpenMiniBatch*);

// The instruction set in use, as VISION_TTT_CPU_ISA names it.
VISION_TTT_EXPORT const char* vision_ttt_instruction_set();

}  // extern "C"
