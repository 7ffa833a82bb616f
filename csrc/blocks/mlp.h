// The MLP of a block on a chunk of tokens.
#pragma once

#include "../pointwise/rows.h"
#include "../products/packed/chunks.h"
#include "../products/packed/product.h"

namespace {

constexpr int64_t kHiddenAtOnce = 256;

// y ← y + W₂ (SiLU(W_g x) ⊙ W_v x) for rows of x [rows, D], in slices of hidden units.
template <class Element>
struct SwiGluMlp {
  const Packed &gate, &value, &out;

  static size_t bytes(int64_t rows) {
    const size_t numbers = rows * kHiddenAtOnce;
    return 2 * Scratch::padded(numbers * sizeof(float)) + Scratch::padded(numbers * sizeof(Element));
  }

  // `next` is what is multiplied with after it, as in product().
  void operator()(const Element* x, int64_t rows, float* y, Scratch& scratch,
                  const Pieces& next = {}) const {
    float* a = scratch.take(rows * kHiddenAtOnce);
    float* b = scratch.take(rows * kHiddenAtOnce);
    Element* h = scratch.take<Element>(rows * kHiddenAtOnce);
    const int64_t dim = out.columns, hidden = out.inner;
    for (int64_t start = 0; start < hidden; start += kHiddenAtOnce) {
      const int64_t left = hidden - start;
      const int64_t count = left < kHiddenAtOnce ? left : kHiddenAtOnce;
      Part some(gate);
      some.first = start, some.columns = count;
      Part sums(out);
      sums.inner_start = start, sums.inner = count;
      Part following(gate);
      following.first = start + count;
      const auto finish = [=](int64_t row, int64_t column, Vector g, Vector v) __attribute__((always_inline)) {
        store(h + row * count + column, g * sigmoid(g) * v);
      };
      if (!two_products_by_tiles(x, gate.inner, rows, gate, value, some, finish)) {
        product(x, gate.inner, rows, gate, some, Sink<float>{a, count, count},
                begin_of<Element>(value, some));
        product(x, gate.inner, rows, value, some, Sink<float>{b, count, count},
                begin_of<Element>(out, sums));
        swiglu_numbers(a, b, rows * count, h);
      }
      product(h, count, rows, out, sums, Sink<float>{y, dim, dim, nullptr, nullptr, y, dim},
              following.first < hidden ? begin_of<Element>(gate, following) : next);
    }
  }
};

// y ← y + g ⊙ (W₂ GELU(W₁ x + b₁) + b₂) for rows of x [rows, D], in slices of hidden units.
template <class Element>
struct GeluMlp {
  const Packed &fc1, &fc2;
  bool tanh_form;

  static size_t bytes(int64_t rows) {
    const size_t numbers = rows * kHiddenAtOnce;
    return Scratch::padded(numbers * sizeof(float)) + Scratch::padded(numbers * sizeof(Element));
  }

  void operator()(const Element* x, int64_t rows, const float* gate, float* y,
                  Scratch& scratch) const {
    float* z = scratch.take(rows * kHiddenAtOnce);
    Element* h = scratch.take<Element>(rows * kHiddenAtOnce);
    for (int64_t start = 0; start < fc1.columns; start += kHiddenAtOnce) {
      const int64_t count = hidden_at(start);
      first(x, rows, start, count, z, begin_of<Element>(fc2, sums_of(start)));
      gelu_numbers(z, rows * count, tanh_form, h);
      second(h, rows, start, count, gate, y, begin(start + count));
    }
  }

  int64_t hidden_at(int64_t start) const {
    const int64_t left = fc1.columns - start;
    return left < kHiddenAtOnce ? left : kHiddenAtOnce;
  }
  // What is multiplied with first from hidden unit `start` on.
  Pieces begin(int64_t start) const {
    return start < fc1.columns ? begin_of<Element>(fc1, units_of(start)) : Pieces{};
  }
  void first(const Element* x, int64_t rows, int64_t start, int64_t count, float* z,
             const Pieces& next = {}) const {
    product(x, fc1.inner, rows, fc1, units_of(start),
            Sink<float>{z, count, count, fc1.bias + start}, next);
  }
  void second(const Element* h, int64_t rows, int64_t start, int64_t count, const float* gate,
              float* y, const Pieces& next = {}) const {
    const int64_t dim = fc2.columns;
    const float* bias = start ? nullptr : fc2.bias;
    product(h, count, rows, fc2, sums_of(start), Sink<float>{y, dim, dim, bias, gate, y, dim},
            next);
  }

 private:
  Part units_of(int64_t start) const {
    Part part(fc1);
    part.first = start, part.columns = hidden_at(start);
    return part;
  }
  Part sums_of(int64_t start) const {
    Part part(fc2);
    part.inner_start = start, part.inner = hidden_at(start);
    return part;
  }
};

}  // namespace
