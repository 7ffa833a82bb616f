// The C interface of a linear layer and its gradients. float32; x, grad and the results are contiguous,
// and the size of every axis except the rows is a multiple of 16.
#pragma once

#include "../../export.h"

extern "C" {

// out [N, C] = x [N, D] weightᵀ + bias.
struct Linear {
  const float* x;
  const float* weight;  // [C, D]
  const float* bias;    // [C], or null
  const float* grad;    // [N, C]; backward pass only
  float* out;           // [N, C]; forward pass only
  float* dx;            // [N, D]; backward pass only
  float* dweight;       // [C, D]; backward pass only
  int64_t rows, inner, columns, threads;
};

// Both return 0, or 1 if the memory for the packed weight could not be allocated.
VISION_TTT_EXPORT int vision_ttt_linear(const Linear*);
VISION_TTT_EXPORT int vision_ttt_linear_backward(const Linear*);

}  // extern "C"
