// A block of a ViT made linear, on packed weights: passes over chunks of tokens, between which the keys are
// normalised and the inner models make their step.
#pragma once

#include "../convolutions/conv2d/token.h"
#include "../floats.h"
#include "../products/matmul.h"
#include "blocks.h"
#include "mlp.h"

namespace {

template <class Element>
struct SwigluTttPasses {
  const PackedSwigluTttBlock& p;
  Chunks chunks;
  int64_t d, prefix;   // channels of a head; tokens before those of the grid
  int64_t groups;      // of chunks with a common ascent, per image
  int64_t unit;        // numbers of [W₁ W₂] and W₃
  Layout parts;        // of the scratch:
  float *queries, *keys, *values;  // [B, T, D]; the keys are normalised in place
  float* moments;                  // [B, chunks, 2, D]: the keys' means and centred squares, see join()
  float* back;                     // [H, d, d]: W₃ᵀ
  float* ascents;                  // [B, groups, H, unit]
  float* units;                    // [B, H, unit], after the step

  explicit SwigluTttPasses(const PackedSwigluTttBlock& block)
      : p(block), chunks(block.batch, block.length, block.threads), d(block.dim / block.heads),
        prefix(block.length - block.height * block.width), groups(chunks.groups(block.threads)),
        unit(3 * d * d), parts(block.scratch) {
    const int64_t tokens = p.batch * p.length;
    queries = parts.take(tokens * p.dim);
    keys = parts.take(tokens * p.dim);
    values = parts.take(tokens * p.dim);
    moments = parts.take(chunks.count() * 2 * p.dim);
    back = parts.take(p.heads * d * d);
    ascents = parts.take(p.batch * groups * p.heads * unit);
    units = parts.take(p.batch * p.heads * unit);
  }

  size_t bytes() const { return parts.bytes(); }

  int run() const {
    int failed = project();
    if (failed) return failed;
    normalise();
    failed = climb();
    if (failed) return failed;
    step();
    return answer();
  }

