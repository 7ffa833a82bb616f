// A block of ViT³ on packed weights: two or three passes over chunks of tokens, and the inner models'
// steps between the first and the second.
#pragma once

#include "../convolutions/conv2d/conv2d.h"
#include "../convolutions/conv2d/token.h"
#include "../floats.h"
#include "../products/matmul.h"
#include "blocks.h"
#include "mlp.h"

namespace {

// Rotate the pairs of neighbouring numbers of x, given cos and sin of their angles.
VISION_TTT_INLINE void rotate_row(float* x, const float* turns, int64_t count) {
  for (int64_t i = 0; i < count; i += 2) {
    const float a = x[i], b = x[i + 1], cos = turns[i], sin = turns[i + 1];
    x[i] = a * cos - b * sin;
    x[i + 1] = a * sin + b * cos;
  }
}

template <class Element>
struct Vit3Passes {
  const PackedVit3Block& p;
  bool in_band, learns, answers;
  int64_t skipped;     // tokens of y before those that are projected: a band's and a row around it
  int64_t rows;        // of these tokens
  int64_t lead, own;   // those of the row above, those of the image or the band
  Chunks chunks;       // of the projected tokens
  int64_t d, groups;   // channels of a head; groups of chunks with a common sum, per image
  int64_t unit;        // numbers of [W₂ W₁]
  Layout parts;        // of the scratch:
  float* small;        // [B, T, 3 d]: queries, keys and values of the convolution
  float* ascents;      // [B, groups, H, d, 2 d]
  float* units;        // [B, H, d, 2 d], after the step
  float* kernels;      // [B, 3 · 3, d], after the step
  Element* queries;    // [B, T, D]
  Element* hidden;     // [B, T, hidden], where the MLP convolves

  explicit Vit3Passes(const PackedVit3Block& block)
      : p(block), in_band(block.sums || block.all_sums), learns(!block.all_sums), answers(!block.sums),
        skipped((block.above - (block.above > 0)) * block.width),
        rows(block.height - skipped / block.width - (block.below - (block.below > 0))),
        lead((block.above > 0) * block.width),
        own(block.length - (block.above + block.below) * block.width),
        chunks(block.batch, rows * block.width, block.threads), d(block.dim / block.heads),
        groups(chunks.groups(block.threads)), unit(2 * d * d), parts(block.scratch) {
    const int64_t tokens = p.batch * chunks.length;
    small = parts.take(tokens * 3 * d);
    ascents = parts.take(p.batch * groups * p.heads * unit);
    units = parts.take(p.batch * p.heads * unit);
    kernels = parts.take(p.batch * 9 * d);
    queries = parts.take<Element>(tokens * p.dim);
    hidden = parts.take<Element>(p.mlp_conv ? tokens * p.fc1.columns : 0);
  }

  size_t bytes() const { return parts.bytes(); }

  int run() const {
    int failed = project();
    if (failed) return failed;
    if (learns) sum();
    if (!answers) return 0;
    step();
    failed = answer();
    return failed || !p.mlp_conv ? failed : convolve_hidden();
  }

