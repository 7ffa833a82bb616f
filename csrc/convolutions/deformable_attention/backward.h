// The gradients of the value, the locations and the weights, for one head on one level.
#pragma once

#include "../../bfloat16.h"
#include "corners.h"
#include "deformable_attention.h"
#include "sums.h"

namespace {

constexpr int kChunk = 64;  // points at a time

// Each task owns its part of the value's gradient, so that the order of its sums does not depend on
// the threads.
template <class Number>
class HeadOnLevel {
 public:
  HeadOnLevel(const DeformableAttention& p, const DeformableAttentionGradients& g, int64_t batch,
              int64_t head, int64_t level)
      : p_(p), level_(level), height_(p.shapes[2 * level]), width_(p.shapes[2 * level + 1]) {
    int64_t start = 0;
    for (int64_t l = 0; l < level; ++l) start += p.shapes[2 * l] * p.shapes[2 * l + 1];
    value_ = static_cast<const Number*>(p.value) + batch * p.value_batch + start * p.value_token +
             head * p.value_head;
    dvalue_ = g.value + ((batch * p.tokens + start) * p.heads + head) * p.dim;
    grad_ = static_cast<const Number*>(p.out) + batch * p.out_batch + head * p.dim;
    const int64_t first = ((batch * p.queries * p.heads + head) * p.levels + level) * p.points;
    locations_ = p.locations + 2 * first;
    weights_ = p.weights + first;
    dlocations_ = g.locations + 2 * first;
    dweights_ = g.weights + first;
  }

  void run() {
    const int64_t row = p_.heads * p_.dim;
    for (int64_t s = 0; s < height_ * width_; ++s)
      for (int64_t c = 0; c < p_.dim; c += kLanes) store(dvalue_ + s * row + c, Vector{});
    int64_t left = p_.queries * p_.points;
    for (Cursor at{}; left > 0; left -= kChunk) {
      const int size = int(left < kChunk ? left : kChunk);
      read(at, size);
      const int padded = (size + kLanes - 1) / kLanes * kLanes;
      for (int i = 0; i < padded; i += kLanes) locate(i);
      for (int i = 0; i < size; ++i) scatter(i);
      for (int i = 0; i < padded; i += kLanes) differentiate(i);
      write(size);
    }
  }

 private:
  // The next point, and where its query begins among the weights and in the gradient.
  struct Cursor {
    int64_t point, weights, grad;
  };

  void read(Cursor& at, int size) {
    for (int i = 0; i < size; ++i) {
      const int64_t place = at.weights + at.point;
      x_[i] = locations_[2 * place], y_[i] = locations_[2 * place + 1];
      weight_[i] = weights_[place];
      place_[i] = place, grad_at_[i] = at.grad;
      if (++at.point < p_.points) continue;
      at.point = 0;
      prefetch(at);
      at.weights += p_.heads * p_.levels * p_.points, at.grad += p_.out_query;
    }
    for (int i = size; i < kChunk; ++i) x_[i] = y_[i] = weight_[i] = 0.0f;
  }

  // Fetch what a later query reads and writes: other heads are in between, so that the processor does
  // not foresee it. An address beyond the last query does no harm.
  VISION_TTT_INLINE void prefetch(const Cursor& at) const {
    const int64_t ahead = 1 + kChunk / p_.points;
    const Number* grad = grad_ + at.grad + ahead * p_.out_query;
    for (int64_t c = 0; c < p_.dim; c += 64 / sizeof(Number)) __builtin_prefetch(grad + c);
    const int64_t place = at.weights + ahead * p_.heads * p_.levels * p_.points;
    __builtin_prefetch(locations_ + 2 * place);
    __builtin_prefetch(weights_ + place);
    __builtin_prefetch(dlocations_ + 2 * place, 1);
    __builtin_prefetch(dweights_ + place, 1);
  }

  VISION_TTT_INLINE Neighbours columns(int i) const {
    return {load(x_ + i), splat(float(width_)), IntVector{} + int32_t(width_)};
  }
  VISION_TTT_INLINE Neighbours rows(int i) const {
    return {load(y_ + i), splat(float(height_)), IntVector{} + int32_t(height_)};
  }

  void locate(int i) {
    const Neighbours x = columns(i), y = rows(i);
    const Vector weight = load(weight_ + i);
    for (int r = 0; r < 2; ++r)
      for (int c = 0; c < 2; ++c) {
        store(token_[2 * r + c] + i, y.cell[r] * int32_t(width_) + x.cell[c]);
        store(share_[2 * r + c] + i, weight * y.share[r] * x.share[c]);
      }
  }

  // Add the gradient to the cells around point i, and multiply it with their values.
  VISION_TTT_INLINE void scatter(int i) {
    const Number* grad = grad_ + grad_at_[i];
    const int64_t row = p_.heads * p_.dim;
    const Number* value[4];
    float* dvalue[4];
    Vector dot[4] = {}, share[4];
    for (int k = 0; k < 4; ++k) {
      const int64_t token = token_[k][i];
      value[k] = value_ + token * p_.value_token;
      dvalue[k] = dvalue_ + token * row;
      share[k] = splat(share_[k][i]);
    }
    for (int64_t c = 0; c < p_.dim; c += kLanes) {
      const Vector g = load(grad + c);
      for (int k = 0; k < 4; ++k) {
        dot[k] += g * load(value[k] + c);
        store(dvalue[k] + c, load(dvalue[k] + c) + share[k] * g);
      }
    }
    for (int k = 0; k < 4; ++k) store(dot_[k] + i * kLanes, dot[k]);
  }

  // The gradients of kLanes locations and weights from point i on.
  void differentiate(int i) {
    Vector dot[4];
    for (int k = 0; k < 4; ++k) dot[k] = sums(dot_[k] + i * kLanes);
    const Neighbours x = columns(i), y = rows(i);
    const Vector weight = load(weight_ + i);
    Vector dx{}, dy{}, dweight{};
    for (int r = 0; r < 2; ++r) {
      dx += y.share[r] * (x.inside[1] * dot[2 * r + 1] - x.inside[0] * dot[2 * r]);
      dy += x.share[r] * (y.inside[1] * dot[2 + r] - y.inside[0] * dot[r]);
      dweight += y.share[r] * (x.share[0] * dot[2 * r] + x.share[1] * dot[2 * r + 1]);
    }
    store(x_ + i, dx * weight * float(width_));
    store(y_ + i, dy * weight * float(height_));
    store(weight_ + i, dweight);
  }

  void write(int size) {
    for (int i = 0; i < size; ++i) {
      float* location = dlocations_ + 2 * place_[i];
      location[0] = x_[i], location[1] = y_[i];
      dweights_[place_[i]] = weight_[i];
    }
  }

  const DeformableAttention& p_;
  const int64_t level_, height_, width_;
  const Number *value_, *grad_;
  const float *locations_, *weights_;
  float *dvalue_, *dlocations_, *dweights_;
  float x_[kChunk], y_[kChunk], weight_[kChunk];  // of the chunk, then their gradients
  int64_t place_[kChunk], grad_at_[kChunk];       // among the weights, and of its query's gradient
  int32_t token_[4][kChunk];                // the cells around each point
  float share_[4][kChunk];                  // and how much they count
  float dot_[4][kChunk * VISION_TTT_LANES] = {};  // of the gradient and each cell, summed by lanes
};

}  // namespace
