// A Vittt block on packed weights: two passes over chunks of tokens, with the learner's between them.
#pragma once

#include "../convolutions/conv2d/token.h"
#include "blocks.h"
#include "mlp.h"

namespace {

// A band's state by its parts; the last two are those of the tokens before the band, as the sequence has them.
struct VitttState {
  State model;
  float *views, *logits;

  VitttState(const float* state, const PackedVitttBlock& p, int64_t seen) {
    float* at = const_cast<float*>(state);
    const auto take = [&](int64_t count) { return at += count, at - count; };
    const int64_t wide = p.is_mlp ? 4 * p.dim : p.dim;
    model = {take(p.dim / p.heads * wide), take(wide), nullptr, nullptr};
    if (p.is_mlp) model.w2 = take(p.dim / p.heads * wide), model.b2 = take(p.dim);
    views = take(seen * p.views.columns);
    logits = take(seen * p.heads);
  }
  // Of the model's, which lie one after the other.
  int64_t numbers() const { return views - model.w1; }
};

template <class Element>
struct VitttPasses {
  const PackedVitttBlock& p;
  bool in_bands, merges;
  int64_t scans;        // directions that are scanned
  int64_t skipped;      // tokens of y before the first one
  int64_t length;       // tokens of an image or of a band
  int64_t seen;         // tokens before a band of which its state tells
  Chunks chunks;
  int64_t inner;        // columns of each view
  Element* views;       // [B, T, columns]: k, q unless it is k, v; the learner's outputs replace v
  float* logits;        // [B, T, H]
  Pieces next;          // of the weight that is multiplied with after this block

  explicit VitttPasses(const PackedVitttBlock& block, const Pieces& after = {})
      : p(block), in_bands(block.state), merges(!in_bands || block.merges),
        scans(in_bands ? 1 : block.directions), skipped(block.above * block.width),
        length(block.length - (block.above + block.below) * block.width),
        seen(in_bands ? seen_by(block) : 0), chunks(block.batch, length, block.threads),
        inner(scans * block.dim), views(static_cast<Element*>(block.scratch)),
        logits(reinterpret_cast<float*>(static_cast<char*>(block.scratch) + views_bytes())),
        next(after) {
    if (!block.reverse) views += seen * block.views.columns, logits += seen * block.heads;
  }

  // What the convolutions and an open mini-batch need.
  static int64_t seen_by(const PackedVitttBlock& p) {
    return (p.taps ? p.taps - 1 : 0) + p.mini_batch_size - 1;
  }
  size_t views_bytes() const {
    return Scratch::padded(p.batch * (seen + length) * p.views.columns * sizeof(Element));
  }
  size_t bytes() const { return views_bytes() + p.batch * (seen + length) * p.heads * sizeof(float); }

  int run() const {
    int failed = project();
    if (!failed) failed = in_bands ? learn_from_state() : learn(0, length, p.initial, {});
    return failed ? failed : merges ? answer() : give_outputs();
  }

