// A linear layer in training, for one instruction set. The build compiles this file once for each.
#include "linear.h"

#include "pack.h"
#include "weight_gradient.h"

namespace {

constexpr int64_t kInnerAtOnce = 2048;

// out [N, columns of the weight] = x weight + bias by a weight that is packed first.
int multiply(const float* x, const Matrix& matrix, const float* bias, float* out, int64_t rows,
             int64_t threads) {
  Scratch scratch(ToPack::bytes(matrix));
  if (!scratch.ok()) return 1;
  const ToPack weight[1] = {{matrix, scratch}};
  pack_all(weight, threads);
  const Packed packed = weight[0].weight();
  // All tokens use a part of a deep weight before the next one, since the last cache level holds no more.
  Part part(packed);
  int failed = 0;
  for (int64_t start = 0; start < matrix.inner && !failed; start += kInnerAtOnce) {
    part.inner_start = start;
    part.inner = matrix.inner - start < kInnerAtOnce ? matrix.inner - start : kInnerAtOnce;
    failed = for_each_chunk(Chunks(1, rows, threads), threads, 0, [&](const Chunk& c, Scratch&) {
      float* sums = out + c.start * matrix.columns;
      // Threads take chunks in turns, so that a thread's next one begins about here.
      const int64_t ahead = c.start + threads * c.count, left = rows - ahead;
      const int64_t after = left < c.count ? left : c.count;
      NextRows next;
      next.add(x + ahead * matrix.inner + start, after, matrix.inner, part.inner);
      next.add(out + ahead * matrix.columns, after, matrix.columns, matrix.columns);
      next.spread(steps_of_product(c.count, part.inner, matrix.columns));
      product(x + c.start * matrix.inner + start, matrix.inner, c.count, packed, part,
              Sink<float>{sums, matrix.columns, matrix.columns, start ? nullptr : bias, nullptr,
                          start ? sums : nullptr, matrix.columns}, {}, &next);
    });
  }
  return failed;
}

Matrix transposed(const Linear& p) {
  return Matrix::transposed(p.weight, p.inner, p.columns, p.inner);
}

// dx = grad · weight, and the weight's gradient, in slices of columns whose weights, sums and tokens of a chunk
// stay in a core's second cache level.
class LinearBackward {
 public:
  explicit LinearBackward(const Linear& p) : p_(p), parts_(p.rows) {}

  int run() const {
    const Matrix matrix = transposed(p_);
    Scratch scratch(ToPack::bytes(matrix) + parts_.count() * floats_of_part() * sizeof(float));
    if (!scratch.ok()) return 1;
    const ToPack weight[1] = {{matrix, scratch}};
    float* of_parts = scratch.take(parts_.count() * floats_of_part());
    pack_all(weight, p_.threads);
    const Packed packed = weight[0].weight();
#pragma omp parallel num_threads(int(p_.threads)) if (p_.threads > 1)
    for (int64_t first = 0; first < p_.columns; first += kColumnsOfSlice) {
      const int64_t left = p_.columns - first;
      const int64_t count = left < kColumnsOfSlice ? left : kColumnsOfSlice;
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts_.count(); ++part) {
        float* sums = of_parts + part * floats_of_part();
        parts_.for_each_chunk(part, [&](int64_t start, int64_t rows, bool is_first) {
          add_chunk(start, rows, packed, first, count, sums, !is_first);
        });
      }
#pragma omp for schedule(static)
      for (int64_t i = 0; i < count; i += kLanes) add_up(of_parts, first, count, i);
    }
    return 0;
  }

 private:
  const Linear& p_;
  Parts parts_;

  size_t floats_of_part() const {  // sums
    return (p_.columns < kColumnsOfSlice ? p_.columns : kColumnsOfSlice) * p_.inner;
  }

  // Add to dx; begin the sums [D, count] of the transposed gradient, or add to them.
  void add_chunk(int64_t start, int64_t rows, const Packed& weight, int64_t first, int64_t count,
                 float* sums, bool adds) const {
    const int64_t inner = p_.inner, columns = p_.columns;
    const float *grad = p_.grad + start * columns + first, *x = p_.x + start * inner;
    float* dx = p_.dx + start * inner;
    const int64_t left = p_.rows - start - rows, after = left < rows ? left : rows;
    NextRows next;
    next.add(grad + rows * columns, after, columns, count);
    next.add(x + rows * inner, after, inner, inner);
    next.add(dx + rows * inner, after, inner, inner);
    next.spread(2 * steps_of_product(rows, count, inner));

    Part part(weight);
    part.inner_start = first, part.inner = count;
    product(grad, columns, rows, weight, part,
            Sink<float>{dx, inner, inner, nullptr, nullptr, first ? dx : nullptr, inner}, {}, &next);
    for (int64_t i = 0; i < inner; i += kMostColumns)
      add_outer_products_of_any(x + i, inner, inner - i < kMostColumns ? inner - i : kMostColumns, grad,
                                columns, count, rows, sums + i * count, adds, next);
  }

  // The gradients of kLanes columns' weights.
  void add_up(const float* of_parts, int64_t first, int64_t count, int64_t column) const {
    for (int64_t i = 0; i < p_.inner; i += kLanes)
      add_parts_transposed(of_parts + i * count + column, count, floats_of_part(), parts_.count(),
                           p_.dweight + (first + column) * p_.inner + i, p_.inner);
  }
};

}  // namespace

int VISION_TTT_KERNEL(linear)(const Linear& p) {
  const Matrix matrix = Matrix::of(p.weight, p.columns, p.inner);
  return multiply(p.x, matrix, p.bias, p.out, p.rows, p.threads);
}

int VISION_TTT_KERNEL(linear_backward)(const Linear& p) {
  const GradientTiles tiles{p.columns, p.inner};
  if (tiles.count() < kThreadsToServe) return LinearBackward(p).run();
  const int failed = multiply(p.grad, transposed(p), nullptr, p.dx, p.rows, p.threads);
  return failed ? failed : tiles.sum(p.grad, p.x, p.rows, p.dweight, p.threads);
}
