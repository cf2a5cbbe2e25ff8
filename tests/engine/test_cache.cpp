#include <algorithm>
#include <cerrno>
#include <cstring>
#include <list>
#include <map>
#include <random>
#include <vector>

#include "cache_bench.h"
#include "check.h"
#include "fake_tree.h"

using namespace smoe;
using namespace cache_bench;

namespace {

// The policy in its shortest form. Holds only while a fetch is not larger than the slots that are left for it.
struct LruModel {
  explicit LruModel(size_t slots) : slots(slots) {}
  void fetch(uint32_t layer, const std::vector<uint32_t>& wanted) {
    std::vector<std::pair<uint32_t, uint32_t>> missing;
    for (uint32_t expert : wanted) {
      const std::pair key(layer, expert);
      const auto found = std::find(order.begin(), order.end(), key);
      if (found == order.end()) {
        missing.push_back(key);
        ++misses;
      } else {
        order.splice(order.end(), order, found);
        ++hits;
      }
    }
    for (const auto& key : missing) {
      if (order.size() == slots) {
        order.pop_front();
        ++evictions;
      }
      order.push_back(key);
    }
  }
  size_t slots;
  std::list<std::pair<uint32_t, uint32_t>> order;
  uint64_t hits = 0, misses = 0, evictions = 0;
};

}  // namespace

TEST(cache_counts_and_contents_equal_the_model) {
  std::mt19937 random(5);
  for (uint32_t slots : {4u, 5u, 9u, 40u, 64u}) {
    MemoryReaderOptions options;
    options.choose = [&](size_t waiting) { return random() % waiting; };  // arrivals in any order
    options.late = [&](uint64_t) { return random() % 3 == 0; };
    Bench bench(4, 16, slots, options);
    LruModel model(slots);
    for (int step = 0; step < 400; ++step) {
      const uint32_t layer = static_cast<uint32_t>(step % 4);
      const std::vector<uint32_t> wanted = draw(random, 16, 1 + random() % 4);
      if (!bench.fetch(layer, wanted)) return check::fail(__FILE__, __LINE__, "wrong experts");
      model.fetch(layer, wanted);
    }
    const CacheStats stats = bench.cache->stats();
    CHECK_EQ(stats.hits, model.hits);
    CHECK_EQ(stats.misses, model.misses);
    CHECK_EQ(stats.evictions, model.evictions);
    CHECK_EQ(stats.read_bytes, model.misses * kRecord);
    CHECK_EQ(bench.cache->reader().stats().reads, model.misses);
    if (slots == 64) CHECK_EQ(stats.evictions, 0u);
  }
}

// A prefill chunk asks for every expert of a layer, whatever the number of slots.
TEST(cache_more_experts_than_slots) {
  std::mt19937 random(6);
  for (uint32_t slots : {1u, 2u, 3u, 7u, 16u, 20u}) {
    for (uint32_t depth : {1u, 3u, 32u}) {
      Bench bench(3, 16, slots, {}, true, depth);
      for (int step = 0; step < 30; ++step) {
        CHECK(bench.fetch(static_cast<uint32_t>(step % 3), draw(random, 16, step % 2 ? 16 : 3)));
      }
      const CacheStats stats = bench.cache->stats();
      CHECK_EQ(stats.hits + stats.misses, 15u * 16 + 15u * 3);
    }
  }
}

TEST(cache_residents_come_first_and_survive_the_fetch) {
  Bench bench(1, 8, 4);
  CHECK(bench.fetch(0, {0, 1, 2, 3}));
  const uint32_t wanted[] = {6, 0, 7, 1};  // 0 is the least recent, and must not be the victim for 6
  REQUIRE(bench.cache->begin(0, wanted, 4).is_ok());
  std::vector<ExpertRef> batch;
  REQUIRE(bench.cache->next(&batch).is_ok());
  REQUIRE(batch.size() >= 2);
  CHECK_EQ(batch[0].expert, 0u);
  CHECK_EQ(batch[0].index, 1u);
  CHECK_EQ(batch[1].expert, 1u);
  bench.cache->end();
  CHECK_EQ(bench.cache->stats().hits, 2u);
  CHECK_EQ(bench.cache->stats().evictions, 2u);
  CHECK(bench.fetch(0, {0, 1, 6, 7}));  // what was in flight at end() has arrived and stays
  CHECK_EQ(bench.cache->stats().misses, 6u);
}

