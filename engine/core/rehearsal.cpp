#include "core/rehearsal.h"

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <tuple>

#include "core/forward.h"
#include "core/reads.h"
#include "core/stand_ins.h"
#include "quant/quant.h"

namespace smoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kWarmSteps = 4, kSteps = 16, kContext = kPromptTokens + kWarmSteps + kSteps;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

std::string prefix_of(size_t layer) { return "layers." + std::to_string(layer) + "."; }

// Bytes of a layer that a token goes through.
double active_bytes(const ModelSpec& model, size_t layer) {
  const std::string prefix = prefix_of(layer);
  double bytes = 0;
  for (auto t = model.tensors.lower_bound(prefix); t != model.tensors.end() && t->first.starts_with(prefix); ++t)
    bytes += static_cast<double>(stored_bytes(t->second.encoding, t->second.layout, t->second.rows, t->second.cols));
  const FfnSpec& ffn = model.layers[layer].ffn;
  return ffn.is_moe() ? bytes + ffn.top_k * static_cast<double>(record_layout(ffn, model.hidden).end) : bytes;
}

// The vault of a model that ends after so many layers.
VaultFile first_layers(VaultFile vault, size_t layers) {
  auto& tensors = vault.model.tensors;
  for (size_t i = layers; i < vault.model.layers.size(); ++i)
    std::erase_if(tensors, [prefix = prefix_of(i)](const auto& t) { return t.first.starts_with(prefix); });
  vault.model.layers.resize(layers);
  vault.records.resize(vault.model.moe_layers());
  return vault;
}

// What a Stage of this model holds in memory.
uint64_t stage_bytes(const ModelSpec& model, const EngineOptions& options, const Plan& plan) {
  uint64_t bytes = Trunk::bytes(model) + Scratch::bytes(model, plan.chunk, options.plan.threads) +
                   KvState::bytes(model, kContext, plan.chunk, options.plan.kv);
  for (const LayerSpec& layer : model.layers)
    if (layer.ffn.is_moe()) bytes += StandIns::count(layer.ffn) * record_layout(layer.ffn, model.hidden).length;
  return bytes;
}

// How many of its layers, from the first: while a token goes through no more than `most_bytes` of them, and in no more
// memory than the plan has for the engine, for there may be no more.
size_t layers_to_rehearse(const VaultFile& vault, const EngineOptions& options, const Plan& plan, double most_bytes) {
  const ModelSpec& model = vault.model;
  bool experts = model.moe_layers() == 0;
  double bytes = 0;
  for (size_t n = 0; n < model.layers.size(); ++n) {
    bytes += active_bytes(model, n);
    const bool enough = n >= 2 && experts;
    if (enough &&
        (bytes > most_bytes || stage_bytes(first_layers(vault, n + 1).model, options, plan) > plan.budget_bytes))
      return n;
    experts = experts || model.layers[n].ffn.is_moe();
  }
  return model.layers.size();
}

// One conversation over the layers of `vault`.
class Stage {
 public:
  static Result<std::unique_ptr<Stage>> open(VaultFile vault, const EngineOptions& options, const Plan& plan) {
    std::unique_ptr<Stage> stage(new Stage(std::move(vault), plan.chunk));
    const ModelSpec& model = stage->vault_.model;
    const PlanOptions& p = options.plan;
    const ReaderOptions how = reads_of(options);
    SMOE_ASSIGN(const Kernels* kernels, choose_kernels(options.isa));
    SMOE_ASSIGN(stage->trunk_, Trunk::load(stage->vault_, how));
    SMOE_ASSIGN(stage->cache_, StandIns::load(stage->vault_, how));
    SMOE_ASSIGN(stage->scratch_, Scratch::allocate(model, plan.chunk, p.threads));
    SMOE_ASSIGN(stage->kv_, KvState::allocate(model, kContext, plan.chunk, p.kv));
    stage->pool_ = std::make_unique<ThreadPool>(p.threads);
    const Compute compute{kernels, stage->pool_.get(), p.float_activations, nullptr};
    const uint32_t spec = plan.slots < plan.total_records ? options.spec : 0;
    stage->forward_ =
        std::make_unique<Forward>(model, stage->trunk_, *stage->cache_, stage->scratch_.workspace(), compute, spec);
    return stage;
  }

