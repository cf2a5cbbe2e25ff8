#include "core/upkeep.h"

#include <unistd.h>

#include <algorithm>
#include <numeric>
#include <sstream>

#include "experts/history.h"
#include "util/cgroup.h"
#include "util/sizes.h"

namespace smoe {
namespace {

using std::chrono::seconds;

// Reads in flight while warming: enough to keep a disk busy with whole records, little for a request to wait behind.
constexpr uint32_t kWarmDepth = 2;
constexpr std::chrono::milliseconds kFitEvery{250};
constexpr seconds kSaveEvery{10}, kPause{1};  // a write waits for the disk, so not between two requests in a row

uint64_t resident_bytes(const std::string& root) {
  std::string text;
  if (!read_small_file(root + "/proc/self/statm", &text)) return 0;
  std::istringstream fields(text);
  uint64_t size = 0, resident = 0;
  fields >> size >> resident;
  return resident * static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
}

uint64_t less(uint64_t a, uint64_t b) { return a > b ? a - b : 0; }

// Every layer counts alike, as it does in decoding: of a prompt the last layer is computed for its last row only, and
// its experts would seem hardly used.
void level_layers(const ExpertTable& table, std::vector<float>* counts) {
  std::vector<double> sums(table.layers(), 0);
  for (uint32_t record = 0; record < table.records(); ++record) sums[table.layer_of[record]] += (*counts)[record];
  const double most = *std::max_element(sums.begin(), sums.end());
  for (uint32_t record = 0; record < table.records(); ++record) {
    const double sum = sums[table.layer_of[record]];
    if (sum > 0) (*counts)[record] = static_cast<float>((*counts)[record] * most / sum);
  }
}

}  // namespace

uint32_t slots_that_fit(const Room& room) {
  const uint64_t taken = room.others_bytes + room.spare_bytes;
  int64_t slots = room.touched;
  if (room.free_bytes >= taken) {
    slots += static_cast<int64_t>((room.free_bytes - taken) / room.record_bytes);
  } else {
    slots -= static_cast<int64_t>((taken - room.free_bytes + room.record_bytes - 1) / room.record_bytes);
  }
  return static_cast<uint32_t>(std::clamp<int64_t>(slots, room.least, room.planned));
}

Upkeep::Upkeep(ExpertCache& cache, const Plan& plan, Config config, Log log)
    : cache_(cache), plan_(plan), config_(std::move(config)), log_(std::move(log)), told_slots_(plan.cache_slots) {
  const ExpertTable& table = cache_.residency().table();
  order_.resize(table.records());
  std::iota(order_.begin(), order_.end(), 0u);
  const auto within = [&](uint32_t record) { return record - table.first_record[table.layer_of[record]]; };
  std::stable_sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) { return within(a) < within(b); });
  read_history();
  fit_memory();
}

void Upkeep::read_history() {
  if (config_.history.empty()) return;
  const uint32_t records = cache_.residency().table().records();
  Result<std::vector<float>> counts = smoe::read_history(config_.history, config_.fingerprint, records);
  if (!counts.is_ok()) log_("warning: " + counts.status().message() + "; starting without it");
  if (!counts.is_ok() || counts->empty()) return;
  level_layers(cache_.residency().table(), &*counts);
  cache_.seed(*counts);
  std::stable_sort(order_.begin(), order_.end(), [&](uint32_t a, uint32_t b) { return (*counts)[a] > (*counts)[b]; });
  known_ = static_cast<size_t>(std::count_if(counts->begin(), counts->end(), [](float count) { return count > 0; }));
}

bool Upkeep::idle() {
  const auto now = std::chrono::steady_clock::now();
  if (now - last_fit_ >= kFitEvery) fit_memory();
  if (unsaved_ && now - last_save_ >= kSaveEvery && now - last_request_ >= kPause) save();
  return config_.warm && warm(now - last_request_ >= kPause ? order_.size() : known_);
}

// The most used of what is not there, into slots that are free. What nobody is known to have used is better there than
// an empty slot, and takes nothing from a request: it is the first to go.
bool Upkeep::warm(size_t end) {
  const ExpertTable& table = cache_.residency().table();
  while (slots_to_fill(end)) {
    const uint32_t record = order_[next_], layer = table.layer_of[record];
    if (cache_.settle(false) >= kWarmDepth) {
      cache_.settle(true);
      return true;  // a request may have come meanwhile
    }
    ++next_;
    warmed_ += cache_.load(layer, record - table.first_record[layer], false);
  }
  return cache_.settle(true) > 0;
}

void Upkeep::fit_memory() {
  last_fit_ = std::chrono::steady_clock::now();
  if (plan_.record_bytes == 0) return;
  const FreeMemory free = read_free_memory(config_.memory_root);
  if (free.bytes == 0) return;  // unknown
  Room room;
  room.record_bytes = plan_.record_bytes;
  room.free_bytes = free.bytes;
  room.touched = cache_.touched_slots();
  const uint64_t slots_now = room.touched * plan_.record_bytes;
  const uint64_t beside = less(taken_bytes(plan_), plan_.cache_slots * plan_.record_bytes);
  const uint64_t resident = resident_bytes(config_.memory_root);
  room.others_bytes = less(beside, less(resident, slots_now));
  // A group of its own the engine may fill to the limit; with others in it something is left for them.
  room.spare_bytes = free.group_limit_bytes == 0
                         ? plan_.physical_ram_bytes / 64
                         : std::min(free.group_limit_bytes / 32, less(free.group_used_bytes, resident) / 8);
  room.least = static_cast<uint32_t>(plan_.min_expert_cache_bytes / plan_.record_bytes) + plan_.chunk_slots;
  room.planned = plan_.cache_slots;
  const uint32_t slots = slots_that_fit(room), open = cache_.open_slots();
  if (slots == open) return;
  if (slots > open && slots < plan_.cache_slots && slots - open < open / 16 + 2) return;  // not for every free page
  cache_.resize(slots);
  next_ = 0;  // what has lost its slot is warmed again when there is room
  if (slots == plan_.cache_slots || less(told_slots_, slots) + less(slots, told_slots_) > plan_.cache_slots / 20) {
    told_slots_ = slots;
    log_("notice: the expert cache has " + std::to_string(slots) + " of its " + std::to_string(plan_.cache_slots) +
         " slots now: " + show_bytes(free.bytes) + " of memory are free");
  }
}

void Upkeep::save() {
  last_save_ = std::chrono::steady_clock::now();
  if (!unsaved_ || config_.history.empty()) return;
  unsaved_ = false;
  const Status status = write_history(config_.history, config_.fingerprint, cache_.residency().counts());
  if (status.is_ok() || told_trouble_) return;
  told_trouble_ = true;
  log_("warning: " + status.message() + "; the next start will be a cold one");
}

}  // namespace smoe
