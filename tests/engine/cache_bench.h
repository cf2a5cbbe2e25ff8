// A little vault in memory behind an expert cache, for the tests of the cache, its policies and its traces.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <random>
#include <vector>

#include "experts/cache.h"
#include "io/memory.h"
#include "util/aligned_buffer.h"
#include "util/crc32c.h"

namespace cache_bench {

using namespace smoe;

inline constexpr uint64_t kRecord = 16384;

// `layers` x `experts` records, each filled with bytes that name it.
struct Bench {
  struct Choice {
    bool verify = true;
    uint32_t depth = 3;
    const char* policy = "lru";  // what LruModel in test_cache.cpp is compared with
    ResidencyLog* log = nullptr;
    std::function<uint64_t()> committed = nullptr;
  };
  Bench(uint32_t layers, uint32_t experts, uint32_t slots, MemoryReaderOptions options = {}, bool verify = true,
        uint32_t depth = 3)
      : Bench(layers, experts, slots, std::move(options), Choice{verify, depth}) {}
  Bench(uint32_t layers, uint32_t experts, uint32_t slots, MemoryReaderOptions options, Choice choice)
      : experts(experts), bytes(layers * experts * kRecord) {
    ExpertCache::Config config;
    for (uint32_t layer = 0; layer < layers; ++layer) {
      config.records.emplace_back();
      for (uint32_t expert = 0; expert < experts; ++expert) {
        const uint64_t offset = (layer * experts + expert) * kRecord;
        uint32_t words[2] = {layer, expert};
        for (uint64_t at = 0; at < kRecord; at += sizeof words) std::memcpy(&bytes[offset + at], words, sizeof words);
        config.records.back().push_back({offset, kRecord, crc32c(&bytes[offset], kRecord), layer + 10});
      }
    }
    memory = std::move(AlignedBuffer::allocate(slots * kRecord)).value();
    config.memory = memory.data();
    config.slots = slots;
    config.slot_bytes = kRecord;
    config.verify_reads = choice.verify;
    config.depth = choice.depth;
    config.policy = choice.policy;
    config.log = choice.log;
    config.committed = choice.committed;
    config.discard = [this](uint64_t offset, uint64_t bytes) { memory.discard(offset, bytes); };
    auto reader = open_memory_reader(bytes, std::move(options));
    cache = std::move(ExpertCache::create(std::move(config), std::move(reader))).value();
  }

  bool is_record(const ExpertRef& ref, uint32_t layer) const {
    return std::memcmp(ref.data, &bytes[(layer * experts + ref.expert) * kRecord], kRecord) == 0;
  }

  // One whole fetch, released expert by expert; false on a wrong or missing expert or an error.
  bool fetch(uint32_t layer, const std::vector<uint32_t>& wanted, Status* status = nullptr,
             const std::vector<uint32_t>& uses = {}, uint32_t tokens = 1) {
    std::vector<int> seen(wanted.size(), 0);
    const uint32_t* chosen_by = uses.empty() ? nullptr : uses.data();
    if (!cache->begin(layer, wanted.data(), wanted.size(), chosen_by, tokens).is_ok()) return false;
    bool right = true;
    std::vector<ExpertRef> batch;
    for (;;) {
      batch.clear();
      Result<bool> more = cache->next(&batch);
      if (!more.is_ok()) {
        if (status) *status = more.status();
        right = false;
        break;
      }
      if (!*more) break;
      if (batch.empty()) right = false;
      for (const ExpertRef& ref : batch) {
        if (ref.index >= wanted.size() || wanted[ref.index] != ref.expert || !is_record(ref, layer)) right = false;
        ++seen[ref.index];
        cache->release(ref);
      }
    }
    cache->end();
    for (int count : seen) right = right && count == 1;
    return right;
  }

  uint32_t experts;
  std::vector<uint8_t> bytes;
  AlignedBuffer memory;
  std::unique_ptr<ExpertCache> cache;
};

inline std::vector<uint32_t> draw(std::mt19937& random, uint32_t experts, uint32_t count) {
  std::vector<uint32_t> all(experts);
  for (uint32_t i = 0; i < experts; ++i) all[i] = i;
  std::shuffle(all.begin(), all.end(), random);
  all.resize(count);
  return all;
}

}  // namespace cache_bench
