// The C interface of the depth-wise Conv2d on image tokens. The last axis of every tensor is
// contiguous, strides count elements, and the channels are a multiple of 16.
#pragma once

#include "../../sequence.h"

extern "C" {

// y_{r,c} = Σ_{i,j} weight_{i,j} x_{r+i-K/2, c+j-K/2} on the grid of tokens r · width + c, with x zero
// beyond the edges.
struct Conv2d {
  Sequence x, y;
  const float* weight;  // [C, K · K]
  int64_t batch, height, width, channels, kernel, threads;
};

// Returns 0, or 1 if the memory for the transposed weight could not be allocated.
VISION_TTT_EXPORT int vision_ttt_conv2d(const Conv2d*);

// The weight's gradient [K · K, C]; y holds the incoming gradient.
VISION_TTT_EXPORT void vision_ttt_conv2d_weight(const Conv2d*, float* weight);

}  // extern "C"
