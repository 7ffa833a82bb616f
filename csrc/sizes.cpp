// The sizes of the C interface's structures, for comparison with their declarations in another language.
#include <cstring>

#include "kernels.h"

#define VISION_TTT_SIZE(structure) \
  if (!std::strcmp(name, #structure)) return sizeof(structure);

extern "C" {

// The bytes of the structure `name`, or -1 if there is none.
VISION_TTT_EXPORT int64_t vision_ttt_sizeof(const char* name) {
  VISION_TTT_SIZE(Sequence)
  VISION_TTT_SIZE(Conv1d)
  VISION_TTT_SIZE(Conv1dWeights)
  VISION_TTT_SIZE(GatedNorm)
  VISION_TTT_SIZE(GatedNormGradients)
  VISION_TTT_SIZE(Silu)
  VISION_TTT_SIZE(SwiGlu)
  VISION_TTT_SIZE(SwiGluMlpProblem)
  VISION_TTT_SIZE(Linear)
  VISION_TTT_SIZE(Conv2d)
  VISION_TTT_SIZE(DeformableAttention)
  VISION_TTT_SIZE(DeformableAttentionGradients)
  VISION_TTT_SIZE(ScanTensor)
  VISION_TTT_SIZE(SelectiveScan)
  VISION_TTT_SIZE(SelectiveScanGradients)
  VISION_TTT_SIZE(Tokens)
  VISION_TTT_SIZE(Convolution)
  VISION_TTT_SIZE(State)
  VISION_TTT_SIZE(TapGradients)
  VISION_TTT_SIZE(Problem)
  VISION_TTT_SIZE(Outputs)
  VISION_TTT_SIZE(Gradients)
  VISION_TTT_SIZE(OpenMiniBatch)
  VISION_TTT_SIZE(Packed)
  VISION_TTT_SIZE(NormParameters)
  VISION_TTT_SIZE(PackedLinear)
  VISION_TTT_SIZE(PackedPatches)
  VISION_TTT_SIZE(PackedVitttBlock)
  VISION_TTT_SIZE(PackedVit3Block)
  VISION_TTT_SIZE(PackedSwigluTttBlock)
  VISION_TTT_SIZE(MambaDirection)
  VISION_TTT_SIZE(PackedMambaBlock)
  return -1;
}

}  // extern "C"
