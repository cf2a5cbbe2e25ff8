#include "core/rates.h"

#include <algorithm>
#include <filesystem>

#include "core/reads.h"
#include "util/memory_probe.h"
#include "util/threads.h"

namespace smoe {
namespace {

constexpr uint64_t kProbed = 192u << 20;  // of the vault: a cache misses the same records again and again
constexpr uint64_t kDenseRead = 1 << 20;

Status measure_disk(const ModelSpec& model, const EngineOptions& o, double seconds, Rates* r) {
  uint64_t record = 0;
  uint32_t top_k = 1;
  for (const LayerSpec& layer : model.layers) {
    if (!layer.ffn.is_moe()) continue;
    record = std::max(record, record_layout(layer.ffn, model.hidden).length);
    top_k = std::max(top_k, layer.ffn.top_k);
  }
  ProbeOptions probe;
  probe.region_bytes = kProbed;
  probe.mode = reads_of(o).mode;
  probe.kind = reads_of(o).kind;
  probe.seconds = seconds / 3;
  // A dense model has no records: what is read is its trunk, once, when the engine starts.
  const bool dense = record == 0;
  const std::string& file = dense ? o.scout : o.vault;
  if (dense) {
    std::error_code error;
    const uintmax_t size = std::filesystem::file_size(file, error);
    if (error) return Status(Code::io, "cannot open " + file + ": " + error.message());
    record = std::min<uint64_t>(kDenseRead, size / kIoAlignment * kIoAlignment);
    if (record == 0) return Status::ok();  // nothing to speak of
  }
  SMOE_ASSIGN(const DiskSpeed several, probe_disk(file, record, probe));
  r->disk_read_bytes_s = several.read_bytes_s;
  r->direct_io = several.direct;
  if (dense) return Status::ok();
  // As the misses of one layer come: all at once, and awaited before the next.
  const auto time_of = [&](uint32_t records) -> Result<double> {
    probe.depth = records;
    probe.batches = true;
    SMOE_ASSIGN(const DiskSpeed speed, probe_disk(o.vault, record, probe));
    return static_cast<double>(records * record) / speed.read_bytes_s;
  };
  const uint32_t many = std::max(2u, std::min(8u, top_k));
  SMOE_ASSIGN(const double one, time_of(1));
  SMOE_ASSIGN(const double all, time_of(many));
  r->read_each_s = std::max((all - one) / (many - 1), all / many / 2);
  r->read_first_s = std::max(0.0, all - many * r->read_each_s);
  return Status::ok();
}

}  // namespace

Result<Rates> measure_rates(const ModelSpec& model, const EngineOptions& options, double seconds) {
  Rates rates;
  const uint32_t threads = options.plan.threads != 0 ? options.plan.threads : usable_threads();
  SMOE_TRY(measure_disk(model, options, seconds * 3 / 4, &rates));
  SMOE_ASSIGN(rates.memory_bytes_s, probe_memory(threads, seconds / 4));
  return rates;
}

}  // namespace smoe
