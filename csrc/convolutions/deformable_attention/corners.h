// A vector of sampled points: the cells around each, and how much each cell counts.
#pragma once

#include "../../vector.h"

namespace {

VISION_TTT_INLINE IntVector select(IntVector condition, IntVector yes, IntVector no) {
  return (condition & yes) | (~condition & no);
}

VISION_TTT_INLINE void store(int32_t* p, IntVector v) {
  store(reinterpret_cast<float*>(p), reinterpret_cast<Vector>(v));
}

VISION_TTT_INLINE IntVector load(const int32_t* p) {
  return reinterpret_cast<IntVector>(load(reinterpret_cast<const float*>(p)));
}

// (x, y) pairs of kLanes points, apart.
struct Pairs {
  Vector x, y;

  VISION_TTT_INLINE explicit Pairs(const float* p) {
    const Vector a = load(p), b = load(p + kLanes);
#if VISION_TTT_LANES == 16
    x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif VISION_TTT_LANES == 8
    x = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
    y = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
    x = __builtin_shufflevector(a, b, 0, 2, 4, 6);
    y = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
  }
};

// The two cells around a coordinate on one axis of a level.
struct Neighbours {
  IntVector cell[2];  // within the level even where the neighbour is outside
  Vector share[2];    // bilinear weights, 0 outside
  Vector inside[2];   // 1 or 0: the derivatives of the shares are -inside[0] and inside[1]

  // Of a location in 0 … 1. A NaN has cell 0 and shares of NaN, infinity is outside.
  VISION_TTT_INLINE Neighbours(Vector location, Vector size, IntVector cells) {
    Vector x = location * size - 0.5f;
    // Outside by more than a cell the distance does not matter, and could exceed an integer.
    x = select(x < -1.0f, splat(-2.0f), x);
    x = select(x > size, size, x);
    const IntVector number = x == x;
    IntVector first = __builtin_convertvector(select(number, x, Vector{}), IntVector);
    first += __builtin_convertvector(first, Vector) > x;  // a comparison is -1 where true: the floor
    const Vector rest = x - __builtin_convertvector(first, Vector);
    const IntVector second = first + 1, none{};
    const IntVector is_first = (first >= 0) & (first < cells), is_second = (second >= 0) & (second < cells);
    const IntVector last = cells - 1;
    cell[0] = select(first < 0, none, select(first > last, last, first));
    cell[1] = select(second > last, last, select(second < 0, none, second));
    share[0] = select(is_first, 1.0f - rest, Vector{});
    share[1] = select(is_second, rest, Vector{});
    inside[0] = select(is_first, splat(1.0f), Vector{});
    inside[1] = select(is_second, splat(1.0f), Vector{});
  }
};

}  // namespace
