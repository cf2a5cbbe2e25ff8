// The io_uring backend: no threads of its own, one system call for all the reads of a layer, finished reads taken from
// shared memory. Each slot is registered when it is first read into, so that its pages are looked up once.
#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <vector>

#include "io/backends.h"
#include "io/fifo.h"
#include "io/record_file.h"
#include "io/ring.h"
#include "util/aligned_buffer.h"

namespace smoe {

#ifdef SMOE_HAVE_URING

namespace {

using Clock = std::chrono::steady_clock;

constexpr uint32_t kEntries = 64;       // reads the kernel holds at once; the rest waits here
constexpr uint32_t kMostSlots = 16384;  // the kernel's limit on registered buffers

class UringReader : public Reader {
 public:
  UringReader(RecordFile& file, const SlotMemory& slots)
      : file_(file), slots_(slots), registered_(std::min(slots.count, kMostSlots), false) {
    stats_.backend = "uring";
    stats_.direct = file_.direct();
  }
  ~UringReader() override {
    while (!waiting_.empty()) waiting_.pop();
    while (in_kernel_ > 0) reap(true);  // the kernel writes into memory that the caller is about to free
  }

  Status start() {
    SMOE_TRY(ring_.open(kEntries));
    fixed_file_ = ring_.register_file(file_.fd()) == 0;
    if (!registered_.empty() && ring_.reserve_buffers(static_cast<uint32_t>(registered_.size())) != 0) {
      registered_.clear();
    }
    return try_one();
  }

  void keep(std::unique_ptr<RecordFile> file) { kept_ = std::move(file); }

  void submit(const ReadRequest& request) override {
    ++in_flight_;
    Status status = file_.check(request);
    uint32_t retries = 0;
    if (broken_ && status.is_ok()) status = read_range(file_, file_.path(), request, file_.alignment(), &retries);
    if (broken_ || !status.is_ok()) return finish(request, std::move(status), retries, Clock::now());
    const uint32_t op = take_op();
    ops_[op] = {Transfer(request, file_.alignment()), Clock::now()};
    waiting_.push(op);
    send();
  }

  void flush() override {
    if (ring_.has_unsent()) enter(false);
  }

  ReadCompletion wait() override {
    if (in_flight_ == 0) return {0, Status(Code::failed, "wait() with no read in flight"), 0};
    flush();
    reap(false);
    while (finished_.empty()) reap(true);
    --in_flight_;
    return finished_.pop();
  }

  bool poll(ReadCompletion* out) override {
    flush();
    if (finished_.empty()) reap(false);
    if (finished_.empty()) return false;
    --in_flight_;
    *out = finished_.pop();
    return true;
  }

  void forget(const void* memory, size_t bytes) override {
    if (registered_.empty()) return;
    const auto begin = reinterpret_cast<uintptr_t>(memory), base = reinterpret_cast<uintptr_t>(slots_.base);
    for (size_t slot = 0; slot < registered_.size(); ++slot) {
      const uintptr_t at = base + slot * slots_.slot_bytes;
      if (!registered_[slot] || at + slots_.slot_bytes <= begin || at >= begin + bytes) continue;
      (void)ring_.set_buffer(static_cast<uint32_t>(slot), nullptr, 0);
      registered_[slot] = false;
      full_ = false;
      --stats_.registered_slots;
    }
  }

  bool changed() const override { return file_.changed(); }
  ReadStats stats() const override { return stats_; }

 private:
  struct Op {
    Transfer transfer;
    Clock::time_point since;
    bool open = true;  // not finished
  };

  // A kernel may offer the ring and refuse the reads.
  Status try_one() {
    Result<AlignedBuffer> memory = AlignedBuffer::allocate(kIoAlignment);
    SMOE_TRY(memory.status());
    submit({0, kIoAlignment, memory->data(), 0});
    const ReadCompletion completion = wait();
    stats_.reads = stats_.bytes = stats_.errors = stats_.retries = 0;
    if (completion.status.code() == Code::corrupt) return Status::ok();  // a file shorter than this is still read
    return completion.status;
  }

  uint32_t take_op() {
    if (free_.empty()) {
      free_.push_back(static_cast<uint32_t>(ops_.size()));
      ops_.emplace_back();
    }
    const uint32_t op = free_.back();
    free_.pop_back();
    return op;
  }

  // Moves what waits into the ring, as far as it has room.
  void send() {
    while (!waiting_.empty() && in_kernel_ < kEntries) {
      io_uring_sqe* entry = ring_.next();
      if (entry == nullptr) return;
      fill(entry, waiting_.pop());
      ++in_kernel_;
    }
  }

