// What matrices are multiplied with, column by column: sums of squares, from which the importance of a weight's column
// for its quantisation follows. Watching is off unless an engine was opened for it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "kernels/kernels.h"
#include "smoe/engine.h"

namespace smoe {

class ColumnSums {
 public:
  enum class Part : uint8_t { input, middle };  // what gate and up read, what down reads

  explicit ColumnSums(const ModelSpec& model);
  // Counts what this matrix of the trunk is multiplied with, under `name`.
  void watch(const std::string& name, const Matrix& w);

  // `rows` rows of x, [rows, w.cols], are multiplied with w. Ignored for a matrix that is not watched. From any thread,
  // but for one matrix from one at a time.
  void saw(const Matrix& w, const float* x, size_t rows);
  // One row that an expert reads. From one thread.
  void saw(uint32_t moe_layer, uint32_t expert, Part part, const float* x);

  // Everything counted: trunk matrices by name, experts as "layers.L.experts.E.input" and ".middle".
  std::vector<ColumnSum> all() const;

 private:
  struct Layer {
    uint32_t index;
    std::vector<ColumnSum> sums[2];  // by Part, one an expert
  };
  std::map<const uint8_t*, ColumnSum> trunk_;
  std::vector<Layer> layers_;
};

}  // namespace smoe
