// The MLP of a block on a chunk of tokens.
#pragma once

#include "product.h"
#include "rows.h"

namespace {

constexpr int64_t kHiddenAtOnce = 256;

// y ← y + W₂ (SiLU(W_g x) ⊙ W_v x) for rows of x [rows, D], some hidden units after the others.
template <class Element>
struct SwiGluMlp {
  const Packed &gate, &value, &out;

  static size_t bytes(int64_t rows) {
    const size_t numbers = rows * kHiddenAtOnce;
    return 2 * Buffers::padded(numbers * sizeof(float)) + Buffers::padded(numbers * sizeof(Element));
  }

  void operator()(const Element* x, int64_t rows, float* y, Buffers& buffers) const {
    float* a = buffers.take<float>(rows * kHiddenAtOnce);
    float* b = buffers.take<float>(rows * kHiddenAtOnce);
    Element* h = buffers.take<Element>(rows * kHiddenAtOnce);
    const int64_t dim = out.columns, hidden = out.inner;
    for (int64_t start = 0; start < hidden; start += kHiddenAtOnce) {
      const int64_t left = hidden - start;
      const int64_t count = left < kHiddenAtOnce ? left : kHiddenAtOnce;
      Part some(gate);
      some.first = start, some.columns = count;
      product(x, dim, rows, gate, some, Sink<float>{a, count, count});
      product(x, dim, rows, value, some, Sink<float>{b, count, count});
      swiglu_numbers(a, b, rows * count, h);
      Part sums(out);
      sums.inner_start = start, sums.inner = count;
      product(h, count, rows, out, sums, Sink<float>{y, dim, dim, nullptr, nullptr, y, dim});
    }
  }
};

}  // namespace