  // q, k, v = Linear(LN(y)), rotated, and the moments of each chunk's keys.
  int project() const {
    const size_t bytes = Scratch::padded(chunks.most() * p.dim * sizeof(Element));
    return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
      const int64_t first = (c.image * p.length + c.start) * p.dim;
      Element* x = scratch.take<Element>(c.count * p.dim);
      normalise_rows(p.y + first, c.count, p.dim, p.norm1, c.image, x);
      float* const views[] = {queries + first, keys + first, values + first};
      for (int64_t i = 0; i < 3; ++i) {
        Part part(p.qkv);
        part.first = i * p.dim, part.columns = p.dim;
        product(x, p.dim, c.count, p.qkv, part,
                Sink<float>{views[i], p.dim, p.dim, p.qkv.bias + i * p.dim});
      }
      if (p.rotations) {
        rotate(c, queries + first);
        rotate(c, keys + first);
      }
      measure(c, keys + first);
    });
  }

  // Rotate the heads of the tokens on the grid.
  void rotate(const Chunk& c, float* views) const {
    for (int64_t t = c.start < prefix ? prefix - c.start : 0; t < c.count; ++t) {
      const float* sines = p.rotations + (c.start + t - prefix) * 2 * d;
      for (int64_t h = 0; h < p.heads; ++h) rotate_head(views + t * p.dim + h * d, sines, sines + d);
    }
  }

  void rotate_head(float* x, const float* sines, const float* cosines) const {
    const int64_t pairs = d / 2, step = p.rotate_half ? pairs : 1;
    for (int64_t n = 0; n < pairs; ++n) {
      const int64_t i = p.rotate_half ? n : 2 * n, j = i + step;
      const float a = x[i], b = x[j];
      x[i] = a * cosines[i] - b * sines[i];
      x[j] = b * cosines[j] + a * sines[j];
    }
  }

  void measure(const Chunk& c, const float* k) const {
    float* own = moments_of(c);
    for (int64_t i = 0; i < p.dim; i += kLanes) {
      Vector total{}, square{};
      for (int64_t t = 0; t < c.count; ++t) total += load(k + t * p.dim + i);
      const Vector mean = total / float(c.count);
      for (int64_t t = 0; t < c.count; ++t) {
        const Vector centred = load(k + t * p.dim + i) - mean;
        square += centred * centred;
      }
      store(own + i, mean);
      store(own + p.dim + i, square);
    }
  }

  // k ← (k - mean) / √(var + eps) over an image's tokens.
  void normalise() const {
    join();
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
    for (int64_t i = 0; i < chunks.count(); ++i) {
      const Chunk c = chunks[i];
      const float *mean = moments_of({c.image, 0, 0}), *factor = mean + p.dim;
      float* k = keys + (c.image * p.length + c.start) * p.dim;
      for (int64_t t = 0; t < c.count; ++t, k += p.dim)
        for (int64_t j = 0; j < p.dim; j += kLanes)
          store(k + j, (load(k + j) - load(mean + j)) * load(factor + j));
    }
  }

  // Join the moments of an image's chunks by Chan's formula: those of the first one become the mean and
  // 1 / √(var + eps) of all.
  void join() const {
    const int64_t vectors = p.dim / kLanes;
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
    for (int64_t task = 0; task < p.batch * vectors; ++task) {
      const int64_t image = task / vectors, i = task % vectors * kLanes;
      Vector mean{}, squares{};
      float count = 0.0f;
      for (int64_t n = 0; n < chunks.of_image; ++n) {
        const Chunk c = chunks[image * chunks.of_image + n];
        const float* own = moments_of(c);
        const float added = float(c.count), both = count + added;
        const Vector away = load(own + i) - mean;
        mean += away * (added / both);
        squares += load(own + p.dim + i) + away * away * (count * added / both);
        count = both;
      }
      const Vector variance = squares / count + float(p.key_eps);
      Vector deviation{};
      for (int lane = 0; lane < kLanes; ++lane) deviation[lane] = std::sqrt(variance[lane]);
      float* result = moments_of({image, 0, 0});
      store(result + i, mean);
      store(result + p.dim + i, 1.0f / deviation);
    }
  }

  float* moments_of(const Chunk& c) const {
    // The number of the chunk that begins there; a chunk has one token at least.
    const int64_t n = (c.start * chunks.of_image + p.length - 1) / p.length;
    return moments + (c.image * chunks.of_image + n) * 2 * p.dim;
  }

  // out [rows, D] = x + conv(x) + bias for a chunk's tokens on the grid, and x for those before it.
  void convolve(const Chunk& c, const float* x, const float* weight, const float* bias, float* out) const {
    const TokenConvolution<float> convolution{p.dim, p.height, p.width, p.dim, 3, weight, p.dim, bias, true};
    const float* from = x + (c.image * p.length + c.start) * p.dim;
    for (int64_t t = 0; t < c.count; ++t, from += p.dim, out += p.dim) {
      const int64_t place = c.start + t - prefix;
      if (place < 0)
        std::memcpy(out, from, p.dim * sizeof(float));
      else
        convolution(from, place, out);
    }
  }

  // Per head, with [z₁ z₂] = k [W₁ W₂], g = v W₃ᵀ and σ = σ(z₁), the ascents are
  // Σ kᵀ [g z₂ (σ + z₁ σ (1 - σ)), g z₁ σ] and Σ (z₁ σ z₂)ᵀ v.
  int climb() const {
    for (int64_t h = 0; h < p.heads; ++h)
      for (int64_t i = 0; i < d * d; ++i)
        back[h * d * d + i % d * d + i / d] = p.out_units[h * d * d + i];
    const size_t most = chunks.most();
    const size_t bytes = Scratch::padded(most * p.dim * sizeof(float)) +
                         Scratch::padded(most * 2 * d * sizeof(float)) +
                         Scratch::padded(most * d * sizeof(float));
    const auto ascent_of = [this](int64_t group) { return ascents + group * p.heads * unit; };
    return for_each_group(
        chunks, groups, p.threads, bytes,
        [&](int64_t group) { std::memset(ascent_of(group), 0, p.heads * unit * sizeof(float)); },
        [&](int64_t group, const Chunk& c, Scratch& scratch) {
          float* k = scratch.take(c.count * p.dim);
          float* z = scratch.take(c.count * 2 * d);
          float* g = scratch.take(c.count * d);
          convolve(c, keys, p.k_conv, p.k_conv_bias, k);
          const float* v = values + (c.image * p.length + c.start) * p.dim;
          for (int64_t h = 0; h < p.heads; ++h)
            climb(k + h * d, v + h * d, c.count, h, z, g, ascent_of(group) + h * unit);
        });
  }

  void climb(const float* k, const float* v, int64_t rows, int64_t h, float* z, float* g,
             float* ascent) const {
    ::product<false>(rows, 2 * d, {d, k, p.dim, 1, p.units + h * 2 * d * d, 2 * d, z, 2 * d});
    ::product<false>(rows, d, {d, v, p.dim, 1, back + h * d * d, d, g, d});
    for (int64_t t = 0; t < rows; ++t) {
      float *z1 = z + t * 2 * d, *z2 = z1 + d, *own = g + t * d;
      for (int64_t i = 0; i < d; i += kLanes) {
        const Vector y = load(z2 + i), grad = load(own + i);
        const Swish f = swish(load(z1 + i));
        store(z1 + i, grad * y * f.derivative);
        store(z2 + i, grad * f.value);
        store(own + i, f.value * y);
      }
    }
    ::product<true>(d, 2 * d, {rows, k, 1, p.dim, z, 2 * d, ascent, 2 * d, ascent, 2 * d});
    float* of_outputs = ascent + 2 * d * d;
    ::product<true>(d, d, {rows, g, 1, d, v, p.dim, of_outputs, d, of_outputs, d});
  }

  // W' = W + c a with a the sum of the ascents over the tokens and c = d^-½ / T.
  void step() const {
    const float scale = 1.0f / (std::sqrt(float(d)) * float(p.length));
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
    for (int64_t task = 0; task < p.batch * p.heads; ++task) {
      const int64_t image = task / p.heads, h = task % p.heads;
      float* own = units + task * unit;
      add_up(ascents + (image * groups * p.heads + h) * unit, groups, p.heads * unit, unit, own);
      for (int64_t i = 0; i < unit; i += kLanes) {
        const float* w = i < 2 * d * d ? p.units + h * 2 * d * d + i : p.out_units + h * d * d + i - 2 * d * d;
        store(own + i, load(w) + load(own + i) * scale);
      }
    }
  }

  // y ← y + g₁ ⊙ Linear(o), y ← y + g₂ ⊙ MLP(LN(y)) with o = (SiLU(q W₁') ⊙ q W₂') W₃'.
  int answer() const {
    const GeluMlp<Element> mlp{p.fc1, p.fc2, p.tanh_gelu != 0};
    const size_t most = chunks.most();
    const size_t bytes = Scratch::padded(most * p.dim * sizeof(float)) +
                         2 * Scratch::padded(most * p.dim * sizeof(Element)) +
                         Scratch::padded(most * 2 * d * sizeof(float)) +
                         Scratch::padded(most * d * sizeof(float)) + mlp.bytes(most);
    return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
      const int64_t first = (c.image * p.length + c.start) * p.dim;
      float* q = scratch.take(c.count * p.dim);
      float* z = scratch.take(c.count * 2 * d);
      float* hidden = scratch.take(c.count * d);
      Element* o = scratch.take<Element>(c.count * p.dim);
      convolve(c, queries, p.q_conv, p.q_conv_bias, q);
      for (int64_t h = 0; h < p.heads; ++h) {
        const float* w = units + (c.image * p.heads + h) * unit;
        multiply(c.count, d, 2 * d, q + h * d, p.dim, w, z);
        for (int64_t t = 0; t < c.count; ++t)
          swiglu_numbers(z + t * 2 * d, z + t * 2 * d + d, d, hidden + t * d);
        multiply(c.count, d, d, hidden, d, w + 2 * d * d, z);
        for (int64_t t = 0; t < c.count; ++t)
          for (int64_t i = 0; i < d; i += kLanes) store(o + t * p.dim + h * d + i, load(z + t * d + i));
      }
      float* y = p.out + first;
      product(o, p.dim, c.count, p.proj,
              Sink<float>{y, p.dim, p.dim, p.proj.bias, p.gate1, p.y + first, p.dim}, mlp.begin(0));
      Element* x = scratch.take<Element>(c.count * p.dim);
      normalise_rows(y, c.count, p.dim, p.norm2, c.image, x);
      mlp(x, c.count, p.gate2, y, scratch);
    });
  }
};

}  // namespace
