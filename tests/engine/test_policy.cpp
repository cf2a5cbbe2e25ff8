#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <set>

#include "cache_bench.h"
#include "check.h"
#include "experts/trace.h"
#include "fake_tree.h"

using namespace smoe;
using namespace cache_bench;

namespace {

constexpr uint32_t kLayers = 4, kExperts = 16;

ExpertTable table(uint32_t layers = kLayers, uint32_t experts = kExperts) {
  return ExpertTable(std::vector<uint32_t>(layers, experts));
}

std::unique_ptr<Policy> policy(const char* name, const ExpertTable& of) {
  return std::move(make_policy(name, of)).value();
}

// Asked for with one token; the residents among them.
size_t hits(Residency& r, uint32_t layer, const std::vector<uint32_t>& experts) {
  return r.fetch(layer, experts.data(), nullptr, experts.size(), 1).hits.size();
}

std::set<uint32_t> residents(const Residency& r) {
  std::set<uint32_t> held;
  for (uint32_t record = 0; record < r.table().records(); ++record) {
    if (r.holds(record)) held.insert(record);
  }
  return held;
}

TraceHeader header(uint32_t slots, const std::string& name) {
  return {"made", name, slots, std::vector<uint32_t>(kLayers, kExperts), std::vector<uint32_t>(kLayers, 4)};
}

std::string file_bytes(const std::string& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

TEST(policy_names_are_found_and_others_refused) {
  CHECK(policy_names().size() >= 5);
  for (const std::string& name : policy_names()) CHECK(make_policy(name, table()).is_ok());
  CHECK(make_policy("decayed:17", table()).is_ok());
  CHECK(make_policy(kDefaultPolicy, table()).is_ok());
  for (const char* bad : {"", "mru", "decayed:", "decayed:0", "decayed:x", "lru "}) {
    const auto refused = make_policy(bad, table());
    CHECK(refused.status().code() == Code::usage);
    CHECK(refused.status().hint().find("least-stale") != std::string::npos);
  }
}

TEST(policy_lru_evicts_the_least_recent) {
  Residency r(table(1, 8), 3, policy("lru", table(1, 8)));
  hits(r, 0, {0}), hits(r, 0, {1}), hits(r, 0, {2}), hits(r, 0, {0});
  hits(r, 0, {3});
  CHECK(residents(r) == (std::set<uint32_t>{0, 2, 3}));
}

TEST(policy_a_layer_is_held_whole_or_not) {
  Residency r(table(2, 3), 4, policy("lru", table(2, 3)));
  hits(r, 0, {0, 1});
  CHECK(!r.holds_all_of(0));
  hits(r, 0, {2});
  CHECK(r.holds_all_of(0) && !r.holds_all_of(1));
  hits(r, 1, {0, 1});  // one slot is free, one record of layer 0 gives way
  CHECK(!r.holds_all_of(0));
}

// Of a prompt the last layer is asked for one row: what it used before is worth as much afterwards.
TEST(policy_decayed_compares_layers_by_the_token) {
  Residency r(table(2, 8), 4, policy("decayed", table(2, 8)));
  const uint32_t both[] = {0, 1}, other[] = {0, 2}, some_rows[] = {512, 256};
  for (int turn = 0; turn < 3; ++turn) {
    for (int token = 0; token < 200; ++token)
      for (uint32_t layer : {0, 1}) r.fetch(layer, both, nullptr, 2, 1);
    r.fetch(0, both, some_rows, 2, 512);
    r.fetch(1, both, nullptr, 2, 1);
  }
  r.fetch(0, other, nullptr, 2, 1);
  CHECK(!r.holds(1));
  CHECK(r.holds(8) && r.holds(9));
}

TEST(policy_decayed_keeps_the_frequent_and_forgets) {
  Residency r(table(1, 8), 2, policy("decayed:8", table(1, 8)));
  for (int i = 0; i < 6; ++i) hits(r, 0, {0});
  hits(r, 0, {1});
  hits(r, 0, {2});  // used once as 1 was, but later
  CHECK(residents(r) == (std::set<uint32_t>{0, 2}));
  for (int i = 0; i < 60; ++i) hits(r, 0, {static_cast<uint32_t>(3 + i % 2)});
  CHECK(residents(r) == (std::set<uint32_t>{3, 4}));  // what was frequent once is not for ever
}

// The counts against the definition, summed anew each time.
TEST(policy_usage_equals_the_sum_of_its_halvings) {
  const uint32_t half_life = 32;
  Usage usage(table(2, 4), half_life);
  std::vector<std::pair<double, double>> added[8];  // [record] (time, uses)
  double now[2] = {0, 0};
  std::mt19937 random(3);
  for (int step = 0; step < 500; ++step) {
    const uint32_t layer = random() % 2, record = layer * 4 + random() % 4, uses = 1 + random() % 5;
    const uint32_t tokens = 1 + random() % 9;
    usage.turn(layer, tokens);
    now[layer] += tokens;
    usage.use(record, uses);
    added[record].push_back({now[layer], uses});
  }
  for (uint32_t record = 0; record < 8; ++record) {
    double sum = 0;
    for (const auto& [time, uses] : added[record]) sum += uses * std::exp2((time - now[record / 4]) / half_life);
    CHECK(std::abs(usage.count(record) - sum) < 1e-9 * sum);
  }
}

TEST(policy_least_stale_evicts_the_layer_just_passed) {
  Residency r(table(3, 4), 4, policy("least-stale", table(3, 4)));
  hits(r, 0, {0}), hits(r, 1, {0}), hits(r, 2, {0});
  hits(r, 0, {1});  // a free slot
  hits(r, 1, {1});
  CHECK(residents(r) == (std::set<uint32_t>{0, 1, 5, 8}));  // 1:0 was as stale as 0:0, and its layer's turn is now
  hits(r, 2, {1});
  CHECK(residents(r) == (std::set<uint32_t>{0, 1, 5, 9}));
}

TEST(policy_floors_leave_each_layer_its_share) {
  Residency bare(table(2, 8), 8, policy("decayed", table(2, 8)));
  Residency floors(table(2, 8), 8, policy("floors", table(2, 8)));
  for (Residency* r : {&bare, &floors}) {
    for (uint32_t e = 0; e < 4; ++e) hits(*r, 1, {e});  // once each
    for (int round = 0; round < 9; ++round) {
      for (uint32_t e = 0; e < 8; ++e) hits(*r, 0, {e});
    }
  }
  const auto of_layer_1 = [](const Residency& r) {
    const std::set<uint32_t> held = residents(r);
    return std::count_if(held.begin(), held.end(), [](uint32_t record) { return record >= 8; });
  };
  CHECK_EQ(of_layer_1(bare), 0);
  CHECK_EQ(of_layer_1(floors), 2);  // half of its even part of 8 slots
}

// A floor is no wall: with nothing else to take from, it gives.
TEST(policy_floors_give_when_nothing_else_can) {
  Residency r(table(2, 8), 4, policy("floors", table(2, 8)));
  hits(r, 0, {0}), hits(r, 1, {0});
  hits(r, 1, {1, 2, 3, 4});
  CHECK(residents(r) == (std::set<uint32_t>{9, 10, 11, 12}));
}

TEST(policy_sampled_spares_the_frequent_and_is_the_same_each_time) {
  std::set<uint32_t> first;
  for (int run = 0; run < 2; ++run) {
    Residency r(table(1, 64), 16, policy("lfru", table(1, 64)));
    std::mt19937 random(4);
    for (int i = 0; i < 600; ++i) {
      hits(r, 0, {static_cast<uint32_t>(i % 4)});
      hits(r, 0, {static_cast<uint32_t>(4 + random() % 60)});
    }
    for (uint32_t e = 0; e < 4; ++e) CHECK(r.holds(e));
    if (run == 0) first = residents(r);
    CHECK(residents(r) == first);
  }
}

// More than there are slots: the first of it passes through, and what is left is whole.
TEST(policy_a_fetch_larger_than_the_cache_keeps_its_last) {
  for (const std::string& name : policy_names()) {
    Residency r(table(), 5, policy(name.c_str(), table()));
    hits(r, 0, {3, 1});
    std::vector<uint32_t> all;
    for (uint32_t e = 0; e < kExperts; ++e) all.push_back(e);
    const Residency::Fetch& fetch = r.fetch(0, all.data(), nullptr, all.size(), 7);
    CHECK_EQ(fetch.hits.size(), 2u);
    CHECK_EQ(fetch.passing, kExperts - 5);
    CHECK(residents(r) == (std::set<uint32_t>{11, 12, 13, 14, 15}));
  }
}

// The invariants that the cache relies on, under every policy, with everything that can happen to a residency.
TEST(policy_residency_invariants) {
  for (const std::string& name : policy_names()) {
    std::mt19937 random(11);
    Residency r(table(), 20, policy(name.c_str(), table()));
    for (int step = 0; step < 3000; ++step) {
      const std::set<uint32_t> before = residents(r);
      const uint32_t layer = static_cast<uint32_t>(step) % kLayers;
      const std::vector<uint32_t> wanted = draw(random, kExperts, 1 + random() % (step % 50 == 0 ? kExperts : 4));
      const Residency::Fetch& fetch = r.fetch(layer, wanted.data(), nullptr, wanted.size(), 1);
      std::set<uint32_t> expected = before;
      for (uint32_t record : fetch.evicted) CHECK_EQ(expected.erase(record), 1u);
      for (uint32_t i : fetch.hits) CHECK_EQ(before.count(layer * kExperts + wanted[i]), 1u);
      for (uint32_t i : fetch.misses) CHECK(expected.insert(layer * kExperts + wanted[i]).second);
      if (fetch.passing == 0) CHECK(residents(r) == expected);
      CHECK_EQ(r.held(), residents(r).size());
      CHECK(r.held() <= r.slots());
      if (!fetch.evicted.empty()) CHECK_EQ(r.held(), r.slots());  // nothing gives way without need
      if (step % 7 == 0) r.drop(random() % (kLayers * kExperts));
      if (step % 11 == 0) r.insert(random() % (kLayers * kExperts), step % 2 == 0, nullptr);
      if (step % 101 == 0) r.resize(8 + random() % 30, nullptr);
    }
  }
}

// Ranks that are kept between turns are those that would be made anew.
TEST(policy_ranks_are_kept_only_while_they_hold) {
  struct Anew final : Policy {
    explicit Anew(std::unique_ptr<Policy> policy) : inner(std::move(policy)) {}
    void turn(uint32_t layer, uint32_t tokens) override { inner->turn(layer, tokens); }
    void use(uint32_t record, uint32_t uses) override { inner->use(record, uses); }
    void seed(uint32_t record, double uses) override { inner->seed(record, uses); }
    double worth(uint32_t record) const override { return inner->worth(record); }
    bool sorted_by_layer() const override { return false; }
    uint32_t sample() const override { return inner->sample(); }
    double floor_share() const override { return inner->floor_share(); }
    std::unique_ptr<Policy> inner;
  };
  for (const std::string& name : policy_names()) {
    std::mt19937 random(3);
    Residency kept(table(), 24, policy(name.c_str(), table()));
    Residency anew(table(), 24, std::make_unique<Anew>(policy(name.c_str(), table())));
    for (int step = 0; step < 3000; ++step) {
      const uint32_t layer = static_cast<uint32_t>(step) % kLayers, count = 1 + random() % (step % 40 == 0 ? 16 : 4);
      const std::vector<uint32_t> wanted = draw(random, kExperts, count);
      const uint32_t tokens = step % 60 < 4 ? 50 : 1, dropped = random() % (kLayers * kExperts);
      const uint32_t inserted = random() % (kLayers * kExperts), slots = 8 + random() % 30;
      std::vector<float> counts(kLayers * kExperts);
      for (float& n : counts) n = static_cast<float>(random() % 90);
      for (Residency* r : {&kept, &anew}) {
        if (step == 1500) r->seed(counts);
        r->fetch(layer, wanted.data(), nullptr, wanted.size(), tokens);
        if (step % 7 == 0) r->drop(dropped);
        if (step % 3 == 0) r->insert(inserted, step % 2 == 0, nullptr);
        if (step % 101 == 0) r->resize(slots, nullptr);
      }
      REQUIRE(residents(kept) == residents(anew));
    }
  }
}

// What was read on a guess outlives what has been used, until its layer has had its turn; but a fetch comes first.
TEST(policy_guesses_stay_until_their_turn) {
  Residency r(table(2, 8), 4, policy("lru", table(2, 8)));
  hits(r, 0, {0, 1, 2, 3});
  CHECK(!r.insert(8, true, nullptr));  // all belong to the last fetch
  hits(r, 0, {3});
  CHECK(r.insert(8, true, nullptr) && r.insert(9, true, nullptr));
  CHECK(!r.insert(10, true, nullptr));  // half of the slots
  hits(r, 0, {4, 5});
  CHECK(residents(r) == (std::set<uint32_t>{4, 5, 8, 9}));
  CHECK_EQ(hits(r, 1, {0}), 1u);
  hits(r, 0, {4, 6});  // 9 was guessed wrong: nobody has ever used it
  CHECK(residents(r) == (std::set<uint32_t>{4, 5, 6, 8}));
  CHECK(r.insert(9, true, nullptr));
  hits(r, 0, {0, 1, 2, 3});
  CHECK(residents(r) == (std::set<uint32_t>{0, 1, 2, 3}));
}

TEST(trace_says_what_was_written) {
  FakeTree tree;
  const std::string path = tree.path("trace");
  const uint32_t experts[] = {15, 0, 3}, uses[] = {1, 300, 2};
  {
    auto writer = std::move(TraceWriter::open(path, header(9, "lru"))).value();
    writer->seed(std::vector<float>(kLayers * kExperts, 2.5f));
    writer->fetch(3, experts, uses, 3, 400);
    writer->fetch(0, experts, nullptr, 2, 1);
    writer->insert(63, true);
    writer->drop(17);
    writer->resize(1000);
  }
  TraceReader reader = std::move(TraceReader::open(path)).value();
  CHECK_EQ(reader.header().model, std::string("made"));
  CHECK_EQ(reader.header().slots, 9u);
  CHECK(reader.header().experts == std::vector<uint32_t>(kLayers, kExperts));
  TraceEvent e;
  REQUIRE(*reader.next(&e));
  CHECK(e.kind == TraceEvent::Kind::seed && e.counts.size() == 64 && e.counts[63] == 2.5f);
  REQUIRE(*reader.next(&e));
  CHECK(e.layer == 3 && e.tokens == 400 && e.experts == (std::vector<uint32_t>{15, 0, 3}));
  CHECK(e.uses == (std::vector<uint32_t>{1, 300, 2}));
  REQUIRE(*reader.next(&e));
  CHECK(e.layer == 0 && e.tokens == 1 && e.experts == (std::vector<uint32_t>{15, 0}) && e.uses.empty());
  REQUIRE(*reader.next(&e));
  CHECK(e.kind == TraceEvent::Kind::insert && e.record == 63 && e.may_evict);
  REQUIRE(*reader.next(&e));
  CHECK(e.kind == TraceEvent::Kind::drop && e.record == 17);
  REQUIRE(*reader.next(&e));
  CHECK(e.kind == TraceEvent::Kind::resize && e.slots == 1000);
  CHECK(!*reader.next(&e));
}

// Cut anywhere a trace is shorter, nothing else; with a byte changed anywhere it is read or refused, never worse.
TEST(trace_cut_or_damaged) {
  FakeTree tree;
  {
    auto writer = std::move(TraceWriter::open(tree.path("trace"), header(9, "lru"))).value();
    const uint32_t experts[] = {1, 2, 3, 4}, uses[] = {200, 1, 1, 1};
    for (int i = 0; i < 8; ++i) writer->fetch(i % 4, experts, uses, 4, i % 2 ? 200 : 1);
  }
  const std::string whole = file_bytes(tree.path("trace"));
  const size_t events = whole.find("}") + 1;
  for (size_t length = 0; length < whole.size(); ++length) {
    tree.write("cut", whole.substr(0, length));
    Result<TraceReader> reader = TraceReader::open(tree.path("cut"));
    CHECK_EQ(reader.is_ok(), length >= events);
    if (reader.is_ok()) CHECK(replay_trace(*reader, "", 0).is_ok());
  }
  for (size_t at = 0; at < whole.size(); ++at) {
    for (int bit = 0; bit < 8; ++bit) {
      std::string damaged = whole;
      damaged[at] = static_cast<char>(damaged[at] ^ 1 << bit);
      tree.write("bad", damaged);
      Result<TraceReader> reader = TraceReader::open(tree.path("bad"));
      if (reader.is_ok()) (void)replay_trace(*reader, "lru", 5).is_ok();
    }
  }
}

// The live cache, reads arriving in any order, failing now and then, with loads that nobody asked for and changes of
// size, against the replay of its trace: the same hits and misses, whatever the policy.
TEST(trace_replay_equals_the_live_cache) {
  FakeTree tree;
  for (const std::string& name : policy_names()) {
    for (uint32_t slots : {4u, 9u, 21u, 50u, 64u}) {
      std::mt19937 random(slots);
      MemoryReaderOptions options;
      options.choose = [&](size_t waiting) { return random() % waiting; };
      options.late = [&](uint64_t) { return random() % 3 == 0; };
      options.fault = [&](uint64_t call) { return Fault{call > 100 && random() % 60 == 0 ? EIO : 0, 0, false}; };
      const std::string path = tree.path("trace");
      auto writer = std::move(TraceWriter::open(path, header(slots, name))).value();
      Bench bench(kLayers, kExperts, slots, options, {false, 3, name.c_str(), writer.get()});
      std::vector<float> history(kLayers * kExperts);
      for (float& count : history) count = static_cast<float>(random() % 100);
      bench.cache->seed(history);
      for (int step = 0; step < 500; ++step) {
        const bool chunk = step % 40 == 7;
        const std::vector<uint32_t> wanted = draw(random, kExperts, chunk ? kExperts : 1 + random() % 4);
        std::vector<uint32_t> uses(wanted.size(), 1);
        if (chunk) uses[0] = 30;
        (void)bench.fetch(static_cast<uint32_t>(step) % kLayers, wanted, nullptr, uses, chunk ? 32 : 1);
        if (step % 5 == 0) bench.cache->load(random() % kLayers, random() % kExperts, step % 2 == 0);
        if (step % 9 == 0) bench.cache->settle(step % 2 == 0);
        if (step % 150 == 149) bench.cache->resize(1 + random() % slots);
      }
      REQUIRE(writer->flush().is_ok());
      TraceReader trace = std::move(TraceReader::open(path)).value();
      const ReplayCounts n = std::move(replay_trace(trace, "", 0)).value();
      CHECK_EQ(n.hits, bench.cache->stats().hits);
      CHECK_EQ(n.misses, bench.cache->stats().misses);
      CHECK(n.hits > 0);
      const ReplayCounts best = std::move(replay_optimal(trace, slots)).value();
      CHECK_EQ(best.hits + best.misses, n.hits + n.misses);
    }
  }
}

// No policy beats the clairvoyant one.
TEST(trace_optimal_is_a_bound) {
  FakeTree tree;
  std::mt19937 random(5);
  {
    auto writer = std::move(TraceWriter::open(tree.path("trace"), header(8, "lru"))).value();
    for (int step = 0; step < 2000; ++step) {
      std::vector<uint32_t> wanted;
      while (wanted.size() < 3) {
        const uint32_t e = std::min({random() % kExperts, random() % kExperts});
        if (std::find(wanted.begin(), wanted.end(), e) == wanted.end()) wanted.push_back(e);
      }
      writer->fetch(step % kLayers, wanted.data(), nullptr, wanted.size(), 1);
    }
  }
  TraceReader trace = std::move(TraceReader::open(tree.path("trace"))).value();
  for (uint32_t slots : {4u, 8u, 16u, 32u, 64u}) {
    const uint64_t best = replay_optimal(trace, slots)->misses;
    uint64_t last = UINT64_MAX;
    for (const std::string& name : policy_names()) {
      const uint64_t misses = replay_trace(trace, name, slots)->misses;
      CHECK(misses >= best);
      last = misses;
    }
    if (slots == 64) CHECK_EQ(best, last);  // what does not fit is all that is ever missed: each record once
  }
}

TEST(cache_loads_are_there_when_asked_for) {
  Bench bench(2, 8, 4);
  CHECK(bench.cache->load(0, 1, false));
  CHECK(!bench.cache->load(0, 1, false));  // is on its way
  CHECK(bench.cache->load(0, 2, false));
  CHECK(bench.cache->load(1, 2, false));
  CHECK(!bench.cache->load(1, 3, false));  // three are in flight
  CHECK(bench.fetch(0, {2, 3, 1}));        // two of them before they have arrived
  CHECK_EQ(bench.cache->stats().hits, 2u);
  CHECK_EQ(bench.cache->stats().misses, 1u);
  while (bench.cache->settle(true) > 0) continue;
  CHECK(!bench.cache->load(1, 3, false));  // full
  CHECK(bench.cache->load(1, 3, true));    // 1:2 gave way, the one nobody has ever asked for
  CHECK(bench.fetch(1, {3}));
  CHECK(bench.fetch(0, {1, 2, 3}));
  CHECK_EQ(bench.cache->stats().hits, 6u);
  CHECK(!bench.cache->load(2, 0, true) && !bench.cache->load(0, 8, true));

  // While a fetch is open: once all of its reads have begun.
  const uint32_t wanted[] = {4, 5, 6, 7};
  REQUIRE(bench.cache->begin(1, wanted, 4).is_ok());
  CHECK(!bench.cache->load(0, 4, true));
  std::vector<ExpertRef> held;
  while (held.size() < 4) REQUIRE(bench.cache->next(&held).is_ok());
  CHECK(!bench.cache->load(0, 4, true));  // all that is resident is being used
  for (const ExpertRef& ref : held) bench.cache->release(ref);
  bench.cache->end();
  REQUIRE(bench.cache->begin(1, wanted, 2).is_ok());
  CHECK(bench.cache->load(0, 4, true));
  bench.cache->end();
  CHECK(bench.fetch(0, {4}));
  CHECK_EQ(bench.cache->stats().hits, 6u + 2 + 1);
}

TEST(cache_a_failed_load_is_nobodys_error) {
  bool broken = true;
  MemoryReaderOptions options;
  options.fault = [&](uint64_t) { return Fault{broken ? EIO : 0, 0, false}; };
  Bench bench(1, 8, 4, options);
  CHECK(bench.cache->load(0, 1, false));
  CHECK_EQ(bench.cache->settle(true), 0u);
  broken = false;
  CHECK(bench.fetch(0, {1, 2}));
  CHECK_EQ(bench.cache->stats().misses, 2u);
}

TEST(cache_shrinks_and_grows) {
  Bench bench(1, 16, 8);
  CHECK(bench.fetch(0, {8, 1, 2, 3, 4, 5, 6, 7}));
  bench.cache->resize(3);
  CHECK_EQ(bench.cache->residency().held(), 3u);
  // Five slots have been given back: their pages read as zero. The records' first words are not.
  uint32_t empty = 0;
  for (uint32_t slot = 0; slot < 8; ++slot) {
    const uint8_t* at = bench.memory.data() + slot * kRecord;
    empty += std::all_of(at, at + kRecord, [](uint8_t byte) { return byte == 0; });
  }
  CHECK_EQ(empty, 5u);
  CHECK(bench.fetch(0, {5, 6, 7}));
  CHECK_EQ(bench.cache->stats().hits, 3u);
  CHECK(bench.fetch(0, {8, 9, 10, 11}));  // more than fit
  bench.cache->resize(8);
  CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5, 6, 7}));
  CHECK_EQ(bench.cache->stats().hits, 3u + 8);
  bench.cache->resize(0);
  bench.cache->resize(9);
  CHECK_EQ(bench.cache->residency().slots(), 8u);
}
