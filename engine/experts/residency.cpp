#include "experts/residency.h"

#include <algorithm>

namespace smoe {

Residency::Residency(ExpertTable table, uint32_t slots, std::unique_ptr<Policy> policy, uint64_t random_seed)
    : table_(std::move(table)),
      policy_(std::move(policy)),
      usage_(table_, kHistoryHalfLife),
      slots_(slots),
      random_(random_seed),
      asked_in_(table_.records(), 0),
      place_(table_.records(), kNone),
      held_of_(table_.layers(), 0),
      guessed_(table_.records(), false) {
  held_.reserve(table_.records());
  candidates_.reserve(table_.records());
  spared_.reserve(table_.records());
  answer_.hits.reserve(table_.records());
  answer_.misses.reserve(table_.records());
  answer_.evicted.reserve(table_.records());
  ranks_.resize(table_.layers());
  for (uint32_t layer = 0; layer < table_.layers(); ++layer)
    ranks_[layer].records.reserve(table_.first_record[layer + 1] - table_.first_record[layer]);
}

const Residency::Fetch& Residency::fetch(uint32_t layer, const uint32_t* experts, const uint32_t* uses, size_t count,
                                         uint32_t tokens) {
  if (log_ != nullptr) log_->fetch(layer, experts, uses, count, tokens);
  ++fetch_;
  answer_.hits.clear();
  answer_.misses.clear();
  answer_.evicted.clear();
  policy_->turn(layer, tokens);
  usage_.turn(layer, tokens);
  ranks_[layer].stale = true;
  const uint32_t first = table_.first_record[layer];
  forget_guesses(first, table_.first_record[layer + 1]);
  for (uint32_t i = 0; i < count; ++i) {
    asked_in_[first + experts[i]] = fetch_;
    (holds(first + experts[i]) ? answer_.hits : answer_.misses).push_back(i);
  }
  for (const auto* list : {&answer_.hits, &answer_.misses}) {
    for (uint32_t i : *list) {
      policy_->use(first + experts[i], uses != nullptr ? uses[i] : 1);
      usage_.use(first + experts[i], uses != nullptr ? uses[i] : 1);
    }
  }
  answer_.passing = count > slots_ ? static_cast<uint32_t>(count) - slots_ : 0;
  const uint32_t hits = static_cast<uint32_t>(answer_.hits.size());
  const uint32_t passing_hits = std::min(answer_.passing, hits), passing_misses = answer_.passing - passing_hits;
  const uint32_t stay = static_cast<uint32_t>(answer_.misses.size()) - passing_misses;
  for (uint32_t i = 0; i < passing_hits; ++i) let_go(first + experts[answer_.hits[i]]);
  const uint32_t spoken_for = hits - passing_hits + static_cast<uint32_t>(guesses_.size());
  if (spoken_for + stay > slots_) forget_guesses(0, table_.records());
  if (held() + stay > slots_) make_room(held() + stay - slots_, &answer_.evicted);
  for (size_t i = passing_misses; i < answer_.misses.size(); ++i) hold(first + experts[answer_.misses[i]]);
  return answer_;
}

bool Residency::insert(uint32_t record, bool may_evict, uint32_t* evicted) {
  if (holds(record) || (held() >= slots_ && !may_evict)) return false;
  if (may_evict && 2 * guesses_.size() >= slots_) return false;
  if (log_ != nullptr) log_->insert(record, may_evict);
  if (held() >= slots_) {
    answer_.evicted.clear();
    make_room(1, &answer_.evicted);
    if (answer_.evicted.empty()) return false;  // all residents belong to the current fetch, or are guesses
    if (evicted != nullptr) *evicted = answer_.evicted.front();
  }
  hold(record);
  if (may_evict) {
    guesses_.push_back(record);
    guessed_[record] = true;
  }
  return true;
}

// Those among records [first, last) are like any other from now on.
void Residency::forget_guesses(uint32_t first, uint32_t last) {
  std::erase_if(guesses_, [&](uint32_t record) {
    if (record < first || record >= last) return false;
    guessed_[record] = false;
    return true;
  });
}

void Residency::drop(uint32_t record) {
  if (!holds(record)) return;
  if (log_ != nullptr) log_->drop(record);
  let_go(record);
}

void Residency::resize(uint32_t slots, std::vector<uint32_t>* evicted) {
  if (slots == slots_) return;
  if (log_ != nullptr) log_->resize(slots);
  slots_ = slots;
  ++fetch_;  // nothing is protected
  forget_guesses(0, table_.records());
  if (held() > slots_) make_room(held() - slots_, evicted);
}

void Residency::seed(const std::vector<float>& counts) {
  if (log_ != nullptr) log_->seed(counts);
  for (uint32_t record = 0; record < table_.records(); ++record) {
    policy_->seed(record, counts[record]);
    usage_.add(record, counts[record]);
  }
  for (Ranks& ranks : ranks_) ranks.stale = true;
}

std::vector<float> Residency::counts() const {
  std::vector<float> counts(table_.records());
  for (uint32_t record = 0; record < counts.size(); ++record) counts[record] = static_cast<float>(usage_.count(record));
  return counts;
}

void Residency::hold(uint32_t record) {
  place_[record] = held();
  held_.push_back(record);
  ++held_of_[table_.layer_of[record]];
  ranks_[table_.layer_of[record]].stale = true;
}

void Residency::let_go(uint32_t record) {
  if (guessed_[record]) forget_guesses(record, record + 1);
  const uint32_t last = held_.back();
  held_[place_[record]] = last;
  place_[last] = place_[record];
  held_.pop_back();
  place_[record] = kNone;
  --held_of_[table_.layer_of[record]];
}

void Residency::evict(uint32_t record, std::vector<uint32_t>* evicted) {
  let_go(record);
  if (evicted != nullptr) evicted->push_back(record);
}

void Residency::make_room(uint32_t count, std::vector<uint32_t>* evicted) {
  if (policy_->sample() != 0) {
    compare_sampled(count, evicted);
  } else {
    compare_all(count, evicted);
  }
}

void Residency::rank(uint32_t layer) {
  Ranks& ranks = ranks_[layer];
  ranks.next = 0;
  if (!ranks.stale && policy_->sorted_by_layer()) return;
  ranks.stale = false;
  ranks.records.clear();
  candidates_.clear();
  for (uint32_t record = table_.first_record[layer]; record < table_.first_record[layer + 1]; ++record)
    if (holds(record)) candidates_.push_back({policy_->worth(record), record});
  std::sort(candidates_.begin(), candidates_.end(),
            [](const Candidate& a, const Candidate& b) { return goes_later(b, a); });
  for (const Candidate& candidate : candidates_) ranks.records.push_back(candidate.record);
}

uint32_t Residency::next_of(uint32_t layer) {
  Ranks& ranks = ranks_[layer];
  while (ranks.next < ranks.records.size()) {
    const uint32_t record = ranks.records[ranks.next++];
    if (holds(record) && !protected_now(record)) return record;
  }
  return kNone;
}

void Residency::compare_all(uint32_t count, std::vector<uint32_t>* evicted) {
  for (uint32_t layer = 0; layer < table_.layers(); ++layer) rank(layer);
  candidates_.clear();  // the next of each layer
  const auto enter = [&](uint32_t layer) {
    const uint32_t record = next_of(layer);
    if (record != kNone) candidates_.push_back({policy_->worth(record), record});
    return record != kNone;
  };
  for (uint32_t layer = 0; layer < table_.layers(); ++layer) enter(layer);
  std::make_heap(candidates_.begin(), candidates_.end(), goes_later);
  const double even = static_cast<double>(slots_) / std::max(1u, table_.layers());
  const auto floor = static_cast<uint32_t>(even * policy_->floor_share());
  spared_.clear();
  while (count > 0 && !candidates_.empty()) {
    std::pop_heap(candidates_.begin(), candidates_.end(), goes_later);
    const uint32_t record = candidates_.back().record, layer = table_.layer_of[record];
    candidates_.pop_back();
    if (enter(layer)) std::push_heap(candidates_.begin(), candidates_.end(), goes_later);
    if (held_of_[layer] <= floor) {
      spared_.push_back(record);
      continue;
    }
    evict(record, evicted);
    --count;
  }
  for (size_t i = 0; i < spared_.size() && count > 0; ++i, --count) evict(spared_[i], evicted);
}

void Residency::compare_sampled(uint32_t count, std::vector<uint32_t>* evicted) {
  const uint32_t sample = policy_->sample();
  for (; count > 0; --count) {
    Candidate least{0, kNone};
    uint32_t drawn = 0;
    // Protected residents do not count; where nearly all are protected the draw gives up and compares all.
    for (uint32_t tries = 0; drawn < sample && tries < 4 * sample; ++tries) {
      const uint32_t record = held_[random(held())];
      if (protected_now(record)) continue;
      ++drawn;
      const Candidate candidate{policy_->worth(record), record};
      if (least.record == kNone || goes_later(least, candidate)) least = candidate;
    }
    if (least.record == kNone) return compare_all(count, evicted);
    evict(least.record, evicted);
  }
}

// splitmix64, the upper half scaled: the same numbers on every machine.
uint32_t Residency::random(uint32_t below) {
  random_ += 0x9e3779b97f4a7c15u;
  uint64_t z = random_;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
  z ^= z >> 31;
  return static_cast<uint32_t>((z >> 32) * below >> 32);
}

}  // namespace smoe
