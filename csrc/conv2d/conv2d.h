// The C interface of the depth-wise Conv2d on image tokens. The last axis of every tensor is
// contiguous, strides count elements, and the channels are a multiple of 16.
#pragma once

#include "../fused/fused.h"

extern "C" {

// y_{r,c} = Σ_{i,j} weight_{i,j} x_{r+i-K/2, c+j-K/2} on the grid of tokens r · width + c, with x zero
// beyond the edges. With `residual` x is added.
struct Conv2d {
  Sequence x, y;
  const float* weight;  // [C, K · K]
  int64_t batch, height, width, channels, kernel, residual, threads;
};

// LN(y) of a convolution's result. All tensors are contiguous.
struct Conv2dNorm {
  Conv2d conv;                 // in the backward pass y is ∂x
  const float *weight, *bias;  // [C]
  float* normed;               // LN(y) [B, T, C]; forward pass only
  const float *dy, *dnormed;   // [B, T, C]; backward pass only, as the gradients below
  float* dtaps;                // [K · K, C]
  float *dweight, *dbias;      // [C]
  float eps;
};

// Return 0, or 1 if the memory for the transposed weight or for a thread's scratch could not be allocated.
VISION_TTT_EXPORT int vision_ttt_conv2d(const Conv2d*);
VISION_TTT_EXPORT int vision_ttt_conv2d_norm(const Conv2dNorm*);
VISION_TTT_EXPORT int vision_ttt_conv2d_norm_backward(const Conv2dNorm*);

// The weight's gradient [K · K, C]; y holds the incoming gradient.
VISION_TTT_EXPORT void vision_ttt_conv2d_weight(const Conv2d*, float* weight);

}  // extern "C"
