// Blocks on packed weights, for one instruction set. The build compiles this file once for each.
#include "mamba_block.h"
#include "swiglu_ttt_block.h"
#include "vit3_block.h"
#include "vittt_block.h"

int64_t VISION_TTT_KERNEL(packed_vittt_blocks_scratch)(const PackedVitttBlock& p) {
  return p.is_bfloat16 ? VitttPasses<Bfloat16>(p).bytes() : VitttPasses<float>(p).bytes();
}

int VISION_TTT_KERNEL(packed_vittt_blocks)(const PackedVitttBlock& p) {
  return p.is_bfloat16 ? run_vittt_blocks<Bfloat16>(&p) : run_vittt_blocks<float>(&p);
}

int64_t VISION_TTT_KERNEL(packed_vit3_block_scratch)(const PackedVit3Block& p) {
  return p.is_bfloat16 ? Vit3Passes<Bfloat16>(p).bytes() : Vit3Passes<float>(p).bytes();
}

int VISION_TTT_KERNEL(packed_vit3_block)(const PackedVit3Block& p) {
  return p.is_bfloat16 ? Vit3Passes<Bfloat16>(p).run() : Vit3Passes<float>(p).run();
}

int64_t VISION_TTT_KERNEL(packed_swiglu_ttt_block_scratch)(const PackedSwigluTttBlock& p) {
  return p.is_bfloat16 ? SwigluTttPasses<Bfloat16>(p).bytes() : SwigluTttPasses<float>(p).bytes();
}

int VISION_TTT_KERNEL(packed_swiglu_ttt_block)(const PackedSwigluTttBlock& p) {
  return p.is_bfloat16 ? SwigluTttPasses<Bfloat16>(p).run() : SwigluTttPasses<float>(p).run();
}

int64_t VISION_TTT_KERNEL(packed_mamba_block_scratch)(const PackedMambaBlock& p) {
  return p.is_bfloat16 ? MambaPasses<Bfloat16>(p).bytes() : MambaPasses<float>(p).bytes();
}

int VISION_TTT_KERNEL(packed_mamba_block)(const PackedMambaBlock& p) {
  return p.is_bfloat16 ? MambaPasses<Bfloat16>(p).run() : MambaPasses<float>(p).run();
}
