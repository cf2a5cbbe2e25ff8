#include <sys/stat.h>

#include <chrono>
#include <filesystem>
#include <thread>

#include "cache_bench.h"
#include "check.h"
#include "core/upkeep.h"
#include "experts/history.h"
#include "fake_tree.h"

using namespace smoe;
using namespace cache_bench;

namespace {

const std::string kFingerprint = history_fingerprint("{\"id\":\"a\"}");

// A machine of 4 GiB with `available` of it free and, unless 0, a control group that holds `used` of `limit`.
void write_machine(const FakeTree& tree, uint64_t available, uint64_t limit = 0, uint64_t used = 0,
                   uint64_t cached = 0) {
  tree.write("proc/meminfo", "MemTotal: 4194304 kB\nMemFree: 1 kB\nMemAvailable: " + std::to_string(available >> 10) +
                                 " kB\nSwapFree: 99999999 kB\n");
  tree.write("proc/self/cgroup", limit != 0 ? "0::/pod/app\n" : "0::/\n");
  tree.write("proc/self/mountinfo", "30 20 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n");
  tree.write("proc/self/statm", "1000 0 0 0 0 0 0\n");
  if (limit == 0) return;
  tree.write("sys/fs/cgroup/pod/memory.max", std::to_string(limit) + "\n");
  tree.write("sys/fs/cgroup/pod/memory.current", std::to_string(used) + "\n");
  tree.write("sys/fs/cgroup/pod/memory.stat",
             "anon 5\nfile 9\ninactive_file " + std::to_string(cached) + "\nactive_file 0\n");
  tree.write("sys/fs/cgroup/pod/app/memory.max", "max\n");
}

Plan plan_of(uint32_t slots) {
  Plan plan;
  plan.record_bytes = kRecord;
  plan.slots = plan.cache_slots = slots;
  plan.min_expert_cache_bytes = 4 * kRecord;
  plan.budget_bytes = slots * kRecord;
  plan.all_resident_bytes = 1 << 30;
  plan.physical_ram_bytes = 64 * kRecord;  // one record's worth is to stay free
  return plan;
}

struct Kept {
  explicit Kept(uint32_t slots = 24, uint32_t experts = 16) : bench(2, experts, slots), plan(plan_of(slots)) {}
  Upkeep open(const std::string& root, const std::string& history = "", bool warm = true) {
    return Upkeep(*bench.cache, plan, {history, kFingerprint, root, warm},
                  [this](const std::string& text) { said.push_back(text); });
  }
  Bench bench;
  Plan plan;
  std::vector<std::string> said;
};

}  // namespace

TEST(upkeep_free_memory_is_the_least_up_the_tree) {
  FakeTree tree;
  CHECK_EQ(read_free_memory(tree.root()).bytes, 0u);  // unknown
  write_machine(tree, 1 << 30);
  CHECK_EQ(read_free_memory(tree.root()).bytes, uint64_t{1} << 30);
  CHECK_EQ(read_free_memory(tree.root()).group_limit_bytes, 0u);
  write_machine(tree, 1 << 30, 512 << 20, 400 << 20);
  CHECK_EQ(read_free_memory(tree.root()).bytes, uint64_t{112} << 20);
  CHECK_EQ(read_free_memory(tree.root()).group_limit_bytes, uint64_t{512} << 20);
  CHECK_EQ(read_free_memory(tree.root()).group_used_bytes, uint64_t{400} << 20);
  write_machine(tree, 1 << 30, 512 << 20, 500 << 20, 300 << 20);  // page cache is reclaimable (R1)
  CHECK_EQ(read_free_memory(tree.root()).bytes, uint64_t{312} << 20);
  write_machine(tree, 64 << 20, 512 << 20, 0);  // the machine is shorter than the group (R2)
  CHECK_EQ(read_free_memory(tree.root()).bytes, uint64_t{64} << 20);
  CHECK_EQ(read_free_memory(tree.root()).group_limit_bytes, 0u);
  write_machine(tree, 1 << 30, 512 << 20, 600 << 20);
  CHECK_EQ(read_free_memory(tree.root()).bytes, 1u);  // over its limit: nothing, which is not unknown
}

TEST(upkeep_slots_that_fit) {
  Room room{100, 1000, 0, 0, 5, 2, 50};
  CHECK_EQ(slots_that_fit(room), 15u);
  room.others_bytes = 300, room.spare_bytes = 250;
  CHECK_EQ(slots_that_fit(room), 9u);
  room.free_bytes = 450;
  CHECK_EQ(slots_that_fit(room), 4u);
  room.free_bytes = 0;
  CHECK_EQ(slots_that_fit(room), 2u);  // never below the least
  room.free_bytes = 1 << 30;
  CHECK_EQ(slots_that_fit(room), 50u);  // never above the plan
}