TEST(cache_never_evicts_a_pinned_slot) {
  Bench bench(2, 8, 3);
  const uint32_t wanted[] = {0, 1, 2, 3};
  REQUIRE(bench.cache->begin(0, wanted, 4).is_ok());
  std::vector<ExpertRef> held;
  while (held.size() < 3) REQUIRE(bench.cache->next(&held).is_ok());
  // All slots are held: a refusal, not a hang.
  CHECK(bench.cache->next(&held).status().code() == Code::failed);
  for (const ExpertRef& ref : held) CHECK(bench.is_record(ref, 0));
  bench.cache->release(held[0]);  // the first of more than there are slots is the one that does not stay
  std::vector<ExpertRef> last;
  Result<bool> more = bench.cache->next(&last);
  CHECK(more.is_ok() && *more);
  REQUIRE(last.size() == 1);
  CHECK_EQ(last[0].slot, held[0].slot);
  CHECK(bench.is_record(held[1], 0) && bench.is_record(last[0], 0) && bench.is_record(held[2], 0));
  more = bench.cache->next(&last);
  CHECK(more.is_ok() && !*more);
  bench.cache->end();
}

TEST(cache_keeps_the_disk_busy) {
  uint32_t in_flight = 0;  // as the reader sees it: what waits when a completion is chosen
  MemoryReaderOptions options;
  options.choose = [&](size_t waiting) { return in_flight = static_cast<uint32_t>(waiting), size_t{0}; };
  Bench bench(1, 16, 16, options, true, 4);
  std::vector<uint32_t> all(16);
  for (uint32_t i = 0; i < 16; ++i) all[i] = i;
  REQUIRE(bench.cache->begin(0, all.data(), all.size()).is_ok());
  std::vector<ExpertRef> batch;
  size_t got = 0;
  while (got < 13) {
    batch.clear();
    REQUIRE(bench.cache->next(&batch).is_ok());
    got += batch.size();
    if (got < 12) CHECK_EQ(in_flight, 4u);
    for (const ExpertRef& ref : batch) bench.cache->release(ref);
  }
  bench.cache->end();
}

// A slot that becomes free while the caller computes is read into at once, not at the next call of next().
TEST(cache_release_starts_the_next_read) {
  Bench bench(1, 8, 2);
  const uint32_t wanted[] = {0, 1, 2, 3};
  REQUIRE(bench.cache->begin(0, wanted, 4).is_ok());
  std::vector<ExpertRef> held;
  while (held.size() < 2) REQUIRE(bench.cache->next(&held).is_ok());
  CHECK_EQ(bench.cache->reader().stats().reads, 2u);
  bench.cache->release(held[0]);  // issues the third read
  bench.cache->release(held[1]);  // takes it in, then reads the fourth
  CHECK_EQ(bench.cache->reader().stats().reads, 4u);
  bench.cache->end();
}

TEST(cache_read_errors_are_for_that_fetch_only) {
  for (uint64_t bad : {0u, 1u, 5u}) {
    bool broken = true;
    MemoryReaderOptions options;
    options.fault = [&](uint64_t call) { return Fault{broken && call >= bad ? EIO : 0, 0, false}; };
    Bench bench(1, 8, 8, options);
    Status status;
    CHECK(!bench.fetch(0, {0, 1, 2, 3, 4, 5, 6, 7}, &status));
    CHECK(status.code() == Code::io);
    CHECK(status.message().find("layer 10, expert ") != std::string::npos);
    broken = false;
    const uint64_t before = bench.cache->stats().read_bytes;
    CHECK_EQ(before, bad * kRecord);
    CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5, 6, 7}));  // what had arrived is a hit, the rest is read now
    CHECK_EQ(bench.cache->stats().hits, bad);
    CHECK_EQ(bench.cache->stats().read_bytes, 8 * kRecord);
  }
}

