// A SwiGLU MLP in training, for one instruction set. The build compiles this file once for each.
#include <cstring>

#include "backward.h"

#include "../packed/mlp.h"

int VISION_TTT_KERNEL(swiglu_mlp)(const SwiGluMlpProblem& p) {
  const size_t up = p.hidden * p.dim, down = p.hidden * p.columns;
  Buffers buffers(2 * Buffers::padded(up * sizeof(float)) + Buffers::padded(down * sizeof(float)));
  if (!buffers.ok()) return 1;
  auto room = [&](size_t count) { return buffers.take<float>(count); };
  const ToPack weights[3] = {{Matrix::of(p.up, p.hidden, p.dim), room(up)},
                             {Matrix::of(p.up + up, p.hidden, p.dim), room(up)},
                             {Matrix::of(p.down, p.columns, p.hidden), room(down)}};
  pack_all(weights, p.threads);
  const Packed gate = weights[0].weight(), value = weights[1].weight(), out = weights[2].weight();
  const SwiGluMlp<float> mlp{gate, value, out};
  const Chunks chunks(1, p.rows, p.threads);
  const size_t bytes = SwiGluMlp<float>::bytes(kRowsOfChunk);
  return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Buffers& own) {
    float* y = p.out + c.start * p.columns;
    std::memset(y, 0, c.count * p.columns * sizeof(float));
    mlp(p.x + c.start * p.dim, c.count, y, own);
  });
}

int VISION_TTT_KERNEL(swiglu_mlp_backward)(const SwiGluMlpProblem& p) {
  return SwiGluMlpBackward(p).run();
}
