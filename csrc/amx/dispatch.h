// Selection of the kernels for tile registers.
#pragma once

#include "../kernels.h"

#ifdef VISION_TTT_AMX

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

VISION_TTT_DECLARE(amx)

namespace {

// Whether the processor has tile registers, and the system lets this process use them.
bool tiles_are_there() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  if (!(d & bit_AMX_TILE) || !(d & bit_AMX_BF16)) return false;
  constexpr int kRequestPermission = 0x1023, kTileData = 18;  // of Linux's arch_prctl
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

// Fewer rows do not pay for splitting the weights, which training does at every call.
constexpr int64_t kRowsForTiles = 256;

#define VISION_TTT_IN_TILES(kernel) chosen.kernel = kernel##_amx

#define VISION_TTT_MANY_IN_TILES(kernel)                                            \
  chosen.kernel = [](const auto& p) {                                               \
    return p.rows < kRowsForTiles ? kernel##_avx512bf16(p) : kernel##_amx(p);       \
  }

// Put the kernels for tile registers in the place of avx512bf16's, where the machine has tile registers.
inline void use_tiles(Kernels& chosen) {
  if (!tiles_are_there()) return;
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
  VISION_TTT_IN_TILES(packed_swiglu_ttt_block_scratch);
  VISION_TTT_IN_TILES(packed_swiglu_ttt_block);
  VISION_TTT_IN_TILES(packed_mamba_block_scratch);
  VISION_TTT_IN_TILES(packed_mamba_block);
}

}  // namespace

#else

namespace {

inline void use_tiles(Kernels&) {}

}  // namespace

#endif