// A slot whose read failed is empty: it gives up nothing the next time, least of all what another slot holds by then.
TEST(cache_slots_of_failed_reads_are_empty) {
  bool broken = false;
  MemoryReaderOptions options;
  options.fault = [&](uint64_t) { return Fault{broken ? EIO : 0, 0, false}; };
  Bench bench(1, 8, 2, options);
  CHECK(bench.fetch(0, {0, 1}));
  broken = true;
  CHECK(!bench.fetch(0, {2, 3}));
  broken = false;
  CHECK_EQ(bench.cache->stats().evictions, 2u);
  CHECK(bench.fetch(0, {0, 1}));
  CHECK_EQ(bench.cache->stats().evictions, 2u);
  CHECK(bench.fetch(0, {0, 1}));
  CHECK_EQ(bench.cache->stats().hits, 2u);
}

TEST(cache_error_paths_never_leave_a_false_record) {
  std::mt19937 random(7);
  MemoryReaderOptions options;
  options.fault = [&](uint64_t) { return Fault{random() % 4 == 0 ? EIO : 0, random() % 3 == 0 ? 4096u : 0u, false}; };
  options.choose = [&](size_t waiting) { return random() % waiting; };
  Bench bench(3, 12, 7, options, false);  // no checksums: is_record() would see stale bytes
  int failed = 0;
  for (int step = 0; step < 600; ++step) {
    Status status;
    if (bench.fetch(static_cast<uint32_t>(random() % 3), draw(random, 12, 1 + random() % 12), &status)) continue;
    ++failed;
    CHECK(status.code() == Code::io);  // an injected error, never a wrong record
  }
  CHECK(failed > 50 && failed < 550);
}

TEST(cache_verifies_records) {
  Bench bench(2, 4, 4);
  bench.bytes[(4 + 2) * kRecord + 999] ^= 1;  // layer 1, expert 2
  CHECK(bench.fetch(0, {0, 1, 2, 3}));
  Status status;
  CHECK(!bench.fetch(1, {2}, &status));
  CHECK(status.code() == Code::corrupt);
  CHECK(status.message().find("layer 11, expert 2") != std::string::npos);
  CHECK(!bench.fetch(1, {2}));  // and is not taken for good the second time
  CHECK(bench.fetch(1, {0, 1, 3}));
}

TEST(cache_end_in_the_middle) {
  Bench bench(1, 8, 4);
  const uint32_t wanted[] = {0, 1, 2, 3};
  REQUIRE(bench.cache->begin(0, wanted, 4).is_ok());
  bench.cache->end();
  bench.cache->end();
  CHECK(bench.fetch(0, {0, 1, 2}));
  CHECK_EQ(bench.cache->stats().hits, 3u);
  REQUIRE(bench.cache->begin(0, nullptr, 0).is_ok());
  std::vector<ExpertRef> batch;
  Result<bool> more = bench.cache->next(&batch);
  CHECK(more.is_ok() && !*more && batch.empty());
  bench.cache->end();
}

TEST(cache_refuses_misuse) {
  Bench bench(1, 4, 4);
  std::vector<ExpertRef> batch;
  CHECK(!bench.cache->next(&batch).is_ok());
  const uint32_t twice[] = {1, 1}, unknown[] = {4}, fine[] = {1};
  CHECK(!bench.cache->begin(0, twice, 2).is_ok());
  CHECK(!bench.cache->begin(0, unknown, 1).is_ok());
  CHECK(!bench.cache->begin(1, fine, 1).is_ok());
  CHECK(bench.cache->begin(0, fine, 1).is_ok());
  CHECK(!bench.cache->begin(0, fine, 1).is_ok());
  bench.cache->end();
  CHECK(bench.fetch(0, {1}));

  const std::vector<uint8_t> none;
  const auto create = [&](ExpertCache::Config config) {
    return ExpertCache::create(std::move(config), open_memory_reader(none, {})).is_ok();
  };
  ExpertCache::Config config;
  CHECK(create(config));  // a dense model
  AlignedBuffer memory = std::move(AlignedBuffer::allocate(kRecord)).value();
  config.records = {{{0, kRecord, 0, 0}}};
  config.memory = memory.data();
  config.slots = 1;
  config.slot_bytes = kRecord;
  CHECK(create(config));
  config.records[0][0].length = kRecord + 1;
  CHECK(!create(config));
  config.records[0][0].length = kRecord;
  config.slots = 0;
  CHECK(!create(config));
  config.slots = 1;
  config.memory = memory.data() + 8;
  CHECK(!create(config));
}

