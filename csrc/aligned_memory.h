// Memory that is aligned to cache lines. Windows has its own functions for this.
#pragma once

#include <cstddef>
#include <cstdlib>
#ifdef _WIN32
#include <malloc.h>
#endif

namespace {

constexpr size_t kCacheLine = 64;  // bytes

// Returns null if there is not enough memory. A request for 0 bytes returns one cache line.
inline void* allocate_aligned(size_t bytes) {
  if (bytes == 0) bytes = kCacheLine;
#ifdef _WIN32
  return _aligned_malloc(bytes, kCacheLine);
#else
  void* memory = nullptr;
  return posix_memalign(&memory, kCacheLine, bytes) == 0 ? memory : nullptr;
#endif
}

inline void free_aligned(void* memory) {
#ifdef _WIN32
  _aligned_free(memory);
#else
  std::free(memory);
#endif
}

}  // namespace