// R17: between requests the cache gives slots back when memory is short, and takes them again.
TEST(upkeep_the_cache_follows_free_memory) {
  FakeTree tree;
  Kept kept;
  write_machine(tree, 64 * kRecord);
  Upkeep upkeep = kept.open(tree.root());
  CHECK_EQ(kept.bench.cache->residency().slots(), 24u);
  std::vector<uint32_t> all;
  for (uint32_t e = 0; e < 16; ++e) all.push_back(e);
  CHECK(kept.bench.fetch(0, all));
  CHECK_EQ(kept.bench.cache->touched_slots(), 16u);
  write_machine(tree, 3 * kRecord);  // one is to stay free: room for two more than the 16 that have memory
  upkeep.before_request();
  CHECK_EQ(kept.bench.cache->residency().slots(), 18u);
  CHECK_EQ(kept.bench.cache->residency().held(), 16u);
  write_machine(tree, 0 * kRecord + 1024);
  upkeep.before_request();
  CHECK_EQ(kept.bench.cache->residency().slots(), 15u);
  CHECK_EQ(kept.bench.cache->touched_slots(), 15u);
  CHECK_EQ(kept.said.size(), 2u);
  CHECK(kept.said.back().find("has 15 of its 24 slots now") != std::string::npos);
  for (int i = 0; i < 30; ++i) upkeep.before_request();  // still nothing free: down to the least, and not below
  CHECK_EQ(kept.bench.cache->residency().slots(), 4u);
  CHECK(kept.bench.fetch(0, all));
  write_machine(tree, 64 * kRecord);
  upkeep.before_request();
  CHECK_EQ(kept.bench.cache->residency().slots(), 24u);
  CHECK(kept.said.back().find("has 24 of its 24 slots now") != std::string::npos);
}

TEST(upkeep_starts_with_what_fits) {
  FakeTree tree;
  Kept kept;
  kept.plan.budget_bytes += 5 * kRecord;  // beside the slots the engine will still take so much
  write_machine(tree, 16 * kRecord);      // one stays free
  const Upkeep upkeep = kept.open(tree.root());
  CHECK_EQ(kept.bench.cache->residency().slots(), 10u);
}

// A budget of more than there is, or than is free: what the model has no use for is not kept free.
TEST(upkeep_a_budget_beyond_all_experts_takes_no_slots) {
  FakeTree tree;
  Kept kept;
  kept.plan.all_resident_bytes = kept.plan.budget_bytes;
  kept.plan.budget_bytes = uint64_t{1} << 40;
  write_machine(tree, 64 * kRecord);
  const Upkeep upkeep = kept.open(tree.root());
  CHECK_EQ(kept.bench.cache->residency().slots(), 24u);
  CHECK(kept.said.empty());
}

TEST(upkeep_unknown_memory_changes_nothing) {
  FakeTree tree;
  Kept kept;
  Upkeep upkeep = kept.open(tree.root());
  upkeep.before_request();
  CHECK_EQ(kept.bench.cache->residency().slots(), 24u);
}

TEST(upkeep_history_outlives_the_process_and_warms_the_next) {
  FakeTree tree;
  write_machine(tree, 1 << 30);
  const std::string path = tree.path("vault.usage");
  {
    Kept kept;
    Upkeep upkeep = kept.open(tree.root(), path);
    for (int i = 0; i < 9; ++i) CHECK(kept.bench.fetch(0, {3, 7}) && kept.bench.fetch(1, {3}));
    CHECK(kept.bench.fetch(1, {9}));
    upkeep.idle();
    CHECK(!std::filesystem::exists(path));  // nothing to tell yet
    upkeep.after_request();
    while (upkeep.idle()) continue;
    CHECK(!std::filesystem::exists(path));  // the next request may follow at once
    std::this_thread::sleep_for(std::chrono::milliseconds(1050));
    while (upkeep.idle()) continue;
    CHECK(std::filesystem::exists(path));
  }
  Kept kept(3);
  kept.plan.min_expert_cache_bytes = kRecord;
  Upkeep upkeep = kept.open(tree.root(), path);
  CHECK_EQ(kept.bench.cache->residency().held(), 0u);
  while (upkeep.idle()) continue;
  CHECK_EQ(upkeep.warmed(), 3u);  // as many as there are slots: 0:3, 0:7, 1:3
  CHECK(kept.bench.fetch(0, {3, 7}) && kept.bench.fetch(1, {3}));
  CHECK_EQ(kept.bench.cache->stats().hits, 3u);
  CHECK(kept.said.empty());
}

TEST(upkeep_a_request_finds_at_most_two_reads_before_its_own) {
  FakeTree tree;
  write_machine(tree, 1 << 30);
  const std::string path = tree.path("vault.usage");
  REQUIRE(write_history(path, kFingerprint, std::vector<float>(32, 1.0f)).is_ok());
  Kept kept(32);
  Upkeep upkeep = kept.open(tree.root(), path);
  while (upkeep.warmed() < 32) {
    upkeep.idle();
    CHECK(kept.bench.cache->settle(false) <= 2);
  }
}

