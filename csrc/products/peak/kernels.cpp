// Chains of multiply-adds in registers, as many as keep every unit busy.
#include "../../vector.h"
#include "peak.h"

namespace {

// A multiply-add depends on the last one of its chain, with a latency of 4 cycles. Units that start two
// per cycle need at least 8 chains. The other registers hold the factor and the summand.
constexpr int kChains = VISION_TTT_REGISTERS == 32 ? 16 : 12;

float run_chains(int64_t rounds) {
  Vector chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = splat(1.0f + 0.01f * float(i + 1));
  Vector factor = splat(0.999f), summand = splat(0.001f);  // the values converge to 1
  for (int64_t round = 0; round < rounds; ++round)
    for (int i = 0; i < kChains; ++i) chains[i] = chains[i] * factor + summand;
  Vector total{};
  for (int i = 0; i < kChains; ++i) total += chains[i];
  return sum(total);
}

}  // namespace

int64_t VISION_TTT_KERNEL(fma_peak)(int64_t rounds, int64_t threads, float* result) {
  float total = 0.0f;
#pragma omp parallel for num_threads(threads) schedule(static, 1) reduction(+ : total)
  for (int64_t thread = 0; thread < threads; ++thread) total += run_chains(rounds);
  *result = total;
  return rounds * threads * kChains * kLanes;
}
