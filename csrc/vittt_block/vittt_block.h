// The C interface of a whole Vittt block in one call, for inference: see ops/vittt_block.
#pragma once

#include "../fused/fused.h"

extern "C" {

// Fortran's BLAS interface to a float32 matrix product, whoever implements it. Integers are written
// with 64 bits: an implementation with integers of 32 reads their lower half (little-endian).
typedef void (*Sgemm)(const char* trans_a, const char* trans_b, const int64_t* m, const int64_t* n,
                      const int64_t* k, const float* alpha, const float* a, const int64_t* lda,
                      const float* b, const int64_t* ldb, const float* beta, float* c,
                      const int64_t* ldc);

// float32, every tensor contiguous. The parameters' order is that of ops/vittt_block/api.py.
struct VitttBlock {
  const float* y;   // [B, h w, D]
  float* out;       // [B, h w, D], not y
  float* scratch;   // vision_ttt_vittt_block_scratch() floats
  Sgemm sgemm;
  const float* conv2d;         // [D, 1, K, K]
  const float *norm_weight, *norm_bias;  // [D]
  const float* in_proj;        // [C, D], C columns: k, q, v, gate
  const float *rate_weight, *rate_bias;  // [H, D], [H]
  const float *conv_q_weight, *conv_q_bias, *conv_k_weight, *conv_k_bias;  // [H d, 1, taps], [H d]
  const float *w0, *b0;        // [H, d, d], [H, d]
  const float *inner_weight, *inner_bias;  // [H, d]
  const float* position_offset;  // [R, b]
  const float *post_weight, *post_bias;  // [R, D]
  const float* out_proj;       // [D, D]
  const float *mlp_norm_weight, *mlp_norm_bias;  // [D]
  const float* fc1;            // [2 hidden, D]
  const float* fc2;            // [D, hidden]
  int64_t batch, height, width, dim, heads, directions;
  int64_t q_columns;           // 0 where k's serve
  int64_t gate_columns;        // D, or 0 for no gate
  int64_t kernel, taps, mini_batch_size, hidden, threads;
  float norm_eps, inner_eps, post_eps, mlp_norm_eps;
  float rate;                  // the rates are rate · σ(logits)
};

VISION_TTT_EXPORT int64_t vision_ttt_vittt_block_scratch(const VitttBlock*);

// Return 0, or 1 where memory for the scratch of a thread could not be had.
VISION_TTT_EXPORT int vision_ttt_vittt_block(const VitttBlock*);

}  // extern "C"