  // A prompt from the start; seconds. With `routes` all rows go through all of every layer, and what they choose is
  // appended to it, [row, layer with experts, top_k]; without, it ends with logits.
  Result<double> prompt(const int32_t* ids, std::vector<int32_t>* routes) {
    kv_.recurrent().go_to(0);
    const auto start = Clock::now();
    forward_->trace_into(routes);
    for (uint32_t at = 0; at < kPromptTokens; at += chunk_) {
      const uint32_t rows = std::min(chunk_, kPromptTokens - at);
      const uint32_t wanted = routes != nullptr ? rows : at + rows == kPromptTokens ? 1 : 0;
      const Part part{&kv_, ids + at, rows, at, rows - wanted};
      SMOE_TRY(forward_->run({&part, 1}));
    }
    forward_->trace_into(nullptr);
    if (routes == nullptr) forward_->logits(0, 1);
    length_ = kPromptTokens;
    return since(start);
  }

  struct Step {
    double layers_s, head_s, before_experts_s;
  };
  Result<Step> token(int32_t id) {
    forward_->start_buckets();
    const auto start = Clock::now();
    const Part part{&kv_, &id, 1, length_++, 0};
    SMOE_TRY(forward_->run({&part, 1}));
    const double layers = since(start);
    const float* logits = forward_->logits(0, 1);
    likeliest_ = std::max_element(logits, logits + vault_.model.vocab) - logits;
    const Buckets& spent = forward_->buckets();
    return Step{layers, since(start) - layers, (spent.attention + spent.router) / 1e3};
  }

 private:
  Stage(VaultFile vault, uint32_t chunk) : vault_(std::move(vault)), chunk_(chunk) {}

  const VaultFile vault_;
  const uint32_t chunk_;
  Trunk trunk_;
  std::unique_ptr<StandIns> cache_;
  Scratch scratch_;
  KvState kv_;
  std::unique_ptr<ThreadPool> pool_;
  std::unique_ptr<Forward> forward_;
  uint64_t length_ = 0;
  ptrdiff_t likeliest_ = 0;  // kept, so that it is looked for
};

struct Mixtures {
  std::vector<uint32_t> experts, top_k;  // [layer with experts]
  explicit Mixtures(const ModelSpec& model) {
    for (const LayerSpec& layer : model.layers) {
      if (!layer.ffn.is_moe()) continue;
      experts.push_back(layer.ffn.experts);
      top_k.push_back(layer.ffn.top_k);
    }
  }
};

// How many experts the prompt asks for, each once a chunk, in a layer on average.
double experts_of_prompt(const Mixtures& mixtures, uint32_t chunk, const std::vector<int32_t>& routes) {
  std::set<std::tuple<uint32_t, size_t, int32_t>> used;  // (chunk, layer, expert)
  auto at = routes.begin();
  for (uint32_t row = 0; row < kPromptTokens; ++row)
    for (size_t layer = 0; layer < mixtures.top_k.size(); ++layer)
      for (uint32_t k = 0; k < mixtures.top_k[layer]; ++k) used.emplace(row / chunk, layer, *at++);
  return static_cast<double>(used.size()) / static_cast<double>(mixtures.top_k.size());
}

