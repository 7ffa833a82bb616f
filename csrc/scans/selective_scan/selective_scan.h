// The C interface of the selective scan. The tokens' tensors are float32 or bfloat16, everything else is
// float32 and contiguous. The last axis of every tensor is contiguous, strides count elements. The
// channels of a group, and those of a direction, are a multiple of 16.
#pragma once

#include "../../export.h"

// The tokens between two saved states, CHUNK_TOKENS of src/vision_ttt/ops/selective_scan/contract.py.
#define VISION_TTT_SCAN_CHUNK 64

extern "C" {

// A [B, T, D] or [B, T, G, N] tensor, see SelectiveScan::is_bfloat16.
struct ScanTensor {
  void* data;
  int64_t batch, token, group;
};

// h_t = exp(δ_t A) h_{t-1} + δ_t B_t u_t,  y_t = (C_t · h_t + D u_t) SiLU(z_t); the last
// reverse_channels scan from T to 1.
struct SelectiveScan {
  ScanTensor u, delta;         // [B, T, D]
  ScanTensor b, c;             // [B, T, G, N]
  ScanTensor z;                // [B, T, D], null data for no gate
  ScanTensor y;                // [B, T, D]; in the backward pass its incoming gradient
  const float* a;              // [D, N]
  const float* skip;           // [D], or null
  const float* delta_bias;     // [D], or null
  const float* initial_state;  // [B, D, N], or null for zeros
  float* last_state;           // [B, D, N]; in the backward pass its incoming gradient
  float* kept_states;          // [P, B, D, N], before every 64th token; null where none are saved
  int64_t batch, length, channels, states, groups;
  int64_t reverse_channels, delta_softplus, is_bfloat16, threads;
};

// All contiguous. u, delta and z have the tokens' dtype, the others are float32.
struct SelectiveScanGradients {
  void *u, *delta, *z;   // [B, T, D]; z is written where there is a gate
  float *a, *b, *c;      // [D, N], [B, T, G, N], [B, T, G, N]
  float *skip, *delta_bias;  // [D]
  float* initial_state;  // [B, D, N]
};

// Both return 0, or 1 if their scratch memory could not be allocated.
VISION_TTT_EXPORT int vision_ttt_selective_scan(const SelectiveScan*);
VISION_TTT_EXPORT int vision_ttt_selective_scan_backward(const SelectiveScan*,
                                                         const SelectiveScanGradients*);

}  // extern "C"