  // y ← y + conv(y) + bias, q, k, v = Linear(LN(y)), and the gated units' gradients from their keys and
  // values, which are not stored. Of a band either the queries are missing, or the keys and values.
  int project() const {
    const TokenConvolution<float> convolve{p.dim, p.height, p.width, p.dim, 3,
                                           p.conv2d, p.dim, p.conv2d_bias, true};
    const size_t most = kRowsOfChunk, columns = p.qkv.columns;
    const size_t bytes = Scratch::padded(most * p.dim * sizeof(Element)) +
                         Scratch::padded(most * columns * sizeof(float)) +
                         Scratch::padded(most * 2 * d * sizeof(float)) +
                         (in_band ? Scratch::padded(most * p.dim * sizeof(float)) : 0);
    const auto ascent_of = [this](int64_t group) { return ascents + group * p.heads * unit; };
    return for_each_group(
        chunks, groups, p.threads, bytes,
        [&](int64_t group) { std::memset(ascent_of(group), 0, p.heads * unit * sizeof(float)); },
        [&](int64_t group, const Chunk& c, Scratch& scratch) {
          const int64_t place = skipped + c.start;
          const float* given = p.y + (c.image * p.length + place) * p.dim;
          float* y = in_band ? scratch.take(c.count * p.dim)
                             : p.out + (c.image * own + c.start) * p.dim;
          for (int64_t t = 0; t < c.count; ++t) convolve(given + t * p.dim, place + t, y + t * p.dim);
          Element* x = scratch.take<Element>(c.count * p.dim);
          normalise_rows(y, c.count, p.dim, p.norm1, c.image, x);
          float* views = scratch.take(c.count * columns);
          if (answers && learns) {
            project(x, c.count, 0, columns, views);
          } else if (learns) {
            project(x, c.count, p.dim, columns - p.dim, views);
          } else {
            project(x, c.count, 0, p.dim, views);
            project(x, c.count, 3 * p.dim, d, views);
          }
          keep(views, c);
          const Chunk inside = inside_of(c);
          const int64_t before = inside.start + lead - c.start;
          if (learns && inside.count)
            climb(views + before * columns, inside.count, ascent_of(group),
                  scratch.take(inside.count * 2 * d));
          if (in_band && answers && inside.count)
            std::memcpy(p.out + inside.start * p.dim, y + before * p.dim,
                        inside.count * p.dim * sizeof(float));
        });
  }

  // Some columns of the views.
  void project(const Element* x, int64_t count, int64_t first, int64_t columns, float* views) const {
    Part part(p.qkv);
    part.first = first, part.columns = columns;
    product(x, p.dim, count, p.qkv, part,
            Sink<float>{views + first, p.qkv.columns, columns, p.qkv.bias + first});
  }

  // The tokens of the image or the band among a chunk of projected ones, counted from their first one.
  Chunk inside_of(const Chunk& c) const {
    const int64_t from = c.start - lead, begin = from < 0 ? 0 : from;
    const int64_t stop = from + c.count < own ? from + c.count : own;
    return {c.image, begin, stop > begin ? stop - begin : 0};
  }

  // Rotate queries and keys; store the queries, and the queries, keys and values of the convolution. Around a
  // band its values are zero: the bands that have them count them.
  void keep(float* views, const Chunk& c) const {
    const Chunk inside = inside_of(c);
    for (int64_t t = 0; t < c.count; ++t, views += p.qkv.columns) {
      if (p.rotations) {
        const float* turns = p.rotations + (c.start + t) * p.dim;
        rotate_row(views, turns, p.dim);
        rotate_row(views + p.dim, turns, p.dim);
      }
      const int64_t token = c.start + t - lead;
      const bool is_inside = token >= inside.start && token < inside.start + inside.count;
      float* views_of_kernels = small + (c.image * chunks.length + c.start + t) * 3 * d;
      if (answers) std::memcpy(views_of_kernels, views + 3 * p.dim, d * sizeof(float));
      if (learns) {
        std::memcpy(views_of_kernels + d, views + 3 * p.dim + d, 2 * d * sizeof(float));
        if (!is_inside) std::memset(views_of_kernels + 2 * d, 0, d * sizeof(float));
      }
      if (!answers || !is_inside) continue;
      Element* q = queries + (c.image * own + token) * p.dim;
      for (int64_t i = 0; i < p.dim; i += kLanes) store(q + i, load(views + i));
    }
  }

