// The peak rate of the machine's multiply-add units.
#pragma once

#include "../../export.h"

extern "C" {

// Run multiply-adds in registers, `rounds` rounds in each of `threads` threads, and return their number.
// Their sum is written to `result`, so that the compiler cannot remove them.
VISION_TTT_EXPORT int64_t vision_ttt_fma_peak(int64_t rounds, int64_t threads, float* result);

}  // extern "C"
