// Distribution of a call's heads over threads, with the head dimension as a template argument.
#pragma once

#include <atomic>

#include "head.h"

namespace {

// The most heads per task, up to `most`, with which no thread has more work than with one head per task.
inline int64_t heads_per_task(const Problem& p, int64_t most) {
  auto rounds = [&](int64_t tasks) { return (tasks + p.threads - 1) / p.threads; };
  for (int64_t count = most; count > 1; --count) {
    const int64_t tasks = p.batch * ((p.heads + count - 1) / count);
    if (count * rounds(tasks) <= rounds(p.batch * p.heads)) return count;
  }
  return 1;
}

// A task has some neighbouring heads of one image. Tasks are scheduled dynamically, so that their number
// need not be a multiple of the threads'. Every head writes its own results in a fixed order, hence the
// results are bitwise reproducible for any grouping of heads.
template <class Pass>
int run_heads(const Problem& p, const typename Pass::Tensors& tensors) {
  const int64_t per_task = heads_per_task(p, Pass::kHeads);
  const int64_t per_image = (p.heads + per_task - 1) / per_task;
  const size_t bytes = Pass::floats(p) * sizeof(float);
  std::atomic<int> failed{0};
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < p.batch * per_image; ++task) {
    Scratch scratch(bytes);
    const int64_t first = task % per_image * per_task, rest = p.heads - first;
    const Heads heads{p, task / per_image * p.heads + first, rest < per_task ? rest : per_task};
    if (scratch.ok())
      Pass::run(heads, tensors, scratch);
    else
      failed = 1;
  }
  return failed;
}

// A Pass<D> defines its Tensors, the most heads that it processes together, the floats of its scratch,
// and its run.
template <template <int> class Pass>
int run(const Problem& p, const typename Pass<16>::Tensors& tensors) {
  switch (p.dim) {
    case 16: return run_heads<Pass<16>>(p, tensors);
    case 32: return run_heads<Pass<32>>(p, tensors);
    case 64: return run_heads<Pass<64>>(p, tensors);
    case 128: return run_heads<Pass<128>>(p, tensors);
  }
  return 2;  // the launcher rejects all other dimensions
}

}  // namespace
