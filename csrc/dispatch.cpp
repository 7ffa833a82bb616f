// The entry points. They call the kernels of the best instruction set that the machine supports.
#include <cstdlib>
#include <cstring>

#ifdef VISION_TTT_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "conv2d/conv2d.h"
#include "deformable_attention/deformable_attention.h"
#include "fused/fused.h"
#include "learner/problem.h"
#include "linear/linear.h"
#include "packed/packed.h"
#include "peak/peak.h"
#include "selective_scan/selective_scan.h"
#include "swiglu_mlp/swiglu_mlp.h"

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
   packed_mamba_block_scratch_##isa, packed_mamba_block_##isa, fma_peak_##isa}

VISION_TTT_DECLARE(baseline)
#ifdef VISION_TTT_X86
VISION_TTT_DECLARE(avx2)
VISION_TTT_DECLARE(avx512)
VISION_TTT_DECLARE(avx512bf16)
#endif
#ifdef VISION_TTT_AMX
VISION_TTT_DECLARE(amx)
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
  int64_t (*packed_mamba_block_scratch)(const PackedMambaBlock&);
  int (*packed_mamba_block)(const PackedMambaBlock&);
  int64_t (*fma_peak)(int64_t, int64_t, float*);
};

#ifdef VISION_TTT_AMX
// Whether the processor has tile registers, and the system lets this process use them.
bool tiles_are_there() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d & bit_AMX_TILE) || !(d & bit_AMX_BF16)) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of Linux's arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#define VISION_TTT_IN_TILES(kernel) chosen.kernel = kernel##_amx

// Fewer rows do not pay for splitting the weights, which training does at every call.
constexpr int64_t kRowsForTiles = 256;

#define VISION_TTT_MANY_IN_TILES(kernel)                                            \
  chosen.kernel = [](const auto& p) {                                               \
    return p.rows < kRowsForTiles ? kernel##_avx512bf16(p) : kernel##_amx(p);       \
  }
#endif

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
#ifdef VISION_TTT_AMX
  if (most >= 4 && bfloat16 && tiles_are_there()) {
    Kernels chosen = VISION_TTT_KERNELS(avx512bf16);  // for all that has no tiles
    chosen.name = "amx";
    VISION_TTT_IN_TILES(ttt_linear_forward);
    VISION_TTT_MANY_IN_TILES(swiglu_mlp);
    VISION_TTT_MANY_IN_TILES(swiglu_mlp_backward);
    VISION_TTT_MANY_IN_TILES(linear);
    VISION_TTT_MANY_IN_TILES(linear_backward);
    VISION_TTT_IN_TILES(packed_linear);
    VISION_TTT_IN_TILES(packed_patches);
    VISION_TTT_IN_TILES(packed_vittt_blocks_scratch);
    VISION_TTT_IN_TILES(packed_vittt_blocks);
    VISION_TTT_IN_TILES(packed_vit3_block_scratch);
    VISION_TTT_IN_TILES(packed_vit3_block);
    VISION_TTT_IN_TILES(packed_mamba_block_scratch);
    VISION_TTT_IN_TILES(packed_mamba_block);
    return chosen;
  }
#endif
  if (most >= 3 && bfloat16) return VISION_TTT_KERNELS(avx512bf16);
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
