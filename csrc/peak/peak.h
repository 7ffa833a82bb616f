// What the machine's multiply-add units give at most, to judge other kernels by.
#pragma once

#include <cstdint>

#ifndef VISION_TTT_EXPORT
#define VISION_TTT_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {

// Do multiply-adds on registers alone, `rounds` rounds in each of `threads` threads; return how many
// were done. Their sum is written to `result`, so that they must be.
VISION_TTT_EXPORT int64_t vision_ttt_fma_peak(int64_t rounds, int64_t threads, float* result);

}  // extern "C"