  // Per head, with z = k [W₂ W₁] and σ = σ(z₂), the ascent is Σ kᵀ [v z₁ (σ + z₂ σ (1 - σ)), v z₂ σ].
  void climb(const float* views, int64_t rows, float* ascent, float* z) const {
    const int64_t row = p.qkv.columns;
    for (int64_t h = 0; h < p.heads; ++h) {
      const float *k = views + p.dim + h * d, *v = views + 2 * p.dim + h * d;
      ::product<false>(rows, 2 * d, {d, k, row, 1, p.units + h * unit, 2 * d, z, 2 * d});
      for (int64_t t = 0; t < rows; ++t) {
        float *z2 = z + t * 2 * d, *z1 = z2 + d;
        for (int64_t i = 0; i < d; i += kLanes) {
          const Vector target = load(v + t * row + i);
          const Swish f = swish(load(z2 + i));
          store(z2 + i, target * load(z1 + i) * f.derivative);
          store(z1 + i, target * f.value);
        }
      }
      float* sum = ascent + h * unit;
      ::product<true>(d, 2 * d, {rows, k, 1, row, z, 2 * d, sum, 2 * d, sum, 2 * d});
    }
  }

  // The ascents, summed over the tokens.
  void sum() const {
    float* of_units = in_band ? p.sums : units;
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
    for (int64_t task = 0; task < p.batch * p.heads; ++task) {
      const int64_t image = task / p.heads, h = task % p.heads;
      const float* of_groups = ascents + (image * groups * p.heads + h) * unit;
      add_up(of_groups, groups, p.heads * unit, unit, of_units + task * unit);
    }
    for (int64_t image = 0; image < p.batch; ++image) {
      float* data = small + image * chunks.length * 3 * d;
      const Conv2d correlation{{data + d, 0, 3 * d}, {data + 2 * d, 0, 3 * d}, nullptr, 1, rows,
                               p.width, d, 3, p.threads};
      vision_ttt_conv2d_weight(&correlation, in_band ? p.sums + p.heads * unit : kernels + image * 9 * d);
    }
  }

  // W' = W + a / (‖a‖ + 1) with a the mean ascent and a norm per output column.
  void step() const {
    const float scale = float(p.loss_scale / double(in_band ? p.total : p.length));
    const float* of_units = in_band ? p.all_sums : units;
    const float* of_kernels = in_band ? p.all_sums + p.heads * unit : kernels;
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
    for (int64_t task = 0; task < p.batch * p.heads; ++task) {
      for (int64_t i = task * unit; i < (task + 1) * unit; i += kLanes)
        store(units + i, load(of_units + i) * scale);
      clip_and_add(p.units + task % p.heads * unit, d, 2 * d, units + task * unit);
    }
    for (int64_t image = 0; image < p.batch; ++image) {
      float* w = kernels + image * 9 * d;
      for (int64_t i = 0; i < 9 * d; i += kLanes)
        store(w + i, load(of_kernels + image * 9 * d + i) * scale);
      clip_and_add(p.kernels, 9, d, w);
    }
  }

  // a [rows, columns] ← w + a / (‖a‖ + 1), with a norm per column.
  static void clip_and_add(const float* w, int64_t rows, int64_t columns, float* a) {
    for (int64_t i = 0; i < columns; i += kLanes) {
      Vector square{};
      for (int64_t r = 0; r < rows; ++r) {
        const Vector x = load(a + r * columns + i);
        square += x * x;
      }
      Vector length{};
      for (int lane = 0; lane < kLanes; ++lane) length[lane] = std::sqrt(square[lane]);
      const Vector share = 1.0f / (length + 1.0f);
      for (int64_t r = 0; r < rows; ++r) {
        float* x = a + r * columns + i;
        store(x, load(w + r * columns + i) + load(x) * share);
      }
    }
  }

