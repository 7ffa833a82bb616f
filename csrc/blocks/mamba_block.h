// The block of Vim and Mamba-Reg on packed weights.
//
// Either direction visits the chunks of an image in its own order. The first visitor of a chunk projects
// its tokens and stores its scan's sums; the second adds its own sums, gates them and projects the result.
// Two directions that run at the same time meet in the middle. Nothing is computed twice.
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
  size_t bytes = 0;

  MambaWorkspace(const PackedMambaBlock& p, int64_t rows, char* memory) {
    auto take = [&](auto*& piece, int64_t count) {
      piece = reinterpret_cast<std::remove_reference_t<decltype(piece)>>(memory + bytes);
      bytes += Buffers::padded(count * sizeof(*piece));
    };
    take(u, rows * (p.inner > p.dim ? p.inner : p.dim));
    take(low, rows * p.forth.low.columns);
    take(delta, rows * p.inner);
    take(vectors, rows * 2 * kStates);
    take(state, kStates * p.inner);
    take(first, 1);
  }
};

template <class Element>
class MambaPasses {
 public:
  explicit MambaPasses(const PackedMambaBlock& block)
      : p_(block), projected_(static_cast<Element*>(block.scratch)),
        sums_(projected_ + block.batch * block.length * 2 * block.inner) {}

  int64_t bytes() const {
    const MambaTasks tasks(p_.batch, p_.threads);
    const MambaChunks chunks(p_.length, tasks.smallest_team());
    return bytes_of_tokens() + tasks.teams * bytes_of_team(chunks);
  }

  int run() const {
    const int64_t most_chunks = MambaChunks(p_.length, 1).count;
    const std::unique_ptr<Progress[]> progress(new (std::nothrow) Progress[p_.batch * most_chunks]);
    if (!progress) return 1;
    return for_each_direction(
        p_.batch, p_.length, p_.threads,
        [&](int64_t image, bool back, const MambaChunks& chunks, const Member& me) {
          char* memory = static_cast<char*>(p_.scratch) + bytes_of_tokens();
          const MambaWorkspace<Element> w(p_, chunks.rows, memory + me.team * bytes_of_team(chunks));
          const Share own = me.share(p_.inner, kLanes);
          for (int64_t n = 0; n < kStates; ++n)
            std::memset(w.state + n * p_.inner + own.begin, 0, own.count() * sizeof(float));
          for (int64_t i = 0; i < chunks.count; ++i) {
            const int64_t n = back ? chunks.count - 1 - i : i;
            const Chunk chunk{image, chunks.begin(n), chunks.begin(n + 1) - chunks.begin(n)};
            visit(chunk, back, progress[image * chunks.count + n], me, w);
          }
        });
  }

 private:
  using Share = Member::Share;

  // x and z [B, T, 2 E], and the first visitors' sums [B, T, E].
  size_t bytes_of_tokens() const {
    return Buffers::padded(p_.batch * p_.length * 3 * p_.inner * sizeof(Element));
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
        const Vector both = rounded(sum, sums_) + load(sums(c, t) + channel);
        const Vector z = load(projected(c, t) + p_.inner + channel);
        store(w.u + t * p_.inner + channel, 0.5f * both * silu(z));
      });
      me.meet();
      answer(c, rows, w);
    }
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
    const int64_t columns = 2 * p_.inner;
    product(w.u + rows.begin * p_.dim, p_.dim, rows.count(), p_.in_proj,
            Sink<Element>{projected(c, rows.begin), columns, columns});
  }

  // u = SiLU(conv(x)), and from it B, C and δ.
  // Its own function, as scan below, so that a profile tells them apart.
  __attribute__((noinline)) void coefficients(const Chunk& c, const Share& rows, bool back,
                                              const MambaWorkspace<Element>& w) const {
    const MambaDirection& d = back ? p_.back : p_.forth;
    const TokenConvolution1d<Element> convolve{
        projected_ + c.image * p_.length * 2 * p_.inner, d.conv, d.conv_bias, 2 * p_.inner, p_.length,
        p_.inner, p_.taps, back};
    Element* u = w.u + rows.begin * p_.inner;
    convolve(c.start + rows.begin, rows.count(), u);
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
    return projected_ + (c.image * p_.length + c.start + t) * 2 * p_.inner;
  }
  Element* sums(const Chunk& c, int64_t t) const {
    return sums_ + (c.image * p_.length + c.start + t) * p_.inner;
  }

  const PackedMambaBlock& p_;
  Element* projected_;
  Element* sums_;
};

}  // namespace
