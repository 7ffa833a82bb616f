// The backward pass of a SwiGLU MLP, which computes the hidden layer again, in slices of hidden units
// and chunks of tokens, so that intermediate results, the weights in use and the sums of their gradients
// stay in a core's second cache level.
#pragma once

#include "../functions.h"
#include "../linear/pack.h"
#include "../linear/weight_gradient.h"
#include "swiglu_mlp.h"

namespace {

// Given a, b and the gradient of h = SiLU(a) ⊙ b, replace a and b by their gradients, and the gradient
// of h by h.
VISION_TTT_INLINE void swiglu_gradients(float* a, float* b, int64_t row, float* h, int64_t h_row, int64_t rows,
                                        int64_t count) {
  for (int64_t t = 0; t < rows; ++t, a += row, b += row, h += h_row)
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vector x = load(a + i), value = load(b + i), incoming = load(h + i), s = sigmoid(x);
      store(a + i, incoming * value * (s + x * s * (1.0f - s)));
      store(b + i, incoming * x * s);
      store(h + i, x * s * value);
    }
}

class SwiGluMlpBackward {
 public:
  explicit SwiGluMlpBackward(const SwiGluMlpProblem& p) : p_(p), parts_(p.rows) {}

  int run() const {
    const int64_t dim = p_.dim, hidden = p_.hidden, columns = p_.columns;
    const Matrix matrices[5] = {Matrix::of(p_.up, hidden, dim),
                                Matrix::of(p_.up + hidden * dim, hidden, dim),
                                Matrix::transposed(p_.down, hidden, columns, hidden),
                                Matrix::transposed(p_.up, dim, hidden, dim),
                                Matrix::transposed(p_.up + hidden * dim, dim, hidden, dim)};
    size_t bytes = parts_.count() * floats_of_part() * sizeof(float);
    for (const Matrix& matrix : matrices) bytes += ToPack::bytes(matrix);
    Buffers buffers(bytes);
    if (!buffers.ok()) return 1;
    const ToPack weights[5] = {{matrices[0], buffers}, {matrices[1], buffers}, {matrices[2], buffers},
                               {matrices[3], buffers}, {matrices[4], buffers}};
    const Weights packed{weights[0].weight(), weights[1].weight(), weights[2].weight(),
                         weights[3].weight(), weights[4].weight()};
    float* of_parts = buffers.take<float>(parts_.count() * floats_of_part());
    pack_all(weights, p_.threads);
#pragma omp parallel num_threads(int(p_.threads)) if (p_.threads > 1)
    for (int64_t first = 0; first < hidden; first += kColumnsAtOnce) {
      const int64_t count = hidden - first < kColumnsAtOnce ? hidden - first : kColumnsAtOnce;
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts_.count(); ++part) {
        float* memory = of_parts + part * floats_of_part();
        for (size_t i = 0; i < sums(); i += kLanes) store(memory + i, Vector{});
        parts_.for_each_chunk(part, [&](int64_t start, int64_t rows) {
          add_chunk(start, rows, packed, first, count, memory);
        });
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; ++i) add_up(of_parts, first, count, i);
    }
    return 0;
  }

 private:
  // Those with "back" take gradients to the layer's input.
  struct Weights {
    Packed gate, value, down_back, gate_back, value_back;
  };

  const SwiGluMlpProblem& p_;
  Parts parts_;

  // Gates and values of a hidden layer are neighbours.
  static constexpr int64_t kRowOfTwo = 2 * kColumnsAtOnce + 16;
  static constexpr int64_t kOfDown = 2 * kColumnsAtOnce;

  // The memory of a part: the sums for some rows of up's two halves, [2 · kColumnsAtOnce, D], and columns
  // of down, [kColumnsAtOnce, E], then the hidden layer of a chunk.
  size_t sums() const { return kColumnsAtOnce * (2 * p_.dim + p_.columns); }
  size_t floats_of_part() const { return sums() + kRowsOfChunk * (kRowOfTwo + kRowAtOnce); }

  void add_chunk(int64_t start, int64_t rows, const Weights& w, int64_t first, int64_t count,
                 float* memory) const {
    const int64_t dim = p_.dim, columns = p_.columns;
    const float *x = p_.x + start * dim, *grad = p_.grad + start * columns;
    float *a = memory + sums(), *b = a + count, *h = a + kRowsOfChunk * kRowOfTwo;
    float* dx = p_.dx + start * dim;

    auto units = [&](const Packed& weight) {
      Part part(weight);
      part.first = first, part.columns = count;
      return part;
    };
    const int64_t left = p_.rows - start - rows, after = left < rows ? left : rows;
    NextRows next;
    next.add(x + rows * dim, after, dim, dim);
    next.add(grad + rows * columns, after, columns, columns);
    next.add(dx + rows * dim, after, dim, dim);
    next.spread(6 * steps_of_product(rows, dim, count) + 3 * steps_of_product(rows, columns, count));

    two_products(x, dim, rows, w.gate, w.value, units(w.gate), a, kRowOfTwo, next);
    product(grad, columns, rows, w.down_back, units(w.down_back), Sink<float>{h, kRowAtOnce, count}, {},
            &next);
    swiglu_gradients(a, b, kRowOfTwo, h, kRowAtOnce, rows, count);

    auto back = [&](const float* from, const Packed& weight, const float* add) {
      Part part(weight);
      part.inner_start = first, part.inner = count;
      product(from, kRowOfTwo, rows, weight, part,
              Sink<float>{dx, dim, dim, nullptr, nullptr, add, dim}, {}, &next);
    };
    back(a, w.gate_back, first ? dx : nullptr);
    back(b, w.value_back, dx);

    add_outer_products(a, kRowOfTwo, 2 * count, x, dim, dim, rows, memory, next);
    add_outer_products(h, kRowAtOnce, count, grad, columns, columns, rows, memory + kOfDown * dim,
                       next);
  }

  // The gradients of one hidden unit's weights.
  void add_up(float* of_parts, int64_t first, int64_t count, int64_t i) const {
    const int64_t dim = p_.dim, columns = p_.columns, apart = floats_of_part();
    for (int64_t half = 0; half < 2; ++half)
      add_parts(of_parts + (half * count + i) * dim, apart, parts_.count(), dim,
                p_.dup + (half * p_.hidden + first + i) * dim);
    float* down = of_parts + kOfDown * dim + i * columns;
    add_parts(down, apart, parts_.count(), columns, down);
    for (int64_t e = 0; e < columns; ++e) p_.ddown[e * p_.hidden + first + i] = down[e];
  }
};

}  // namespace
