// The C interface of a SwiGLU MLP and its gradients. float32; all tensors are contiguous, and the size
// of every axis except the rows is a multiple of 16.
#pragma once

#include "../../export.h"

extern "C" {

// out [N, E] = (SiLU(a) ⊙ b) downᵀ with [a, b] = x upᵀ. With a norm, LN(x) takes the place of x there, and with
// `adds` x is added to the result, for E = D.
struct SwiGluMlpProblem {
  const float* x;     // [N, D]
  const float* up;    // [2 H, D]: of a, then of b
  const float* down;  // [E, H]
  const float *norm_weight, *norm_bias;  // [D], or null for no norm
  const float* grad;  // [N, E]; backward pass only
  float* out;         // [N, E]; forward pass only
  float* dx;          // backward pass only, as the gradients below
  float* dup;
  float* ddown;
  float *dnorm_weight, *dnorm_bias;
  int64_t rows, dim, hidden, columns, adds, threads;
  float eps;
};

// Both return 0, or 1 if the memory for the packed weights could not be allocated.
VISION_TTT_EXPORT int vision_ttt_swiglu_mlp(const SwiGluMlpProblem*);
VISION_TTT_EXPORT int vision_ttt_swiglu_mlp_backward(const SwiGluMlpProblem*);

}  // extern "C"
