// An extension of OpenVINO: a node for blocks on packed weights, which calls the library of kernels.
//
// The inputs are the tokens [B, T, D]; one vector with the weights of N blocks; the structures of blocks.h
// that describe these blocks, [N, words]; the grid (h, w) of the tokens; and for some blocks rotations. In a
// structure a pointer is its offset in the weights, and what one call alone knows is 0.
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/op.hpp>
#include <openvino/op/op.hpp>
#include <tbb/task_arena.h>

#ifdef __linux__
#include <sched.h>
#endif

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "../aligned_memory.h"
#include "../blocks/blocks.h"

extern "C" {
VISION_TTT_EXPORT int64_t vision_ttt_sizeof(const char* structure);
VISION_TTT_EXPORT const char* vision_ttt_instruction_set();
}

namespace {

using Words = std::vector<int64_t>;

// What a word of a structure is. A pointer is its offset + kBase in bytes, or 0 for null.
enum Kind : int64_t { kNumber, kPointer, kPacked };  // kPacked: the first word of a `Packed`
constexpr int64_t kBase = 64;

struct Memory {
  void* data;
  explicit Memory(size_t bytes) : data(allocate_aligned(bytes)) {
    OPENVINO_ASSERT(data, "vision_ttt: not enough memory");
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
  size_t bytes;  // of y
};

void check_grid(const Call& c) {
  OPENVINO_ASSERT(c.height * c.width == c.length, "vision_ttt: ", c.length, " tokens do not fill ", c.height,
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
    OPENVINO_ASSERT(block->dim == c.dim, "vision_ttt: tokens must have ", block->dim, " channels, not ", c.dim);
    block->batch = c.batch, block->length = c.length, block->threads = c.threads;
    place(*block, c);
  }
  const Memory scratch(scratch_bytes(blocks));
  blocks->y = c.y, blocks->out = c.out, blocks->scratch = scratch.data;
  if constexpr (std::is_same<Block, PackedVitttBlock>::value) {
    const Memory between(count > 1 ? c.bytes : 0);
    blocks->count = count, blocks->between = static_cast<float*>(between.data);
    return kernel(blocks);
  }
  OPENVINO_ASSERT(count == 1, "vision_ttt: ", count, " blocks where a node runs one");
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
    OPENVINO_ASSERT(int64_t(kernel.bytes) == vision_ttt_sizeof(kernel.structure),
                    "vision_ttt: the extension was built from other sources than the kernels");
    OPENVINO_ASSERT(kernel.bytes == 8 * words, "vision_ttt: the model was exported by a version whose ",
                    kernel.structure, " has ", 8 * words, " bytes, here it has ", kernel.bytes,
                    "; export it again");
    return kernel;
  }
  OPENVINO_THROW("vision_ttt: no kernel is named ", name);
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

