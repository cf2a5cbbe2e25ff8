#include "core/trunk.h"

#include <fcntl.h>
#include <sys/stat.h>

#include <algorithm>
#include <cmath>

#include "quant/quant.h"

namespace smoe {
namespace {

// Nanoseconds; 0 if the system does not say.
int64_t last_change(const File& file) {
  struct stat info{};
  if (fstat(file.fd(), &info) != 0) return 0;
  return int64_t{info.st_mtim.tv_sec} * 1000000000 + info.st_mtim.tv_nsec;
}

bool ends_with(const std::string& s, const char* tail) {
  return s.size() >= std::char_traits<char>::length(tail) && s.ends_with(tail);
}

// Norms, biases and the like: used element by element, kept as float32.
bool is_vector(const std::string& name) {
  constexpr const char* kTails[] = {"norm.weight", "conv.weight", ".bias", ".correction", ".sinks", ".rate", ".skip"};
  return std::any_of(std::begin(kTails), std::end(kTails), [&](const char* tail) { return ends_with(name, tail); });
}

uint64_t held_bytes(const std::string& name, const TensorSpec& t) {
  const uint64_t bytes =
      is_vector(name) ? t.rows * t.cols * sizeof(float) : stored_bytes(t.encoding, t.layout, t.rows, t.cols);
  return (bytes + 63) / 64 * 64;
}

// A recurrence's rates of decay are stored as the logarithms that were trained, or as what is made of them.
void finish_rates(const ModelSpec& model, const std::string& name, float* x, uint64_t n) {
  if (!ends_with(name, ".rate")) return;
  const size_t layer = std::stoul(name.substr(std::string("layers.").size()));
  if (model.layers[layer].recurrent.negative_rates) return;
  for (uint64_t i = 0; i < n; ++i) x[i] = -std::exp(x[i]);
}

// Of a tied embedding the head reads every row; panels hold sixteen rows side by side, and one could not be read alone.
bool stays_on_disk(const ModelSpec& model, const std::string& name, const TensorSpec& t) {
  return name == "embed.weight" && !model.tied_head && t.layout == Layout::rows;
}

}  // namespace

uint64_t Trunk::bytes(const ModelSpec& model) {
  uint64_t sum = 0;
  for (const auto& [name, tensor] : model.tensors)
    if (!stays_on_disk(model, name, tensor)) sum += held_bytes(name, tensor);
  return sum;
}

Result<Trunk> Trunk::load(const VaultFile& vault, const ReaderOptions& how) {
  Trunk trunk;
  SMOE_ASSIGN(trunk.memory_, AlignedBuffer::allocate(bytes(vault.model)));
  TrunkPlaces places;
  std::map<std::string, std::vector<uint8_t>> stored;  // of vectors
  uint8_t* at = trunk.memory_.data();
  for (const auto& [name, t] : vault.model.tensors) {
    if (stays_on_disk(vault.model, name, t)) {
      SMOE_TRY(trunk.leave_on_disk(vault, name, t));
      continue;
    }
    places[name] = at;
    if (is_vector(name)) {
      stored[name].resize(stored_bytes(t.encoding, t.layout, t.rows, t.cols));
      places[name] = stored[name].data();
      trunk.vectors_[name] = reinterpret_cast<const float*>(at);
    } else {
      trunk.matrices_[name] = {t.encoding, t.layout, t.rows, t.cols, at};
    }
    at += held_bytes(name, t);
  }
  SMOE_TRY(read_trunk(vault, how, places));
  for (const auto& [name, bytes] : stored) {
    const TensorSpec& t = vault.model.tensors.at(name);
    auto* x = const_cast<float*>(trunk.vectors_[name]);
    decode_rows(t.encoding, bytes.data(), t.rows * t.cols, x);
    finish_rates(vault.model, name, x, t.rows * t.cols);
  }
  trunk.bind(vault.model);
  return trunk;
}

Status Trunk::leave_on_disk(const VaultFile& vault, const std::string& name, const TensorSpec& t) {
  SMOE_ASSIGN(scout_, File::open_read(vault.scout_path));
  scout_changed_ = last_change(scout_);
  embed_offset_ = vault.trunk.at(name).offset;
  posix_fadvise(scout_.fd(), 0, 0, POSIX_FADV_RANDOM);  // a row is all that is wanted of its neighbourhood
  matrices_[name] = {t.encoding, t.layout, t.rows, t.cols, nullptr};
  return Status::ok();
}

Status Trunk::embedding(uint64_t id, float* row, float* staging) const {
  const Matrix& e = embed_;
  if (e.data != nullptr) {
    decode_row(e.encoding, e.layout, e.data, e.rows, e.cols, id, row);
    return Status::ok();
  }
  auto* stored = reinterpret_cast<uint8_t*>(staging);
  const uint64_t bytes = row_bytes(e.encoding, e.cols);
  SMOE_TRY(scout_.read_at(embed_offset_ + id * bytes, stored, bytes));
  // A row has no checksum of its own. After the read, so that nothing written before it goes unseen.
  if (last_change(scout_) != scout_changed_) {
    return {Code::corrupt, scout_.path() + ": it was written to while in use", "start the engine again"};
  }
  decode_rows(e.encoding, stored, e.cols, row);
  return Status::ok();
}

void Trunk::expect_embedding(uint64_t id) const {
  if (embed_.data != nullptr || !scout_.is_open()) return;
  const uint64_t bytes = row_bytes(embed_.encoding, embed_.cols);
  posix_fadvise(scout_.fd(), static_cast<off_t>(embed_offset_ + id * bytes), static_cast<off_t>(bytes),
                POSIX_FADV_WILLNEED);
}

bool Trunk::preload_embedding() {
  // Linux reads no more for one call than its window for reading ahead, 128 KiB as it comes, whatever it is asked for.
  constexpr uint64_t kWindow = 128 << 10, kStep = 2 << 20;
  if (!scout_.is_open()) return false;
  const uint64_t all = stored_bytes(embed_.encoding, embed_.layout, embed_.rows, embed_.cols);
  const uint64_t end = std::min(all, embed_asked_ + kStep);
  for (; embed_asked_ < end; embed_asked_ += kWindow)
    posix_fadvise(scout_.fd(), static_cast<off_t>(embed_offset_ + embed_asked_), kWindow, POSIX_FADV_WILLNEED);
  return embed_asked_ < all;
}

Matrix Trunk::matrix(const std::string& name) const {
  const auto found = matrices_.find(name);
  return found == matrices_.end() ? Matrix{} : found->second;
}

const float* Trunk::vector(const std::string& name) const {
  const auto found = vectors_.find(name);
  return found == vectors_.end() ? nullptr : found->second;
}

Linear Trunk::linear(const std::string& name) const { return {matrix(name + ".weight"), vector(name + ".bias")}; }

NormWeights Trunk::norm(const std::string& name) const { return {vector(name + ".weight"), vector(name + ".bias")}; }

AttentionWeights Trunk::gqa(const std::string& prefix) const {
  return {linear(prefix + "q"),
          linear(prefix + "k"),
          linear(prefix + "v"),
          linear(prefix + "o"),
          vector(prefix + "q_norm.weight"),
          vector(prefix + "k_norm.weight"),
          vector(prefix + "sinks"),
          matrix(prefix + "gate.weight")};
}

LatentWeights Trunk::mla(const std::string& prefix) const {
  const Linear direct = linear(prefix + "q");
  return {linear(prefix + "q_a"),
          direct.weight.data != nullptr ? direct : linear(prefix + "q_b"),
          vector(prefix + "q_a_norm.weight"),
          linear(prefix + "kv_a"),
          vector(prefix + "kv_a_norm.weight"),
          matrix(prefix + "k_up.weight"),
          matrix(prefix + "v_up.weight"),
          linear(prefix + "o")};
}

ConvWeights Trunk::conv(const std::string& name) const { return {vector(name + ".weight"), vector(name + ".bias")}; }

DeltaWeights Trunk::delta(const std::string& prefix) const {
  return {linear(prefix + "q"),           linear(prefix + "k"),        linear(prefix + "v"),
          conv(prefix + "q_conv"),        conv(prefix + "k_conv"),     conv(prefix + "v_conv"),
          linear(prefix + "beta"),        linear(prefix + "decay_in"), linear(prefix + "decay"),
          vector(prefix + "rate"),        linear(prefix + "gate_in"),  linear(prefix + "gate"),
          vector(prefix + "norm.weight"), linear(prefix + "out")};
}

MambaWeights Trunk::mamba(const std::string& prefix) const {
  return {linear(prefix + "in"),
          conv(prefix + "conv"),
          linear(prefix + "x"),
          vector(prefix + "dt_norm.weight"),
          vector(prefix + "k_norm.weight"),
          vector(prefix + "q_norm.weight"),
          linear(prefix + "dt"),
          vector(prefix + "rate"),
          vector(prefix + "skip"),
          linear(prefix + "out")};
}

Mamba2Weights Trunk::mamba2(const std::string& prefix) const {
  return {linear(prefix + "in"),   conv(prefix + "conv"),          vector(prefix + "dt.bias"), vector(prefix + "rate"),
          vector(prefix + "skip"), vector(prefix + "norm.weight"), linear(prefix + "out")};
}

void Trunk::bind_mixer(AttentionBlock block, const std::string& prefix, LayerWeights* w) const {
  const std::string attn = prefix + "attn.", recur = prefix + "recur.";
  switch (block) {
    case AttentionBlock::gqa:
      w->attention = gqa(attn);
      break;
    case AttentionBlock::mla:
      w->latent = mla(attn);
      break;
    case AttentionBlock::short_conv:
      w->short_conv = {linear(recur + "in"), conv(recur + "conv"), linear(recur + "out")};
      break;
    case AttentionBlock::delta:
      w->delta = delta(recur);
      break;
    case AttentionBlock::mamba:
      w->mamba = mamba(recur);
      break;
    case AttentionBlock::mamba2:
      w->mamba2 = mamba2(recur);
      break;
  }
}

FfnWeights Trunk::ffn(const std::string& prefix) const {
  return {linear(prefix + ".gate"), linear(prefix + ".up"), linear(prefix + ".down")};
}

void Trunk::bind(const ModelSpec& model) {
  embed_ = matrix("embed.weight");
  head_ = model.tied_head ? Linear{embed_, vector("head.bias")} : linear("head");
  final_norm_ = norm("final_norm");
  uint32_t moe_layer = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    const std::string prefix = "layers." + std::to_string(i) + ".";
    LayerWeights w;
    w.attn_norm = norm(prefix + "attn_norm");
    w.ffn_norm = norm(prefix + "ffn_norm");
    w.attn_post_norm = norm(prefix + "attn_post_norm");
    w.ffn_post_norm = norm(prefix + "ffn_post_norm");
    bind_mixer(model.layers[i].attention.block, prefix, &w);
    const FfnSpec& f = model.layers[i].ffn;
    if (f.is_moe()) {
      w.moe = {{linear(prefix + "router"), vector(prefix + "router.correction")},
               ffn(prefix + "shared"),
               linear(prefix + "shared_gate"),
               moe_layer++,
               record_layout(f, model.hidden)};
    } else {
      w.dense = ffn(prefix + "ffn");
    }
    layers_.push_back(w);
  }
}

}  // namespace smoe
