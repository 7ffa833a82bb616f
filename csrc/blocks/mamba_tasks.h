// How the threads share the directions of a batch of images, and the tokens of an image.
#pragma once

#include <memory>
#include <new>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "../products/packed/chunks.h"
#include "team.h"

namespace {

// A task is a whole image, as many for every thread, or a direction of an image that remains. Where
// there are more threads than tasks, a team works on each. Of a band one direction is a task.
struct MambaTasks {
  int64_t threads, whole, count, teams;

  MambaTasks(int64_t batch, int64_t num_threads, int64_t directions)
      : threads(num_threads), whole(directions == 1 ? 0 : batch / threads * threads),
        count(whole + directions * (batch - whole)),
        teams(threads < count ? threads : count) {}

  int64_t smallest_team() const { return threads / teams; }
  int64_t members(int64_t team) const { return (threads - team + teams - 1) / teams; }
};

// The tokens of an image in chunks: an even number of them, so that directions meet between two.
struct MambaChunks {
  static constexpr int64_t kRowsOfThread = 72;
  int64_t length, rows, count;  // rows: at most

  MambaChunks(int64_t tokens, int64_t threads)
      : length(tokens), rows(kRowsOfThread * threads + kTileOfRows) {
    const int64_t two = 2 * kRowsOfThread * threads;
    const int64_t tiles = (tokens + kTileOfRows - 1) / kTileOfRows;
    count = (tokens + two - 1) / two * 2;
    if (count > tiles) count = tiles;
  }
  int64_t begin(int64_t n) const {
    return n == count ? length : n * length / count / kTileOfRows * kTileOfRows;
  }
};

// Call body(image, back, chunks, member) for both directions of all images, in all threads of a team.
template <class Body>
int for_each_direction(int64_t batch, int64_t length, int64_t most_threads, int64_t directions, const Body& body) {
  const std::unique_ptr<Meeting[]> meetings(new (std::nothrow) Meeting[most_threads]);
  if (!meetings) return 1;
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(int(most_threads)) if (most_threads > 1)
  {
#ifdef _OPENMP  // may provide fewer threads
    const int64_t threads = omp_get_num_threads(), thread = omp_get_thread_num();
#else
    const int64_t threads = 1, thread = 0;
#endif
    const MambaTasks tasks(batch, threads, directions);
    const MambaChunks chunks(length, tasks.smallest_team());
    const int64_t team = thread % tasks.teams;
    const Member member{meetings[team], team, thread / tasks.teams, tasks.members(team)};
    auto run = [&](int64_t task) {
      const int64_t direction = task - tasks.whole;
      if (direction >= 0) return body(tasks.whole + direction / 2, direction % 2 == 1, chunks, member);
      body(task, false, chunks, member);
      body(task, true, chunks, member);
    };
    if (tasks.teams == tasks.count)
      run(team);
    else  // every thread is a team
      for (int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks.count;) run(task);
  }
  return 0;
}

}  // namespace
