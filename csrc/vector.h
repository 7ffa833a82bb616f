// A SIMD vector of floats, with the width of the instruction set that this file is compiled for.
//
// The vector extensions of GCC and Clang support loads, arithmetic and shuffles of any width, so that
// one source is compiled for AVX-512, AVX2, SSE2 and NEON, once per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__AVX512F__)
#define VISION_TTT_LANES 16
#define VISION_TTT_REGISTERS 32
#elif defined(__AVX__)
#define VISION_TTT_LANES 8
#define VISION_TTT_REGISTERS 16
#elif defined(__aarch64__)
#define VISION_TTT_LANES 4
#define VISION_TTT_REGISTERS 32
#else
#define VISION_TTT_LANES 4
#define VISION_TTT_REGISTERS 16
#endif

#define VISION_TTT_INLINE inline __attribute__((always_inline))

// The name of a kernel in the file compiled for VISION_TTT_ISA: VISION_TTT_KERNEL(f) is f_avx2.
#define VISION_TTT_JOIN_(a, b) a##_##b
#define VISION_TTT_JOIN(a, b) VISION_TTT_JOIN_(a, b)
#define VISION_TTT_KERNEL(name) VISION_TTT_JOIN(name, VISION_TTT_ISA)

// Everything is local to the instruction set. The linker would keep only one of two copies of a
// symbol, which could be AVX-512 code on a machine without AVX-512.
namespace {

constexpr int kLanes = VISION_TTT_LANES;

typedef float Vector __attribute__((vector_size(4 * VISION_TTT_LANES)));
typedef float UnalignedVector
    __attribute__((vector_size(4 * VISION_TTT_LANES), aligned(4), may_alias));

VISION_TTT_INLINE Vector load(const float* p) { return *reinterpret_cast<const UnalignedVector*>(p); }

VISION_TTT_INLINE void store(float* p, Vector v) { *reinterpret_cast<UnalignedVector*>(p) = v; }

// x - 0 is x, also for -0, unlike x + 0. The compiler recognises a plain broadcast.
VISION_TTT_INLINE Vector splat(float x) { return x - Vector{}; }

typedef int32_t IntVector __attribute__((vector_size(4 * VISION_TTT_LANES)));

VISION_TTT_INLINE Vector select(IntVector condition, Vector yes, Vector no) {
  return condition ? yes : no;
}

// The first n lanes of v, zero in the others; n may be negative or above kLanes.
VISION_TTT_INLINE Vector keep_first(Vector v, int64_t n) {
  IntVector lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return select(lane < int32_t(n), v, Vector{});
}

// The sum of all lanes, in a fixed order.
VISION_TTT_INLINE float sum(Vector v) {
#if VISION_TTT_LANES == 16
  v += __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif VISION_TTT_LANES == 8
  v += __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3);
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6);
#else
  v += __builtin_shufflevector(v, v, 2, 3, 0, 1);
  v += __builtin_shufflevector(v, v, 1, 0, 3, 2);
#endif
  return v[0];
}

// Transpose a square of kLanes × kLanes floats.
VISION_TTT_INLINE void transpose_square(const float* in, int64_t in_row, float* out,
                                       int64_t out_row) {
  Vector r[kLanes];
  for (int i = 0; i < kLanes; ++i) r[i] = load(in + i * in_row);
  // At each stage, rows whose indices differ in one bit exchange the lanes whose indices differ in it.
#if VISION_TTT_LANES == 16
  for (int i = 0; i < 16; ++i)
    if (!(i & 8)) {
      Vector a = r[i], b = r[i + 8];
      r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23);
      r[i + 8] =
          __builtin_shufflevector(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
  for (int i = 0; i < 16; ++i)
    if (!(i & 4)) {
      Vector a = r[i], b = r[i + 4];
      r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27);
      r[i + 4] =
          __builtin_shufflevector(a, b, 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31);
    }
  for (int i = 0; i < 16; ++i)
    if (!(i & 2)) {
      Vector a = r[i], b = r[i + 2];
      r[i] = __builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29);
      r[i + 2] =
          __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
  for (int i = 0; i < 16; ++i)
    if (!(i & 1)) {
      Vector a = r[i], b = r[i + 1];
      r[i] = __builtin_shufflevector(a, b, 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
      r[i + 1] =
          __builtin_shufflevector(a, b, 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31);
    }
#elif VISION_TTT_LANES == 8
  for (int i = 0; i < 8; ++i)
    if (!(i & 4)) {
      Vector a = r[i], b = r[i + 4];
      r[i] = __builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11);
      r[i + 4] = __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15);
    }
  for (int i = 0; i < 8; ++i)
    if (!(i & 2)) {
      Vector a = r[i], b = r[i + 2];
      r[i] = __builtin_shufflevector(a, b, 0, 1, 8, 9, 4, 5, 12, 13);
      r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int i = 0; i < 8; ++i)
    if (!(i & 1)) {
      Vector a = r[i], b = r[i + 1];
      r[i] = __builtin_shufflevector(a, b, 0, 8, 2, 10, 4, 12, 6, 14);
      r[i + 1] = __builtin_shufflevector(a, b, 1, 9, 3, 11, 5, 13, 7, 15);
    }
#else
  for (int i = 0; i < 4; ++i)
    if (!(i & 2)) {
      Vector a = r[i], b = r[i + 2];
      r[i] = __builtin_shufflevector(a, b, 0, 1, 4, 5);
      r[i + 2] = __builtin_shufflevector(a, b, 2, 3, 6, 7);
    }
  for (int i = 0; i < 4; ++i)
    if (!(i & 1)) {
      Vector a = r[i], b = r[i + 1];
      r[i] = __builtin_shufflevector(a, b, 0, 4, 2, 6);
      r[i + 1] = __builtin_shufflevector(a, b, 1, 5, 3, 7);
    }
#endif
  for (int i = 0; i < kLanes; ++i) store(out + i * out_row, r[i]);
}

// out [cols, rows] = inᵀ of in [rows, cols]; both counts are multiples of kLanes.
VISION_TTT_INLINE void transpose(const float* in, int64_t rows, int64_t cols, float* out) {
  for (int64_t i = 0; i < rows; i += kLanes)
    for (int64_t j = 0; j < cols; j += kLanes)
      transpose_square(in + i * cols + j, cols, out + j * rows + i, rows);
}

}  // namespace
