// The C interface's sequences of tokens.
#pragma once

#include "export.h"

// The number of tokens of a chunk. It does not depend on the number of threads; see
// GatedNormGradients.
#define VISION_TTT_CHUNK_TOKENS 128

extern "C" {

// A [B, T, C] tensor.
struct Sequence {
  float* data;
  int64_t batch, token;
};

}  // extern "C"
