// Hand the heads of a call to threads, and the head dimension to the compiler.
#pragma once

#include <atomic>

#include "head.h"

namespace {

// The most heads, up to `most`, that a task can take without any thread's work growing.
inline int64_t heads_per_task(const Problem& p, int64_t most) {
  auto rounds = [&](int64_t tasks) { return (tasks + p.threads - 1) / p.threads; };
  for (int64_t count = most; count > 1; --count) {
    const int64_t tasks = p.batch * ((p.heads + count - 1) / count);
    if (count * rounds(tasks) <= rounds(p.batch * p.heads)) return count;
  }
  return 1;
}

// One task is some neighbouring heads of one image. Tasks go to whichever thread is free, so that
// their number need not be a multiple of the threads'; each head writes its own results in an order
// of its own, hence the same bits every time, whichever heads share a task.
template <class Pass>
int run_heads(const Problem& p, const typename Pass::Tensors& tensors) {
  const int64_t per_task = heads_per_task(p, Pass::kHeads);
  const int64_t per_image = (p.heads + per_task - 1) / per_task;
  const size_t floats = Pass::floats(p);
  std::atomic<int> failed{0};
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < p.batch * per_image; ++task) {
    Scratch scratch(floats);
    const int64_t first = task % per_image * per_task, rest = p.heads - first;
    const Heads heads{p, task / per_image * p.heads + first, rest < per_task ? rest : per_task};
    if (scratch.ok())
      Pass::run(heads, tensors, scratch);
    else
      failed = 1;
  }
  return failed;
}

// A Pass<D> names its Tensors, says how many heads it takes together at most, counts the floats of its
// scratch and runs.
template <template <int> class Pass>
int run(const Problem& p, const typename Pass<16>::Tensors& tensors) {
  switch (p.dim) {
    case 16: return run_heads<Pass<16>>(p, tensors);
    case 32: return run_heads<Pass<32>>(p, tensors);
    case 64: return run_heads<Pass<64>>(p, tensors);
    case 128: return run_heads<Pass<128>>(p, tensors);
  }
  return 2;  // the launcher lets no other dimension through
}

}  // namespace
