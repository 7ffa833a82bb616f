// Sums over blocks of channels and over sequences, which several threads compute.
#pragma once

#include "chunk.h"

namespace {

// Vectors of channels whose terms of ∂B and ∂C are summed in one share.
constexpr int64_t kBlockVectors = 4;

// Sums over several blocks and sequences are of shares, which are added in a fixed order.
struct Shares {
  float *b, *c;              // [blocks, B, T, N]
  float *a;                  // [B, D, N]
  float *skip, *delta_bias;  // [B, D]

  static size_t matrix_floats(const SelectiveScan& p, const Blocks& blocks) {
    return blocks.count() * p.batch * p.length * p.states;
  }
  static size_t floats(const SelectiveScan& p, const Blocks& blocks) {
    const size_t channels = p.batch * p.channels;
    return 2 * round_up(matrix_floats(p, blocks), 16) + channels * (p.states + 2) + 3 * 16;
  }
  Shares(const SelectiveScan& p, const Blocks& blocks, Scratch& scratch)
      : b(scratch.take(matrix_floats(p, blocks))), c(scratch.take(matrix_floats(p, blocks))),
        a(scratch.take(p.batch * p.channels * p.states)),
        skip(scratch.take(p.batch * p.channels)), delta_bias(scratch.take(p.batch * p.channels)) {}
};

}  // namespace
