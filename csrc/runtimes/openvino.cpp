// An extension of OpenVINO: a node for blocks on packed weights, which calls the library of kernels.
#include <openvino/core/extension.hpp>
#include <openvino/core/op_extension.hpp>
#include <openvino/frontend/onnx/extension/op.hpp>
#include <openvino/op/op.hpp>
#include <tbb/task_arena.h>

#include <algorithm>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "packed_blocks.h"

namespace {

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
    try {
      const size_t inputs = get_input_size();
      require(inputs == 4 || inputs == 5, "a node has 4 or 5 inputs, not ", inputs);
      require(get_input_partial_shape(0).rank().compatible(3), "tokens must be [B, T, D]");
      find_kernel(kernel_, kinds_.size());
    } catch (const std::runtime_error& error) {
      OPENVINO_THROW(error.what());  // it hides the messages of others while it converts a model
    }
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
    require(inputs[3].get_size() == 2, "the grid must be two numbers");
    const int32_t* grid = inputs[3].data<int32_t>();
    // The threads of the stream that runs this node, as the runtime was told.
    const int64_t threads = tbb::this_task_arena::max_concurrency();
    const bool halves = outputs[0].get_element_type() == ov::element::f16;
    ov::Tensor out = halves ? ov::Tensor(ov::element::f32, shape) : outputs[0];
    compute(kernel, *blocks, {y.data<float>(), out.data<float>(), int64_t(shape[0]), int64_t(shape[1]),
                              int64_t(shape[2]), grid[0], grid[1], threads,
                              inputs.size() > 4 ? rotations.data<float>() : nullptr,
                              int64_t(rotations.get_size())});
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
      prepared_->blocks = std::make_shared<Blocks>(data, weights.get_byte_size(), kinds_,
                                                   description.data<int32_t>(), description.get_byte_size(),
                                                   kernel);
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