// The same through real threads and a real file; with ThreadSanitizer this is the test of the hand-over.
TEST(cache_over_the_pread_pool) {
  FakeTree tree;
  Bench source(3, 16, 1);
  tree.write("vault", std::string(source.bytes.begin(), source.bytes.end()));
  for (uint32_t workers : {1u, 4u}) {
    for (uint32_t slots : {3u, 10u, 48u}) {
      Bench bench(3, 16, slots);
      ExpertCache::Config config;
      for (uint32_t layer = 0; layer < 3; ++layer) {
        config.records.emplace_back();
        for (uint32_t e = 0; e < 16; ++e) {
          const uint64_t offset = (layer * 16 + e) * kRecord;
          config.records.back().push_back({offset, kRecord, crc32c(&bench.bytes[offset], kRecord), layer});
        }
      }
      config.memory = bench.memory.data();
      config.slots = slots;
      config.slot_bytes = kRecord;
      config.verify_reads = true;
      config.depth = 4;
      ReaderOptions options;
      options.workers = workers;
      auto reader = open_reader(tree.path("vault"), options, nullptr);
      REQUIRE(reader.is_ok());
      bench.cache = std::move(ExpertCache::create(std::move(config), std::move(reader).value())).value();
      std::mt19937 random(8);
      for (int step = 0; step < 100; ++step) {
        CHECK(bench.fetch(static_cast<uint32_t>(step % 3), draw(random, 16, 1 + random() % 16)));
      }
    }
  }
}

namespace {

void prefetch(Bench& bench, uint32_t layer, const std::vector<uint32_t>& experts, uint32_t most) {
  bench.cache->prefetch(layer, experts.data(), experts.size(), most);
}

}  // namespace

TEST(cache_a_guess_waits_for_the_reads_that_are_needed) {
  Bench bench(2, 8, 16);
  const uint32_t wanted[] = {0, 1, 2, 3};
  REQUIRE(bench.cache->begin(0, wanted, 4).is_ok());
  prefetch(bench, 1, {5, 6, 7}, 2);
  CHECK_EQ(bench.cache->stats().guessed, 0u);
  std::vector<ExpertRef> got;
  while (got.size() < 4) {
    CHECK_EQ(bench.cache->stats().guessed, 0u);
    REQUIRE(bench.cache->next(&got).is_ok());
  }
  CHECK_EQ(bench.cache->stats().guessed, 2u);  // the likeliest two
  bench.cache->end();
  CHECK(bench.fetch(1, {7, 6, 5}));
  CHECK_EQ(bench.cache->stats().guessed_right, 2u);
  CHECK_EQ(bench.cache->reader().stats().reads, 7u);  // none twice
}

TEST(cache_a_guess_between_fetches_begins_at_once) {
  Bench bench(2, 8, 8);
  prefetch(bench, 1, {4, 4, 99, 5}, 8);  // one given twice is read once, an unknown one ignored
  prefetch(bench, 7, {1}, 8);            // no such layer
  CHECK_EQ(bench.cache->stats().guessed, 2u);
  CHECK(bench.fetch(1, {4, 5}));
  CHECK_EQ(bench.cache->stats().hits, 2u);
  CHECK_EQ(bench.cache->stats().guessed_right, 2u);
}

TEST(cache_a_wrong_guess_gives_way_first) {
  Bench bench(2, 8, 8);
  CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5}));
  prefetch(bench, 1, {7}, 1);
  CHECK(bench.fetch(1, {0}));  // 7 was not asked for
  CHECK(bench.fetch(1, {1}));  // takes its slot
  const uint64_t misses = bench.cache->stats().misses;
  CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5}));
  CHECK_EQ(bench.cache->stats().misses, misses);
  CHECK(bench.fetch(1, {7}));
  CHECK_EQ(bench.cache->stats().misses, misses + 1);
}

TEST(cache_a_failed_guess_fails_nothing) {
  bool broken = true;
  MemoryReaderOptions options;
  options.fault = [&](uint64_t) { return Fault{broken ? EIO : 0, 0, false}; };
  Bench bench(2, 8, 8, options);
  prefetch(bench, 1, {3, 4}, 2);
  const uint32_t wanted[] = {0};
  REQUIRE(bench.cache->begin(0, wanted, 1).is_ok());  // takes the failed guesses in
  broken = false;
  std::vector<ExpertRef> got;
  CHECK(bench.cache->next(&got).is_ok());
  bench.cache->end();
  CHECK_EQ(bench.cache->reader().stats().errors, 2u);
  CHECK(bench.fetch(1, {3, 4}));
  CHECK_EQ(bench.cache->stats().guessed_right, 0u);
}

