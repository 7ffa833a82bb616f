// ttt_linear's kernels for one instruction set: the build compiles this file once for each, with
// VISION_TTT_ISA its name and the compiler's flags to match.
#include <atomic>

#include "backward.h"
#include "forward.h"

#define VISION_TTT_JOIN_(a, b) a##_##b
#define VISION_TTT_JOIN(a, b) VISION_TTT_JOIN_(a, b)

namespace {

template <int D>
struct Forward {
  using Tensors = Outputs;
  static size_t floats(const Problem& p) { return forward_floats<D>(p); }
  static void run(const Head& h, const Outputs& t, Scratch& s) { forward_head<D>(h, t, s); }
};

template <int D>
struct Backward {
  using Tensors = Gradients;
  static size_t floats(const Problem& p) { return backward_floats<D>(p); }
  static void run(const Head& h, const Gradients& t, Scratch& s) { backward_head<D>(h, t, s); }
};

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

int VISION_TTT_JOIN(ttt_linear_forward, VISION_TTT_ISA)(const Problem& p, const Outputs& o) {
  return run<Forward>(p, o);
}

int VISION_TTT_JOIN(ttt_linear_backward, VISION_TTT_ISA)(const Problem& p, const Gradients& g) {
  return run<Backward>(p, g);
}
