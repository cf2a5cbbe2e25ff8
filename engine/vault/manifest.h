// Inside knowledge of the manifest that the vault room shares: which trunk tensors a model has, and their shapes.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "smoe/model.h"
#include "util/json.h"

namespace smoe {

// What the model's blocks ask of the trunk. A vector's shape has one dimension, a matrix's is [out, in].
struct TrunkTensor {
  std::string name;
  std::vector<uint64_t> shape;
  bool required = true;  // biases are optional: a family has them or not
  bool plain = false;    // read element by element, never multiplied by: in no quantised encoding. So is every vector.
};
std::vector<TrunkTensor> trunk_tensors(const ModelSpec& model);

std::string shape_text(const std::vector<uint64_t>& shape);  // "[2,3]"

// As parse_manifest, from parsed JSON.
Result<ModelSpec> read_manifest(const Json& manifest);

}  // namespace smoe
