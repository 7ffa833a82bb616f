// ttt_linear's other kernels for one instruction set. The build compiles this file once per instruction set,
// with its name in VISION_TTT_ISA and its compiler flags.
#include "../learner/run_heads.h"
#include "backward.h"
#include "part.h"

namespace {

template <int D>
struct Backward {
  using Tensors = Gradients;
  static constexpr int64_t kHeads = 1;
  static size_t floats(const Problem& p) { return BackwardOfHead<D>::floats(p); }
  static void run(const Heads& h, const Gradients& t, Scratch& s) {
    const Head head = h[0];
    BackwardOfHead<D>(head, t, s).run();
  }
};

template <int D>
struct PartOfMiniBatch {
  using Tensors = OpenMiniBatch;
  static constexpr int64_t kHeads = 1;
  static size_t floats(const Problem& p) { return part_floats<D>(p); }
  static void run(const Heads& h, const OpenMiniBatch& t, Scratch& s) { part_of_head<D>(h[0], t, s); }
};

}  // namespace

int VISION_TTT_KERNEL(ttt_linear_backward)(const Problem& p, const Gradients& g) {
  return run<Backward>(p, g);
}

int VISION_TTT_KERNEL(ttt_linear_part)(const Problem& p, const OpenMiniBatch& m) {
  return run<PartOfMiniBatch>(p, m);
}
