// Shared by the checks of the kernels: buffers of an exact size, and the number of failures.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <memory>

namespace {

uint32_t state = 1;

float random_number() {  // in [-1, 1), from a linear congruential generator
  state = state * 1664525u + 1013904223u;
  return float(state >> 8) / float(1 << 23) - 1.0f;
}

// Exactly n numbers on the heap, so that a read beyond them is detected.
struct Buffer {
  std::unique_ptr<float[]> data;
  size_t size;

  explicit Buffer(size_t n, bool fill = true) : data(new float[n]), size(n) {
    for (size_t i = 0; fill && i < n; ++i) data[i] = random_number();
  }
  operator float*() { return data.get(); }
  bool finite() const {
    for (size_t i = 0; i < size; ++i)
      if (!std::isfinite(data[i])) return false;
    return true;
  }
};

int failures = 0;

void expect(bool condition, const char* what) {
  if (condition) return;
  std::printf("FAILED: %s\n", what);
  ++failures;
}

}  // namespace
