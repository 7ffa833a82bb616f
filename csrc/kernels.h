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

// K(isa, result, name, arguments) for each kernel.
#define VISION_TTT_EACH(K, isa)                                                                                     \
  K(isa, int, ttt_linear_forward, (const Problem&, const Outputs&))                                                 \
  K(isa, int, ttt_linear_backward, (const Problem&, const Gradients&))                                              \
  K(isa, int, ttt_linear_part, (const Problem&, const OpenMiniBatch&))                                              \
  K(isa, int, ttt_mlp_forward, (const Problem&, const Outputs&))                                                    \
  K(isa, int, ttt_mlp_backward, (const Problem&, const Gradients&))                                                 \
  K(isa, int, ttt_mlp_part, (const Problem&, const OpenMiniBatch&))                                                 \
  K(isa, int, conv1d, (const Conv1d&))                                                                              \
  K(isa, void, conv1d_weights, (const Conv1d&, const Conv1dWeights&))                                               \
  K(isa, void, gated_norm, (const GatedNorm&))                                                                      \
  K(isa, void, gated_norm_backward, (const GatedNorm&, const GatedNormGradients&))                                  \
  K(isa, int, conv2d, (const Conv2d&))                                                                              \
  K(isa, void, conv2d_weight, (const Conv2d&, float*))                                                              \
  K(isa, void, deformable_attention, (const DeformableAttention&))                                                  \
  K(isa, void, deformable_attention_backward, (const DeformableAttention&, const DeformableAttentionGradients&))    \
  K(isa, int, selective_scan, (const SelectiveScan&))                                                               \
  K(isa, int, selective_scan_backward, (const SelectiveScan&, const SelectiveScanGradients&))                       \
  K(isa, void, silu, (const Silu&))                                                                                 \
  K(isa, void, swiglu, (const SwiGlu&))                                                                             \
  K(isa, void, swiglu_backward, (const SwiGlu&))                                                                    \
  K(isa, int, swiglu_mlp, (const SwiGluMlpProblem&))                                                                \
  K(isa, int, swiglu_mlp_backward, (const SwiGluMlpProblem&))                                                       \
  K(isa, int, linear, (const Linear&))                                                                              \
  K(isa, int, linear_backward, (const Linear&))                                                                     \
  K(isa, int, packed_linear, (const PackedLinear&))                                                                 \
  K(isa, int, packed_patches, (const PackedPatches&))                                                               \
  K(isa, int64_t, packed_vittt_blocks_scratch, (const PackedVitttBlock&))                                           \
  K(isa, int, packed_vittt_blocks, (const PackedVitttBlock&))                                                       \
  K(isa, int64_t, packed_vit3_block_scratch, (const PackedVit3Block&))                                              \
  K(isa, int, packed_vit3_block, (const PackedVit3Block&))                                                          \
  K(isa, int64_t, packed_swiglu_ttt_block_scratch, (const PackedSwigluTttBlock&))                                   \
  K(isa, int, packed_swiglu_ttt_block, (const PackedSwigluTttBlock&))                                               \
  K(isa, int64_t, packed_mamba_block_scratch, (const PackedMambaBlock&))                                            \
  K(isa, int, packed_mamba_block, (const PackedMambaBlock&))                                                        \
  K(isa, int64_t, fma_peak, (int64_t, int64_t, float*))

#define VISION_TTT_DECLARE_ONE(isa, result, name, arguments) result name##_##isa arguments;
#define VISION_TTT_DECLARE(isa) VISION_TTT_EACH(VISION_TTT_DECLARE_ONE, isa)
VISION_TTT_DECLARE(baseline)
#ifdef VISION_TTT_X86
VISION_TTT_DECLARE(avx2)
VISION_TTT_DECLARE(avx512)
VISION_TTT_DECLARE(avx512bf16)
#endif

namespace {

struct Kernels {
  const char* name;
#define VISION_TTT_POINTER(isa, result, name, arguments) result (*name) arguments;
  VISION_TTT_EACH(VISION_TTT_POINTER, )
#undef VISION_TTT_POINTER
};

}  // namespace

// The Kernels of an instruction set.
#define VISION_TTT_VALUE(isa, result, name, arguments) name##_##isa,
#define VISION_TTT_KERNELS(isa) {#isa, VISION_TTT_EACH(VISION_TTT_VALUE, isa)}
