// A Vittt block on packed weights: two passes over chunks of tokens, with the learner's between them.
#pragma once

#include "../convolutions/conv2d/token.h"
#include "blocks.h"
#include "mlp.h"

namespace {

template <class Element>
struct VitttPasses {
  const PackedVitttBlock& p;
  Chunks chunks;
  int64_t inner;     // columns of each view
  Element* views;    // [B, T, columns]: k, q unless it is k, v; the learner's outputs replace v
  float* logits;     // [B, T, H]
  Pieces next;       // of the weight that is multiplied with after this block

  explicit VitttPasses(const PackedVitttBlock& block, const Pieces& after = {})
      : p(block), chunks(block.batch, block.length, block.threads),
        inner(block.directions * block.dim), views(static_cast<Element*>(block.scratch)),
        logits(reinterpret_cast<float*>(static_cast<char*>(block.scratch) + views_bytes(block))),
        next(after) {}

  static size_t views_bytes(const PackedVitttBlock& p) {
    return Buffers::padded(p.batch * p.length * p.views.columns * sizeof(Element));
  }
  static size_t bytes(const PackedVitttBlock& p) {
    return views_bytes(p) + p.batch * p.length * p.heads * sizeof(float);
  }

  int run() const {
    int failed = project();
    if (!failed) failed = learn();
    return failed ? failed : answer();
  }

  // y ← y + conv(y), k, q, v = Linear(LN(y)), and the rates' logits.
  int project() const {
    const TokenConvolution<float> convolve{p.dim, p.height, p.width, p.dim, p.kernel,
                                           p.conv2d, p.dim, nullptr, true};
    const size_t bytes = Buffers::padded(chunks.most() * p.dim * sizeof(Element));
    return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Buffers& buffers) {
      const int64_t first = c.image * p.length + c.start;
      float* y = p.out + first * p.dim;
      if (p.conv2d)
        for (int64_t t = 0; t < c.count; ++t)
          convolve(p.y + (first + t) * p.dim, c.start + t, y + t * p.dim);
      else
        std::memcpy(y, p.y + first * p.dim, c.count * p.dim * sizeof(float));
      Element* x = buffers.take<Element>(c.count * p.dim);
      normalise_rows(y, c.count, p.dim, p.norm, c.image, x);
      const int64_t columns = p.views.columns;
      product(x, p.dim, c.count, p.views,
              Sink<Element>{views + first * columns, columns, columns}, begin_of<Element>(p.rates));
      product(x, p.dim, c.count, p.rates,
              Sink<float>{logits + first * p.heads, p.heads, p.heads, p.rates.bias},
              begin_of<Element>(p.gate.data ? p.gate : p.out_proj));
    });
  }

  int learn() const {
    const int64_t columns = p.views.columns, head_dim = inner / p.heads;
    auto tokens = [&](Element* data) {
      return Tokens{data, p.length * columns, columns, head_dim};
    };
    Element* q = p.shared_qk ? views : views + inner;
    Problem problem{};
    problem.q = tokens(q), problem.k = tokens(views), problem.v = tokens(values());
    problem.conv_q = p.conv_q, problem.conv_k = p.conv_k;
    problem.eta = logits;
    problem.initial = p.initial;
    problem.ln_weight = p.inner_weight, problem.ln_bias = p.inner_bias;
    problem.scale = p.scale;
    problem.batch = p.batch, problem.length = p.length;
    problem.heads = p.heads, problem.dim = head_dim;
    problem.mini_batch_size = p.mini_batch_size;
    problem.reverse_heads = p.heads / p.directions * (p.directions - 1);
    problem.interval = 1;
    problem.taps = p.taps;
    problem.scale_heads = p.heads / p.directions;
    problem.is_bfloat16 = problem.rounds = p.is_bfloat16;
    problem.threads = p.threads;
    problem.eps = p.inner_eps, problem.rate = p.rate;
    // The learner reads a mini-batch's targets before it writes the outputs.
    const Outputs outputs{tokens(values()), {}, {}};
    return p.is_mlp ? vision_ttt_ttt_mlp_forward(&problem, &outputs)
                    : vision_ttt_ttt_linear_forward(&problem, &outputs);
  }

  // y ← y + Linear(merge(z)), y ← y + MLP(LN(y)). The gate's logits need the norm of `project` again: to
  // compute it twice costs less than to store the logits.
  int answer() const {
    const SwiGluMlp<Element> mlp{p.mlp_gate, p.mlp_value, p.mlp_out};
    const size_t rows = chunks.most();
    const size_t bytes = 2 * Buffers::padded(rows * p.dim * sizeof(Element)) +
                         Buffers::padded(rows * p.dim * sizeof(float)) + mlp.bytes(rows);
    const int64_t columns = p.views.columns;
    return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Buffers& buffers) {
      const int64_t first = c.image * p.length + c.start;
      float* y = p.out + first * p.dim;
      Element* x = buffers.take<Element>(c.count * p.dim);
      Element* merged = buffers.take<Element>(c.count * p.dim);
      float* gate = p.gate.data ? buffers.take<float>(c.count * p.dim) : nullptr;
      if (gate) {
        normalise_rows(y, c.count, p.dim, p.norm, c.image, x);
        product(x, p.dim, c.count, p.gate, Sink<float>{gate, p.dim, p.dim},
                begin_of<Element>(p.out_proj));
      }
      merge_rows(values() + first * columns, columns, gate, c.count, p.dim, p.directions,
                 p.post_weight, p.post_bias, p.post_eps, merged);
      product(merged, p.dim, c.count, p.out_proj,
              Sink<float>{y, p.dim, p.dim, nullptr, nullptr, y, p.dim}, begin_of<Element>(p.mlp_gate));
      normalise_rows(y, c.count, p.dim, p.mlp_norm, c.image, x);
      mlp(x, c.count, y, buffers, next);
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
