// The block of Vim and Mamba-Reg on packed weights.
//
// Either direction visits the chunks of an image in its own order. The first visitor of a chunk projects
// its tokens and stores its scan's sums; the second adds its own sums, gates them and projects the result.
// Two directions that run at the same time meet in the middle. Nothing is computed twice. In a band there is
// one direction, and the other's sums are given or come later.
#pragma once

#include <cmath>

#include "../products/packed/product.h"
#include "mamba_scan.h"
#include "mamba_tasks.h"

namespace {

// The memory of a team, for one chunk.
template <class Element>
struct MambaWorkspace {
  Element* u;      // [rows, max(E, D)]: RMSNorm(y), then u, then the gated sums
  Element* low;    // [rows, R]
  float* delta;    // [rows, E]
  float* vectors;  // [rows, 2 N]: B and C
  float* state;    // [N, E]
  bool* first;     // whether the team is the chunk's first visitor
  size_t bytes;    // of all

  MambaWorkspace(const PackedMambaBlock& p, int64_t rows, char* memory) {
    Layout layout(memory);
    u = layout.take<Element>(rows * (p.inner > p.dim ? p.inner : p.dim));
    low = layout.take<Element>(rows * p.forth.low.columns);
    delta = layout.take(rows * p.inner);
    vectors = layout.take(rows * 2 * kStates);
    state = layout.take(kStates * p.inner);
    first = layout.take<bool>(1);
    bytes = layout.bytes();
  }
};

template <class Element>
class MambaPasses {
 public:
  explicit MambaPasses(const PackedMambaBlock& block)
      : p_(block), in_band_(block.state), columns_(in_band_ && !block.merges ? block.inner : 2 * block.inner),
        seen_(in_band_ ? block.taps - 1 : 0), projected_(static_cast<Element*>(block.scratch)),
        sums_(projected_ + block.batch * block.length * 2 * block.inner) {}

  int64_t bytes() const {
    const MambaTasks tasks(p_.batch, p_.threads, in_band_ ? 1 : 2);
    const MambaChunks chunks(p_.length, tasks.smallest_team());
    return bytes_of_tokens() + tasks.teams * bytes_of_team(chunks);
  }

  int run() const {
    const int64_t most_chunks = MambaChunks(p_.length, 1).count;
    const std::unique_ptr<Progress[]> progress(new (std::nothrow) Progress[p_.batch * most_chunks]);
    if (!progress) return 1;
    return for_each_direction(
        p_.batch, p_.length, p_.threads, in_band_ ? 1 : 2,
        [&](int64_t image, bool second, const MambaChunks& chunks, const Member& me) {
          const bool back = in_band_ ? p_.reverse : second;
          char* memory = static_cast<char*>(p_.scratch) + bytes_of_tokens();
          const MambaWorkspace<Element> w(p_, chunks.rows, memory + me.team * bytes_of_team(chunks));
          const Share own = me.share(p_.inner, kLanes);
          for (int64_t n = 0; n < kStates; ++n) {
            float* row = w.state + n * p_.inner + own.begin;
            if (in_band_)
              std::memcpy(row, p_.state + n * p_.inner + own.begin, own.count() * sizeof(float));
            else
              std::memset(row, 0, own.count() * sizeof(float));
          }
          if (in_band_ && me.index == 0) take_seen();
          for (int64_t i = 0; i < chunks.count; ++i) {
            const int64_t n = back ? chunks.count - 1 - i : i;
            const Chunk chunk{image, chunks.begin(n), chunks.begin(n + 1) - chunks.begin(n)};
            if (in_band_)
              visit(chunk, me, w);
            else
              visit(chunk, back, progress[image * chunks.count + n], me, w);
          }
          for (int64_t n = 0; in_band_ && n < kStates; ++n) {
            const int64_t at = n * p_.inner + own.begin;
            std::memcpy(p_.next_state + at, w.state + at, own.count() * sizeof(float));
          }
          if (in_band_ && me.index == 0) leave_seen();
        });
  }