  // y ← y + conv(y), k, q, v = Linear(LN(y)), and the rates' logits.
  int project() const {
    const TokenConvolution<float> convolve{p.dim, p.height, p.width, p.dim, p.kernel,
                                           p.conv2d, p.dim, nullptr, true};
    const size_t rows = chunks.most();
    const size_t bytes = Scratch::padded(rows * p.dim * sizeof(Element)) +
                         (merges ? 0 : Scratch::padded(rows * p.dim * sizeof(float)));
    return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
      const int64_t first = c.image * length + c.start, place = skipped + c.start;
      const float* given = p.y + (c.image * p.length + place) * p.dim;
      float* y = merges ? p.out + first * p.dim : scratch.take(c.count * p.dim);
      if (p.conv2d)
        for (int64_t t = 0; t < c.count; ++t) convolve(given + t * p.dim, place + t, y + t * p.dim);
      else
        std::memcpy(y, given, c.count * p.dim * sizeof(float));
      Element* x = scratch.take<Element>(c.count * p.dim);
      normalise_rows(y, c.count, p.dim, p.norm, c.image, x);
      const int64_t columns = p.views.columns;
      product(x, p.dim, c.count, p.views,
              Sink<Element>{views + first * columns, columns, columns}, begin_of<Element>(p.rates));
      product(x, p.dim, c.count, p.rates,
              Sink<float>{logits + first * p.heads, p.heads, p.heads, p.rates.bias},
              begin_of<Element>(p.gate.data ? p.gate : p.out_proj));
    });
  }

  // Of `count` tokens from `first` on.
  int learn(int64_t first, int64_t count, const State& before, const State& behind) const {
    const int64_t columns = p.views.columns, head_dim = inner / p.heads;
    auto tokens = [&](Element* data) {
      return Tokens{data + first * columns, length * columns, columns, head_dim};
    };
    Element* q = p.shared_qk ? views : views + inner;
    Problem problem{};
    problem.q = tokens(q), problem.k = tokens(views), problem.v = tokens(values());
    problem.conv_q = p.conv_q, problem.conv_k = p.conv_k;
    problem.eta = logits + first * p.heads;
    problem.initial = before;
    problem.ln_weight = p.inner_weight, problem.ln_bias = p.inner_bias;
    problem.scale = p.scale;
    problem.batch = p.batch, problem.length = count;
    problem.heads = p.heads, problem.dim = head_dim;
    problem.mini_batch_size = p.mini_batch_size;
    problem.reverse_heads = in_bands ? p.reverse * p.heads : p.heads / scans * (scans - 1);
    problem.interval = 1;
    problem.taps = p.taps;
    problem.seen = in_bands && p.taps ? p.taps - 1 : 0;
    problem.scale_heads = p.heads / scans;
    problem.is_bfloat16 = problem.rounds = p.is_bfloat16;
    problem.threads = p.threads;
    problem.eps = p.inner_eps, problem.rate = p.rate;
    // The learner reads a mini-batch's targets before it writes the outputs.
    const Outputs outputs{tokens(values()), behind, {}};
    return p.is_mlp ? vision_ttt_ttt_mlp_forward(&problem, &outputs)
                    : vision_ttt_ttt_linear_forward(&problem, &outputs);
  }

  // The tokens of the open mini-batch are learnt from again with those that complete it: their views are in
  // the state, and its model is the one before that mini-batch.
  int learn_from_state() const {
    const int64_t numbers = seen * p.views.columns, first = p.reverse ? length : -seen;
    const int64_t last = p.reverse ? 0 : length - seen;
    const VitttState before(p.state, p, seen), behind(p.next_state, p, seen);
    Element* given = views + first * p.views.columns;
    for (int64_t i = 0; i < numbers; i += kLanes) store(given + i, load(before.views + i));
    std::memcpy(logits + first * p.heads, before.logits, seen * p.heads * sizeof(float));
    const Element* kept = views + last * p.views.columns;
    for (int64_t i = 0; i < numbers; i += kLanes) store(behind.views + i, load(kept + i));
    std::memcpy(behind.logits, logits + last * p.heads, seen * p.heads * sizeof(float));

    const int64_t count = p.open + length, whole = count / p.mini_batch_size * p.mini_batch_size;
    int failed = 0;
    if (whole)
      failed = learn(p.reverse ? count - whole : -p.open, whole, before.model, behind.model);
    else
      std::memcpy(behind.model.w1, before.model.w1, before.numbers() * sizeof(float));
    if (failed || whole == count) return failed;
    return learn(p.reverse ? 0 : whole - p.open, count - whole, behind.model, {});
  }

  // y ← y + Linear(merge(z)), y ← y + MLP(LN(y)). The gate's logits need the norm of `project` again: to
  // compute it twice costs less than to store the logits.
  int answer() const {
    const SwiGluMlp<Element> mlp{p.mlp_gate, p.mlp_value, p.mlp_out};
    const size_t rows = chunks.most(), pair = p.side ? 2 * p.dim : 0;
    const size_t bytes = 2 * Scratch::padded(rows * p.dim * sizeof(Element)) +
                         Scratch::padded(rows * pair * sizeof(Element)) +
                         Scratch::padded(rows * p.dim * sizeof(float)) + mlp.bytes(rows);
    return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
      const int64_t first = c.image * length + c.start;
      float* y = p.out + first * p.dim;
      Element* x = scratch.take<Element>(c.count * p.dim);
      Element* merged = scratch.take<Element>(c.count * p.dim);
      float* gate = p.gate.data ? scratch.take(c.count * p.dim) : nullptr;
      if (gate) {
        normalise_rows(y, c.count, p.dim, p.norm, c.image, x);
        product(x, p.dim, c.count, p.gate, Sink<float>{gate, p.dim, p.dim},
                begin_of<Element>(p.out_proj));
      }
      const Element* z = values() + first * p.views.columns;
      int64_t z_row = p.views.columns;
      if (p.side) z = with_side(z, c, scratch.take<Element>(c.count * pair)), z_row = pair;
      merge_rows(z, z_row, gate, c.count, p.dim, p.directions, p.post_weight, p.post_bias, p.post_eps,
                 merged);
      product(merged, p.dim, c.count, p.out_proj,
              Sink<float>{y, p.dim, p.dim, nullptr, nullptr, y, p.dim}, begin_of<Element>(p.mlp_gate));
      normalise_rows(y, c.count, p.dim, p.mlp_norm, c.image, x);
      mlp(x, c.count, y, scratch, next);
    });
  }

  // Rows of both directions' outputs, the band's own first.
  const Element* with_side(const Element* z, const Chunk& c, Element* rows) const {
    const Element* side = static_cast<const Element*>(p.side) + c.start * p.dim;
    for (int64_t t = 0; t < c.count; ++t, z += p.views.columns) {
      std::memcpy(rows + 2 * t * p.dim, z, p.dim * sizeof(Element));
      std::memcpy(rows + (2 * t + 1) * p.dim, side + t * p.dim, p.dim * sizeof(Element));
    }
    return rows;
  }

  int give_outputs() const {
    return for_each_chunk(chunks, p.threads, 0, [&](const Chunk& c, Scratch&) {
      Element* out = reinterpret_cast<Element*>(p.out) + c.start * p.dim;
      const Element* z = values() + c.start * p.views.columns;
      for (int64_t t = 0; t < c.count; ++t)
        std::memcpy(out + t * p.dim, z + t * p.views.columns, p.dim * sizeof(Element));
    });
  }

  Element* values() const { return views + (p.shared_qk ? inner : 2 * inner); }
};

// The blocks one after the other; the results of all but the last alternate between two tensors.
template <class Element>
int run_vittt_blocks(const PackedVitttBlock* blocks) {
  const PackedVitttBlock& first = blocks[0];
  float* const results[] = {first.out, first.between};
  const float* y = first.y;
  int failed = 0;
  for (int64_t i = 0; i < first.count && !failed; ++i) {
    const int64_t left = first.count - 1 - i;
    PackedVitttBlock block = blocks[i];
    block.y = y, block.out = results[left % 2];
    block.scratch = first.scratch, block.threads = first.threads;
    const Pieces next = left ? begin_of<Element>(blocks[i + 1].views) : Pieces{};
    failed = VitttPasses<Element>(block, next).run();
    y = block.out;
  }
  return failed;
}

}  // namespace