// Prompts hardly count the last layer; it is warmed as the others are.
TEST(upkeep_layers_are_warmed_alike) {
  FakeTree tree;
  write_machine(tree, 1 << 30);
  const std::string path = tree.path("vault.usage");
  std::vector<float> counts(32);
  for (uint32_t e = 0; e < 16; ++e) counts[e] = 1000.0f * (e + 1), counts[16 + e] = 0.5f * (e + 1);
  REQUIRE(write_history(path, kFingerprint, counts).is_ok());
  Kept kept(8);
  Upkeep upkeep = kept.open(tree.root(), path);
  while (upkeep.idle()) continue;
  CHECK(kept.bench.fetch(0, {12, 13, 14, 15}) && kept.bench.fetch(1, {12, 13, 14, 15}));
  CHECK_EQ(kept.bench.cache->stats().hits, 8u);
}

// Slots that nothing known is for are filled too, of every layer alike, but not between two requests in a row.
TEST(upkeep_free_slots_are_filled_without_history) {
  FakeTree tree;
  write_machine(tree, 1 << 30);
  Kept kept(8);
  Upkeep upkeep = kept.open(tree.root());
  upkeep.after_request();
  while (upkeep.idle()) continue;
  CHECK_EQ(upkeep.warmed(), 0u);
  std::this_thread::sleep_for(std::chrono::milliseconds(1050));
  while (upkeep.idle()) continue;
  CHECK_EQ(upkeep.warmed(), 8u);
  CHECK(kept.bench.fetch(0, {0, 1, 2, 3}) && kept.bench.fetch(1, {0, 1, 2}));
  CHECK_EQ(kept.bench.cache->stats().hits, 7u);
  CHECK(kept.bench.fetch(0, {15}));  // what nobody has asked for gives way
  CHECK(!kept.bench.cache->residency().holds(16 + 3));
}

TEST(upkeep_no_warm_still_keeps_the_history) {
  FakeTree tree;
  write_machine(tree, 1 << 30);
  const std::string path = tree.path("vault.usage");
  REQUIRE(write_history(path, kFingerprint, std::vector<float>(32, 1.0f)).is_ok());
  Kept kept(32);
  {
    Upkeep upkeep = kept.open(tree.root(), path, false);
    CHECK(!upkeep.idle());
    CHECK_EQ(kept.bench.cache->residency().held(), 0u);
    CHECK(kept.bench.fetch(1, {0}));
    upkeep.after_request();
  }
  Result<std::vector<float>> counts = read_history(path, kFingerprint, 32);
  REQUIRE(counts.is_ok());
  CHECK((*counts)[16] > 1.9f && (*counts)[17] <= 1.0f && (*counts)[17] > 0.9f);
}

TEST(upkeep_history_of_another_vault_or_damaged) {
  FakeTree tree;
  const std::string path = tree.path("vault.usage");
  CHECK(read_history(path, kFingerprint, 8)->empty());  // none yet
  std::vector<float> counts = {0, 1, 2.5f, 3, 4, 5, 6, 7};
  REQUIRE(write_history(path, kFingerprint, counts).is_ok());
  CHECK(*read_history(path, kFingerprint, 8) == counts);
  CHECK(read_history(path, history_fingerprint("other"), 8)->empty());
  std::ifstream in(path, std::ios::binary);
  const std::string whole{std::istreambuf_iterator<char>(in), {}};
  for (size_t at = 0; at < whole.size(); ++at) {
    std::string bad = whole;
    bad[at] ^= 4;
    tree.write("bad", bad);
    const auto read = read_history(tree.path("bad"), kFingerprint, 8);
    CHECK(read.status().code() == Code::corrupt || (read.is_ok() && at >= 8 && at < 72));  // there: another vault's
    tree.write("cut", whole.substr(0, at));
    CHECK(read_history(tree.path("cut"), kFingerprint, 8).status().code() == Code::corrupt);
  }
  counts[3] = -1;
  REQUIRE(write_history(path, kFingerprint, counts).is_ok());
  CHECK(!read_history(path, kFingerprint, 8).is_ok());

  Kept kept(8, 4);
  tree.write("bad", "SMOEUSED" + std::string(90, 'x'));
  write_machine(tree, 1 << 30);
  {
    Upkeep upkeep = kept.open(tree.root(), tree.path("none/vault.usage"));
    upkeep.after_request();
    upkeep.idle();
    upkeep.after_request();
  }
  REQUIRE(kept.said.size() == 1);  // once, not at every try
  CHECK(kept.said[0].find("cannot write the usage file") != std::string::npos);
}

// A reader never meets half a file, and nothing is left behind.
TEST(upkeep_history_is_replaced_whole) {
  FakeTree tree;
  const std::string path = tree.path("vault.usage");
  for (float value : {1.0f, 2.0f, 3.0f}) {
    REQUIRE(write_history(path, kFingerprint, std::vector<float>(8, value)).is_ok());
    CHECK((*read_history(path, kFingerprint, 8))[7] == value);
  }
  CHECK_EQ(std::distance(std::filesystem::directory_iterator(tree.root()), {}), 1);
}
