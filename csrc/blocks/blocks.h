// The C interface of whole blocks in inference, on packed weights. Input and output tokens are float32;
// intermediate results have the weights' precision, float32 or bfloat16.
#pragma once

#include "../pointwise/pointwise.h"
#include "../products/packed/packed.h"
#include "../scans/learner/problem.h"

extern "C" {

// y ← y + conv(y), y ← y + TTT(LN(y)), y ← y + SwiGLU(LN(y)) on tokens of grids. Blocks that run one after
// the other lie in an array; `count` and the memory of a run are those of its first block.
//
// With a state it is one image's band of rows, of which one direction is scanned, from the state of the band
// before. It is the first of the merged ones, `side` the other.
struct PackedVitttBlock {
  const float* y;      // [B, T, D]
  float* out;          // [B, T, D]; the scan's outputs in the weights' precision where it does not merge
  float* between;      // [B, T, D], of results between blocks; null for one block
  void* scratch;       // vision_ttt_packed_vittt_blocks_scratch() bytes
  const float* conv2d; // [K · K, D], or null for no convolution
  NormParameters norm, mlp_norm;
  Packed views;        // k, q unless it is k, and v: R D columns each
  Packed gate;         // D columns
  Packed rates;        // to the logits of the heads' rates
  Packed out_proj, mlp_gate, mlp_value, mlp_out;
  Convolution conv_q, conv_k;
  State initial;       // [H, ...]
  const float *inner_weight, *inner_bias;  // [H, d]
  const float* scale;                      // [R, b]
  const float *post_weight, *post_bias;    // [R, D]
  const float* state;  // of a band, see VitttState; null for whole images
  float* next_state;   // behind the band
  const void* side;    // [n, D]: outputs of the other direction's scan in the weights' precision, or null
  int64_t batch, length, height, width, dim, heads, directions;
  int64_t kernel;      // of conv2d
  int64_t taps;        // of conv_q and conv_k
  int64_t shared_qk, is_mlp;  // 0 or 1
  int64_t mini_batch_size, is_bfloat16, threads, count;
  int64_t above, below;       // rows of y around the band's
  int64_t open;               // tokens of the mini-batch that is open before the band
  int64_t reverse, merges;    // 0 or 1
  float inner_eps, post_eps, rate;
};

// y ← y + conv(y), y ← y + g₁ ⊙ TTT(LN(y)), y ← y + g₂ ⊙ MLP(LN(y)) on tokens of grids: the block of
// ViT³, H-ViT³ and DiT³. Of a band of one image's rows, either the ascents of the inner models are summed, or
// the block runs given the sums over all bands: [H, d, 2 d] of the gated units, then [3 · 3, d] of the kernels.
struct PackedVit3Block {
  const float* y;                     // [B, T, D]
  float* out;                         // [B, T, D]
  void* scratch;                      // vision_ttt_packed_vit3_block_scratch() bytes
  const float *conv2d, *conv2d_bias;  // [3 · 3, D], [D]
  NormParameters norm1, norm2;
  const float *gate1, *gate2;         // [D] for each image, gate_stride apart, or null for ones
  Packed qkv, proj, fc1, fc2;
  const float* rotations;             // [T, D / 2, 2], or null for no rotation
  const float* units;                 // [H, d, 2 d]: [W₂ W₁]
  const float* kernels;               // [3 · 3, d]
  const float *mlp_conv, *mlp_conv_bias;  // [3 · 3, hidden], [hidden], or null for none
  float* sums;                        // of a band, to be written; or null
  const float* all_sums;              // of all bands; or null
  int64_t batch, length, height, width, dim, heads, gate_stride;
  int64_t tanh_gelu, is_bfloat16, threads;
  int64_t above, below;               // rows of y around the band's, of which the convolutions read two
  int64_t total;                      // tokens of the image where `all_sums` are given
  double loss_scale;
};

// y ← y + g₁ ⊙ TTT(LN(y)), y ← y + g₂ ⊙ MLP(LN(y)) on tokens of which the last ones are a grid's: the block of
// a ViT made linear, whose inner model is a SwiGLU per head.
struct PackedSwigluTttBlock {
  const float* y;             // [B, T, D]
  float* out;                 // [B, T, D]
  void* scratch;              // vision_ttt_packed_swiglu_ttt_block_scratch() bytes
  NormParameters norm1, norm2;
  const float *gate1, *gate2;           // [D], or null for ones
  Packed qkv, proj, fc1, fc2;
  const float* rotations;               // [h w, 2, d]: sines and cosines; or null for none
  const float *q_conv, *q_conv_bias;    // [3 · 3, D], [D]
  const float *k_conv, *k_conv_bias;
  const float* units;                   // [H, d, 2 d]: [W₁ W₂]
  const float* out_units;               // [H, d, d]: W₃
  int64_t batch, length, height, width, dim, heads;
  int64_t rotate_half, tanh_gelu, is_bfloat16, threads;
  double key_eps;
};

// A direction of a Mamba block. `low` has a multiple of 2 columns.
struct MambaDirection {
  const float *conv, *conv_bias;  // [K, E], [E]
  Packed vectors;                 // to B and C: 2 N columns
  Packed low, steps;              // to R numbers, and from these to the logits of E step sizes
  const float* decay;             // [N, E]: A log₂ e
  const float* skip;              // [E]
};

// y ← y + Linear(½ (scan(x) + scan back(x)) ⊙ SiLU(z)) with [x, z] = Linear(RMSNorm(y)): the block of Vim
// and Mamba-Reg. With a state it is a band of one sequence, of which one direction is scanned, from the state
// of the band before.
struct PackedMambaBlock {
  const float* y;     // [B, T, D]
  float* out;         // [B, T, D]; [T, E], a scan's sums in the weights' precision, where it does not merge
  void* scratch;      // vision_ttt_packed_mamba_block_scratch() bytes
  const float* norm;  // [D]
  Packed in_proj, out_proj;  // 2 E columns, D columns
  MambaDirection forth, back;
  const float* state;  // [N, E] of a direction, and x of its last K - 1 tokens; null for whole sequences
  float* next_state;   // behind the band
  const void* side;    // [T, E]: the other direction's sums in the weights' precision, where it merges
  int64_t batch, length, dim, inner, taps, is_bfloat16, threads;
  int64_t reverse, merges;  // 0 or 1
  double eps;
};

#define VISION_TTT_MAMBA_STATES 16  // N

VISION_TTT_EXPORT int64_t vision_ttt_packed_vittt_blocks_scratch(const PackedVitttBlock*);
// Returns 0, or 1 if the scratch of a thread could not be allocated.
VISION_TTT_EXPORT int vision_ttt_packed_vittt_blocks(const PackedVitttBlock*);
VISION_TTT_EXPORT int64_t vision_ttt_packed_vit3_block_scratch(const PackedVit3Block*);
VISION_TTT_EXPORT int vision_ttt_packed_vit3_block(const PackedVit3Block*);
VISION_TTT_EXPORT int64_t vision_ttt_packed_swiglu_ttt_block_scratch(const PackedSwigluTttBlock*);
VISION_TTT_EXPORT int vision_ttt_packed_swiglu_ttt_block(const PackedSwigluTttBlock*);
VISION_TTT_EXPORT int64_t vision_ttt_packed_mamba_block_scratch(const PackedMambaBlock*);
VISION_TTT_EXPORT int vision_ttt_packed_mamba_block(const PackedMambaBlock*);

}  // extern "C"
