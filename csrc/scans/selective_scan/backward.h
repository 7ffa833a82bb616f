// The gradients, of one block of channels after the other.
//
// From the last chunk to the first, the states are computed anew from the saved one before the chunk.
// With G the gradient of C h + D u, and g_t that of h_t with what later tokens add:
//
//   g_t = C_t G_t + exp(δ_{t+1} A) g_{t+1},   r_t = g_t exp(δ_t A) h_{t-1}
//   ∂C_t = Σ_channels h_t G_t,   ∂B_t = Σ_channels δ_t u_t g_t,   ∂(δ u)_t = Σ_n B_t g_t
//   ∂A = Σ_t δ_t r_t,            ∂δ_t = Σ_n A r_t + u_t ∂(δ u)_t
#pragma once

#include "../learner/token_sums.h"
#include "shares.h"

namespace {

// States at a time. Their terms of ∂B and ∂C fill a vector, when they have been summed over channels.
constexpr int kBackwardStrip = kLanes / 2;

template <class Number>
class BackwardPass {
 public:
  static size_t floats(const SelectiveScan& p) {
    const size_t states = round_up(p.states * kLanes, 16), tokens = kChunk * kLanes;
    const size_t strip = round_up(kBackwardStrip * kLanes, 16);
    return Chunk<Number>::floats(p) + 6 * tokens + (2 * kChunk + 1) * strip + kChunk * row(p) +
           (1 + 3 * kBlockVectors) * states + 2 * kBlockVectors * kLanes;
  }
  BackwardPass(const SelectiveScan& p, const SelectiveScanGradients& gradients, const Shares& shares,
               Scratch& scratch)
      : p_(p), out_(gradients), shares_(shares), chunk_(p, scratch), width_(p.states * kLanes),
        grad_(take_tokens(scratch)), y_(take_tokens(scratch)), dupdate_(take_tokens(scratch)),
        ddecay_(take_tokens(scratch)), slopes_(take_tokens(scratch)),
        gates_(take_tokens(scratch)), decays_(scratch.take(kBackwardStrip * kChunk * kLanes)),
        states_(scratch.take(kBackwardStrip * (kChunk + 1) * kLanes)),
        sums_(scratch.take(kChunk * row(p))), start_(scratch.take(width_)),
        rates_(scratch.take(kBlockVectors * width_)), g_(scratch.take(kBlockVectors * width_)),
        da_(scratch.take(kBlockVectors * width_)), dskip_(scratch.take(kBlockVectors * kLanes)),
        dbias_(scratch.take(kBlockVectors * kLanes)) {}

  void run(int64_t batch, const Block& block, int64_t index_of_block) {
    const int64_t vectors = (block.stop - block.start) / kLanes;
    const int64_t place = (batch * p_.channels + block.start) * p_.states;
    Column column{batch, block.start, block.group, p_.length, block.reverse};
    for (int64_t v = 0; v < vectors; ++v) {
      decay_rates(p_, block.start + v * kLanes, rates_ + v * width_);
      to_lanes(p_.last_state + place + v * width_, p_.states, g_ + v * width_);
    }
    clear(da_, vectors * width_);
    clear(dskip_, vectors * kLanes);
    clear(dbias_, vectors * kLanes);
    for (int64_t index = parts(p_.length, kChunk); index-- > 0;) {
      const float* kept = p_.kept_states + index * p_.batch * p_.channels * p_.states + place;
      chunk_.begin(index, column);
      clear(sums_, chunk_.tokens * row(p_));
      for (int64_t v = 0; v < vectors; ++v) {
        column.channel = block.start + v * kLanes;
        to_lanes(kept + v * width_, p_.states, start_);
        read(column);
        in_strips<kBackwardStrip>(
            p_.states, [&](auto count, int64_t n) { go_back<count>(column, v, n); });
        write(column, v);
      }
      write_sums(column, index_of_block);
    }
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t channel = batch * p_.channels + block.start + v * kLanes;
      from_lanes(g_ + v * width_, p_.states, out_.initial_state + place + v * width_);
      from_lanes(da_ + v * width_, p_.states, shares_.a + place + v * width_);
      store(shares_.skip + channel, load(dskip_ + v * kLanes));
      store(shares_.delta_bias + channel, load(dbias_ + v * kLanes));
    }
  }

 private:
  static float* take_tokens(Scratch& scratch) { return scratch.take(kChunk * kLanes); }
  // Of a token's sums, with room for the last strip's whole vector.
  static int64_t row(const SelectiveScan& p) { return round_up(2 * p.states, 16) + 16; }

