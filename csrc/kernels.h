// The kernels of an instruction set, as dispatch.cpp selects them.
#pragma once

#include "blocks/blocks.h"
#include "blocks/swiglu_mlp/swiglu_mlp.h"
#include "convolutions/conv1d/conv1d.h"
#include "convolutions/conv2d/conv2d.h"
#include "convolutions/deformable_attention/deformable_attention.h"
#include "pointwise/pointwise.h"
#include "products/linear/linear.h"
#include "products/packed/packed.h"
#include "products/peak/peak.h"
#include "scans/learner/problem.h"
#include "scans/selective_scan/selective_scan.h"

#define VISION_TTT_DECLARE(isa)                                              \
  int ttt_linear_forward_##isa(const Problem&, const Outputs&);              \
  int ttt_linear_backward_##isa(const Problem&, const Gradients&);           \
  int ttt_linear_part_##isa(const Problem&, const OpenMiniBatch&);           \
  int ttt_mlp_forward_##isa(const Problem&, const Outputs&);                 \
  int ttt_mlp_backward_##isa(const Problem&, const Gradients&);              \
  int ttt_mlp_part_##isa(const Problem&, const OpenMiniBatch&);              \
  int conv1d_##isa(const Conv1d&);                                           \
  void conv1d_weights_##isa(const Conv1d&, const Conv1dWeights&);            \
  void gated_norm_##isa(const GatedNorm&);                                   \
  void gated_norm_backward_##isa(const GatedNorm&, const GatedNormGradients&); \
  int conv2d_##isa(const Conv2d&);                                           \
  void conv2d_weight_##isa(const Conv2d&, float*);                           \
  void deformable_attention_##isa(const DeformableAttention&);               \
  void deformable_attention_backward_##isa(const DeformableAttention&,       \
                                           const DeformableAttentionGradients&); \
  int selective_scan_##isa(const SelectiveScan&);                            \
  int selective_scan_backward_##isa(const SelectiveScan&, const SelectiveScanGradients&); \
  void silu_##isa(const Silu&);                                              \
  void swiglu_##isa(const SwiGlu&);                                          \
  void swiglu_backward_##isa(const SwiGlu&);                                 \
  int swiglu_mlp_##isa(const SwiGluMlpProblem&);                             \
  int swiglu_mlp_backward_##isa(const SwiGluMlpProblem&);                    \
  int linear_##isa(const Linear&);                                           \
  int linear_backward_##isa(const Linear&);                                  \
  int packed_linear_##isa(const PackedLinear&);                              \
  int packed_patches_##isa(const PackedPatches&);                            \
  int64_t packed_vittt_blocks_scratch_##isa(const PackedVitttBlock&);        \
  int packed_vittt_blocks_##isa(const PackedVitttBlock&);                    \
  int64_t packed_vit3_block_scratch_##isa(const PackedVit3Block&);           \
  int packed_vit3_block_##isa(const PackedVit3Block&);                       \
  int64_t packed_swiglu_ttt_block_scratch_##isa(const PackedSwigluTttBlock&); \
  int packed_swiglu_ttt_block_##isa(const PackedSwigluTttBlock&);            \
  int64_t packed_mamba_block_scratch_##isa(const PackedMambaBlock&);         \
  int packed_mamba_block_##isa(const PackedMambaBlock&);                     \
  int64_t fma_peak_##isa(int64_t, int64_t, float*);

#define VISION_TTT_KERNELS(isa)                                              \
  {#isa,                     ttt_linear_forward_##isa,  ttt_linear_backward_##isa, \
   ttt_linear_part_##isa,    ttt_mlp_forward_##isa,     ttt_mlp_backward_##isa, \
   ttt_mlp_part_##isa,                                                       \
   conv1d_##isa,             conv1d_weights_##isa,      gated_norm_##isa,    \
   gated_norm_backward_##isa, conv2d_##isa,             conv2d_weight_##isa, \
   deformable_attention_##isa, deformable_attention_backward_##isa,          \
   selective_scan_##isa,     selective_scan_backward_##isa,                  \
   silu_##isa,               swiglu_##isa,             swiglu_backward_##isa, \
   swiglu_mlp_##isa,         swiglu_mlp_backward_##isa, linear_##isa,        \
   linear_backward_##isa,                                                    \
   packed_linear_##isa,      packed_patches_##isa,                           \
   packed_vittt_blocks_scratch_##isa, packed_vittt_blocks_##isa,             \
   packed_vit3_block_scratch_##isa, packed_vit3_block_##isa,                 \
   packed_swiglu_ttt_block_scratch_##isa, packed_swiglu_ttt_block_##isa,     \
   packed_mamba_block_scratch_##isa, packed_mamba_block_##isa, fma_peak_##isa}

VISION_TTT_DECLARE(baseline)
#ifdef VISION_TTT_X86
VISION_TTT_DECLARE(avx2)
VISION_TTT_DECLARE(avx512)
VISION_TTT_DECLARE(avx512bf16)
#endif

namespace {

struct Kernels {
  const char* name;
  int (*ttt_linear_forward)(const Problem&, const Outputs&);
  int (*ttt_linear_backward)(const Problem&, const Gradients&);
  int (*ttt_linear_part)(const Problem&, const OpenMiniBatch&);
  int (*ttt_mlp_forward)(const Problem&, const Outputs&);
  int (*ttt_mlp_backward)(const Problem&, const Gradients&);
  int (*ttt_mlp_part)(const Problem&, const OpenMiniBatch&);
  int (*conv1d)(const Conv1d&);
  void (*conv1d_weights)(const Conv1d&, const Conv1dWeights&);
  void (*gated_norm)(const GatedNorm&);
  void (*gated_norm_backward)(const GatedNorm&, const GatedNormGradients&);
  int (*conv2d)(const Conv2d&);
  void (*conv2d_weight)(const Conv2d&, float*);
  void (*deformable_attention)(const DeformableAttention&);
  void (*deformable_attention_backward)(const DeformableAttention&,
                                        const DeformableAttentionGradients&);
  int (*selective_scan)(const SelectiveScan&);
  int (*selective_scan_backward)(const SelectiveScan&, const SelectiveScanGradients&);
  void (*silu)(const Silu&);
  void (*swiglu)(const SwiGlu&);
  void (*swiglu_backward)(const SwiGlu&);
  int (*swiglu_mlp)(const SwiGluMlpProblem&);
  int (*swiglu_mlp_backward)(const SwiGluMlpProblem&);
  int (*linear)(const Linear&);
  int (*linear_backward)(const Linear&);
  int (*packed_linear)(const PackedLinear&);
  int (*packed_patches)(const PackedPatches&);
  int64_t (*packed_vittt_blocks_scratch)(const PackedVitttBlock&);
  int (*packed_vittt_blocks)(const PackedVitttBlock&);
  int64_t (*packed_vit3_block_scratch)(const PackedVit3Block&);
  int (*packed_vit3_block)(const PackedVit3Block&);
  int64_t (*packed_swiglu_ttt_block_scratch)(const PackedSwigluTttBlock&);
  int (*packed_swiglu_ttt_block)(const PackedSwigluTttBlock&);
  int64_t (*packed_mamba_block_scratch)(const PackedMambaBlock&);
  int (*packed_mamba_block)(const PackedMambaBlock&);
  int64_t (*fma_peak)(int64_t, int64_t, float*);
};

}  // namespace
