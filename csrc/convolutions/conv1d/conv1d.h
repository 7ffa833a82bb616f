// The C interface of the depth-wise causal Conv1d in two directions. float32 only; the last axis is contiguous,
// strides count floats.
#pragma once

#include "../../sequence.h"

extern "C" {

// y_t = bias + Σ_j weight_j x_{t - (K-1) + j}; the last reverse_channels scan in the other direction.
struct Conv1d {
  Sequence x, y;
  const float* weight;  // [C, K]
  const float* bias;    // [C], or null
  int64_t batch, length, channels, taps, reverse_channels, threads;
};

// Gradients of the weights of a Conv1d whose y holds the incoming gradient.
struct Conv1dWeights {
  float* weight;  // [K, C]
  float* bias;    // [C]
};

// Returns 0, or 1 if the memory for the transposed weight could not be allocated.
VISION_TTT_EXPORT int vision_ttt_conv1d(const Conv1d*);
VISION_TTT_EXPORT void vision_ttt_conv1d_weights(const Conv1d*, const Conv1dWeights*);

}  // extern "C"