  // Where the token's gradients are written.
  VISION_TTT_INLINE int64_t place(const Column& column, int64_t j) const {
    const int64_t token = column.batch * p_.length + column.token(chunk_.first + j);
    return token * p_.channels + column.channel;
  }

  // The tokens of kLanes channels, and the gradient of C h + D u.
  void read(const Column& column) {
    chunk_.read_steps(column, slopes_);
    for (int64_t j = 0; j < chunk_.tokens; ++j) {
      const int64_t step = chunk_.first + j;
      Vector grad = load(column.vector<Number>(p_.y, step));
      if (p_.z.data) {
        const Vector z = load(column.vector<Number>(p_.z, step)), s = sigmoid(z);
        store(gates_ + j * kLanes, grad * s * (1.0f + z * (1.0f - s)));
        grad *= z * s;
      }
      store(grad_ + j * kLanes, grad);
    }
    float* const accumulated[] = {y_, dupdate_, ddecay_};
    for (float* x : accumulated) clear(x, chunk_.tokens * kLanes);
  }

  // kStates states from n on: forward through the chunk, and back.
  template <int kStates>
  void go_back(const Column& column, int64_t v, int64_t n) {
    // What the next chunk reads and this one writes is fetched bit by bit: few loads can wait for memory
    // at a time.
    const bool first = n == 0, last = n + kStates == p_.states;
    const float* rates = rates_ + v * width_ + n * kLanes;
    Vector h[kStates], g[kStates], da[kStates];
    for (int s = 0; s < kStates; ++s) {
      h[s] = load(start_ + (n + s) * kLanes);
      store(states_ + s * kLanes, h[s]);
    }
    for (int64_t j = 0; j < chunk_.tokens; ++j) {
      const Vector delta = load(chunk_.delta + j * kLanes), update = load(chunk_.update + j * kLanes);
      const float *b = chunk_.b + j * p_.states + n, *c = chunk_.c + j * p_.states + n;
      float *decays = decays_ + j * kStates * kLanes, *states = states_ + (j + 1) * kStates * kLanes;
      if (first) {
        chunk_.prefetch(p_.u, column, -1, j);
        chunk_.prefetch(p_.delta, column, -1, j);
      }
      if (last) {
        __builtin_prefetch(static_cast<Number*>(out_.u) + place(column, j), 1);
        __builtin_prefetch(static_cast<Number*>(out_.delta) + place(column, j), 1);
      }
      Vector y = load(y_ + j * kLanes);
#pragma GCC unroll 16
      for (int s = 0; s < kStates; ++s) {
        const Vector decay = exp2(delta * load(rates + s * kLanes));
        h[s] = decay * h[s] + update * b[s];
        y += h[s] * c[s];
        store(decays + s * kLanes, decay);
        store(states + s * kLanes, h[s]);
      }
      store(y_ + j * kLanes, y);
    }
    for (int s = 0; s < kStates; ++s) {
      g[s] = load(g_ + v * width_ + (n + s) * kLanes);
      da[s] = Vector{};
    }
    for (int64_t j = chunk_.tokens; j-- > 0;) {
      const Vector delta = load(chunk_.delta + j * kLanes), update = load(chunk_.update + j * kLanes);
      const Vector grad = load(grad_ + j * kLanes);
      const float *b = chunk_.b + j * p_.states + n, *c = chunk_.c + j * p_.states + n;
      const float *decays = decays_ + j * kStates * kLanes, *before = states_ + j * kStates * kLanes;
      Vector dupdate = load(dupdate_ + j * kLanes), ddecay = load(ddecay_ + j * kLanes);
      if (first) {
        chunk_.prefetch(p_.z, column, -1, j);
        chunk_.prefetch(p_.y, column, -1, j);
      }
      if (last && p_.z.data) __builtin_prefetch(static_cast<Number*>(out_.z) + place(column, j), 1);
      // The terms of ∂B, then those of ∂C, to which each state adds one.
      const auto terms = [&](int64_t index) {
        const int64_t s = index % kStates;
        if (index >= kStates) return load(before + (kStates + s) * kLanes) * grad;
        g[s] += grad * c[s];
        const Vector term = g[s] * update;
        dupdate += g[s] * b[s];
        g[s] *= load(decays + s * kLanes);
        const Vector r = g[s] * load(before + s * kLanes);
        ddecay += r * load(rates + s * kLanes);
        da[s] += r * delta;
        return term;
      };
      const Vector sums = across_lanes<2 * kStates>(sums_of<2 * kStates>(terms));
      float* to = sums_ + j * row(p_) + 2 * n;
      store(to, load(to) + keep_first(sums, 2 * kStates));
      store(dupdate_ + j * kLanes, dupdate);
      store(ddecay_ + j * kLanes, ddecay);
    }
    for (int s = 0; s < kStates; ++s) {
      const int64_t at = v * width_ + (n + s) * kLanes;
      store(g_ + at, g[s]);
      store(da_ + at, load(da_ + at) + da[s]);
    }
  }

