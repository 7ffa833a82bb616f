// The C interface of the memory-bound CPU kernels: each makes one pass over memory, where PyTorch's
// operations need several. float32 only; the last axis is contiguous, strides count floats.
#pragma once

#include <cstdint>

#ifndef VISION_TTT_EXPORT
#define VISION_TTT_EXPORT __attribute__((visibility("default")))
#endif

// The tokens of a chunk, which do not depend on the number of threads: see GatedNormGradients.
#define VISION_TTT_CHUNK_TOKENS 128

extern "C" {

// A [B, T, C] tensor.
struct Sequence {
  float* data;
  int64_t batch, token;
};

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

// out = GELU(gate) Σ_r LN_r(z_r) over the R parts of D channels of z.
struct GatedNorm {
  Sequence z;           // [B, T, R D]
  Sequence gate;        // [B, T, D]; null data for no gate
  Sequence out;         // [B, T, D], may overlap z; in the backward pass the incoming gradient
  const float* weight;  // [R, D]
  const float* bias;    // [R, D]
  int64_t batch, length, dim, parts, threads;
  float eps;
};

struct GatedNormGradients {
  Sequence z, gate;
  float* weight;  // [chunks, R, D]: shares of vision_ttt_chunk_tokens() tokens each
  float* bias;    // [chunks, R, D]
};

// out = SiLU(a) b with a, b the halves of x's rows.
struct SwiGlu {
  const float* x;    // [N, 2 H], rows x_row floats apart
  float* out;        // [N, H], rows out_row apart; backward: incoming gradient
  float* dx;         // [N, 2 H]; backward pass only
  int64_t rows, hidden, x_row, out_row, threads;
};

// out = SiLU(x), or with an incoming gradient grad, out = grad · SiLU'(x). out may be x or grad.
struct Silu {
  const float* x;
  const float* grad;  // or null
  float* out;
  int64_t count, threads;  // count is a multiple of 16
};

VISION_TTT_EXPORT int64_t vision_ttt_chunk_tokens();
// Returns 0, or 1 if the memory for the transposed weight could not be allocated.
VISION_TTT_EXPORT int vision_ttt_conv1d(const Conv1d*);
VISION_TTT_EXPORT void vision_ttt_conv1d_weights(const Conv1d*, const Conv1dWeights*);
VISION_TTT_EXPORT void vision_ttt_gated_norm(const GatedNorm*);
VISION_TTT_EXPORT void vision_ttt_gated_norm_backward(const GatedNorm*, const GatedNormGradients*);
VISION_TTT_EXPORT void vision_ttt_silu(const Silu*);
VISION_TTT_EXPORT void vision_ttt_swiglu(const SwiGlu*);
VISION_TTT_EXPORT void vision_ttt_swiglu_backward(const SwiGlu*);

}  // extern "C"
