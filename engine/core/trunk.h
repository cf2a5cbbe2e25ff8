// The trunk in memory: the scout's tensors, matrices as stored, vectors as float32, and the layers' weights bound to
// them by canonical name. An embedding that is not the head too stays on disk: a token needs one row of it, a read of a
// kilobyte, and its room holds experts instead.
#pragma once

#include <string>
#include <vector>

#include "blocks/attention_gqa.h"
#include "blocks/attention_mla.h"
#include "blocks/delta.h"
#include "blocks/mamba.h"
#include "blocks/moe.h"
#include "blocks/norm.h"
#include "blocks/short_conv.h"
#include "util/aligned_buffer.h"
#include "vault/file.h"
#include "vault/vault.h"

namespace smoe {

struct LayerWeights {
  NormWeights attn_norm, ffn_norm;            // no weight where the layer has no norm before its blocks
  NormWeights attn_post_norm, ffn_post_norm;  // nor here where it has none after them
  AttentionWeights attention;                 // of the layer's block, one of
  LatentWeights latent;
  ShortConvWeights short_conv;
  DeltaWeights delta;
  MambaWeights mamba;
  Mamba2Weights mamba2;
  FfnWeights dense;  // where the layer is no mixture
  MoeWeights moe;
};

class Trunk {
 public:
  static uint64_t bytes(const ModelSpec& model);
  // Reads and checks every tensor it keeps. `how` chooses backend and mode of the reads. Errors: Code::corrupt naming
  // the tensor, Code::io, Code::resources.
  static Result<Trunk> load(const VaultFile& vault, const ReaderOptions& how);

  // embedding() of this id follows: begins to read it if it is on disk.
  void expect_embedding(uint64_t id) const;
  // Row `id` of the embedding, float32 [hidden]. `staging` has room for hidden floats. From any thread. Errors:
  // Code::io, Code::corrupt.
  Status embedding(uint64_t id, float* row, float* staging) const;
  // Has the system read the next 2 MiB of an embedding that stays on disk into its page cache; false when it has asked
  // for all.
  bool preload_embedding();
  const Linear& head() const { return head_; }
  const NormWeights& final_norm() const { return final_norm_; }
  const LayerWeights& layer(size_t i) const { return layers_[i]; }
  const std::map<std::string, Matrix>& matrices() const { return matrices_; }  // by canonical name

 private:
  Matrix matrix(const std::string& name) const;
  const float* vector(const std::string& name) const;
  Linear linear(const std::string& name) const;
  NormWeights norm(const std::string& name) const;
  AttentionWeights gqa(const std::string& prefix) const;
  LatentWeights mla(const std::string& prefix) const;
  ConvWeights conv(const std::string& name) const;
  DeltaWeights delta(const std::string& prefix) const;
  MambaWeights mamba(const std::string& prefix) const;
  Mamba2Weights mamba2(const std::string& prefix) const;
  void bind_mixer(AttentionBlock block, const std::string& prefix, LayerWeights* w) const;
  FfnWeights ffn(const std::string& prefix) const;
  Status leave_on_disk(const VaultFile& vault, const std::string& name, const TensorSpec& t);
  void bind(const ModelSpec& model);

  AlignedBuffer memory_;
  std::map<std::string, Matrix> matrices_;
  std::map<std::string, const float*> vectors_;
  Matrix embed_;               // no data where it stays on disk
  File scout_;                 // then this holds it
  int64_t scout_changed_ = 0;  // when it was last written to, as it was opened
  uint64_t embed_offset_ = 0;
  uint64_t embed_asked_ = 0;  // of its bytes, by preload_embedding()
  Linear head_;
  NormWeights final_norm_;
  std::vector<LayerWeights> layers_;
};

}  // namespace smoe