// A guess that is on its way when its layer begins is what the fetch waits for, and its failure is the fetch's.
TEST(cache_a_guess_on_its_way_is_not_read_again) {
  for (bool fails : {false, true}) {
    MemoryReaderOptions options;
    options.late = [](uint64_t) { return true; };  // nothing arrives but by waiting
    options.fault = [&](uint64_t) { return Fault{fails ? EIO : 0, 0, false}; };
    Bench bench(2, 8, 8, options);
    prefetch(bench, 1, {3}, 1);
    Status status;
    CHECK_EQ(bench.fetch(1, {3}, &status), !fails);
    CHECK_EQ(status.is_ok(), !fails);
    CHECK_EQ(bench.cache->stats().hits, 1u);
    CHECK_EQ(bench.cache->stats().guessed_right, 1u);
    CHECK_EQ(bench.cache->reader().stats().reads + bench.cache->reader().stats().errors, 1u);
  }
}

TEST(cache_stops_guessing_where_guesses_are_wrong) {
  Bench bench(2, 8, 8, {}, false);
  for (uint32_t i = 0; i < 400; ++i) {
    prefetch(bench, 1, {i % 4}, 1);
    REQUIRE(bench.fetch(0, {0}));
    REQUIRE(bench.fetch(1, {4 + i % 4}));
  }
  CHECK(bench.cache->stats().guessed >= 64 && bench.cache->stats().guessed < 100);
  CHECK(!bench.cache->takes_guesses(1));  // so that no router is asked for one
  for (uint32_t i = 0; i < 2000; ++i) REQUIRE(bench.fetch(0, {i % 4}));
  CHECK(bench.cache->takes_guesses(1));
  const uint64_t before = bench.cache->stats().guessed;
  for (uint32_t i = 0; i < 100; ++i) {  // tried again, and right now
    prefetch(bench, 1, {i % 8}, 1);
    REQUIRE(bench.fetch(1, {i % 8}));
    REQUIRE(bench.fetch(0, {0, 1, 2, 3, 4, 5}));
  }
  CHECK(bench.cache->stats().guessed - before >= 80);
}

// Whatever is guessed, in whatever order things arrive and with reads that fail: a fetch gives the right bytes, or says
// that it did not.
TEST(cache_guesses_never_change_what_a_fetch_gives) {
  std::mt19937 random(21);
  for (uint32_t slots : {1u, 2u, 5u, 9u, 40u}) {
    for (uint32_t faults : {0u, 20u}) {
      MemoryReaderOptions options;
      options.choose = [&](size_t waiting) { return random() % waiting; };
      options.late = [&](uint64_t) { return random() % 3 == 0; };
      options.fault = [&](uint64_t) { return Fault{faults != 0 && random() % faults == 0 ? EIO : 0, 0, false}; };
      Bench bench(4, 16, slots, options);
      for (int step = 0; step < 300; ++step) {
        const uint32_t layer = random() % 4;
        if (random() % 4 != 0) prefetch(bench, random() % 4, draw(random, 16, random() % 17), random() % 20);
        Status status;
        const bool right = bench.fetch(layer, draw(random, 16, 1 + random() % 16), &status);
        CHECK(right || (faults != 0 && status.code() == Code::io));
      }
      CHECK(bench.cache->stats().guessed > 0 || slots == 1);
    }
  }
}

// Records are checked from the moment the file was written to, whatever was asked for at the start.
TEST(cache_checks_records_of_a_file_that_changed) {
  bool changed = false;
  MemoryReaderOptions options;
  options.changed = [&] { return changed; };
  Bench bench(2, 8, 4, options, false);
  REQUIRE(bench.fetch(0, {0, 1}));
  bench.bytes[5 * kRecord + 77] ^= 1;
  const uint32_t wanted[] = {5};
  REQUIRE(bench.cache->begin(0, wanted, 1).is_ok());
  std::vector<ExpertRef> got;
  CHECK(bench.cache->next(&got).is_ok());  // it does not know
  bench.cache->end();
  changed = true;
  bench.bytes[6 * kRecord + 77] ^= 1;
  Status status;
  CHECK(!bench.fetch(0, {6}, &status));
  CHECK(status.code() == Code::corrupt);
  bench.bytes[6 * kRecord + 77] ^= 1;
  CHECK(bench.fetch(0, {6, 0}));
}

