// The outputs, the last state and the saved ones.
#pragma once

#include "chunk.h"

namespace {

// States in registers at a time: beside them there are the polynomial's coefficients.
constexpr int kForwardStrip = VISION_TTT_REGISTERS == 32 ? 16 : 8;

// kLanes channels, one per lane.
template <class Number>
class ForwardPass {
 public:
  static size_t floats(const SelectiveScan& p) {
    return Chunk<Number>::floats(p) + kChunk * kLanes + 2 * round_up(p.states * kLanes, 16);
  }
  ForwardPass(const SelectiveScan& p, Scratch& scratch)
      : p_(p), chunk_(p, scratch), y_(scratch.take(kChunk * kLanes)),
        rates_(scratch.take(p.states * kLanes)), state_(scratch.take(p.states * kLanes)) {}

  void run(int64_t batch, const Block& block) {
    const Column column{batch, block.start, block.group, p_.length, block.reverse};
    const int64_t place = (batch * p_.channels + column.channel) * p_.states;
    decay_rates(p_, column.channel, rates_);
    if (p_.initial_state)
      to_lanes(p_.initial_state + place, p_.states, state_);
    else
      clear(state_, p_.states * kLanes);
    for (int64_t index = 0; index < parts(p_.length, kChunk); ++index) {
      if (p_.kept_states) {
        const int64_t earlier = index * p_.batch * p_.channels * p_.states;
        from_lanes(state_, p_.states, p_.kept_states + earlier + place);
      }
      chunk_.begin(index, column);
      chunk_.read_steps(column, nullptr);
      clear(y_, chunk_.tokens * kLanes);
      in_strips<kForwardStrip>(p_.states, [&](auto count, int64_t n) { advance<count>(column, n); });
      write(column);
    }
    from_lanes(state_, p_.states, p_.last_state + place);
  }

 private:
  // kStates states from n on, over the chunk.
  template <int kStates>
  void advance(const Column& column, int64_t n) {
    const float* rates = rates_ + n * kLanes;
    Vector h[kStates];
    for (int s = 0; s < kStates; ++s) h[s] = load(state_ + (n + s) * kLanes);
    for (int64_t j = 0; j < chunk_.tokens; ++j) {
      const Vector delta = load(chunk_.delta + j * kLanes), update = load(chunk_.update + j * kLanes);
      const float *b = chunk_.b + j * p_.states + n, *c = chunk_.c + j * p_.states + n;
      if (n == 0) {
        chunk_.prefetch(p_.u, column, 1, j);
        chunk_.prefetch(p_.delta, column, 1, j);
        chunk_.prefetch(p_.z, column, 1, j);
        chunk_.prefetch(p_.y, column, 1, j);
      }
      Vector y[2] = {load(y_ + j * kLanes), Vector{}};  // two chains hide the latency of one
#pragma GCC unroll 16
      for (int s = 0; s < kStates; ++s) {
        h[s] = exp2(delta * load(rates + s * kLanes)) * h[s] + update * b[s];
        y[s % 2] += h[s] * c[s];
      }
      store(y_ + j * kLanes, y[0] + y[1]);
    }
    for (int s = 0; s < kStates; ++s) store(state_ + (n + s) * kLanes, h[s]);
  }

  void write(const Column& column) {
    for (int64_t j = 0; j < chunk_.tokens; ++j) {
      const int64_t step = chunk_.first + j;
      Vector y = load(y_ + j * kLanes);
      if (p_.skip) y += load(p_.skip + column.channel) * load(column.vector<Number>(p_.u, step));
      if (p_.z.data) {
        const Vector z = load(column.vector<Number>(p_.z, step));
        y *= z * sigmoid(z);
      }
      store(column.vector<Number>(p_.y, step), y);
    }
  }

  const SelectiveScan& p_;
  Chunk<Number> chunk_;
  float* y_;                // C h [64, kLanes]
  float *rates_, *state_;   // [N, kLanes]
};

}  // namespace
