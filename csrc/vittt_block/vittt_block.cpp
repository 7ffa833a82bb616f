// A whole Vittt block: the kernels of its parts and the matrix products between them, one after the
// other. There is nothing to vectorise here, so this file is compiled once.
#include "vittt_block.h"

#include <algorithm>

#include "../conv2d/conv2d.h"
#include "../learner/problem.h"

namespace {

// The MLP's pre-activations of so many tokens stay near the cores.
constexpr int64_t kTokensAtOnce = 4096;

// out [rows, columns] = x [rows, inner] weightᵀ, or added to out; rows of x and out so far apart.
struct Product {
  const VitttBlock& p;

  void operator()(const float* x, int64_t x_row, const float* weight, int64_t rows, int64_t columns,
                  int64_t inner, float* out, int64_t out_row, bool add) const {
    // Column by column, as Fortran sees it, these are the transposed matrices.
    const float one = 1.0f, beta = add ? 1.0f : 0.0f;
    p.sgemm("T", "N", &columns, &rows, &inner, &one, weight, &inner, x, &x_row, &beta, out, &out_row);
  }
};

// Where the parts of the scratch begin.
struct Layout {
  int64_t tokens, columns, normed, projected, logits, taps, scale, floats;

  explicit Layout(const VitttBlock& p) {
    tokens = p.batch * p.height * p.width;
    columns = 2 * p.directions * p.dim + p.q_columns + p.gate_columns;
    const int64_t at_once = std::min(tokens, kTokensAtOnce);
    normed = 0;
    projected = normed + tokens * p.dim;
    // The MLP's pre-activations take the projection's place.
    logits = projected + std::max(tokens * columns, at_once * 2 * p.hidden);
    taps = logits + tokens * p.heads;
    scale = taps + p.kernel * p.kernel * p.dim;
    floats = scale + p.directions * p.mini_batch_size;
  }
};

void convolve(const VitttBlock& p, const Layout& at) {
  float* taps = p.scratch + at.taps;  // [K · K, D]
  const int64_t area = p.kernel * p.kernel, image = p.height * p.width * p.dim;
  for (int64_t c = 0; c < p.dim; ++c)
    for (int64_t i = 0; i < area; ++i) taps[i * p.dim + c] = p.conv2d[c * area + i];
  const Conv2d conv{{const_cast<float*>(p.y), image, p.dim},
                    {p.out, image, p.dim},
                    taps,
                    p.batch,
                    p.height,
                    p.width,
                    p.dim,
                    p.kernel,
                    p.threads,
                    1};
  vision_ttt_conv2d(&conv);
}

int learn(const VitttBlock& p, const Layout& at) {
  const int64_t length = p.height * p.width, inner = p.directions * p.dim;
  const int64_t head_dim = inner / p.heads;
  float* k = p.scratch + at.projected;
  float* q = p.q_columns ? k + inner : k;
  float* v = k + inner + p.q_columns;
  auto view = [&](float* data) {
    return Tokens{data, length * at.columns, at.columns, head_dim};
  };
  float* scale = p.scratch + at.scale;
  for (int64_t r = 0; r < p.directions; ++r)
    for (int64_t j = 0; j < p.mini_batch_size; ++j) {
      const int64_t i = r * p.mini_batch_size + j;
      // Written so that a NaN stays one.
      const float sum = 1.0f / float(j + 1) + p.position_offset[i];
      scale[i] = sum < 0.0f ? 0.0f : sum;
    }
  const Problem problem{view(q),
                        view(k),
                        view(v),
                        {p.conv_q_weight, p.conv_q_bias},
                        {p.conv_k_weight, p.conv_k_bias},
                        p.scratch + at.logits,
                        {const_cast<float*>(p.w0), const_cast<float*>(p.b0), nullptr, nullptr},
                        p.inner_weight,
                        p.inner_bias,
                        scale,
                        p.batch,
                        length,
                        p.heads,
                        head_dim,
                        p.mini_batch_size,
                        p.heads - p.heads / p.directions,
                        length,  // no states are kept
                        p.taps,
                        p.heads / p.directions,
                        0,
                        0,
                        p.threads,
                        p.inner_eps,
                        p.rate};
  // A mini-batch's targets have been read before its outputs are written over them.
  const Outputs outputs{view(v), {}, {}};
  if (int status = vision_ttt_ttt_linear_forward(&problem, &outputs)) return status;
  const int64_t image = length * at.columns;
  const GatedNorm merge{{v, image, at.columns},
                        {p.gate_columns ? v + inner : nullptr, image, at.columns},
                        {v, image, at.columns},
                        p.post_weight,
                        p.post_bias,
                        p.batch,
                        length,
                        p.dim,
                        p.directions,
                        p.threads,
                        p.post_eps};
  vision_ttt_gated_norm(&merge);
  Product{p}(v, at.columns, p.out_proj, at.tokens, p.dim, p.dim, p.out, p.dim, true);
  return 0;
}

void mlp(const VitttBlock& p, const Layout& at) {
  float* hidden = p.scratch + at.projected;
  for (int64_t start = 0; start < at.tokens; start += kTokensAtOnce) {
    const int64_t rows = std::min(kTokensAtOnce, at.tokens - start), row = 2 * p.hidden;
    const float* x = p.scratch + at.normed + start * p.dim;
    Product{p}(x, p.dim, p.fc1, rows, row, p.dim, hidden, row, false);
    const SwiGlu activation{hidden, hidden, nullptr, rows, p.hidden, row, row, p.threads};
    vision_ttt_swiglu(&activation);
    Product{p}(hidden, row, p.fc2, rows, p.dim, p.hidden, p.out + start * p.dim, p.dim, true);
  }
}

}  // namespace

int64_t vision_ttt_vittt_block_scratch(const VitttBlock* p) { return Layout(*p).floats; }

int vision_ttt_vittt_block(const VitttBlock* block) {
  const VitttBlock& p = *block;
  const Layout at(p);
  float* normed = p.scratch + at.normed;
  convolve(p, at);  // out = y + conv(y)
  LayerNorm norm{p.out,      normed, p.norm_weight, p.norm_bias, p.rate_weight, p.rate_bias,
                 p.scratch + at.logits, at.tokens, p.dim, p.heads, p.threads, p.norm_eps};
  vision_ttt_layer_norm(&norm);
  Product{p}(normed, p.dim, p.in_proj, at.tokens, at.columns, p.dim, p.scratch + at.projected,
             at.columns, false);
  if (int status = learn(p, at)) return status;
  norm = {p.out,   normed,    p.mlp_norm_weight, p.mlp_norm_bias, nullptr, nullptr,
          nullptr, at.tokens, p.dim,             0,               p.threads, p.mlp_norm_eps};
  vision_ttt_layer_norm(&norm);
  mlp(p, at);
  return 0;
}
