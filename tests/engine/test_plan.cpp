#include <algorithm>
#include <cmath>

#include "check.h"
#include "core/budget.h"
#include "core/footprint.h"
#include "fake_tree.h"
#include "smoe/plan.h"
#include "util/sizes.h"

using namespace smoe;

namespace {

constexpr uint64_t kGiB = 1ull << 30;

bool contains(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

bool warns(const std::vector<std::string>& warnings, const std::string& part) {
  return std::any_of(warnings.begin(), warnings.end(), [&](const std::string& w) { return contains(w, part); });
}

uint64_t gb(double decimal_gb) { return static_cast<uint64_t>(decimal_gb * 1e9); }

// In decimal GB to two places, as the figures are published.
std::string two_places(uint64_t bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.2f", static_cast<double>(bytes) / 1e9);
  return text;
}

// The published machine: a model with 896 experts a layer and top 16, whose floor is 29.19 GB and whose recommended
// budget is 80.77 GB = floor + 3 working sets, on machines of decimal gigabytes. 83 layers are what makes its top-8
// figure agree.
BudgetQuestion published(double ram_gb, uint32_t top_k) {
  constexpr uint32_t kLayers = 83;
  BudgetQuestion q;
  q.model = "published";
  q.record_bytes = gb(17.1934) / (kLayers * 16);
  q.records_per_token = kLayers * top_k;
  q.total_records = kLayers * 896;
  q.working_set_bytes = q.records_per_token * q.record_bytes;
  q.min_expert_cache_bytes = 2 * top_k * q.record_bytes;
  q.floor_bytes = gb(29.1945) - 2 * 16 * q.record_bytes + q.min_expert_cache_bytes;
  q.usable_bytes = gb(ram_gb);
  q.ceiling_bytes = q.usable_bytes / 4 * 3;
  return q;
}

constexpr Encoding kPlain = Encoding::bf16;

ModelSpec small_model(uint32_t layers = 6, uint32_t experts = 16, uint32_t top_k = 4) {
  ModelSpec m;
  m.id = "small";
  m.hidden = 256;
  m.vocab = 1000;
  m.max_positions = 8192;
  m.norm_eps = 1e-6f;
  m.ropes.emplace_back().inv_freq = {1.0f, 0.5f};
  for (uint32_t i = 0; i < layers; ++i) {
    LayerSpec layer;
    layer.attention.heads = 8;
    layer.attention.kv_heads = 2;
    layer.attention.head_dim = 32;
    layer.attention.scale = 0.2f;
    if (i == 0) {
      layer.ffn.width = 512;  // a dense first layer, as several families have
    } else {
      layer.ffn.experts = experts;
      layer.ffn.top_k = top_k;
      layer.ffn.expert_width = 512;
      layer.ffn.encodings = {kPlain, kPlain, kPlain};
    }
    m.layers.push_back(layer);
  }
  m.tensors["embed.weight"] = {kPlain, Layout::rows, m.vocab, m.hidden, 0};
  return m;
}

MachineMemory machine_of(uint64_t bytes) {
  MachineMemory m;
  m.physical_ram_bytes = m.usable_ram_bytes = m.available_bytes = bytes;
  return m;
}

Result<Plan> plan_small(uint64_t ram, PlanOptions options = {}) {
  return make_plan(small_model(), machine_of(ram), options);
}

constexpr char kMeminfo[] = "MemTotal:       65536000 kB\nMemFree:  100 kB\nMemAvailable:   40000000 kB\n";
constexpr uint64_t kTotal = 65536000ull * 1024;

}  // namespace

TEST(plan_published_figures) {
  BudgetQuestion q = published(64, 16);
  CHECK_EQ(two_places(q.floor_bytes), std::string("29.19"));
  CHECK_EQ(two_places(q.floor_bytes + 3 * q.working_set_bytes), std::string("80.77"));
  Result<BudgetAnswer> answer = choose_budget(q);
  REQUIRE(answer.is_ok());
  CHECK_EQ(two_places(answer->budget_bytes), std::string("46.39"));
  CHECK(contains(answer->reason, "1 working set,"));
  answer = choose_budget(published(64, 8));
  REQUIRE(answer.is_ok());
  CHECK_EQ(two_places(answer->budget_bytes), std::string("46.18"));
  CHECK(contains(answer->reason, "2 working sets,"));
  answer = choose_budget(published(128, 16));
  REQUIRE(answer.is_ok());
  CHECK_EQ(two_places(answer->budget_bytes), std::string("80.77"));
}

TEST(plan_automatic_budget_by_size_of_the_machine) {
  BudgetQuestion q = published(4000, 16);
  const uint64_t resident =
      q.floor_bytes + (q.total_records - 32) * (q.record_bytes + page_table_bytes(q.record_bytes));
  CHECK_EQ(all_resident_bytes(q), resident);
  Result<BudgetAnswer> answer = choose_budget(q);
  REQUIRE(answer.is_ok());
  CHECK_EQ(answer->budget_bytes, resident);
  CHECK_EQ(answer->slots, q.total_records);
  CHECK(answer->warnings.empty());
  q.ceiling_bytes = resident - 1;  // one byte short of everything: whole working sets again
  answer = choose_budget(q);
  REQUIRE(answer.is_ok());
  CHECK(answer->budget_bytes < resident && (answer->budget_bytes - q.floor_bytes) % q.working_set_bytes == 0);
  CHECK(answer->budget_bytes + q.working_set_bytes > q.ceiling_bytes);

  q.ceiling_bytes = q.floor_bytes + q.working_set_bytes;
  CHECK_EQ(choose_budget(q)->budget_bytes, q.floor_bytes + q.working_set_bytes);
  q.ceiling_bytes -= 1;
  answer = choose_budget(q);
  REQUIRE(answer.is_ok());
  CHECK_EQ(answer->budget_bytes, q.floor_bytes);
  CHECK_EQ(answer->slots, 32u);
  CHECK(warns(answer->warnings, "only the floor fits"));
  CHECK(warns(answer->warnings, "about 0% were hits"));
  CHECK(!warns(answer->warnings, "is above"));
  q.ceiling_bytes = q.floor_bytes - 1;
  CHECK(warns(choose_budget(q)->warnings, "is above"));
  q.usable_bytes = q.floor_bytes - 1;
  CHECK(choose_budget(q).status().code() == Code::resources);
}

TEST(plan_explicit_budget) {
  BudgetQuestion q = published(64, 16);
  q.budget_bytes = q.floor_bytes - 1;
  Result<BudgetAnswer> answer = choose_budget(q);
  CHECK(answer.status().code() == Code::resources);
  CHECK(contains(answer.status().message(), show_bytes(q.floor_bytes)));
  CHECK(contains(answer.status().message(), "the budget is " + show_bytes(q.budget_bytes)));
  CHECK(contains(answer.status().hint(), std::to_string(q.floor_bytes)));
  q.budget_bytes = q.floor_bytes;
  CHECK_EQ(choose_budget(q)->slots, 32u);
  q.budget_bytes = q.ceiling_bytes;
  answer = choose_budget(q);
  CHECK_EQ(answer->budget_bytes, q.ceiling_bytes);
  CHECK_EQ(answer->expert_cache_bytes, q.budget_bytes - q.floor_bytes + q.min_expert_cache_bytes);
  // Each slot with its page tables, and not one more than fit.
  const uint64_t price = q.record_bytes + page_table_bytes(q.record_bytes);
  CHECK(q.floor_bytes + (answer->slots - 32) * price <= q.budget_bytes);
  CHECK(q.floor_bytes + (answer->slots - 31) * price > q.budget_bytes);
  CHECK(answer->warnings.empty());
  q.budget_bytes = q.ceiling_bytes + 1;
  CHECK(warns(choose_budget(q)->warnings, "3/4 of the usable memory"));
  q.budget_bytes = gb(100000);  // more than everything: kept as given, the cache is all experts
  answer = choose_budget(q);
  CHECK_EQ(answer->budget_bytes, gb(100000));
  CHECK_EQ(answer->slots, q.total_records);
  CHECK_EQ(answer->expert_cache_bytes, q.total_records * q.record_bytes);
}

TEST(plan_zero_hits_are_said_plainly) {
  BudgetQuestion q = published(64, 16);
  const uint64_t price = q.record_bytes + page_table_bytes(q.record_bytes);
  q.budget_bytes = q.floor_bytes + (q.records_per_token - 32) * price;
  CHECK(!warns(choose_budget(q)->warnings, "0%"));
  q.budget_bytes -= 1;
  CHECK(warns(choose_budget(q)->warnings, "0%"));
}

TEST(plan_ring) {
  BudgetQuestion q = published(64, 16);
  q.ring_slots = 31;
  CHECK(choose_budget(q).status().code() == Code::resources);
  q.ring_slots = 1000;
  Result<BudgetAnswer> answer = choose_budget(q);
  REQUIRE(answer.is_ok());
  CHECK_EQ(answer->slots, 1000u);
  CHECK_EQ(answer->budget_bytes, q.floor_bytes + 968 * (q.record_bytes + page_table_bytes(q.record_bytes)));
  q.ring_slots = UINT32_MAX;
  CHECK_EQ(choose_budget(q)->slots, q.total_records);
}

TEST(plan_parts_add_up) {
  PlanOptions options;
  options.threads = 2;
  Result<Plan> made = plan_small(64 * kGiB, options);
  REQUIRE(made.is_ok());
  const Plan& p = *made;
  const uint64_t record = record_layout(small_model().layers[1].ffn, 256).length;
  CHECK_EQ(p.record_bytes, record);
  CHECK_EQ(p.total_records, 5u * 16);
  CHECK_EQ(p.all_experts_bytes, 80 * record);
  CHECK_EQ(p.working_set_bytes, 5 * 4 * record);  // the dense layer has none
  CHECK_EQ(p.min_expert_cache_bytes, 8 * record);
  CHECK_EQ(p.floor_bytes, p.trunk_bytes + p.state_bytes + p.scratch_bytes + p.process_bytes + p.min_expert_cache_bytes);
  CHECK_EQ(p.recommended_bytes, p.floor_bytes + 3 * p.working_set_bytes);
  CHECK_EQ(p.all_resident_bytes, p.floor_bytes + (80 - 8) * (record + page_table_bytes(record)));
  CHECK_EQ(p.budget_bytes, p.all_resident_bytes);
  CHECK_EQ(p.slots, 80u);
  CHECK_EQ(p.ceiling_bytes, 48 * kGiB);
  CHECK_EQ(p.chunk, 512u);
  CHECK_EQ(p.ctx, 4096u);
  CHECK(p.warnings.empty());
}

// What is kept for a position: keys and values, or one latent for both, as far back as the layer sees.
TEST(plan_counts_the_state_of_each_block) {
  const auto state = [](const AttentionSpec& a, uint32_t ctx, uint32_t chunk) {
    ModelSpec m = small_model(1);
    m.layers[0].attention = a;
    PlanOptions o;
    o.ctx = ctx;
    return engine_state_bytes(m, o, chunk);
  };
  AttentionSpec gqa;
  gqa.heads = 8;
  gqa.kv_heads = 2;
  gqa.head_dim = 32;
  constexpr uint64_t kRow = 2 * 2 * 32 * 2;  // keys and values of two heads, f16
  CHECK_EQ(state(gqa, 4096, 512), (4096 + 512) * kRow);
  gqa.window = 128;
  CHECK_EQ(state(gqa, 4096, 512), (128 + 512) * kRow);
  gqa.window = 0;
  gqa.chunk = 1024;
  CHECK_EQ(state(gqa, 4096, 512), (1024 + 512) * kRow);
  CHECK_EQ(state(gqa, 256, 512), (256 + 512) * kRow);
  AttentionSpec latent;  // DeepSeek-V3's: 1152 bytes a position and layer
  latent.block = AttentionBlock::mla;
  latent.heads = 128;
  latent.kv_heads = 1;
  latent.kv_rank = 512;
  latent.rope_dim = 64;
  latent.head_dim = 576;
  CHECK_EQ(state(latent, 4096, 512), (4096 + 512) * uint64_t{1152});
}

// A recurrent layer's state does not grow with the window; two copies of it are kept to go back to.
TEST(plan_counts_recurrent_states_and_their_copies) {
  ModelSpec m = small_model(2);
  PlanOptions o;
  o.ctx = 4096;
  const uint64_t of_two = engine_state_bytes(m, o, 512), of_attention = of_two / 2;
  m.layers[0].attention = {};
  m.layers[0].attention.block = AttentionBlock::delta;  // Qwen3-Next's
  RecurrentSpec& r = m.layers[0].recurrent;
  r.taps = 4;
  r.heads = 32;
  r.key_heads = 16;
  r.key_dim = r.value_dim = 128;
  constexpr uint64_t kTail = 3 * (2 * 16 * 128 + 32 * 128) * 4, kState = 32 * 128 * 128 * 4;
  CHECK_EQ(engine_state_bytes(m, o, 512), of_attention + 3 * (kTail + kState));
  o.ctx = 8192;
  CHECK_EQ(engine_state_bytes(m, o, 512) - 3 * (kTail + kState), of_attention / (4096 + 512) * (8192 + 512));
  o.sessions = 2;
  o.ctx = 4096;
  CHECK_EQ(engine_state_bytes(m, o, 512), 2 * (of_attention + 3 * (kTail + kState)));
}

TEST(plan_options_change_the_parts) {
  const Plan base = std::move(plan_small(64 * kGiB)).value();
  PlanOptions options;
  options.sessions = 3;
  CHECK_EQ(plan_small(64 * kGiB, options)->state_bytes, 3 * base.state_bytes);
  options = {};
  options.ctx = 8192;
  CHECK(plan_small(64 * kGiB, options)->state_bytes > base.state_bytes);
  options = {};
  options.kv = KvType::f32;
  CHECK_EQ(plan_small(64 * kGiB, options)->state_bytes, 2 * base.state_bytes);
  options = {};
  options.experts_per_token = 2;
  CHECK_EQ(2 * plan_small(64 * kGiB, options)->working_set_bytes, base.working_set_bytes);
  CHECK_EQ(2 * plan_small(64 * kGiB, options)->min_expert_cache_bytes, base.min_expert_cache_bytes);
  options.experts_per_token = 100;  // never more than the model's own
  const Status more = plan_small(64 * kGiB, options).status();
  CHECK(more.code() == Code::usage && more.message().find("100") != std::string::npos);
  options = {};
  options.ctx = 100000;
  const Plan capped = std::move(plan_small(64 * kGiB, options)).value();
  CHECK_EQ(capped.ctx, 8192u);
  CHECK(warns(capped.warnings, "8192 tokens"));
}

TEST(plan_chunk_shrinks_where_memory_is_short) {
  const Plan base = std::move(plan_small(64 * kGiB)).value();
  PlanOptions options;
  options.budget_bytes = base.floor_bytes - base.scratch_bytes / 4;
  Result<Plan> made = plan_small(64 * kGiB, options);
  REQUIRE(made.is_ok());
  CHECK_EQ(made->chunk, 256u);
  CHECK_EQ(made->budget_bytes, options.budget_bytes);
  CHECK_EQ(made->floor_bytes, plan_small(8 * kGiB, options)->floor_bytes);  // a floor is no matter of the machine
  options.budget_bytes = 1;
  made = plan_small(64 * kGiB, options);
  CHECK(made.status().code() == Code::resources);
  // What the refusal names is enough, and one byte less is not.
  const std::string& hint = made.status().hint();
  options.budget_bytes = std::stoull(hint.substr(hint.find("--budget ") + 9));
  const Plan least = std::move(plan_small(64 * kGiB, options)).value();
  CHECK_EQ(least.cache_slots, 8 + least.chunk_slots);
  CHECK_EQ(least.slots, least.cache_slots);
  options.budget_bytes -= 1;
  CHECK(!plan_small(64 * kGiB, options).is_ok());
  options = {};
  options.chunk = 77;
  CHECK_EQ(plan_small(64 * kGiB, options)->chunk, 77u);
  // The scratch of 512 tokens may take a quarter of the usable memory at most.
  options = {};
  options.ring_slots = 8;
  CHECK_EQ(plan_small(std::max(base.scratch_bytes * 4 + 8, base.floor_bytes * 2), options)->chunk, 512u);
}

// The buffers of a chunk lie in slots that hold experts when no prompt is computed: a budget has them once, and a ring
// is never exceeded.
TEST(plan_lends_slots_to_the_chunk) {
  PlanOptions options;
  const Plan base = std::move(plan_small(64 * kGiB)).value();
  const uint64_t record = base.record_bytes;
  CHECK_EQ(base.chunk_slots, (engine_chunk_bytes(small_model(), options, 512) + record - 1) / record);
  CHECK_EQ(base.scratch_bytes, engine_scratch_bytes(small_model(), options, 512) + base.chunk_slots * record);
  CHECK(base.chunk_slots > 2);
  CHECK_EQ(base.slots, 80u);
  CHECK_EQ(base.cache_slots, 80 + base.chunk_slots);  // nothing is evicted for a prompt
  options.budget_bytes = base.floor_bytes + 20 * (record + page_table_bytes(record));
  const Plan short_of = std::move(plan_small(64 * kGiB, options)).value();
  CHECK_EQ(short_of.slots, 8 + 20 + short_of.chunk_slots);
  CHECK_EQ(short_of.cache_slots, short_of.slots);
  options.budget_bytes = base.all_resident_bytes - (record + page_table_bytes(record));
  CHECK_EQ(plan_small(64 * kGiB, options)->slots, 80u);  // all experts, unless a prompt is computed
  CHECK_EQ(plan_small(64 * kGiB, options)->cache_slots, 79 + base.chunk_slots);
  options = {};
  options.ring_slots = 20;
  const Plan ring = std::move(plan_small(64 * kGiB, options)).value();
  CHECK_EQ(ring.slots, 20u);
  CHECK_EQ(ring.cache_slots, 20 + ring.chunk_slots);
}

TEST(plan_leaves_what_others_have_reserved) {
  MachineMemory machine = machine_of(64 * kGiB);
  machine.reserved_bytes = 24 * kGiB;
  Result<Plan> made = make_plan(small_model(), machine, PlanOptions());
  REQUIRE(made.is_ok());
  CHECK_EQ(made->usable_ram_bytes, 40 * kGiB);
  CHECK_EQ(made->ceiling_bytes, 30 * kGiB);
  CHECK_EQ(made->physical_ram_bytes, 64 * kGiB);
  machine.reserved_bytes = 65 * kGiB;
  CHECK(make_plan(small_model(), machine, PlanOptions()).status().code() == Code::resources);
}

TEST(plan_available_memory_only_warns) {
  MachineMemory machine = machine_of(64 * kGiB);
  const Plan before = std::move(make_plan(small_model(), machine, PlanOptions())).value();
  machine.available_bytes = before.budget_bytes - 1;
  const Plan after = std::move(make_plan(small_model(), machine, PlanOptions())).value();
  CHECK_EQ(after.budget_bytes, before.budget_bytes);
  CHECK(before.warnings.empty() && warns(after.warnings, "free now"));
}

TEST(plan_dense_model) {
  ModelSpec model = small_model(1);
  Result<Plan> made = make_plan(model, machine_of(64 * kGiB), PlanOptions());
  REQUIRE(made.is_ok());
  CHECK_EQ(made->slots, 0u);
  CHECK_EQ(made->min_expert_cache_bytes + made->expert_cache_bytes + made->working_set_bytes, 0u);
  CHECK_EQ(made->budget_bytes, made->floor_bytes);
  CHECK(made->warnings.empty());
}

TEST(plan_usage_errors) {
  PlanOptions options;
  options.budget_bytes = kGiB;
  options.ring_slots = 10;
  CHECK(plan_small(64 * kGiB, options).status().code() == Code::usage);
  options = {};
  options.ctx = 0;
  CHECK(plan_small(64 * kGiB, options).status().code() == Code::usage);
  options = {};
  options.sessions = 0;
  CHECK(plan_small(64 * kGiB, options).status().code() == Code::usage);
}

TEST(plan_sizes_for_people) {
  CHECK_EQ(show_bytes(812), std::string("812 B"));
  CHECK_EQ(show_bytes(1536), std::string("1.5 KB"));
  CHECK_EQ(show_bytes(8 * kGiB), std::string("8.0 GB"));
  CHECK_EQ(show_bytes(UINT64_MAX), std::string("16777216.0 TB"));
}

TEST(machine_without_cgroups) {
  FakeTree tree;
  CHECK(!read_machine_memory(tree.root()).is_ok());
  tree.write("proc/meminfo", kMeminfo);
  const MachineMemory m = std::move(read_machine_memory(tree.root())).value();
  CHECK_EQ(m.physical_ram_bytes, kTotal);
  CHECK_EQ(m.usable_ram_bytes, kTotal);
  CHECK_EQ(m.available_bytes, 40000000ull * 1024);
  CHECK_EQ(m.limited_by, std::string("physical RAM"));
}

TEST(machine_cgroup_v2_smallest_up_the_tree) {
  FakeTree tree;
  tree.write("proc/meminfo", kMeminfo);
  tree.write("proc/self/mountinfo",
             "25 20 0:22 / /proc rw - proc proc rw\n"
             "30 20 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw\n");
  tree.write("proc/self/cgroup", "0::/user.slice/a b/leaf\n");
  tree.write("sys/fs/cgroup/user.slice/a b/leaf/memory.max", "max\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, kTotal);
  tree.write("sys/fs/cgroup/user.slice/memory.max", "8589934592\n");
  MachineMemory m = std::move(read_machine_memory(tree.root())).value();
  CHECK_EQ(m.usable_ram_bytes, 8 * kGiB);
  CHECK_EQ(m.limited_by, std::string("/sys/fs/cgroup/user.slice/memory.max"));
  tree.write("sys/fs/cgroup/user.slice/a b/memory.high", "4294967296\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, 4 * kGiB);
  tree.write("sys/fs/cgroup/user.slice/a b/leaf/memory.max", "1099511627776000\n");  // above the machine: no limit
  m = std::move(read_machine_memory(tree.root())).value();
  CHECK_EQ(m.usable_ram_bytes, 4 * kGiB);
  CHECK_EQ(m.physical_ram_bytes, kTotal);
}

TEST(machine_cgroup_v1_and_its_unlimited) {
  FakeTree tree;
  tree.write("proc/meminfo", kMeminfo);
  tree.write("proc/self/mountinfo",
             "31 20 0:27 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu\n"
             "32 20 0:28 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
             "33 20 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n");
  tree.write("proc/self/cgroup", "5:cpu:/other\n4:memory:/a/b\n0::/\n");  // a hybrid: both versions mounted
  tree.write("sys/fs/cgroup/unified/cgroup.procs", "");
  tree.write("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "9223372036854771712\n");
  tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, kTotal);
  tree.write("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "2147483648\n");
  tree.write("sys/fs/cgroup/cpu/other/memory.limit_in_bytes", "1024\n");  // not the memory controller
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, 2 * kGiB);
}

// Docker on version 1: the process sees the host's path, and the mount shows that group as its root.
TEST(machine_cgroup_v1_in_a_container) {
  FakeTree tree;
  tree.write("proc/meminfo", kMeminfo);
  tree.write("proc/self/mountinfo", "32 20 0:28 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n");
  tree.write("proc/self/cgroup", "4:memory:/docker/abc/inner\n");
  tree.write("sys/fs/cgroup/memory/memory.limit_in_bytes", "3221225472\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, 3 * kGiB);
  tree.write("sys/fs/cgroup/memory/inner/memory.limit_in_bytes", "1073741824\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, kGiB);
}

// A cgroup namespace: paths that climb out of it, or that do not exist here, must not hide the container's own limit.
TEST(machine_cgroup_namespaces) {
  FakeTree tree;
  tree.write("proc/meminfo", kMeminfo);
  tree.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  tree.write("sys/fs/cgroup/memory.max", "6442450944\n");
  for (const char* group : {"0::/\n", "0::/../../elsewhere\n", "0::/kubepods/pod1/gone\n"}) {
    tree.write("proc/self/cgroup", group);
    CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, 6 * kGiB);
  }
  tree.write("proc/self/mountinfo", "30 20 0:26 /../.. /sys/fs/cgroup ro - cgroup2 cgroup rw\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, 6 * kGiB);
  tree.write("proc/self/mountinfo", "garbage\n\n30 20\n - cgroup2\n");
  CHECK_EQ(read_machine_memory(tree.root())->usable_ram_bytes, kTotal);
}
