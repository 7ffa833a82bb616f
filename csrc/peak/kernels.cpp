// Chains of multiply-adds in registers, enough of them to keep every unit busy.
#include "../vector.h"
#include "peak.h"

namespace {

// A chain waits for its own last result, 4 cycles at most units that do two a cycle: 8 chains at
// least. What is left of the registers holds the factor and the summand.
constexpr int kChains = VISION_TTT_REGISTERS == 32 ? 16 : 12;

float run_chains(int64_t rounds) {
  Vector chains[kChains];
  for (int i = 0; i < kChains; ++i) chains[i] = splat(1.0f + 0.01f * float(i + 1));
  Vector factor = splat(0.999f), summand = splat(0.001f);  // they fall towards 1
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
