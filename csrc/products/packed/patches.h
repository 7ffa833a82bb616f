// A linear layer of an image's patches, which are copied into rows a chunk at a time.
#pragma once

#include "linear.h"

namespace {

template <class Element, class In>
int patches(const PackedPatches& p) {
  const int64_t inner = p.weight.inner, columns = p.weight.columns;
  constexpr int64_t step = step_of(static_cast<const Element*>(nullptr));
  const int64_t padded = (inner + step - 1) / step * step, height = inner / (p.channels * p.patch_width);
  const int64_t rows = p.grid_height * p.grid_width;
  const int64_t at_once = rows < kRowsOfTile ? rows : p.batch * rows;  // chunks are of one image
  const ForRows given(p.weight, static_cast<const Element*>(nullptr), at_once, p.threads);
  if (!given.ok()) return 1;
  const Chunks chunks(p.batch, rows, p.threads);
  const size_t bytes = Scratch::padded(chunks.most() * padded * sizeof(Element));
  return for_each_chunk(chunks, p.threads, bytes, [&](const Chunk& c, Scratch& scratch) {
    Element* x = scratch.take<Element>(c.count * padded);
    const In* image = static_cast<const In*>(p.images) + c.image * p.image_stride;
    for (int64_t t = 0; t < c.count;) {  // up to the end of a row of the grid
      const int64_t i = (c.start + t) / p.grid_width, j = (c.start + t) % p.grid_width;
      const int64_t end = t + p.grid_width - j < c.count ? t + p.grid_width - j : c.count;
      for (int64_t start = 0; start < inner; start += p.patch_width) {  // of a row of pixels
        const int64_t channel = start / p.patch_width / height, row = start / p.patch_width % height;
        const In* from = image + channel * p.channel_stride + (i * height + row) * p.row_stride;
        // The last row of a patch takes the padding, too.
        const int64_t last = start + p.patch_width == inner ? padded - inner : 0;
        for (int64_t n = t; n < end; ++n)
          copy_padded(from + (j + n - t) * p.patch_width, p.patch_width, x + n * padded + start,
                      p.patch_width + last);
      }
      t = end;
    }
    In* out = static_cast<In*>(p.out) + (c.image * p.grid_height * p.grid_width + c.start) * columns;
    product(x, padded, c.count, given.weight(), Sink<In>{out, columns, columns, p.weight.bias});
  });
}

}  // namespace
