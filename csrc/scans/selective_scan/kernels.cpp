// The selective scan, for one instruction set. The build compiles this file once for each.
#include <atomic>

#include "backward.h"
#include "forward.h"

namespace {

template <class Number>
int forward(const SelectiveScan& p) {
  const Blocks blocks{p, kLanes};
  const int64_t count = blocks.count();
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(p.threads)) if (p.threads > 1)
  {
    Scratch scratch(ForwardPass<Number>::floats(p) * sizeof(float));
    if (!scratch.ok()) failed = 1;
    ForwardPass<Number> pass(p, scratch);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < p.batch * count; ++task)
      if (scratch.ok()) pass.run(task / count, blocks[task % count]);
  }
  return failed;
}

template <class Number>
int backward(const SelectiveScan& p, const SelectiveScanGradients& gradients) {
  const Blocks blocks{p, kBlockVectors * kLanes};
  const int64_t count = blocks.count(), tokens = p.batch * p.length;
  Scratch memory(Shares::floats(p, blocks) * sizeof(float));
  if (!memory.ok()) return 1;
  const Shares shares(p, blocks, memory);
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(p.threads)) if (p.threads > 1)
  {
    Scratch scratch(BackwardPass<Number>::floats(p) * sizeof(float));
    if (!scratch.ok()) failed = 1;
    BackwardPass<Number> pass(p, gradients, shares, scratch);
#pragma omp for schedule(dynamic, 1)
    for (int64_t task = 0; task < p.batch * count; ++task)
      if (scratch.ok()) pass.run(task / count, blocks[task % count], task % count);
  }
  if (failed) return 1;
  const int64_t per_group = blocks.per_group(), share = tokens * p.states;
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t token = 0; token < tokens; ++token)
    for (int64_t group = 0; group < p.groups; ++group) {
      const int64_t from = group * per_group * share + token * p.states;
      const int64_t to = (token * p.groups + group) * p.states;
      add_up(shares.b + from, per_group, share, p.states, gradients.b + to);
      add_up(shares.c + from, per_group, share, p.states, gradients.c + to);
    }
  const int64_t rates = p.channels * p.states;
  add_up(shares.a, p.batch, rates, rates, gradients.a);
  add_up(shares.skip, p.batch, p.channels, p.channels, gradients.skip);
  add_up(shares.delta_bias, p.batch, p.channels, p.channels, gradients.delta_bias);
  return 0;
}

}  // namespace

int VISION_TTT_KERNEL(selective_scan)(const SelectiveScan& p) {
  return p.is_bfloat16 ? forward<Bfloat16>(p) : forward<float>(p);
}

int VISION_TTT_KERNEL(selective_scan_backward)(const SelectiveScan& p,
                                               const SelectiveScanGradients& g) {
  return p.is_bfloat16 ? backward<Bfloat16>(p, g) : backward<float>(p, g);
}
