// The C interface of multi-scale deformable attention. Locations, weights and their gradients are
// float32 and contiguous; value, out and grad are float32 or bfloat16, their heads' d numbers contiguous.
// Strides count elements. d is a multiple of 16.
#pragma once

#include "../../export.h"

// The largest number L · P of points of one head.
#define VISION_TTT_MOST_POINTS 512

extern "C" {

// out_{q,h} = Σ_l Σ_p weights_{q,h,l,p} · value_h at locations_{q,h,l,p} on level l, by bilinear
// interpolation between the centres of its cells, with zeros outside.
struct DeformableAttention {
  const void* value;       // [B, S, H, d], S = Σ_l height_l · width_l
  const float* locations;  // [B, Q, H, L, P, 2], (x, y), 0 … 1 over a level
  const float* weights;    // [B, Q, H, L, P]
  void* out;               // [B, Q, H d]; in the backward pass the incoming gradient
  const int64_t* shapes;   // [L, 2], (height, width), each below 2^24
  int64_t value_batch, value_token, value_head, out_batch, out_query;
  int64_t batch, tokens, queries, heads, dim, levels, points;
  int64_t is_bfloat16, threads;
};

struct DeformableAttentionGradients {
  float* value;      // [B, S, H, d], contiguous
  float* locations;  // [B, Q, H, L, P, 2]
  float* weights;    // [B, Q, H, L, P]
};

VISION_TTT_EXPORT void vision_ttt_deformable_attention(const DeformableAttention*);
VISION_TTT_EXPORT void vision_ttt_deformable_attention_backward(const DeformableAttention*,
                                                                const DeformableAttentionGradients*);

}  // extern "C"