  Blocks(const char* data, size_t bytes, const Words& kinds, const ov::Tensor& description,
         const Kernel& kernel)
      : weights(data), words(description.get_byte_size() / sizeof(int64_t)) {
    OPENVINO_ASSERT(!words.empty() && words.size() % kinds.size() == 0,
                    "vision_ttt: the model's description is incomplete");
    std::memcpy(words.data(), description.data<int32_t>(), words.size() * sizeof(int64_t));
    static const bool has_tiles = !std::strcmp(vision_ttt_instruction_set(), "amx");
    for (size_t i = 0; i < words.size(); ++i) {
      const int64_t kind = kinds[i % kinds.size()];
      if (kind == kNumber || !words[i]) continue;
      const size_t offset = words[i] - kBase;
      OPENVINO_ASSERT(offset < bytes, "vision_ttt: the model's weights are incomplete");
      words[i] = reinterpret_cast<int64_t>(data + offset);
      if (kind != kPacked) continue;
      Packed& packed = *reinterpret_cast<Packed*>(&words[i]);
      const bool pairs = words[i - i % kinds.size() + kernel.precision];  // of bfloat16, else floats
      const int64_t panels = (packed.columns + 15) / 16, lines = pairs ? (packed.inner + 1) / 2 : packed.inner;
      OPENVINO_ASSERT(packed.inner > 0 && packed.columns > 0 && size_t(packed.inner) <= bytes &&
                          size_t(packed.columns) <= bytes &&
                          offset + size_t(panels * lines) * 64 <= bytes,
                      "vision_ttt: the model's weights are incomplete");
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

// x itself, or its numbers in float32 where the runtime computes in half precision.
ov::Tensor floats(const ov::Tensor& x) {
  if (x.get_element_type() != ov::element::f16) return x;
  ov::Tensor copy(ov::element::f32, x.get_shape());
  std::copy_n(x.data<ov::float16>(), x.get_size(), copy.data<float>());
  return copy;
}

class PackedBlocks : public ov::op::Op {
 public:
  OPENVINO_OP("PackedBlocks", "vision_ttt");

  PackedBlocks() = default;

  void validate_and_infer_types() override {
    const size_t inputs = get_input_size();
    OPENVINO_ASSERT(inputs == 4 || inputs == 5, "vision_ttt: a node has 4 or 5 inputs, not ", inputs);
    OPENVINO_ASSERT(get_input_partial_shape(0).rank().compatible(3), "vision_ttt: tokens must be [B, T, D]");
    find_kernel(kernel_, kinds_.size());
    set_output_type(0, get_input_element_type(0), get_input_partial_shape(0));
  }

  std::shared_ptr<ov::Node> clone_with_new_inputs(const ov::OutputVector& inputs) const override {
    const auto copy = std::make_shared<PackedBlocks>();
    copy->kernel_ = kernel_, copy->kinds_ = kinds_, copy->prepared_ = prepared_;
    copy->set_arguments(inputs);
    copy->constructor_validate_and_infer_types();
    return copy;
  }

  bool visit_attributes(ov::AttributeVisitor& visitor) override {
    visitor.on_attribute("kernel", kernel_);
    visitor.on_attribute("kinds", kinds_);
    return true;
  }

  bool has_evaluate() const override { return true; }

  // May be called from several threads at once.
  bool evaluate(ov::TensorVector& outputs, const ov::TensorVector& inputs) const override {
    const ov::Tensor y = floats(inputs[0]), rotations = inputs.size() > 4 ? floats(inputs[4]) : y;
    const ov::Shape& shape = y.get_shape();
    outputs[0].set_shape(shape);
    if (!y.get_size()) return true;
    const Kernel& kernel = find_kernel(kernel_, kinds_.size());
    const auto blocks = prepare(inputs[1], inputs[2], kernel);
    OPENVINO_ASSERT(inputs[3].get_size() == 2, "vision_ttt: the grid must be two numbers");
    const int32_t* grid = inputs[3].data<int32_t>();
    // The threads of the stream that runs this node, as the runtime was told.
    const int64_t threads = tbb::this_task_arena::max_concurrency();
    const bool halves = outputs[0].get_element_type() == ov::element::f16;
    ov::Tensor out = halves ? ov::Tensor(ov::element::f32, shape) : outputs[0];
    OPENVINO_ASSERT(inputs.size() < 5 || rotations.get_size() == shape[1] * shape[2],
                    "vision_ttt: rotations must be [T, D / 2, 2]");
    const Call call{y.data<float>(), out.data<float>(), int64_t(shape[0]), int64_t(shape[1]),
                    int64_t(shape[2]), grid[0], grid[1], threads,
                    inputs.size() > 4 ? rotations.data<float>() : nullptr, y.get_byte_size()};
    Words words = blocks->words;
    {
      const Unpinned unpinned(threads);
      OPENVINO_ASSERT(!kernel.run(words.data(), words.size() / kinds_.size(), call),
                      "vision_ttt: not enough memory for ", kernel_);
    }
    if (halves) std::copy_n(out.data<float>(), out.get_size(), outputs[0].data<ov::float16>());
    return true;
  }

 private:
  struct Prepared {
    std::mutex mutex;
    std::shared_ptr<const Blocks> blocks;
  };

  // The weights are constants, which copies of the node share.
  std::shared_ptr<const Blocks> prepare(const ov::Tensor& weights, const ov::Tensor& description,
                                        const Kernel& kernel) const {
    const char* data = reinterpret_cast<const char*>(weights.data<int32_t>());
    const std::lock_guard<std::mutex> lock(prepared_->mutex);
    if (!prepared_->blocks || prepared_->blocks->weights != data)
      prepared_->blocks = std::make_shared<Blocks>(data, weights.get_byte_size(), kinds_, description, kernel);
    return prepared_->blocks;
  }

  std::string kernel_;
  Words kinds_;
  std::shared_ptr<Prepared> prepared_ = std::make_shared<Prepared>();
};

}  // namespace

// The node in OpenVINO's own files and in ONNX files.
OPENVINO_CREATE_EXTENSIONS((std::vector<ov::Extension::Ptr>{
    std::make_shared<ov::OpExtension<PackedBlocks>>(),
    std::make_shared<ov::frontend::onnx::OpExtension<PackedBlocks>>("PackedBlocks", "vision_ttt")}));
