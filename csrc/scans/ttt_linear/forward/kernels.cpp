// ttt_linear's forward pass for one instruction set. It is a source of its own, because it alone has a form in
// tile registers.
#include "../../../amx/ttt_linear.h"
#include "../../learner/run_heads.h"
#include "../forward.h"

namespace {

template <int D>
struct Forward {
  using Tensors = Outputs;
  static constexpr int64_t kHeads = kHeadsTogether<D>;
  static size_t floats(const Problem& p) { return forward_floats<D>(p); }
  static void run(const Heads& h, const Outputs& t, Scratch& s) { forward_heads<D>(h, t, s); }
};

}  // namespace

int VISION_TTT_KERNEL(ttt_linear_forward)(const Problem& p, const Outputs& o) {
  return run_forward<Forward>(p, o);
}