  // y ← y + g₁ ⊙ Linear([o₁, o₂]), y ← y + g₂ ⊙ MLP(LN(y)).
  int answer() const {
    const GeluMlp<Element> mlp{p.fc1, p.fc2, p.tanh_gelu != 0};
    const Chunks shares(p.batch, own, p.threads);
    const size_t most = shares.most(), width = p.proj.inner;
    const size_t bytes = Scratch::padded(most * width * sizeof(Element)) +
                         Scratch::padded(most * p.dim * sizeof(Element)) +
                         Scratch::padded(most * d * sizeof(float)) +
                         Scratch::padded(most * 2 * d * sizeof(float)) + mlp.bytes(most);
    return for_each_chunk(shares, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
      const int64_t first = c.image * own + c.start;
      float* y = p.out + first * p.dim;
      Element* o = scratch.take<Element>(c.count * width);
      ask(c, first, o, scratch);
      product(o, p.proj.inner, c.count, p.proj,
              Sink<float>{y, p.dim, p.dim, p.proj.bias, of(p.gate1, c.image), y, p.dim},
              mlp.begin(0));
      Element* x = scratch.take<Element>(c.count * p.dim);
      normalise_rows(y, c.count, p.dim, p.norm2, c.image, x);
      if (!p.mlp_conv) return mlp(x, c.count, of(p.gate2, c.image), y, scratch);
      float* z = scratch.take(c.count * kHiddenAtOnce);
      for (int64_t start = 0; start < p.fc1.columns; start += kHiddenAtOnce) {
        const int64_t count = mlp.hidden_at(start);
        mlp.first(x, c.count, start, count, z);
        for (int64_t t = 0; t < c.count; ++t)
          gelu_numbers(z + t * count, count, mlp.tanh_form,
                       hidden + (first + t) * p.fc1.columns + start);
      }
    });
  }

  // o [rows, D + d]: the gated units' outputs, SiLU(q W₂') ⊙ q W₁', then the convolution's.
  void ask(const Chunk& c, int64_t first, Element* o, Scratch& scratch) const {
    const int64_t width = p.proj.inner;
    float* q = scratch.take(c.count * d);
    float* z = scratch.take(c.count * 2 * d);
    for (int64_t h = 0; h < p.heads; ++h) {
      for (int64_t t = 0; t < c.count; ++t)
        for (int64_t i = 0; i < d; i += kLanes)
          store(q + t * d + i, load(queries + (first + t) * p.dim + h * d + i));
      multiply(c.count, d, 2 * d, q, d, units + (c.image * p.heads + h) * unit, z);
      for (int64_t t = 0; t < c.count; ++t)
        swiglu_numbers(z + t * 2 * d, z + t * 2 * d + d, d, o + t * width + h * d);
    }
    const TokenConvolution<float> convolve{
        3 * d, rows, p.width, d, 3, kernels + c.image * 9 * d, d, nullptr, false};
    const float* queries_of_kernels = small + c.image * chunks.length * 3 * d;
    for (int64_t t = 0; t < c.count; ++t) {
      const int64_t place = lead + c.start + t;
      convolve(queries_of_kernels + place * 3 * d, place, q);
      for (int64_t i = 0; i < d; i += kLanes) store(o + t * width + p.dim + i, load(q + i));
    }
  }

  // y ← y + g₂ ⊙ (W₂ GELU(h + conv(h)) + b₂), given the hidden units h of all tokens.
  int convolve_hidden() const {
    const GeluMlp<Element> mlp{p.fc1, p.fc2, p.tanh_gelu != 0};
    const int64_t columns = p.fc1.columns;
    const Chunks shares(p.batch, p.length, p.threads);
    return for_each_chunk(shares, p.threads, mlp.bytes(shares.most()), [&](const Chunk& c,
                                                                           Scratch& scratch) {
      const int64_t first = c.image * p.length + c.start;
      float* z = scratch.take(c.count * kHiddenAtOnce);
      Element* h = scratch.take<Element>(c.count * kHiddenAtOnce);
      for (int64_t start = 0; start < columns; start += kHiddenAtOnce) {
        const int64_t count = mlp.hidden_at(start);
        const TokenConvolution<Element> convolve{
            columns, p.height,          p.width, count,
            3,       p.mlp_conv + start, columns, p.mlp_conv_bias + start,
            true};
        for (int64_t t = 0; t < c.count; ++t)
          convolve(hidden + (first + t) * columns + start, c.start + t, z + t * count);
        gelu_numbers(z, c.count * count, mlp.tanh_form, h);
        mlp.second(h, c.count, start, count, of(p.gate2, c.image), p.out + first * p.dim);
      }
    });
  }

 private:
  const float* of(const float* gate, int64_t image) const {
    return gate ? gate + image * p.gate_stride : nullptr;
  }
};

}  // namespace
