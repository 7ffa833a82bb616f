// The tokens of sequences, and chunks of them.
#pragma once

#include "sequence.h"
#include "vector.h"

namespace {

// Chunks do not depend on the threads, so that the order of sums over tokens is fixed.
constexpr int64_t kChunk = VISION_TTT_CHUNK_TOKENS;

VISION_TTT_INLINE int64_t chunks(int64_t length) { return (length + kChunk - 1) / kChunk; }
VISION_TTT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

// The tokens of one chunk of one image.
struct Span {
  int64_t batch, start, stop;

  Span(int64_t task, int64_t length) {
    batch = task / chunks(length);
    start = task % chunks(length) * kChunk;
    stop = least(start + kChunk, length);
  }
};

VISION_TTT_INLINE float* token(const Sequence& s, int64_t batch, int64_t t) {
  return s.data + batch * s.batch + t * s.token;
}

}  // namespace
