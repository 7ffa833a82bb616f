// The backward pass of a Conv2d with a norm behind it, in bands of an image's rows: what lies between the incoming
// gradients and those of x and the parameters stays in a core's second cache level.
#pragma once

#include <cstring>

#include "../linear/weight_gradient.h"
#include "../packed/norm_gradient.h"
#include "../transposed.h"
#include "conv2d.h"
#include "tap_sums.h"

namespace {

VISION_TTT_INLINE float* token(const Sequence& s, int64_t batch, int64_t t) {
  return s.data + batch * s.batch + t * s.token;
}

TokenConvolution<float> convolution(const Conv2d& p, const Transposed& weight) {
  return {p.x.token, p.height, p.width, p.channels, p.kernel, weight.data(), p.channels, nullptr, p.residual != 0};
}

class Conv2dNormBackward {
 public:
  explicit Conv2dNormBackward(const Conv2dNorm& p)
      : p_(p), conv_(p.conv), half_(conv_.kernel / 2), tokens_(conv_.height * conv_.width),
        weight_(conv_.weight, conv_.channels, conv_.kernel * conv_.kernel) {
    const int64_t row = conv_.width * conv_.channels * int64_t(sizeof(float));
    const int64_t most = kBytesOfBand / row - 2 * half_;
    rows_of_band_ = most < 1 ? 1 : most;
    of_image_ = (conv_.height + rows_of_band_ - 1) / rows_of_band_;
  }

  int run() const {
    const int64_t bands = conv_.batch * of_image_, channels = conv_.channels;
    Buffers buffers(bands * floats_of_sums() * sizeof(float));
    if (!weight_.data() || !buffers.ok()) return 1;
    float* sums = buffers.take<float>(bands * floats_of_sums());
    std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(conv_.threads)) if (conv_.threads > 1)
    {
      Buffers own(floats_of_band() * sizeof(float));
      if (!own.ok()) failed = 1;
#pragma omp for schedule(static)
      for (int64_t band = 0; band < bands; ++band) {
        if (!own.ok()) continue;
        own.start_over();
        run_band(band / of_image_, band % of_image_ * rows_of_band_, sums + band * floats_of_sums(), own);
      }
    }
    if (failed) return 1;
    // The bands depend on the sizes only, so that the bits of a sum do not depend on the threads.
    auto add_up = [&](int64_t first, int64_t count, float* out) {
      add_parts(sums + first * channels, floats_of_sums(), bands, count * channels, out);
    };
    const int64_t taps = conv_.kernel * conv_.kernel;
    add_up(0, taps, p_.dtaps);
    add_up(taps, 1, p_.dweight);
    add_up(taps + 1, 1, p_.dbias);
    return 0;
  }

 private:
  static constexpr int64_t kBytesOfBand = 512 * 1024;

  const Conv2dNorm& p_;
  const Conv2d& conv_;
  int64_t half_, tokens_, rows_of_band_, of_image_;
  Transposed weight_;

  // Of the taps [K · K, C], and of the norm's weight and bias.
  int64_t floats_of_sums() const { return (conv_.kernel * conv_.kernel + 2) * conv_.channels; }
  // The gradients of a band's tokens and of their neighbours, a token, and sums that nobody wants.
  int64_t floats_of_band() const {
    return ((rows_of_band_ + 2 * half_) * conv_.width + 3) * conv_.channels;
  }

  void run_band(int64_t image, int64_t first, float* sums, Buffers& own) const {
    const int64_t channels = conv_.channels, width = conv_.width, kernel = conv_.kernel;
    const int64_t end = first + rows_of_band_ < conv_.height ? first + rows_of_band_ : conv_.height;
    const int64_t above = first < half_ ? 0 : first - half_;
    const int64_t below = end + half_ < conv_.height ? end + half_ : conv_.height;
    float* grads = own.take<float>(floats_of_band());  // of y, from the row `above` on
    float* y = grads + (below - above) * width * channels;
    float *of_norm = sums + kernel * kernel * channels, *unwanted = y + channels;
    for (int64_t i = 0; i < 2 * channels; i += kLanes) store(of_norm + i, Vector{});

    const TokenConvolution<float> convolve = convolution(conv_, weight_);
    for (int64_t row = above; row < below; ++row) {
      float* dweight = row >= first && row < end ? of_norm : unwanted;
      for (int64_t t = row * width; t < (row + 1) * width; ++t) {
        const int64_t at = (image * tokens_ + t) * channels;
        float* grad = grads + (t - above * width) * channels;
        convolve(token(conv_.x, image, t), t, y);
        std::memcpy(grad, p_.dnormed + at, channels * sizeof(float));
        layer_norm_backward(y, 1, channels, p_.weight, p_.eps, p_.dy + at, grad, dweight, dweight + channels);
      }
    }

    // ∂x is the convolution of the gradient with the kernel mirrored in both axes. Rows beyond the grads are
    // beyond the image.
    TokenConvolution<float> back = convolve;
    back.x_row = channels, back.height = below - above;
    back.weight = weight_.data() + (kernel * kernel - 1) * channels, back.weight_row = -channels;
    for (int64_t t = first * width; t < end * width; ++t) {
      const int64_t place = t - above * width;
      back(grads + place * channels, place, token(conv_.y, image, t));
    }

    const float *x = token(conv_.x, image, 0), *grad = grads + (first - above) * width * channels;
    for (int64_t c = 0; c < channels; c += kLanes) {
      const TokensAndGradients group{x + c, grad + c, conv_.x.token, channels, conv_.height, width, first, end};
      store_tap_sums(kernel, 1, [&](int64_t) { return group; }, channels, sums + c);
    }
  }
};

}  // namespace