// What a cache of the plan's slots finds of the routes' last quarter, after all before, token by token. A layer that
// was not rehearsed asks for what one of the second half of those that were asks for: the first ones route more evenly.
Result<double> replay(const Mixtures& part, const Mixtures& whole, const Plan& plan, const std::string& policy_name,
                      const std::vector<int32_t>& routes) {
  const size_t rehearsed = part.top_k.size(), half = rehearsed / 2;
  const ExpertTable table(whole.experts);
  SMOE_ASSIGN(std::unique_ptr<Policy> policy, make_policy(policy_name.empty() ? kDefaultPolicy : policy_name, table));
  Residency residency(table, std::max(1u, plan.slots), std::move(policy));
  const size_t row_size = std::accumulate(part.top_k.begin(), part.top_k.end(), size_t{0});
  double asked = 0, found = 0;
  for (size_t row = 0; row < kPromptTokens; ++row) {
    for (uint32_t layer = 0; layer < table.layers(); ++layer) {
      const size_t source = layer < rehearsed ? layer : half + (layer - rehearsed) % (rehearsed - half);
      const auto at = routes.begin() +
                      static_cast<ptrdiff_t>(
                          row * row_size + std::accumulate(part.top_k.begin(), part.top_k.begin() + source, size_t{0}));
      const std::vector<uint32_t> chosen(at, at + part.top_k[source]);
      const auto& fetch = residency.fetch(layer, chosen.data(), nullptr, chosen.size(), 1);
      if (row < kPromptTokens / 4 * 3) continue;
      found += static_cast<double>(fetch.hits.size());
      asked += static_cast<double>(chosen.size());
    }
  }
  return found / asked;
}

std::vector<int32_t> ids_to_feed(const std::vector<int32_t>& text, uint32_t vocab) {
  std::vector<int32_t> ids(kPromptTokens + kContext);
  std::minstd_rand random(1);
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = text.empty() ? static_cast<int32_t>(random() % vocab) : text[i % text.size()];
  return ids;
}

// Times of the layers in `stage`, made into those of all.
Status time(const ModelSpec& model, Stage& stage, const int32_t* ids, Rehearsal* r) {
  double rehearsed = 0, all = 0;
  for (size_t i = 0; i < model.layers.size(); ++i) {
    all += active_bytes(model, i);
    if (i + 1 == r->layers) rehearsed = all;
  }
  SMOE_ASSIGN(const double first, stage.prompt(ids, nullptr));
  SMOE_ASSIGN(const double second, stage.prompt(ids, nullptr));
  std::vector<double> layers, heads, before_experts;
  for (uint32_t i = 0; i < kWarmSteps + kSteps; ++i) {
    SMOE_ASSIGN(const Stage::Step step, stage.token(ids[kPromptTokens + i]));
    if (i < kWarmSteps) continue;
    layers.push_back(step.layers_s);
    heads.push_back(step.head_s);
    before_experts.push_back(step.before_experts_s);
  }
  const double head = median(heads);
  r->token_s = median(layers) * all / rehearsed + head;
  r->prompt_s = ((first + second) / 2 - head) * all / rehearsed + head;
  r->attention_s = median(before_experts) / r->layers;
  return Status::ok();
}

}  // namespace

Result<Rehearsal> rehearse(const VaultFile& vault, const EngineOptions& options, const Plan& plan,
                           const std::vector<int32_t>& text, double most_bytes) {
  VaultFile whole = vault;
  whole.model = as_run(vault.model, options.plan);
  const ModelSpec& model = whole.model;
  const auto outside = [&](int32_t id) { return id < 0 || static_cast<uint32_t>(id) >= model.vocab; };
  if (std::any_of(text.begin(), text.end(), outside)) return Status(Code::usage, "an id is outside the vocabulary");
  Rehearsal r;
  r.layers = static_cast<uint32_t>(layers_to_rehearse(whole, options, plan, most_bytes));
  VaultFile part = first_layers(whole, r.layers);
  const Mixtures mixtures(part.model);
  SMOE_ASSIGN(const std::unique_ptr<Stage> stage, Stage::open(std::move(part), options, plan));
  const std::vector<int32_t> ids = ids_to_feed(text, model.vocab);
  std::vector<int32_t> routes;
  SMOE_TRY(stage->prompt(ids.data(), &routes).status());  // from here on its buffers have memory
  SMOE_TRY(time(model, *stage, ids.data() + kPromptTokens, &r));
  if (mixtures.experts.empty()) return r;
  r.prompt_experts = experts_of_prompt(mixtures, plan.chunk, routes);
  if (plan.slots < plan.total_records) {
    SMOE_ASSIGN(r.hit_rate, replay(mixtures, Mixtures(model), plan, options.cache_policy, routes));
  }
  return r;
}

}  // namespace smoe
