// Linear layers on packed weights, for one instruction set. The build compiles this file once for each.
#include "patches.h"

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
