// The C interface of the pointwise kernels: each makes one pass over memory, where PyTorch's operations need
// several. float32 only; the last axis is contiguous, strides count floats.
#pragma once

#include "../sequence.h"

extern "C" {

// LN(x) ⊙ weight + bias, with parameters [D] of all images, or of each image, image_stride apart.
struct NormParameters {
  const float *weight, *bias;
  int64_t image_stride;
  double eps;
};

// out = GELU(gate) Σ_r LN_r(z_r) over the R parts of D channels of z.
struct GatedNorm {
  Sequence z;           // [B, T, R D]
  Sequence gate;        // [B, T, D]; null data for no gate
  Sequence out;         // [B, T, D]; in the backward pass the incoming gradient
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
  const float* x;  // [N, 2 H]
  float* out;      // [N, H]; backward: incoming gradient
  float* dx;       // [N, 2 H]; backward pass only
  int64_t rows, hidden, threads;
};

// out = SiLU(x), or with an incoming gradient grad, out = grad · SiLU'(x). out may be x or grad.
struct Silu {
  const float* x;
  const float* grad;  // or null
  float* out;
  int64_t count, threads;  // count is a multiple of 16
};

VISION_TTT_EXPORT int64_t vision_ttt_chunk_tokens();
VISION_TTT_EXPORT void vision_ttt_gated_norm(const GatedNorm*);
VISION_TTT_EXPORT void vision_ttt_gated_norm_backward(const GatedNorm*, const GatedNormGradients*);
VISION_TTT_EXPORT void vision_ttt_silu(const Silu*);
VISION_TTT_EXPORT void vision_ttt_swiglu(const SwiGlu*);
VISION_TTT_EXPORT void vision_ttt_swiglu_backward(const SwiGlu*);

}  // extern "C"
