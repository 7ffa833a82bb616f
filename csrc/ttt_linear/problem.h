// The C interface of ttt_linear's CPU kernels: one call's tensors, by pointer and stride.
//
// Strides count elements. The last axis of every tensor is contiguous. Row-vector convention,
// symbols and shapes as in src/vision_ttt/ops/ttt_linear/README.md; the launcher that fills these
// structures is src/vision_ttt/ops/ttt_linear/cpu.py, whose fields must match to the letter.
#pragma once

#include <cstdint>

#define VISION_TTT_EXPORT __attribute__((visibility("default")))

extern "C" {

// A [B, T, H, d] tensor of float32 or bfloat16, see Problem::is_bfloat16.
struct Tokens {
  void* data;
  int64_t batch, token, head;
};

struct Problem {
  Tokens q, k, v;
  const float* eta;       // [B, T, H]
  const float* w0;        // [H, d, d], or [B, H, d, d] with state_batch = 1
  const float* b0;        // [H, d] or [B, H, d]
  const float* ln_weight; // [H, d], or null: no inner norm
  const float* ln_bias;   // [H, d], or null
  const float* scale;     // [H, b], or null: all ones
  int64_t batch, length, heads, dim, mini_batch_size, reverse_heads;
  int64_t state_batch;    // 1: the initial state has a batch axis
  int64_t is_bfloat16;    // of q, k, v, o and their gradients
  int64_t threads;
  float eps;
};

struct Outputs {
  Tokens o;
  float* w;       // [B, H, d, d]
  float* b;       // [B, H, d]
  float* kept_w;  // [N, B, H, d, d], or null: keep no states
  float* kept_b;  // [N, B, H, d]
};

struct Gradients {
  Tokens o;             // incoming
  const float* w;       // incoming [B, H, d, d]
  const float* b;       // incoming [B, H, d]
  const float* kept_w;  // [N, B, H, d, d]
  const float* kept_b;
  Tokens dq, dk, dv;
  float* deta;       // [B, T, H]
  float* dw0;        // [B, H, d, d]: the sum over B is the caller's where the state has no batch
  float* db0;        // [B, H, d]
  float* dln_weight; // [B, H, d], or null
  float* dln_bias;   // [B, H, d], or null
  float* dscale;     // [B, H, b], or null
};

// Return 0, or 1 where memory for the scratch of a thread could not be had.
VISION_TTT_EXPORT int vision_ttt_ttt_linear_forward(const Problem*, const Outputs*);
VISION_TTT_EXPORT int vision_ttt_ttt_linear_backward(const Problem*, const Gradients*);

// "avx512", "avx2" or "baseline": the instruction set in use.
VISION_TTT_EXPORT const char* vision_ttt_instruction_set();

}  // extern "C"
