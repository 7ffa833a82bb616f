// The backward pass of a SwiGLU MLP, which computes the hidden layer again, in slices of hidden units
// and chunks of tokens, so that intermediate results, the weights in use and the sums of their gradients
// stay in a core's second cache level.
#pragma once

#include "../../functions.h"
#include "../../pointwise/norm_gradient.h"
#include "../../products/linear/pack.h"
#include "../../products/linear/weight_gradient.h"
#include "swiglu_mlp.h"

namespace {

// Given a, b and the gradient of h = SiLU(a) ⊙ b, replace a and b by their gradients, and the gradient
// of h by h.
VISION_TTT_INLINE void swiglu_gradients(float* a, float* b, int64_t row, float* h, int64_t h_row, int64_t rows,
                                        int64_t count) {
  for (int64_t t = 0; t < rows; ++t, a += row, b += row, h += h_row)
    for (int64_t i = 0; i < count; i += kLanes) {
      const Vector value = load(b + i), incoming = load(h + i);
      const Swish f = swish(load(a + i));
      store(a + i, incoming * value * f.derivative);
      store(b + i, incoming * f.value);
      store(h + i, f.value * value);
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
    Scratch scratch(bytes);
    if (!scratch.ok()) return 1;
    const ToPack weights[5] = {{matrices[0], scratch}, {matrices[1], scratch}, {matrices[2], scratch},
                               {matrices[3], scratch}, {matrices[4], scratch}};
    const Weights packed{weights[0].weight(), weights[1].weight(), weights[2].weight(),
                         weights[3].weight(), weights[4].weight()};
    float* of_parts = scratch.take(parts_.count() * floats_of_part());
    pack_all(weights, p_.threads);
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(p_.threads)) if (p_.threads > 1)
    {
      Scratch of_chunk(floats_of_chunk() * sizeof(float));
      if (!of_chunk.ok()) failed = 1;
      for (int64_t first = 0; first < hidden; first += kColumnsAtOnce) {
        const int64_t count = hidden - first < kColumnsAtOnce ? hidden - first : kColumnsAtOnce;
#pragma omp for schedule(static)
        for (int64_t part = 0; part < parts_.count(); ++part) {
          if (!of_chunk.ok()) continue;
          float* sums = of_parts + part * floats_of_part();
          if (!first)
            for (int64_t i = 0; i < 2 * dim; i += kLanes) store(of_norm(sums) + i, Vector{});
          parts_.for_each_chunk(part, [&](int64_t start, int64_t rows, bool is_first) {
            of_chunk.start_over();
            add_chunk(start, rows, packed, first, count, sums, !is_first, of_chunk);
          });
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < count; i += kLanes) add_up(of_parts, first, count, i);
      }
    }
    if (failed) return 1;
    if (p_.norm_weight) {
      add_parts(of_norm(of_parts), floats_of_part(), parts_.count(), p_.dim, p_.dnorm_weight);
      add_parts(of_norm(of_parts) + p_.dim, floats_of_part(), parts_.count(), p_.dim, p_.dnorm_bias);
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

  // A part has the sums for some rows of up's two halves, [2 · kColumnsAtOnce, D], and columns of down,
  // [kColumnsAtOnce, E], then those for the norm, [2, D].
  float* of_norm(float* sums) const { return sums + kColumnsAtOnce * (2 * p_.dim + p_.columns); }
  size_t floats_of_part() const { return kColumnsAtOnce * (2 * p_.dim + p_.columns) + 2 * p_.dim; }

  // A thread has the hidden layer of a chunk, and its normed rows.
  size_t floats_of_chunk() const {
    return kRowsOfChunk * (kRowOfTwo + kRowAtOnce + (p_.norm_weight ? p_.dim : 0));
  }

  void add_chunk(int64_t start, int64_t rows, const Weights& w, int64_t first, int64_t count,
                 float* sums, bool adds, Scratch& of_chunk) const {
    const int64_t dim = p_.dim, columns = p_.columns;
    const float *x = p_.x + start * dim, *grad = p_.grad + start * columns;
    float *a = of_chunk.take(kRowsOfChunk * kRowOfTwo), *b = a + count;
    float* h = of_chunk.take(kRowsOfChunk * kRowAtOnce);
    float* dx = p_.dx + start * dim;
    const float* tokens = x;
    if (p_.norm_weight) {
      float* normed = of_chunk.take(kRowsOfChunk * dim);
      normalise_rows(x, rows, dim, NormParameters{p_.norm_weight, p_.norm_bias, 0, p_.eps}, 0, normed);
      x = normed;
    }

    auto units = [&](const Packed& weight) {
      Part part(weight);
      part.first = first, part.columns = count;
      return part;
    };
    const int64_t left = p_.rows - start - rows, after = left < rows ? left : rows;
    NextRows next;
    next.add(tokens + rows * dim, after, dim, dim);
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

    add_outer_products(a, kRowOfTwo, 2 * count, x, dim, dim, rows, sums, adds, next);
    add_outer_products(h, kRowAtOnce, count, grad, columns, columns, rows, sums + kOfDown * dim, adds,
                       next);
    if (first + count < p_.hidden) return;
    // All slices are in ∂x.
    const float* residual = p_.adds ? grad : nullptr;
    if (p_.norm_weight) {
      float* sums_of_norm = of_norm(sums);
      layer_norm_backward(tokens, rows, dim, p_.norm_weight, p_.eps, residual, dx, sums_of_norm, sums_of_norm + dim);
    } else if (residual) {
      for (int64_t i = 0; i < rows * dim; i += kLanes) store(dx + i, load(dx + i) + load(residual + i));
    }
  }

  // The gradients of kLanes hidden units' weights.
  void add_up(const float* of_parts, int64_t first, int64_t count, int64_t unit) const {
    const int64_t dim = p_.dim, columns = p_.columns, apart = floats_of_part(), parts = parts_.count();
    for (int64_t half = 0; half < 2; ++half)
      for (int64_t i = unit; i < unit + kLanes; ++i)
        add_parts(of_parts + (half * count + i) * dim, apart, parts, dim,
                  p_.dup + (half * p_.hidden + first + i) * dim);
    const float* of_down = of_parts + kOfDown * dim + unit * columns;
    for (int64_t e = 0; e < columns; e += kLanes)
      add_parts_transposed(of_down + e, columns, apart, parts, p_.ddown + e * p_.hidden + first + unit,
                           p_.hidden);
  }
};

}  // namespace
