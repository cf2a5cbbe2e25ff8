#include "blocks/columns.h"

namespace smoe {
namespace {

void add_row(const float* x, ColumnSum* sum) {
  for (size_t k = 0; k < sum->squares.size(); ++k) sum->squares[k] += static_cast<double>(x[k]) * x[k];
  ++sum->rows;
}

}  // namespace

ColumnSums::ColumnSums(const ModelSpec& model) {
  for (uint32_t i = 0; i < model.layers.size(); ++i) {
    const FfnSpec& ffn = model.layers[i].ffn;
    if (!ffn.is_moe()) continue;
    Layer layer = {i, {}};
    const size_t cols[2] = {model.hidden, ffn.expert_width};
    for (size_t part = 0; part < 2; ++part) {
      for (uint32_t e = 0; e < ffn.experts; ++e) {
        const std::string name = "layers." + std::to_string(i) + ".experts." + std::to_string(e);
        layer.sums[part].push_back({name + (part == 0 ? ".input" : ".middle"), std::vector<double>(cols[part]), 0});
      }
    }
    layers_.push_back(std::move(layer));
  }
}

void ColumnSums::watch(const std::string& name, const Matrix& w) {
  if (w.data != nullptr) trunk_[w.data] = {name, std::vector<double>(w.cols), 0};
}

void ColumnSums::saw(const Matrix& w, const float* x, size_t rows) {
  const auto found = trunk_.find(w.data);
  if (found == trunk_.end()) return;
  for (size_t t = 0; t < rows; ++t) add_row(x + t * w.cols, &found->second);
}

void ColumnSums::saw(uint32_t moe_layer, uint32_t expert, Part part, const float* x) {
  add_row(x, &layers_[moe_layer].sums[static_cast<size_t>(part)][expert]);
}

std::vector<ColumnSum> ColumnSums::all() const {
  std::vector<ColumnSum> found;
  for (const auto& [data, sum] : trunk_) found.push_back(sum);
  for (const Layer& layer : layers_) {
    for (const auto& sums : layer.sums) found.insert(found.end(), sums.begin(), sums.end());
  }
  return found;
}

}  // namespace smoe
