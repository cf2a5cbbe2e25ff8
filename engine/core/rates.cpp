#include "core/rates.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <set>
#include <vector>

#include "kernels/kernels.h"
#include "quant/quant.h"
#include "util/aligned_buffer.h"
#include "util/memory_probe.h"
#include "util/threads.h"

namespace smoe {
namespace {

using Clock = std::chrono::steady_clock;

constexpr uint64_t kWeights = 96u << 20;  // bytes: more than a last-level cache holds
constexpr size_t kTile = 32;              // tokens that share a weight in prefill, about what an expert gets
constexpr uint64_t kProbed = 192u << 20;  // of the vault: a cache misses the same records again and again
constexpr uint64_t kDenseRead = 1 << 20;

double since(Clock::time_point start) { return std::chrono::duration<double>(Clock::now() - start).count(); }

// The shortest of as many passes as fit into `seconds`, at least three: a neighbour's burst does not count.
template <class F>
double shortest(double seconds, F&& pass) {
  double best = 1e9;
  const auto begin = Clock::now();
  for (int i = 0; i < 3 || since(begin) < seconds; ++i) {
    const auto start = Clock::now();
    pass();
    best = std::min(best, since(start));
  }
  return best;
}

// A matrix of one encoding, larger than the caches, times one token and times a tile of them.
class Product {
 public:
  Product(const Kernels& kernels, ThreadPool& pool, Encoding e, uint64_t cols, const AlignedBuffer& weights)
      : kernels_(kernels), pool_(pool), cols_(cols) {
    const Layout layout = e <= Encoding::bf16 ? Layout::rows : Layout::panel16;
    rows_ = kWeights / row_bytes(e, cols) / kRows * kRows;
    matrix_ = {e, layout, rows_, cols, weights.data()};
    const ActFormat format = act_format(e);
    x_.assign(kTile * cols, 0.5f);
    acts_.assign(kTile * std::max<size_t>(64, act_row_bytes(format, cols)) + 64, 0);
    y_.resize(kTile * rows_);
    if (format != ActFormat::none) kernels.quantize_act(format, x_.data(), kTile, cols, cols, aligned());
  }
  uint64_t bytes() const { return rows_ * row_bytes(matrix_.encoding, cols_); }
  // `part` of the rows.
  void run(size_t tokens, double part) {
    const size_t tasks = std::max<size_t>(1, static_cast<size_t>(static_cast<double>(rows_ / kRows) * part));
    pool_.run(tasks, [&](size_t task, size_t) {
      const size_t r0 = task * kRows, r1 = r0 + kRows;
      if (act_format(matrix_.encoding) != ActFormat::none) {
        kernels_.matmul_q8(matrix_, aligned(), nullptr, tokens, r0, r1, y_.data(), rows_);
      } else {
        kernels_.matmul_f32(matrix_, x_.data(), cols_, nullptr, tokens, r0, r1, y_.data(), rows_);
      }
    });
  }

 private:
  static constexpr size_t kRows = 64;  // of one task
  uint8_t* aligned() { return acts_.data() + (64 - reinterpret_cast<uintptr_t>(acts_.data()) % 64) % 64; }

  const Kernels& kernels_;
  ThreadPool& pool_;
  uint64_t rows_ = 0, cols_;
  Matrix matrix_;
  std::vector<float> x_, y_;
  std::vector<uint8_t> acts_;
};

std::set<Encoding> encodings_of(const ModelSpec& model) {
  std::set<Encoding> all;
  for (const auto& [name, tensor] : model.tensors)
    if (tensor.rows > 1) all.insert(tensor.encoding);
  for (const LayerSpec& layer : model.layers) {
    if (!layer.ffn.is_moe()) continue;
    const ExpertEncodings& e = layer.ffn.encodings;
    all.insert({e.gate, e.up, e.down});
  }
  return all;
}

Status measure_products(const ModelSpec& model, const Kernels& kernels, ThreadPool& pool, double seconds, Rates* r) {
  SMOE_ASSIGN(AlignedBuffer weights, AlignedBuffer::allocate(kWeights));
  std::memset(weights.data(), 0x11, kWeights);  // untouched pages would all be the one page of zeros
  const uint64_t cols = std::max<uint64_t>(256, model.hidden / 256 * 256);
  const std::set<Encoding> encodings = encodings_of(model);
  const double each = seconds / static_cast<double>(2 * encodings.size());
  for (const Encoding e : encodings) {
    Product product(kernels, pool, e, cols, weights);
    const auto bytes = static_cast<double>(product.bytes());
    r->decode_bytes_s[e] = bytes / shortest(each, [&] { product.run(1, 1); });
    const double part = 1.0 / 16;  // a tile's products are bound by arithmetic
    r->prefill_bytes_s[e] = bytes * part * kTile / shortest(each, [&] { product.run(kTile, part); });
  }
  const size_t loops = 200;
  const double all = shortest(0, [&] {
    for (size_t i = 0; i < loops; ++i) pool.run(pool.size() * 4, [](size_t, size_t) {});
  });
  r->hand_out_s = all / loops;
  return Status::ok();
}

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
  if (o.read_mode == ReadMode::direct) probe.mode = DirectMode::direct;
  if (o.read_mode == ReadMode::buffered) probe.mode = DirectMode::buffered;
  if (o.io == IoBackend::uring) probe.kind = ReaderKind::uring;
  if (o.io == IoBackend::pread) probe.kind = ReaderKind::pread;
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
  SMOE_ASSIGN(const Kernels* kernels, choose_kernels(options.isa));
  const uint32_t threads = options.plan.threads != 0 ? options.plan.threads : usable_threads();
  SMOE_TRY(measure_disk(model, options, seconds / 2, &rates));
  SMOE_ASSIGN(rates.memory_bytes_s, probe_memory(threads, seconds / 8));
  ThreadPool pool(threads);
  SMOE_TRY(measure_products(model, *kernels, pool, seconds / 4, &rates));
  return rates;
}

}  // namespace smoe