// Lent slots are the last ones; what lay there moves while there is room, and all is as before when they come back.
TEST(cache_lends_the_memory_of_slots) {
  Bench bench(2, 16, 12);
  CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  uint8_t* memory = bench.cache->lend(5);
  CHECK_EQ(memory, bench.memory.data() + 7 * kRecord);
  CHECK_EQ(bench.cache->lent(), 5u);
  CHECK_EQ(bench.cache->open_slots(), 12u);
  CHECK_EQ(bench.cache->residency().held(), 7u);
  std::memset(memory, 0xee, 5 * kRecord);
  const uint64_t misses = bench.cache->stats().misses;
  CHECK(bench.fetch(0, {11, 10, 9, 8, 7, 6, 5}));  // the last used, wherever they lay
  CHECK_EQ(bench.cache->stats().misses, misses);
  CHECK(bench.fetch(1, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10}));  // more than there are slots now
  for (size_t i = 0; i < 5 * kRecord; ++i) REQUIRE(memory[i] == 0xee);
  CHECK_EQ(bench.cache->lend(3), bench.memory.data() + 9 * kRecord);  // two come back
  CHECK(bench.fetch(1, {0, 1, 2, 3, 4, 5, 6, 7, 8}));
  CHECK(bench.cache->lend(12) == nullptr);  // none would be left
  bench.cache->lend(0);
  CHECK_EQ(bench.cache->lent(), 0u);
  CHECK(bench.fetch(0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}));
  CHECK_EQ(bench.cache->residency().held(), 12u);
}

// What is lent counts as open, whatever was closed before, and memory that was given back is not taken twice.
TEST(cache_lends_and_resizes) {
  std::mt19937 random(3);
  Bench bench(2, 16, 14);
  for (int round = 0; round < 300; ++round) {
    const uint32_t open = 2 + random() % 13;
    bench.cache->resize(open);
    if (open > bench.cache->lent()) CHECK_EQ(bench.cache->open_slots(), open);
    const uint32_t lent = random() % bench.cache->open_slots(), slots = bench.cache->open_slots() - lent;
    uint8_t* memory = bench.cache->lend(lent);
    REQUIRE(lent == 0 || memory == bench.memory.data() + (14 - lent) * kRecord);
    for (uint32_t slot = 0; slot < lent; ++slot) memory[slot * kRecord] = 0xee;
    CHECK_EQ(bench.cache->residency().slots(), slots);
    CHECK(bench.fetch(random() % 2, draw(random, 16, 1 + random() % 10)));
    CHECK(bench.cache->residency().held() <= slots);
    CHECK(bench.cache->touched_slots() <= bench.cache->open_slots());
    for (uint32_t slot = 0; slot < lent; ++slot) REQUIRE(memory[slot * kRecord] == 0xee);
    if (random() % 2) bench.cache->lend(0);
  }
}

// Memory that was committed before a slot is read into counts once, and not any more when its slot was closed.
TEST(cache_counts_committed_memory) {
  uint64_t committed = 0;
  Bench bench(2, 16, 8, {}, {.committed = [&] { return committed; }});
  CHECK_EQ(bench.cache->touched_slots(), 0u);
  CHECK(bench.fetch(0, {0, 1}));
  CHECK_EQ(bench.cache->touched_slots(), 2u);
  committed = 5 * kRecord + kRecord / 2;
  CHECK_EQ(bench.cache->touched_slots(), 5u);
  CHECK(bench.fetch(0, {2, 3, 4, 5}));
  CHECK_EQ(bench.cache->touched_slots(), 6u);
  bench.cache->resize(3);
  CHECK_EQ(bench.cache->touched_slots(), 3u);
  bench.cache->resize(8);
  CHECK_EQ(bench.cache->touched_slots(), 3u);
}
