// Inference with packed weights, for one instruction set. The build compiles this file once for each.
#include "mamba_block.h"
#include "patches.h"
#include "vit3_block.h"
#include "vittt_block.h"

namespace {

template <class Element, class In>
int linear_from(const PackedLinear& p) {
  return p.out_is_bfloat16 ? linear<Element, In, Bfloat16>(p) : linear<Element, In, float>(p);
}

template <class Element>
int linear_with(const PackedLinear& p) {
  return p.x_is_bfloat16 ? linear_from<Element, Bfloat16>(p) : linear_from<Element, float>(p);
}

}  // namespace

int VISION_TTT_KERNEL(packed_linear)(const PackedLinear& p) {
  return p.is_bfloat16 ? linear_with<Bfloat16>(p) : linear_with<float>(p);
}

int VISION_TTT_KERNEL(packed_patches)(const PackedPatches& p) {
  if (p.is_bfloat16)
    return p.images_are_bfloat16 ? patches<Bfloat16, Bfloat16>(p) : patches<Bfloat16, float>(p);
  return p.images_are_bfloat16 ? patches<float, Bfloat16>(p) : patches<float, float>(p);
}

int64_t VISION_TTT_KERNEL(packed_vittt_blocks_scratch)(const PackedVitttBlock& p) {
  return p.is_bfloat16 ? VitttPasses<Bfloat16>::bytes(p) : VitttPasses<float>::bytes(p);
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

int64_t VISION_TTT_KERNEL(packed_mamba_block_scratch)(const PackedMambaBlock& p) {
  return p.is_bfloat16 ? MambaPasses<Bfloat16>(p).bytes() : MambaPasses<float>(p).bytes();
}

int VISION_TTT_KERNEL(packed_mamba_block)(const PackedMambaBlock& p) {
  return p.is_bfloat16 ? MambaPasses<Bfloat16>(p).run() : MambaPasses<float>(p).run();
}
