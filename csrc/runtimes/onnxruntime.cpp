// Custom operators of ONNX Runtime: a node for blocks on packed weights, which calls the library of kernels.
//
// The interface is C, and a library runs in every later version of ONNX Runtime than its headers'.
#define ORT_API_MANUAL_INIT
#include <onnxruntime_cxx_api.h>
#undef ORT_API_MANUAL_INIT

#include <algorithm>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "packed_blocks.h"

namespace {

// Session option: the threads of a kernel. ONNX Runtime does not tell a custom operator its own number.
constexpr char kThreads[] = "vision_ttt.threads";

int64_t processors() {
#ifdef __linux__
  cpu_set_t own;
  if (!sched_getaffinity(0, sizeof own, &own)) return CPU_COUNT(&own);
#endif
  return std::max(1u, std::thread::hardware_concurrency());
}

template <class Function>
OrtStatusPtr as_status(const Function& function) {
  try {
    function();
    return nullptr;
  } catch (const std::exception& error) {
    return Ort::GetApi().CreateStatus(ORT_FAIL, error.what());
  }
}

class PackedBlocks {
 public:
  PackedBlocks(const OrtKernelInfo* given, int64_t threads) : threads_(threads) {
    const Ort::ConstKernelInfo info(given);
    kinds_ = info.GetAttributes<int64_t>("kinds");
    kernel_ = &find_kernel(info.GetAttribute<std::string>("kernel"), kinds_.size());
    const Ort::ConstValue weights = constant(info, 1), description = constant(info, 2);
    blocks_ = std::make_unique<Blocks>(reinterpret_cast<const char*>(weights.GetTensorData<int32_t>()),
                                       bytes(weights), kinds_, description.GetTensorData<int32_t>(),
                                       bytes(description), *kernel_);
  }

  // May be called from several threads at once.
  OrtStatusPtr ComputeV2(OrtKernelContext* given) const {
    return as_status([&] {
      const Ort::KernelContext context(given);
      const Ort::ConstValue y = context.GetInput(0), grid = context.GetInput(3);
      const std::vector<int64_t> shape = y.GetTensorTypeAndShapeInfo().GetShape();
      require(shape.size() == 3, "tokens must be [B, T, D]");
      require(grid.GetTensorTypeAndShapeInfo().GetElementCount() == 2, "the grid must be two numbers");
      Ort::UnownedValue out = context.GetOutput(0, shape);
      if (!shape[0] || !shape[1]) return;
      const int32_t* sides = grid.GetTensorData<int32_t>();
      Call call{y.GetTensorData<float>(), out.GetTensorMutableData<float>(), shape[0], shape[1], shape[2],
                sides[0], sides[1], threads_, nullptr, 0};
      if (context.GetInputCount() > 4) {
        const Ort::ConstValue rotations = context.GetInput(4);
        call.rotations = rotations.GetTensorData<float>();
        call.rotated = rotations.GetTensorTypeAndShapeInfo().GetElementCount();
      }
      compute(*kernel_, *blocks_, call);
    });
  }

 private:
  static Ort::ConstValue constant(const Ort::ConstKernelInfo& info, size_t index) {
    int is_constant = 0;
    const Ort::ConstValue value = info.GetTensorConstantInput(index, &is_constant);
    require(is_constant, "input ", index, " of a node must be constant");
    return value;
  }
  static size_t bytes(const Ort::ConstValue& x) {
    return x.GetTensorTypeAndShapeInfo().GetElementCount() * sizeof(int32_t);
  }

  int64_t threads_;
  Words kinds_;
  const Kernel* kernel_;
  std::unique_ptr<Blocks> blocks_;
};

struct PackedBlocksOp : Ort::CustomOpBase<PackedBlocksOp, PackedBlocks, true> {
  int64_t threads;
  explicit PackedBlocksOp(int64_t threads) : threads(threads) {}

  const char* GetName() const { return "PackedBlocks"; }
  size_t GetInputTypeCount() const { return 5; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    return index % 4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index < 4 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }

  OrtStatusPtr CreateKernelV2(const OrtApi&, const OrtKernelInfo* info, void** kernel) const {
    return as_status([&] { *kernel = new PackedBlocks(info, threads); });
  }
};

// The domain with an operator of so many threads. Session options refer to it until the process ends.
OrtCustomOpDomain* domain_of(int64_t threads) {
  static std::mutex mutex;
  static std::map<int64_t, OrtCustomOpDomain*> domains;
  const std::lock_guard<std::mutex> lock(mutex);
  OrtCustomOpDomain*& found = domains[threads];
  if (!found) {
    Ort::CustomOpDomain domain("vision_ttt");
    domain.Add(new PackedBlocksOp(threads));
    found = domain.release();
  }
  return found;
}

int64_t threads_of(const OrtSessionOptions* options) {
  const Ort::ConstSessionOptions given(options);
  if (!given.HasConfigEntry(kThreads)) return processors();
  const std::string text = given.GetConfigEntry(kThreads);
  const bool is_number = !text.empty() && text.size() < 5 && text.find_first_not_of("0123456789") == text.npos;
  require(is_number && std::stoi(text) > 0, kThreads, " must be a number of threads, not '", text, "'");
  return std::stoi(text);
}

}  // namespace

extern "C" VISION_TTT_EXPORT OrtStatus* ORT_API_CALL RegisterCustomOps(OrtSessionOptions* options,
                                                                      const OrtApiBase* base) {
  const OrtApi* api = base->GetApi(ORT_API_VERSION);
  if (!api)  // an older version has no way to be told so but this
    return base->GetApi(1)->CreateStatus(ORT_FAIL, "vision_ttt: built for a later version of ONNX Runtime");
  Ort::InitApi(api);
  return as_status([&] {
    Ort::ThrowOnError(api->AddCustomOpDomain(options, domain_of(threads_of(options))));
  });
}
