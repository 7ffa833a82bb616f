// A SwiGLU MLP in training, for one instruction set. The build compiles this file once for each.
#include <cstring>

#include "../mlp.h"
#include "backward.h"

int VISION_TTT_KERNEL(swiglu_mlp)(const SwiGluMlpProblem& p) {
  const Matrix matrices[3] = {Matrix::of(p.up, p.hidden, p.dim),
                              Matrix::of(p.up + p.hidden * p.dim, p.hidden, p.dim),
                              Matrix::of(p.down, p.columns, p.hidden)};
  size_t packed = 0;
  for (const Matrix& matrix : matrices) packed += ToPack::bytes(matrix);
  Scratch scratch(packed);
  if (!scratch.ok()) return 1;
  const ToPack weights[3] = {{matrices[0], scratch}, {matrices[1], scratch}, {matrices[2], scratch}};
  pack_all(weights, p.threads);
  const Packed gate = weights[0].weight(), value = weights[1].weight(), out = weights[2].weight();
  const SwiGluMlp<float> mlp{gate, value, out};
  const Chunks chunks(1, p.rows, p.threads);
  const NormParameters norm{p.norm_weight, p.norm_bias, 0, p.eps};
  const size_t of_norm = norm.weight ? Scratch::padded(kRowsOfChunk * p.dim * sizeof(float)) : 0;
  const size_t bytes = SwiGluMlp<float>::bytes(kRowsOfChunk) + of_norm;
  return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& own) {
    const float* x = p.x + c.start * p.dim;
    float* y = p.out + c.start * p.columns;
    const size_t numbers = c.count * p.columns;
    p.adds ? std::memcpy(y, x, numbers * sizeof(float)) : std::memset(y, 0, numbers * sizeof(float));
    if (norm.weight) {
      float* normed = own.take(c.count * p.dim);
      normalise_rows(x, c.count, p.dim, norm, 0, normed);
      x = normed;
    }
    mlp(x, c.count, y, own);
  });
}

int VISION_TTT_KERNEL(swiglu_mlp_backward)(const SwiGluMlpProblem& p) {
  return SwiGluMlpBackward(p).run();
}