 private:
  using Share = Member::Share;

  // x and z [B, T, 2 E], and the first visitors' sums [B, T, E]; of a band, x of the tokens before and after.
  size_t bytes_of_tokens() const {
    if (in_band_) return Scratch::padded((p_.length + seen_) * columns_ * sizeof(Element));
    return Scratch::padded(p_.batch * p_.length * 3 * p_.inner * sizeof(Element));
  }
  size_t bytes_of_team(const MambaChunks& chunks) const {
    return MambaWorkspace<Element>(p_, chunks.rows, nullptr).bytes;
  }

  void visit(const Chunk& c, bool back, Progress& progress, const Member& me,
             const MambaWorkspace<Element>& w) const {
    const Share rows = me.share(c.count, kTileOfRows);
    if (me.index == 0) *w.first = progress.claim();
    me.meet();
    const bool first = *w.first;
    if (first) {
      project(c, rows, w);
      me.meet();
      if (me.index == 0) progress.reach(Progress::kProjected);
    } else {
      progress.wait_for(Progress::kProjected);
    }
    coefficients(c, rows, back, w);
    me.meet();
    const Share channels = me.share(p_.inner, kLanes);
    if (first) {
      scan(c, channels, back, w, [&](int64_t t, int64_t channel, Vector sum) {
        store(sums(c, t) + channel, sum);
      });
      me.meet();
      if (me.index == 0) progress.reach(Progress::kScanned);
    } else {
      progress.wait_for(Progress::kScanned);
      scan(c, channels, back, w, [&](int64_t t, int64_t channel, Vector sum) {
        finish(c, t, channel, sum, load(sums(c, t) + channel), w);
      });
      me.meet();
      answer(c, rows, w);
    }
  }

  void visit(const Chunk& c, const Member& me, const MambaWorkspace<Element>& w) const {
    const Share rows = me.share(c.count, kTileOfRows), channels = me.share(p_.inner, kLanes);
    project(c, rows, w);
    me.meet();
    coefficients(c, rows, p_.reverse, w);
    me.meet();
    if (!p_.merges) {
      Element* out = reinterpret_cast<Element*>(p_.out) + c.start * p_.inner;
      scan(c, channels, p_.reverse, w, [&](int64_t t, int64_t channel, Vector sum) {
        store(out + t * p_.inner + channel, sum);
      });
    } else {
      const Element* side = static_cast<const Element*>(p_.side) + c.start * p_.inner;
      scan(c, channels, p_.reverse, w, [&](int64_t t, int64_t channel, Vector sum) {
        finish(c, t, channel, sum, load(side + t * p_.inner + channel), w);
      });
      me.meet();
      answer(c, rows, w);
    }
    me.meet();
  }

  // x of the tokens before the band, in scan order, lies beside the band's own; as the sequence has them.
  void take_seen() const {
    const float* from = p_.state + kStates * p_.inner;
    Element* to = projected_ + (p_.reverse ? p_.length : 0) * columns_;
    for (int64_t t = 0; t < seen_; ++t)
      for (int64_t i = 0; i < p_.inner; i += kLanes)
        store(to + t * columns_ + i, load(from + t * p_.inner + i));
  }
  void leave_seen() const {
    float* to = p_.next_state + kStates * p_.inner;
    const Element* from = projected_ + (p_.reverse ? 0 : p_.length) * columns_;
    for (int64_t t = 0; t < seen_; ++t)
      for (int64_t i = 0; i < p_.inner; i += kLanes)
        store(to + t * p_.inner + i, load(from + t * columns_ + i));
  }

  // Gate both directions' sums.
  VISION_TTT_INLINE void finish(const Chunk& c, int64_t t, int64_t channel, Vector sum, Vector other,
                                const MambaWorkspace<Element>& w) const {
    const Vector z = load(projected(c, t) + p_.inner + channel);
    store(w.u + t * p_.inner + channel, 0.5f * (rounded(sum, sums_) + other) * silu(z));
  }

