// Memory that begins at a cache line; Windows has functions of its own for it.
#pragma once

#include <cstddef>
#include <cstdlib>
#ifdef _WIN32
#include <malloc.h>
#endif

namespace {

constexpr size_t kCacheLine = 64;  // bytes

// At least one cache line; null where there is no memory.
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
