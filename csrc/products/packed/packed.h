// The C interface of linear layers on packed weights, for inference.
#pragma once

#include "../../export.h"

extern "C" {

// A weight [columns, inner] of a linear layer, transposed and cut into panels of 16 columns, the last one
// padded with zeros. The layout of a panel is [inner, 16], in bfloat16 [inner / 2, 16, 2], where an odd
// inner is padded as well. Kernels for tile registers also take float32 as bfloat16 terms, see amx/terms.h: a panel
// is [inner / 32, 3, 16, 16, 2].
struct Packed {
  const void* data;   // null for no layer
  const float* bias;  // [columns], or null
  int64_t inner, columns;
  int64_t in_terms;   // 0 or 1
};

// out [N, columns] = x [N, inner] weightᵀ + bias.
struct PackedLinear {
  const void* x;
  void* out;
  Packed weight;
  int64_t rows, x_row;
  int64_t is_bfloat16;    // of the weight
  int64_t x_is_bfloat16;  // and out
  int64_t threads;
};

// out [B, h w, columns] = x weightᵀ + bias, where the rows of x are the patches of images [B, C, H, W]:
// C · patch_height · patch_width pixels each. Neighbours in a row of pixels are neighbours in memory.
struct PackedPatches {
  const void* images;
  void* out;
  Packed weight;
  int64_t batch, channels, grid_height, grid_width, patch_width;
  int64_t image_stride, channel_stride, row_stride;
  int64_t is_bfloat16;          // of the weight
  int64_t images_are_bfloat16;  // and out
  int64_t threads;
};

VISION_TTT_EXPORT int vision_ttt_packed_linear(const PackedLinear*);
VISION_TTT_EXPORT int vision_ttt_packed_patches(const PackedPatches*);

}  // extern "C"
