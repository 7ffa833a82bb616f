// Hand the heads of a call to threads, and the head dimension to the compiler.
#pragma once

#include <atomic>

#include "head.h"

namespace {

// One task is one head of one image. Tasks go to whichever thread is free, so that their number need
// not be a multiple of the threads'; each writes its own results, hence the same bits every time.
template <class Pass>
int run_heads(const Problem& p, const typename Pass::Tensors& tensors) {
  const int64_t tasks = p.batch * p.heads;
  const size_t floats = Pass::floats(p);
  std::atomic<int> failed{0};
#pragma omp parallel for schedule(dynamic, 1) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    Scratch scratch(floats);
    if (scratch.ok())
      Pass::run(Head(p, task), tensors, scratch);
    else
      failed = 1;
  }
  return failed;
}

// A Pass<D> names its Tensors, counts the floats of its scratch and runs one head.
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
