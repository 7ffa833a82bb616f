// The entry points. They call the kernels of the best instruction set that the machine supports.
#include <cstdlib>
#include <cstring>

#include "amx/dispatch.h"
#include "kernels.h"

namespace {

Kernels choose() {
#ifdef VISION_TTT_X86
  // VISION_TTT_CPU_ISA=avx2 or another limits the instruction set, for tests and comparisons.
  static const char* const kNames[] = {"baseline", "avx2", "avx512", "avx512bf16", "amx"};
  const char* asked = std::getenv("VISION_TTT_CPU_ISA");
  int most = 4;
  for (int i = 0; asked && i <= 4; ++i)
    if (!std::strcmp(asked, kNames[i])) most = i;
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq");
  const bool bfloat16 = avx512 && __builtin_cpu_supports("avx512bf16");
  if (most >= 3 && bfloat16) {
    Kernels chosen = VISION_TTT_KERNELS(avx512bf16);
    if (most >= 4) use_tiles(chosen);
    return chosen;
  }
  if (most >= 2 && avx512) return VISION_TTT_KERNELS(avx512);
  if (most >= 1 && avx2) return VISION_TTT_KERNELS(avx2);
#endif
  return VISION_TTT_KERNELS(baseline);
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

int vision_ttt_ttt_linear_forward(const Problem* p, const Outputs* o) {
  return kernels().ttt_linear_forward(*p, *o);
}
int vision_ttt_ttt_linear_backward(const Problem* p, const Gradients* g) {
  return kernels().ttt_linear_backward(*p, *g);
}
int vision_ttt_ttt_linear_part(const Problem* p, const OpenMiniBatch* m) {
  return kernels().ttt_linear_part(*p, *m);
}
int vision_ttt_ttt_mlp_forward(const Problem* p, const Outputs* o) {
  return kernels().ttt_mlp_forward(*p, *o);
}
int vision_ttt_ttt_mlp_backward(const Problem* p, const Gradients* g) {
  return kernels().ttt_mlp_backward(*p, *g);
}
int vision_ttt_ttt_mlp_part(const Problem* p, const OpenMiniBatch* m) {
  return kernels().ttt_mlp_part(*p, *m);
}
int64_t vision_ttt_chunk_tokens() { return VISION_TTT_CHUNK_TOKENS; }
int vision_ttt_conv1d(const Conv1d* p) { return kernels().conv1d(*p); }
void vision_ttt_conv1d_weights(const Conv1d* p, const Conv1dWeights* g) {
  kernels().conv1d_weights(*p, *g);
}
void vision_ttt_gated_norm(const GatedNorm* p) { kernels().gated_norm(*p); }
void vision_ttt_gated_norm_backward(const GatedNorm* p, const GatedNormGradients* g) {
  kernels().gated_norm_backward(*p, *g);
}
int vision_ttt_conv2d(const Conv2d* p) { return kernels().conv2d(*p); }
void vision_ttt_conv2d_weight(const Conv2d* p, float* g) { kernels().conv2d_weight(*p, g); }
void vision_ttt_deformable_attention(const DeformableAttention* p) {
  kernels().deformable_attention(*p);
}
void vision_ttt_deformable_attention_backward(const DeformableAttention* p,
                                              const DeformableAttentionGradients* g) {
  kernels().deformable_attention_backward(*p, *g);
}
int vision_ttt_selective_scan(const SelectiveScan* p) { return kernels().selective_scan(*p); }
int vision_ttt_selective_scan_backward(const SelectiveScan* p, const SelectiveScanGradients* g) {
  return kernels().selective_scan_backward(*p, *g);
}
void vision_ttt_silu(const Silu* p) { kernels().silu(*p); }
void vision_ttt_swiglu(const SwiGlu* p) { kernels().swiglu(*p); }
void vision_ttt_swiglu_backward(const SwiGlu* p) { kernels().swiglu_backward(*p); }
int vision_ttt_swiglu_mlp(const SwiGluMlpProblem* p) { return kernels().swiglu_mlp(*p); }
int vision_ttt_swiglu_mlp_backward(const SwiGluMlpProblem* p) {
  return kernels().swiglu_mlp_backward(*p);
}
int vision_ttt_linear(const Linear* p) { return kernels().linear(*p); }
int vision_ttt_linear_backward(const Linear* p) { return kernels().linear_backward(*p); }
int vision_ttt_packed_linear(const PackedLinear* p) { return kernels().packed_linear(*p); }
int vision_ttt_packed_patches(const PackedPatches* p) { return kernels().packed_patches(*p); }
int64_t vision_ttt_packed_vittt_blocks_scratch(const PackedVitttBlock* p) {
  return kernels().packed_vittt_blocks_scratch(*p);
}
int vision_ttt_packed_vittt_blocks(const PackedVitttBlock* p) {
  return kernels().packed_vittt_blocks(*p);
}
int64_t vision_ttt_packed_vit3_block_scratch(const PackedVit3Block* p) {
  return kernels().packed_vit3_block_scratch(*p);
}
int vision_ttt_packed_vit3_block(const PackedVit3Block* p) {
  return kernels().packed_vit3_block(*p);
}
int64_t vision_ttt_packed_swiglu_ttt_block_scratch(const PackedSwigluTttBlock* p) {
  return kernels().packed_swiglu_ttt_block_scratch(*p);
}
int vision_ttt_packed_swiglu_ttt_block(const PackedSwigluTttBlock* p) {
  return kernels().packed_swiglu_ttt_block(*p);
}
int64_t vision_ttt_packed_mamba_block_scratch(const PackedMambaBlock* p) {
  return kernels().packed_mamba_block_scratch(*p);
}
int vision_ttt_packed_mamba_block(const PackedMambaBlock* p) {
  return kernels().packed_mamba_block(*p);
}
int64_t vision_ttt_fma_peak(int64_t rounds, int64_t threads, float* result) {
  return kernels().fma_peak(rounds, threads, result);
}

const char* vision_ttt_instruction_set() { return kernels().name; }
