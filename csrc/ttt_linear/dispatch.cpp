// The entry points: hand a call to the kernels of the best instruction set that this machine has.
#include <cstdlib>
#include <cstring>

#include "problem.h"

#define VISION_TTT_DECLARE(isa)                                       \
  int ttt_linear_forward_##isa(const Problem&, const Outputs&);       \
  int ttt_linear_backward_##isa(const Problem&, const Gradients&);

VISION_TTT_DECLARE(baseline)
#ifdef VISION_TTT_X86
VISION_TTT_DECLARE(avx2)
VISION_TTT_DECLARE(avx512)
#endif

namespace {

struct Kernels {
  const char* name;
  int (*forward)(const Problem&, const Outputs&);
  int (*backward)(const Problem&, const Gradients&);
};

Kernels choose() {
#ifdef VISION_TTT_X86
  // VISION_TTT_CPU_ISA=avx2 or baseline asks for less than the machine has, to test or compare.
  const char* asked = std::getenv("VISION_TTT_CPU_ISA");
  auto allowed = [&](const char* isa) { return !asked || !std::strcmp(asked, isa); };
  __builtin_cpu_init();
  bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
  if (avx512 && avx2 && allowed("avx512"))
    return {"avx512", ttt_linear_forward_avx512, ttt_linear_backward_avx512};
  if (avx2 && (allowed("avx2") || allowed("avx512")))
    return {"avx2", ttt_linear_forward_avx2, ttt_linear_backward_avx2};
#endif
  return {"baseline", ttt_linear_forward_baseline, ttt_linear_backward_baseline};
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

int vision_ttt_ttt_linear_forward(const Problem* p, const Outputs* o) {
  return kernels().forward(*p, *o);
}

int vision_ttt_ttt_linear_backward(const Problem* p, const Gradients* g) {
  return kernels().backward(*p, *g);
}

const char* vision_ttt_instruction_set() { return kernels().name; }