  // [x, z] = Linear(RMSNorm(y)).
  void project(const Chunk& c, const Share& rows, const MambaWorkspace<Element>& w) const {
    for (int64_t t = rows.begin; t < rows.end; ++t) {
      const float* y = p_.y + (c.image * p_.length + c.start + t) * p_.dim;
      Vector square{};
      for (int64_t i = 0; i < p_.dim; i += kLanes) square += load(y + i) * load(y + i);
      const float scale = 1.0f / std::sqrt(sum(square) / float(p_.dim) + float(p_.eps));
      for (int64_t i = 0; i < p_.dim; i += kLanes)
        store(w.u + t * p_.dim + i, load(y + i) * scale * load(p_.norm + i));
    }
    Part part(p_.in_proj);
    part.columns = columns_;
    product(w.u + rows.begin * p_.dim, p_.dim, rows.count(), p_.in_proj, part,
            Sink<Element>{projected(c, rows.begin), columns_, columns_});
  }

  // u = SiLU(conv(x)), and from it B, C and δ.
  // Its own function, as scan below, so that a profile tells them apart.
  __attribute__((noinline)) void coefficients(const Chunk& c, const Share& rows, bool back,
                                              const MambaWorkspace<Element>& w) const {
    const MambaDirection& d = back ? p_.back : p_.forth;
    const TokenConvolution1d<Element> convolve{
        projected_ + c.image * p_.length * columns_, d.conv, d.conv_bias, columns_, p_.length + seen_,
        p_.inner, p_.taps, back};
    Element* u = w.u + rows.begin * p_.inner;
    convolve(first_row() + c.start + rows.begin, rows.count(), u);
    const int64_t rank = d.low.columns;
    Element* low = w.low + rows.begin * rank;
    float* delta = w.delta + rows.begin * p_.inner;
    product(u, p_.inner, rows.count(), d.vectors,
            Sink<float>{w.vectors + rows.begin * 2 * kStates, 2 * kStates, 2 * kStates});
    product(u, p_.inner, rows.count(), d.low, Sink<Element>{low, rank, rank});
    product(low, rank, rows.count(), d.steps,
            Sink<float>{delta, p_.inner, p_.inner, d.steps.bias});
    for (int64_t i = 0; i < rows.count() * p_.inner; i += kLanes)
      store(delta + i, softplus(load(delta + i)).value);
  }

  template <class Finish>
  __attribute__((noinline)) void scan(const Chunk& c, const Share& channels, bool back,
                                      const MambaWorkspace<Element>& w,
                                      const Finish& finish) const {
    const MambaDirection& d = back ? p_.back : p_.forth;
    const ScanOfTokens<Element> advance{w.u, w.delta, w.vectors, d.decay, d.skip, p_.inner, c.count,
                                        back};
    for (int64_t channel = channels.begin; channel < channels.end; channel += kLanes)
      advance(channel, w.state, [&](int64_t t, Vector sum) { finish(t, channel, sum); });
  }

  // y + Linear(gated sums).
  void answer(const Chunk& c, const Share& rows, const MambaWorkspace<Element>& w) const {
    const int64_t at = (c.image * p_.length + c.start + rows.begin) * p_.dim;
    product(w.u + rows.begin * p_.inner, p_.inner, rows.count(), p_.out_proj,
            Sink<float>{p_.out + at, p_.dim, p_.dim, nullptr, nullptr, p_.y + at, p_.dim});
  }

  Element* projected(const Chunk& c, int64_t t) const {
    return projected_ + (c.image * p_.length + first_row() + c.start + t) * columns_;
  }
  Element* sums(const Chunk& c, int64_t t) const {
    return sums_ + (c.image * p_.length + c.start + t) * p_.inner;
  }

  // Of the band's own tokens.
  int64_t first_row() const { return p_.reverse ? 0 : seen_; }

  const PackedMambaBlock& p_;
  bool in_band_;
  int64_t columns_;  // of x and z, or of x
  int64_t seen_;     // tokens before a band that the convolution sees
  Element* projected_;
  Element* sums_;
};

}  // namespace
