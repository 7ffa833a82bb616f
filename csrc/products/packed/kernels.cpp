// Linear layers on packed weights, for one instruction set. The build compiles this file once for each.
#include "patches.h"

int VISION_TTT_KERNEL(packed_linear)(const PackedLinear& p) {
  if (p.is_bfloat16) return p.x_is_bfloat16 ? linear<Bfloat16, Bfloat16>(p) : linear<Bfloat16, float>(p);
  return p.x_is_bfloat16 ? linear<float, Bfloat16>(p) : linear<float, float>(p);
}

int VISION_TTT_KERNEL(packed_patches)(const PackedPatches& p) {
  if (p.is_bfloat16)
    return p.images_are_bfloat16 ? patches<Bfloat16, Bfloat16>(p) : patches<Bfloat16, float>(p);
  return p.images_are_bfloat16 ? patches<float, Bfloat16>(p) : patches<float, float>(p);
}