  // The sums of term i in the lanes whose indices have the remainder i by kCount. Terms i and
  // i + kCount / 2 are needed together, so that few are in registers at a time.
  template <int kCount, int kStride = 1, class Terms>
  VISION_TTT_INLINE static Vector sums_of(const Terms& terms, int64_t first = 0) {
    if constexpr (kStride == kCount) {
      return terms(first);
    } else {
      const Vector sums = sums_of<kCount, 2 * kStride>(terms, first);
      return fold<kStride>(sums, sums_of<kCount, 2 * kStride>(terms, first + kStride));
    }
  }

  // Add up the lanes whose indices have the same remainder by kCount.
  template <int kCount>
  VISION_TTT_INLINE static Vector across_lanes(Vector x) {
    if constexpr (kCount >= kLanes)
      return x;
    else
      return across_lanes<2 * kCount>(fold<kCount>(x, x));
  }

  void write(const Column& column, int64_t v) {
    const Vector skip = p_.skip ? load(p_.skip + column.channel) : Vector{};
    Vector dskip{}, dbias{};
    for (int64_t j = 0; j < chunk_.tokens; ++j) {
      const int64_t step = chunk_.first + j;
      const int64_t to = place(column, j);
      const Vector u = load(column.vector<Number>(p_.u, step)), grad = load(grad_ + j * kLanes);
      const Vector dupdate = load(dupdate_ + j * kLanes);
      Vector ddelta = load(ddecay_ + j * kLanes) * kLn2 + dupdate * u;
      if (p_.delta_softplus) ddelta *= load(slopes_ + j * kLanes);
      store(static_cast<Number*>(out_.delta) + to, ddelta);
      store(static_cast<Number*>(out_.u) + to, dupdate * load(chunk_.delta + j * kLanes) + skip * grad);
      if (p_.z.data) {
        const Vector y = load(y_ + j * kLanes) + skip * u;
        store(static_cast<Number*>(out_.z) + to, y * load(gates_ + j * kLanes));
      }
      dskip += grad * u;
      dbias += ddelta;
    }
    store(dskip_ + v * kLanes, load(dskip_ + v * kLanes) + dskip);
    store(dbias_ + v * kLanes, load(dbias_ + v * kLanes) + dbias);
  }

  void write_sums(const Column& column, int64_t index_of_block) {
    for (int64_t j = 0; j < chunk_.tokens; ++j) {
      const int64_t sequence = index_of_block * p_.batch + column.batch;
      const int64_t to = (sequence * p_.length + column.token(chunk_.first + j)) * p_.states;
      const float* sums = sums_ + j * row(p_);
      in_strips<kBackwardStrip>(p_.states, [&](auto count, int64_t n) {
        copy(shares_.b + to + n, sums + 2 * n, count);
        copy(shares_.c + to + n, sums + 2 * n + count, count);
      });
    }
  }

  const SelectiveScan& p_;
  const SelectiveScanGradients& out_;
  const Shares& shares_;
  Chunk<Number> chunk_;
  int64_t width_;  // of the states of kLanes channels
  float *grad_, *y_, *dupdate_, *ddecay_;  // G, C h, ∂(δ u), ∂δ in the decay: [64, kLanes]
  float *slopes_, *gates_;                 // of softplus, and ∂z / (C h + D u): [64, kLanes]
  float *decays_, *states_;                // of a strip: [64, strip, kLanes], [65, strip, kLanes]
  float* sums_;                            // ∂B and ∂C of the block, strip by strip: [64, row]
  float* start_;                           // the state before the chunk [N, kLanes]
  float *rates_, *g_, *da_;                // [vectors, N, kLanes]
  float *dskip_, *dbias_;                  // [vectors, kLanes]
};

}  // namespace