  void fill(io_uring_sqe* entry, uint32_t op) {
    const Transfer& transfer = ops_[op].transfer;
    entry->opcode = IORING_OP_READ;
    entry->fd = fixed_file_ ? 0 : file_.fd();
    entry->flags = fixed_file_ ? IOSQE_FIXED_FILE : 0;
    entry->addr = reinterpret_cast<uint64_t>(transfer.buffer());
    entry->len = static_cast<uint32_t>(std::min<size_t>(transfer.length(), size_t{1} << 30));
    entry->off = transfer.offset();
    entry->user_data = op;
    const size_t slot = slot_of(transfer.request());
    if (slot == registered_.size()) return;
    entry->opcode = IORING_OP_READ_FIXED;
    entry->buf_index = static_cast<uint16_t>(slot);
  }

  // The registered slot that holds the whole buffer, registered now if it was not; registered_.size() if there is none.
  size_t slot_of(const ReadRequest& request) {
    const auto at = reinterpret_cast<uintptr_t>(request.buffer) - reinterpret_cast<uintptr_t>(slots_.base);
    const size_t none = registered_.size();
    if (none == 0 || at >= none * slots_.slot_bytes) return none;
    const size_t slot = at / slots_.slot_bytes;
    if (at % slots_.slot_bytes + request.length > slots_.slot_bytes) return none;
    if (registered_[slot]) return slot;
    // Pinned memory is limited (RLIMIT_MEMLOCK): slots beyond the limit are read into as any memory is.
    uint8_t* memory = slots_.base + slot * slots_.slot_bytes;
    if (full_ || ring_.set_buffer(static_cast<uint32_t>(slot), memory, slots_.slot_bytes) != 0) {
      full_ = true;
      return none;
    }
    registered_[slot] = true;
    ++stats_.registered_slots;
    return slot;
  }

  void enter(bool wait) {
    int error;
    do {
      error = ring_.enter(wait);
    } while (error == EINTR);
    // EAGAIN, EBUSY: no room in the kernel just now; again after a completion.
    if (error != 0 && error != EAGAIN && error != EBUSY) give_up(error);
  }

  // The kernel no longer serves the ring: what it holds is lost, what comes is read by ordinary calls.
  void give_up(int error) {
    broken_ = true;
    in_kernel_ = 0;
    for (Op& op : ops_) {
      if (!op.open) continue;
      op.open = false;
      const ReadRequest& request = op.transfer.request();
      finish(
          request,
          {Code::io, "io_uring stopped working under " + file_.path() + ": " + std::strerror(error), "use --io pread"},
          0, op.since);
    }
    while (!waiting_.empty()) waiting_.pop();
  }

  // Takes in what has arrived; with `block` waits for at least one completion first.
  void reap(bool block) {
    if (block) enter(true);
    io_uring_cqe event;
    while (ring_.take(&event)) complete(static_cast<uint32_t>(event.user_data), event.res);
    send();
    flush();
  }

  void complete(uint32_t op, int32_t got) {
    Transfer& transfer = ops_[op].transfer;
    if (!ops_[op].open) return;  // given up before
    --in_kernel_;
    if (transfer.take(got, file_.path())) {
      waiting_.push(op);
      return;
    }
    ops_[op].open = false;
    free_.push_back(op);
    finish(transfer.request(), transfer.status(), transfer.retries(), ops_[op].since);
  }

  void finish(const ReadRequest& request, Status status, uint32_t retries, Clock::time_point since) {
    const auto latency = std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - since);
    stats_.retries += retries;
    if (status.is_ok()) {
      ++stats_.reads;
      stats_.bytes += request.length;
    } else {
      ++stats_.errors;
    }
    finished_.push({request.tag, std::move(status), static_cast<uint32_t>(latency.count())});
  }

  RecordFile& file_;
  std::unique_ptr<RecordFile> kept_;  // the same, once this reader is in use
  const SlotMemory slots_;
  Ring ring_;
  std::vector<bool> registered_;  // [slot]
  bool fixed_file_ = false;
  bool full_ = false;    // no more slots can be registered
  bool broken_ = false;  // see give_up()
  std::vector<Op> ops_;
  std::vector<uint32_t> free_;
  Fifo<uint32_t> waiting_;  // ops for which the ring has no room yet
  Fifo<ReadCompletion> finished_;
  size_t in_flight_ = 0;  // submitted and not yet handed back
  uint32_t in_kernel_ = 0;
  ReadStats stats_;
};

}  // namespace

Result<std::unique_ptr<Reader>> open_uring_reader(std::unique_ptr<RecordFile>& file, const SlotMemory& slots) {
  auto reader = std::make_unique<UringReader>(*file, slots);
  SMOE_TRY(reader->start());
  reader->keep(std::move(file));
  return std::unique_ptr<Reader>(std::move(reader));
}

#else

Result<std::unique_ptr<Reader>> open_uring_reader(std::unique_ptr<RecordFile>&, const SlotMemory&) {
  return Status(Code::io, "no io_uring here: this engine was built without it");
}

#endif

}  // namespace smoe
