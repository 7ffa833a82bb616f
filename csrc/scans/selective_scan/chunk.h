// What both passes of the selective scan share: which channels scan together, and the tokens of a chunk.
#pragma once

#include <type_traits>

#include "../../bfloat16.h"
#include "../../floats.h"
#include "../../scratch.h"
#include "exponential.h"
#include "selective_scan.h"

namespace {

constexpr int64_t kChunk = VISION_TTT_SCAN_CHUNK;
constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;

VISION_TTT_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
VISION_TTT_INLINE int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }

// Neighbouring channels of one group and one direction.
struct Block {
  int64_t start, stop, group;
  bool reverse;
};

// The channels in blocks of at most `size`, whatever the number of threads.
struct Blocks {
  const SelectiveScan& p;
  int64_t size;

  int64_t per_group() const {
    const int64_t forward = p.channels - p.reverse_channels;
    if (p.groups == 1) return parts(forward, size) + parts(p.reverse_channels, size);
    return parts(p.channels / p.groups, size);
  }
  int64_t count() const { return p.groups * per_group(); }
  Block operator[](int64_t index) const {
    const int64_t forward = p.channels - p.reverse_channels;
    int64_t group = 0, first = 0, last = forward, place = index;
    if (p.groups > 1) {
      group = index / per_group(), place = index % per_group();
      first = group * (p.channels / p.groups), last = first + p.channels / p.groups;
    } else if (place >= parts(forward, size)) {  // one group serves both directions
      place -= parts(forward, size);
      first = forward, last = p.channels;
    }
    const int64_t start = first + place * size;
    return {start, least(start + size, last), group, first >= forward};
  }
};

// kLanes neighbouring channels of one sequence. Steps count its tokens in scan order.
struct Column {
  int64_t batch, channel, group, length;
  bool reverse;

  int64_t token(int64_t step) const { return reverse ? length - 1 - step : step; }
  template <class Number>
  VISION_TTT_INLINE Number* vector(const ScanTensor& x, int64_t step) const {
    return static_cast<Number*>(x.data) + batch * x.batch + token(step) * x.token + channel;
  }
  template <class Number>
  VISION_TTT_INLINE const Number* matrix(const ScanTensor& x, int64_t step) const {
    return static_cast<const Number*>(x.data) + batch * x.batch + token(step) * x.token +
           group * x.group;
  }
};

// Rows [kLanes, N] of neighbouring channels as [N, kLanes], and back.
inline void to_lanes(const float* rows, int64_t states, float* lanes) {
  int64_t n = 0;
  for (; n + kLanes <= states; n += kLanes)
    transpose_square(rows + n, states, lanes + n * kLanes, kLanes);
  for (; n < states; ++n)
    for (int i = 0; i < kLanes; ++i) lanes[n * kLanes + i] = rows[i * states + n];
}
inline void from_lanes(const float* lanes, int64_t states, float* rows) {
  int64_t n = 0;
  for (; n + kLanes <= states; n += kLanes)
    transpose_square(lanes + n * kLanes, kLanes, rows + n, states);
  for (; n < states; ++n)
    for (int i = 0; i < kLanes; ++i) rows[i * states + n] = lanes[n * kLanes + i];
}

// A log2 e of kLanes channels as [N, kLanes]: exp(δ A) = 2^(δ A log2 e).
inline void decay_rates(const SelectiveScan& p, int64_t channel, float* lanes) {
  to_lanes(p.a + channel * p.states, p.states, lanes);
  for (int64_t n = 0; n < p.states; ++n) {
    const Vector rate = load(lanes + n * kLanes) * kLog2e;
    // Any NaN as the one whose last bits are 0: exp2 shifts them.
    store(lanes + n * kLanes, select(rate == rate, rate, splat(__builtin_nanf(""))));
  }
}

// Call body(count, n) for all states in strips of neighbouring ones: as many as possible of kMost, from
// state n on, then of half as many, and so on. `count` is a constant.
template <int kMost, class Body>
VISION_TTT_INLINE void in_strips(int64_t states, const Body& body, int64_t n = 0) {
  for (; n + kMost <= states; n += kMost) body(std::integral_constant<int, kMost>{}, n);
  if constexpr (kMost > 1) in_strips<kMost / 2>(states, body, n);
}

VISION_TTT_INLINE void store_number(float* to, float x) { *to = x; }
VISION_TTT_INLINE void store_number(float* to, Bfloat16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  std::memcpy(to, &bits, sizeof bits);
}

template <class Number>
VISION_TTT_INLINE void widen(const Number* from, int64_t count, float* to) {
  int64_t n = 0;
  for (; n + kLanes <= count; n += kLanes) store(to + n, load(from + n));
  for (; n < count; ++n) store_number(to + n, from[n]);
}

// The tokens of a chunk in scan order, in float32.
template <class Number>
struct Chunk {
  const SelectiveScan& p;
  float *delta, *update;  // δ and δ u of kLanes channels, [64, kLanes]
  float *b, *c;           // [64, N]
  int64_t first, tokens;

  static size_t floats(const SelectiveScan& p) {
    return 2 * kChunk * kLanes + 2 * round_up(kChunk * p.states, 16);
  }
  Chunk(const SelectiveScan& p, Scratch& scratch)
      : p(p), delta(scratch.take(kChunk * kLanes)), update(scratch.take(kChunk * kLanes)),
        b(scratch.take(kChunk * p.states)), c(scratch.take(kChunk * p.states)) {}

  void begin(int64_t index, const Column& column) {
    first = index * kChunk, tokens = least(kChunk, p.length - first);
    for (int64_t j = 0; j < tokens; ++j) {
      widen(column.matrix<Number>(p.b, first + j), p.states, b + j * p.states);
      widen(column.matrix<Number>(p.c, first + j), p.states, c + j * p.states);
    }
  }

  // Fetch what is read of token j of another chunk: the tokens lie far apart, so that the processor does
  // not foresee them. An address beyond the first or last token does no harm.
  VISION_TTT_INLINE void prefetch(const ScanTensor& x, const Column& column, int64_t chunks,
                                 int64_t j) const {
    if (x.data) __builtin_prefetch(column.vector<Number>(x, first + chunks * kChunk + j));
  }

  // With softplus its derivatives are written to `slopes` [64, kLanes], if that is not null.
  void read_steps(const Column& column, float* slopes) {
    for (int64_t j = 0; j < tokens; ++j) {
      Vector step = load(column.vector<Number>(p.delta, first + j));
      if (p.delta_bias) step += load(p.delta_bias + column.channel);
      if (p.delta_softplus) {
        const Softplus found = softplus(step);
        step = found.value;
        if (slopes) store(slopes + j * kLanes, found.derivative);
      }
      store(delta + j * kLanes, step);
      store(update + j * kLanes, step * load(column.vector<Number>(p.u, first + j)));
    }
  }
};

}  // namespace
