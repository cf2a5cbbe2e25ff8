// The trunk in memory: every tensor of the scout, matrices as stored, vectors as float32, and the layers' weights bound to
// them by canonical name.
#pragma once

#include <string>
#include <vector>

#include "blocks/attention_gqa.h"
#include "blocks/moe.h"
#include "util/aligned_buffer.h"
#include "vault/vault.h"

namespace smoe {

struct LayerWeights {
  const float* attn_norm = nullptr;
  const float* ffn_norm = nullptr;
  AttentionWeights attention;
  FfnWeights dense;  // where the layer is no mixture
  MoeWeights moe;
};

class Trunk {
 public:
  static uint64_t bytes(const ModelSpec& model);
  // Reads and checks every tensor. Errors: Code::corrupt naming the tensor, Code::resources.
  static Result<Trunk> load(const VaultFile& vault);

  const Matrix& embed() const { return embed_; }
  const Linear& head() const { return head_; }
  const float* final_norm() const { return final_norm_; }
  const LayerWeights& layer(size_t i) const { return layers_[i]; }

 private:
  Matrix matrix(const std::string& name) const;
  const float* vector(const std::string& name) const;
  Linear linear(const std::string& name) const;
  FfnWeights ffn(const std::string& prefix) const;
  void bind(const ModelSpec& model);

  AlignedBuffer memory_;
  std::map<std::string, Matrix> matrices_;
  std::map<std::string, const float*> vectors_;
  Matrix embed_;
  Linear head_;
  const float* final_norm_ = nullptr;
  std::vector<LayerWeights> layers_;
};

}  // namespace smoe
