// Chunks of tokens, whose intermediate results stay in a core's second cache level.
#pragma once

#include <atomic>

#include "../../amx/tiles.h"
#include "../../scratch.h"
#include "../../vector.h"

namespace {

// Neighbouring tokens of one image.
struct Chunk {
  int64_t image, start, count;
};

constexpr int64_t kTileOfRows = 6;  // the rows of a product's registers
constexpr int64_t kRowsOfChunk = kHasTiles ? 6 * kRowsOfTile : 17 * kTileOfRows;

// The division of images of `length` tokens into chunks, of equal size but for one token; for few
// images into as many chunks as the threads can share evenly, but of `least` tokens or so.
struct Chunks {
  int64_t batch, length, of_image;

  Chunks(int64_t images, int64_t tokens, int64_t threads, int64_t least = kTileOfRows)
      : batch(images), length(tokens) {
    of_image = (tokens + kRowsOfChunk - 1) / kRowsOfChunk;
    if (images % threads) of_image = (of_image + threads - 1) / threads * threads;
    const int64_t tiles = (tokens + least - 1) / least;
    if (of_image > tiles) of_image = tiles;
  }

  int64_t count() const { return batch * of_image; }

  // Groups of an image's chunks, of which every thread has about four, see for_each_group().
  int64_t groups(int64_t threads) const {
    const int64_t wanted = (4 * threads + batch - 1) / batch;
    return wanted < of_image ? wanted : of_image;
  }

  // The tokens of the largest chunk.
  int64_t most() const {
    int64_t tokens = 0;
    for (int64_t n = 0; n < of_image; ++n)
      if (begin(n + 1) - begin(n) > tokens) tokens = begin(n + 1) - begin(n);
    return tokens;
  }

  Chunk operator[](int64_t i) const {
    const int64_t n = i % of_image;
    return {i / of_image, begin(n), begin(n + 1) - begin(n)};
  }

 private:
  int64_t begin(int64_t n) const { return n * length / of_image; }
};

// Call body(chunk, scratch) for every chunk, with so many bytes per thread. Where every thread has one chunk
// at most, it has the same one in every pass: what it wrote is in its own caches. More chunks are scheduled
// dynamically.
template <class Body>
int for_each_chunk(const Chunks& chunks, int64_t threads, size_t bytes, const Body& body) {
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
    Scratch scratch(bytes);
    if (!scratch.ok()) failed = 1;
    auto run = [&](int64_t i) {
      if (!scratch.ok()) return;
      scratch.start_over();
      const Chunk chunk = chunks[i];
      if (chunk.count) body(chunk, scratch);
    };
    if (chunks.count() <= threads) {
#pragma omp for schedule(static, 1)
      for (int64_t i = 0; i < chunks.count(); ++i) run(i);
    } else {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < chunks.count(); ++i) run(i);
    }
  }
  return failed;
}

// Call begin(group) for every group of an image's chunks, and body(group, chunk, scratch) for each of them in
// turn, by one thread. An image has `groups` of them, neighbouring chunks each; a group's number counts all.
template <class Begin, class Body>
int for_each_group(const Chunks& chunks, int64_t groups, int64_t threads, size_t bytes, const Begin& begin,
                   const Body& body) {
  std::atomic<int> failed{0};
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
  {
    Scratch scratch(bytes);
    if (!scratch.ok()) failed = 1;
#pragma omp for schedule(dynamic, 1)
    for (int64_t group = 0; group < chunks.batch * groups; ++group) {
      if (!scratch.ok()) continue;
      begin(group);
      const int64_t image = group / groups, place = group % groups;
      const int64_t stop = (place + 1) * chunks.of_image / groups;
      for (int64_t i = place * chunks.of_image / groups; i < stop; ++i) {
        scratch.start_over();
        body(group, chunks[image * chunks.of_image + i], scratch);
      }
    }
  }
  return failed;
}

}  // namespace
