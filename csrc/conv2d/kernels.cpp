// The depth-wise Conv2d, for one instruction set. The build compiles this file once for each.
#include "norm_backward.h"

namespace {

// Compute y, and call finish(y_t, t) with the place t in all images' tokens for each token.
template <class Finish>
int convolve_tokens(const Conv2d& p, const Finish& finish) {
  const Transposed weight(p.weight, p.channels, p.kernel * p.kernel);
  if (!weight.data()) return 1;
  const TokenConvolution<float> convolve = convolution(p, weight);
  const int64_t tasks = p.batch * p.height;  // rows of tokens
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t batch = task / p.height, row = task % p.height;
    for (int64_t t = row * p.width; t < (row + 1) * p.width; ++t) {
      float* y = token(p.y, batch, t);
      convolve(token(p.x, batch, t), t, y);
      finish(y, batch * p.height * p.width + t);
    }
  }
  return 0;
}

}  // namespace

int VISION_TTT_KERNEL(conv2d)(const Conv2d& p) {
  return convolve_tokens(p, [](float*, int64_t) {});
}

int VISION_TTT_KERNEL(conv2d_norm)(const Conv2dNorm& p) {
  const int64_t channels = p.conv.channels;
  const NormParameters norm{p.weight, p.bias, 0, p.eps};
  return convolve_tokens(p.conv, [&](float* y, int64_t t) {
    normalise_rows(y, 1, channels, norm, 0, p.normed + t * channels);
  });
}

int VISION_TTT_KERNEL(conv2d_norm_backward)(const Conv2dNorm& p) { return Conv2dNormBackward(p).run(); }

void VISION_TTT_KERNEL(conv2d_weight)(const Conv2d& p, float* weight) {
  const int64_t columns = p.channels / kLanes;
  // A vector of channels belongs to one task, so that the order of its sums does not depend on the threads.
#pragma omp parallel for schedule(static) num_threads(int(p.threads)) if (p.threads > 1)
  for (int64_t column = 0; column < columns; ++column) {
    const int64_t c = column * kLanes;
    auto image = [&](int64_t n) {
      return TokensAndGradients{token(p.x, n, 0) + c, token(p.y, n, 0) + c, p.x.token, p.y.token,
                                p.height, p.width, 0, p.height};
    };
    store_tap_sums(p.kernel, p.batch, image, p.channels, weight + c);
  }
}
