// Classifies an image with a model of `vision-ttt export CHECKPOINT FOLDER.openvino --kernels`, without Python:
//     example EXTENSION FOLDER.openvino/model.xml IMAGE.ppm
// It prints the five best classes and their probabilities. Any program writes a PPM: convert image.jpg image.ppm.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <numeric>
#include <openvino/openvino.hpp>
#include <string>
#include <vector>

// The strings of a JSON list.
std::vector<std::string> strings(const std::string& json) {
  std::vector<std::string> found;
  for (size_t i = json.find('"'); i < json.size(); i = json.find('"', i + 1)) {
    found.emplace_back();
    while (++i < json.size() && json[i] != '"') found.back() += json[json[i] == '\\' ? ++i : i];
  }
  return found;
}

// The three numbers of `"name": [...]` in a JSON object.
std::vector<float> numbers(const std::string& json, const std::string& name) {
  std::vector<float> found(3);
  const size_t at = json.find('[', json.find('"' + name + '"'));
  if (std::sscanf(json.c_str() + at, "[%f, %f, %f", &found[0], &found[1], &found[2]) != 3)
    throw std::runtime_error("the model tells no " + name);
  return found;
}

// A binary PPM of 8 bits: [1, H, W, 3].
ov::Tensor read_image(const char* path) {
  std::ifstream file(path, std::ios::binary);
  std::string kind;
  size_t width = 0, height = 0, most = 0;
  file >> kind >> width >> height >> most;
  if (kind != "P6" || most != 255) throw std::runtime_error(std::string(path) + " is no binary PPM of 8 bits");
  ov::Tensor image(ov::element::u8, {1, height, width, 3});
  file.get();
  if (!file.read(static_cast<char*>(image.data()), image.get_byte_size())) throw std::runtime_error("it ends early");
  return image;
}

int main(int count, char** arguments) try {
  if (count != 4) throw std::runtime_error("give EXTENSION MODEL.xml IMAGE.ppm");
  ov::Core core;
  core.add_extension(std::string(arguments[1]));
  auto model = core.read_model(arguments[2]);
  const auto classes = strings(model->get_rt_info<std::string>("vision_ttt", "classes"));
  const auto input = model->get_rt_info<std::string>("vision_ttt", "input");
  const auto size = numbers(input, "input_size");
  auto mean = numbers(input, "mean"), deviation = numbers(input, "std");
  for (float& x : mean) x *= 255;
  for (float& x : deviation) x *= 255;

  ov::preprocess::PrePostProcessor steps(model);  // pixels of any size → what the model takes
  steps.input().tensor().set_element_type(ov::element::u8).set_layout("NHWC").set_spatial_dynamic_shape();
  steps.input().model().set_layout("NCHW");
  steps.input().preprocess().convert_element_type(ov::element::f32);
  steps.input().preprocess().resize(ov::preprocess::ResizeAlgorithm::RESIZE_BICUBIC_PILLOW, size[1], size[2]);
  steps.input().preprocess().mean(mean).scale(deviation);
  auto request = core.compile_model(steps.build(), "CPU", ov::hint::inference_precision(ov::element::f32))
                     .create_infer_request();
  request.set_input_tensor(read_image(arguments[3]));
  request.start_async();  // on one thread infer() hides exceptions (OpenVINO 2026.4)
  request.wait();

  const float* logits = request.get_output_tensor().data<float>();
  std::vector<size_t> best(classes.size());
  std::iota(best.begin(), best.end(), 0);
  std::sort(best.begin(), best.end(), [&](size_t a, size_t b) { return logits[a] > logits[b]; });
  double sum = 0;
  for (size_t i : best) sum += std::exp(logits[i] - logits[best[0]]);
  for (size_t i = 0; i < best.size() && i < 5; ++i)
    std::printf("%.4f %s\n", std::exp(logits[best[i]] - logits[best[0]]) / sum, classes[best[i]].c_str());
} catch (const std::exception& error) {
  std::cerr << "error: " << error.what() << "\n";
  return 1;
}
