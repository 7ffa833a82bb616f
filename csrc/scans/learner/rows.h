// Loads and stores of tokens, and a token's row in registers.
#pragma once

#include <cstring>

#include "../../bfloat16.h"
#include "problem.h"

namespace {

// The places of the tokens of one head of one image, in the head's scan order.
struct Scan {
  int64_t batch, head, length;
  bool reverse;
  int64_t seen;  // tokens that lie before the first one

  int64_t token(int64_t step) const { return reverse ? length - 1 - step : step; }
};

// Rows of floats that are `apart` numbers apart.
template <class Float>
struct RowsOf {
  Float* first;
  int64_t apart;

  VISION_TTT_INLINE Float* operator[](int64_t t) const { return first + t * apart; }
};

// The rows of float32 tokens from a step of the scan on, where they lie.
VISION_TTT_INLINE RowsOf<float> rows_in_place(const Tokens& x, const Scan& scan, int64_t start) {
  const int64_t offset = scan.batch * x.batch + scan.token(start) * x.token + scan.head * x.head;
  return {static_cast<float*>(x.data) + offset, scan.reverse ? -x.token : x.token};
}

template <int D>
VISION_TTT_INLINE void load_rows(const Tokens& x, bool is_bfloat16, const Scan& scan, int64_t start,
                                 int64_t n, float* rows) {
  for (int64_t t = 0; t < n; ++t) {
    int64_t offset = scan.batch * x.batch + scan.token(start + t) * x.token + scan.head * x.head;
    float* row = rows + t * D;
    if (is_bfloat16) {
      const Bfloat16* from = static_cast<const Bfloat16*>(x.data) + offset;
      for (int j = 0; j < D; j += kLanes) store(row + j, load(from + j));
    } else {
      std::memcpy(row, static_cast<const float*>(x.data) + offset, D * sizeof(float));
    }
  }
}

// One head's share of a Convolution, as [K + 1, D]: the taps, then the bias.
template <int D>
VISION_TTT_INLINE void load_taps(const Convolution& conv, int64_t head, int64_t taps, float* out) {
  for (int64_t j = 0; j < taps; ++j)
    for (int64_t i = 0; i < D; ++i) out[j * D + i] = conv.weight[(head * D + i) * taps + j];
  std::memcpy(out + taps * D, conv.bias + head * D, D * sizeof(float));
}

// K = 0 supports any number of taps; the loop over the published number is unrolled.
template <int D, int K>
VISION_TTT_INLINE void convolve_rows(const float* raw, const float* weight, int64_t taps, int64_t n,
                                     float* rows) {
  const int64_t count = K ? K : taps;
  for (int64_t i = 0; i < D; i += kLanes) {
    const Vector bias = load(weight + count * D + i);
    // Copies, because a store could change the taps as far as the compiler knows.
    Vector tap[K ? K : 1];
    for (int j = 0; j < K; ++j) tap[j] = load(weight + j * D + i);
    for (int64_t t = 0; t < n; ++t) {
      Vector total = bias;
      for (int64_t j = 0; j < count; ++j)
        total += (K ? tap[K ? j : 0] : load(weight + j * D + i)) * load(raw + (t + j) * D + i);
      store(rows + t * D + i, total);
    }
  }
}

// The input of n rows of a convolution with so many taps, which includes the tokens before them: raw
// [K - 1 + n, D].
template <int D>
VISION_TTT_INLINE void load_seen_rows(const Tokens& x, bool is_bfloat16, const Scan& scan,
                                      int64_t start, int64_t n, int64_t taps, float* raw) {
  const int64_t past = taps - 1, there = start + scan.seen, missing = there < past ? past - there : 0;
  std::memset(raw, 0, missing * D * sizeof(float));
  load_rows<D>(x, is_bfloat16, scan, start - past + missing, n + past - missing, raw + missing * D);
}

// Rows of the convolved view; raw [K - 1 + n, D] is scratch.
template <int D>
VISION_TTT_INLINE void load_convolved_rows(const Tokens& x, bool is_bfloat16, const Scan& scan,
                                           int64_t start, int64_t n, const float* weight,
                                           int64_t taps, float* raw, float* rows) {
  load_seen_rows<D>(x, is_bfloat16, scan, start, n, taps, raw);
  if (taps == 4)
    convolve_rows<D, 4>(raw, weight, taps, n, rows);
  else
    convolve_rows<D, 0>(raw, weight, taps, n, rows);
}

template <int D>
VISION_TTT_INLINE void store_rows(const Tokens& x, bool is_bfloat16, const Scan& scan, int64_t start,
                                  int64_t n, const float* rows) {
  for (int64_t t = 0; t < n; ++t) {
    int64_t offset = scan.batch * x.batch + scan.token(start + t) * x.token + scan.head * x.head;
    const float* row = rows + t * D;
    if (is_bfloat16) {
      Bfloat16* to = static_cast<Bfloat16*>(x.data) + offset;
      for (int j = 0; j < D; j += kLanes) store(to + j, load(row + j));
    } else {
      std::memcpy(static_cast<float*>(x.data) + offset, row, D * sizeof(float));
    }
  }
}

// A token's row of D floats, in registers.
template <int D>
struct Row {
  static constexpr int kVectors = D / kLanes;
  Vector v[kVectors];

  VISION_TTT_INLINE static Row of(const float* p) {
    Row row;
    for (int i = 0; i < kVectors; ++i) row.v[i] = load(p + i * kLanes);
    return row;
  }
  VISION_TTT_INLINE void to(float* p) const {
    for (int i = 0; i < kVectors; ++i) store(p + i * kLanes, v[i]);
  }
  VISION_TTT_INLINE float mean() const {
    Vector total = v[0];
    for (int i = 1; i < kVectors; ++i) total += v[i];
    return sum(total) * (1.0f / D);
  }
  VISION_TTT_INLINE float dot(const Row& other) const {
    Vector total = v[0] * other.v[0];
    for (int i = 1; i < kVectors; ++i) total += v[i] * other.v[i];
    return sum(total);
  }
};

#define VISION_TTT_ROW_OPERATOR(OP)                                          \
  template <int D>                                                           \
  VISION_TTT_INLINE Row<D> operator OP(const Row<D>& a, const Row<D>& b) {   \
    Row<D> out;                                                              \
    for (int i = 0; i < Row<D>::kVectors; ++i) out.v[i] = a.v[i] OP b.v[i];  \
    return out;                                                              \
  }                                                                          \
  template <int D>                                                           \
  VISION_TTT_INLINE Row<D> operator OP(const Row<D>& a, float b) {           \
    Row<D> out;                                                              \
    for (int i = 0; i < Row<D>::kVectors; ++i) out.v[i] = a.v[i] OP b;       \
    return out;                                                              \
  }
VISION_TTT_ROW_OPERATOR(+)
VISION_TTT_ROW_OPERATOR(-)
VISION_TTT_ROW_OPERATOR(*)
#undef VISION_TTT_ROW_OPERATOR

}  // namespace
