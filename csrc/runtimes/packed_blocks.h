// Blocks on packed weights as a runtime's node has them: what the nodes of all runtimes share.
//
// The inputs are the tokens [B, T, D]; one vector with the weights of N blocks; the structures of blocks.h
// that describe these blocks, [N, words]; the grid (h, w) of the tokens; and for some blocks rotations. In a
// structure a pointer is its offset in the weights, and what one call alone knows is 0.
#pragma once

#ifdef __linux__
#include <sched.h>
#endif

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "../aligned_memory.h"
#include "../blocks/blocks.h"

extern "C" VISION_TTT_EXPORT int64_t vision_ttt_sizeof(const char* structure);
extern "C" VISION_TTT_EXPORT const char* vision_ttt_instruction_set();

namespace {

using Words = std::vector<int64_t>;

// Throws the parts of a message, in one line, unless the condition holds.
template <class Condition, class... Parts>
void require(const Condition& condition, const Parts&... parts) {
  if (condition) return;
  std::ostringstream message;
  message << "vision_ttt: ";
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// What a word of a structure is. A pointer is its offset + kBase in bytes, or 0 for null.
enum Kind : int64_t { kNumber, kPointer, kPacked };  // kPacked: the first word of a `Packed`
constexpr int64_t kBase = 64;

struct Memory {
  void* data;
  explicit Memory(size_t bytes) : data(allocate_aligned(bytes)) {
    require(data, "not enough memory");
  }
  ~Memory() { free_aligned(data); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
};

struct Call {
  const float* y;
  float* out;
  int64_t batch, length, dim, height, width, threads;
  const float* rotations;
  int64_t rotated;  // numbers of the rotations
};

void check_grid(const Call& c) {
  require(c.height * c.width == c.length, "", c.length, " tokens do not fill ", c.height,
                  " x ", c.width);
}
void place(PackedVitttBlock& block, const Call& c) {
  if (block.kernel) check_grid(c);
  block.height = c.height, block.width = c.width;
}
void place(PackedMambaBlock&, const Call&) {}
void place(PackedVit3Block& block, const Call& c) {
  check_grid(c);
  block.height = c.height, block.width = c.width, block.rotations = c.rotations;
}

template <class Block>
int run(Block* blocks, int64_t count, const Call& c, int64_t (*scratch_bytes)(const Block*),
        int (*kernel)(const Block*)) {
  for (Block* block = blocks; block < blocks + count; ++block) {
    require(block->dim == c.dim, "tokens must have ", block->dim, " channels, not ", c.dim);
    block->batch = c.batch, block->length = c.length, block->threads = c.threads;
    place(*block, c);
  }
  const Memory scratch(scratch_bytes(blocks));
  blocks->y = c.y, blocks->out = c.out, blocks->scratch = scratch.data;
  if constexpr (std::is_same<Block, PackedVitttBlock>::value) {
    const Memory between(count > 1 ? c.batch * c.length * c.dim * sizeof(float) : 0);
    blocks->count = count, blocks->between = static_cast<float*>(between.data);
    return kernel(blocks);
  }
  require(count == 1, "", count, " blocks where a node runs one");
  return kernel(blocks);
}

struct Kernel {
  const char *name, *structure;
  size_t bytes, precision;  // of its structure; of the word that is 1 where its weights are bfloat16
  int (*run)(int64_t* blocks, int64_t count, const Call&);
};

#define KERNEL(name, Block)                                                                      \
  {                                                                                              \
    #name, #Block, sizeof(Block), offsetof(Block, is_bfloat16) / sizeof(int64_t),                \
        [](int64_t* blocks, int64_t count, const Call& call) {                                   \
          return run(reinterpret_cast<Block*>(blocks), count, call, vision_ttt_##name##_scratch, \
                     vision_ttt_##name);                                                         \
        }                                                                                        \
  }
const Kernel kKernels[] = {KERNEL(packed_vittt_blocks, PackedVitttBlock),
                           KERNEL(packed_vit3_block, PackedVit3Block),
                           KERNEL(packed_mamba_block, PackedMambaBlock)};
#undef KERNEL

// The kernel of a name; its structure must have so many words here, in the library and in the model.
const Kernel& find_kernel(const std::string& name, size_t words) {
  for (const Kernel& kernel : kKernels) {
    if (name != kernel.name) continue;
    require(int64_t(kernel.bytes) == vision_ttt_sizeof(kernel.structure),
                    "the extension was built from other sources than the kernels");
    require(kernel.bytes == 8 * words, "the model was exported by a version whose ",
                    kernel.structure, " has ", 8 * words, " bytes, here it has ", kernel.bytes,
                    "; export it again");
    return kernel;
  }
  throw std::runtime_error("vision_ttt: no kernel is named " + name);
}

// A thread that the runtime keeps on one processor core would keep a kernel's threads, which it starts,
// there too. Permit it the processors of the process while it does.
class Unpinned {
#ifdef __linux__
 public:
  explicit Unpinned(int64_t threads) {
    pinned_ = !sched_getaffinity(0, sizeof own_, &own_) && CPU_COUNT(&own_) < threads;
    if (pinned_) sched_setaffinity(0, sizeof kProcess, &kProcess);
  }
  ~Unpinned() {
    if (pinned_) sched_setaffinity(0, sizeof own_, &own_);
  }

 private:
  static const cpu_set_t kProcess;
  cpu_set_t own_;
  bool pinned_;
#else
 public:
  explicit Unpinned(int64_t) {}
  ~Unpinned() {}
#endif
};

#ifdef __linux__
const cpu_set_t Unpinned::kProcess = [] {
  cpu_set_t found;
  sched_getaffinity(0, sizeof found, &found);
  return found;
}();
#endif

// Structures whose pointers are addresses. Kernels for tile registers take float32 weights as terms (see
// amx/terms.h), into which they are split here: a model's file fits every processor.
struct Blocks {
  const char* weights = nullptr;
  Words words;
  std::vector<std::unique_ptr<Memory>> terms;

  Blocks(const char* data, size_t bytes, const Words& kinds, const int32_t* description,
         size_t description_bytes, const Kernel& kernel)
      : weights(data), words(description_bytes / sizeof(int64_t)) {
    require(!words.empty() && words.size() % kinds.size() == 0,
                    "the model's description is incomplete");
    std::memcpy(words.data(), description, words.size() * sizeof(int64_t));
    static const bool has_tiles = !std::strcmp(vision_ttt_instruction_set(), "amx");
    for (size_t i = 0; i < words.size(); ++i) {
      const int64_t kind = kinds[i % kinds.size()];
      if (kind == kNumber || !words[i]) continue;
      const size_t offset = words[i] - kBase;
      require(offset < bytes, "the model's weights are incomplete");
      words[i] = reinterpret_cast<int64_t>(data + offset);
      if (kind != kPacked) continue;
      Packed& packed = *reinterpret_cast<Packed*>(&words[i]);
      const bool pairs = words[i - i % kinds.size() + kernel.precision];  // of bfloat16, else floats
      const int64_t panels = (packed.columns + 15) / 16, lines = pairs ? (packed.inner + 1) / 2 : packed.inner;
      require(packed.inner > 0 && packed.columns > 0 && size_t(packed.inner) <= bytes &&
                          size_t(packed.columns) <= bytes &&
                          offset + size_t(panels * lines) * 64 <= bytes,
                      "the model's weights are incomplete");
      if (has_tiles && !pairs) split(packed, panels);
    }
  }

 private:
  // [panels, inner, 16] → [panels, inner / 32, 3, 16, 16]: pairs of numbers i and i + 16 of the inner axis.
  void split(Packed& packed, int64_t panels) {
    constexpr int64_t kHalf = 256;
    const int64_t steps = (packed.inner + 31) / 32, numbers = packed.inner * 16;
    terms.push_back(std::make_unique<Memory>(panels * steps * 3 * kHalf * sizeof(float)));
    uint32_t* to = static_cast<uint32_t*>(terms.back()->data);
    const float* from = static_cast<const float*>(packed.data);
    for (int64_t panel = 0; panel < panels; ++panel, from += numbers)
      for (int64_t step = 0; step < steps; ++step, to += 3 * kHalf)
        for (int64_t i = 0; i < kHalf; ++i) {
          const int64_t at = 2 * kHalf * step + i;
          float pair[] = {at < numbers ? from[at] : 0.0f, at + kHalf < numbers ? from[at + kHalf] : 0.0f};
          for (int64_t term = 0; term < 3; ++term) {
            uint32_t bits[2];
            std::memcpy(bits, pair, sizeof bits);
            for (uint32_t& upper : bits) upper &= 0xffff0000u;
            to[kHalf * term + i] = bits[0] >> 16 | bits[1];
            float taken[2];
            std::memcpy(taken, bits, sizeof taken);
            pair[0] -= taken[0], pair[1] -= taken[1];
          }
        }
    packed.data = terms.back()->data;
    packed.in_terms = 1;
  }
};

// Calls the kernel for one input, with threads of its own.
void compute(const Kernel& kernel, const Blocks& blocks, const Call& call) {
  require(!call.rotations || call.rotated == call.length * call.dim, "rotations must be [T, D / 2, 2]");
  Words words = blocks.words;
  const Unpinned unpinned(call.threads);
  require(!kernel.run(words.data(), words.size() * sizeof(int64_t) / kernel.bytes, call),
          "not enough memory for ", kernel.name);
}

}  // namespace
